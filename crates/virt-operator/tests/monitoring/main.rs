//! A real Prometheus scrapes both operators and KubeVirt on the lab, and evaluates every alert and dashboard.
//!
//! It is a test binary of its own, because Prometheus takes minutes to build and other tests do not need it.

#![expect(clippy::indexing_slicing, reason = "a panic in a test is a failed test")]

mod prometheus;
mod rules;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, LabOptions, OperatorProcess, OperatorProcessOptions, VirtOperator, components, harness::SharedLabs,
};

use self::prometheus::{Prometheus, Target};

const TIMEOUT: Duration = Duration::from_secs(120);
const METRICS_PORT: u16 = 8080;

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&components::WITH_MONITORING, |suite| {
        rules::add(suite);
        suite.test("prometheus_evaluates_every_alert_and_dashboard", prometheus_evaluates_every_alert_and_dashboard);
    })
}

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(file(path)).with_context(|| format!("reading {path}"))
}

async fn prometheus_evaluates_every_alert_and_dashboard(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(Lab::start(LabOptions::default())).await?;
    let machine_operator = Box::pin(install(&lab)).await?;
    let installed = wait_for_installed_rules(&lab).await?;

    let mut rule_files = vec![installed];
    for path in ["config/prometheus/rules.yaml", "config/virt-operator/alerts.yaml"] {
        rule_files.push(rules::spec_of(path)?);
    }
    let mut targets = kubevirt_targets(&lab).await?;
    let address = machine_operator.address();
    targets.push(Target {
        address: format!("{address}:{METRICS_PORT}"),
        scheme: "http",
        namespace: "kubevirt-operator-system".to_owned(),
        pod: "kubevirt-operator-controller-manager-0".to_owned(),
    });
    let prometheus = Box::pin(Prometheus::start(&lab, &targets, &rule_files)).await?;
    prometheus.wait_until_scraped(targets.len()).await?;
    check_lint(&lab, &machine_operator).await?;

    // All rules have been evaluated after the scrape, and none failed.
    let rules = prometheus.wait_until_evaluated().await?;
    let alerts = rules.iter().filter(|rule| rule["type"] == "alerting").count();
    ensure!(alerts == 38 + 26 && rules.len() > alerts + 20, "{alerts} alerts and {} rules", rules.len());

    let mut expressions: Vec<(String, String)> = own_alerts(&rule_files);
    expressions.extend(dashboard_expressions()?);
    let exported = prometheus.series_names().await?;
    let documented = documented_series()?;
    let mut missing: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (owner, expression) in &expressions {
        prometheus.query(expression).await.with_context(|| format!("evaluating {owner}: {expression}"))?;
        for series in prometheus.selected_series(expression).await? {
            if !exported.contains(&series) && !documented.contains(&series) {
                missing.entry(series).or_default().push(owner.clone());
            }
        }
    }
    ensure!(missing.is_empty(), "series that nothing exports, with what queries them: {missing:#?}");
    ensure!(exported.contains("kubevirt_operator_machines_total") && exported.contains("kubevirt_vmi_info"));

    // The state of this cluster.
    for (expression, expected) in [
        ("sum(kubevirt_operator_machines_total{phase=\"Running\"})", "1"),
        ("sum(kubevirt_operator_leader)", "1"),
        ("max(virt_operator_kubevirt_condition{type=\"Available\"})", "1"),
        ("max(virt_operator_kubevirt_condition{type=\"Degraded\"})", "0"),
        ("sum(kubevirt_virt_operator_leading_status)", "1"),
        ("count(kubevirt_virt_operator_certificate_expiry_seconds < 3600) or vector(0)", "0"),
    ] {
        prometheus.wait_for_value(expression, expected).await?;
    }
    let firing =
        prometheus.query("ALERTS{alertstate=\"firing\", component=~\"kubevirt-operator|virt-operator\"}").await?;
    ensure!(firing.is_empty(), "alerts fire on a healthy cluster: {firing:?}");

    // Machines with a problem become visible, and an alert begins to wait for its time.
    lab.create(PROBLEMS).await?;
    for (expression, expected) in [
        ("count(ALERTS{alertname=\"MachinesFailed\", alertstate=\"pending\"})", "1"),
        ("max(kubevirt_operator_machine_waiting_seconds{state=\"Pending\"}) > bool 0", "1"),
        ("sum(kubevirt_operator_network_configuration_errors_total)", "1"),
        ("sum(kubevirt_operator_reconciliation_errors_total{error_type=\"TemplateNotFound\"}) > bool 0", "1"),
    ] {
        prometheus.wait_for_value(expression, expected).await?;
    }
    lab.stop().await
}

