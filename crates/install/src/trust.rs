//! The CA bundle in the objects through which the API server calls KubeVirt: webhooks, APIServices and Routes.
//!
//! The lane `Certificates` keeps the bundle of existing objects current. The lane `Components` creates these objects
//! with the stored bundle, and leaves the bundle of an existing object alone.

use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Operation, Target, Write};

use crate::{
    certificates::{BUNDLE_KEY, CA, IssuedCertificates, KeyPair},
    kind::Kind,
    live::LiveObject,
    object::base64_value,
    observed::Observed,
    webhooks::BLOCKING_PREFIX,
};

/// The kinds that contain the CA bundle.
pub const TRUSTING_KINDS: [Kind; 4] =
    [Kind::ValidatingWebhookConfiguration, Kind::MutatingWebhookConfiguration, Kind::ApiService, Kind::Route];

/// The CA bundle that is stored in the cluster.
pub(crate) struct StoredTrust(Option<String>);

impl StoredTrust {
    pub(crate) fn new(observed: &Observed) -> Self {
        let key = ObjectKey::namespaced(&observed.operator_namespace, CA);
        let stored = observed.objects.get(Kind::ConfigMap, &key).and_then(|live| live.data(BUNDLE_KEY));
        Self(stored.filter(|bundle| !bundle.is_empty()))
    }

    pub(crate) fn is_missing(&self) -> bool {
        self.0.is_none()
    }
}

impl IssuedCertificates for StoredTrust {
    fn key_pair(&self, _: &str) -> Option<KeyPair> {
        None
    }

    fn bundle(&self, config_map: &str) -> Option<String> {
        self.0.clone().filter(|_| config_map == CA)
    }
}

/// Where an object contains the bundle: the JSON pointer of its parent, the field, and the present value.
struct TrustField {
    parent: String,
    field: &'static str,
    actual: Option<Value>,
}

/// Every place of an object where the bundle of this installation belongs. A webhook or APIService of another Service
/// has another bundle.
fn trust_fields(kind: Kind, content: &Value, namespace: &str) -> Vec<TrustField> {
    let trust_field = |parent: String, field: &'static str| {
        let actual = content.pointer(&parent).and_then(|parent| parent.get(field)).cloned();
        TrustField { parent, field, actual }
    };
    let is_own = |client: &Value| client.pointer("/service/namespace").is_some_and(|service| service == namespace);
    match kind {
        Kind::ValidatingWebhookConfiguration | Kind::MutatingWebhookConfiguration => {
            let webhooks = content.get("webhooks").and_then(Value::as_array).into_iter().flatten().enumerate();
            let own = webhooks.filter(|(_, webhook)| webhook.get("clientConfig").is_some_and(is_own));
            own.map(|(index, _)| trust_field(format!("/webhooks/{index}/clientConfig"), "caBundle")).collect()
        }
        Kind::ApiService if content.get("spec").is_some_and(is_own) => {
            vec![trust_field("/spec".to_owned(), "caBundle")]
        }
        Kind::Route if content.pointer("/spec/tls").is_some() => {
            vec![trust_field("/spec/tls".to_owned(), "destinationCACertificate")]
        }
        _ => Vec::new(),
    }
}

/// A precondition of a patch that contains the bundle of the observed object: an operation that fails if another client
/// has changed the bundle since, and that changes nothing otherwise.
pub(crate) fn expect_live_trust(kind: Kind, live: &LiveObject, namespace: &str) -> Result<Option<Operation>, Failure> {
    let Some(fields) = live.fields()?.filter(|_| TRUSTING_KINDS.contains(&kind)) else { return Ok(None) };
    let first =
        trust_fields(kind, &fields.content, namespace).into_iter().find_map(|TrustField { parent, field, actual }| {
            let actual = actual?;
            Some(Operation::set(format!("{parent}/{field}"), actual.clone()).expecting(actual))
        });
    Ok(first)
}

