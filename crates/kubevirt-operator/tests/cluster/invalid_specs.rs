//! Random valid specs, each with one mistake. The API server rejects the Machine, or the operator reports the mistake.
//! The operator creates no object and does not panic.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use kube::{
    ResourceExt,
    api::{ApiResource, ListParams, PostParams},
};
use serde_json::{Map, Value, json};
use vitivirt_api::machine::Machine;
use vitivirt_lab::harness::{SharedLabs, Suite};

use crate::{
    machine_test::{MachineTest, diagnosis, machine, phase, ready_reason, run_concurrently},
    random_specs::{RandomSpec, random_specs},
};

const SPECS_PER_MISTAKE: usize = 5;
/// The reasons that the operator may report for a spec that the API server accepted.
const REASONS: [&str; 2] = ["Invalid", "TemplateNotFound"];

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; invalid_machines_are_rejected_or_reported_and_create_no_objects);
}

async fn invalid_machines_are_rejected_or_reported_and_create_no_objects(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "random-invalid")).await?;
    test.create_storage_class("fast-ssd").await?;
    test.create_networks(&["prod", "storage"]).await?;
    let mistakes = mistakes();
    let specs = random_specs(3, mistakes.len() * SPECS_PER_MISTAKE)?;
    let attempts = specs
        .iter()
        .zip(mistakes.iter().cycle())
        .map(|(random, mistake)| is_rejected_by_server(&test, random, mistake).boxed());
    let rejected = run_concurrently(attempts.collect()).await?;
    let by_server = rejected.iter().filter(|rejected| **rejected).count();
    let by_operator = rejected.len() - by_server;
    ensure!(rejected.len() >= 200, "only {} specs were tried", rejected.len());
    ensure!(by_server >= 50 && by_operator >= 20, "{by_server} by the server, {by_operator} by the operator");

    check_server_and_operator_accept_the_same_sizes(&test).await?;

    let accepted: Vec<String> =
        test.machines().list(&ListParams::default()).await?.items.iter().map(ResourceExt::name_any).collect();
    run_concurrently(accepted.iter().map(|name| check_reported_as_invalid(&test, name).boxed()).collect()).await?;
    test.wait_until_idle().await?;

    let creates: Vec<_> = test.operator_requests()?.into_iter().filter(|record| record.verb == "create").collect();
    ensure!(creates.is_empty(), "{creates:#?}");
    test.check_operator_is_healthy().await
}

/// Creates the Machine with the mistake. Returns false if the API server accepts it.
async fn is_rejected_by_server(test: &MachineTest, random: &RandomSpec, mistake: &Mistake) -> Result<bool> {
    let mut spec = json!(random.spec);
    (mistake.make)(&mut spec);
    let object = serde_json::from_value(machine(&random.name, &spec)).context("not an object")?;
    let machines = test.dynamic_api(&ApiResource::erase::<Machine>(&()));
    match machines.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(false),
        // The API server returns 400 for a value of the wrong type, and 422 for a value that breaks a rule.
        Err(kube::Error::Api(status)) if [400, 422].contains(&status.code) => Ok(true),
        Err(error) => Err(error).with_context(|| format!("{}, {}", mistake.what, random.describe())),
    }
}

/// The CRD restricts sizes with a pattern and a CEL rule. Only an API server evaluates the rule.
async fn check_server_and_operator_accept_the_same_sizes(test: &MachineTest) -> Result<()> {
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let sizes =
        ["0.5Gi", "7Ei", "1.1Gi", "8070450532247928832", "0Gi", "0.0", "8Ei", "8070450532247928833", "9300P", "4."];
    for size in sizes {
        let spec = json!({"template": "small", "disks": [{"name": "a", "size": size}]});
        let machine: Machine = serde_json::from_value(machine("sized", &spec))?;
        let is_accepted = match test.machines().create(&dry_run, &machine).await {
            Ok(_) => true,
            Err(kube::Error::Api(status)) if status.code == 422 => false,
            Err(error) => return Err(error).context(size),
        };
        // The API server assigns both before the operator sees the Machine.
        let mut created = machine;
        created.metadata.namespace = Some(test.namespace.to_owned());
        created.metadata.uid = Some("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11".to_owned());
        let is_valid = vitivirt_machine::resolve::resolve(&created).is_ok();
        ensure!(
            is_accepted == is_valid,
            "{size}: accepted by the API server: {is_accepted}, by the operator: {is_valid}"
        );
    }
    Ok(())
}

