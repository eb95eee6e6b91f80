//! What is kept of a Machine: all of it but its managed fields, squeezed, because most Machines are at rest most of
//! the time; and, ready for use, the few things that changes of other objects are mapped by.

use std::hash::{DefaultHasher, Hash, Hasher};

use vitivirt_api::ObjectKey;
use vitivirt_api::machine::{LABEL_TEMPLATE, Machine, POD_NETWORK, condition_type, phase};
use vitivirt_machine::macs;
use vitivirt_machine::resolve::{resolve, template_names};
use vitivirt_runtime::watch::ResourceVersion;

use super::compact::{CompressedJson, Labels, known};

/// What `kubectl apply` keeps for itself: as large as the object.
const ANNOTATION_LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Phases, and how one that is none of them is shown.
const PHASES: &[&str] = &[phase::RUNNING, phase::CREATING, phase::STOPPED, phase::FAILED, phase::PENDING];

#[derive(Debug, PartialEq)]
pub(crate) struct MachineEntry {
    whole: CompressedJson,
    generation: i64,
    labels: Labels,
    pub(crate) phase: &'static str,
    pub(crate) template: &'static str,
    pub(crate) ready: bool,
    pub(crate) deleting: bool,
    /// NetworkConfigurations that it names.
    pub(crate) networks: Box<[Box<str>]>,
    /// Its addresses, each with its place, as [`address`] makes one number of them: there are as many as there are
    /// Machines, and two of the same are rare.
    pub(crate) addresses: Box<[u64]>,
    /// The Secret that its cloud-init refers to.
    pub(crate) source: Option<Box<str>>,
}

impl MachineEntry {
    pub(crate) const BY_NETWORK: &str = "network";
    pub(crate) const BY_SOURCE: &str = "source";

    pub(crate) fn project(mut machine: Machine) -> Self {
        machine.metadata.managed_fields = None;
        // It is beside the value in the cache, and would make every change look like one that matters.
        machine.metadata.resource_version = None;
        if let Some(annotations) = &mut machine.metadata.annotations {
            annotations.remove(ANNOTATION_LAST_APPLIED);
        }
        let spec = &machine.spec;
        let mut networks: Vec<Box<str>> = spec
            .networks
            .iter()
            .filter(|network| network.network_name != POD_NETWORK)
            .map(|network| network.network_name.as_str().into())
            .collect();
        networks.sort();
        networks.dedup();
        let conditions = machine.status.iter().flat_map(|status| &status.conditions);
        Self {
            generation: machine.metadata.generation.unwrap_or_default(),
            labels: Labels::of(&machine.metadata),
            phase: known(
                PHASES,
                machine.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default(),
            ),
            template: template(&machine),
            ready: conditions.into_iter().any(|have| have.type_ == condition_type::READY && have.status == "True"),
            deleting: machine.metadata.deletion_timestamp.is_some(),
            networks: networks.into(),
            addresses: addresses(&machine),
            source: spec
                .cloud_init
                .as_ref()
                .and_then(|given| given.secret_ref.as_ref())
                .map(|reference| reference.name.as_str().into()),
            whole: CompressedJson::of(&machine),
        }
    }

    /// The whole Machine, with the version that the cache has of it.
    pub(crate) fn machine(&self, resource_version: &ResourceVersion) -> Result<Machine, serde_json::Error> {
        let mut machine: Machine = self.whole.read()?;
        machine.metadata.resource_version = Some(resource_version.to_string());
        Ok(machine)
    }

    /// Whether what is wanted is still the same: then the change is in what we wrote ourselves, as a rule.
    pub(crate) fn wants_the_same(&self, newer: &Self) -> bool {
        self.generation == newer.generation && self.deleting == newer.deleting && self.labels == newer.labels
    }