/// The value of the field in an object of this kind.
fn trust_value(kind: Kind, bundle: &str) -> Value {
    if kind == Kind::Route { Value::String(bundle.to_owned()) } else { base64_value(bundle.as_bytes()) }
}

/// The patches that give every existing object the bundle.
pub(crate) fn trust_patches(observed: &Observed, bundle: &str) -> Result<Vec<Write>, Failure> {
    let mut writes = Vec::new();
    for (kind, key, live) in trusting_objects(observed) {
        let Some(fields) = live.fields()? else { continue };
        let desired = trust_value(kind, bundle);
        let outdated = trust_fields(kind, &fields.content, &observed.operator_namespace)
            .into_iter()
            .filter(|field| field.actual.as_ref() != Some(&desired));
        // The precondition notices that another client has reordered the webhooks.
        let operations: Vec<Operation> = outdated
            .map(|TrustField { parent, field, actual }| {
                let operation = Operation::set(format!("{parent}/{field}"), desired.clone());
                match actual {
                    Some(actual) => operation.expecting(actual),
                    None => operation,
                }
            })
            .collect();
        if !operations.is_empty() {
            let target = Target::new(kind.resource(), key.clone());
            writes.push(Write::Patch { target, uid: live.uid.clone(), operations });
        }
    }
    Ok(writes)
}

fn trusting_objects(observed: &Observed) -> impl Iterator<Item = (Kind, &ObjectKey, &LiveObject)> {
    let objects = TRUSTING_KINDS
        .into_iter()
        .flat_map(|kind| observed.objects.of_kind(kind).map(move |(key, live)| (kind, key, &**live)));
    objects.filter(|(_, key, live)| !live.deleting && !key.name().starts_with(BLOCKING_PREFIX))
}

/// The bundles with which the API server verifies KubeVirt's servers now, in PEM.
pub fn trusted_bundles(observed: &Observed) -> Vec<Vec<u8>> {
    let mut bundles = Vec::new();
    for (kind, _, live) in trusting_objects(observed) {
        let Some(content) = live.content() else { continue };
        for field in trust_fields(kind, &content, &observed.operator_namespace) {
            let text = field.actual.unwrap_or_default();
            let bundle = match kind {
                Kind::Route => text.as_str().map(|text| text.as_bytes().to_vec()),
                _ => serde_json::from_value::<k8s_openapi::ByteString>(text).ok().map(|bytes| bytes.0),
            };
            let bundle = bundle.unwrap_or_default();
            if !bundles.contains(&bundle) {
                bundles.push(bundle);
            }
        }
    }
    bundles
}

/// Copies the bundle of an existing object into the desired one, so that the two do not differ in it.
pub(crate) fn keep_live_trust(kind: Kind, desired: &mut Value, live: &Value) {
    match kind {
        Kind::ValidatingWebhookConfiguration | Kind::MutatingWebhookConfiguration => {
            let webhooks =
                |object: &Value| object.get("webhooks").and_then(Value::as_array).cloned().unwrap_or_default();
            let live = webhooks(live);
            for (index, webhook) in webhooks(desired).iter().enumerate() {
                let same = live.iter().find(|live| live.get("name") == webhook.get("name"));
                // A new webhook of an existing object gets the stored bundle.
                if let Some(same) = same {
                    let parent = format!("/webhooks/{index}/clientConfig");
                    copy_field(desired, &parent, "caBundle", same.pointer("/clientConfig/caBundle"));
                }
            }
        }
        Kind::ApiService => copy_field(desired, "/spec", "caBundle", live.pointer("/spec/caBundle")),
        Kind::Route => {
            let actual = live.pointer("/spec/tls/destinationCACertificate");
            copy_field(desired, "/spec/tls", "destinationCACertificate", actual);
        }
        _ => {}
    }
}

fn copy_field(object: &mut Value, parent: &str, field: &str, value: Option<&Value>) {
    let Some(parent) = object.pointer_mut(parent).and_then(Value::as_object_mut) else { return };
    match value {
        Some(value) => drop(parent.insert(field.to_owned(), value.clone())),
        None => drop(parent.remove(field)),
    }
}