async fn check_reported_as_invalid(test: &MachineTest, name: &str) -> Result<()> {
    let reported = test.wait_for(name, "a reason", |machine| ready_reason(machine).is_some()).await?;
    let reason = ready_reason(&reported).unwrap_or_default();
    let shown = format!("{}: {:?}", json!(reported.spec), reported.status);
    ensure!(phase(&reported) == Some("Failed") && REASONS.contains(&reason), "{shown}");
    ensure!(!diagnosis(&reported).is_empty(), "no diagnosis: {shown}");
    Ok(())
}

/// One way to make a valid spec invalid.
struct Mistake {
    what: &'static str,
    make: fn(&mut Value),
}

/// Sets a field, and replaces what was in its place.
fn set(spec: &mut Value, path: &[&str], value: Value) {
    let mut field = spec;
    for key in path {
        if !field.is_object() {
            *field = Value::Object(Map::new());
        }
        field = &mut field[*key];
    }
    *field = value;
}

fn append(spec: &mut Value, list: &str, value: Value) {
    match spec.get_mut(list).and_then(Value::as_array_mut) {
        Some(items) => items.push(value),
        None => set(spec, &[list], json!([value])),
    }
}

/// Adds a valid disk with one field added or replaced.
fn add_disk(spec: &mut Value, field: &str, value: Value) {
    let mut disk = json!({"name": "invalid", "size": "1Gi"});
    set(&mut disk, &[field], value);
    append(spec, "disks", disk);
}

/// Adds a valid network with one field added or replaced.
fn add_network(spec: &mut Value, field: &str, value: Value) {
    let mut network = json!({"name": "invalid", "networkName": "prod"});
    set(&mut network, &[field], value);
    append(spec, "networks", network);
}

/// Replaces the spec by one without a template, which has these resources and disks only.
fn replace_with(spec: &mut Value, resources: &Value, disks: &Value) {
    *spec = json!({"resources": resources, "disks": disks});
}

macro_rules! mistakes {
    ($($what:literal: |$spec:ident| $make:expr;)*) => {
        vec![$(Mistake { what: $what, make: |$spec| $make }),*]
    };
}

