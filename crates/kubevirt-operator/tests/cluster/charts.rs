//! The Helm chart with real Helm 3 and Helm 4. The operator runs as a pod of the chart's Deployment.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, bail, ensure};
use kubevirt_operator::rbac;
use serde_json::{Value, json};
use vitivirt_lab::{
    Helm, Lab,
    harness::{SharedLabs, Suite},
    manifests,
};
use vitivirt_runtime::tls::PemKeyPair;

use crate::packages::{lab_for_pods, repository_path, run_examples, wait_until_all_run};

const CHARTS: [&str; 3] = ["charts/kubevirt-operator", "charts/virt-operator", "charts/kubevirt"];
const CHART: &str = CHARTS[0];
const RELEASE: &str = "kubevirt-operator";
const CHANGED_VALUES: &str = "crates/kubevirt-operator/tests/cluster/changed_values.yaml";
/// Values that another changed value would hide, or would be invalid with. Each is changed alone: the path, other
/// settings, and the change.
const CHANGED_ALONE: [(&str, &str, &str); 5] = [
    ("/metrics/service", "replicaCount=1", "metrics.service=false"),
    (
        "/image/digest",
        "replicaCount=1",
        "image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000",
    ),
    ("/serviceAccount/create", "serviceAccount.name=other", "serviceAccount.create=false"),
    ("/crds/enabled", "replicaCount=1", "crds.enabled=false"),
    ("/leaderElection", "replicaCount=1", "leaderElection=false"),
];
/// Values that do not fit each other, or the ports of the program, and the value that the error names.
const REFUSED: [(&str, &str); 6] = [
    ("replicaCount=2,leaderElection=false", "replicaCount"),
    ("metrics.port=8081", "metrics.port"),
    ("metrics.port=8082", "metrics.port"),
    ("podDisruptionBudget.enabled=true", "podDisruptionBudget.minAvailable"),
    (
        "podDisruptionBudget.enabled=true,replicaCount=2,podDisruptionBudget.minAvailable=2",
        "podDisruptionBudget.minAvailable",
    ),
    (
        "podDisruptionBudget.enabled=true,replicaCount=2,podDisruptionBudget.minAvailable=100%",
        "podDisruptionBudget.minAvailable",
    ),
];

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        the_charts_have_no_lint_findings_and_the_defaults_equal_config,
        secure_metrics_of_the_chart_equal_config,
        every_value_of_the_chart_has_an_effect,
        a_value_that_an_older_release_lacks_has_its_default,
        helm_installs_upgrades_rolls_back_and_uninstalls_the_operator,
    );
}

async fn the_charts_have_no_lint_findings_and_the_defaults_equal_config(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    // The only policy that is optional in config/ and a default of the chart.
    let mut files = vec![PathBuf::from(repository_path("config/policy/machine_warnings.yaml"))];
    for folder in ["crd", "rbac", "manager"] {
        for entry in std::fs::read_dir(repository_path(&format!("config/{folder}")))? {
            files.push(entry?.path());
        }
    }
    let mut expected = BTreeMap::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "yaml")) {
        expected.extend(by_name(manifests::parse(&std::fs::read_to_string(file)?)?));
    }
    // Helm creates the namespace.
    expected.remove(&format!("Namespace {}", rbac::NAMESPACE)).context("config has no namespace")?;
    for helm in Helm::ALL {
        for chart in CHARTS {
            lab.helm(helm, &["lint", "--strict", &repository_path(chart)]).await?;
        }
        let rendered = by_name(render(&lab, helm, &repository_path(CHART), &[]).await?);
        let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
        ensure!(names(&rendered) == names(&expected), "{:?} and not {:?}", names(&rendered), names(&expected));
        for (name, object) in &rendered {
            ensure!(Some(object) == expected.get(name), "{helm:?}: {name}: {object} and not {:?}", expected.get(name));
        }
    }
    Ok(())
}

