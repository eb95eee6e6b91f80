//! The cached part of a Machine: all of it except the managed fields and long user data, compressed, because most Machines
//! do not change for a long time; and uncompressed the few fields that the event router needs.
//!
//! The caches of ten thousand Machines decide how much memory the operator needs: see `cargo xtask bench machines`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use vitivirt_api::{
    ObjectKey,
    machine::{
        ANNOTATION_ADOPT, ANNOTATION_CASCADE, ANNOTATION_REPLACE, FINALIZER_MACHINE, FINALIZER_ORPHAN, LABEL_TEMPLATE,
        Machine, MachineId, MachinePhase, POD_NETWORK, condition_type, limits::DATA_BYTES,
    },
};
use vitivirt_machine::{
    render::cloud_init::digest,
    resolve::{resolve, template_names},
};
use vitivirt_runtime::watch::{IndexFn, ResourceVersion};

use super::compact::{CompressedJson, Labels, annotation, retain_read_labels};
use crate::mac_addresses::{MachineInterface, mac_number};

/// The annotations that the operator reads. Others may have a quarter of a megabyte, and `kubectl apply` stores a copy of
/// the whole object in one.
const READ_ANNOTATIONS: [&str; 3] = [ANNOTATION_ADOPT, ANNOTATION_REPLACE, ANNOTATION_CASCADE];

/// More finalizers than clients set. Kubernetes does not limit their number.
const FINALIZERS: usize = 64;

/// Inline user data and network data that are longer than this together are not cached, so that tenants cannot fill the
/// memory of the operator with them. The operator reads them again when it writes the cloud-init Secret.
const CACHED_INLINE_BYTES: usize = 2048;
/// Stands for text that is not cached.
const OMITTED: &str = "(omitted)";

#[derive(Debug, PartialEq)]
pub(crate) struct MachineEntry {
    json: CompressedJson,
    /// The digest of the inline data, if `json` does not contain it.
    pub(crate) omitted_inline: Option<Box<str>>,
    generation: i64,
    labels: Labels,
    pub(crate) phase: MachinePhase,
    pub(crate) template: &'static str,
    pub(crate) ready: bool,
    pub(crate) restart_required: bool,
    pub(crate) changes_rejected: bool,
    pub(crate) deleting: bool,
    /// It is deleted with `--cascade=orphan`.
    pub(crate) orphans: bool,
    /// NetworkConfigurations that it refers to.
    pub(crate) networks: Box<[Box<str>]>,
    /// The interfaces of its spec with their MAC addresses, set or derived. An invalid spec has none.
    pub(crate) interfaces: Box<[MachineInterface]>,
    /// The creation time in seconds.
    pub(crate) created: i64,
    /// The Secret that `cloudInit.secretRef` refers to.
    pub(crate) source: Option<Box<str>>,
}

impl MachineEntry {
    pub(crate) const BY_NETWORK: &str = "network";
    pub(crate) const BY_SOURCE: &str = "source";

