//! Random valid specs, each spoilt in one way: the API server refuses it or the operator says what is wrong, nothing is
//! ever made for it, and the operator lives on.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use kube::api::{ApiResource, DynamicObject, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Map, Value, json};
use vitivirt_api::machine::Machine;
use vitivirt_lab::harness::Suite;

use crate::random::{Drawn, drawn};
use crate::world::{World, at_once, diagnosis, machine, phase, reason};

const PER_KIND: usize = 5;
/// What the operator may say about a spec that the API server let through.
const REASONS: [&str; 2] = ["Invalid", "TemplateNotFound"];

pub(crate) fn add(suite: &mut Suite) {
    suite.test("random_invalid_machines_are_refused_and_leave_nothing", |labs| async move {
        let world = Box::pin(World::begin(&labs, "random-invalid")).await?;
        world.storage_class("fast-ssd").await?;
        world.networks(&["prod", "storage"]).await?;
        let kinds = spoilers();
        let drawn = drawn(3, kinds.len() * PER_KIND)?;
        let tries =
            drawn.iter().zip(kinds.iter().cycle()).map(|(drawn, spoiler)| world.is_refused(drawn, spoiler).boxed());
        let refused = at_once(tries.collect()).await?;
        let by_server = refused.iter().filter(|refused| **refused).count();
        let by_operator = refused.len() - by_server;
        ensure!(refused.len() >= 200, "only {} were tried", refused.len());
        ensure!(by_server >= 50 && by_operator >= 20, "{by_server} by the server, {by_operator} by the operator");

        world.server_takes_the_same_sizes().await?;

        let accepted: Vec<String> =
            world.machines().list(&ListParams::default()).await?.items.iter().map(ResourceExt::name_any).collect();
        at_once(accepted.iter().map(|name| world.is_told_to_be_invalid(name).boxed()).collect()).await?;
        world.settled().await?;

        let made: Vec<_> = world.requests()?.into_iter().filter(|record| record.verb == "create").collect();
        ensure!(made.is_empty(), "{made:#?}");
        world.lives_on().await
    });
}

impl World {
    /// Whether the API server refused it.
    async fn is_refused(&self, drawn: &Drawn, spoiler: &Spoiler) -> Result<bool> {
        let mut spec = json!(drawn.spec);
        (spoiler.spoil)(&mut spec);
        let object = serde_json::from_value(machine(&drawn.name, &spec)).context("a Machine")?;
        let machines: Api<DynamicObject> =
            Api::namespaced_with(self.lab.client(), self.namespace, &ApiResource::erase::<Machine>(&()));
        match machines.create(&PostParams::default(), &object).await {
            Ok(_) => Ok(false),
            // Types that cannot be read are answered with another code than rules that are broken.
            Err(kube::Error::Api(status)) if [400, 422].contains(&status.code) => Ok(true),
            Err(error) => Err(error).with_context(|| format!("{}, {}", spoiler.what, drawn.describe())),
        }
    }

    /// What the definition says of sizes beside its pattern is a rule that only a server can check.
    async fn server_takes_the_same_sizes(&self) -> Result<()> {
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let sizes =
            ["0.5Gi", "7Ei", "1.1Gi", "8070450532247928832", "0Gi", "0.0", "8Ei", "8070450532247928833", "9300P", "4."];
        for size in sizes {
            let spec = json!({"template": "small", "disks": [{"name": "a", "size": size}]});
            let machine: Machine = serde_json::from_value(machine("sized", &spec))?;
            let taken = match self.machines().create(&dry, &machine).await {
                Ok(_) => true,
                Err(kube::Error::Api(status)) if status.code == 422 => false,
                Err(error) => return Err(error).context(size),
            };
            let mut created = machine;
            created.metadata.namespace = Some(self.namespace.to_owned());
            created.metadata.uid = Some("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11".to_owned());
            ensure!(taken == vitivirt_machine::resolve::resolve(&created).is_ok(), "the server takes {size}: {taken}");
        }
        Ok(())
    }

