//! The leader is killed right after the API server stored one of its writes, and another process leads. The end state
//! equals the one without the crash.
//!
//! `cargo xtask test` tries two writes; `cargo xtask chaos install` tries random ones. The processes run outside of pods,
//! because the fault proxy kills a process by its PID.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Secret, discovery::v1::EndpointSlice};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, LabOptions, OperatorProcess, OperatorProcessOptions, VirtOperator,
    harness::{SharedLabs, Suite},
    proxy::{Match, ProxyFault, ProxyRule, When},
};
use vitivirt_runtime::lease::message;
use vitivirt_snapshot::{Snapshot, compare};

use crate::{
    lifecycle::replace_spec,
    support::{NAMESPACE, create_kubevirt, is_available, kubevirts, operator_requests, program, text, writes_since},
    webhook_client::WebhookClient,
};

/// Set by `cargo xtask chaos install`: the number of writes of each phase and the random seed, as `40,7`.
const CAMPAIGN: &str = "FAILOVER_WRITES_AND_SEED";
/// Set by `cargo xtask chaos install --replay`: `install:17`.
const REPLAY: &str = "FAILOVER_REPLAY";
const TIMEOUT: Duration = Duration::from_secs(120);
const MAX_FIELDS: usize = 5;

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; a_leader_that_dies_after_a_write_does_not_change_the_result);
}

/// What the leader does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Install,
    Rotation,
    Removal,
}

impl Phase {
    const ALL: [Self; 3] = [Self::Install, Self::Rotation, Self::Removal];

    fn name(self) -> &'static str {
        match self {
            Self::Install => "install",
            Self::Rotation => "rotation",
            Self::Removal => "removal",
        }
    }
}

/// The end state of a phase, and how many writes it takes.
struct Expected {
    phase: Phase,
    snapshot: Snapshot,
    writes: u64,
}

