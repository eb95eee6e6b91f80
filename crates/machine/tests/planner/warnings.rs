//! The warnings about a Machine whose guest has nothing to boot from or ignores its user data, or whose spec has a password.

use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_ADOPT, condition_type as type_};
use vitivirt_machine::warnings;

use crate::simulated_cluster::{SimulatedCluster, running};

fn boot_warning(cluster: &SimulatedCluster) -> Option<String> {
    warnings(&cluster.assessed()).into_iter().find(|warning| warning.contains("nothing to boot from"))
}

fn cluster(spec: &Value) -> SimulatedCluster {
    SimulatedCluster::new(serde_json::from_value(spec.clone()).unwrap())
}

#[test]
fn a_machine_without_content_on_a_boot_device_gets_a_warning() {
    let image = json!({"containerDisk": {"image": "quay.io/containerdisks/fedora:42"}});
    let iso =
        json!({"name": "iso", "type": "cdrom", "size": "2Gi", "source": {"http": {"url": "https://x.example/a.iso"}}});
    let root = |source: &Value| json!({"name": "root", "source": source});
    let resources = json!({"cpu": {"cores": 1}, "memory": {"size": "1Gi"}});
    for (spec, expected) in [
        (json!({"template": "small"}), true),
        (json!({"template": "small", "disks": [root(&image)]}), false),
        (json!({"template": "small", "disks": [{"name": "data", "source": image}]}), true),
        (json!({"template": "small", "bootOrder": ["disk"], "disks": [{"name": "data", "source": image}]}), false),
        // A CD-ROM boots only if the boot order says so.
        (json!({"template": "small", "disks": [iso]}), true),
        (json!({"template": "small", "bootOrder": ["disk", "cdrom"], "disks": [iso]}), false),
        (json!({"template": "small", "bootOrder": ["disk"], "disks": [iso]}), true),
        (json!({"template": "small", "bootOrder": ["disk", "network"]}), false),
        (
            json!({"resources": resources, "disks": [{"name": "a", "source": image}, {"name": "b", "size": "1Gi"}]}),
            false,
        ),
        (
            json!({"resources": resources, "disks": [{"name": "a", "size": "1Gi"}, {"name": "b", "source": image}]}),
            true,
        ),
    ] {
        let warning = boot_warning(&cluster(&spec));
        assert_eq!(warning.is_some(), expected, "{spec}: {warning:?}");
    }
}

#[test]
fn an_adopted_disk_has_content() {
    for item in ["pvc/web-root", "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11"] {
        let mut cluster = cluster(&json!({"template": "small"}));
        assert!(boot_warning(&cluster).is_some());
        let name = cluster.observed.id.key().name().to_owned();
        cluster.annotate(ANNOTATION_ADOPT, &item.replace("web", &name));
        assert_eq!(boot_warning(&cluster), None, "{item}");
    }
}

/// It is not an error: the Machine is ready, and has no diagnosis.
#[test]
fn the_condition_of_a_running_machine_has_the_warning() {
    let mut empty = running(serde_json::from_value(json!({"template": "small"})).unwrap());
    empty.reconcile();
    let (is, reason, message) = empty.condition(type_::READY);
    assert_eq!((is.as_str(), reason.as_str()), ("True", "Running"));
    let start = "Machine is running; disk root has no source, so the guest has nothing to boot from unless";
    assert!(message.starts_with(start) && message.ends_with("/docs/first-machine.md"), "{message}");
    assert_eq!(empty.status().diagnosis, None);
    assert_eq!(empty.condition(type_::VIRTUAL_MACHINE_READY).2, "Machine is running");
}

#[test]
fn a_password_in_the_spec_gets_a_warning() {
    for (cloud_init, field) in [
        (json!({"userData": "#cloud-config\npassword: canary\n"}), Some("userData")),
        (json!({"userData": "-----BEGIN OPENSSH PRIVATE KEY-----"}), Some("userData")),
        (json!({"networkData": "wifi: {password: canary}"}), Some("networkData")),
        (json!({"userData": "#cloud-config\nssh_authorized_keys: [ssh-ed25519 AAAA]\n"}), None),
        (json!({"secretRef": {"name": "password"}}), None),
    ] {
        let cluster = cluster(&json!({"template": "small", "cloudInit": cloud_init}));
        let warnings = warnings(&cluster.assessed());
        let warning = warnings.into_iter().find(|warning| warning.contains("seems to contain a password"));
        let names = |field: &str| {
            warning
                .as_ref()
                .is_some_and(|text| text.contains(&format!("spec.cloudInit.{field}")) && !text.contains("canary"))
        };
        assert!(field.map_or(warning.is_none(), names), "{cloud_init}: {warning:?}");
    }
}

#[test]
fn user_data_that_no_guest_recognizes_gets_a_warning() {
    for (text, is_recognized) in [
        ("#cloud-config\nusers: []\n", true),
        ("\n#!/bin/sh\ntrue\n", true),
        ("Content-Type: multipart/mixed; boundary=x\n", true),
        ("{\"ignition\": {\"version\": \"3.4.0\"}}", true),
        ("<powershell>\nexit\n</powershell>", true),
        ("", true),
        ("users: []\n", false),
        ("# cloud-config\nusers: []\n", false),
    ] {
        let cluster = cluster(&json!({"template": "small", "cloudInit": {"userData": text}}));
        let warnings = warnings(&cluster.assessed());
        let is_warned = warnings.iter().any(|warning| warning.contains("the guest ignores the user data"));
        assert_eq!(is_warned, !is_recognized, "{text:?}: {warnings:?}");
    }
}