/// With `metrics.secure.enabled` the chart has the objects of `config/secure-metrics` in addition, and no other ones.
async fn secure_metrics_of_the_chart_equal_config(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let read = |name: &str| -> Result<BTreeMap<String, Value>> {
        let text = std::fs::read_to_string(repository_path(&format!("config/secure-metrics/{name}.yaml")))?;
        Ok(by_name(manifests::parse(&text)?))
    };
    let (roles, monitor) = (read("rbac")?, read("monitor")?);
    let chart = repository_path(CHART);
    let usual = by_name(render(&lab, Helm::V3, &chart, &[]).await?);
    for helm in Helm::ALL {
        let secure = ["--set", "metrics.secure.enabled=true", "--set", "serviceMonitor.enabled=true"];
        let secure = by_name(render(&lab, helm, &chart, &secure).await?);
        let added: BTreeMap<String, Value> =
            secure.into_iter().filter(|(name, object)| usual.get(name) != Some(object)).collect();
        let expected: BTreeMap<String, Value> = roles.clone().into_iter().chain(monitor.clone()).collect();
        ensure!(added == expected, "{helm:?}: {added:#?} and not {expected:#?}");
    }
    let without_tokens = ["--set", "metrics.secure.enabled=true", "--set", "metrics.secure.authorization=false"];
    let without_tokens = by_name(render(&lab, Helm::V4, &chart, &without_tokens).await?);
    ensure!(without_tokens == usual, "metrics without tokens need other objects than usual");

    let kustomize = async |folder: &str| lab.kubectl(&["kustomize", &repository_path(folder)]).await;
    let (text, usual) = (kustomize("config/secure-metrics").await?, kustomize("config").await?);
    let expected: BTreeMap<String, Value> = by_name(manifests::parse(&usual)?).into_iter().chain(roles).collect();
    ensure!(by_name(manifests::parse(&text)?) == expected, "kustomize has other objects: {text}");
    ensure!(["METRICS_TLS", "METRICS_AUTHORIZATION"].iter().all(|variable| text.contains(variable)), "{text}");
    Ok(())
}

async fn every_value_of_the_chart_has_an_effect(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let chart = copy_of_chart(&lab, "effect")?;
    let read = |path: &str| -> Result<Value> {
        let documents = manifests::parse(&std::fs::read_to_string(path)?)?;
        documents.into_iter().next().with_context(|| format!("{path} is empty"))
    };
    let (defaults, changed) = (read(&format!("{chart}/values.yaml"))?, read(&repository_path(CHANGED_VALUES))?);
    for (_, common, change) in CHANGED_ALONE {
        let before = render(&lab, Helm::V3, &chart, &["--set", common]).await?;
        ensure!(render(&lab, Helm::V3, &chart, &["--set", common, "--set", change]).await? != before, "{change}");
    }
    let all = render_values(&lab, &chart, &changed).await?;
    let all_with_helm_4 = render(&lab, Helm::V4, &chart, &["--values", &repository_path(CHANGED_VALUES)]).await?;
    ensure!(all == all_with_helm_4, "Helm 3 and Helm 4 render different objects");
    for path in
        paths_of_values(&defaults).into_iter().filter(|path| CHANGED_ALONE.iter().all(|(alone, ..)| alone != path))
    {
        let default = defaults.pointer(&path).context("a path of the defaults")?;
        let mut values = changed.clone();
        let value = values.pointer_mut(&path).with_context(|| format!("{CHANGED_VALUES} has no {path}"))?;
        ensure!(value != default, "{path} is not changed");
        *value = default.clone();
        ensure!(render_values(&lab, &chart, &values).await? != all, "{path} has no effect");
    }
    let refused = lab.helm(Helm::V4, &["template", &chart, "--set", "replicaCount=many"]).await;
    ensure!(refused.is_err_and(|error| format!("{error:#}").contains("replicaCount")), "the schema is not checked");
    for (values, named) in REFUSED {
        let refused = lab.helm(Helm::V4, &["template", &chart, "--set", values]).await;
        ensure!(refused.is_err_and(|error| format!("{error:#}").contains(&format!("{named}: "))), "{values}");
    }
    let recreated = render(&lab, Helm::V4, &chart, &["--set", "leaderElection=false"]).await?;
    let mut strategies = recreated.iter().filter_map(|object| object.pointer("/spec/strategy/type"));
    ensure!(strategies.next().is_some_and(|strategy| strategy == "Recreate"), "two pods would reconcile");
    Ok(())
}

