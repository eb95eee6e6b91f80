//! The leader is killed right after the API server stored one of its writes, and another process leads. The end state
//! equals the one without the crash.
//!
//! `cargo xtask test` tries one write of each phase; `cargo xtask chaos install` tries random ones and those between two
//! kinds of writes, such as a CA and a bundle. The processes run outside of pods, because the fault proxy kills a process
//! by its PID. The process that leads next has watched everything since before the phase, as a second replica does.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    apps::v1::Deployment,
    coordination::v1::Lease,
    core::v1::{ConfigMap, Pod, Secret, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_install::names::{FIELD_MANAGER, annotation};
use vitivirt_lab::{
    KubeVirtRelease, Lab, LabOptions, OperatorProcess, OperatorProcessOptions, PodFate, PodRule, Record, VirtOperator,
    harness::{SharedLabs, Suite},
    proxy::{Match, ProxyFault, ProxyRule, When},
};
use vitivirt_runtime::lease::message;
use vitivirt_snapshot::{Snapshot, compare};

use crate::{
    lifecycle::replace_spec,
    support::{
        NAMESPACE, create_kubevirt, is_available, kubevirts, operator_requests, program, text, wait_until_available,
        wait_until_release,
    },
    webhook_client::WebhookClient,
};

/// Set by `cargo xtask chaos install`: the number of writes of each phase and the random seed, as `40,7`.
const CAMPAIGN: &str = "FAILOVER_WRITES_AND_SEED";
/// Set by `cargo xtask chaos install --replay`: `install:17`.
const REPLAY: &str = "FAILOVER_REPLAY";
const TIMEOUT: Duration = Duration::from_secs(120);
/// In which the leader makes its last writes, after the end of the phase is visible.
const LAST_WRITES: Duration = Duration::from_secs(5);
const MAX_FIELDS: usize = 5;
const CANARY_NODES: u8 = 12;
/// Resources whose writes belong to no step of a plan.
const UNCOUNTED: [&str; 2] = ["leases", "events"];

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_leader_that_dies_after_a_write_of_an_installation_does_not_change_the_result,
        a_leader_that_dies_after_a_write_of_a_rotation_does_not_change_the_result,
        a_leader_that_dies_after_a_write_of_a_removal_does_not_change_the_result,
        a_leader_that_dies_after_a_write_of_an_upgrade_does_not_change_the_result,
        an_old_replica_reverts_nothing_while_a_newer_one_exists,
    );
}

/// What the leader does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Install,
    Rotation,
    Removal,
    /// From the previous release, which this operator installed by `imageTag`.
    Upgrade,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Install => "install",
            Self::Rotation => "rotation",
            Self::Removal => "removal",
            Self::Upgrade => "upgrade",
        }
    }
}

/// The end state of a phase, and the kind of each of its writes.
struct Expected {
    snapshot: Snapshot,
    writes: Vec<String>,
}

impl Expected {
    fn count(&self) -> u64 {
        self.writes.len() as u64
    }

    /// The numbers of the writes after which another kind of write follows. Each pair of kinds occurs once, because
    /// writes of one step are sent concurrently and alternate. Each batch of virt-handler is a step.
    fn boundaries(&self) -> Vec<u64> {
        let mut seen = BTreeSet::new();
        let is_batch = |write: &String| write == "patch daemonsets";
        let pairs = self.writes.windows(2).zip(1..);
        let changes = pairs.filter(|(pair, _)| {
            let is_new = seen.insert(pair.to_vec());
            pair[0] != pair[1] && (is_new || pair.iter().any(is_batch))
        });
        changes.map(|(_, number)| number).collect()
    }
}

async fn a_leader_that_dies_after_a_write_of_an_installation_does_not_change_the_result(
    _: Arc<SharedLabs>,
) -> Result<()> {
    Box::pin(try_crashes(Phase::Install)).await
}

async fn a_leader_that_dies_after_a_write_of_a_rotation_does_not_change_the_result(_: Arc<SharedLabs>) -> Result<()> {
    Box::pin(try_crashes(Phase::Rotation)).await
}

async fn a_leader_that_dies_after_a_write_of_a_removal_does_not_change_the_result(_: Arc<SharedLabs>) -> Result<()> {
    Box::pin(try_crashes(Phase::Removal)).await
}