    pub(crate) fn project(mut machine: Machine) -> Self {
        machine.metadata.managed_fields = None;
        // The cache stores it next to the value. In the value it would make every event a change.
        machine.metadata.resource_version = None;
        limit_metadata(&mut machine.metadata);
        let interfaces = interfaces(&machine);
        let omitted_inline = omit_inline(&mut machine);
        let spec = &machine.spec;
        let mut networks: Vec<Box<str>> = spec
            .networks
            .iter()
            .filter(|network| network.network_name != POD_NETWORK)
            .map(|network| network.network_name.as_str().into())
            .collect();
        networks.sort();
        networks.dedup();
        let is_true = |type_: &str| {
            let mut conditions = machine.status.iter().flat_map(|status| &status.conditions);
            conditions.any(|have| have.type_ == type_ && have.status == "True")
        };
        Self {
            generation: machine.metadata.generation.unwrap_or_default(),
            labels: Labels::from_metadata(&machine.metadata),
            phase: phase(&machine),
            template: template_label(&machine),
            ready: is_true(condition_type::READY),
            restart_required: is_true(condition_type::RESTART_REQUIRED),
            changes_rejected: is_true(condition_type::CHANGES_REJECTED),
            deleting: machine.metadata.deletion_timestamp.is_some(),
            orphans: machine.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER_ORPHAN),
            networks: networks.into(),
            interfaces,
            omitted_inline,
            created: machine.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            source: spec
                .cloud_init
                .as_ref()
                .and_then(|given| given.secret_ref.as_ref())
                .map(|reference| reference.name.as_str().into()),
            json: CompressedJson::from_value(&machine),
        }
    }

    /// The Machine, with the resource version from the cache.
    pub(crate) fn machine(&self, resource_version: &ResourceVersion) -> Result<Machine, serde_json::Error> {
        let mut machine: Machine = self.json.read()?;
        machine.metadata.resource_version = Some(resource_version.to_string());
        Ok(machine)
    }

    /// Whether the desired state is the same. Then the change is usually a write of the operator itself.
    pub(crate) fn same_desired_state(&self, newer: &Self) -> bool {
        self.generation == newer.generation && self.deleting == newer.deleting && self.labels == newer.labels
    }

    pub(crate) fn indexes() -> [(&'static str, IndexFn<Self>); 2] {
        [
            (Self::BY_NETWORK, |key, entry| entry.networks.iter().map(|name| in_namespace(key, name)).collect()),
            (Self::BY_SOURCE, |key, entry| entry.source.iter().map(|name| in_namespace(key, name)).collect()),
        ]
    }
}

/// Removes what the operator does not read, so that tenants cannot fill its memory with it.
fn limit_metadata(metadata: &mut ObjectMeta) {
    metadata.owner_references = None;
    let read = READ_ANNOTATIONS.iter().filter_map(|name| {
        let value = annotation(metadata, name)?;
        Some(((*name).to_owned(), value.to_owned()))
    });
    metadata.annotations = Some(read.collect()).filter(|read: &BTreeMap<_, _>| !read.is_empty());
    if let Some(labels) = &mut metadata.labels {
        retain_read_labels(labels);
    }
    // The position of the operator's finalizer matters.
    for (position, finalizer) in metadata.finalizers.iter_mut().flatten().enumerate() {
        if position >= FINALIZERS && ![FINALIZER_MACHINE, FINALIZER_ORPHAN].contains(&finalizer.as_str()) {
            *finalizer = String::new();
        }
    }
}

/// `namespace/name`, with the namespace of `key`.
pub(crate) fn in_namespace(key: &ObjectKey, name: &str) -> Box<str> {
    format!("{}/{name}", key.namespace().unwrap_or_default()).into()
}

/// Replaces long inline data by placeholders, and returns its digest. Data that is too long stays: the Machine is invalid,
/// and the CRD accepts no new ones.
fn omit_inline(machine: &mut Machine) -> Option<Box<str>> {
    let id = MachineId::from_metadata(&machine.metadata).ok()?;
    let given = machine.spec.cloud_init.as_mut()?;
    let lengths = [&given.user_data, &given.network_data].map(|text| text.as_ref().map_or(0, String::len));
    if lengths.iter().sum::<usize>() <= CACHED_INLINE_BYTES || lengths.iter().any(|length| *length > DATA_BYTES) {
        return None;
    }
    let digest = digest(&id, given, None);
    for text in [&mut given.user_data, &mut given.network_data].into_iter().flatten() {
        OMITTED.clone_into(text);
    }
    Some(digest.into())
}

pub(crate) fn interfaces(machine: &Machine) -> Box<[MachineInterface]> {
    let Ok(resolved) = resolve(machine) else { return Box::default() };
    let interface = |(network, mac): (&str, &str)| MachineInterface { network: network.into(), mac: mac_number(mac) };
    resolved.mac_addresses().map(interface).collect()
}

/// An unknown phase counts as Pending, so that the labels of metrics are bounded.
fn phase(machine: &Machine) -> MachinePhase {
    match machine.status.as_ref().and_then(|status| status.phase) {
        None | Some(MachinePhase::Unknown) => MachinePhase::Pending,
        Some(phase) => phase,
    }
}

