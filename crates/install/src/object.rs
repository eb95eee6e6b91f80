//! One object of an installation, ready but for what is issued elsewhere.

use std::sync::Arc;

use k8s_openapi::ByteString;
use serde_json::{Map, Value};
use vitivirt_api::{Body, Failure, ObjectKey, Target};

use crate::{
    certificates::{BUNDLE_KEY, CA, Issued},
    config::DeploymentConfig,
    kind::Kind,
    managed_metadata::ManagedMetadata,
    order::Stage,
    strategy::{self, Item, Strategy},
};

/// One object of an installation. Its body is made when it is asked for: definitions and instancetypes stay packed
/// until then, and certificates are filled in.
pub struct Object {
    pub stage: Stage,
    pub kind: Kind,
    /// The name of an object that the server names is the beginning of it.
    pub key: ObjectKey,
    content: Content,
}

enum Content {
    Ready(Value),
    Packed(Item, Arc<ManagedMetadata>),
    /// The strategy that is being installed, as text.
    Told(Box<Told>),
}

/// What the text of our own strategy is made from.
pub(crate) struct Told {
    pub(crate) config: DeploymentConfig,
    pub(crate) monitor_namespace: Option<String>,
    pub(crate) runbook_url_template: Option<String>,
}

impl Object {
    pub(crate) fn ready(stage: Stage, kind: Kind, key: ObjectKey, object: Value) -> Self {
        Self { stage, kind, key, content: Content::Ready(object) }
    }

    pub(crate) fn packed(stage: Stage, item: Item, stamp: &Arc<ManagedMetadata>) -> Self {
        let (kind, key) = (item.kind, item.key.clone());
        Self { stage, kind, key, content: Content::Packed(item, Arc::clone(stamp)) }
    }

    pub(crate) fn told(told: Told) -> Self {
        let key = ObjectKey::namespaced(&told.config.namespace, strategy::GENERATE_NAME);
        Self { stage: Stage::Strategy, kind: Kind::ConfigMap, key, content: Content::Told(Box::new(told)) }
    }

    pub fn target(&self) -> Target {
        Target::new(self.kind.resource(), self.key.clone())
    }

    /// Whether the server completes its name.
    pub fn is_named_by_the_server(&self) -> bool {
        matches!(self.content, Content::Told(_))
    }

    /// Whether its body is made only when it is sent.
    pub(crate) fn is_big(&self) -> bool {
        self.kind == Kind::CustomResourceDefinition || self.is_named_by_the_server()
    }

    /// The labels and annotations that are put on an object that is still packed.
    pub(crate) fn marks(&self) -> Value {
        let mut object = fields([("metadata", Value::Object(Map::new()))]);
        if let Content::Packed(_, stamp) = &self.content {
            stamp.object(&mut object);
        }
        object.get_mut("metadata").map(Value::take).unwrap_or_default()
    }

    pub fn body(&self, issued: &dyn Issued) -> Result<Body, Failure> {
        let mut object = match &self.content {
            Content::Ready(object) => object.clone(),
            Content::Packed(item, stamp) => {
                let mut object = item.object()?;
                stamp.object(&mut object);
                object
            }
            Content::Told(told) => {
                let (monitor, runbook) = (told.monitor_namespace.as_deref(), told.runbook_url_template.as_deref());
                let strategy = Strategy::generate(&told.config, monitor, runbook)?;
                return Body::of(&strategy::config_map(&told.config, &strategy)?);
            }
        };
        self.fill_in(&mut object, issued);
        Ok(object.into())
    }

    fn fill_in(&self, object: &mut Value, issued: &dyn Issued) {
        let trusted = || issued.bundle(CA).map(|bundle| encoded(bundle.as_bytes()));
        match self.kind {
            Kind::ValidatingWebhookConfiguration | Kind::MutatingWebhookConfiguration => {
                let webhooks = object.get_mut("webhooks").and_then(Value::as_array_mut);
                for client in webhooks.into_iter().flatten().filter_map(|webhook| webhook.get_mut("clientConfig")) {
                    set(client, "caBundle", trusted());
                }
            }
            Kind::ApiService => {
                if let Some(spec) = object.get_mut("spec") {
                    set(spec, "caBundle", trusted());
                }
            }
            Kind::Route => {
                if let Some(tls) = object.pointer_mut("/spec/tls") {
                    set(tls, "destinationCACertificate", issued.bundle(CA).map(Value::String));
                }
            }
            Kind::ConfigMap if self.stage == Stage::CaConfigMaps => {
                let data = issued.bundle(self.key.name()).map(|bundle| fields([(BUNDLE_KEY, Value::String(bundle))]));
                set(object, "data", data);
            }
            Kind::Secret => {
                let data = issued
                    .key_pair(self.key.name())
                    .map(|pair| fields([("tls.crt", encoded(&pair.certificate)), ("tls.key", encoded(&pair.key))]));
                set(object, "data", data);
            }
            _ => {}
        }
    }
}

fn set(object: &mut Value, field: &str, value: Option<Value>) {
    if let (Some(object), Some(value)) = (object.as_object_mut(), value) {
        object.insert(field.to_owned(), value);
    }
}

fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
}

/// In base64, as JSON carries bytes.
fn encoded(bytes: &[u8]) -> Value {
    serde_json::to_value(ByteString(bytes.to_vec())).unwrap_or_default()
}
