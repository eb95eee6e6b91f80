//! `vitistack.io/v1alpha1`: Machine, which users create, and NetworkConfiguration, which a Machine refers to.
//!
//! Spec fields with a fixed set of values are strings here and the schema restricts them: a value that only a newer
//! version knows must not make this version unable to read the whole list. `vitivirt-machine` parses them into enums.

mod adoption;
mod crds;
mod id;
pub mod limits;
mod names;
mod phases;
mod schema;
mod spec;
mod status;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use adoption::Adoption;
pub use crds::crds;
pub use id::MachineId;
pub use names::*;
pub use phases::{AccessMode, MachinePhase, PrintableStatus, PvcPhase, VmiPhase, VolumeMode};
pub use spec::{
    Bootloader, CloudInit, ContainerDiskSource, Cpu, Disk, DiskSource, Domain, DomainMachine, Features, Firmware,
    Memory, NamedSource, Network, Resources, SecretKeyRef, UrlSource,
};
pub use status::{DiskStatus, EffectiveResources, MachineStatus};

/// Desired state of the virtual machine.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vitistack.io",
    version = "v1alpha1",
    kind = "Machine",
    plural = "machines",
    singular = "machine",
    shortname = "vmachine",
    category = "vitivirt",
    namespaced,
    status = "MachineStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A virtual machine. The operator creates a KubeVirt VirtualMachine for it, with its disks, networks and cloud-init data, and keeps them in sync with this object.",
    crates(kube_core = "kube_core"),
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Template","type":"string","jsonPath":".spec.template"}"#,
    printcolumn = r#"{"name":"CPU","type":"integer","jsonPath":".status.resources.cpu"}"#,
    printcolumn = r#"{"name":"Memory","type":"string","jsonPath":".status.resources.memory"}"#,
    printcolumn = r#"{"name":"IP","type":"string","jsonPath":".status.ipAddresses[0]"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".status.nodeName"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"VM","type":"string","priority":1,"jsonPath":".status.vmName"}"#,
    printcolumn = r#"{"name":"Restart","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"RestartRequired\")].status"}"#,
    printcolumn = r#"{"name":"Rejected","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"ChangesRejected\")].status"}"#,
    printcolumn = r#"{"name":"Diagnosis","type":"string","priority":1,"jsonPath":".status.diagnosis"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::machine_rules()))]
pub struct MachineSpec {
    /// Template for CPU, memory and the root disk: small (1 core, 2Gi, 20Gi), medium (2 cores, 4Gi, 40Gi) or large (4
    /// cores, 8Gi, 80Gi). Other fields override individual values. Without a template, CPU cores, a memory size and a
    /// disk are required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub template: Option<String>,

    /// CPU and memory. Overrides the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,

    /// Disks, merged by name with the template's root disk. Without bootOrder, the machine boots from the disk named
    /// root, or from the first disk if no disk has that name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub disks: Vec<Disk>,

    /// Network interfaces. Default: one interface on the pod network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub networks: Vec<Network>,

    /// Device types to boot from, in this order. Supported values: disk, network, cdrom. Default: the boot disk only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::boot_order")]
    pub boot_order: Vec<String>,

    /// User data and network data for cloud-init. The operator stores them in a Secret that belongs to the Machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,

    /// Machine type, CPU and chipset features, and firmware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Domain>,

    /// Desired power state: Running or Stopped. Default: Running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Running", "Stopped"]))]
    pub power_state: Option<String>,
}

/// Desired state of the network.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vitistack.io",
    version = "v1alpha1",
    kind = "NetworkConfiguration",
    plural = "networkconfigurations",
    singular = "networkconfiguration",
    shortname = "netconf",
    category = "vitivirt",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "A network that Machines in the same namespace can use: a bridge on the nodes, with an optional VLAN.",
    crates(kube_core = "kube_core"),
    printcolumn = r#"{"name":"Bridge","type":"string","jsonPath":".spec.bridge"}"#,
    printcolumn = r#"{"name":"VLAN","type":"integer","jsonPath":".spec.vlan"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct NetworkConfigurationSpec {
    /// VLAN ID of the machines' traffic. Default: untagged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = limits::FIRST_VLAN, max = limits::LAST_VLAN))]
    pub vlan: Option<u16>,

    /// Name of the Linux bridge that machines are attached to. It must exist on every node that runs them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = limits::BRIDGE_LENGTH), regex(pattern = limits::BRIDGE))]
    pub bridge: Option<String>,

    /// Fields of other Viti Stack components. The operator keeps them and does not read them.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Map<String, Value>,
}
