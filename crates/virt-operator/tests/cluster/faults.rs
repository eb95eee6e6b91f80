//! Known faults of upstream virt-operator that only a cluster shows, by their number in `docs/upstream-faults.md`. Each
//! test fails if this operator has the fault.
//!
//! The tests share one lab, in turn. The operator runs as a process, so that its log and its memory can be read.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        core::v1::{ConfigMap, Secret, Service},
        rbac::v1::ClusterRole,
    },
};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::{
    sync::{Mutex, MutexGuard, OnceCell},
    time::{Instant, sleep},
};
use vitivirt_lab::{
    Extension, Lab, LabOptions, OperatorProcess, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    alerts::MONITORING,
    failover::start_leader,
    lifecycle::replace_spec,
    support::{
        NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirts, operator_requests, program, wait_until_available,
    },
    webhook_client::WebhookClient,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(
        suite;
        fault_12_certificates_that_expired_while_the_operator_was_away_are_replaced,
        fault_14_an_edit_sends_no_request_for_instancetypes,
        fault_16_an_installation_needs_a_fraction_of_the_memory_of_upstream,
        fault_18_the_service_monitor_appears_when_its_service_account_does,
        fault_19_a_kind_that_is_not_served_is_logged_once,
        fault_25_a_role_that_cannot_be_granted_is_reported_with_the_missing_rule,
    );
}

/// An installation whose operator is one process.
struct Installation {
    lab: Lab,
    leader: Mutex<OperatorProcess>,
    /// The log of the process that installed KubeVirt, until that was complete.
    log: Vec<Value>,
}

impl Installation {
    /// The installation that the tests of this file share. The guard lets one test at a time use it.
    async fn shared() -> Result<(&'static Self, MutexGuard<'static, OperatorProcess>)> {
        static SHARED: OnceCell<Installation> = OnceCell::const_new();
        let installation = SHARED.get_or_try_init(Self::start).await?;
        Ok((installation, installation.leader.lock().await))
    }

    async fn start() -> Result<Self> {
        let lab = Lab::start(LabOptions::default()).await?;
        // CRD and RBAC stay. The process runs outside of pods.
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.delete_virt_operator(TIMEOUT).await?;
        let leader = start_leader(&lab, false).await?;
        // Each new CRD is a reason to check again which kinds are served.
        lab.install(Extension::Cdi).await?;
        create_kubevirt(&lab, &json!({})).await?;
        wait_until_available(&lab).await?;
        Ok(Self { lab, log: leader.log_lines(), leader: Mutex::new(leader) })
    }
}

/// The peak of upstream virt-operator that its developers reported, in MiB. It has grown since.
const UPSTREAM_PEAK: u64 = 380;

/// The programs of tests are not optimized, so the bound is generous.
async fn fault_16_an_installation_needs_a_fraction_of_the_memory_of_upstream(_: Arc<SharedLabs>) -> Result<()> {
    let (_, leader) = Installation::shared().await?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", leader.pid()))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no peak in the status")?;
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse()?;
    ensure!((1 << 10..UPSTREAM_PEAK * 1024 / 4).contains(&peak), "the peak is {peak} KiB");
    Ok(())
}

