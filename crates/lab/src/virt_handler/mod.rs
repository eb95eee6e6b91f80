//! The simulated virt-handler of every node: it starts, migrates and ends guests that do not exist.
//!
//! It writes as `system:serviceaccount:kubevirt:kubevirt-handler` with a token bound to the virt-handler pod of the
//! node, exactly as the real one: virt-api drops status that anybody else writes, and the node-restriction policy looks
//! at the node that a token names.

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
    credentials::{Credentials, of_service_account},
    kubelet::PodAddresses,
    object_watch::run_per_object,
    vmi::{self, VmiPhases, VmiSummary},
};

pub(crate) const NAMESPACE: &str = "kubevirt";
const ACCOUNT: &str = "kubevirt-handler";
const RETRY: Duration = Duration::from_millis(200);

/// What guests do.
#[derive(Clone, Debug)]
pub struct GuestBehaviour {
    pub boots_after: Duration,
    pub live_migratable: bool,
    pub migration_takes: Duration,
    pub migrations_fail: bool,
}

impl Default for GuestBehaviour {
    fn default() -> Self {
        GuestBehaviour {
            boots_after: Duration::ZERO,
            live_migratable: true,
            migration_takes: Duration::ZERO,
            migrations_fail: false,
        }
    }
}

/// How a guest ends by itself.
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
    pub(crate) behaviour: GuestBehaviour,
    pub(crate) vmis: VmiPhases,
    pub(crate) addresses: PodAddresses,
    /// By node: the pod whose token it is, and a client with that token.
    pub(crate) identities: Arc<Mutex<HashMap<String, (String, Client)>>>,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VmiWrite {
    Stored,
    /// There is a newer version, or none any more.
    Outdated,
}

/// What takes its time, and since when. Changes of the VMI in the meantime do not begin it again.
#[derive(Default)]
struct DelayTimer(Option<(String, Instant)>);

impl DelayTimer {
    /// How long `what` still takes; none when it is done.
    fn left(&mut self, what: &str, takes: Duration) -> Option<Duration> {
        let since = match &self.0 {
            Some((known, since)) if known == what => *since,
            _ => Instant::now(),
        };
        self.0 = Some((what.to_owned(), since));
        Some(takes.saturating_sub(since.elapsed())).filter(|left| !left.is_zero())
    }
}

impl VirtHandler {
    /// Runs until cancelled.
    pub(crate) async fn run(self) {
        let note = |uid: &str, vmi: Option<&DynamicObject>| match vmi {
            Some(vmi) => self.vmis.set(uid.to_owned(), &VmiSummary::of(vmi)),
            None => self.vmis.remove(uid),
        };
        let vmis = vmi::all(self.client.clone());
        run_per_object(vmis, watcher::Config::default(), note, |news| self.clone().look_after(news)).await;
    }

    async fn look_after(self, mut news: watch::Receiver<Option<DynamicObject>>) {
        let mut timer = DelayTimer::default();
        loop {
            let Some(vmi) = news.borrow_and_update().clone() else { return };
            let again = match self.act(&vmi, &mut timer).await {
                Ok(again) => again,
                Err(error) => {
                    tracing::debug!("virt-handler, {}: {error:#}", vmi.name_any());
                    Some(RETRY)
                }
            };
            tokio::select! {
                changed = news.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(again.unwrap_or(Duration::MAX)) => {}
            }
        }
    }

    /// The next write for this VMI, if there is one and its time has come. Returns when to look again if nothing
    /// happens before: what takes its time is waited for outside, where the VMI's end and its changes are noticed.
    async fn act(&self, vmi: &DynamicObject, timer: &mut DelayTimer) -> Result<Option<Duration>> {
        let now = vmi::now();
        let document = serde_json::to_value(vmi).context("reading a VMI")?;
        let node = vmi.data.pointer("/status/nodeName").and_then(Value::as_str).unwrap_or_default().to_owned();
        let (node, next) = match lifecycle::phase(&document) {
            _ if node.is_empty() => return Ok(None),
            "Scheduled" | "Running" if lifecycle::is_leaving(&document) => {
                (node, lifecycle::ended(&document, "Succeeded", &now))
            }
            "Scheduled" => {
                if let Some(left) = timer.left("the guest boots", self.behaviour.boots_after) {
                    return Ok(Some(left));
                }
                let guest = Guest {
                    address: self.address_of(vmi, &node),
                    live_migratable: self.behaviour.live_migratable,
                    now,
                };
                (node, lifecycle::started(&document, &guest))
            }
            "Running" => {
                let Some(write) = self.migrate(&document, &now, self.behaviour.migrations_fail) else {
                    return Ok(None);
                };
                let migration = vmi.data.pointer("/status/migrationState/migrationUid").and_then(Value::as_str);
                if write.copies
                    && let Some(left) = timer.left(migration.unwrap_or_default(), self.behaviour.migration_takes)
                {
                    return Ok(Some(left));
                }
                (write.node, write.vmi)
            }
            _ => return Ok(None),
        };
        // Whoever follows a VMI need not ask how it went: a newer version is on its way, and will be looked at.
        self.write(&node, next).await.map(|_| None)
    }

    fn migrate(&self, vmi: &Value, now: &str, fails: bool) -> Option<migration::MigrationStep> {
        let address_of = |node: &str| self.host_address(node);
        migration::next(vmi, &migration::MigrationContext { now, fails, address_of: &address_of })
    }

    /// The guest ends by itself. Others write the same VMI: it is read and written again until the end is stored, or
    /// somebody else has ended it.
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
            let node = VmiSummary::of(&vmi).node;
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

    /// With the resourceVersion that was read: virt-controller writes the same object.
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
            .ok_or_else(|| anyhow!("there is no virt-handler pod on {node}"))?;
        let credentials = of_service_account(&self.admin, &self.client, NAMESPACE, ACCOUNT, Some(&pod)).await?;
        let client = credentials.client("virt-handler")?;
        identities.insert(node.to_owned(), (pod.uid().unwrap_or_default(), client.clone()));
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn looking_again_does_not_begin_a_boot_again() {
        let seconds = Duration::from_secs;
        let mut timer = DelayTimer::default();
        assert_eq!(timer.left("boot", Duration::ZERO), None);
        assert_eq!(timer.left("boot", seconds(10)), Some(seconds(10)));
        tokio::time::advance(seconds(4)).await;
        assert_eq!(timer.left("boot", seconds(10)), Some(seconds(6)));
        assert_eq!(timer.left("boot", seconds(3)), None, "the wish may change in between");
        tokio::time::advance(seconds(6)).await;
        assert_eq!(timer.left("boot", seconds(10)), None);
        assert_eq!(timer.left("migration", seconds(10)), Some(seconds(10)), "another thing begins anew");
    }
}