    async fn is_told_to_be_invalid(&self, name: &str) -> Result<()> {
        let told = self.until(name, "a verdict", |machine| reason(machine).is_some()).await?;
        let why = reason(&told).unwrap_or_default();
        let said = format!("{}: {:?}", json!(told.spec), told.status);
        ensure!(phase(&told) == Some("Failed") && REASONS.contains(&why), "{said}");
        ensure!(!diagnosis(&told).is_empty(), "no diagnosis: {said}");
        Ok(())
    }
}

struct Spoiler {
    what: &'static str,
    spoil: fn(&mut Value),
}

/// Sets a field of the spec, whatever was there before.
fn set(spec: &mut Value, path: &[&str], value: Value) {
    let mut place = spec;
    for key in path {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        place = &mut place[*key];
    }
    *place = value;
}

fn append(spec: &mut Value, list: &str, value: Value) {
    match spec.get_mut(list).and_then(Value::as_array_mut) {
        Some(items) => items.push(value),
        None => set(spec, &[list], json!([value])),
    }
}

/// A disk that would be valid, with one more field or another value.
fn disk(spec: &mut Value, field: &str, value: Value) {
    let mut disk = json!({"name": "spoilt", "size": "1Gi"});
    set(&mut disk, &[field], value);
    append(spec, "disks", disk);
}

fn network(spec: &mut Value, field: &str, value: Value) {
    let mut network = json!({"name": "spoilt", "networkName": "prod"});
    set(&mut network, &[field], value);
    append(spec, "networks", network);
}

/// Without a template: only what is given counts.
fn bare(spec: &mut Value, resources: &Value, disks: &Value) {
    *spec = json!({"resources": resources, "disks": disks});
}

macro_rules! spoilers {
    ($($what:literal: |$spec:ident| $spoil:expr;)*) => {
        vec![$(Spoiler { what: $what, spoil: |$spec| $spoil }),*]
    };
}