/// KubeVirt, kubevirt-operator and one Machine, on a cluster with the CRDs of the Prometheus operator.
async fn install(lab: &Lab) -> Result<OperatorProcess> {
    for crd in components::monitoring_crds()? {
        let text = std::fs::read_to_string(&crd).with_context(|| format!("reading {}", crd.display()))?;
        lab.create(&text).await.with_context(|| format!("creating {}", crd.display()))?;
    }
    lab.create(MONITORING).await?;
    lab.create_virt_operator(&VirtOperator::ours(PathBuf::from(env!("CARGO_BIN_EXE_virt-operator")))).await?;
    lab.deploy_kubevirt(None).await?;

    let path = |path: &str| file(path).display().to_string();
    lab.kubectl(&["apply", "-f", &path("config/crd"), "-f", &path("config/rbac")]).await?;
    let (own, other) = (path("config/prometheus"), path("config/virt-operator/alerts.yaml"));
    lab.kubectl(&["apply", "--validate=strict", "-f", &own, "-f", &other]).await?;
    lab.kubectl(&["apply", "-n", "monitoring", "-k", &path("config/prometheus/dashboards")]).await?;
    let dashboards =
        lab.kubectl(&["get", "configmap", "-n", "monitoring", "-l", "grafana_dashboard=1", "-o", "name"]).await?;
    ensure!(dashboards.trim() == "configmap/vitivirt-dashboards", "{dashboards}");
    let invalid = json!({
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "invalid", "namespace": "monitoring"},
        "spec": {"groups": [{"name": "x", "rules": [{"alert": "X", "expr": "up", "for": "soon"}]}]},
    });
    ensure!(lab.create(&invalid.to_string()).await.is_err(), "the CRD accepts an invalid duration");

    let program = Path::new(env!("CARGO_BIN_EXE_virt-operator")).with_file_name("kubevirt-operator");
    let environment = [
        ("NAMESPACE", "kubevirt-operator-system".to_owned()),
        ("METRICS_BIND_ADDRESS", format!("{{address}}:{METRICS_PORT}")),
        ("HEALTH_PROBE_BIND_ADDRESS", "{address}:8081".to_owned()),
    ];
    let operator = lab
        .run(OperatorProcessOptions {
            file: program,
            namespace: "kubevirt-operator-system".to_owned(),
            service_account: "kubevirt-operator-controller-manager".to_owned(),
            arguments: vec!["run".to_owned()],
            environment: environment.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            through_proxy: false,
        })
        .await?;
    lab.kubectl(&["apply", "-f", &path("examples/basic-vm.yaml")]).await?;
    let running = "--for=jsonpath={.status.phase}=Running";
    lab.kubectl(&["wait", "machines.vitistack.io", "--all", running, "--timeout=120s"]).await?;
    Ok(operator)
}

/// A Machine that fails, and one that waits for a network.
const PROBLEMS: &str = "
apiVersion: vitistack.io/v1alpha1
kind: Machine
metadata: {name: failed, namespace: default}
spec: {template: unknown}
---
apiVersion: vitistack.io/v1alpha1
kind: Machine
metadata: {name: pending, namespace: default}
spec:
  template: small
  networks: [{name: lan, networkName: missing}]
";

/// The account that Prometheus uses. Without it, virt-operator installs no rules.
const MONITORING: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: monitoring}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: prometheus-k8s, namespace: monitoring}
";