async fn a_leader_that_dies_after_a_write_of_an_upgrade_does_not_change_the_result(_: Arc<SharedLabs>) -> Result<()> {
    Box::pin(try_crashes(Phase::Upgrade)).await
}

async fn try_crashes(phase: Phase) -> Result<()> {
    if replay()?.is_some_and(|(replayed, _)| replayed != phase.name()) {
        return Ok(());
    }
    let expected = run_undisturbed(phase).await.with_context(|| format!("{} without a crash", phase.name()))?;
    eprintln!("{} takes {} writes", phase.name(), expected.count());
    let mut failed = Vec::new();
    for nth in crashes(phase, &expected)? {
        eprintln!("{}: the leader dies after write {nth} of {}", phase.name(), expected.count());
        if let Err(error) = Box::pin(check(phase, nth, &expected.snapshot)).await {
            failed.push(format!("cargo xtask chaos install --replay {}:{nth}\n{error:#}", phase.name()));
        }
    }
    ensure!(failed.is_empty(), "{} crashes changed the result:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}

async fn run_undisturbed(phase: Phase) -> Result<Expected> {
    let replicas = Replicas::start(phase).await?;
    replicas.prepare(phase).await?;
    let seen = operator_requests(&replicas.lab)?.len();
    replicas.run(phase).await?;
    let writes =
        operator_requests(&replicas.lab)?.into_iter().skip(seen).filter(is_counted).map(kind_of_write).collect();
    let expected = Expected { snapshot: replicas.lab.installed(None).await?, writes };
    replicas.lab.stop().await?;
    Ok(expected)
}

/// The phase and the number of the write that a user replays.
fn replay() -> Result<Option<(String, u64)>> {
    let Ok(replay) = std::env::var(REPLAY) else { return Ok(None) };
    let (phase, nth) = replay.split_once(':').context("must have the form PHASE:NUMBER")?;
    Ok(Some((phase.to_owned(), nth.parse()?)))
}

/// The numbers of the writes after which the leader dies.
fn crashes(phase: Phase, expected: &Expected) -> Result<Vec<u64>> {
    if let Some((_, nth)) = replay()? {
        return Ok(vec![nth]);
    }
    let Ok(campaign) = std::env::var(CAMPAIGN) else {
        return Ok(vec![match phase {
            Phase::Install | Phase::Removal | Phase::Upgrade => expected.count() / 2,
            // Between a CA and its bundle.
            Phase::Rotation => 2,
        }]);
    };
    let (writes, seed) = campaign.split_once(',').context("must have the form WRITES,SEED")?;
    let (writes, seed): (u64, u64) = (writes.parse()?, seed.parse()?);
    let random = |number: u64| {
        let mut hasher = DefaultHasher::new();
        (seed, phase.name(), number).hash(&mut hasher);
        1 + hasher.finish() % expected.count().max(1)
    };
    let chosen: BTreeSet<u64> = (0..writes).map(random).chain(expected.boundaries()).collect();
    Ok(chosen.into_iter().collect())
}

/// Only a campaign has the time for an upgrade of so many nodes that virt-handler is updated in three batches.
fn nodes(phase: Phase) -> Result<u8> {
    let is_campaign = std::env::var(CAMPAIGN).is_ok() || replay()?.is_some();
    Ok(if is_campaign && phase == Phase::Upgrade { CANARY_NODES } else { LabOptions::default().nodes })
}

/// Whether the rule of the fault proxy counts this request.
fn is_counted(record: &Record) -> bool {
    record.is_write() && !UNCOUNTED.contains(&record.resource.as_str())
}

/// For example `patch secrets of a CA` or `update kubevirts/status`.
fn kind_of_write(record: Record) -> String {
    let Record { verb, resource, subresource, name, .. } = record;
    let of = match resource.as_str() {
        "secrets" | "configmaps" if name.contains("-ca") => " of a CA",
        "secrets" => " with a certificate",
        _ => "",
    };
    if subresource.is_empty() { format!("{verb} {resource}{of}") } else { format!("{verb} {resource}/{subresource}") }
}

/// Our operator installs the previous release by `imageTag`.
async fn install_previous_release(lab: &Lab) -> Result<()> {
    let version = KubeVirtRelease::Previous.version();
    create_kubevirt(lab, &json!({"imageTag": version})).await?;
    wait_until_release(lab, version, 2 * TIMEOUT).await
}

async fn check(phase: Phase, nth: u64, expected: &Snapshot) -> Result<()> {
    let mut replicas = Replicas::start(phase).await?;
    let name = format!("failover-{}-{nth}", phase.name());
    let result = async {
        replicas.prepare(phase).await?;
        replicas.run_and_kill(phase, nth).await?;
        let comparison = compare(expected, &replicas.lab.installed(None).await?);
        ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(MAX_FIELDS));
        anyhow::Ok(())
    };
    let result = result.await;
    let Replicas { lab, .. } = replicas;
    lab.keeping_logs(&name, async { result }).await?;
    lab.stop().await
}

/// A lab with a leader, and a second process that waits for the Lease.
struct Replicas {
    lab: Lab,
    leader: OperatorProcess,
    standby: OperatorProcess,
}

impl Replicas {
    async fn start(phase: Phase) -> Result<Self> {
        let lab = Lab::start(LabOptions { nodes: nodes(phase)?, ..LabOptions::default() }).await?;
        // CRD and RBAC stay. The processes run outside of pods.
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.delete_virt_operator(TIMEOUT).await?;
        let leader = start_leader(&lab, true).await?;
        let standby = start_process(&lab, false).await?;
        Ok(Self { lab, leader, standby })
    }

    /// Installs what a phase begins with.
    async fn prepare(&self, phase: Phase) -> Result<()> {
        match phase {
            Phase::Install => Ok(()),
            Phase::Rotation | Phase::Removal => self.run(Phase::Install).await,
            Phase::Upgrade => install_previous_release(&self.lab).await,
        }
    }

    async fn run(&self, phase: Phase) -> Result<()> {
        let old = old_certificates(&self.lab, phase).await?;
        begin(&self.lab, phase).await?;
        wait_until_done(&self.lab, phase, &old).await
    }

    /// Kills the leader after a write of this phase, and lets another process complete it.
    async fn run_and_kill(&mut self, phase: Phase, nth: u64) -> Result<()> {
        let old = old_certificates(&self.lab, phase).await?;
        let matcher = Match::writes().user_agent("virt-operator/").except(UNCOUNTED);
        let kill = ProxyFault::kill(u32::try_from(self.leader.pid())?)?;
        let rule = self.lab.proxy().add(ProxyRule::new(matcher, When::Nth(nth), kill));
        begin(&self.lab, phase).await?;
        let done = async {
            wait_until_done(&self.lab, phase, &old).await?;
            sleep(LAST_WRITES).await;
            anyhow::Ok(())
        };
        tokio::select! {
            exited = self.leader.wait(TIMEOUT) => {
                exited?;
                ensure!(rule.hits() == 1, "the leader exited, but it was not killed");
            }
            // How often the status is written depends on the speed of the pods, so there may be fewer writes this time.
            done = done => {
                done?;
                self.leader.signal(Signal::SIGKILL)?;
                self.leader.wait(TIMEOUT).await?;
            }
        }
        drop(rule);
        // The tests of the Lease cover that it expires.
        let leases: Api<Lease> = Api::namespaced(self.lab.client(), NAMESPACE);
        leases.delete("virt-operator", &DeleteParams::default()).await?;
        wait_until_it_leads(&self.lab, &self.standby).await?;
        wait_until_done(&self.lab, phase, &old).await
    }
}

pub(crate) async fn start_leader(lab: &Lab, through_proxy: bool) -> Result<OperatorProcess> {
    let leader = start_process(lab, through_proxy).await?;
    wait_until_it_leads(lab, &leader).await?;
    Ok(leader)
}

async fn start_process(lab: &Lab, through_proxy: bool) -> Result<OperatorProcess> {
    lab.run(OperatorProcessOptions {
        file: program(),
        namespace: NAMESPACE.to_owned(),
        service_account: "kubevirt-operator".to_owned(),
        arguments: ["--listen", "{address}", "--port", "8443"].map(str::to_owned).to_vec(),
        environment: vec![("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned())],
        through_proxy,
    })
    .await
}

/// Waits until a process leads, and sends it the calls of its webhooks.
async fn wait_until_it_leads(lab: &Lab, leader: &OperatorProcess) -> Result<()> {
    leader.wait_for_message(message::ACQUIRED, TIMEOUT).await?;
    let endpoints = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "virt-operator-process",
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": "kubevirt-operator-webhook"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [leader.address().to_string()], "conditions": {"ready": true}}],
        "ports": [{"name": "webhooks", "port": 8444, "protocol": "TCP"}],
    });
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), NAMESPACE);
    let apply = PatchParams::apply("lab").force();
    slices.patch("virt-operator-process", &apply, &Patch::Apply(&endpoints)).await.context("the endpoint")?;
    Ok(())
}