fn spoilers() -> Vec<Spoiler> {
    spoilers! {
        "an unknown template": |spec| set(spec, &["template"], json!("huge"));
        "a template that is no text": |spec| set(spec, &["template"], json!(7));
        "no cores": |spec| bare(spec, &json!({"memory": {"size": "1Gi"}}), &json!([{"name": "root", "size": "1Gi"}]));
        "no memory": |spec| bare(spec, &json!({"cpu": {"cores": 1}}), &json!([{"name": "root", "size": "1Gi"}]));
        "no disk": |spec| bare(spec, &json!({"cpu": {"cores": 1}, "memory": {"size": "1Gi"}}), &json!([]));
        "zero cores": |spec| set(spec, &["resources", "cpu", "cores"], json!(0));
        "fewer cores than none": |spec| set(spec, &["resources", "cpu", "cores"], json!(-3));
        "cores in words": |spec| set(spec, &["resources", "cpu", "cores"], json!("four"));
        "half a thread": |spec| set(spec, &["resources", "cpu", "threads"], json!(0.5));
        "too many threads": |spec| set(spec, &["resources", "cpu", "threads"], json!(9));
        "too many sockets": |spec| set(spec, &["resources", "cpu", "sockets"], json!(65));
        "memory in words": |spec| set(spec, &["resources", "memory", "size"], json!("lots"));
        "no memory at all": |spec| set(spec, &["resources", "memory", "size"], json!("0Gi"));
        "negative memory": |spec| set(spec, &["resources", "memory", "size"], json!("-1Gi"));
        "a padded number": |spec| set(spec, &["resources", "memory", "size"], json!("010Gi"));
        "more memory than can be counted": |spec| set(spec, &["resources", "memory", "size"], json!("9999999P"));
        "a number as memory": |spec| set(spec, &["resources", "memory", "size"], json!(1024));
        "the reserved disk": |spec| disk(spec, "name", json!("cloudinitdisk"));
        "a disk name in capitals": |spec| disk(spec, "name", json!("Root_Disk"));
        "a long disk name": |spec| disk(spec, "name", json!("d".repeat(64)));
        "two disks of one name": |spec| { disk(spec, "size", json!("1Gi")); disk(spec, "size", json!("2Gi")) };
        "a disk size in words": |spec| disk(spec, "size", json!("ten"));
        "finer than can be counted": |spec| disk(spec, "size", json!("1.0000000001Gi"));
        "a bigger disk than can be counted": |spec| disk(spec, "size", json!("9300P"));
        "a disk without size": |spec| append(spec, "disks", json!({"name": "spoilt"}));
        "a copy without size": |spec| append(spec, "disks", json!({"name": "spoilt", "source": {"pvc": {"name": "golden"}}}));
        "two sources": |spec| disk(spec, "source", json!({"pvc": {"name": "a"}, "snapshot": {"name": "b"}}));
        "an empty source": |spec| disk(spec, "source", json!({}));
        "an image without a name": |spec| disk(spec, "source", json!({"containerDisk": {"image": ""}}));
        "an unknown access mode": |spec| disk(spec, "accessMode", json!("ReadWriteSometimes"));
        "read-only and empty": |spec| disk(spec, "accessMode", json!("ReadOnlyMany"));
        "an unknown volume mode": |spec| disk(spec, "volumeMode", json!("Tape"));
        "an unknown disk type": |spec| disk(spec, "type", json!("floppy"));
        "an unknown end": |spec| disk(spec, "onDelete", json!("Shred"));
        "a class for an image": |spec| append(spec, "disks",
            json!({"name": "spoilt", "storageClass": "fast-ssd", "source": {"containerDisk": {"image": "x"}}}));
        "too many disks": |spec| set(spec, &["disks"],
            (0..17).map(|number| json!({"name": format!("d{number}"), "size": "1Gi"})).collect());
        "two pod networks": |spec| set(spec, &["networks"],
            json!([{"name": "a", "networkName": "pod"}, {"name": "b", "networkName": "pod"}]));
        "two networks of one name": |spec| set(spec, &["networks"],
            json!([{"name": "a", "networkName": "prod"}, {"name": "a", "networkName": "storage"}]));
        "a network of no name": |spec| network(spec, "networkName", json!(""));
        "an interface without a network": |spec| append(spec, "networks", json!({"name": "spoilt"}));
        "an unknown model": |spec| network(spec, "model", json!("ne2000"));
        "a group address": |spec| network(spec, "macAddress", json!("01:00:5e:00:00:01"));
        "an address of nobody": |spec| network(spec, "macAddress", json!("00:00:00:00:00:00"));
        "an address in words": |spec| network(spec, "macAddress", json!("aa:bb:cc:dd:ee:zz"));
        "one address twice": |spec| set(spec, &["networks"], json!([
            {"name": "a", "networkName": "prod", "macAddress": "02:00:00:00:00:0a"},
            {"name": "b", "networkName": "storage", "macAddress": "02:00:00:00:00:0A"},
        ]));
        "an unknown device to boot from": |spec| set(spec, &["bootOrder"], json!(["floppy"]));
        "one device twice": |spec| set(spec, &["bootOrder"], json!(["disk", "disk"]));
        "no CD to boot from": |spec| { set(spec, &["disks"], json!([])); set(spec, &["bootOrder"], json!(["cdrom"])) };
        "secure boot without EFI": |spec|
            set(spec, &["domain", "firmware", "bootloader"], json!({"efi": false, "secureBoot": true}));
        "a machine type with a space": |spec| set(spec, &["domain", "machine", "type"], json!("pc q35"));
        "features in words": |spec| set(spec, &["domain", "features", "acpi"], json!("yes"));
        "an unknown power state": |spec| set(spec, &["powerState"], json!("Paused"));
        "user data that is no text": |spec| set(spec, &["cloudInit", "userData"], json!(7));
        "a Secret without a name": |spec| set(spec, &["cloudInit", "secretRef"], json!({"key": "k"}));
    }
}
