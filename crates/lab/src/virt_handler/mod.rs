//! The simulated virt-handler of every node: it starts, migrates and stops guests that do not exist.
//!
//! Like the real one, it writes as `system:serviceaccount:kubevirt:kubevirt-handler` with a token that is bound to the
//! node's virt-handler pod: virt-api drops status from other users, and the node-restriction policy checks the node in
//! the token.

mod lifecycle;
mod migration;

use std::{collections::HashMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, PostParams},
    runtime::watcher,
};
use lifecycle::Guest;
use serde_json::Value;
use tokio::{
    sync::{Mutex, watch},
    time::Instant,
};

use crate::{
    addresses::AddressRange,
    credentials::{Credentials, service_account_credentials},
    kubelet::PodAddresses,
    object_watch::run_per_object,
    pace::DelayRange,
    vmi::{self, VmiPhases, VmiSummary},
};

pub(crate) const NAMESPACE: &str = "kubevirt";
const ACCOUNT: &str = "kubevirt-handler";
const RETRY: Duration = Duration::from_millis(200);

/// The activities of a guest that take time.
pub(crate) const BOOT: &str = "the guest boots";
const STOP: &str = "the guest stops";
const ADDRESSES: &str = "the guest reports its addresses";

/// How guests behave.
#[derive(Clone, Debug)]
pub struct GuestBehaviour {
    pub boots_after: DelayRange,
    /// From the time at which the guest runs until it has addresses.
    pub addresses_after: DelayRange,
    pub stops_after: DelayRange,
    pub live_migratable: bool,
    pub migration_takes: DelayRange,
    pub migrations_fail: bool,
}

impl Default for GuestBehaviour {
    fn default() -> Self {
        GuestBehaviour {
            boots_after: DelayRange::NONE,
            addresses_after: DelayRange::NONE,
            stops_after: DelayRange::NONE,
            live_migratable: true,
            migration_takes: DelayRange::NONE,
            migrations_fail: false,
        }
    }
}

/// How a guest stops without a request from KubeVirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    Shutdown,
    Crash,
}

#[derive(Clone)]
pub(crate) struct VirtHandler {
    pub(crate) client: Client,
    pub(crate) admin: Credentials,
    pub(crate) address_range: Arc<AddressRange>,
    pub(crate) behaviour: watch::Receiver<GuestBehaviour>,
    pub(crate) seed: u64,
    pub(crate) vmis: VmiPhases,
    pub(crate) addresses: PodAddresses,
    /// By node: the UID of the virt-handler pod, and a client with its token.
    pub(crate) identities: Arc<Mutex<HashMap<String, (String, Client)>>>,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VmiWrite {
    Stored,
    /// There is a newer version, or the VMI was deleted.
    Outdated,
}

/// The simulated duration of one activity. Changes of the VMI in the meantime do not restart it.
#[derive(Default)]
struct DelayTimer(Option<(String, Instant)>);

impl DelayTimer {
    /// The remaining time of `activity`. None when it is done.
    fn remaining(&mut self, activity: &str, duration: Duration) -> Option<Duration> {
        let since = match &self.0 {
            Some((known, since)) if known == activity => *since,
            _ => Instant::now(),
        };
        self.0 = Some((activity.to_owned(), since));
        Some(duration.saturating_sub(since.elapsed())).filter(|remaining| !remaining.is_zero())
    }
}

impl VirtHandler {
    /// Runs until cancelled.
    pub(crate) async fn run(self) {
        let observe = |uid: &str, vmi: Option<&DynamicObject>| match vmi {
            Some(vmi) => self.vmis.set(uid.to_owned(), &VmiSummary::from_vmi(vmi)),
            None => self.vmis.remove(uid),
        };
        let vmis = vmi::all_vmis(self.client.clone());
        run_per_object(vmis, watcher::Config::default(), observe, |changes| self.clone().run_vmi(changes)).await;
    }