/// `helm upgrade --reuse-values` renders with the values of the older chart.
async fn a_value_that_an_older_release_lacks_has_its_default(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    for chart in CHARTS {
        let copy = lab.folder().join("without-values").join(chart);
        copy_folder(Path::new(&repository_path(chart)), &copy)?;
        for values in [json!({}), empty_groups(chart)?] {
            std::fs::write(copy.join("values.yaml"), values.to_string())?;
            for helm in Helm::ALL {
                let expected = render(&lab, helm, &repository_path(chart), &[]).await?;
                let rendered = render(&lab, helm, &copy.display().to_string(), &[]).await?;
                ensure!(rendered == expected, "{helm:?} renders {chart} with {values} to {rendered:?}");
            }
        }
    }
    removed_entries_stay_removed(&lab).await
}

/// The groups of the chart's values, without any value. A group is a map whose schema names every key. Other maps are
/// free: in them, users remove an entry with null.
fn empty_groups(chart: &str) -> Result<Value> {
    fn groups(schema: &Value) -> Value {
        let is_group = |value: &Value| value.get("additionalProperties") == Some(&Value::Bool(false));
        let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        properties.filter(|(_, value)| is_group(value)).map(|(name, value)| (name.clone(), groups(value))).collect()
    }
    let schema = std::fs::read_to_string(repository_path(&format!("{chart}/values.schema.json")))?;
    Ok(groups(&serde_json::from_str(&schema)?))
}

async fn removed_entries_stay_removed(lab: &Lab) -> Result<()> {
    let removed = "resources.limits=null,resources.requests.cpu=null,podSecurityContext.seccompProfile=null";
    let rendered = render(lab, Helm::V4, &repository_path(CHART), &["--set", removed]).await?;
    let deployment = rendered.iter().find(|object| object.get("kind").is_some_and(|kind| kind == "Deployment"));
    let pod = deployment.and_then(|deployment| deployment.pointer("/spec/template/spec")).context("no Deployment")?;
    for (pointer, expected) in [
        ("/containers/0/resources", json!({"requests": {"memory": "256Mi"}})),
        ("/securityContext", json!({"runAsNonRoot": true})),
    ] {
        ensure!(pod.pointer(pointer) == Some(&expected), "{pointer}: {:?}", pod.pointer(pointer));
    }
    Ok(())
}

async fn helm_installs_upgrades_rolls_back_and_uninstalls_the_operator(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(lab_for_pods()).await?;
    let chart = repository_path(CHART);
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": rbac::NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    });
    manifests::create(&lab.client(), &[namespace]).await?;
    foreign_crds_are_refused(&lab, &chart).await?;

    let older = older_chart(&lab)?;
    run_helm(&lab, Helm::V3, "install", &[&older, "--set", "logLevel=debug"]).await?;
    run_examples(&lab).await?;
    let vms = uids(&lab, "virtualmachines").await?;
    ensure!(vms.len() == 5, "{vms:?}");
    let older_columns = columns(&lab).await?;

    ensure!(!has_policy(&lab).await?, "the older chart has a policy");
    run_helm(&lab, Helm::V3, "upgrade", &[&chart, "--reuse-values"]).await?;
    ensure!(columns(&lab).await? == older_columns + 1, "the upgrade did not change the CRD");
    ensure!(log_level(&lab).await? == "debug", "the upgrade did not reuse a value");
    ensure!(has_policy(&lab).await?, "a value that the older chart lacks does not have its default");
    wait_until_all_run(&lab).await?;

    create_certificate(&lab).await?;
    // An operator needs permissions.
    let usable = "rbac.create=true";
    let values = repository_path(CHANGED_VALUES);
    run_helm(&lab, Helm::V4, "upgrade", &[&chart, "--values", &values, "--set", usable]).await?;
    lab.kubectl(&["create", "-f", &with_other_name("examples/basic-vm.yaml", "other-vm", &lab)?]).await?;
    wait_until_all_run(&lab).await?;

    run_helm(&lab, Helm::V4, "rollback", &["2"]).await?;
    wait_until_all_run(&lab).await?;
    let with_sixth = uids(&lab, "virtualmachines").await?;
    run_helm(&lab, Helm::V4, "uninstall", &[]).await?;
    let deployments = lab.kubectl(&["get", "deployments", "--namespace", rbac::NAMESPACE, "--output=name"]).await?;
    ensure!(deployments.is_empty(), "{deployments}");
    ensure!(uids(&lab, "virtualmachines").await? == with_sixth, "VMs changed");
    ensure!(vms.is_subset(&with_sixth), "VMs were replaced: {vms:?} {with_sixth:?}");
    ensure!(uids(&lab, "machines.vitistack.io").await?.len() == 6, "Machines did not stay");

    run_helm(&lab, Helm::V3, "install", &[&chart]).await?;
    let default_level = log_level(&lab).await?;
    run_helm(&lab, Helm::V3, "upgrade", &[&chart, "--set", "logLevel=debug"]).await?;
    ensure!(log_level(&lab).await? == "debug", "the upgrade did not change a value");
    run_helm(&lab, Helm::V3, "rollback", &["1"]).await?;
    ensure!(log_level(&lab).await? == default_level, "the rollback did not change the value back");
    use_other_permissions(&lab).await?;
    lab.kubectl(&["delete", "machines.vitistack.io", "--all", "--timeout=120s"]).await?;
    ensure!(uids(&lab, "virtualmachines").await?.is_empty(), "VMs are left");
    lab.kubectl(&["delete", "networkconfigurations.vitistack.io", "--all", "--timeout=60s"]).await?;
    run_helm(&lab, Helm::V3, "uninstall", &[]).await.map(|_| ())
}