async fn a_leader_that_dies_after_a_write_does_not_change_the_result(_: Arc<SharedLabs>) -> Result<()> {
    let undisturbed = Box::pin(Replicas::start()).await?;
    let mut expected = Vec::new();
    for phase in Phase::ALL {
        let seen = operator_requests(&undisturbed.lab)?.len();
        undisturbed.run(phase).await.with_context(|| format!("{} without a crash", phase.name()))?;
        let writes = u64::try_from(writes_since(&undisturbed.lab, seen)?.len())?;
        eprintln!("{} takes {writes} writes", phase.name());
        expected.push(Expected { phase, snapshot: undisturbed.lab.installed(None).await?, writes });
    }
    undisturbed.lab.stop().await?;
    let mut failed = Vec::new();
    for (phase, nth) in crashes(&expected)? {
        let expected = expected.iter().find(|expected| expected.phase == phase).context("unknown phase")?;
        eprintln!("{}: the leader dies after write {nth} of {}", phase.name(), expected.writes);
        if let Err(error) = Box::pin(check(phase, nth, &expected.snapshot)).await {
            failed.push(format!("cargo xtask chaos install --replay {}:{nth}\n{error:#}", phase.name()));
        }
    }
    ensure!(failed.is_empty(), "{} crashes changed the result:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}

fn crashes(expected: &[Expected]) -> Result<Vec<(Phase, u64)>> {
    if let Ok(replay) = std::env::var(REPLAY) {
        let (name, nth) = replay.split_once(':').context("must have the form PHASE:NUMBER")?;
        let phase = Phase::ALL.into_iter().find(|phase| phase.name() == name).context("unknown phase")?;
        return Ok(vec![(phase, nth.parse()?)]);
    }
    let Ok(campaign) = std::env::var(CAMPAIGN) else {
        let sample = |expected: &Expected| match expected.phase {
            Phase::Install | Phase::Removal => expected.writes / 2,
            // Between a CA and its bundle.
            Phase::Rotation => 2,
        };
        return Ok(expected.iter().map(|expected| (expected.phase, sample(expected))).collect());
    };
    let (writes, seed) = campaign.split_once(',').context("must have the form WRITES,SEED")?;
    let (writes, seed): (u64, u64) = (writes.parse()?, seed.parse()?);
    let random = |phase: Phase, number: u64, of: u64| {
        let mut hasher = DefaultHasher::new();
        (seed, phase.name(), number).hash(&mut hasher);
        1 + hasher.finish() % of.max(1)
    };
    let mut all = Vec::new();
    for expected in expected {
        all.extend((0..writes).map(|number| (expected.phase, random(expected.phase, number, expected.writes))));
    }
    Ok(all)
}

async fn check(phase: Phase, nth: u64, expected: &Snapshot) -> Result<()> {
    let mut replicas = Replicas::start().await?;
    let name = format!("failover-{}-{nth}", phase.name());
    let result = async {
        if phase != Phase::Install {
            replicas.run(Phase::Install).await?;
        }
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

/// A lab in which one process of the operator runs at a time.
struct Replicas {
    lab: Lab,
    leader: OperatorProcess,
}

impl Replicas {
    async fn start() -> Result<Self> {
        let lab = Lab::start(LabOptions::default()).await?;
        // CRD and RBAC stay. The processes run outside of pods.
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.delete_virt_operator(TIMEOUT).await?;
        let leader = start_leader(&lab, true).await?;
        Ok(Self { lab, leader })
    }

    async fn run(&self, phase: Phase) -> Result<()> {
        let old = old_certificates(&self.lab, phase).await?;
        begin(&self.lab, phase).await?;
        wait_until_done(&self.lab, phase, &old).await
    }

    /// Kills the leader after a write of this phase, and lets another process complete it.
    async fn run_and_kill(&mut self, phase: Phase, nth: u64) -> Result<()> {
        let old = old_certificates(&self.lab, phase).await?;
        let matcher = Match::writes().user_agent("virt-operator/").except(["leases", "events"]);
        let kill = ProxyFault::kill(u32::try_from(self.leader.pid())?)?;
        let rule = self.lab.proxy().add(ProxyRule::new(matcher, When::Nth(nth), kill));
        begin(&self.lab, phase).await?;
        self.leader.wait(TIMEOUT).await.with_context(|| format!("the leader made fewer than {nth} writes"))?;
        ensure!(rule.hits() == 1, "the leader exited, but it was not killed");
        drop(rule);
        // The tests of the Lease cover that it expires.
        let leases: Api<Lease> = Api::namespaced(self.lab.client(), NAMESPACE);
        leases.delete("virt-operator", &DeleteParams::default()).await?;
        self.leader = start_leader(&self.lab, false).await?;
        wait_until_done(&self.lab, phase, &old).await
    }
}

/// Starts a process, waits until it leads, and sends it the calls of its webhooks.
async fn start_leader(lab: &Lab, through_proxy: bool) -> Result<OperatorProcess> {
    let leader = lab
        .run(OperatorProcessOptions {
            file: program(),
            namespace: NAMESPACE.to_owned(),
            service_account: "kubevirt-operator".to_owned(),
            arguments: ["--listen", "{address}", "--port", "8443"].map(str::to_owned).to_vec(),
            environment: vec![("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned())],
            through_proxy,
        })
        .await?;
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
    Ok(leader)
}

async fn begin(lab: &Lab, phase: Phase) -> Result<()> {
    match phase {
        Phase::Install => create_kubevirt(lab, &json!({})).await,
        Phase::Rotation => replace_spec(lab, &rotated()).await.map(|_| ()),
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

/// Waits for the end of a phase: the resource is gone, or it is observed, every certificate in `old` was renewed, and every webhook is
/// trusted.
async fn wait_until_done(lab: &Lab, phase: Phase, old: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    if phase == Phase::Removal {
        let gone = lab.wait("KubeVirt is gone", TIMEOUT, kubevirts(lab), "kubevirt", |found| found.is_none());
        return gone.await.map(drop);
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
