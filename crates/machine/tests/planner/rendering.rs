//! The objects of a Machine, field by field.

use serde_json::{Value, json};
use vitivirt_api::{
    Write,
    machine::{LABEL_TEMPLATE, MachineSpec, condition_type as type_},
};
use vitivirt_machine::{SecretBytes, observed::SourceView};

use crate::simulated_cluster::{SimulatedCluster, running};

fn spec(value: Value) -> MachineSpec {
    serde_json::from_value(value).unwrap()
}

fn cluster(value: Value) -> SimulatedCluster {
    SimulatedCluster::new(spec(value)).with_network("prod")
}

/// The object of this kind and name that the plan creates.
fn created(cluster: &SimulatedCluster, kind: &str, name: &str) -> Value {
    let plan = cluster.plan();
    let found = plan.steps.iter().flat_map(|step| &step.writes).find_map(|write| match write {
        Write::Create { target, body } if target.resource.kind == kind && target.key.name() == name => {
            Some(body.json().clone())
        }
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no {kind} {name} in {plan:?}"))
}

fn vm(cluster: &SimulatedCluster) -> Value {
    created(cluster, "VirtualMachine", "web")["spec"]["template"]["spec"].take()
}

/// The names of the devices and their number in the boot order.
fn boot_numbers(vm: &Value) -> Vec<(String, Option<u64>)> {
    let devices = &vm["domain"]["devices"];
    let all = ["disks", "interfaces"].into_iter().flat_map(|list| devices[list].as_array().unwrap());
    all.map(|device| (device["name"].as_str().unwrap().to_owned(), device["bootOrder"].as_u64())).collect()
}

#[test]
fn the_devices_have_the_numbers_of_the_boot_order() {
    let cases = [
        (json!(null), [Some(1), None, None, None, None]),
        (json!(["disk"]), [Some(1), Some(2), None, None, None]),
        (json!(["network"]), [None, None, None, Some(1), Some(2)]),
        (json!(["cdrom", "network", "disk"]), [Some(4), Some(5), Some(1), Some(2), Some(3)]),
        (json!(["disk", "network", "cdrom"]), [Some(1), Some(2), Some(5), Some(3), Some(4)]),
        (json!(["network", "disk", "cdrom"]), [Some(3), Some(4), Some(5), Some(1), Some(2)]),
    ];
    for (order, expected) in cases {
        let mut value = json!({
            "template": "small",
            "disks": [{"name": "root"}, {"name": "data", "size": "1Gi"}, {"name": "iso", "size": "1Gi", "type": "cdrom"}],
            "networks": [{"name": "eth0", "networkName": "pod"}, {"name": "eth1", "networkName": "prod"}],
        });
        if !order.is_null() {
            value["bootOrder"] = order.clone();
        }
        let names = ["root", "data", "iso", "eth0", "eth1"].map(str::to_owned);
        let expected: Vec<(String, Option<u64>)> = names.into_iter().zip(expected).collect();
        assert_eq!(boot_numbers(&vm(&cluster(value))), expected, "{order}");
    }
}

#[test]
fn access_and_volume_mode_reach_the_pvc_and_a_read_only_disk_the_vm() {
    let cases = [
        (json!({}), "ReadWriteOnce", "Filesystem", false),
        (json!({"accessMode": "ReadWriteMany"}), "ReadWriteMany", "Filesystem", false),
        (json!({"accessMode": "ReadWriteMany", "volumeMode": "Block"}), "ReadWriteMany", "Block", false),
        (
            json!({"accessMode": "ReadOnlyMany", "source": {"pvc": {"name": "golden"}}}),
            "ReadOnlyMany",
            "Filesystem",
            true,
        ),
    ];
    for (fields, access, mode, read_only) in cases {
        let mut disk = json!({"name": "data", "size": "1Gi"});
        disk.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let cluster = cluster(json!({"template": "small", "disks": [disk]}));
        let pvc = created(&cluster, "PersistentVolumeClaim", "web-data");
        assert_eq!(pvc["spec"]["accessModes"], json!([access]), "{fields}");
        assert_eq!(pvc["spec"]["volumeMode"], json!(mode), "{fields}");
        let vm = vm(&cluster);
        let disks = vm["domain"]["devices"]["disks"].as_array().unwrap();
        let disk = disks.iter().find(|disk| disk["name"] == "data").unwrap();
        assert_eq!(disk["disk"]["readonly"].as_bool().unwrap_or_default(), read_only, "{fields}: {disk}");
    }
}

#[test]
fn the_label_names_the_template_of_a_spec_without_one() {
    let mut cluster = SimulatedCluster::new(MachineSpec::default());
    let labels = cluster.observed.machine.metadata.labels.get_or_insert_default();
    labels.insert(LABEL_TEMPLATE.to_owned(), "medium".to_owned());
    let from_label = vm(&cluster)["domain"]["cpu"].clone();
    assert_eq!(from_label, vm(&SimulatedCluster::new(spec(json!({"template": "medium"}))))["domain"]["cpu"]);
    assert_ne!(from_label, vm(&SimulatedCluster::new(spec(json!({"template": "large"}))))["domain"]["cpu"]);
}

#[test]
fn a_key_that_is_missing_in_the_source_is_named() {
    let mut cluster = cluster(json!({
        "template": "small", "cloudInit": {"secretRef": {"name": "source", "key": "custom"}},
    }));
    cluster.observed.source = SourceView::KeyMissing;
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    let (_, reason, message) = cluster.condition(type_::READY);
    assert_eq!(reason, "SecretNotFound");
    assert!(message.contains("Secret source has no key custom"), "{message}");
    cluster.observed.source = SourceView::Read(SecretBytes(b"#cloud-config\n".to_vec()));
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.vm.is_some());
}

#[test]
fn a_url_as_source_needs_cdi_and_becomes_its_import_source() {
    for (source, scheme) in [("http", "https"), ("registry", "docker")] {
        let url = format!("{scheme}://example.com/image");
        let disk = json!({"name": "root", "size": "20Gi", "source": {source: {"url": url}}});
        let mut cluster = cluster(json!({"template": "small", "disks": [disk]}));
        cluster.observed.installed.cdi = false;
        let (plan, _) = cluster.reconcile();
        assert_eq!(plan.write_count(), 0, "{plan:?}");
        assert_eq!(cluster.condition(type_::READY).1, "CdiNotInstalled", "{source}");
        cluster.observed.installed.cdi = true;
        let import = created(&cluster, "VolumeImportSource", "web-root");
        assert_eq!(import["spec"]["source"], json!({source: {"url": url}}));
        let pvc = created(&cluster, "PersistentVolumeClaim", "web-root");
        let reference = json!({"apiGroup": "cdi.kubevirt.io", "kind": "VolumeImportSource", "name": "web-root"});
        assert_eq!(pvc["spec"]["dataSourceRef"], reference);
    }
}

#[test]
fn network_data_is_in_the_secret_and_the_vm_refers_to_it() {
    let cases = [
        (json!({"userData": "a", "networkData": "b"}), true),
        (json!({"networkData": "b"}), true),
        (json!({"userData": "a"}), false),
    ];
    for (cloud_init, has_network_data) in cases {
        let cluster = cluster(json!({"template": "small", "cloudInit": cloud_init}));
        let secret = created(&cluster, "Secret", "web-cloudinit");
        let data = secret["data"].as_object().unwrap();
        assert_eq!(data.get("networkdata"), has_network_data.then(|| json!("Yg==")).as_ref(), "{cloud_init}");
        let vm = vm(&cluster);
        let volumes = vm["volumes"].as_array().unwrap();
        let volume = volumes.iter().find_map(|volume| volume.get("cloudInitNoCloud")).unwrap();
        let reference = json!({"name": "web-cloudinit"});
        assert_eq!(volume["secretRef"], reference);
        let expected = has_network_data.then_some(&reference);
        assert_eq!(volume.get("networkDataSecretRef"), expected, "{cloud_init}");
    }
}

#[test]
fn the_status_has_the_time_and_version_of_its_last_change() {
    let mut cluster = running(spec(json!({"template": "small"})));
    let status = cluster.status();
    assert_eq!(status.last_updated.as_deref(), Some("1970-01-01T00:00:00Z"));
    assert_eq!(status.resource_version.as_deref(), Some("1"));
    cluster.observed.machine.metadata.resource_version = Some("2".to_owned());
    cluster.observed.now += std::time::Duration::from_secs(60);
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.status().resource_version.as_deref(), Some("1"), "nothing else changed");
    cluster.edit(spec(json!({"template": "small", "powerState": "Stopped"})));
    cluster.reconcile_until_up_to_date();
    let status = cluster.status();
    assert_eq!(status.last_updated.as_deref(), Some("1970-01-01T00:01:00Z"));
    assert_eq!(status.resource_version.as_deref(), Some("2"));
}
