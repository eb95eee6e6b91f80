//! The Helm charts virt-operator and kubevirt with real Helm 3 and Helm 4.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    process::Command,
    time::{Instant, sleep},
};
use vitivirt_api::IMAGE_NAME;
use vitivirt_lab::{
    Helm, Lab, LabOptions, OwnProgram,
    harness::{SharedLabs, Suite},
    manifests,
};

use crate::support::{NAMESPACE, TIMEOUT, program, wait_until_available};

/// The release and the chart of the operator, and those of the KubeVirt resource.
const OPERATOR: (&str, &str) = ("virt-operator", "charts/virt-operator");
const RESOURCE: (&str, &str) = ("kubevirt", "charts/kubevirt");

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        the_chart_renders_the_printed_manifests,
        helm_uninstalls_in_both_orders_and_keeps_kubevirt,
    );
}

/// Each value with another one than its default.
const CHANGED: [(&str, &str); 25] = [
    ("image.repository", r#""mirror.example.com/kubevirt-operator""#),
    ("image.tag", r#""other""#),
    ("image.digest", r#""sha256:0000000000000000000000000000000000000000000000000000000000000000""#),
    ("image.pullPolicy", r#""Always""#),
    ("imagePullSecrets", r#"[{"name":"registry"}]"#),
    ("kubevirtImage", r#""mirror.example.com/virt-operator:v1.8.4""#),
    ("replicaCount", "3"),
    ("resources", r#"{"requests":{"memory":"80Mi"}}"#),
    ("nodeSelector", r#"{"example.com/infra":"true"}"#),
    ("tolerations", r#"[{"key":"example.com/infra","operator":"Exists"}]"#),
    ("affinity", r#"{"nodeAffinity":{}}"#),
    ("podAnnotations", r#"{"example.com/a":"b"}"#),
    ("podLabels", r#"{"example.com/a":"b"}"#),
    ("podSecurityContext", r#"{"runAsUser":1000}"#),
    ("securityContext", r#"{"privileged":true}"#),
    ("extraEnv", r#"[{"name":"A","value":"b"}]"#),
    ("logVerbosity", "4"),
    ("prometheusRule.enabled", "true"),
    ("prometheusRule.labels", r#"{"release":"prometheus"}"#),
    ("podDisruptionBudget.enabled", "true"),
    ("podDisruptionBudget.minAvailable", "2"),
    ("priorityClass.create", "false"),
    ("crds.enabled", "false"),
    ("crds.keep", "false"),
    // It has an effect only in a cluster with another virt-operator.
    ("takeOver", "true"),
];

async fn the_chart_renders_the_printed_manifests(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let printed = Command::new(program()).arg("manifests").output().await?;
    let mut printed = by_name(manifests::parse(&String::from_utf8(printed.stdout)?)?);
    // Helm creates the namespace.
    printed.remove("Namespace kubevirt").context("the manifests have no namespace")?;
    for helm in Helm::ALL {
        let rendered = by_name(manifests::parse(&render(&lab, helm, &[]).await?)?);
        let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
        ensure!(names(&rendered) == names(&printed), "{:?} and not {:?}", names(&rendered), names(&printed));
        for (name, object) in &rendered {
            ensure!(Some(object) == printed.get(name), "{helm:?}: {name}: {object} and not {:?}", printed.get(name));
        }
    }
    let default = render(&lab, Helm::V3, &[]).await?;
    let enabled = ["--set", "prometheusRule.enabled=true", "--set", "podDisruptionBudget.enabled=true"];
    let with_all = render(&lab, Helm::V3, &enabled).await?;
    for (path, value) in CHANGED {
        // These have an effect only on an object that another value enables.
        let of_optional = ["prometheusRule.labels", "podDisruptionBudget.minAvailable"].contains(&path);
        let (before, common) = if of_optional { (&with_all, enabled.as_slice()) } else { (&default, &[][..]) };
        let change = format!("{path}={value}");
        let changed = render(&lab, Helm::V3, &[common, &["--set-json", &change]].concat()).await?;
        ensure!((changed != *before) == (path != "takeOver"), "{path}");
    }
    check_alerts(&with_all)?;
    let values = std::fs::read_to_string(repository_path("charts/virt-operator/values.yaml"))?;
    let documented = values.lines().filter(|line| line.trim_start().starts_with("# -- ")).count();
    ensure!(documented == CHANGED.len(), "{documented} values, {} of them checked", CHANGED.len());
    Ok(())
}

/// The alerts of the chart are those of config/.
fn check_alerts(rendered: &str) -> Result<()> {
    let file = std::fs::read_to_string(repository_path("config/virt-operator/alerts.yaml"))?;
    let specs = |text: &str| -> Result<Vec<Value>> {
        let objects = manifests::parse(text)?.into_iter();
        let rules = objects.filter(|object| object.get("kind").is_some_and(|kind| kind == "PrometheusRule"));
        Ok(rules.filter_map(|rule| rule.get("spec").cloned()).collect())
    };
    let (chart, config) = (specs(rendered)?, specs(&file)?);
    ensure!(chart == config && config.len() == 1, "{chart:?} and not {config:?}");
    Ok(())
}

async fn helm_uninstalls_in_both_orders_and_keeps_kubevirt(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(Lab::start(LabOptions {
        own_programs: vec![OwnProgram { image: IMAGE_NAME.to_owned(), file: program() }],
        ..LabOptions::default()
    }))
    .await?;
    for helm in Helm::ALL {
        let early = install(&lab, helm, RESOURCE, &["--create-namespace"]).await;
        check_refused(early, "install the chart virt-operator first")?;
    }
    install(&lab, Helm::V3, OPERATOR, &["--create-namespace"]).await?;
    let level = "pod-security.kubernetes.io/enforce=privileged";
    lab.kubectl(&["label", "namespace", NAMESPACE, level, "--overwrite"]).await?;
    install(&lab, Helm::V3, RESOURCE, &[]).await?;
    wait_until_available(&lab).await?;
    let another =
        lab.helm(Helm::V4, &["install", "another", &repository_path(RESOURCE.1), "--namespace=default"]).await;
    check_refused(another, "a cluster can have only one")?;
    create_vm(&lab).await?;
    let before = kept(&lab).await?;

    let setting = ["--set", "spec.configuration.developerConfiguration.featureGates={Snapshot}"];
    helm(&lab, Helm::V4, "upgrade", RESOURCE, &[&repository_path(RESOURCE.1), setting[0], setting[1]]).await?;
    wait_until_available(&lab).await?;
    roll_back_the_operator(&lab).await?;

    for (version, order) in [(Helm::V3, [RESOURCE, OPERATOR]), (Helm::V4, [OPERATOR, RESOURCE])] {
        for release in order {
            helm(&lab, version, "uninstall", release, &[]).await?;
        }
        let operator = lab.kubectl(&["get", "deployment", "virt-operator", "-n", NAMESPACE]).await;
        ensure!(operator.is_err(), "the operator is not uninstalled");
        ensure!(kept(&lab).await? == before, "something was deleted or replaced");
        install(&lab, version, OPERATOR, &[]).await?;
        wait_until_webhooks_respond(&lab).await?;
        install(&lab, version, RESOURCE, &[]).await?;
        wait_until_available(&lab).await?;
    }
    ensure!(kept(&lab).await? == before, "something was deleted or replaced");

    lab.kubectl(&["delete", "kubevirts.kubevirt.io", "--all", "-n", NAMESPACE, "--timeout=120s"]).await?;
    for release in [RESOURCE, OPERATOR] {
        helm(&lab, Helm::V4, "uninstall", release, &[]).await?;
    }
    let annotation = "meta.helm.sh/release-name-";
    lab.kubectl(&["annotate", "crd", "kubevirts.kubevirt.io", annotation]).await?;
    check_refused(install(&lab, Helm::V4, OPERATOR, &[]).await, "another virt-operator may have installed KubeVirt")?;

    // The two files for users without Helm.
    lab.kubectl(&["delete", "crd", "kubevirts.kubevirt.io", "--timeout=60s"]).await?;
    for file in ["kubevirt-operator", "kubevirt-cr"] {
        lab.kubectl(&["apply", "-f", &repository_path(&format!("config/virt-operator/{file}.yaml"))]).await?;
    }
    wait_until_available(&lab).await
}

/// The first revision was installed by Helm 3.
async fn roll_back_the_operator(lab: &Lab) -> Result<()> {
    let arguments = "--output=jsonpath={.spec.template.spec.containers[0].args}";
    let arguments = ["get", "deployment", "virt-operator", "--namespace", NAMESPACE, arguments];
    let before = lab.kubectl(&arguments).await?;
    let chart = repository_path(OPERATOR.1);
    helm(lab, Helm::V3, "upgrade", OPERATOR, &[&chart, "--set", "logVerbosity=4"]).await?;
    ensure!(lab.kubectl(&arguments).await? != before, "the upgrade did not change a value");
    helm(lab, Helm::V3, "rollback", OPERATOR, &["1"]).await?;
    ensure!(lab.kubectl(&arguments).await? == before, "the rollback did not change the value back");
    wait_until_webhooks_respond(lab).await
}

async fn helm(lab: &Lab, helm: Helm, command: &str, release: (&str, &str), arguments: &[&str]) -> Result<String> {
    let options = ["--namespace", NAMESPACE, "--wait", "--timeout=120s"];
    Box::pin(lab.helm(helm, &[&[command, release.0], arguments, options.as_slice()].concat())).await
}

async fn install(lab: &Lab, version: Helm, release: (&str, &str), arguments: &[&str]) -> Result<String> {
    helm(lab, version, "install", release, &[&[repository_path(release.1).as_str()], arguments].concat()).await
}

async fn render(lab: &Lab, helm: Helm, arguments: &[&str]) -> Result<String> {
    let chart = repository_path(OPERATOR.1);
    let command = ["template", OPERATOR.0, &chart, "--namespace", NAMESPACE];
    lab.helm(helm, &[command.as_slice(), arguments].concat()).await
}

fn check_refused(result: Result<String>, text: &str) -> Result<()> {
    match result {
        Ok(_) => bail!("not refused: {text:?} expected"),
        Err(error) => {
            let error = format!("{error:#}");
            ensure!(error.contains(text), "{text:?} expected: {error}");
            Ok(())
        }
    }
}

/// A VM whose guest runs.
async fn create_vm(lab: &Lab) -> Result<()> {
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": "vm", "namespace": "default"},
        "spec": {
            "runStrategy": "Always",
            "template": {"spec": {"domain": {"devices": {}, "memory": {"guest": "128Mi"}}}},
        },
    });
    manifests::create(&lab.client(), &[vm]).await?;
    lab.kubectl(&["wait", "virtualmachines/vm", "--for=condition=Ready", "--timeout=120s"]).await.map(drop)
}

/// The UIDs of what must stay without the operator.
async fn kept(lab: &Lab) -> Result<Vec<String>> {
    let uid = "--output=jsonpath={.metadata.uid}";
    let mut uids = Vec::new();
    for (kind, name, namespace) in [
        ("virtualmachine", "vm", "default"),
        ("virtualmachineinstance", "vm", "default"),
        ("kubevirts.kubevirt.io", "kubevirt", NAMESPACE),
        ("deployment", "virt-api", NAMESPACE),
        ("customresourcedefinition", "kubevirts.kubevirt.io", "default"),
        ("priorityclass", "kubevirt-cluster-critical", "default"),
    ] {
        uids.push(lab.kubectl(&["get", kind, name, "--namespace", namespace, uid]).await?);
    }
    Ok(uids)
}

/// Waits until the webhook of the new operator accepts changes of the KubeVirt resource.
async fn wait_until_webhooks_respond(lab: &Lab) -> Result<()> {
    let change =
        ["annotate", "kubevirts.kubevirt.io", "kubevirt", "example.com/a=b", "--dry-run=server", "-n", NAMESPACE];
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = lab.kubectl(&change).await {
        ensure!(Instant::now() < deadline, "{error:#}");
        // No watch reports when the API server reaches a webhook, so this polls.
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// The objects without the labels and annotations that only a chart has.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let of_chart =
        ["app.kubernetes.io/part-of", "app.kubernetes.io/instance", "helm.sh/chart", "helm.sh/resource-policy"];
    let text = |object: &Value, pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or("").to_owned();
    let mut named = BTreeMap::new();
    for mut object in objects {
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            for field in ["labels", "annotations"] {
                let Some(Value::Object(map)) = metadata.get_mut(field) else { continue };
                map.retain(|key, _| !of_chart.contains(&key.as_str()));
                if map.is_empty() {
                    metadata.remove(field);
                }
            }
        }
        named.insert(format!("{} {}", text(&object, "/kind"), text(&object, "/metadata/name")), object);
    }
    named
}

fn repository_path(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name).display().to_string()
}
