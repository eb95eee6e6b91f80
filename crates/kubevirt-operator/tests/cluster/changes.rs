//! Changes of Machines that run, and of what they refer to: what waits for a restart, what is refused, what a source
//! Secret costs, and when a network is let go.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams};
use kubevirt_operator::rbac;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vitivirt_api::machine::{FINALIZER_NETWORK, Machine, NetworkConfiguration, condition_type};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::proxy::{Match, ProxyFault, ProxyRule, RequestVerb};
use vitivirt_lab::{Lab, manifests};

use crate::replica::ACCOUNT;
use crate::world::{World, condition, diagnosis, machine, phase};

const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) fn add(suite: &mut Suite) {
    restarts(suite);
    user_data(suite);
    sources(suite);
    networks(suite);
    plans(suite);
}

fn waiting(machine: &Machine) -> String {
    condition(machine, condition_type::RESTART_REQUIRED).map(|have| have.message.clone()).unwrap_or_default()
}

fn restarts(suite: &mut Suite) {
    suite.test("what_waits_for_a_restart_is_named_until_the_restart", |labs| async move {
        let world = Box::pin(World::begin(&labs, "restarts")).await?;
        let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
        world.create_json(&machine("web", &spec)).await?;
        let fresh = world.running("web", PATIENCE).await?;
        ensure!(waiting(&fresh).is_empty(), "nothing waits: {:?}", fresh.status);

        let edit = json!({
            "resources": {"cpu": {"cores": 4}}, "disks": [{"name": "data", "size": "1Gi"}],
            "domain": {"features": {"hyperv": true}},
        });
        world.edit("web", &edit).await?;
        let fields =
            ["spec.resources.cpu.cores", "spec.disks[data]", "spec.domain.features.hyperv", "spec.resources.cpu"];
        let named = |machine: &Machine| fields.iter().all(|field| waiting(machine).contains(field));
        let waits = world.until("web", "the fields that wait", named).await?;
        for other in ["memory", "networks", "disks[root]", "cloudInit", "bootOrder", "firmware"] {
            ensure!(!waiting(&waits).contains(other), "{other} does not wait: {}", waiting(&waits));
        }
        ensure!(phase(&waits) == Some("Running"), "it runs on: {:?}", waits.status);
        world.edit("web", &json!({"cloudInit": {"userData": "#cloud-config\nusers: []\n"}})).await?;
        world.until("web", "the user data that waits", |machine| waiting(machine).contains("spec.cloudInit")).await?;

        world.vmis().delete("web", &DeleteParams::default()).await?;
        let restarted = |machine: &Machine| waiting(machine).is_empty() && phase(machine) == Some("Running");
        world.until_within(PATIENCE, "web", "a guest with everything", restarted).await?;
        Ok(())
    });

    suite.test("an_edit_that_is_taken_back_waits_for_nothing", |labs| async move {
        let world = Box::pin(World::begin(&labs, "taken-back")).await?;
        world.networks(&["prod"]).await?;
        // One of everything: what KubeVirt adds to a guest must not be taken for a change.
        let spec = json!({
            "template": "medium",
            "domain": {
                "features": {"acpi": true, "apic": true, "hyperv": true},
                "firmware": {"bootloader": {"efi": true, "secureBoot": true}},
            },
            "disks": [
                {"name": "cd", "type": "cdrom", "source": {"containerDisk": {"image": "example.org/cd"}}},
                {"name": "live", "source": {"containerDisk": {"image": "example.org/live:1"}}},
            ],
            "networks": [{"name": "a", "networkName": "pod", "model": "e1000"}, {"name": "b", "networkName": "prod"}],
            "cloudInit": {"userData": "#cloud-config\n", "networkData": "version: 2\n"},
        });
        world.create_json(&machine("web", &spec)).await?;
        world.running("web", PATIENCE).await?;
        world.edit("web", &json!({"bootOrder": ["network", "disk"]})).await?;
        let only = "waits for the machine's restart: spec.bootOrder; `virtctl restart web` does it";
        let named = |machine: &Machine| waiting(machine).contains("spec.bootOrder");
        let waits = world.until("web", "the boot order", named).await?;
        ensure!(waiting(&waits) == only, "{}", waiting(&waits));
        world.edit("web", &json!({"bootOrder": null})).await?;
        world.until("web", "no wait", |machine| waiting(machine).is_empty()).await?;
        Ok(())
    });
}