    pub(crate) fn indexes() -> [(&'static str, vitivirt_runtime::watch::IndexFn<Self>); 2] {
        [
            (Self::BY_NETWORK, |key, entry| entry.networks.iter().map(|name| in_namespace(key, name)).collect()),
            (Self::BY_SOURCE, |key, entry| entry.source.iter().map(|name| in_namespace(key, name)).collect()),
        ]
    }
}

/// `namespace/what`
pub(crate) fn in_namespace(key: &ObjectKey, what: &str) -> Box<str> {
    format!("{}/{what}", key.namespace().unwrap_or_default()).into()
}

/// A MAC address on a network of a namespace. Should two fall together, their Machines are compared once more than needed.
pub(crate) fn address(namespace: &str, network: &str, mac: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (namespace, network, mac).hash(&mut hasher);
    hasher.finish()
}

fn addresses(machine: &Machine) -> Box<[u64]> {
    let Ok(resolved) = resolve(machine) else { return Box::default() };
    let namespace = machine.metadata.namespace.as_deref().unwrap_or_default();
    macs::addresses(&resolved).map(|(network, mac)| address(namespace, network, mac)).collect()
}

/// For the metrics: one of the built-in names, or what else there can be.
fn template(machine: &Machine) -> &'static str {
    let label = machine.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_TEMPLATE)).map(String::as_str);
    match machine.spec.template.as_deref().or(label).filter(|name| !name.is_empty()) {
        None => "none",
        Some(name) => template_names().into_iter().find(|known| *known == name).unwrap_or("unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn machine(spec: &serde_json::Value) -> Machine {
        serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {
                "name": "vm", "namespace": "ns", "uid": "u", "resourceVersion": "7",
                "annotations": {ANNOTATION_LAST_APPLIED: "{}", "kept": "yes"},
                "managedFields": [{"manager": "kubectl", "operation": "Update"}],
            },
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn everything_but_what_others_wrote_down_about_it_is_kept() {
        let whole = machine(&json!({"template": "small", "cloudInit": {"secretRef": {"name": "s"}}}));
        let entry = MachineEntry::project(whole.clone());
        let back = entry.machine(&"9".into()).unwrap();
        assert_eq!(back.spec, whole.spec);
        assert_eq!(back.metadata.resource_version.as_deref(), Some("9"));
        assert_eq!(back.metadata.managed_fields, None);
        assert_eq!(back.metadata.annotations.unwrap().into_keys().collect::<Vec<_>>(), ["kept"]);
        assert_eq!(entry.source.as_deref(), Some("s"));
        assert_eq!((entry.phase, entry.template), ("Pending", "small"));
    }

    #[test]
    fn a_new_version_without_news_is_no_news() {
        let mut other = machine(&json!({"template": "small"}));
        let entry = MachineEntry::project(other.clone());
        other.metadata.resource_version = Some("8".to_owned());
        other.metadata.managed_fields = None;
        assert_eq!(entry, MachineEntry::project(other));
    }

    #[test]
    fn every_address_is_known_given_or_derived() {
        let alone = MachineEntry::project(machine(&json!({"template": "small"})));
        let derived = vitivirt_machine::resolve::derived_mac("u", "default");
        assert_eq!(*alone.addresses, [address("ns", "pod", &derived)]);
        let bridged = MachineEntry::project(machine(&json!({"template": "small", "networks": [
            {"name": "a", "networkName": "prod", "macAddress": "52:54:00:12:34:AB"},
            {"name": "b", "networkName": "prod"},
            {"name": "c", "networkName": "pod"},
        ]})));
        assert_eq!(bridged.addresses.len(), 3);
        assert_eq!(bridged.addresses[0], address("ns", "prod", "52:54:00:12:34:ab"));
        assert_eq!(bridged.networks.iter().map(|name| &**name).collect::<Vec<_>>(), ["prod"]);
    }

    #[test]
    fn templates_are_bounded() {
        for (spec, expected) in
            [(json!({}), "none"), (json!({"template": "large"}), "large"), (json!({"template": "x y z"}), "unknown")]
        {
            assert_eq!(MachineEntry::project(machine(&spec)).template, expected);
        }
    }
}
