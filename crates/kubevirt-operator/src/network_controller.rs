//! The NetworkConfiguration controller: removes the operator's finalizer from a network that no Machine uses. It covers
//! the cases in which no Machine is left to do that, such as a Machine whose finalizer a user removed.

use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target, reason};
use vitivirt_machine::network_finalizer::{self, ObservedNetwork};
use vitivirt_runtime::{reconcile::Controller, watch::SyncState};

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
        // "No Machine uses the network" is an absence. Only a cache that holds every Machine can prove it.
        let machines = &self.caches.machines;
        if machines.sync_state() != SyncState::Synced || !machines.is_complete() {
            let message = "the cache of Machines is not complete, so whether a Machine uses the network is unknown; \
                           the operator retries automatically";
            return Err(Failure::transient(reason::API_SERVER_UNREACHABLE, message));
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

    /// This controller creates no objects.
    fn owns(&self, _: &ObservedNetwork, _: &Target, _: &Value) -> bool {
        false
    }

    /// A NetworkConfiguration has no status, so the log records the removal of the finalizer.
    fn report(&self, _: &ObservedNetwork, _: &Plan, outcome: &Outcome) -> Report {
        if outcome.written > 0 {
            tracing::info!(
                finalizer = vitivirt_api::machine::FINALIZER_NETWORK,
                "finalizer removed from a network that no Machine uses"
            );
        }
        Report::default()
    }
}