/// The template as a metric label: one of the built-in names, `none` or `unknown`.
fn template_label(machine: &Machine) -> &'static str {
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
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", ANNOTATION_ADOPT: "pvc/a"},
                "managedFields": [{"manager": "kubectl", "operation": "Update"}],
            },
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn everything_but_managed_fields_and_annotations_of_others_is_cached() {
        let whole = machine(&json!({"template": "small", "cloudInit": {"secretRef": {"name": "s"}}}));
        let entry = MachineEntry::project(whole.clone());
        let back = entry.machine(&"9".into()).unwrap();
        assert_eq!(back.spec, whole.spec);
        assert_eq!(back.metadata.resource_version.as_deref(), Some("9"));
        assert_eq!(back.metadata.managed_fields, None);
        assert_eq!(back.metadata.annotations.unwrap().into_keys().collect::<Vec<_>>(), [ANNOTATION_ADOPT]);
        assert_eq!(entry.source.as_deref(), Some("s"));
        assert_eq!((entry.phase, entry.template), (MachinePhase::Pending, "small"));
    }

    /// docs/architecture.md names the limit.
    #[test]
    fn long_user_data_is_not_cached() {
        // Text that does not compress well.
        let noise = |seed: u64| -> String {
            let numbers = (0_u64..).map(|n| format!("{:016x}", (n ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            numbers.flat_map(String::into_bytes).map(char::from).take(DATA_BYTES).collect()
        };
        let with = |user_data: &str| {
            MachineEntry::project(machine(
                &json!({"template": "small", "cloudInit": {"userData": user_data, "networkData": noise(2)}}),
            ))
        };
        let largest = with(&noise(1));
        assert!(largest.json.len() < 1024, "{} bytes", largest.json.len());
        // It stays valid, and an edit is a change.
        assert!(resolve(&largest.machine(&"9".into()).unwrap()).is_ok());
        assert_ne!(largest.omitted_inline, with(&noise(3)).omitted_inline);
        assert_eq!(largest, with(&noise(1)));
        // Data that the CRD does not accept is reported.
        let too_long = with(&(noise(1) + "x"));
        assert!(resolve(&too_long.machine(&"9".into()).unwrap()).is_err());
        let short = MachineEntry::project(machine(&json!({"cloudInit": {"userData": "#cloud-config"}})));
        assert_eq!(short.omitted_inline, None);
    }

    #[test]
    fn a_new_resource_version_alone_is_not_a_change() {
        let mut other = machine(&json!({"template": "small"}));
        let entry = MachineEntry::project(other.clone());
        other.metadata.resource_version = Some("8".to_owned());
        other.metadata.managed_fields = None;
        assert_eq!(entry, MachineEntry::project(other));
    }

    #[test]
    fn set_and_derived_mac_addresses_are_cached() {
        let alone = MachineEntry::project(machine(&json!({"template": "small"})));
        let derived = vitivirt_machine::resolve::derived_mac("u", "default");
        assert_eq!(*alone.interfaces, [MachineInterface { network: "pod".into(), mac: mac_number(&derived) }]);
        let bridged = MachineEntry::project(machine(&json!({"template": "small", "networks": [
            {"name": "a", "networkName": "prod", "macAddress": "52:54:00:12:34:AB"},
            {"name": "b", "networkName": "prod"},
            {"name": "c", "networkName": "pod"},
        ]})));
        assert_eq!(bridged.interfaces.len(), 3);
        assert_eq!(bridged.interfaces[0], MachineInterface { network: "prod".into(), mac: 0x5254_0012_34ab });
        assert_eq!(bridged.networks.iter().map(|name| &**name).collect::<Vec<_>>(), ["prod"]);
    }

    #[test]
    fn an_unknown_template_has_a_fixed_label() {
        for (spec, expected) in
            [(json!({}), "none"), (json!({"template": "large"}), "large"), (json!({"template": "x y z"}), "unknown")]
        {
            assert_eq!(MachineEntry::project(machine(&spec)).template, expected);
        }
    }
}
