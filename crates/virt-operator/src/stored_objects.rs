//! What the server has made of our writes.
//!
//! An object that is exactly what the server answered to a write of what we want is as we want it, also where the
//! server writes a value in words of its own. Without this such an object would be patched again and again.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::ObjectKey;
use vitivirt_install::{Kind, LiveObject};
use vitivirt_runtime::watch::WriteObserver;

#[derive(Default)]
pub(crate) struct StoredObjectRecorder(Mutex<vitivirt_install::StoredObjects>);

impl StoredObjectRecorder {
    pub(crate) fn of(self: &Arc<Self>, kind: Kind) -> Arc<dyn WriteObserver> {
        Arc::new(OfKind { stored_objects: self.clone(), kind })
    }

    /// Everything that was answered since this was last asked.
    pub(crate) fn take(&self) -> vitivirt_install::StoredObjects {
        std::mem::take(&mut self.0.lock())
    }
}

struct OfKind {
    stored_objects: Arc<StoredObjectRecorder>,
    kind: Kind,
}

impl WriteObserver for OfKind {
    fn on_written(&self, object: &Value) {
        let metadata = object.get("metadata").cloned().unwrap_or_default();
        let Ok(metadata) = serde_json::from_value::<ObjectMeta>(metadata) else { return };
        let live = match self.kind {
            Kind::CustomResourceDefinition => LiveObject::of_metadata(&metadata),
            _ => LiveObject::new(&metadata, object.clone()),
        };
        self.stored_objects.0.lock().insert((self.kind, ObjectKey::of(&metadata)), live);
    }

    /// Nobody wrote it.
    fn on_found(&self, _: &Value) {}

    fn on_deleted(&self, key: &ObjectKey, _: &str) {
        self.stored_objects.0.lock().remove(&(self.kind, key.clone()));
    }
}