/// What a Machine's guest was given, and the Secret with it.
fn user_data(suite: &mut Suite) {
    suite.test("user_data_stays_as_long_as_a_guest_has_it_whatever_the_cache_says", |labs| async move {
        const NAMESPACE: &str = "old-user-data";
        let world = Box::pin(World::begin_behind_proxy(&labs, NAMESPACE)).await?;
        world.create_json(&machine("web", &json!({"template": "small"}))).await?;
        world.running("web", PATIENCE).await?;
        world.edit("web", &json!({"cloudInit": {"userData": "#cloud-config\n"}})).await?;
        world.until("web", "the user data that waits", |machine| waiting(machine).contains("spec.cloudInit")).await?;

        // The operator does not hear of the guest that has it.
        let guests =
            Match::verb(RequestVerb::Watch).user_agent("kubevirt-operator/").resource("virtualmachineinstances");
        let stalled = ProxyRule::always(guests.namespace(NAMESPACE), ProxyFault::StallWatch { after_events: 0 });
        let stalled = world.lab.proxy().add(stalled);
        world.restart_guest("web").await?;
        world.edit("web", &json!({"cloudInit": null})).await?;
        let forgotten =
            |vm: Option<&DynamicObject>| vm.is_some_and(|vm| !vm.data.to_string().contains("web-cloudinit"));
        world.lab.wait("a VM without user data", PATIENCE, world.vms(), "web", forgotten).await?;
        world.settled().await?;
        let secrets = world.api::<Secret>();
        ensure!(secrets.get_opt("web-cloudinit").await?.is_some(), "the guest that runs was started with it");

        stalled.remove();
        world.restart_guest("web").await?;
        world.lab.wait("the end of the Secret", PATIENCE, secrets, "web-cloudinit", |secret| secret.is_none()).await?;
        world.running("web", PATIENCE).await.map(|_| ())
    });
}

fn sources(suite: &mut Suite) {
    suite.test("a_secret_reference_costs_one_read_and_one_per_change", |labs| async move {
        let world = Box::pin(World::begin(&labs, "source-reads")).await?;
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "source"}, "stringData": {"userdata": "first"}});
        world.create_json(&secret).await?;
        world.settled().await?;
        let before = world.requests()?.len();
        let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source"}}});
        world.create_json(&machine("web", &spec)).await?;
        world.running("web", PATIENCE).await?;
        world.settled().await?;
        let made = world.requests()?.split_off(before);
        let reads = |made: &[vitivirt_lab::Record]| made.iter().filter(|record| !record.is_write()).count();
        let shown = |made: &[vitivirt_lab::Record]| -> Vec<String> {
            made.iter().map(|record| format!("{} {}/{}", record.verb, record.resource, record.name)).collect()
        };
        ensure!(reads(&made) == 1 && made.len() <= 9, "{:#?}", shown(&made));

        let before = world.requests()?.len();
        let change = json!({"stringData": {"userdata": "second"}});
        let secrets = world.api::<Secret>();
        secrets.patch("source", &PatchParams::default(), &Patch::Merge(change)).await?;
        let follows = |secret: Option<&Secret>| {
            let data = secret.and_then(|secret| secret.data.as_ref()?.get("userdata"));
            data.is_some_and(|data| data.0 == b"second")
        };
        world.lab.wait("the new contents", PATIENCE, secrets, "web-cloudinit", follows).await?;
        world.until("web", "the user data that waits", |machine| waiting(machine).contains("spec.cloudInit")).await?;
        world.settled().await?;
        let made = world.requests()?.split_off(before);
        ensure!(reads(&made) == 1 && made.len() <= 3, "{:#?}", shown(&made));
        Ok(())
    });

    suite.test("a_source_that_may_not_be_read_is_told_and_heals", |labs| async move {
        const NAMESPACE: &str = "source-rights";
        let lab = Box::pin(labs.reference()).await?;
        lab.grant(NAMESPACE, ACCOUNT, &rules(true)).await?;
        reads_the_cluster(&lab, NAMESPACE).await?;
        let world = World::begin_granted(lab.clone(), NAMESPACE, vec![]).await?;
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "source"}, "stringData": {"userdata": "x"}});
        world.create_json(&secret).await?;
        let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source"}}});
        lab.change_grant(NAMESPACE, ACCOUNT, &rules(false)).await?;
        world.create_json(&machine("web", &spec)).await?;
        let refused = world.expect("web", "PermissionMissing").await?;
        for words in ["may not get secrets", "in namespace source-rights", "Secret source", "grant"] {
            ensure!(diagnosis(&refused).contains(words), "{words:?} is missing in {:?}", refused.status);
        }
        ensure!(phase(&refused) == Some("Pending"), "{:?}", refused.status);
        ensure!(world.vms().get_opt("web").await?.is_none(), "nothing is half made");
        lab.change_grant(NAMESPACE, ACCOUNT, &rules(true)).await?;
        world.running("web", PATIENCE).await.map(|_| ())
    });
}

