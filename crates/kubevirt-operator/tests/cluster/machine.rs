//! Machines on a cluster with the real virt-api and virt-controller: the seed's examples, errors that heal, foreign
//! objects, deletion, and what all of it costs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::ResourceExt;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use vitivirt_api::machine::{
    FINALIZER_MACHINE, FINALIZER_NETWORK, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY, Machine,
    MachinePhase, NetworkConfiguration,
};
use vitivirt_lab::harness::Suite;

use crate::world::{World, condition, machine, reason};

const RUNNING: Duration = Duration::from_secs(90);

const EXAMPLES: [(&str, &str); 4] = [
    ("basic-vm", include_str!("../../../../examples/basic-vm.yaml")),
    ("custom-vm", include_str!("../../../../examples/custom-vm.yaml")),
    ("networked-vm", include_str!("../../../../examples/networked-vm.yaml")),
    ("cloud-init-vm", include_str!("../../../../examples/cloud-init-vm.yaml")),
];
const NETWORKS: &str = include_str!("../../../../examples/networks.yaml");

pub(crate) fn add(suite: &mut Suite) {
    suite.test("the_seeds_examples_run", |labs| async move {
        let world = Box::pin(World::begin(&labs, "seed-examples")).await?;
        world.storage_class("fast-ssd").await?;
        world.create(NETWORKS).await?;
        for (_, text) in EXAMPLES {
            world.create(text).await?;
        }
        for (name, _) in EXAMPLES {
            let machine = world.running(name, RUNNING).await?;
            looks_as_in_the_seed(&world, &machine).await.with_context(|| name.to_owned())?;
        }
        let pvcs = world.names::<PersistentVolumeClaim>("").await?;
        let expected = ["basic-vm-root", "cloud-init-vm-root", "custom-vm-data", "custom-vm-root", "networked-vm-root"];
        ensure!(pvcs == expected, "{pvcs:?}");
        let attachments = world.attachments().list(&ListParams::default()).await?;
        ensure!(attachments.items.len() == 2, "one per NetworkConfiguration");
        world.metrics_are_told().await
    });

    suite.test("errors_tell_what_to_do_and_heal", |labs| async move {
        let world = Box::pin(World::begin(&labs, "errors-heal")).await?;
        let cases = [
            ("no-template", json!({"template": "huge"}), "Failed", "TemplateNotFound"),
            (
                "no-class",
                json!({"template": "small", "disks": [{"name": "root", "storageClass": "errors-heal"}]}),
                "Pending",
                "StorageClassNotFound",
            ),
            (
                "no-network",
                json!({"template": "small", "networks": [{"name": "a", "networkName": "later"}]}),
                "Pending",
                "NetworkConfigurationNotFound",
            ),
            (
                "no-secret",
                json!({"template": "small", "cloudInit": {"secretRef": {"name": "later"}}}),
                "Pending",
                "SecretNotFound",
            ),
        ];
        for (name, spec, ..) in &cases {
            world.create_json(&machine(name, spec)).await?;
        }
        for (name, _, phase, expected) in &cases {
            let machine = world.until(name, "the error", |machine| reason(machine) == Some(*expected)).await?;
            let status = machine.status.clone().unwrap_or_default();
            ensure!(status.phase.map(MachinePhase::as_str) == Some(phase), "{name}: {status:?}");
            ensure!(status.diagnosis.is_some_and(|words| !words.is_empty()), "{name} has no diagnosis");
        }
        ensure!(world.vms().list(&ListParams::default()).await?.items.is_empty(), "nothing is half made");
        ensure!(world.names::<PersistentVolumeClaim>("").await?.is_empty(), "nothing is half made");
        world.counts_errors(&cases.each_ref().map(|(_, _, _, reason)| *reason)).await?;

        let fixed = json!({"spec": {"template": "small"}});
        world.machines().patch("no-template", &PatchParams::default(), &Patch::Merge(fixed)).await?;
        world.storage_class("errors-heal").await?;
        world
            .create("apiVersion: vitistack.io/v1alpha1\nkind: NetworkConfiguration\nmetadata: {name: later, namespace: default}\nspec: {bridge: br0}\n")
            .await?;
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "later"}, "stringData": {"userdata": "#cloud-config\n"}});
        world.create_json(&secret).await?;
        for (name, ..) in &cases {
            world.running(name, RUNNING).await?;
        }
        Ok(())
    });

    suite.test("a_changed_source_secret_is_followed", |labs| async move {
        let world = Box::pin(World::begin(&labs, "source-secret")).await?;
        let secret =
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "source"}, "stringData": {"k": "first"}});
        world.create_json(&secret).await?;
        let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source", "key": "k"}}});
        world.create_json(&machine("follower", &spec)).await?;
        let secrets = world.api::<Secret>();
        let holds = |text: &'static str| {
            move |secret: Option<&Secret>| {
                let data = secret.and_then(|secret| secret.data.as_ref()?.get("userdata"));
                data.is_some_and(|data| data.0 == text.as_bytes())
            }
        };
        world.lab.wait("the first contents", RUNNING, secrets.clone(), "follower-cloudinit", holds("first")).await?;
        let change = json!({"stringData": {"k": "second"}});
        secrets.patch("source", &PatchParams::default(), &Patch::Merge(change)).await?;
        world.lab.wait("the second contents", RUNNING, secrets.clone(), "follower-cloudinit", holds("second")).await?;
        world.running("follower", RUNNING).await?;
        // What somebody writes into the Secret is put back.
        let foreign = json!({"stringData": {"userdata": "evil", "more": "evil"}});
        secrets.patch("follower-cloudinit", &PatchParams::default(), &Patch::Merge(foreign)).await?;
        let restored = world.lab.wait("the repair", RUNNING, secrets, "follower-cloudinit", holds("second")).await?;
        ensure!(restored.and_then(|secret| secret.data).is_some_and(|data| data.len() == 1), "what was added is gone");
        Ok(())
    });

    suite.test("a_foreign_virtual_machine_is_left_alone", |labs| async move {
        let world = Box::pin(World::begin(&labs, "foreign-vm")).await?;
        let foreign = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "mine", "labels": {"of": "somebody"}},
            "spec": {"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}, "memory": {"guest": "128Mi"}}}}},
        });
        world.create_json(&foreign).await?;
        let before = world.vms().get("mine").await?;
        world.create_json(&machine("mine", &json!({"template": "small"}))).await?;
        let refused = world.until("mine", "the refusal", |machine| reason(machine) == Some("NameTaken")).await?;
        ensure!(refused.status.and_then(|status| status.phase) == Some(MachinePhase::Failed), "refused is failed");
        let edit = json!({"spec": {"template": "large"}});
        world.machines().patch("mine", &PatchParams::default(), &Patch::Merge(edit)).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.delete("mine").await?;
        let after = world.vms().get("mine").await?;
        let comparable_spec = |vm: &DynamicObject| {
            let metadata = &vm.metadata;
            let spec = vm.data.get("spec").cloned();
            (metadata.uid.clone(), metadata.generation, vm.labels().clone(), metadata.deletion_timestamp.clone(), spec)
        };
        ensure!(comparable_spec(&before) == comparable_spec(&after), "{before:?} became {after:?}");
        let ours = after.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(MANAGED_BY));
        ensure!(!ours, "the operator wrote to it");
        Ok(())
    });

    suite.test("deletion_leaves_nothing", |labs| async move {
        let world = Box::pin(World::begin(&labs, "deletion")).await?;
        world
            .create("apiVersion: vitistack.io/v1alpha1\nkind: NetworkConfiguration\nmetadata: {name: net, namespace: default}\nspec: {bridge: br0, vlan: 7}\n")
            .await?;
        let spec = json!({
            "template": "small",
            "disks": [{"name": "data", "size": "1Gi"}, {"name": "kept", "size": "1Gi", "onDelete": "Retain"}],
            "networks": [{"name": "a", "networkName": "net"}],
            "cloudInit": {"userData": "#cloud-config\n"},
        });
        world.create_json(&machine("going", &spec)).await?;
        let machine = world.running("going", RUNNING).await?;
        let networks = world.api::<NetworkConfiguration>();
        ensure!(networks.get("net").await?.finalizers().contains(&FINALIZER_NETWORK.to_owned()), "in use is protected");
        world.delete("going").await?;
        ensure!(world.vms().list(&ListParams::default()).await?.items.is_empty(), "the VirtualMachine is gone");
        ensure!(world.vmis().list(&ListParams::default()).await?.items.is_empty(), "the guest is gone");
        let uid = machine.uid().unwrap_or_default();
        let pvcs = world.api::<PersistentVolumeClaim>();
        world.lab.wait("the PVC's end", RUNNING, pvcs.clone(), "going-root", |pvc| pvc.is_none()).await?;
        world.lab.wait("the PVC's end", RUNNING, pvcs.clone(), "going-data", |pvc| pvc.is_none()).await?;
        let kept = pvcs.get("going-kept").await?;
        ensure!(kept.labels().get(LABEL_MACHINE_UID) == Some(&uid) && kept.metadata.deletion_timestamp.is_none(), "kept");
        world.lab.wait("the Secret's end", RUNNING, world.api::<Secret>(), "going-cloudinit", |secret| secret.is_none()).await?;
        ensure!(networks.get("net").await?.finalizers().is_empty(), "nobody uses it");
        networks.delete("net", &DeleteParams::default()).await?;
        world.lab.wait("the network's end", RUNNING, networks, "net", |network| network.is_none()).await?;
        what_was_exported_with_its_finalizers_goes_as_well(&world).await
    });

    suite.test("a_machine_costs_few_requests", |labs| async move {
        let mut world = Box::pin(World::begin(&labs, "budget")).await?;
        world.settled().await?;
        let before = world.requests()?.len();
        world
            .create_json(&machine("cheap", &json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}})))
            .await?;
        world.running("cheap", RUNNING).await?;
        world.settled().await?;
        let made = world.requests()?.split_off(before);
        let (writes, reads): (Vec<_>, Vec<_>) = made.iter().partition(|record| record.is_write());
        let shown: Vec<String> = made
            .iter()
            .map(|record| format!("{} {}/{} {:?}", record.verb, record.resource, record.subresource, record.code))
            .collect();
        ensure!(writes.len() <= 8 && reads.is_empty(), "{} writes and {} reads: {shown:#?}", writes.len(), reads.len());

        // At rest, and looked at anew by another process: nothing.
        let before = world.requests()?.len();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let at_rest = world.requests()?.len() - before;
        ensure!(at_rest == 0, "{at_rest} requests at rest");
        world.restart().await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let writes = world.requests()?.split_off(before).into_iter().filter(vitivirt_lab::Record::is_write).count();
        ensure!(writes == 0, "{writes} writes after a restart");

        let before = world.requests()?.len();
        world.delete("cheap").await?;
        let writes = world.requests()?.split_off(before).into_iter().filter(vitivirt_lab::Record::is_write).count();
        ensure!(writes <= 4, "{writes} writes for a deletion");
        Ok(())
    });

    suite.test("plan_shows_what_would_change_and_writes_nothing", |labs| async move {
        let world = Box::pin(World::begin(&labs, "plan-command")).await?;
        let spec = json!({"template": "small"});
        let (fine, text) = world.plan(&machine("planned", &spec), &[]).await?;
        ensure!(fine && text.contains("+ create VirtualMachine planned"), "a new one: {text}");
        let (fine, text) = world.plan(&machine("planned", &json!({"template": "none"})), &[]).await?;
        ensure!(!fine && text.contains("TemplateNotFound"), "programs see that it cannot be: {text}");
        world.create_json(&machine("planned", &spec)).await?;
        world.running("planned", RUNNING).await?;
        let (fine, same) = world.plan(&machine("planned", &spec), &[]).await?;
        ensure!(fine && same.contains("nothing to write") && same.contains("phase Running, Ready:"), "{same}");
        let version = world.vms().get("planned").await?.metadata.generation;
        let edited = json!({"template": "small", "resources": {"cpu": {"cores": 4}}, "powerState": "Stopped"});
        let (_, text) = world.plan(&machine("planned", &edited), &[]).await?;
        for part in
            ["~ change VirtualMachine planned", "spec.template.spec.domain.cpu.cores: 1 → 4 (at restart)", "(live)"]
        {
            ensure!(text.contains(part), "{part} is missing in {text}");
        }
        ensure!(world.vms().get("planned").await?.metadata.generation == version, "it was changed");
        Ok(())
    });
}