/// The Secret that `CHANGED_VALUES` names. The operator does not start without the certificate in it.
async fn create_certificate(lab: &Lab) -> Result<()> {
    let pair = PemKeyPair::self_signed("kubevirt-operator-metrics.kubevirt-operator-system.svc")?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": {"name": "metrics-certificate", "namespace": rbac::NAMESPACE},
        "stringData": {
            "tls.crt": String::from_utf8_lossy(&pair.certificate), "tls.key": String::from_utf8_lossy(&pair.key),
        },
    });
    manifests::create(&lab.client(), &[secret]).await
}

/// Runs a command about the release that must end in time, and waits for its pods.
async fn run_helm(lab: &Lab, helm: Helm, command: &str, arguments: &[&str]) -> Result<String> {
    let options = ["--namespace", rbac::NAMESPACE, "--wait", "--timeout=120s"];
    Box::pin(lab.helm(helm, &[&[command, RELEASE], arguments, options.as_slice()].concat())).await
}

async fn foreign_crds_are_refused(lab: &Lab, chart: &str) -> Result<()> {
    let name = "machines.vitistack.io";
    let foreign = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name},
        "spec": {
            "group": "vitistack.io", "scope": "Namespaced",
            "names": {"kind": "Machine", "listKind": "MachineList", "plural": "machines", "singular": "machine"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object"}}}],
        },
    });
    manifests::create(&lab.client(), &[foreign]).await?;
    for helm in Helm::ALL {
        match run_helm(lab, helm, "install", &[chart]).await {
            Ok(_) => bail!("{helm:?} replaced a CRD of another product"),
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(text.contains(&format!("{name} already exists and belongs to another product")), "{text}");
            }
        }
    }
    lab.kubectl(&["delete", "crd", name, "--timeout=60s"]).await.map(drop)
}

/// Makes the operator use the permissions that the examples do not need: a disk from a URL, a larger disk, other user
/// data and none, a stopped guest.
async fn use_other_permissions(lab: &Lab) -> Result<()> {
    let machine = |size: &str, user_data: &str| {
        json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "imported", "namespace": "default"},
            "spec": {
                "template": "small",
                "disks": [
                    {"name": "root", "storageClass": "fast-ssd", "size": size},
                    {"name": "image", "size": "1Gi", "source": {"http": {"url": "https://example.com/image.qcow2"}}},
                ],
                "cloudInit": {"userData": user_data},
            },
        })
    };
    let file = lab.folder().join("imported.json");
    for (size, user_data) in [("20Gi", "#cloud-config\nhostname: a\n"), ("30Gi", "#cloud-config\nhostname: bb\n")] {
        std::fs::write(&file, machine(size, user_data).to_string())?;
        lab.kubectl(&["apply", "-f", &file.display().to_string()]).await?;
        lab.kubectl(&["wait", "pvc/imported-root", "--for=create", "--timeout=60s"]).await?;
        let has_size = format!("--for=jsonpath={{.spec.resources.requests.storage}}={size}");
        lab.kubectl(&["wait", "pvc/imported-root", &has_size, "--timeout=60s"]).await?;
    }
    // The second user data in base64.
    let has_data = "--for=jsonpath={.data.userdata}=I2Nsb3VkLWNvbmZpZwpob3N0bmFtZTogYmIK";
    lab.kubectl(&["wait", "secret/imported-cloudinit", has_data, "--timeout=60s"]).await?;
    let stopped = r#"{"spec": {"powerState": "Stopped", "cloudInit": null}}"#;
    lab.kubectl(&["patch", "machines.vitistack.io", "imported", "--type=merge", "--patch", stopped]).await?;
    lab.kubectl(&["wait", "secret/imported-cloudinit", "--for=delete", "--timeout=60s"]).await?;
    Ok(())
}

