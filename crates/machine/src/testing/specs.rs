//! Random valid specs.

use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
};
use vitivirt_api::machine::{
    Bootloader, CloudInit, ContainerDiskSource, Cpu, Disk, DiskSource, Domain, DomainMachine, Features, Firmware,
    MachineSpec, Memory, NamedSource, Network, Resources, UrlSource,
};

/// A valid spec on the networks `prod`, `storage` and `pod` and the StorageClass `fast-ssd`.
pub fn machine_spec() -> impl Strategy<Value = MachineSpec> {
    (template(), resources(), disks(), networks(), cloud_init(), option::of(domain()), power(), any::<bool>()).prop_map(
        |(template, resources, disks, networks, cloud_init, domain, power_state, ordered)| {
            let cdrom = disks.iter().any(|disk| disk.kind.as_deref() == Some("cdrom"));
            let boot_order = match (ordered, cdrom) {
                (false, _) => vec![],
                (true, false) => vec!["network".to_owned(), "disk".to_owned()],
                (true, true) => vec!["cdrom".to_owned(), "disk".to_owned(), "network".to_owned()],
            };
            MachineSpec {
                template: Some(template),
                resources,
                disks,
                networks,
                boot_order,
                cloud_init,
                domain,
                power_state,
            }
        },
    )
}

fn template() -> impl Strategy<Value = String> {
    prop_oneof!["small", "medium", "large"].prop_map(|name| name.to_string())
}

fn resources() -> impl Strategy<Value = Option<Resources>> {
    let cpu = (option::of(1u32..64), option::of(1u32..3), option::of(1u32..5))
        .prop_map(|(cores, threads, sockets)| Cpu { cores, threads, sockets });
    let memory = option::of(quantity()).prop_map(|size| Memory { size });
    option::of((option::of(cpu), option::of(memory)).prop_map(|(cpu, memory)| Resources { cpu, memory }))
}

fn quantity() -> impl Strategy<Value = String> {
    (1u32..5000, prop_oneof!["Mi", "Gi", "M", "G"]).prop_map(|(number, suffix)| format!("{number}{suffix}"))
}

fn disks() -> impl Strategy<Value = Vec<Disk>> {
    let source = prop_oneof![
        4 => Just(None),
        1 => "[a-z]{1,8}".prop_map(|image| Some(DiskSource { container_disk: Some(ContainerDiskSource { image }), ..DiskSource::default() })),
        1 => "[a-z]{1,8}".prop_map(|name| Some(DiskSource { pvc: Some(NamedSource { name }), ..DiskSource::default() })),
        1 => "[a-z]{1,8}".prop_map(|name| Some(DiskSource { snapshot: Some(NamedSource { name }), ..DiskSource::default() })),
        1 => "[a-z]{1,8}".prop_map(|host| Some(DiskSource { registry: Some(UrlSource { url: format!("docker://{host}/x") }), ..DiskSource::default() })),
        1 => "[a-z]{1,8}".prop_map(|host| Some(DiskSource { http: Some(UrlSource { url: format!("https://{host}/x") }), ..DiskSource::default() })),
    ];
    let disk = (
        quantity(),
        source,
        option::of(prop_oneof!["disk", "cdrom"]),
        option::of(prop_oneof!["Delete", "Retain"]),
        any::<bool>(),
        modes(),
    );
    btree_map(prop_oneof!["root", "data", "logs", "iso", "[a-z]{1,6}"], disk, 0..4).prop_map(|disks| {
        disks
            .into_iter()
            .map(|(name, (size, source, kind, on_delete, fast, (access_mode, volume_mode)))| {
                let image = source.as_ref().is_some_and(|source| source.container_disk.is_some());
                Disk {
                    name,
                    size: (!image).then_some(size),
                    storage_class: (fast && !image).then(|| "fast-ssd".to_owned()),
                    // An empty disk cannot be read-only.
                    access_mode: access_mode.filter(|mode| !image && (source.is_some() || mode != "ReadOnlyMany")),
                    volume_mode: volume_mode.filter(|_| !image),
                    source,
                    kind: kind.map(|kind| kind.to_string()),
                    on_delete: on_delete.map(|on_delete| on_delete.to_string()),
                }
            })
            .collect()
    })
}

/// Access mode and volume mode of a PVC.
fn modes() -> impl Strategy<Value = (Option<String>, Option<String>)> {
    let access_mode = prop_oneof!["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"];
    let volume_mode = prop_oneof!["Filesystem", "Block"];
    (option::of(access_mode), option::of(volume_mode))
}

fn networks() -> impl Strategy<Value = Vec<Network>> {
    let network = (prop_oneof!["prod", "storage"], option::of(prop_oneof!["virtio", "e1000", "rtl8139"]));
    (any::<bool>(), vec(network, 0..3)).prop_map(|(pod, others)| {
        let pod =
            pod.then(|| Network { name: "eth0".to_owned(), network_name: "pod".to_owned(), ..Network::default() });
        let others = others.into_iter().enumerate().map(|(index, (name, model))| Network {
            name: format!("net{index}"),
            network_name: name.to_string(),
            model: model.map(|model| model.to_string()),
            mac_address: None,
        });
        pod.into_iter().chain(others).collect()
    })
}

fn cloud_init() -> impl Strategy<Value = Option<CloudInit>> {
    option::of((option::of("[ -~]{0,40}"), option::of("[ -~]{0,20}")).prop_map(|(user_data, network_data)| CloudInit {
        user_data,
        network_data,
        secret_ref: None,
    }))
}

fn domain() -> impl Strategy<Value = Domain> {
    let features = (option::of(any::<bool>()), option::of(any::<bool>()), option::of(any::<bool>()))
        .prop_map(|(acpi, apic, hyperv)| Features { acpi, apic, hyperv });
    let firmware = (any::<bool>(), any::<bool>()).prop_map(|(efi, secure)| Firmware {
        bootloader: Some(Bootloader { efi: Some(efi), secure_boot: Some(efi && secure) }),
    });
    let machine = option::of(prop_oneof!["pc-q35", "q35"])
        .prop_map(|kind| DomainMachine { kind: kind.map(|kind| kind.to_string()) });
    (option::of(machine), option::of(features), option::of(firmware)).prop_map(|(machine, features, firmware)| Domain {
        machine,
        features,
        firmware,
    })
}

fn power() -> impl Strategy<Value = Option<String>> {
    option::of(prop_oneof!["Running", "Stopped"].prop_map(|power| power.to_string()))
}
