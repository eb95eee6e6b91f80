//! Remembers which objects of Machines the operator wrote a moment ago. `vitivirt_machine` delays writes that repeat
//! others too often, because another client undoes them.

use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, Secret},
    jiff::{SignedDuration, Timestamp},
};
use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::{
    ApiResource, ObjectKey, Plan, RecentWrites,
    resources::{network_attachment_resource, virtual_machine_resource},
};
use vitivirt_machine::{Observed, RecentWritesByObject, desired_digest, repaired_objects};
use vitivirt_runtime::{reconcile::Executor, watch::WriteObserver};

/// At least the deadline of a reconcile.
const SWEEP_INTERVAL: SignedDuration = SignedDuration::from_mins(1);

/// The kind and the key of an object.
type Object = (String, ObjectKey);

#[derive(Default)]
pub(crate) struct RepairHistory {
    recent: Mutex<Recent>,
    written: Mutex<Written>,
}

/// The objects of which the API server accepted a write in a reconcile that has not been recorded yet. A reconcile that ends
/// at its deadline is never recorded.
#[derive(Default)]
struct Written {
    new: HashSet<Object>,
    /// Those that are older than the last sweep.
    old: HashSet<Object>,
}

impl Written {
    fn remove(&mut self, object: &Object) -> bool {
        // Both, because the object may have been written again.
        let (is_new, is_old) = (self.new.remove(object), self.old.remove(object));
        is_new || is_old
    }

    fn sweep(&mut self) {
        self.old = mem::take(&mut self.new);
    }
}

#[derive(Default)]
struct Recent {
    writes: HashMap<Object, RecentWrites<u64>>,
    /// When writes that no longer delay anything were removed.
    swept: Option<Timestamp>,
}

impl Recent {
    fn sweep(&mut self, now: Timestamp, written: &mut Written) {
        if self.swept.is_none_or(|swept| swept + SWEEP_INTERVAL <= now) {
            self.writes.retain(|_, recent| !recent.is_old(now));
            written.sweep();
            self.swept = Some(now);
        }
    }
}

impl RepairHistory {
    /// Counts the writes of this executor.
    pub(crate) fn observe(self: &Arc<Self>, executor: Executor) -> Executor {
        let kinds = [
            virtual_machine_resource(),
            network_attachment_resource(),
            ApiResource::erase::<PersistentVolumeClaim>(&()),
            ApiResource::erase::<Secret>(&()),
        ];
        kinds.iter().fold(executor, |executor, kind| executor.observe_writes(kind, self.clone()))
    }

    /// The recent writes of the objects that a reconcile of this Machine may write.
    pub(crate) fn of(&self, observed: &Observed) -> RecentWritesByObject {
        let recent = &self.recent.lock().writes;
        let find = |(kind, name): (&'static str, String)| {
            let found = recent.get(&(kind.to_owned(), observed.id.sibling(&name)))?;
            Some(((kind.to_owned(), name), *found))
        };
        observed.writable_objects().filter_map(find).collect()
    }

    /// Records the writes of a reconcile that the API server accepted.
    pub(crate) fn record(&self, observed: &Observed, plan: &Plan) {
        let mut recent = self.recent.lock();
        let mut written = self.written.lock();
        recent.sweep(observed.now, &mut written);
        for target in repaired_objects(plan) {
            let object = (target.resource.kind.clone(), target.key.clone());
            if !written.remove(&object) {
                continue;
            }
            let digest = desired_digest(observed, target);
            let before = recent.writes.get(&object).filter(|before| before.written() == digest);
            let after = RecentWrites::after(before, digest, observed.now);
            recent.writes.insert(object, after);
        }
    }
}

impl WriteObserver for RepairHistory {
    fn on_written(&self, object: &Value) {
        // A deletion is not a repair.
        if object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null()) {
            return;
        }
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let key = ObjectKey::namespaced(text("/metadata/namespace"), text("/metadata/name"));
        self.written.lock().new.insert((text("/kind").to_owned(), key));
    }

    fn on_live_read(&self, _object: &Value) {}

    fn on_deleted(&self, _key: &ObjectKey, _uid: &str) {}

    /// The caches decide.
    fn is_absent(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn observed(second: i64) -> Observed {
        let machine = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"}, "spec": {},
        });
        Observed::new(serde_json::from_value(machine).unwrap(), Timestamp::from_second(second).unwrap()).unwrap()
    }

    #[test]
    fn writes_that_no_reconcile_records_are_forgotten() {
        let history = RepairHistory::default();
        let written = || {
            let written = history.written.lock();
            written.new.len() + written.old.len()
        };
        history.record(&observed(0), &Plan::default());
        let vm = json!({"kind": "VirtualMachine", "metadata": {"namespace": "shop", "name": "late"}});
        history.on_written(&vm);
        let mut deleted = vm;
        deleted["metadata"]["name"] = "deleted".into();
        deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        history.on_written(&deleted);
        assert_eq!(written(), 1, "a deletion is not a repair");
        for (second, expected) in [(59, 1), (60, 1), (119, 1), (120, 0)] {
            history.record(&observed(second), &Plan::default());
            assert_eq!(written(), expected, "after {second} s");
        }
    }
}