/// The spec of the PrometheusRule that virt-operator installs.
async fn wait_for_installed_rules(lab: &Lab) -> Result<Value> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("monitoring.coreos.com", "v1", "PrometheusRule"));
    let api: Api<DynamicObject> = Api::namespaced_with(lab.client(), "kubevirt", &kind);
    let name = "prometheus-kubevirt-rules";
    lab.wait("PrometheusRule of virt-operator exists", TIMEOUT, api.clone(), name, |rule| rule.is_some()).await?;
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("monitoring.coreos.com", "v1", "ServiceMonitor"));
    let monitors: Api<DynamicObject> = Api::namespaced_with(lab.client(), "monitoring", &kind);
    lab.wait("ServiceMonitor of virt-operator exists", TIMEOUT, monitors, name, |monitor| monitor.is_some()).await?;
    Ok(api.get(name).await.context("reading the PrometheusRule")?.data["spec"].clone())
}

/// The pods that the ServiceMonitor of KubeVirt selects, as far as they are real programs.
async fn kubevirt_targets(lab: &Lab) -> Result<Vec<Target>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), "kubevirt");
    let selector = ListParams::default().labels("kubevirt.io in (virt-operator, virt-api, virt-controller)");
    let mut targets = Vec::new();
    for pod in pods.list(&selector).await? {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
        let port =
            ports.find(|port| port.name.as_deref() == Some("metrics")).context("the pod has no port for metrics")?;
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).context("the pod has no address")?;
        targets.push(Target {
            address: format!("{address}:{}", port.container_port),
            scheme: "https",
            namespace: "kubevirt".to_owned(),
            pod: pod.name_any(),
        });
    }
    ensure!(targets.len() >= 5, "only {} pods have metrics", targets.len());
    Ok(targets)
}

/// Gauges whose names end like those of counters. Queries of users contain these names.
const LINT_EXCEPTIONS: [&str; 2] = ["kubevirt_operator_machines_total", "kubevirt_operator_virtual_machines_total"];

async fn check_lint(lab: &Lab, machine_operator: &OperatorProcess) -> Result<()> {
    let (status, machines) = machine_operator.get(METRICS_PORT, "/metrics").await?;
    ensure!(status == 200, "kubevirt-operator responded with {status}");
    let pods: Api<Pod> = Api::namespaced(lab.client(), "kubevirt");
    let operators = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
    let operator = operators.items.first().context("no pod of virt-operator")?;
    let (status, installation) = lab.get_from_pod(operator, 8443, "/metrics").await?;
    ensure!(status == 200, "virt-operator responded with {status}");
    for text in [machines, installation] {
        ensure!(!text.contains("# EOF"), "a client that asks for no format gets the text format");
        let problems = rules::promtool_check_metrics(&text).await?;
        let unexpected: Vec<&String> =
            problems.iter().filter(|line| !LINT_EXCEPTIONS.iter().any(|name| line.starts_with(name))).collect();
        ensure!(unexpected.is_empty(), "promtool check metrics: {unexpected:?}");
    }
    Ok(())
}

/// Name and expression of each alert in rule files.
fn own_alerts(rule_files: &[Value]) -> Vec<(String, String)> {
    let groups = rule_files.iter().flat_map(|spec| spec["groups"].as_array().into_iter().flatten());
    let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
    let own = rules.filter(|rule| rule["labels"]["component"].is_string());
    own.map(|rule| (text(&rule["alert"]), text(&rule["expr"]))).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Title and expression of each query of the dashboards.
fn dashboard_expressions() -> Result<Vec<(String, String)>> {
    let mut expressions = Vec::new();
    let folder = file("config/prometheus/dashboards");
    for entry in std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
        for panel in dashboard["panels"].as_array().into_iter().flatten() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let owner = format!("{}: {}", text(&dashboard["title"]), text(&panel["title"]));
                expressions.push((owner, text(&target["expr"])));
            }
        }
    }
    ensure!(expressions.len() > 30, "the dashboards have only {} queries", expressions.len());
    Ok(expressions)
}

/// The series of docs/metrics.md. A counter of errors is exported only after the first error.
fn documented_series() -> Result<BTreeSet<String>> {
    let page = read("docs/metrics.md")?;
    let mut series = BTreeSet::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let (name, rest) = row.split_once('`').context("a row without a name")?;
        if rest.starts_with(" | histogram") {
            series.extend(["bucket", "sum", "count"].map(|suffix| format!("{name}_{suffix}")));
        } else {
            series.insert(name.to_owned());
        }
    }
    ensure!(series.len() > 40, "docs/metrics.md has only {} series", series.len());
    Ok(series)
}