async fn begin(lab: &Lab, phase: Phase) -> Result<()> {
    match phase {
        Phase::Install => create_kubevirt(lab, &json!({})).await,
        Phase::Rotation => replace_spec(lab, &rotated()).await.map(|_| ()),
        Phase::Upgrade => replace_spec(lab, &json!({})).await.map(|_| ()),
        Phase::Removal => {
            let deleted = kubevirts(lab).delete("kubevirt", &DeleteParams::default()).await;
            deleted.map(|_| ()).context("deleting the KubeVirt resource")
        }
    }
}

/// Another lifetime of the CA: every certificate is renewed.
fn rotated() -> Value {
    json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "200h"}}}})
}

/// Waits for the end of a phase: the resource is gone, or it is deployed, every certificate in `old` was renewed, and every
/// webhook is trusted.
async fn wait_until_done(lab: &Lab, phase: Phase, old: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    if phase == Phase::Removal {
        let gone = lab.wait("KubeVirt is gone", TIMEOUT, kubevirts(lab), "kubevirt", |found| found.is_none());
        return gone.await.map(drop);
    }
    if phase == Phase::Upgrade {
        wait_until_release(lab, KubeVirtRelease::Current.version(), TIMEOUT).await?;
    }
    let is_deployed = |kubevirt: Option<&DynamicObject>| {
        kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/phase") == "Deployed" && is_available(kubevirt))
    };
    lab.wait("KubeVirt is deployed", TIMEOUT, kubevirts(lab), "kubevirt", is_deployed).await?;
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    for (name, old) in old {
        let is_new = |secret: Option<&Secret>| secret.and_then(certificate).is_some_and(|new| new != *old);
        lab.wait("the certificate is renewed", TIMEOUT, secrets.clone(), name, is_new).await?;
    }
    WebhookClient::wait_until_answered(&lab.client()).await
}

