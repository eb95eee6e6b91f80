//! Which lists a strategic merge patch merges, and by which key.
//!
//! These are the `patchStrategy` and `patchMergeKey` of Kubernetes' types. A list that is not named here is replaced as
//! a whole, and a map is merged.

use k8s_openapi::{
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Secret, Service},
    },
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::kind::Kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MergeShape {
    Deployment,
    DaemonSet,
    Service,
    WebhookConfiguration,
    Webhook,
    ObjectMeta,
    WorkloadSpec,
    ServiceSpec,
    PodTemplate,
    PodSpec,
    Container,
    /// A type without merged lists.
    Plain,
}

/// How a list is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lists {
    Replaced,
    /// Values that are added if they are missing.
    Values,
    /// Objects that this key identifies.
    Keyed(&'static str),
}

pub(super) fn root(kind: Kind) -> MergeShape {
    match kind {
        Kind::Deployment => MergeShape::Deployment,
        Kind::DaemonSet => MergeShape::DaemonSet,
        Kind::Service => MergeShape::Service,
        Kind::ValidatingWebhookConfiguration | Kind::MutatingWebhookConfiguration => MergeShape::WebhookConfiguration,
        // An APIService and a Secret have metadata and no merged lists.
        _ => MergeShape::Deployment,
    }
}

impl MergeShape {
    /// The shape of a field, and how it is merged if it is a list.
    pub(super) fn field(self, name: &str) -> (Self, Lists) {
        use Lists::{Keyed, Replaced, Values};
        match (self, name) {
            (
                Self::Deployment | Self::DaemonSet | Self::Service | Self::WebhookConfiguration | Self::PodTemplate,
                "metadata",
            ) => (Self::ObjectMeta, Replaced),
            (Self::Deployment | Self::DaemonSet, "spec") => (Self::WorkloadSpec, Replaced),
            (Self::Service, "spec") => (Self::ServiceSpec, Replaced),
            (Self::WebhookConfiguration, "webhooks") => (Self::Webhook, Keyed("name")),
            (Self::Webhook, "matchConditions") => (Self::Plain, Keyed("name")),
            (Self::ObjectMeta, "finalizers") => (Self::Plain, Values),
            (Self::ObjectMeta, "ownerReferences") => (Self::Plain, Keyed("uid")),
            (Self::ServiceSpec, "ports") => (Self::Plain, Keyed("port")),
            (Self::WorkloadSpec, "template") => (Self::PodTemplate, Replaced),
            (Self::PodTemplate, "spec") => (Self::PodSpec, Replaced),
            (Self::PodSpec, "containers" | "initContainers" | "ephemeralContainers") => {
                (Self::Container, Keyed("name"))
            }
            (Self::PodSpec, "volumes" | "imagePullSecrets" | "resourceClaims" | "schedulingGates") => {
                (Self::Plain, Keyed("name"))
            }
            (Self::PodSpec, "hostAliases") => (Self::Plain, Keyed("ip")),
            (Self::PodSpec, "topologySpreadConstraints") => (Self::Plain, Keyed("topologyKey")),
            (Self::Container, "ports") => (Self::Plain, Keyed("containerPort")),
            (Self::Container, "env") => (Self::Plain, Keyed("name")),
            (Self::Container, "volumeMounts") => (Self::Plain, Keyed("mountPath")),
            (Self::Container, "volumeDevices") => (Self::Plain, Keyed("devicePath")),
            _ => (Self::Plain, Replaced),
        }
    }
}

/// Adds the empty fields that Go serializes, because a JSON patch may start from them.
pub(super) fn add_empty_fields(kind: Kind, object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        for (field, empty) in match kind {
            Kind::Deployment | Kind::DaemonSet | Kind::ApiService => vec![("status", json!({}))],
            Kind::Service => vec![("spec", json!({})), ("status", json!({"loadBalancer": {}}))],
            _ => Vec::new(),
        } {
            object.entry(field).or_insert(empty);
        }
        let strategy = match kind {
            Kind::Deployment => "strategy",
            Kind::DaemonSet => "updateStrategy",
            _ => return,
        };
        if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
            spec.entry(strategy).or_insert_with(|| json!({}));
        }
    }
    for_containers(object, |container| {
        if let Some(container) = container.as_object_mut() {
            container.entry("resources").or_insert_with(|| json!({}));
        }
    });
}

/// Removes the fields of `add_empty_fields` that are still empty.
pub(super) fn remove_empty_fields(kind: Kind, object: &mut Value) {
    if let Some(object) = object.as_object_mut()
        && matches!(kind, Kind::Deployment | Kind::DaemonSet | Kind::ApiService | Kind::Service)
    {
        object.remove("status");
        if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
            for strategy in ["strategy", "updateStrategy"] {
                if spec.get(strategy) == Some(&json!({})) {
                    spec.remove(strategy);
                }
            }
        }
    }
    for_containers(object, |container| {
        if let Some(container) = container.as_object_mut()
            && container.get("resources") == Some(&json!({}))
        {
            container.remove("resources");
        }
    });
}

/// Parses an object as its Kubernetes type: unknown fields are dropped, and a value of a wrong type is an error.
pub(super) fn retype(kind: Kind, object: &mut Value) -> Result<(), String> {
    fn reparse<T: DeserializeOwned + Serialize>(object: &mut Value) -> Result<(), String> {
        let typed: T = serde_json::from_value(object.take()).map_err(|error| error.to_string())?;
        *object = serde_json::to_value(typed).map_err(|error| error.to_string())?;
        drop_empty_lists(object);
        Ok(())
    }
    match kind {
        Kind::Deployment => reparse::<Deployment>(object),
        Kind::DaemonSet => reparse::<DaemonSet>(object),
        Kind::Service => reparse::<Service>(object),
        Kind::Secret => reparse::<Secret>(object),
        Kind::ValidatingWebhookConfiguration => reparse::<ValidatingWebhookConfiguration>(object),
        Kind::MutatingWebhookConfiguration => reparse::<MutatingWebhookConfiguration>(object),
        Kind::ApiService => reparse::<APIService>(object),
        _ => Ok(()),
    }
}

/// Removes empty lists, except those that are required.
fn drop_empty_lists(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let is_required = |key: &str| ["containers", "admissionReviewVersions"].contains(&key);
            map.retain(|key, value| is_required(key) || value.as_array().is_none_or(|list| !list.is_empty()));
            map.values_mut().for_each(drop_empty_lists);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_empty_lists),
        _ => {}
    }
}

fn for_containers(object: &mut Value, change: impl Fn(&mut Value)) {
    for list in ["/spec/template/spec/containers", "/spec/template/spec/initContainers"] {
        object.pointer_mut(list).and_then(Value::as_array_mut).into_iter().flatten().for_each(&change);
    }
}