fn networks(suite: &mut Suite) {
    suite.test("a_network_is_let_go_however_its_last_machine_leaves", |labs| async move {
        let world = Box::pin(World::begin(&labs, "let-go")).await?;
        world.networks(&["edited", "orphaned", "going"]).await?;
        let on = |network: &str| json!({"template": "small", "networks": [{"name": "a", "networkName": network}]});
        let networks = world.api::<NetworkConfiguration>();
        let is_protected = |network: Option<&NetworkConfiguration>| {
            network.is_some_and(|network| network.finalizers().contains(&FINALIZER_NETWORK.to_owned()))
        };
        let is_free = |network: Option<&NetworkConfiguration>| network.is_some_and(|have| have.finalizers().is_empty());
        for (name, network) in [("one", "edited"), ("two", "orphaned"), ("three", "going")] {
            world.create_json(&machine(name, &on(network))).await?;
            world.running(name, PATIENCE).await?;
            ensure!(is_protected(Some(&networks.get(network).await?)), "{network} is in use");
        }
        // By an edit.
        world.edit("one", &json!({"networks": null})).await?;
        world.lab.wait("a free network", PATIENCE, networks.clone(), "edited", is_free).await?;
        world.delete("one").await?;
        world.delete("three").await?;
        ensure!(is_free(Some(&networks.get("going").await?)), "let go before its Machine is gone");
        // By force, with no other Machine in the namespace: the operator sees it only when it is gone.
        world.force("two").await?;
        networks.delete("orphaned", &DeleteParams::default()).await?;
        world.lab.wait("the network's end", PATIENCE, networks, "orphaned", |network| network.is_none()).await?;
        Ok(())
    });

    suite.test("a_network_that_was_left_while_nobody_looked_is_let_go", |labs| async move {
        let mut world = Box::pin(World::begin(&labs, "left-alone")).await?;
        world.networks(&["net"]).await?;
        let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "net"}]});
        world.create_json(&machine("web", &spec)).await?;
        world.running("web", PATIENCE).await?;
        world.program.signal(Signal::SIGTERM)?;
        ensure!(world.program.wait(PATIENCE).await?.success(), "a clean end");
        world.force("web").await?;
        let networks = world.api::<NetworkConfiguration>();
        networks.delete("net", &DeleteParams::default()).await?;
        ensure!(networks.get_opt("net").await?.is_some(), "it is protected still");
        let _successor = Box::pin(World::begin(&labs, "left-alone")).await?;
        world.lab.wait("the network's end", PATIENCE, networks, "net", |network| network.is_none()).await?;
        Ok(())
    });
}

