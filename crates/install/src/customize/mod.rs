//! `spec.customizeComponents`: the administrator's own changes to generated objects.
//!
//! They are applied to the objects as the release defines them, before placement, replicas and marks are laid over, and
//! always to a fresh object: a patch is applied once however often it is asked for.

mod json;
mod shape;
mod strategic;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use sha1::{Digest, Sha1};
use vitivirt_api::{
    Failure,
    kubevirt::{Customization, CustomizeComponents, Flags},
};

use crate::{
    config::{go_json, hex},
    kind::Kind,
    managed_metadata,
    names::{VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER, annotation},
};

/// Reason of the failures here: something in `spec.customizeComponents` cannot be done.
pub const INVALID_CUSTOMIZATION: &str = "InvalidCustomization";

const ANY: &str = "*";

/// What the release customizes; everything else is as it is.
const PATCHED: [Kind; 7] = [
    Kind::Deployment,
    Kind::DaemonSet,
    Kind::Service,
    Kind::Secret,
    Kind::ApiService,
    Kind::ValidatingWebhookConfiguration,
    Kind::MutatingWebhookConfiguration,
];

pub struct Customizer {
    patches: Vec<Patch>,
    hash: String,
}

struct Patch {
    resource_type: String,
    resource_name: String,
    change: Change,
    /// As the administrator knows it: the place in the list, or the flags.
    origin: String,
}

enum Change {
    Json(Vec<json::Operation>),
    Merge(Value),
    Strategic(Map<String, Value>),
}

impl Change {
    fn parse(asked: &Customization) -> Result<Self, String> {
        let parse = || serde_json::from_str::<Value>(&asked.patch).map_err(|error| format!("is not JSON: {error}"));
        match asked.patch_type.as_str() {
            "json" => serde_json::from_value(parse()?)
                .map(Self::Json)
                .map_err(|error| format!("is not a JSON patch: {error}")),
            "merge" => parse().map(Self::Merge),
            "strategic" => match parse()? {
                Value::Object(patch) => Ok(Self::Strategic(patch)),
                _ => Err("is not a JSON object".to_owned()),
            },
            other => Err(format!("has the type {other:?}; it must be json, merge or strategic")),
        }
    }
}

/// What is wrong with each patch that is none, by its place in the list.
pub(crate) fn problems(asked: &CustomizeComponents) -> impl Iterator<Item = (usize, String)> {
    let patches = asked.patches.iter().enumerate();
    patches.filter_map(|(index, patch)| Some((index, Change::parse(patch).err()?)))
}

/// Patches of types that are never patched, one sentence for each. Flags of other components than those that take some
/// never come here: the schema does not have them.
pub(crate) fn without_effect(asked: &CustomizeComponents) -> impl Iterator<Item = String> {
    let patches = asked.patches.iter().enumerate().filter(|(_, patch)| !is_patched(&patch.resource_type));
    patches.map(|(index, patch)| {
        format!(
            "{} changes nothing: objects of the type {:?} are not patched, only {}",
            origin(index),
            patch.resource_type,
            PATCHED.map(Kind::name).join(", ")
        )
    })
}

fn is_patched(resource_type: &str) -> bool {
    PATCHED.iter().any(|kind| matches(resource_type, kind.name()))
}

fn matches(asked: &str, actual: &str) -> bool {
    asked == ANY || asked.to_lowercase() == actual.to_lowercase()
}

fn origin(index: usize) -> String {
    format!("spec.customizeComponents.patches[{index}]")
}

impl Customizer {
    pub fn new(asked: &CustomizeComponents) -> Result<Self, Failure> {
        // The release sorts them by length before it hashes, and so applies, them.
        let mut sorted: Vec<(usize, &Customization)> = asked.patches.iter().enumerate().collect();
        sorted.sort_by_key(|(_, patch)| patch.patch.len());
        let hashed = CustomizeComponents {
            patches: sorted.iter().map(|(_, patch)| (*patch).clone()).collect(),
            flags: asked.flags.clone(),
        };
        let patches = sorted.into_iter().map(|(index, patch)| Patch::new(index, patch));
        let mut patches: Vec<Patch> = patches.collect::<Result<_, _>>()?;
        patches.extend(asked.flags.iter().flat_map(flags));
        Ok(Self { patches, hash: hex(&Sha1::digest(go_json(&hashed))) })
    }