/// The certificates that a phase renews.
async fn old_certificates(lab: &Lab, phase: Phase) -> Result<BTreeMap<String, Vec<u8>>> {
    if phase != Phase::Rotation {
        return Ok(BTreeMap::new());
    }
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let secrets = secrets.list(&ListParams::default()).await?;
    Ok(secrets.iter().filter_map(|secret| Some((secret.name_any(), certificate(secret)?))).collect())
}

fn certificate(secret: &Secret) -> Option<Vec<u8>> {
    Some(secret.data.as_ref()?.get("tls.crt")?.0.clone())
}

/// The Deployment of the operator rolls out a newer version whose pod has led once and does not run now, so that a pod of
/// the old version leads.
async fn an_old_replica_reverts_nothing_while_a_newer_one_exists(_: Arc<SharedLabs>) -> Result<()> {
    let image = format!("example.org/virt-operator:{NEWER}");
    let lab = Lab::start(LabOptions::default()).await?;
    lab.set_pods(|pods| {
        pods.rules = vec![PodRule { image_contains: image.clone(), fate: PodFate::Crashes }];
    });
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;

    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let old = container_image(&deployments.get("virt-operator").await?).context("no image")?;
    set_image(&deployments, &image).await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let is_newer =
        |pod: &Pod| pod.spec.iter().flat_map(|spec| &spec.containers).any(|c| c.image.as_ref() == Some(&image));
    let deadline = Instant::now() + TIMEOUT;
    while !pods.list(&ListParams::default()).await?.iter().any(is_newer) {
        ensure!(Instant::now() < deadline, "no pod of the newer version was created");
        sleep(Duration::from_millis(100)).await;
    }
    let status = json!({"status": {"operatorVersion": NEWER}});
    kubevirts(&lab).patch_status("kubevirt", &PatchParams::default(), &Patch::Merge(&status)).await?;
    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    // The newer version removes an object that this one installs.
    services.delete(REMOVED, &DeleteParams::default()).await?;
    // In this time nothing may happen.
    sleep(Duration::from_secs(3)).await;
    ensure!(services.get_opt(REMOVED).await?.is_none(), "the old replica created Service {REMOVED} again");
    let version = text(&kubevirts(&lab).get("kubevirt").await?, "/status/operatorVersion");
    ensure!(version == NEWER, "the old replica wrote the status: {version}");
    renewed_certificates_keep_the_marks_of_the_newer_version(&lab).await?;

    // A user takes the newer version back.
    set_image(&deployments, &old).await?;
    lab.wait("the Service is back", TIMEOUT, services, REMOVED, |service| service.is_some()).await?;
    lab.wait("the old version reports", TIMEOUT, kubevirts(&lab), "kubevirt", |kubevirt| {
        kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/operatorVersion") == "v1.8.4" && is_available(kubevirt))
    })
    .await?;
    let (secrets, bundles) = (Api::namespaced(lab.client(), NAMESPACE), Api::namespaced(lab.client(), NAMESPACE));
    lab.wait("the Secret is of the old version", TIMEOUT, secrets, MARKED_SECRET, is_of_old::<Secret>).await?;
    lab.wait("the ConfigMap is of the old version", TIMEOUT, bundles, MARKED_BUNDLE, is_of_old::<ConfigMap>).await?;
    lab.stop().await
}

