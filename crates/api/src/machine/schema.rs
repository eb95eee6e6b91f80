//! What the CRD says beyond types: patterns, rules between fields, and rules about changes. kubectl shows their messages
//! when an object is applied.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::limits;

/// A DNS label.
pub(super) const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// The lowest bit of the first byte is the multicast bit.
pub(super) const UNICAST_MAC: &str = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$";

fn rule(rule: &str, message: &str) -> Value {
    json!({"rule": rule, "message": message})
}

pub(super) fn machine_rules() -> Value {
    json!([
        rule(
            "has(self.template) || !has(self.bootOrder) || !('cdrom' in self.bootOrder) || (has(self.disks) && self.disks.exists(d, has(d.type) && d.type == 'cdrom'))",
            "bootOrder names cdrom, but no disk has type cdrom"
        ),
        rule(
            "!has(self.networks) || self.networks.filter(n, n.networkName == 'pod').size() <= 1",
            "only one interface can be on the pod network"
        ),
    ])
}

pub(super) fn disk_rules() -> Value {
    json!([
        rule("self.name != 'cloudinitdisk'", "the disk name cloudinitdisk is reserved for cloud-init"),
        rule(
            "!has(self.accessMode) || self.accessMode != 'ReadOnlyMany' || has(self.source)",
            "accessMode ReadOnlyMany needs a source: an empty read-only disk is of no use"
        ),
        rule(
            "!has(self.source) || !has(self.source.containerDisk) || !(has(self.storageClass) || has(self.accessMode) || has(self.volumeMode))",
            "a containerDisk has no PVC: storageClass, accessMode and volumeMode do not apply to it"
        ),
    ])
}

/// What a pattern cannot say about a size.
pub(super) fn size_rules() -> Value {
    let largest = limits::LARGEST_SIZE;
    json!([rule(
        &format!("quantity(self).compareTo(quantity('0')) > 0 && quantity(self).compareTo(quantity('{largest}')) <= 0"),
        &format!("a size is more than nothing and at most {largest}")
    )])
}

pub(super) fn source_rules() -> Value {
    json!([rule(
        "[has(self.containerDisk), has(self.pvc), has(self.snapshot), has(self.http), has(self.registry)].filter(x, x).size() == 1",
        "a source is exactly one of containerDisk, pvc, snapshot, http and registry"
    )])
}

pub(super) fn bootloader_rules() -> Value {
    json!([rule(
        "!has(self.secureBoot) || !self.secureBoot || (has(self.efi) && self.efi)",
        "secureBoot needs efi: true"
    )])
}

/// Each word at most once.
pub(super) fn boot_order(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 3,
        "items": {"type": "string", "enum": ["disk", "network", "cdrom"]},
        "x-kubernetes-list-type": "set",
    })
}

/// Rules about the whole object, whose metadata a spec's rules cannot see.
pub(super) fn root_rules() -> Value {
    json!([
        rule(
            "size(self.metadata.name) <= 63",
            "metadata.name is longer than 63 characters; the VirtualMachine has the same name, and KubeVirt allows no more"
        ),
        rule(
            "!self.metadata.name.contains('.')",
            "metadata.name must not contain a dot; the machine's host name is made of it"
        ),
    ])
}

/// metav1.Condition, in the words of the Kubernetes API conventions.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"description": "What this is about.", "type": "string", "maxLength": 316},
                "status": {
                    "description": "Whether it is so.",
                    "type": "string", "enum": ["True", "False", "Unknown"],
                },
                "observedGeneration": {
                    "description": "The generation of the object that this was found at.",
                    "type": "integer", "format": "int64", "minimum": 0,
                },
                "lastTransitionTime": {
                    "description": "When the status last changed; a new reason or message alone does not count.",
                    "type": "string", "format": "date-time",
                },
                "reason": {
                    "description": "Why, in one word for programs. docs/troubleshooting.md has all of them.",
                    "type": "string", "minLength": 1, "maxLength": 1024,
                },
                "message": {
                    "description": "Why, in a sentence for people, and what to do about it.",
                    "type": "string", "maxLength": 32768,
                },
            },
        },
    })
}