    /// What the objects that may be customized are marked with.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    pub(crate) fn applies_to(kind: Kind) -> bool {
        PATCHED.contains(&kind)
    }

    /// Patches that are for none of these objects, which are all that there are to be customized, one sentence for each.
    /// What `without_effect` tells is not among them.
    pub(crate) fn idle(&self, customized: &[(Kind, &str)]) -> Vec<String> {
        let patches = self.patches.iter().filter(|patch| is_patched(&patch.resource_type));
        let idle = patches.filter(|patch| !customized.iter().any(|(kind, name)| patch.is_for(*kind, name)));
        let sentence = |patch: &Patch| {
            let Patch { origin, resource_type, resource_name, .. } = patch;
            let others = customized.iter().filter(|(kind, _)| matches(resource_type, kind.name()));
            let mut others: Vec<&str> = others.map(|(_, name)| *name).collect();
            others.sort_unstable();
            match resource_type.as_str() {
                ANY => format!("{origin} changes nothing: nothing that can be patched is called {resource_name:?}"),
                of => format!(
                    "{origin} changes nothing: the installation has no {of} {resource_name:?}, only {}",
                    others.join(", ")
                ),
            }
        };
        idle.map(sentence).collect()
    }

    pub(crate) fn apply(&self, kind: Kind, name: &str, object: &mut Value) -> Result<(), Failure> {
        for patch in &self.patches {
            if patch.is_for(kind, name) {
                shape::fill(kind, object);
                patch.apply(kind, object).and_then(|()| shape::retype(kind, object)).map_err(|error| {
                    let message = format!("{} does not fit {} {name}: {error}", patch.origin, kind.name());
                    Failure::invalid(INVALID_CUSTOMIZATION, message)
                })?;
            }
        }
        shape::clean(kind, object);
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            let mark = BTreeMap::from([(annotation::CUSTOMIZER_IDENTIFIER.to_owned(), self.hash.clone())]);
            managed_metadata::merge(metadata, "annotations", &mark);
        }
        Ok(())
    }
}

impl Patch {
    fn is_for(&self, kind: Kind, name: &str) -> bool {
        matches(&self.resource_type, kind.name()) && matches(&self.resource_name, name)
    }

    fn new(index: usize, asked: &Customization) -> Result<Self, Failure> {
        let origin = origin(index);
        let change = Change::parse(asked)
            .map_err(|problem| Failure::invalid(INVALID_CUSTOMIZATION, format!("{origin} {problem}")))?;
        Ok(Self {
            resource_type: asked.resource_type.clone(),
            resource_name: asked.resource_name.clone(),
            change,
            origin,
        })
    }

    fn apply(&self, kind: Kind, object: &mut Value) -> Result<(), String> {
        match &self.change {
            Change::Json(patch) => json::apply(object, patch),
            Change::Merge(patch) => {
                json::merge(object, patch);
                Ok(())
            }
            Change::Strategic(patch) => {
                let original = object.as_object_mut().ok_or("not an object")?;
                let merged = strategic::merge(std::mem::take(original), patch.clone(), shape::root(kind))?;
                *original = merged;
                Ok(())
            }
        }
    }
}

/// Flags replace the command of a component's container; its arguments stay.
fn flags(flags: &Flags) -> Vec<Patch> {
    let components = [
        (VIRT_API, Kind::Deployment, &flags.api),
        (VIRT_CONTROLLER, Kind::Deployment, &flags.controller),
        (VIRT_HANDLER, Kind::DaemonSet, &flags.handler),
    ];
    let patch = |(name, kind, flags): (&str, Kind, &BTreeMap<String, String>)| {
        let mut command = vec![name.to_owned()];
        command.extend(flags.iter().flat_map(|(flag, value)| words(flag, value)));
        let change = json!({"spec": {"template": {"spec": {"containers": [{"name": name, "command": command}]}}}});
        Some(Patch {
            resource_type: kind.name().to_owned(),
            resource_name: name.to_owned(),
            change: Change::Strategic(change.as_object()?.clone()),
            origin: "spec.customizeComponents.flags".to_owned(),
        })
    };
    components.into_iter().filter(|(_, _, flags)| !flags.is_empty()).filter_map(patch).collect()
}

/// The release writes both the name and the value in lower case.
fn words(flag: &str, value: &str) -> Vec<String> {
    let (flag, value) = (flag.to_lowercase(), value.to_lowercase());
    match value.as_str() {
        "" => vec![format!("--{flag}")],
        "true" | "false" => vec![format!("--{flag}={value}")],
        _ => vec![format!("--{flag}"), value],
    }
}

/// Whether a patch sets the replicas of this Deployment, so that the operator must not.
pub(crate) fn sets_replicas(asked: &CustomizeComponents, deployment: &str) -> bool {
    let replaces = |operation: &Value| {
        operation.get("op") == Some(&json!("replace")) && operation.get("path") == Some(&json!("/spec/replicas"))
    };
    asked.patches.iter().filter(|patch| patch.resource_name == deployment).any(|patch| {
        serde_json::from_str::<Vec<Value>>(&patch.patch).is_ok_and(|operations| operations.iter().any(replaces))
    })
}

#[cfg(test)]
mod tests;