/// The newer version updates a Secret and a ConfigMap before its pod ends. The old replica renews their certificates, and
/// leaves the rest as it is.
async fn renewed_certificates_keep_the_marks_of_the_newer_version(lab: &Lab) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let bundles: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let marks = BTreeMap::from(MARKS_OF_NEWER.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let patch = Patch::Merge(json!({"metadata": {"annotations": marks}}));
    let newer = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let secret = secrets.patch(MARKED_SECRET, &newer, &patch).await?;
    let bundle = bundles.patch(MARKED_BUNDLE, &newer, &patch).await?;
    replace_spec(lab, &rotated()).await?;
    lab.wait("the certificate is renewed", TIMEOUT, secrets.clone(), MARKED_SECRET, |renewed| {
        renewed.is_some_and(|renewed| certificate(renewed) != certificate(&secret))
    })
    .await?;
    lab.wait("the new CA is trusted", TIMEOUT, bundles.clone(), MARKED_BUNDLE, |renewed| {
        renewed.is_some_and(|renewed| renewed.data != bundle.data)
    })
    .await?;
    let (secret, bundle) = (secrets.get(MARKED_SECRET).await?, bundles.get(MARKED_BUNDLE).await?);
    for annotations in [secret.annotations(), bundle.annotations()] {
        let are_kept = marks.iter().all(|(key, value)| annotations.get(key) == Some(value));
        ensure!(are_kept, "the old replica replaced the marks of the newer version: {annotations:?}");
    }
    Ok(())
}

fn is_of_old<K: ResourceExt>(object: Option<&K>) -> bool {
    object.and_then(|object| object.annotations().get(annotation::VERSION)).is_some_and(|version| version == "v1.8.4")
}

const NEWER: &str = "v1.9.0";
/// The annotations by which an operator marks the objects of its installation.
const MARKS_OF_NEWER: [(&str, &str); 3] = [
    (annotation::VERSION, NEWER),
    ("kubevirt.io/install-strategy-registry", "example.org"),
    (annotation::IDENTIFIER, "newer"),
];
const MARKED_SECRET: &str = "kubevirt-virt-api-certs";
const MARKED_BUNDLE: &str = "kubevirt-ca";
const REMOVED: &str = "kubevirt-prometheus-metrics";

fn container_image(deployment: &Deployment) -> Option<String> {
    deployment.spec.as_ref()?.template.spec.as_ref()?.containers.first()?.image.clone()
}

async fn set_image(deployments: &Api<Deployment>, image: &str) -> Result<()> {
    let container = json!({"name": "virt-operator", "image": image});
    let patch = json!({"spec": {"template": {"spec": {"containers": [container]}}}});
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::Strategic(&patch)).await?;
    Ok(())
}