async fn render(lab: &Lab, helm: Helm, chart: &str, arguments: &[&str]) -> Result<Vec<Value>> {
    let command = ["template", RELEASE, chart, "--namespace", rbac::NAMESPACE];
    manifests::parse(&lab.helm(helm, &[command.as_slice(), arguments].concat()).await?)
}

async fn render_values(lab: &Lab, chart: &str, values: &Value) -> Result<Vec<Value>> {
    let file = format!("{chart}-values.json");
    std::fs::write(&file, values.to_string())?;
    render(lab, Helm::V3, chart, &["--values", &file]).await
}

/// The objects without what only a chart has: labels of the release, and settings as arguments and variables.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let text = |object: &Value, pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or("").to_owned();
    let mut named = BTreeMap::new();
    for mut object in objects {
        for pointer in ["/metadata", "/spec/template/metadata"] {
            let Some(Value::Object(metadata)) = object.pointer_mut(pointer) else { continue };
            metadata.retain(|name, _| name != "creationTimestamp");
            for (field, of_chart) in
                [("labels", ["app.kubernetes.io/", "helm.sh/"].as_slice()), ("annotations", &["helm.sh/"])]
            {
                let Some(Value::Object(map)) = metadata.get_mut(field) else { continue };
                map.retain(|key, _| !of_chart.iter().any(|prefix| key.starts_with(prefix)));
                if map.is_empty() {
                    metadata.remove(field);
                }
            }
        }
        if let Some(Value::Object(container)) = object.pointer_mut("/spec/template/spec/containers/0") {
            container.retain(|name, _| !["args", "env"].contains(&name.as_str()));
        }
        named.insert(format!("{} {}", text(&object, "/kind"), text(&object, "/metadata/name")), integral(object));
    }
    named
}

/// Helm writes `1` where a CRD has `1.0`.
fn integral(value: Value) -> Value {
    match value {
        Value::Number(number) => {
            let text = number.to_string();
            let whole = text.strip_suffix(".0").and_then(|whole| serde_json::from_str(whole).ok());
            whole.unwrap_or(Value::Number(number))
        }
        Value::Array(items) => items.into_iter().map(integral).collect(),
        Value::Object(map) => Value::Object(map.into_iter().map(|(name, value)| (name, integral(value))).collect()),
        other => other,
    }
}

/// The JSON pointers of the values. Maps that users fill are one value.
fn paths_of_values(values: &Value) -> Vec<String> {
    const ONE_VALUE: [&str; 4] = ["podSecurityContext", "securityContext", "labels", "namespaceLabels"];
    let mut paths = Vec::new();
    let mut open = vec![(String::new(), values)];
    while let Some((path, value)) = open.pop() {
        let is_group = !path.rsplit('/').next().is_some_and(|name| ONE_VALUE.contains(&name));
        match value.as_object() {
            Some(map) if is_group && !map.is_empty() => {
                open.extend(map.iter().map(|(name, value)| (format!("{path}/{name}"), value)));
            }
            _ => paths.push(path),
        }
    }
    paths
}