async fn fault_19_a_kind_that_is_not_served_is_logged_once(_: Arc<SharedLabs>) -> Result<()> {
    let (installation, _leader) = Installation::shared().await?;
    let lines = &installation.log;
    ensure!(lines.len() > 5, "the log has only {} lines", lines.len());
    let count = |message: &str| {
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        for line in lines.iter().filter(|line| line["message"].as_str().is_some_and(|text| text.contains(message))) {
            *kinds.entry(line["kind"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
        }
        kinds
    };
    let not_served = count("not served");
    let instancetypes = |kind: &String| kind.ends_with("/virtualmachineclusterinstancetypes");
    ensure!(not_served.keys().any(instancetypes), "they are not served at first: {not_served:?}");
    let repeated: Vec<_> = not_served.iter().filter(|(_, count)| **count > 1).collect();
    ensure!(repeated.is_empty(), "logged again: {repeated:?}");
    // The API server answers with an error until it has prepared the storage of a new CRD.
    let failed = count("watch failed");
    ensure!(failed.values().all(|count| *count <= 3), "watches fail again and again: {failed:?}");
    // Nor does the operator poll for them.
    let lists = |record: &&Record| record.resource == "securitycontextconstraints" && record.verb == "list";
    let lists = operator_requests(&installation.lab)?.iter().filter(lists).count();
    ensure!(lists <= 10, "{lists} requests for a kind that is not served");
    Ok(())
}

fn is_of_instancetypes(record: &Record) -> bool {
    ["virtualmachineclusterinstancetypes", "virtualmachineclusterpreferences"].contains(&record.resource.as_str())
}

/// Upstream virt-operator rewrites all of them for every generation of the resource.
async fn fault_14_an_edit_sends_no_request_for_instancetypes(_: Arc<SharedLabs>) -> Result<()> {
    let (installation, _leader) = Installation::shared().await?;
    let lab = &installation.lab;
    let requests = || -> Result<Vec<Record>> {
        let opens_watch = |record: &Record| ["list", "watch"].contains(&record.verb.as_str());
        let all = operator_requests(lab)?.into_iter().filter(is_of_instancetypes);
        Ok(all.filter(|record| !opens_watch(record)).collect())
    };
    let before = requests()?;
    let created: BTreeSet<&str> = before.iter().map(|record| record.name.as_str()).collect();
    ensure!(created.len() > 100, "{} instancetypes and preferences", created.len());
    let sent = before.iter().filter(|record| record.code.is_some_and(|code| code < 300)).count();
    ensure!(sent == created.len(), "{sent} requests for {} objects", created.len());
    for eviction in ["LiveMigrate", "None"] {
        let edit = json!({"spec": {"configuration": {"evictionStrategy": eviction}}});
        kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(edit)).await?;
        wait_until_available(lab).await?;
    }
    let after = requests()?;
    ensure!(after.len() == before.len(), "the edits sent {:?}", after.get(before.len()..));
    Ok(())
}

/// The monitoring stack is installed after KubeVirt: its CRDs, then its ServiceAccount.
async fn fault_18_the_service_monitor_appears_when_its_service_account_does(_: Arc<SharedLabs>) -> Result<()> {
    let (installation, _leader) = Installation::shared().await?;
    let lab = &installation.lab;
    let objects = |kind: &str, namespace: &str| -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("monitoring.coreos.com", "v1", kind);
        Api::namespaced_with(lab.client(), namespace, &ApiResource::from_gvk(&kind))
    };
    let name = "prometheus-kubevirt-rules";
    lab.install(Extension::Monitoring).await?;
    let monitors = objects("ServiceMonitor", "monitoring");
    ensure!(monitors.get_opt(name).await?.is_none(), "there is no ServiceAccount yet");
    lab.create(MONITORING).await?;
    lab.wait("the ServiceMonitor exists", TIMEOUT, monitors, name, |monitor| monitor.is_some()).await?;
    let rules = objects("PrometheusRule", NAMESPACE);
    lab.wait("the PrometheusRule exists", TIMEOUT, rules, name, |rule| rule.is_some()).await?;
    Ok(())
}

/// A resource that only a role of users grants; the operator itself does not use it.
const GRANTED: &str = "virtualmachineinstances/vnc/screenshot";

async fn fault_25_a_role_that_cannot_be_granted_is_reported_with_the_missing_rule(_: Arc<SharedLabs>) -> Result<()> {
    let (installation, _leader) = Installation::shared().await?;
    let lab = &installation.lab;
    let roles: Api<ClusterRole> = Api::all(lab.client());
    let role = roles.get("kubevirt-operator").await?;
    let mut reduced = role.clone();
    for rule in reduced.rules.iter_mut().flatten() {
        rule.resources.iter_mut().for_each(|resources| resources.retain(|resource| resource != GRANTED));
    }
    ensure!(reduced != role, "the operator's role does not contain {GRANTED}");
    let replace = |role: ClusterRole| {
        let metadata = ObjectMeta { name: role.metadata.name.clone(), ..ObjectMeta::default() };
        let (roles, role) = (roles.clone(), ClusterRole { metadata, ..role });
        async move { roles.replace("kubevirt-operator", &PostParams::default(), &role).await }
    };
    replace(reduced).await?;
    roles.delete("kubevirt.io:admin", &DeleteParams::default()).await?;
    let is_reported = |kubevirt: Option<&DynamicObject>| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, _, message)| {
            status == "True"
                && message.contains("create ClusterRole kubevirt.io:admin: it grants permissions")
                && message.contains(&format!("Resources:[\"{GRANTED}\"]"))
        })
    };
    lab.wait("the missing rule is reported", TIMEOUT, kubevirts(lab), "kubevirt", is_reported).await?;
    // Everything else is repaired.
    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    let old =
        services.delete("virt-api", &DeleteParams::default()).await?.left().and_then(|service| service.metadata.uid);
    lab.wait("the Service is created again", TIMEOUT, services, "virt-api", |service| {
        service.is_some_and(|service| service.metadata.uid != old)
    })
    .await?;
    replace(role).await?;
    lab.wait("the role is created", TIMEOUT, roles.clone(), "kubevirt.io:admin", |role| role.is_some()).await?;
    wait_until_available(lab).await
}

