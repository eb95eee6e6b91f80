//! Every generated object, compared with what the reference operator left on a live cluster for the same KubeVirt
//! resource (`reference/`, seven resources of `variants/`).
//!
//! An object is completed with the API server's own defaults first (`server`), so a field is compared whether we set it
//! or leave it to the server. What only a live cluster fills in, and what is prose or logic of our own, is left out of
//! both sides (the crate `snapshot`): see its `normalise` for the whole list.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may stop where something is not as it should be"
)]

mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_install::certificates::{Issued, KeyPair};
use vitivirt_install::{Cluster, Environment, Installation};

type Objects = vitivirt_snapshot::Snapshot;

#[derive(Deserialize)]
struct Snapshots {
    default: Objects,
    variants: BTreeMap<String, Variant>,
}

/// What another resource changed of the first.
#[derive(Deserialize)]
struct Variant {
    absent: BTreeSet<String>,
    /// Merge patches; of an object that was not there, the whole.
    changed: Objects,
}

/// Objects that the operator does not make: it reports through the one and labels the other.
const NOT_MADE: [&str; 2] = ["KubeVirt", "Namespace"];

fn reference(name: &str) -> Objects {
    let bytes = include_bytes!("../reference/snapshots.json.gz").as_slice();
    let mut text = String::new();
    flate2::read::GzDecoder::new(bytes).read_to_string(&mut text).unwrap();
    let snapshots: Snapshots = serde_json::from_str(&text).unwrap();
    let mut objects = snapshots.default;
    if name != "default" {
        let variant = &snapshots.variants[name];
        objects.retain(|key, _| !variant.absent.contains(key));
        for (key, patch) in &variant.changed {
            merge(objects.entry(key.clone()).or_default(), patch);
        }
    }
    objects
}

/// A merge patch, as the differences are kept.
fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                match value {
                    Value::Null => drop(target.remove(key)),
                    value => merge(target.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}

fn kubevirt(name: &str) -> KubeVirt {
    let path = format!("{}/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

/// Something of everything, because it is compared that it is there.
struct SomethingIssued;

impl Issued for SomethingIssued {
    fn key_pair(&self, _: &str) -> Option<KeyPair> {
        Some(KeyPair { certificate: b"certificate".to_vec(), key: b"key".to_vec() })
    }

    fn bundle(&self, _: &str) -> Option<String> {
        Some("bundle".to_owned())
    }
}

fn environment() -> Environment {
    let variables = [("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4"), ("KUBEVIRT_VERSION", "v1.8.4")];
    Environment::from_variables(variables.map(|(name, value)| (name.to_owned(), value.to_owned())))
}

/// The cluster that the snapshots were taken on.
fn cluster(name: &str) -> Cluster {
    let monitoring = name == "monitoring";
    Cluster {
        admission_policies: true,
        service_monitors: monitoring,
        prometheus_rules: monitoring,
        monitor_namespace: monitoring.then(|| "monitoring".to_owned()),
        schedulable_nodes: 2,
        ..Cluster::default()
    }
}

fn generated(name: &str) -> Objects {
    let installation = Installation::new(&kubevirt(name), &environment(), &cluster(name)).unwrap();
    let bodies = installation.objects.iter().map(|object| object.body(&SomethingIssued).unwrap().into_json());
    let mut out = Objects::new();
    for mut object in bodies {
        server::complete(&mut object);
        // Its logic is ours and not compared, but it must have some.
        assert!(object["kind"] != "ValidatingAdmissionPolicy" || object["spec"]["validations"][0].is_object());
        let object = vitivirt_snapshot::normalise(object);
        let key = vitivirt_snapshot::key(&object);
        assert!(out.insert(key.clone(), object).is_none(), "{key} is made twice");
    }
    out
}

fn compare(name: &str) {
    let mut theirs = reference(name);
    theirs.retain(|_, object| !NOT_MADE.iter().any(|kind| object["kind"] == *kind));
    let result = vitivirt_snapshot::compare(&theirs, &generated(name));
    eprintln!("{name}: {result}");
    assert!(result.is_equal(), "{name}: {result}\n{}", result.details(usize::MAX));
}

macro_rules! variants {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                compare(stringify!($name));
            }
        )*
    };
}

variants!(default, customize, gates, images, monitoring, placement, seed);

#[test]
fn what_the_resource_reports_and_the_namespace_is_labelled_with() {
    for name in ["default", "images", "seed"] {
        let theirs = reference(name);
        let config = vitivirt_install::DeploymentConfig::new(&kubevirt(name), &environment());
        let status = &theirs["kubevirt.io/KubeVirt/kubevirt/kubevirt"]["status"];
        assert_eq!(status["targetKubeVirtVersion"], config.kube_virt_version.as_str());
        assert_eq!(status["targetKubeVirtRegistry"], config.registry.as_str());
        let (label, value) = vitivirt_install::names::label::OF_NAMESPACE;
        assert_eq!(theirs["core/Namespace/kubevirt"]["metadata"]["labels"][label], value);
    }
}

#[test]
fn the_reference_is_whole() {
    for (name, count) in [
        ("default", 207),
        ("customize", 207),
        ("gates", 211),
        ("images", 207),
        ("monitoring", 211),
        ("placement", 205),
        ("seed", 207),
    ] {
        assert_eq!(reference(name).len(), count, "{name}");
    }
}