    async fn run_vmi(self, mut changes: watch::Receiver<Option<DynamicObject>>) {
        let mut timer = DelayTimer::default();
        loop {
            let Some(vmi) = changes.borrow_and_update().clone() else { return };
            let next_check = match self.act(&vmi, &mut timer).await {
                Ok(next_check) => next_check,
                Err(error) => {
                    tracing::debug!("virt-handler, {}: {error:#}", vmi.name_any());
                    Some(RETRY)
                }
            };
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(next_check.unwrap_or(Duration::MAX)) => {}
            }
        }
    }

    /// Makes the next write for this VMI, if there is one and it is due. Returns when to check again if nothing changes
    /// before. It does not wait itself, so that the caller can react to changes and deletion of the VMI.
    async fn act(&self, vmi: &DynamicObject, timer: &mut DelayTimer) -> Result<Option<Duration>> {
        let now = vmi::now();
        let document = serde_json::to_value(vmi).context("reading a VMI")?;
        let node = vmi.data.pointer("/status/nodeName").and_then(Value::as_str).unwrap_or_default().to_owned();
        let behaviour = self.behaviour.borrow().clone();
        let delay = |range: DelayRange, what: &str| {
            range.pick(self.seed, what, &format!("{}/{}", vmi.namespace().unwrap_or_default(), vmi.name_any()))
        };
        let (node, next) = match lifecycle::phase(&document) {
            _ if node.is_empty() => return Ok(None),
            "Scheduled" | "Running" if lifecycle::is_being_deleted(&document) => {
                if let Some(remaining) = timer.remaining(STOP, delay(behaviour.stops_after, STOP)) {
                    return Ok(Some(remaining));
                }
                (node, lifecycle::ended(&document, "Succeeded", &now))
            }
            "Scheduled" => {
                if let Some(remaining) = timer.remaining(BOOT, delay(behaviour.boots_after, BOOT)) {
                    return Ok(Some(remaining));
                }
                let mut guest = self.guest(vmi, &node, &behaviour, now);
                guest.reports_addresses = behaviour.addresses_after == DelayRange::NONE;
                (node, lifecycle::started(&document, &guest))
            }
            "Running" => {
                let Some(write) = self.migrate(&document, &now, behaviour.migrations_fail) else {
                    if behaviour.addresses_after == DelayRange::NONE || lifecycle::has_addresses(&document) {
                        return Ok(None);
                    }
                    if let Some(remaining) = timer.remaining(ADDRESSES, delay(behaviour.addresses_after, ADDRESSES)) {
                        return Ok(Some(remaining));
                    }
                    let guest = self.guest(vmi, &node, &behaviour, now);
                    return self.write(&node, lifecycle::with_addresses(&document, &guest)).await.map(|_| None);
                };
                let migration = vmi.data.pointer("/status/migrationState/migrationUid").and_then(Value::as_str);
                if write.copies
                    && let Some(remaining) = timer.remaining(
                        migration.unwrap_or_default(),
                        delay(behaviour.migration_takes, "the guest migrates"),
                    )
                {
                    return Ok(Some(remaining));
                }
                (write.node, write.vmi)
            }
            _ => return Ok(None),
        };
        // The result does not matter here: if there is a newer version, the watch delivers it.
        self.write(&node, next).await.map(|_| None)
    }

    fn guest(&self, vmi: &DynamicObject, node: &str, behaviour: &GuestBehaviour, now: String) -> Guest {
        Guest {
            address: self.address_of(vmi, node),
            reports_addresses: true,
            live_migratable: behaviour.live_migratable,
            now,
        }
    }

    fn migrate(&self, vmi: &Value, now: &str, fails: bool) -> Option<migration::MigrationStep> {
        let address_of = |node: &str| self.host_address(node);
        migration::next(vmi, &migration::MigrationContext { now, fails, address_of: &address_of })
    }