fn mistakes() -> Vec<Mistake> {
    mistakes! {
        "an unknown template": |spec| set(spec, &["template"], json!("huge"));
        "a template that is not a string": |spec| set(spec, &["template"], json!(7));
        "neither template nor cores": |spec| replace_with(spec, &json!({"memory": {"size": "1Gi"}}), &json!([{"name": "root", "size": "1Gi"}]));
        "neither template nor memory": |spec| replace_with(spec, &json!({"cpu": {"cores": 1}}), &json!([{"name": "root", "size": "1Gi"}]));
        "neither template nor disk": |spec| replace_with(spec, &json!({"cpu": {"cores": 1}, "memory": {"size": "1Gi"}}), &json!([]));
        "zero cores": |spec| set(spec, &["resources", "cpu", "cores"], json!(0));
        "negative cores": |spec| set(spec, &["resources", "cpu", "cores"], json!(-3));
        "cores as a string": |spec| set(spec, &["resources", "cpu", "cores"], json!("four"));
        "a fraction as threads": |spec| set(spec, &["resources", "cpu", "threads"], json!(0.5));
        "too many threads": |spec| set(spec, &["resources", "cpu", "threads"], json!(9));
        "too many sockets": |spec| set(spec, &["resources", "cpu", "sockets"], json!(65));
        "memory that is not a quantity": |spec| set(spec, &["resources", "memory", "size"], json!("lots"));
        "zero memory": |spec| set(spec, &["resources", "memory", "size"], json!("0Gi"));
        "negative memory": |spec| set(spec, &["resources", "memory", "size"], json!("-1Gi"));
        "a quantity with a leading zero": |spec| set(spec, &["resources", "memory", "size"], json!("010Gi"));
        "memory above the maximum": |spec| set(spec, &["resources", "memory", "size"], json!("9999999P"));
        "memory as a number": |spec| set(spec, &["resources", "memory", "size"], json!(1024));
        "the reserved disk name": |spec| add_disk(spec, "name", json!("cloudinitdisk"));
        "a disk name in capitals": |spec| add_disk(spec, "name", json!("Root_Disk"));
        "a long disk name": |spec| add_disk(spec, "name", json!("d".repeat(64)));
        "two disks with the same name": |spec| { add_disk(spec, "size", json!("1Gi")); add_disk(spec, "size", json!("2Gi")) };
        "a disk size that is not a quantity": |spec| add_disk(spec, "size", json!("ten"));
        "a quantity with ten decimals": |spec| add_disk(spec, "size", json!("1.0000000001Gi"));
        "a disk above the maximum": |spec| add_disk(spec, "size", json!("9300P"));
        "a disk without a size": |spec| append(spec, "disks", json!({"name": "invalid"}));
        "a cloned disk without a size": |spec| append(spec, "disks", json!({"name": "invalid", "source": {"pvc": {"name": "golden"}}}));
        "two sources": |spec| add_disk(spec, "source", json!({"pvc": {"name": "a"}, "snapshot": {"name": "b"}}));
        "an empty source": |spec| add_disk(spec, "source", json!({}));
        "an empty image name": |spec| add_disk(spec, "source", json!({"containerDisk": {"image": ""}}));
        "an unknown access mode": |spec| add_disk(spec, "accessMode", json!("ReadWriteSometimes"));
        "a read-only disk without a source": |spec| add_disk(spec, "accessMode", json!("ReadOnlyMany"));
        "an unknown volume mode": |spec| add_disk(spec, "volumeMode", json!("Tape"));
        "an unknown disk type": |spec| add_disk(spec, "type", json!("floppy"));
        "an unknown onDelete policy": |spec| add_disk(spec, "onDelete", json!("Shred"));
        "a StorageClass for a container disk": |spec| append(spec, "disks",
            json!({"name": "invalid", "storageClass": "fast-ssd", "source": {"containerDisk": {"image": "x"}}}));
        "too many disks": |spec| set(spec, &["disks"],
            (0..17).map(|number| json!({"name": format!("d{number}"), "size": "1Gi"})).collect());
        "two pod networks": |spec| set(spec, &["networks"],
            json!([{"name": "a", "networkName": "pod"}, {"name": "b", "networkName": "pod"}]));
        "two networks with the same name": |spec| set(spec, &["networks"],
            json!([{"name": "a", "networkName": "prod"}, {"name": "a", "networkName": "storage"}]));
        "an empty network name": |spec| add_network(spec, "networkName", json!(""));
        "an interface without a network": |spec| append(spec, "networks", json!({"name": "invalid"}));
        "an unknown interface model": |spec| add_network(spec, "model", json!("ne2000"));
        "a multicast MAC address": |spec| add_network(spec, "macAddress", json!("01:00:5e:00:00:01"));
        "an all-zero MAC address": |spec| add_network(spec, "macAddress", json!("00:00:00:00:00:00"));
        "a MAC address that is not hexadecimal": |spec| add_network(spec, "macAddress", json!("aa:bb:cc:dd:ee:zz"));
        "the same MAC address twice": |spec| set(spec, &["networks"], json!([
            {"name": "a", "networkName": "prod", "macAddress": "02:00:00:00:00:0a"},
            {"name": "b", "networkName": "storage", "macAddress": "02:00:00:00:00:0A"},
        ]));
        "an unknown boot device": |spec| set(spec, &["bootOrder"], json!(["floppy"]));
        "the same boot device twice": |spec| set(spec, &["bootOrder"], json!(["disk", "disk"]));
        "a missing CD-ROM as boot device": |spec| { set(spec, &["disks"], json!([])); set(spec, &["bootOrder"], json!(["cdrom"])) };
        "secure boot without EFI": |spec|
            set(spec, &["domain", "firmware", "bootloader"], json!({"efi": false, "secureBoot": true}));
        "a machine type with a space": |spec| set(spec, &["domain", "machine", "type"], json!("pc q35"));
        "a feature as a string": |spec| set(spec, &["domain", "features", "acpi"], json!("yes"));
        "an unknown power state": |spec| set(spec, &["powerState"], json!("Paused"));
        "user data that is not a string": |spec| set(spec, &["cloudInit", "userData"], json!(7));
        // R9 and B11: the name is part of a URL path.
        "a Secret reference with a space": |spec| set(spec, &["cloudInit", "secretRef"], json!({"name": "my secret"}));
        "a Secret reference with a path": |spec| set(spec, &["cloudInit", "secretRef"], json!({"name": "../../kube-system/secrets/x"}));
        "a Secret reference without a name": |spec| set(spec, &["cloudInit", "secretRef"], json!({"key": "k"}));
    }
}
