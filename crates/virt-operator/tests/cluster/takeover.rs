//! Take-over: upstream virt-operator installs KubeVirt, this operator continues in its place, and upstream's takes the
//! installation back. No VM is touched, the CA is kept, and no pod restarts, because the deployment is the same.
//!
//! `cargo xtask test` tries the first case; `cargo xtask chaos takeover` tries all of them and writes the table of
//! docs/takeover.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    coordination::v1::Lease,
    core::v1::{ConfigMap, Pod, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab, LabOptions, Record, VirtOperator,
    harness::{SharedLabs, Suite},
    kubevirt_resource,
};

use crate::{
    install::vm,
    lifecycle::{replace_spec, variant_spec},
    support::{NAMESPACE, create_kubevirt, is_available, kubevirts, operator_requests, program, text},
};

/// Set by `cargo xtask chaos takeover`: the file for the rows of the table.
const REPORT: &str = "TAKEOVER_REPORT";
/// Upstream virt-operator waits for the Lease of the operator before it, and its pods start slowly.
const TIMEOUT: Duration = Duration::from_secs(240);
/// An operator that has not written anything for this time has finished.
const QUIET: Duration = Duration::from_secs(6);
/// Nodes of the lab in which a change of virt-handler is under way.
const CANARY_NODES: u8 = 8;
/// How long this operator must then be silent.
const SILENCE: Duration = Duration::from_secs(10);

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; an_installation_of_upstream_is_taken_over_and_given_back);
}

/// What upstream virt-operator has installed, and in which state it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Deployed,
    /// It stops when the first component exists.
    Deploying,
    /// A user added a CA certificate.
    ExternalCa,
    /// Two CA certificates are valid.
    RotatedCa,
    /// This operator runs with the permissions of upstream's.
    UpstreamPermissions,
    /// A change of virt-handler has reached some of the nodes.
    Canary,
}

struct Case {
    name: &'static str,
    spec: Value,
    state: State,
}

fn cases() -> Result<Vec<Case>> {
    let case = |name, spec, state| Case { name, spec, state };
    Ok(vec![
        case("default resource", json!({}), State::Deployed),
        case("resource with many fields", many_fields(), State::Deployed),
        case("customized components", variant_spec("customize")?, State::Deployed),
        case("`imageTag` and `imageRegistry` of the release", image_tag(), State::Deployed),
        case("external CA", json!({}), State::ExternalCa),
        case("rotated CA", json!({}), State::RotatedCa),
        case("permissions of upstream virt-operator only", json!({}), State::UpstreamPermissions),
        case("in the middle of an installation", json!({}), State::Deploying),
        case("in the middle of a canary of virt-handler", json!({}), State::Canary),
    ])
}

fn image_tag() -> Value {
    json!({"imageTag": "v1.8.4", "imageRegistry": "quay.io/kubevirt"})
}

/// Fields of every part of the resource, among them deprecated ones.
fn many_fields() -> Value {
    json!({
        "imageTag": "v1.8.4",
        "imageRegistry": "quay.io/kubevirt",
        "imagePullPolicy": "IfNotPresent",
        "infra": {"replicas": 2, "nodePlacement": {"affinity": {}}},
        "workloads": {"nodePlacement": {"tolerations": []}},
        "workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate"]},
        "configuration": {
            "developerConfiguration": {
                "featureGates": ["HotplugVolumes", "LiveMigration", "Snapshot", "CPUManager", "NUMA", "HypervStrictCheck"],
            },
            "network": {"defaultNetworkInterface": "masquerade", "permitSlirpInterface": false},
            "permittedHostDevices": {
                "pciHostDevices": [{"pciVendorSelector": "10DE:1DB6", "resourceName": "nvidia.com/GP100GL"}],
            },
        },
        "certificateRotateStrategy": {"selfSigned": {"caRotateInterval": "168h", "certRotateInterval": "24h"}},
        "monitorNamespace": "openshift-monitoring",
        "monitorAccount": "prometheus-k8s",
    })
}

