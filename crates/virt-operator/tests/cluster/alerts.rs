//! The alerts and recording rules that the installation contains read metrics that the programs really export.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Extension, Lab, LabOptions, VirtOperator,
    harness::{SharedLabs, Suite},
    kubevirt_resource,
};

use crate::{
    install::vm,
    support::{NAMESPACE, TIMEOUT, program, text},
};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("the_selectors_of_an_expression_are_found", the_selectors_of_an_expression_are_found);
    suite.test("every_metric_of_a_rule_is_exported", every_metric_of_a_rule_is_exported);
}

/// The programs that run in the lab.
const PROGRAMS: [&str; 3] = ["virt-operator", "virt-api", "virt-controller"];

/// The beginning of metrics that no program of the lab exports, and what exports them on a cluster.
const ELSEWHERE: &[(&str, &str)] = &[
    ("up", "Prometheus"),
    ("apiserver_", "kube-apiserver"),
    ("container_", "kubelet"),
    ("kube_", "kube-state-metrics"),
    ("kubevirt_virt_handler_ready_status", "virt-handler"),
    ("kubevirt_vmi_contains_ephemeral_hotplug_volume", "virt-controller, if a VMI has such a volume"),
    ("kubevirt_vmi_filesystem_", "virt-handler"),
    ("kubevirt_vmi_guest_load_1m", "virt-handler"),
    ("kubevirt_vmi_memory_", "virt-handler"),
    ("kubevirt_vmi_migration_data_bytes_total", "virt-handler"),
    ("kubevirt_vmi_vcpu_seconds_total", "virt-handler"),
];

/// Metrics that a program of the lab should export and does not export yet.
const MISSING: &[(&str, &str)] = &[];

async fn every_metric_of_a_rule_is_exported(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { extensions: vec![Extension::Monitoring], ..LabOptions::default() }).await?;
    lab.create(MONITORING).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.deploy_kubevirt(None).await?;
    create_and_migrate_vm(&lab).await?;

    let rules = rules(&lab).await?;
    ensure!(rules.len() > 50, "the PrometheusRule has only {} rules", rules.len());
    for (start, _) in ELSEWHERE {
        let is_read = rules.iter().any(|rule| reads(rule).iter().any(|selector| selector.metric.starts_with(start)));
        ensure!(is_read, "no rule reads {start}: remove it from the list");
    }
    let expected = MISSING.iter().copied();
    // Programs export some metrics only some time after their start.
    let started = Instant::now();
    loop {
        let missing = missing(&rules, &exported(&lab).await?);
        if missing.keys().map(|(program, metric)| (program.as_str(), metric.as_str())).eq(expected.clone()) {
            return lab.stop().await;
        }
        if started.elapsed() > TIMEOUT {
            bail!("not exported, with the rules that read it: {missing:#?}; expected only {MISSING:?}");
        }
        sleep(Duration::from_secs(2)).await;
    }
}

/// The account that Prometheus uses. Without it, virt-operator installs no rules.
pub(crate) const MONITORING: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: monitoring}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: prometheus-k8s, namespace: monitoring}
";

/// Some metrics exist only if a VM exists and has migrated.
async fn create_and_migrate_vm(lab: &Lab) -> Result<()> {
    let resources =
        |kind: &str| -> Api<DynamicObject> { Api::namespaced_with(lab.client(), "default", &kubevirt_resource(kind)) };
    let vms = resources("VirtualMachine");
    vms.create(&PostParams::default(), &serde_json::from_value(vm("watched"))?).await.context("creating a VM")?;
    lab.wait("VM is running", TIMEOUT, vms, "watched", |vm| {
        vm.is_some_and(|vm| text(vm, "/status/printableStatus") == "Running")
    })
    .await?;
    let migrations = resources("VirtualMachineInstanceMigration");
    let migration = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "watched", "namespace": "default"},
        "spec": {"vmiName": "watched"},
    });
    migrations.create(&PostParams::default(), &serde_json::from_value(migration)?).await.context("migrating a VM")?;
    lab.wait("VM has migrated", TIMEOUT, migrations, "watched", |migration| {
        migration.is_some_and(|migration| text(migration, "/status/phase") == "Succeeded")
    })
    .await
    .map(|_| ())
}

/// The rules that virt-operator has installed.
async fn rules(lab: &Lab) -> Result<Vec<Value>> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("monitoring.coreos.com", "v1", "PrometheusRule"));
    let api: Api<DynamicObject> = Api::namespaced_with(lab.client(), NAMESPACE, &kind);
    let rule = api.get("prometheus-kubevirt-rules").await.context("reading the PrometheusRule")?;
    let groups = rule.data["spec"]["groups"].as_array().cloned().unwrap_or_default();
    Ok(groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default()).collect())
}

/// The metrics of each program, of all its pods together: some are exported by the leader only.
async fn exported(lab: &Lab) -> Result<BTreeMap<&'static str, BTreeSet<String>>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let mut exported = BTreeMap::new();
    for program in PROGRAMS {
        let mut metrics = BTreeSet::new();
        for pod in pods.list(&ListParams::default().labels(&format!("kubevirt.io={program}"))).await? {
            // A pod that still starts is scraped later.
            let Ok((status, text)) = lab.get_from_pod(&pod, metrics_port(&pod)?, "/metrics").await else { continue };
            ensure!(status == 200, "{program} responded with {status}: {text}");
            metrics
                .extend(text.lines().filter(|line| !line.starts_with('#')).map(|line| name_at_start(line).to_owned()));
        }
        exported.insert(program, metrics);
    }
    Ok(exported)
}

