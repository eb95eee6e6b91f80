//! The NetworkConfiguration controller: lets go of a network that no Machine names any more, however the last one left.

use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target, reason};
use vitivirt_machine::network_finalizer::{self, ObservedNetwork};
use vitivirt_runtime::reconcile::Controller;
use vitivirt_runtime::watch::SyncState;

use crate::cache::{Caches, MachineEntry, in_namespace};

pub(crate) struct NetworkController {
    pub(crate) caches: Caches,
}

impl Controller for NetworkController {
    type Observed = ObservedNetwork;
    type Status = Value;

    const NAME: &'static str = "NetworkConfiguration";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<ObservedNetwork>, Failure> {
        let Some(entry) = self.caches.networks.entry(key).filter(|entry| entry.value.finalizer_index.is_some()) else {
            return Ok(None);
        };
        // That nobody uses it is an absence, and a cache that may have missed something cannot tell one.
        let machines = &self.caches.machines;
        if machines.sync_state() != SyncState::Synced || !machines.is_complete() {
            let words =
                "the Machines are not all known at the moment; whether one uses the network is asked again later";
            return Err(Failure::transient(reason::API_SERVER_UNREACHABLE, words));
        }
        let users = machines.by_index(MachineEntry::BY_NETWORK, &in_namespace(key, key.name()));
        Ok(Some(ObservedNetwork {
            key: key.clone(),
            uid: entry.uid.to_string(),
            finalizer_index: entry.value.finalizer_index,
            used: !users.is_empty(),
        }))
    }

    fn plan(&self, observed: &ObservedNetwork) -> Result<Plan, Failure> {
        Ok(network_finalizer::plan(observed))
    }

    /// Nothing is created here.
    fn owns(&self, _: &ObservedNetwork, _: &Target, _: &Value) -> bool {
        false
    }

    /// A NetworkConfiguration has no status; a release is worth a line in the log.
    fn report(&self, _: &ObservedNetwork, _: &Plan, outcome: &Outcome) -> Report {
        if outcome.written > 0 {
            tracing::info!("no Machine uses the network any more; it may be deleted");
        }
        Report::default()
    }
}