    /// Stops the guest. Other clients write the same VMI, so the write is retried until it is stored or the VMI is
    /// deleted.
    pub(crate) async fn end(&self, namespace: &str, name: &str, end: GuestEnd) -> Result<()> {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &vmi::resource());
        let phase = match end {
            GuestEnd::Shutdown => "Succeeded",
            GuestEnd::Crash => "Failed",
        };
        let reading = || format!("reading VMI {namespace}/{name}");
        let mut vmi = api.get(name).await.with_context(reading)?;
        let uid = vmi.uid();
        loop {
            let node = VmiSummary::from_vmi(&vmi).node;
            let document = serde_json::to_value(&vmi).context("reading a VMI")?;
            if self.write(&node, lifecycle::ended(&document, phase, &vmi::now())).await? == VmiWrite::Stored {
                return Ok(());
            }
            match api.get_opt(name).await.with_context(reading)?.filter(|newer| newer.uid() == uid) {
                Some(newer) => vmi = newer,
                None => return Ok(()),
            }
        }
    }

    /// Writes with the resourceVersion that was read, because virt-controller writes the same object.
    async fn write(&self, node: &str, vmi: Value) -> Result<VmiWrite> {
        let vmi: DynamicObject = serde_json::from_value(vmi).context("writing a VMI")?;
        let client = self.identity(node).await?;
        let api: Api<DynamicObject> =
            Api::namespaced_with(client, &vmi.namespace().unwrap_or_default(), &vmi::resource());
        match api.replace(&vmi.name_any(), &PostParams::default(), &vmi).await {
            Ok(_) => Ok(VmiWrite::Stored),
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(VmiWrite::Outdated),
            Err(error) => {
                self.identities.lock().await.remove(node);
                Err(error).context("writing a VMI as virt-handler")
            }
        }
    }

    fn address_of(&self, vmi: &DynamicObject, node: &str) -> Option<String> {
        let pods = vmi.data.pointer("/status/activePods")?.as_object()?;
        let (uid, _) = pods.iter().find(|(_, on)| on.as_str() == Some(node))?;
        Some(self.addresses.get(uid)?.to_string())
    }

    fn host_address(&self, node: &str) -> String {
        let number = node.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(1);
        self.address_range.node(number).to_string()
    }

    /// A client with the token of the node's virt-handler pod.
    pub(crate) async fn identity(&self, node: &str) -> Result<Client> {
        let mut identities = self.identities.lock().await;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        if let Some((_, client)) = identities.get(node) {
            return Ok(client.clone());
        }
        let selection =
            ListParams::default().labels("kubevirt.io=virt-handler").fields(&format!("spec.nodeName={node}"));
        let pod = pods
            .list(&selection)
            .await?
            .items
            .into_iter()
            .find(|pod| pod.metadata.deletion_timestamp.is_none())
            .ok_or_else(|| anyhow!("virt-handler pod on node {node} not found"))?;
        let credentials =
            service_account_credentials(&self.admin, &self.client, NAMESPACE, ACCOUNT, Some(&pod)).await?;
        let client = credentials.client("virt-handler")?;
        identities.insert(node.to_owned(), (pod.uid().unwrap_or_default(), client.clone()));
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_repeated_check_does_not_restart_the_timer() {
        let seconds = Duration::from_secs;
        let mut timer = DelayTimer::default();
        assert_eq!(timer.remaining("boot", Duration::ZERO), None);
        assert_eq!(timer.remaining("boot", seconds(10)), Some(seconds(10)));
        tokio::time::advance(seconds(4)).await;
        assert_eq!(timer.remaining("boot", seconds(10)), Some(seconds(6)));
        assert_eq!(timer.remaining("boot", seconds(3)), None, "the duration may change in between");
        tokio::time::advance(seconds(6)).await;
        assert_eq!(timer.remaining("boot", seconds(10)), None);
        assert_eq!(timer.remaining("migration", seconds(10)), Some(seconds(10)), "another activity restarts the timer");
    }
}
