//! `vitistack.io/v1alpha1`: Machine, what users write, and NetworkConfiguration, which it refers to.
//!
//! Values with a fixed set of words are strings here, limited by the schema: a word that a newer version knows must not
//! make this version unable to read the whole list. `machine` parses them once into types of their own.

mod crds;
pub mod limits;
mod names;
mod schema;
mod spec;
mod status;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use crds::crds;
pub use names::*;
pub use spec::{
    Bootloader, CloudInit, ContainerDiskSource, Cpu, Disk, DiskSource, Domain, DomainMachine, Features, Firmware,
    Memory, NamedSource, Network, Resources, SecretKeyRef, UrlSource,
};
pub use status::{EffectiveResources, MachineStatus};

/// A virtual machine. The operator makes a KubeVirt VirtualMachine with disks, networks and cloud-init of it and keeps
/// them as this object says.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vitistack.io",
    version = "v1alpha1",
    kind = "Machine",
    plural = "machines",
    singular = "machine",
    shortname = "mc",
    shortname = "vmachine",
    category = "vitistack",
    namespaced,
    status = "MachineStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A virtual machine: the operator makes a KubeVirt VirtualMachine with disks, networks and cloud-init of it.",
    crates(kube_core = "kube_core"),
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Template","type":"string","jsonPath":".spec.template"}"#,
    printcolumn = r#"{"name":"CPU","type":"integer","jsonPath":".status.resources.cpu"}"#,
    printcolumn = r#"{"name":"Memory","type":"string","jsonPath":".status.resources.memory"}"#,
    printcolumn = r#"{"name":"IP","type":"string","jsonPath":".status.ipAddresses[0]"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".status.nodeName"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"VM","type":"string","priority":1,"jsonPath":".status.vmName"}"#,
    printcolumn = r#"{"name":"Diagnosis","type":"string","priority":1,"jsonPath":".status.diagnosis"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::machine_rules()))]
pub struct MachineSpec {
    /// Where cpu, memory and the root disk come from: small (1 core, 2Gi, 20Gi), medium (2, 4Gi, 40Gi) or large (4, 8Gi,
    /// 80Gi). What is given below overrides it field by field. Without a template cpu, memory and a disk must be given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub template: Option<String>,

    /// CPU and memory, overriding the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,

    /// Disks, merged by name onto the template's. The machine boots from the one named root, else from the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub disks: Vec<Disk>,

    /// Network interfaces. Without any the machine has one on the pod network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub networks: Vec<Network>,

    /// Which kinds of devices to boot from, the first first: disk, network, cdrom.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::boot_order")]
    pub boot_order: Vec<String>,

    /// User data and network data for cloud-init. The operator keeps them in a Secret of the machine's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,

    /// Machine type, features and firmware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Domain>,

    /// Whether the machine should run: Running (the default) or Stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Running", "Stopped"]))]
    pub power_state: Option<String>,
}

/// A network that machines may be attached to: a bridge on the nodes, with or without a VLAN.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vitistack.io",
    version = "v1alpha1",
    kind = "NetworkConfiguration",
    plural = "networkconfigurations",
    singular = "networkconfiguration",
    shortname = "netconf",
    category = "vitistack",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "A network that Machines of the namespace may be attached to: a bridge on the nodes, with or without a VLAN.",
    crates(kube_core = "kube_core"),
    printcolumn = r#"{"name":"Bridge","type":"string","jsonPath":".spec.bridge"}"#,
    printcolumn = r#"{"name":"VLAN","type":"integer","jsonPath":".spec.vlan"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct NetworkConfigurationSpec {
    /// The VLAN tag of the machines' traffic; none for untagged traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = limits::FIRST_VLAN, max = limits::LAST_VLAN))]
    pub vlan: Option<u16>,

    /// The bridge on the nodes that machines are attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = limits::BRIDGE_LENGTH), regex(pattern = limits::BRIDGE))]
    pub bridge: Option<String>,

    /// What other components of Viti Stack put here. It is kept, not read.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Map<String, Value>,
}