/// The port that the ServiceMonitor names.
fn metrics_port(pod: &Pod) -> Result<u16> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let port = containers
        .flat_map(|container| container.ports.iter().flatten())
        .find(|port| port.name.as_deref() == Some("metrics"))
        .context("the pod has no port for metrics")?;
    Ok(u16::try_from(port.container_port)?)
}

/// The metrics that rules read and the program (or any program, if the expression names none) does not export, with
/// these rules.
fn missing(
    rules: &[Value],
    exported: &BTreeMap<&'static str, BTreeSet<String>>,
) -> BTreeMap<(String, String), Vec<String>> {
    let recorded: BTreeSet<&str> = rules.iter().filter_map(|rule| rule["record"].as_str()).collect();
    let mut missing: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for rule in rules {
        let name = rule["alert"].as_str().or(rule["record"].as_str()).unwrap_or_default();
        for selector in reads(rule) {
            let metric = selector.metric;
            let is_elsewhere = ELSEWHERE.iter().any(|(start, _)| metric.starts_with(start));
            let of_handler = selector.labels.contains("virt-handler");
            if recorded.contains(metric) || is_elsewhere || of_handler {
                continue;
            }
            let program = PROGRAMS.into_iter().find(|program| selector.labels.contains(program));
            let is_exported = match program {
                Some(program) => exported.get(program).is_some_and(|metrics| metrics.contains(metric)),
                None => exported.values().any(|metrics| metrics.contains(metric)),
            };
            if !is_exported {
                let key = (program.unwrap_or("any program").to_owned(), metric.to_owned());
                missing.entry(key).or_default().push(name.to_owned());
            }
        }
    }
    missing
}

fn reads(rule: &Value) -> Vec<Selector<'_>> {
    selectors(rule["expr"].as_str().unwrap_or_default())
}

/// A metric in an expression, and its label matchers.
#[derive(Debug, PartialEq, Eq)]
struct Selector<'a> {
    metric: &'a str,
    labels: &'a str,
}

/// The selectors of a PromQL expression: every name that is not a function, a keyword or the name of a label.
fn selectors(expression: &str) -> Vec<Selector<'_>> {
    const KEYWORDS: [&str; 5] = ["and", "or", "unless", "bool", "offset"];
    const LABEL_LISTS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
    let mut selectors = Vec::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        let name = name_at_start(rest);
        if let Some(quoted) = rest.strip_prefix(['"', '\'']) {
            rest = quoted.split_once(first).map_or("", |(_, rest)| rest);
        } else if first == '[' {
            rest = rest.split_once(']').map_or("", |(_, rest)| rest);
        } else if first.is_ascii_digit() {
            // A number or a duration.
            rest = rest.trim_start_matches(|character: char| character.is_ascii_alphanumeric() || character == '.');
        } else if name.is_empty() {
            rest = &rest[first.len_utf8()..];
        } else {
            rest = rest[name.len()..].trim_start();
            if LABEL_LISTS.contains(&name) {
                rest = rest.strip_prefix('(').and_then(|list| list.split_once(')')).map_or(rest, |(_, rest)| rest);
            } else if !is_function(rest) && !KEYWORDS.contains(&name) {
                let labels = rest.strip_prefix('{').and_then(|labels| labels.split_once('}'));
                selectors.push(Selector { metric: name, labels: labels.map_or("", |(labels, _)| labels) });
                rest = labels.map_or(rest, |(_, rest)| rest);
            }
        }
    }
    selectors
}

/// Whether the name before this text is a function or an aggregation.
fn is_function(after_name: &str) -> bool {
    after_name.starts_with('(') || ["by", "without"].contains(&name_at_start(after_name))
}

/// The metric name with which a text begins. It may be empty.
fn name_at_start(text: &str) -> &str {
    let end = text.find(|character: char| !character.is_ascii_alphanumeric() && !['_', ':'].contains(&character));
    let name = &text[..end.unwrap_or(text.len())];
    if name.starts_with(|character: char| character.is_ascii_digit()) { "" } else { name }
}

async fn the_selectors_of_an_expression_are_found(_: Arc<SharedLabs>) -> Result<()> {
    let found = |expression: &'static str| -> Vec<(&str, &str)> {
        selectors(expression).into_iter().map(|selector| (selector.metric, selector.labels)).collect()
    };
    let cases: [(&str, &[(&str, &str)]); 5] = [
        ("sum(up{pod=~'virt-api-.*'}) or vector(0)", &[("up", "pod=~'virt-api-.*'")]),
        (
            "sum by (code) (rate(requests_total{code=~\"(4|5)..\"}[5m])) / 2 > 0.8",
            &[("requests_total", "code=~\"(4|5)..\"")],
        ),
        ("a:b:sum unless on (node, name) group_left(x) c offset 10m", &[("a:b:sum", ""), ("c", "")]),
        ("label_replace(a, \"pod\", \"$1\", 'exported pod', '(.*)') >= bool 5e3", &[("a", "")]),
        ("a{} and (b - c) * 1024", &[("a", ""), ("b", ""), ("c", "")]),
    ];
    for (expression, expected) in cases {
        ensure!(found(expression) == expected, "{expression}: {:?}", found(expression));
    }
    Ok(())
}
