//! What is good is kept, to the byte.

use serde_json::{Value, json};
use vitivirt_install::{Cluster, Environment, Installation, Kind};

use super::*;

fn assert_nothing_is_new(world: &World) {
    let issue = world.issue();
    assert_eq!(issue.renewed, names([]));
    for (secret, held) in &world.holding.secrets {
        let pair = issue.key_pair(secret).unwrap();
        assert!(pair.certificate == held.certificate && pair.key == held.key, "{secret}");
    }
    for (config_map, bundle) in &world.holding.bundles {
        assert_eq!(issue.bundle(config_map).as_ref(), Some(bundle), "{config_map}");
    }
}

#[test]
fn the_first_call_issues_all_and_the_second_nothing() {
    let mut world = World::new();
    let first = world.settle();
    let all: BTreeSet<String> = world.wanted.iter().map(|certificate| certificate.secret.clone()).collect();
    assert_eq!(first.renewed, all);
    assert_eq!(all.len(), 16);
    assert_eq!(first.bundle(EXTERNAL_CA).as_deref(), Some(""));
    assert_nothing_is_new(&world);
    world.now += HOUR;
    assert_nothing_is_new(&world);
    assert_eq!(world.issue().next, first.next);
}

#[test]
fn clocks_that_differ_a_little_renew_nothing() {
    let mut world = World::installed();
    world.now -= Duration::from_secs(60);
    assert_nothing_is_new(&world);
}

#[test]
fn an_authority_without_the_annotation_is_known_by_its_dates() {
    let mut world = World::installed();
    for ca in [CA, EXPORT_CA, BACKUP_CA] {
        world.held(ca).duration = None;
    }
    assert_nothing_is_new(&world);
}

#[test]
fn keys_may_be_written_as_pkcs8() {
    let mut world = World::installed();
    let key = key_of(world.held(CA));
    world.held(CA).key = key.pair().serialize_pem().into_bytes();
    assert!(text(world.held(CA).key.clone()).starts_with("-----BEGIN PRIVATE KEY-----"));
    assert_nothing_is_new(&world);
}

/// The annotation that an object carries is the one that is compared.
#[test]
fn what_is_written_to_the_cluster_is_what_is_recognised() {
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"certificateRotateStrategy": {"selfSigned": {
            "ca": {"duration": "50h30m", "renewBefore": "90m"}, "server": {"duration": "1.5h"},
        }}},
    });
    let environment = Environment { operator_image: "r/virt-operator:v1".to_owned(), ..Environment::default() };
    let installation =
        Installation::new(&serde_json::from_value(kubevirt).unwrap(), &environment, &Cluster::default()).unwrap();

    let mut world = World { wanted: installation.certificates.clone(), ..World::new() };
    let issue = world.issue();
    for object in installation.objects.iter().filter(|object| object.kind == Kind::Secret) {
        let body = object.body(&issue).unwrap().into_json();
        let duration = body.pointer("/metadata/annotations/kubevirt.io~1duration").and_then(Value::as_str);
        let pair = issue.key_pair(object.key.name()).unwrap();
        let held = Held { certificate: pair.certificate, key: pair.key, duration: duration.map(str::to_owned) };
        world.holding.secrets.insert(object.key.name().to_owned(), held);
    }
    assert_eq!(world.holding.secrets.len(), 13);
    assert_eq!(world.issue().renewed, names([]));
}
