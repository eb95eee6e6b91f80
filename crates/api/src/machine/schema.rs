//! What the CRD says beyond types: patterns, rules between fields, and rules about changes. kubectl shows their messages
//! when an object is applied.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// A whole number of bytes: plain, or with a decimal or binary suffix.
pub(super) const QUANTITY: &str = r"^[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$";
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
            "a containerDisk has no claim: storageClass, accessMode and volumeMode do not apply to it"
        ),
    ])
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
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768},
            },
        },
    })
}