fn certificate(secret: Option<&Secret>) -> Option<Vec<u8>> {
    Some(secret?.data.as_ref()?.get("tls.crt")?.0.clone())
}

/// The operator does not run for longer than its certificates and its CA are valid. Meanwhile a webhook gets another CA
/// bundle.
async fn fault_12_certificates_that_expired_while_the_operator_was_away_are_replaced(_: Arc<SharedLabs>) -> Result<()> {
    let (installation, mut leader) = Installation::shared().await?;
    let lab = &installation.lab;
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let old = certificate(Some(&secrets.get("kubevirt-virt-api-certs").await?));
    let lifetimes = |spec: Value| json!({"certificateRotateStrategy": {"selfSigned": spec}});
    let short =
        json!({"ca": {"duration": "30s", "renewBefore": "10s"}, "server": {"duration": "20s", "renewBefore": "8s"}});
    replace_spec(lab, &lifetimes(short)).await?;
    lab.wait("the short lifetimes apply", TIMEOUT, secrets.clone(), "kubevirt-virt-api-certs", |secret| {
        certificate(secret).is_some_and(|current| Some(&current) != old.as_ref())
    })
    .await?;
    leader.signal(Signal::SIGTERM)?;
    leader.wait(TIMEOUT).await?;
    wait_until_expired(&secrets).await?;
    set_foreign_bundle(lab).await?;
    wait_until_refused(lab).await?;
    *leader = start_leader(lab, false).await?;
    WebhookClient::wait_until_answered(&lab.client()).await?;
    replace_spec(lab, &lifetimes(json!({}))).await.context("the webhook of the operator answers")?;
    wait_until_available(lab).await
}

/// Gives a webhook of virt-api the CA of the cluster.
async fn set_foreign_bundle(lab: &Lab) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let ca = maps.get("kube-root-ca.crt").await?.data.and_then(|mut data| data.remove("ca.crt"));
    let ca = ByteString(ca.context("the cluster has no CA")?.into_bytes());
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(lab.client());
    let mut configuration = webhooks.get("virt-api-mutator").await?;
    for webhook in configuration.webhooks.iter_mut().flatten() {
        webhook.client_config.ca_bundle = Some(ca.clone());
    }
    webhooks.replace("virt-api-mutator", &PostParams::default(), &configuration).await?;
    Ok(())
}

/// Waits until the CA has expired, and with it every certificate that it signed. The operator does not renew them.
async fn wait_until_expired(secrets: &Api<Secret>) -> Result<()> {
    let pem = certificate(Some(&secrets.get("kubevirt-ca").await?)).context("the Secret has no CA")?;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&pem)?;
    let validity = pem.parse_x509()?.validity().clone();
    ensure!(validity.is_valid(), "the CA must still be valid");
    while validity.is_valid() {
        // Only the clock decides when it expires.
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// Waits until the API server refuses the certificate of virt-api. With another CA bundle it opens new connections.
async fn wait_until_refused(lab: &Lab) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !WebhookClient::failures(&lab.client()).await.iter().any(|failure| failure.contains("webhook of virt-api")) {
        ensure!(Instant::now() < deadline, "the API server accepts an expired certificate");
        // No watch reports which CA bundle the API server uses, so this polls.
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}