async fn an_installation_of_upstream_is_taken_over_and_given_back(_: Arc<SharedLabs>) -> Result<()> {
    let report = std::env::var_os(REPORT);
    let cases = cases()?;
    let tried = if report.is_some() { cases.len() } else { 1 };
    let mut rows = String::new();
    let mut failed = Vec::new();
    for case in cases.iter().take(tried) {
        eprintln!("take-over: {}", case.name);
        match Box::pin(take_over_and_give_back(case)).await {
            Ok([there, back]) => {
                let _ = writeln!(rows, "| {} | {there} | {back} |", case.name);
            }
            Err(error) => failed.push(format!("{}: {error:#}", case.name)),
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    if let Some(file) = report {
        std::fs::write(file, rows).context("writing the table")?;
    }
    Ok(())
}

async fn take_over_and_give_back(case: &Case) -> Result<[String; 2]> {
    let nodes = if case.state == State::Canary { CANARY_NODES } else { LabOptions::default().nodes };
    let lab = Lab::start(LabOptions { nodes, ..LabOptions::default() }).await?;
    let name = format!("takeover-{}", case.name.replace([' ', '`'], "-"));
    let rows = lab.keeping_logs(&name, both_ways(&lab, case)).await?;
    lab.stop().await?;
    Ok(rows)
}

async fn both_ways(lab: &Lab, case: &Case) -> Result<[String; 2]> {
    let (upstream, ours) = (VirtOperator::reference(), VirtOperator::ours(program()));
    lab.create_virt_operator(&upstream).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(lab, &case.spec).await?;
    prepare(lab, case.state).await.context("preparing")?;

    let there = hand_over(lab, &ours, case.state).await.context("to this operator")?;
    let silent_from = operator_requests(lab)?.len();
    sleep(SILENCE).await;
    let writes = writes(lab, silent_from)?;
    ensure!(writes.is_empty(), "after the take-over the operator still wrote {writes:?}");
    ensure!(there.ca_kept, "the take-over replaced the CA");
    require_one_write_per_object(&there.writes, case.state)?;
    match case.state {
        State::Deploying => {}
        State::Canary => {
            let is_handler = |pod: &String| pod.starts_with("virt-handler-");
            ensure!(there.restarted.iter().all(is_handler), "the take-over restarted {:?}", there.restarted);
            ensure!(outdated_handlers(lab).await? == 0, "the canary of virt-handler did not continue");
        }
        _ => ensure!(there.restarted.is_empty(), "the take-over restarted {:?}", there.restarted),
    }

    let back = hand_over(lab, &upstream, State::Deployed).await.context("back to upstream virt-operator")?;
    ensure!(back.ca_kept, "upstream virt-operator replaced the CA");
    ensure!(back.restarted.is_empty(), "upstream virt-operator restarted {:?}", back.restarted);
    Ok([there.row(), back.row()])
}

/// Brings the installation of upstream virt-operator into its state, with a running VM if it can run one.
async fn prepare(lab: &Lab, state: State) -> Result<()> {
    if state == State::Deploying {
        let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
        lab.wait("virt-api exists", TIMEOUT, deployments, "virt-api", |found| found.is_some()).await?;
        return Ok(());
    }
    wait_until_deployed(lab).await?;
    match state {
        State::ExternalCa => {
            let external = json!({"data": {"ca-bundle": certificate(lab, "kubevirt-export-ca").await?}});
            let bundles: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
            bundles.patch("kubevirt-external-ca", &PatchParams::default(), &Patch::Merge(&external)).await?;
            wait_for_two_cas(lab).await?;
        }
        State::RotatedCa => {
            let longer = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "200h"}}}});
            replace_spec(lab, &longer).await?;
            wait_for_two_cas(lab).await?;
            wait_until_deployed(lab).await?;
        }
        State::Deployed | State::Deploying | State::UpstreamPermissions | State::Canary => {}
    }
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"));
    vms.create(&PostParams::default(), &serde_json::from_value(vm("stays"))?).await.context("creating a VM")?;
    let is_running = |vm: Option<&DynamicObject>| vm.is_some_and(|vm| text(vm, "/status/printableStatus") == "Running");
    lab.wait("the VM runs", TIMEOUT, vms, "stays", is_running).await?;
    if state == State::Canary {
        replace_spec(lab, &annotated_handler()).await?;
        let handlers: Api<DaemonSet> = Api::namespaced(lab.client(), NAMESPACE);
        let is_under_way =
            |found: Option<&DaemonSet>| found.is_some_and(|found| outdated(found).is_some_and(|n| n > 0));
        lab.wait("some nodes have the new virt-handler", TIMEOUT, handlers, "virt-handler", is_under_way).await?;
    }
    Ok(())
}

