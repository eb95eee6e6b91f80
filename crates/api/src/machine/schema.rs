//! Schema of the CRDs beyond types: patterns and CEL rules. kubectl shows the messages of the rules when an object is
//! applied.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::limits;

/// A DNS label.
pub(super) const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// DNS labels separated by dots: the name of most objects. It becomes part of a URL.
pub(super) const SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// The key of a Secret.
pub(super) const SECRET_KEY: &str = "^[-._a-zA-Z0-9]+$";
/// The lowest bit of the first byte is the multicast bit.
pub(super) const UNICAST_MAC: &str = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$";

fn rule(rule: &str, message: &str) -> Value {
    json!({"rule": rule, "message": message})
}

pub(super) fn machine_rules() -> Value {
    json!([
        rule(
            "has(self.template) || !has(self.bootOrder) || !('cdrom' in self.bootOrder) || (has(self.disks) && self.disks.exists(d, has(d.type) && d.type == 'cdrom'))",
            "bootOrder contains cdrom, but no disk has type cdrom; add such a disk or remove cdrom"
        ),
        rule(
            "!has(self.networks) || self.networks.filter(n, n.networkName == 'pod').size() <= 1",
            "only one interface can use the pod network"
        ),
    ])
}

pub(super) fn disk_rules() -> Value {
    json!([
        rule("self.name != 'cloudinitdisk'", "disk name cloudinitdisk is reserved for cloud-init"),
        rule(
            "!has(self.accessMode) || self.accessMode != 'ReadOnlyMany' || has(self.source)",
            "accessMode ReadOnlyMany requires a source, because an empty read-only disk is useless"
        ),
        rule(
            "!has(self.source) || !has(self.source.containerDisk) || size(self.name) <= 52",
            "name must be at most 52 characters for a disk with a containerDisk source, because KubeVirt names a \
             container after it"
        ),
        rule(
            "!has(self.source) || !has(self.source.containerDisk) || !(has(self.storageClass) || has(self.accessMode) || has(self.volumeMode))",
            "storageClass, accessMode and volumeMode must not be set with a containerDisk source, which has no PVC"
        ),
    ])
}

/// The form of a size is a rule instead of a pattern, because the message of a pattern is the pattern.
pub(super) fn size_rules() -> Value {
    let (largest, form) = (limits::LARGEST_SIZE, limits::SIZE.replace('\\', "\\\\"));
    json!([
        rule(
            &format!("self.matches('{form}')"),
            "must be a number with an optional unit, such as 20Gi; units are Ki, Mi, Gi, Ti, Pi and Ei (powers of 1024), and k, M, \
             G, T, P and E (powers of 1000)"
        ),
        rule(
            &format!(
                "!isQuantity(self) || (quantity(self).compareTo(quantity('0')) > 0 && \
                 quantity(self).compareTo(quantity('{largest}')) <= 0)"
            ),
            &format!("must be greater than 0 and at most {largest}")
        ),
    ])
}

/// A length counts characters, of which each may have four bytes.
pub(super) fn data_rules() -> Value {
    let most = limits::DATA_BYTES;
    json!([rule(&format!("bytes(self).size() <= {most}"), &format!("must be at most {most} bytes"))])
}

pub(super) fn source_rules() -> Value {
    json!([rule(
        "[has(self.containerDisk), has(self.pvc), has(self.snapshot), has(self.http), has(self.registry)].filter(x, x).size() == 1",
        "exactly one of containerDisk, pvc, snapshot, http or registry must be set"
    )])
}

pub(super) fn bootloader_rules() -> Value {
    json!([rule(
        "!has(self.secureBoot) || !self.secureBoot || (has(self.efi) && self.efi)",
        "secureBoot requires efi: true"
    )])
}

/// A set: no device type occurs twice.
pub(super) fn boot_order(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 3,
        "items": {"type": "string", "enum": ["disk", "network", "cdrom"]},
        "x-kubernetes-list-type": "set",
    })
}

/// Rules about the metadata, which the rules of the spec cannot read.
pub(super) fn root_rules() -> Value {
    json!([
        rule(
            "size(self.metadata.name) <= 63",
            "metadata.name must be at most 63 characters: the VirtualMachine has the same name, and KubeVirt has \
             this limit"
        ),
        rule(
            "!self.metadata.name.contains('.')",
            "metadata.name must not contain a dot, because it is the host name of the machine"
        ),
    ])
}

/// metav1.Condition.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"description": "Type of the condition.", "type": "string", "maxLength": 316},
                "status": {
                    "description": "Status of the condition: True, False or Unknown.",
                    "type": "string", "enum": ["True", "False", "Unknown"],
                },
                "observedGeneration": {
                    "description": "Generation of the object that the condition is based on.",
                    "type": "integer", "format": "int64", "minimum": 0,
                },
                "lastTransitionTime": {
                    "description": "Time of the last change to the status. A new reason or message alone does not change it.",
                    "type": "string", "format": "date-time",
                },
                "reason": {
                    "description": "Programmatic identifier of the reason for the status, in CamelCase.",
                    "type": "string", "minLength": 1, "maxLength": 1024,
                },
                "message": {
                    "description": "Cause of the status, and what to do about it.",
                    "type": "string", "maxLength": 32768,
                },
            },
        },
    })
}