/// A copy of the chart with an alert and a dashboard, whatever the chart itself has.
fn copy_of_chart(lab: &Lab, name: &str) -> Result<String> {
    let target = lab.folder().join(name).join("kubevirt-operator");
    copy_folder(Path::new(&repository_path(CHART)), &target)?;
    let rule = json!({"groups": [{"name": "example", "rules": [{"alert": "Example", "expr": "vector(1)"}]}]});
    for (folder, file, text) in
        [("alerts", "example.yaml", rule.to_string()), ("dashboards", "example.json", "{}".to_owned())]
    {
        let folder = target.join("files").join(folder);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(file), text)?;
    }
    Ok(target.display().to_string())
}

/// The values that the older chart lacks: a group, and a value of a group.
const NEWER_VALUES: [&str; 2] = ["/policies", "/serviceMonitor/interval"];

/// The chart with a lower version, without policies and the values for them, and with a CRD that lacks its last column.
fn older_chart(lab: &Lab) -> Result<String> {
    let chart = copy_of_chart(lab, "older")?;
    let (chart_file, crd_file) = (format!("{chart}/Chart.yaml"), format!("{chart}/files/crds/machines.yaml"));
    let text = std::fs::read_to_string(&chart_file)?;
    let version = env!("CARGO_PKG_VERSION");
    std::fs::write(&chart_file, text.replace(&format!("version: {version}"), "version: 0.0.9"))?;
    let mut crd = manifests::parse(&std::fs::read_to_string(&crd_file)?)?.remove(0);
    let columns = crd.pointer_mut(COLUMNS).and_then(Value::as_array_mut).context("the CRD has no columns")?;
    columns.pop().context("the CRD has no columns")?;
    std::fs::write(&crd_file, crd.to_string())?;
    for file in ["values.yaml", "files/defaults.yaml"] {
        let file = format!("{chart}/{file}");
        let mut values = manifests::parse(&std::fs::read_to_string(&file)?)?.remove(0);
        for value in NEWER_VALUES {
            let (group, name) = value.rsplit_once('/').context("a value without a path")?;
            let group = values.pointer_mut(group).and_then(Value::as_object_mut);
            group.and_then(|group| group.remove(name)).with_context(|| format!("{file} has no {value}"))?;
        }
        std::fs::write(&file, values.to_string())?;
    }
    std::fs::remove_file(format!("{chart}/templates/policies.yaml"))?;
    Ok(chart)
}

const COLUMNS: &str = "/spec/versions/0/additionalPrinterColumns";

/// The number of columns that the live CRD of Machines has.
async fn columns(lab: &Lab) -> Result<usize> {
    let crd = lab.kubectl(&["get", "crd", "machines.vitistack.io", "--output=json"]).await?;
    let crd: Value = serde_json::from_str(&crd)?;
    crd.pointer(COLUMNS).and_then(Value::as_array).map(Vec::len).context("the CRD has no columns")
}

/// Whether the release has the admission policy of `policies.ownObjects`.
async fn has_policy(lab: &Lab) -> Result<bool> {
    let policy = "validatingadmissionpolicies/kubevirt-operator-own-objects";
    let found = lab.kubectl(&["get", policy, "--ignore-not-found", "--output=name"]).await?;
    Ok(!found.is_empty())
}

async fn log_level(lab: &Lab) -> Result<String> {
    let variable = "--output=jsonpath={.spec.template.spec.containers[0].env[?(@.name==\"LOG_LEVEL\")].value}";
    lab.kubectl(&["get", "deployment", rbac::ACCOUNT, "--namespace", rbac::NAMESPACE, variable]).await
}

fn with_other_name(example: &str, name: &str, lab: &Lab) -> Result<String> {
    let mut machine = manifests::parse(&std::fs::read_to_string(repository_path(example))?)?.remove(0);
    *machine.pointer_mut("/metadata/name").context("the example has no name")? = name.into();
    let file = lab.folder().join(format!("{name}.json"));
    std::fs::write(&file, machine.to_string())?;
    Ok(file.display().to_string())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let source = entry?.path();
        let target = to.join(source.file_name().unwrap_or_default());
        if source.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            std::fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

/// The UIDs of all objects of a kind in the default namespace.
async fn uids(lab: &Lab, kind: &str) -> Result<BTreeSet<String>> {
    let uids = lab.kubectl(&["get", kind, "--output=jsonpath={.items[*].metadata.uid}"]).await?;
    Ok(uids.split_whitespace().map(str::to_owned).collect())
}