/// A change of virt-handler that works.
fn annotated_handler() -> Value {
    let patch = json!({"spec": {"template": {"metadata": {"annotations": {"example.com/canary": "yes"}}}}});
    json!({"customizeComponents": {"patches": [
        {"resourceType": "DaemonSet", "resourceName": "virt-handler", "type": "strategic", "patch": patch.to_string()},
    ]}})
}

/// The number of nodes that do not have the new pod yet, once one of them has it.
fn outdated(handler: &DaemonSet) -> Option<i32> {
    let status = handler.status.as_ref()?;
    let updated = status.updated_number_scheduled.unwrap_or_default();
    let is_observed = status.observed_generation == handler.metadata.generation;
    (is_observed && updated > 0).then(|| status.desired_number_scheduled - updated)
}

async fn outdated_handlers(lab: &Lab) -> Result<i32> {
    let handlers: Api<DaemonSet> = Api::namespaced(lab.client(), NAMESPACE);
    outdated(&handlers.get("virt-handler").await?).context("no node has the new virt-handler")
}

async fn wait_for_two_cas(lab: &Lab) -> Result<()> {
    let bundles: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let has_two = |bundle: Option<&ConfigMap>| {
        let text = bundle.and_then(|bundle| bundle.data.as_ref()?.get("ca-bundle").cloned()).unwrap_or_default();
        text.matches("BEGIN CERTIFICATE").count() == 2
    };
    lab.wait("two CAs are trusted", TIMEOUT, bundles, "kubevirt-ca", has_two).await.map(|_| ())
}

async fn wait_until_deployed(lab: &Lab) -> Result<()> {
    let is_deployed = |kubevirt: Option<&DynamicObject>| {
        kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/phase") == "Deployed" && is_available(kubevirt))
    };
    lab.wait("KubeVirt is deployed", TIMEOUT, kubevirts(lab), "kubevirt", is_deployed).await.map(|_| ())
}

/// What the change of operators did.
struct HandOver {
    writes: Vec<Record>,
    restarted: BTreeSet<String>,
    ca_kept: bool,
}

impl HandOver {
    fn row(&self) -> String {
        let ca = if self.ca_kept { "kept" } else { "replaced" };
        format!("{} | {} | {ca}", self.writes.len(), self.restarted.len())
    }
}

