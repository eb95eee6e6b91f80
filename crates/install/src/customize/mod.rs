//! `spec.customizeComponents`: the administrator's changes to generated objects.
//!
//! Patches apply to the objects of the install strategy, before placement, replicas and managed metadata. They always
//! apply to a newly generated object, so no patch is applied twice.

mod json;
mod shape;
mod strategic;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use sha1::{Digest, Sha1};
use vitivirt_api::{
    Failure,
    kubevirt::{Customization, CustomizeComponents, Flags},
    text::hex,
};

use crate::{
    config::go_json,
    kind::Kind,
    managed_metadata,
    names::{VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER, annotation},
};

/// Reason of a failure: `spec.customizeComponents` is invalid or does not apply.
pub(crate) const INVALID_CUSTOMIZATION: &str = "InvalidCustomization";

const ANY: &str = "*";

/// The kinds that KubeVirt customizes.
const PATCHED: [Kind; 7] = [
    Kind::Deployment,
    Kind::DaemonSet,
    Kind::Service,
    Kind::Secret,
    Kind::ApiService,
    Kind::ValidatingWebhookConfiguration,
    Kind::MutatingWebhookConfiguration,
];

pub(crate) struct Customizer {
    patches: Vec<Patch>,
    hash: String,
}

struct Patch {
    resource_type: String,
    resource_name: String,
    patch: ParsedPatch,
    /// The field of the resource: an index of the list of patches, or the flags.
    origin: String,
}

enum ParsedPatch {
    Json(Vec<json::JsonPatchOperation>),
    Merge(Value),
    Strategic(Map<String, Value>),
}

impl ParsedPatch {
    fn parse(customization: &Customization) -> Result<Self, String> {
        let parse = || {
            serde_json::from_str::<Value>(&customization.patch)
                .map_err(|error| format!("invalid patch: not JSON: {error}"))
        };
        match customization.patch_type.as_str() {
            "json" => serde_json::from_value(parse()?)
                .map(Self::Json)
                .map_err(|error| format!("invalid patch: not a JSON patch: {error}")),
            "merge" => parse().map(Self::Merge),
            "strategic" => match parse()? {
                Value::Object(patch) => Ok(Self::Strategic(patch)),
                _ => Err("invalid patch: must be a JSON object".to_owned()),
            },
            other => Err(format!("type: unsupported value {other:?}; supported values: json, merge, strategic")),
        }
    }
}

/// The syntax errors of patches, with the index of each patch.
pub(crate) fn syntax_errors(customization: &CustomizeComponents) -> impl Iterator<Item = (usize, String)> {
    let patches = customization.patches.iter().enumerate();
    patches.filter_map(|(index, patch)| Some((index, ParsedPatch::parse(patch).err()?)))
}

/// Patches of kinds that are never patched, one sentence for each. The schema of the CRD already rejects flags of
/// unsupported components.
pub(crate) fn unsupported_kinds(customization: &CustomizeComponents) -> impl Iterator<Item = String> {
    let patches = customization.patches.iter().enumerate().filter(|(_, patch)| !is_patched(&patch.resource_type));
    patches.map(|(index, patch)| {
        let is = |kind: Kind| pattern_matches(&patch.resource_type, kind.name());
        let remedy = match () {
            () if is(Kind::PrometheusRule) => "; to change alerts, use Alertmanager or create your own PrometheusRule",
            () if is(Kind::ServiceMonitor) => "; create your own ServiceMonitor",
            () => "",
        };
        format!(
            "{} has no effect: resourceType: unsupported value {:?}; supported values: {}{remedy}",
            origin(index),
            patch.resource_type,
            PATCHED.map(Kind::name).join(", ")
        )
    })
}

/// Flags that change because they are passed in lower case, one sentence for each.
pub(crate) fn flags_in_lower_case(customization: &CustomizeComponents) -> Vec<String> {
    let components = customization.flags.iter().flat_map(|Flags { api, controller, handler }| {
        [("api", api), ("controller", controller), ("handler", handler)]
    });
    let flags =
        components.flat_map(|(component, flags)| flags.iter().map(move |(flag, value)| (component, flag, value)));
    let changed = flags.filter(|(_, flag, value)| [flag, value].iter().any(|text| text.to_lowercase() != ***text));
    let sentence = |(component, flag, value): (&str, &String, &String)| {
        format!(
            "spec.customizeComponents.flags.{component}: --{flag} {value} is passed in lower case, as upstream \
             virt-operator does; to pass it unchanged, use a patch that adds it to the args of the container"
        )
    };
    changed.map(sentence).collect()
}

fn is_patched(resource_type: &str) -> bool {
    PATCHED.iter().any(|kind| pattern_matches(resource_type, kind.name()))
}

fn pattern_matches(pattern: &str, name: &str) -> bool {
    pattern == ANY || pattern.to_lowercase() == name.to_lowercase()
}

fn origin(index: usize) -> String {
    format!("spec.customizeComponents.patches[{index}]")
}

impl Customizer {
    pub(crate) fn new(customization: &CustomizeComponents) -> Result<Self, Failure> {
        // KubeVirt sorts patches by length before it hashes and applies them.
        let mut sorted: Vec<(usize, &Customization)> = customization.patches.iter().enumerate().collect();
        sorted.sort_by_key(|(_, patch)| patch.patch.len());
        let hashed = CustomizeComponents {
            patches: sorted.iter().map(|(_, patch)| (*patch).clone()).collect(),
            flags: customization.flags.clone(),
        };
        let patches = sorted.into_iter().map(|(index, patch)| Patch::new(index, patch));
        let mut patches: Vec<Patch> = patches.collect::<Result<_, _>>()?;
        patches.extend(customization.flags.iter().flat_map(flags));
        Ok(Self { patches, hash: hex(&Sha1::digest(go_json(&hashed))) })
    }

