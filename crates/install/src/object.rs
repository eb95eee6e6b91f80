//! One object of an installation, complete except for certificates.

use std::sync::Arc;

use k8s_openapi::ByteString;
use serde_json::{Map, Value};
use vitivirt_api::{Body, Failure, ObjectKey, Target};

use crate::{
    certificates::{BUNDLE_KEY, CA, IssuedCertificates, KeyPair},
    config::DeploymentConfig,
    digest::Digest,
    kind::Kind,
    managed_metadata::ManagedMetadata,
    names::STRATEGY_GENERATE_NAME,
    order::Stage,
    strategy::{self, InstallStrategy, StrategyItem},
};

/// One object of an installation. [`Self::body`] builds its body: CRDs and instancetypes stay compressed until then,
/// and certificates are inserted.
pub struct InstallationObject {
    pub stage: Stage,
    pub kind: Kind,
    /// With `generateName`, the name is only the prefix.
    pub key: ObjectKey,
    body: BodySource,
}

enum BodySource {
    Value(Value),
    Compressed(StrategyItem, Arc<ManagedMetadata>),
    StrategyConfigMap(Box<StrategyConfigMap>),
}

/// What the ConfigMap with the install strategy is generated from.
pub(crate) struct StrategyConfigMap {
    pub(crate) config: DeploymentConfig,
    pub(crate) monitor_namespace: Option<String>,
    pub(crate) runbook_url_template: Option<String>,
}

impl InstallationObject {
    pub(crate) fn from_value(stage: Stage, kind: Kind, key: ObjectKey, object: Value) -> Self {
        Self { stage, kind, key, body: BodySource::Value(object) }
    }

    pub(crate) fn compressed(stage: Stage, item: StrategyItem, metadata: &Arc<ManagedMetadata>) -> Self {
        let (kind, key) = (item.kind, item.key.clone());
        Self { stage, kind, key, body: BodySource::Compressed(item, Arc::clone(metadata)) }
    }

    pub(crate) fn strategy_config_map(source: StrategyConfigMap) -> Self {
        let key = ObjectKey::namespaced(&source.config.namespace, STRATEGY_GENERATE_NAME);
        Self {
            stage: Stage::Strategy,
            kind: Kind::ConfigMap,
            key,
            body: BodySource::StrategyConfigMap(Box::new(source)),
        }
    }

    pub fn target(&self) -> Target {
        Target::new(self.kind.resource(), self.key.clone())
    }

    /// Whether the API server completes its name.
    pub(crate) fn uses_generate_name(&self) -> bool {
        matches!(self.body, BodySource::StrategyConfigMap(_))
    }

    /// Whether its body is built only when it is sent.
    pub(crate) fn is_large(&self) -> bool {
        self.kind == Kind::CustomResourceDefinition || self.uses_generate_name()
    }

    /// The object without its content, which a compressed object keeps compressed.
    pub(crate) fn metadata_only(&self) -> Result<Value, Failure> {
        match &self.body {
            BodySource::Compressed(item, metadata) => {
                let mut object = json_object([("metadata", item.metadata()?)]);
                metadata.add_to_object(&mut object);
                Ok(object)
            }
            BodySource::Value(object) => {
                Ok(json_object([("metadata", object.get("metadata").cloned().unwrap_or_default())]))
            }
            BodySource::StrategyConfigMap(_) => Ok(json_object([])),
        }
    }

    /// A digest of the content, without certificates.
    pub(crate) fn digest(&self) -> Digest {
        match &self.body {
            BodySource::Value(object) => Digest::of_object(object),
            BodySource::Compressed(item, _) => item.digest(),
            BodySource::StrategyConfigMap(source) => Digest::of_bytes(source.config.id.as_bytes()),
        }
    }

    /// A digest of the pod template, without the identity of the deployment. `None` for an object without pods.
    pub(crate) fn template_digest(&self) -> Option<Digest> {
        match &self.body {
            BodySource::Value(object) => object.pointer("/spec/template").map(|template| {
                // As content, because the metadata of the template belongs to the pods.
                Digest::of_object(&json_object([("template", template.clone())]))
            }),
            BodySource::Compressed(..) | BodySource::StrategyConfigMap(_) => None,
        }
    }

    pub fn body(&self, certificates: &dyn IssuedCertificates) -> Result<Body, Failure> {
        let mut object = match &self.body {
            BodySource::Value(object) => object.clone(),
            BodySource::Compressed(item, metadata) => {
                let mut object = item.object()?;
                metadata.add_to_object(&mut object);
                object
            }
            BodySource::StrategyConfigMap(source) => {
                let (monitor, runbook) = (source.monitor_namespace.as_deref(), source.runbook_url_template.as_deref());
                let strategy = InstallStrategy::generate(&source.config, monitor, runbook)?;
                return Body::from_object(&strategy::config_map(&source.config, &strategy)?);
            }
        };
        self.insert_certificates(&mut object, certificates);
        Ok(object.into())
    }

    fn insert_certificates(&self, object: &mut Value, certificates: &dyn IssuedCertificates) {
        let ca_bundle = || certificates.bundle(CA).map(|bundle| base64_value(bundle.as_bytes()));
        match self.kind {
            Kind::ValidatingWebhookConfiguration | Kind::MutatingWebhookConfiguration => {
                let webhooks = object.get_mut("webhooks").and_then(Value::as_array_mut);
                for client in webhooks.into_iter().flatten().filter_map(|webhook| webhook.get_mut("clientConfig")) {
                    set_field(client, "caBundle", ca_bundle());
                }
            }
            Kind::ApiService => {
                if let Some(spec) = object.get_mut("spec") {
                    set_field(spec, "caBundle", ca_bundle());
                }
            }
            Kind::Route => {
                if let Some(tls) = object.pointer_mut("/spec/tls") {
                    set_field(tls, "destinationCACertificate", certificates.bundle(CA).map(Value::String));
                }
            }
            Kind::ConfigMap if self.stage == Stage::CaConfigMaps => {
                let data = certificates
                    .bundle(self.key.name())
                    .map(|bundle| json_object([(BUNDLE_KEY, Value::String(bundle))]));
                set_field(object, "data", data);
            }
            Kind::Secret => {
                set_field(object, "data", certificates.key_pair(self.key.name()).map(|pair| key_pair_data(&pair)));
            }
            _ => {}
        }
    }
}

fn set_field(object: &mut Value, field: &str, value: Option<Value>) {
    if let (Some(object), Some(value)) = (object.as_object_mut(), value) {
        object.insert(field.to_owned(), value);
    }
}

fn json_object<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
}

/// The key of the certificate in a Secret of type `kubernetes.io/tls`.
pub(crate) const CERTIFICATE: &str = "tls.crt";

/// The data of a Secret of type `kubernetes.io/tls`.
pub(crate) fn key_pair_data(pair: &KeyPair) -> Value {
    json_object([(CERTIFICATE, base64_value(&pair.certificate)), ("tls.key", base64_value(&pair.key))])
}

/// Bytes in base64, as in JSON.
pub(crate) fn base64_value(bytes: &[u8]) -> Value {
    serde_json::to_value(ByteString(bytes.to_vec())).unwrap_or_default()
}
