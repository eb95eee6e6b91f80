//! The kinds of KubeVirt, Multus and CDI that kubevirt-operator reads and writes without generated Rust types.

use kube_core::ApiResource;

pub fn virtual_machine_resource() -> ApiResource {
    resource("kubevirt.io", "v1", "VirtualMachine", "virtualmachines")
}

pub fn virtual_machine_instance_resource() -> ApiResource {
    resource("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances")
}

/// NetworkAttachmentDefinition of Multus.
pub fn network_attachment_resource() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
}

/// VolumeImportSource of CDI.
pub fn import_source_resource() -> ApiResource {
    resource("cdi.kubevirt.io", "v1beta1", "VolumeImportSource", "volumeimportsources")
}

fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: format!("{group}/{version}"),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}