    pub(crate) fn applies_to(kind: Kind) -> bool {
        PATCHED.contains(&kind)
    }

    /// Patches of supported kinds that match none of these objects, one sentence for each. `customized` lists every
    /// object that can be patched.
    pub(crate) fn unmatched_patches(&self, customized: &[(Kind, &str)]) -> Vec<String> {
        let patches = self.patches.iter().filter(|patch| is_patched(&patch.resource_type));
        let unmatched = patches.filter(|patch| !customized.iter().any(|(kind, name)| patch.matches(*kind, name)));
        let sentence = |patch: &Patch| {
            let Patch { origin, resource_type, resource_name, .. } = patch;
            let others = customized.iter().filter(|(kind, _)| pattern_matches(resource_type, kind.name()));
            let mut others: Vec<&str> = others.map(|(_, name)| *name).collect();
            others.sort_unstable();
            match resource_type.as_str() {
                ANY => format!("{origin} has no effect: no object that can be patched is named {resource_name:?}"),
                of => format!(
                    "{origin} has no effect: {of} {resource_name:?} not found in the installation; available: {}",
                    others.join(", ")
                ),
            }
        };
        unmatched.map(sentence).collect()
    }

    pub(crate) fn apply(&self, kind: Kind, name: &str, object: &mut Value) -> Result<(), Failure> {
        for patch in &self.patches {
            if patch.matches(kind, name) {
                shape::add_empty_fields(kind, object);
                patch.apply(kind, object).and_then(|()| shape::retype(kind, object)).map_err(|error| {
                    let message = format!("{} does not apply to {} {name}: {error}", patch.origin, kind.name());
                    Failure::invalid(INVALID_CUSTOMIZATION, message)
                })?;
            }
        }
        shape::remove_empty_fields(kind, object);
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            let hash = BTreeMap::from([(annotation::CUSTOMIZER_IDENTIFIER.to_owned(), self.hash.clone())]);
            managed_metadata::merge(metadata, "annotations", &hash);
        }
        Ok(())
    }
}

impl Patch {
    fn matches(&self, kind: Kind, name: &str) -> bool {
        pattern_matches(&self.resource_type, kind.name()) && pattern_matches(&self.resource_name, name)
    }

    fn new(index: usize, customization: &Customization) -> Result<Self, Failure> {
        let origin = origin(index);
        let patch = ParsedPatch::parse(customization)
            .map_err(|problem| Failure::invalid(INVALID_CUSTOMIZATION, format!("{origin}: {problem}")))?;
        Ok(Self {
            resource_type: customization.resource_type.clone(),
            resource_name: customization.resource_name.clone(),
            patch,
            origin,
        })
    }

    fn apply(&self, kind: Kind, object: &mut Value) -> Result<(), String> {
        match &self.patch {
            ParsedPatch::Json(patch) => json::apply(object, patch),
            ParsedPatch::Merge(patch) => {
                json::merge(object, patch);
                Ok(())
            }
            ParsedPatch::Strategic(patch) => {
                let original = object.as_object_mut().ok_or("not an object")?;
                let merged = strategic::merge(std::mem::take(original), patch.clone(), shape::root(kind))?;
                *original = merged;
                Ok(())
            }
        }
    }
}

/// Flags replace the command of a component's container; its arguments are kept.
fn flags(flags: &Flags) -> Vec<Patch> {
    let components = [
        (VIRT_API, Kind::Deployment, &flags.api),
        (VIRT_CONTROLLER, Kind::Deployment, &flags.controller),
        (VIRT_HANDLER, Kind::DaemonSet, &flags.handler),
    ];
    let patch = |(name, kind, flags): (&str, Kind, &BTreeMap<String, String>)| {
        let mut command = vec![name.to_owned()];
        command.extend(flags.iter().flat_map(|(flag, value)| flag_arguments(flag, value)));
        let patch = json!({"spec": {"template": {"spec": {"containers": [{"name": name, "command": command}]}}}});
        Some(Patch {
            resource_type: kind.name().to_owned(),
            resource_name: name.to_owned(),
            patch: ParsedPatch::Strategic(patch.as_object()?.clone()),
            origin: "spec.customizeComponents.flags".to_owned(),
        })
    };
    components.into_iter().filter(|(_, _, flags)| !flags.is_empty()).filter_map(patch).collect()
}

/// KubeVirt converts the name and the value to lower case.
fn flag_arguments(flag: &str, value: &str) -> Vec<String> {
    let (flag, value) = (flag.to_lowercase(), value.to_lowercase());
    match value.as_str() {
        "" => vec![format!("--{flag}")],
        "true" | "false" => vec![format!("--{flag}={value}")],
        _ => vec![format!("--{flag}"), value],
    }
}

/// Whether a patch sets the replicas of this Deployment. If so, the operator does not set them.
pub(crate) fn sets_replicas(customization: &CustomizeComponents, deployment: &str) -> bool {
    let replaces = |operation: &Value| {
        operation.get("op") == Some(&json!("replace")) && operation.get("path") == Some(&json!("/spec/replicas"))
    };
    customization.patches.iter().filter(|patch| patch.resource_name == deployment).any(|patch| {
        serde_json::from_str::<Vec<Value>>(&patch.patch).is_ok_and(|operations| operations.iter().any(replaces))
    })
}

#[cfg(test)]
mod tests;