async fn looks_as_in_the_seed(world: &World, machine: &Machine) -> Result<()> {
    let (name, uid) = (machine.name_any(), machine.uid().unwrap_or_default());
    let status = machine.status.clone().unwrap_or_default();
    for type_ in ["Ready", "VirtualMachineReady", "StorageReady", "NetworkReady"] {
        ensure!(
            condition(machine, type_).is_some_and(|have| have.status == "True"),
            "{type_}: {:?}",
            status.conditions
        );
    }
    ensure!(status.vm_name.as_deref() == Some(&name) && status.vmi_name.as_deref() == Some(&name), "{status:?}");
    ensure!(!status.ip_addresses.is_empty() && status.node_name.is_some(), "{status:?}");
    ensure!(machine.finalizers().iter().any(|finalizer| finalizer == "machine.vitistack.io/cleanup"), "no finalizer");

    let vm = world.vms().get(&name).await?;
    let owner = vm.owner_references().first().cloned().context("the VirtualMachine has no owner")?;
    ensure!((owner.kind.as_str(), &owner.name, &owner.uid) == ("Machine", &name, &uid), "{owner:?}");
    ensure!(vm.labels().get(LABEL_MANAGED_BY).map(String::as_str) == Some(MANAGED_BY), "{:?}", vm.labels());
    // What the seed's debug command lists.
    let selector = format!("{LABEL_MACHINE}={name}");
    let selected = ListParams::default().labels(&selector);
    ensure!(world.vms().list(&selected).await?.items.len() == 1, "the VirtualMachine is labelled");
    ensure!(world.vmis().list(&selected).await?.items.len() == 1, "its instance is labelled");
    let pvcs = world.api::<PersistentVolumeClaim>().list(&selected).await?.items;
    ensure!(!pvcs.is_empty(), "its PVCs are labelled");
    for pvc in pvcs {
        ensure!(pvc.name_any().starts_with(&format!("{name}-")), "{}", pvc.name_any());
        ensure!(pvc.owner_references().is_empty() && pvc.labels().get(LABEL_MACHINE_UID) == Some(&uid), "{pvc:?}");
    }
    let text = serde_json::to_string(&vm.data).unwrap_or_default();
    ensure!(!text.contains("ssh-rsa"), "user data stays in its Secret");
    Ok(())
}

/// Whoever makes an object again from an export sets our finalizers in his own name.
async fn what_was_exported_with_its_finalizers_goes_as_well(world: &World) -> Result<()> {
    let networks = world.api::<NetworkConfiguration>();
    let network = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration",
        "metadata": {"name": "again", "finalizers": ["example.com/other", FINALIZER_NETWORK]},
        "spec": {"bridge": "br0"},
    });
    networks.create(&PostParams::default(), &serde_json::from_value(network)?).await?;
    let mut exported =
        machine("again", &json!({"template": "small", "networks": [{"name": "a", "networkName": "again"}]}));
    if let Some(Value::Object(metadata)) = exported.get_mut("metadata") {
        metadata.insert("finalizers".to_owned(), json!([FINALIZER_MACHINE]));
    }
    world.create_json(&exported).await?;
    world.running("again", RUNNING).await?;
    world.delete("again").await?;
    let left = networks.get("again").await?;
    ensure!(
        left.finalizers() == ["example.com/other"],
        "ours is gone, the other one is not ours: {:?}",
        left.finalizers()
    );
    Ok(())
}
