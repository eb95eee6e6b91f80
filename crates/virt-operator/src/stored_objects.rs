//! What the API server stored for the operator's writes.
//!
//! The API server may normalize a value that the operator wrote. An object that equals the response to such a write
//! matches the desired state all the same. Without this record the operator would patch it in every reconcile.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::ObjectKey;
use vitivirt_install::{Kind, LiveObject, StoredObjects};
use vitivirt_runtime::watch::WriteObserver;

#[derive(Default)]
pub(crate) struct StoredObjectRecorder(Mutex<StoredObjects>);

impl StoredObjectRecorder {
    pub(crate) fn observer(self: &Arc<Self>, kind: Kind) -> Arc<dyn WriteObserver> {
        Arc::new(KindObserver { stored_objects: self.clone(), kind })
    }

    /// Everything that was stored since the last call.
    pub(crate) fn take(&self) -> StoredObjects {
        std::mem::take(&mut self.0.lock())
    }
}

struct KindObserver {
    stored_objects: Arc<StoredObjectRecorder>,
    kind: Kind,
}

impl WriteObserver for KindObserver {
    fn on_written(&self, object: &Value) {
        let metadata = object.get("metadata").cloned().unwrap_or_default();
        let Ok(metadata) = serde_json::from_value::<ObjectMeta>(metadata) else { return };
        let live = match self.kind {
            Kind::CustomResourceDefinition => LiveObject::from_metadata(&metadata),
            _ => LiveObject::new(&metadata, object.clone()),
        };
        self.stored_objects.0.lock().insert((self.kind, ObjectKey::from_metadata(&metadata)), live);
    }

    /// The operator did not write it.
    fn on_live_read(&self, _: &Value) {}

    fn on_deleted(&self, key: &ObjectKey, _: &str) {
        self.stored_objects.0.lock().remove(&(self.kind, key.clone()));
    }
}