impl World {
    /// Deletes a Machine and takes its finalizer off, as an impatient administrator does.
    async fn force(&self, name: &str) -> Result<()> {
        self.machines().delete(name, &DeleteParams::default()).await?;
        if self.machines().get_opt(name).await?.is_some() {
            let without = json!({"metadata": {"finalizers": null}});
            self.machines().patch(name, &PatchParams::default(), &Patch::Merge(without)).await?;
        }
        let gone = self.lab.wait("the end", PATIENCE, self.machines(), name, |machine| machine.is_none());
        gone.await.map(|_| ())
    }
}

fn plans(suite: &mut Suite) {
    suite.test("plan_tells_programs_what_is_refused_and_whose_address_it_is", |labs| async move {
        let world = Box::pin(World::begin(&labs, "plan-json")).await?;
        let networks = json!([{"name": "a", "networkName": "pod", "macAddress": "02:00:00:00:00:99"}]);
        let disks = |size: &str| json!([{"name": "data", "size": size}]);
        let spec = json!({"template": "small", "disks": disks("2Gi"), "networks": networks});
        world.create_json(&machine("web", &spec)).await?;
        world.running("web", PATIENCE).await?;
        let before = world.requests()?.len();
        let cores = json!({"cpu": {"cores": 2}});
        let edited = json!({"template": "small", "disks": disks("1Gi"), "networks": networks, "resources": cores});
        let planned = refused_plan(&world, &machine("web", &edited)).await?;
        let at = |planned: &Value, pointer: &str| planned.pointer(pointer).cloned().unwrap_or_default();
        ensure!(at(&planned, "/0/refused/0/field") == "spec.disks[data].size", "{planned:#}");
        let changes = at(&planned, "/0/writes/0/changes");
        let of = |change: &&Value| at(change, "/machineField") == "spec.resources.cpu.cores";
        let change = changes.as_array().and_then(|all| all.iter().find(of).cloned()).unwrap_or_default();
        ensure!(at(&change, "/effect") == "restart" && at(&change, "/to") == 2, "{planned:#}");
        let planned = refused_plan(&world, &machine("second", &spec)).await?;
        ensure!(
            at(&planned, "/0/reason") == "MacAddressInUse" && at(&planned, "/0/writes") == json!([]),
            "{planned:#}"
        );
        ensure!(world.writes_since(before)?.is_empty(), "it wrote");
        Ok(())
    });
}

/// What is wrong is told to programs by the exit code as well.
async fn refused_plan(world: &World, machine: &Value) -> Result<Value> {
    let (fine, text) = world.plan(machine, &["-o", "json"]).await?;
    ensure!(!fine, "it finds nothing wrong: {text}");
    Ok(serde_json::from_str(&text)?)
}

/// What the operator may do in a namespace, with or without reading a Secret by name.
fn rules(reads_secrets: bool) -> Value {
    let mut all: Vec<_> = rbac::manager_rules().into_iter().chain(rbac::lease_rules()).collect();
    for rule in &mut all {
        if rule.resources.iter().flatten().any(|resource| resource == "secrets") {
            rule.verbs.retain(|verb| reads_secrets || verb != "get");
        }
    }
    json!(all)
}

/// The kinds without a namespace, which a Role cannot grant.
async fn reads_the_cluster(lab: &Lab, namespace: &str) -> Result<()> {
    let name = format!("reads-the-cluster-{namespace}");
    let (mut role, mut binding) = (rbac::manager_role(), rbac::manager_binding());
    role.metadata.name = Some(name.clone());
    let cluster_wide = ["storage.k8s.io", "apiextensions.k8s.io"];
    if let Some(rules) = &mut role.rules {
        rules.retain(|rule| rule.api_groups.iter().flatten().any(|group| cluster_wide.contains(&group.as_str())));
    }
    binding.metadata.name = Some(name.clone());
    binding.role_ref.name = name;
    for subject in binding.subjects.iter_mut().flatten() {
        subject.namespace = Some(namespace.to_owned());
    }
    manifests::create(&lab.client(), &[json!(role), json!(binding)]).await
}