/// One patch shows whether the content of an object is the desired one. The status of the resource is written more often,
/// and the DaemonSet of a canary once per batch. An installation that is not complete is continued.
fn require_one_write_per_object(writes: &[Record], state: State) -> Result<()> {
    if state == State::Deploying {
        return Ok(());
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for Record { verb, resource, namespace, name, .. } in writes {
        if resource != "kubevirts" && !(state == State::Canary && resource == "daemonsets") {
            *counts.entry(format!("{verb} {resource} {namespace}/{name}")).or_default() += 1;
        }
    }
    counts.retain(|_, count| *count > 1);
    ensure!(counts.is_empty(), "the take-over wrote objects more than once: {counts:?}");
    Ok(())
}

/// Replaces the operator that runs.
async fn hand_over(lab: &Lab, operator: &VirtOperator, state: State) -> Result<HandOver> {
    lab.delete_virt_operator(TIMEOUT).await?;
    let (ca, pods, vmi) = (certificate(lab, "kubevirt-ca").await?, component_pods(lab).await?, guest(lab).await?);
    let seen = operator_requests(lab)?.len();
    if state == State::UpstreamPermissions {
        // What exists is not changed, so only the Deployment is new.
        lab.create_virt_operator(operator).await?;
    } else {
        lab.replace_virt_operator(operator).await?;
    }
    wait_for_leader(lab).await?;
    wait_until_deployed(lab).await?;
    let mut restarted: BTreeSet<String> = BTreeSet::new();
    if operator.program.is_some() {
        wait_until_quiet(lab).await?;
    } else {
        // Upstream virt-operator writes forever. It reconciles every five seconds.
        sleep(3 * QUIET).await;
        wait_until_deployed(lab).await?;
    }
    let present = component_pods(lab).await?;
    restarted.extend(pods.difference(&present).cloned());
    let found = guest(lab).await?;
    ensure!(found == vmi, "the VMI changed from {vmi:?} to {found:?}");
    let (writes, objects) = (writes(lab, seen)?, lab.installed(None).await?.len());
    ensure!(writes.len() <= objects, "{} writes for {objects} objects", writes.len());
    Ok(HandOver { writes, restarted, ca_kept: certificate(lab, "kubevirt-ca").await? == ca })
}

/// Successful writes of the operator, except for the Lease and events.
fn writes(lab: &Lab, seen: usize) -> Result<Vec<Record>> {
    let is_write = |record: &Record| {
        let related = !["leases", "events"].contains(&record.resource.as_str());
        related && record.is_write() && record.code.is_some_and(|code| code < 300)
    };
    Ok(operator_requests(lab)?.into_iter().skip(seen).filter(is_write).collect())
}

/// A pod of the present Deployment holds the Lease. Upstream virt-operator does not release its Lease.
async fn wait_for_leader(lab: &Lab) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let pods = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
        let names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
        let spec = leases.get_opt("virt-operator").await?.and_then(|lease| lease.spec).unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        if names.iter().any(|name| holder.starts_with(name.as_str())) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "none of the pods {names:?} leads; {holder:?} holds the Lease");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until the operator has written nothing for a while.
async fn wait_until_quiet(lab: &Lab) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let (mut count, mut since) = (writes(lab, 0)?.len(), Instant::now());
    while since.elapsed() < QUIET {
        ensure!(Instant::now() < deadline, "the operator does not stop writing");
        sleep(Duration::from_millis(200)).await;
        let now = writes(lab, 0)?.len();
        if now != count {
            (count, since) = (now, Instant::now());
        }
    }
    Ok(())
}

/// The certificate in a Secret.
async fn certificate(lab: &Lab, secret: &str) -> Result<String> {
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let data = secrets.get(secret).await?.data.unwrap_or_default();
    let bytes = data.get("tls.crt").with_context(|| format!("Secret {secret} has no certificate"))?;
    Ok(String::from_utf8(bytes.0.clone())?)
}

/// Name and UID of each pod of a component that is not being deleted.
pub(crate) async fn component_pods(lab: &Lab) -> Result<BTreeSet<String>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let components =
        ListParams::default().labels("kubevirt.io in (virt-api,virt-controller,virt-handler,virt-exportproxy)");
    let pods = pods.list(&components).await?;
    let pods = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    Ok(pods.map(|pod| format!("{} {}", pod.name_any(), pod.uid().unwrap_or_default())).collect())
}

/// UID, phase and node of the guest, if there is one.
async fn guest(lab: &Lab) -> Result<Option<[String; 3]>> {
    let kind = kubevirt_resource("VirtualMachineInstance");
    let vmis: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &kind);
    let vmi = vmis.get_opt("stays").await?;
    Ok(vmi.map(|vmi| [vmi.uid().unwrap_or_default(), text(&vmi, "/status/phase"), text(&vmi, "/status/nodeName")]))
}
