//! Changes of running Machines and of the objects that they refer to: fields that need a restart, user data in use,
//! source Secrets, network finalizers, and the plan of a change.

use std::sync::Arc;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vitivirt_api::machine::{Machine, NetworkConfiguration, condition_type};
use vitivirt_lab::{
    Record,
    harness::{SharedLabs, Suite},
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb},
};

use crate::{
    machine_test::{MACHINE_PATIENCE, MachineTest, check_diagnosis, condition, is_protected, machine, phase},
    replica::{ACCOUNT, grant_cluster_scoped_kinds, namespaced_rules, rule_is_about},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        fields_that_need_a_restart_are_listed_until_the_vm_restarts,
        a_reverted_edit_requires_no_restart,
        user_data_in_use_is_kept_even_when_the_vmi_cache_is_stale,
        a_source_secret_is_read_once_and_once_per_change,
        long_user_data_is_read_only_to_write_its_secret,
        an_unreadable_source_secret_is_reported_and_recovers_when_granted,
        a_network_loses_its_finalizer_when_its_last_machine_leaves,
        a_network_abandoned_while_the_operator_is_down_loses_its_finalizer,
        the_json_plan_lists_rejected_fields_and_mac_conflicts,
    );
}

/// The message of the condition RestartRequired, or an empty text.
fn restart_message(machine: &Machine) -> String {
    condition(machine, condition_type::RESTART_REQUIRED).map(|have| have.message.clone()).unwrap_or_default()
}

/// Waits until RestartRequired names the user data of the Machine `web`.
async fn wait_for_pending_user_data(test: &MachineTest) -> Result<()> {
    let is_pending = |machine: &Machine| restart_message(machine).contains("spec.cloudInit");
    test.wait_for("web", "user data that needs a restart", is_pending).await.map(|_| ())
}

async fn fields_that_need_a_restart_are_listed_until_the_vm_restarts(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "restarts")).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("web", &spec)).await?;
    let fresh = test.wait_until_running("web").await?;
    ensure!(restart_message(&fresh).is_empty(), "a new Machine needs no restart: {:?}", fresh.status);

    let edit = json!({
        "resources": {"cpu": {"cores": 4}}, "disks": [{"name": "data", "size": "1Gi"}],
        "domain": {"features": {"hyperv": true}},
    });
    test.edit_spec("web", &edit).await?;
    let fields = ["spec.resources.cpu.cores", "spec.disks[data]", "spec.domain.features.hyperv", "spec.resources.cpu"];
    let names_fields = |machine: &Machine| fields.iter().all(|field| restart_message(machine).contains(field));
    let pending = test.wait_for("web", "the fields that need a restart", names_fields).await?;
    for other in ["acpi", "memory", "networks", "disks[root]", "cloudInit", "bootOrder", "firmware"] {
        ensure!(!restart_message(&pending).contains(other), "{other} has not changed: {}", restart_message(&pending));
    }
    ensure!(phase(&pending) == Some("Running"), "the Machine does not run: {:?}", pending.status);
    test.edit_spec("web", &json!({"cloudInit": {"userData": "#cloud-config\nusers: []\n"}})).await?;
    wait_for_pending_user_data(&test).await?;

    test.vmis().delete("web", &DeleteParams::default()).await?;
    let is_restarted = |machine: &Machine| restart_message(machine).is_empty() && phase(machine) == Some("Running");
    test.wait_for_within(MACHINE_PATIENCE, "web", "a VMI with all changes", is_restarted).await?;
    Ok(())
}

async fn a_reverted_edit_requires_no_restart(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "taken-back")).await?;
    test.create_networks(&["prod"]).await?;
    // One of everything: the operator must not take what KubeVirt adds to a VMI for a change.
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
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    test.edit_spec("web", &json!({"bootOrder": ["network", "disk"]})).await?;
    let only = "Restart required to apply spec.bootOrder; restart the machine with `virtctl restart -n taken-back web`";
    let names_boot_order = |machine: &Machine| restart_message(machine).contains("spec.bootOrder");
    let pending = test.wait_for("web", "the boot order", names_boot_order).await?;
    ensure!(restart_message(&pending) == only, "{}", restart_message(&pending));
    test.edit_spec("web", &json!({"bootOrder": null})).await?;
    test.wait_for("web", "no required restart", |machine| restart_message(machine).is_empty()).await?;
    Ok(())
}

async fn user_data_in_use_is_kept_even_when_the_vmi_cache_is_stale(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "old-user-data";
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    test.wait_until_running("web").await?;
    test.edit_spec("web", &json!({"cloudInit": {"userData": "#cloud-config\n"}})).await?;
    wait_for_pending_user_data(&test).await?;

    // The operator does not see the new VMI, which uses the Secret.
    let vmi_watch =
        Match::verb(RequestVerb::Watch).user_agent("kubevirt-operator/").resource("virtualmachineinstances");
    let stall = ProxyRule::always(vmi_watch.namespace(NAMESPACE), ProxyFault::StallWatch { after_events: 0 });
    let stall = test.lab.proxy().add(stall);
    test.restart_vmi("web").await?;
    test.edit_spec("web", &json!({"cloudInit": null})).await?;
    let has_no_user_data =
        |vm: Option<&DynamicObject>| vm.is_some_and(|vm| !vm.data.to_string().contains("web-cloudinit"));
    test.lab.wait("a VM without user data", MACHINE_PATIENCE, test.vms(), "web", has_no_user_data).await?;
    test.wait_until_idle().await?;
    let secrets = test.api::<Secret>();
    ensure!(secrets.get_opt("web-cloudinit").await?.is_some(), "the operator deleted user data that a VMI uses");

    stall.remove();
    test.restart_vmi("web").await?;
    test.wait_until_absent(secrets, "web-cloudinit").await?;
    test.wait_until_running("web").await.map(|_| ())
}

async fn a_source_secret_is_read_once_and_once_per_change(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "source-reads")).await?;
    test.create_secret("source", "userdata", "first").await?;
    test.wait_until_idle().await?;
    let before = test.operator_requests()?.len();
    let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source"}}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    test.wait_until_idle().await?;
    let requests = test.operator_requests()?.split_off(before);
    let count_reads = |requests: &[Record]| requests.iter().filter(|record| !record.is_write()).count();
    let shown = |requests: &[Record]| -> Vec<String> {
        requests.iter().map(|record| format!("{} {}/{}", record.verb, record.resource, record.name)).collect()
    };
    ensure!(count_reads(&requests) == 1 && requests.len() <= 9, "{:#?}", shown(&requests));

    let before = test.operator_requests()?.len();
    let change = json!({"stringData": {"userdata": "second"}});
    test.api::<Secret>().patch("source", &PatchParams::default(), &Patch::Merge(change)).await?;
    test.wait_for_user_data("web-cloudinit", "second").await?;
    wait_for_pending_user_data(&test).await?;
    test.wait_until_idle().await?;
    let requests = test.operator_requests()?.split_off(before);
    ensure!(count_reads(&requests) == 1 && requests.len() <= 3, "{:#?}", shown(&requests));

    // A new leader reads no source.
    let before = test.operator_requests()?.len();
    test.restart_operator().await?;
    test.wait_until_idle().await?;
    let mut requests = test.operator_requests()?.split_off(before);
    requests.retain(|record| record.resource == "secrets");
    ensure!(requests.is_empty(), "{:#?}", shown(&requests));
    Ok(())
}

/// Long inline user data is not in the caches.
async fn long_user_data_is_read_only_to_write_its_secret(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "long-user-data")).await?;
    let text = |word: &str| format!("#cloud-config\n# {}\n", word.repeat(2000));
    let machine_reads = |test: &MachineTest, before: usize| -> Result<usize> {
        let requests = test.operator_requests()?.split_off(before);
        Ok(requests.iter().filter(|record| record.verb == "get" && record.resource == "machines").count())
    };
    let before = test.operator_requests()?.len();
    test.create_json(&machine("web", &json!({"template": "small", "cloudInit": {"userData": text("first")}}))).await?;
    test.wait_until_running("web").await?;
    test.wait_for_user_data("web-cloudinit", &text("first")).await?;
    test.wait_until_idle().await?;
    ensure!(machine_reads(&test, before)? == 1, "{} reads of the Machine", machine_reads(&test, before)?);

    let before = test.operator_requests()?.len();
    test.edit_spec("web", &json!({"cloudInit": {"userData": text("other")}})).await?;
    test.wait_for_user_data("web-cloudinit", &text("other")).await?;
    wait_for_pending_user_data(&test).await?;
    test.wait_until_idle().await?;
    ensure!(machine_reads(&test, before)? == 1, "{} reads of the Machine", machine_reads(&test, before)?);

    // A new leader has nothing to write. A change of the Secret is repaired.
    let before = test.operator_requests()?.len();
    test.restart_operator().await?;
    test.wait_until_idle().await?;
    ensure!(machine_reads(&test, before)? == 0, "{} reads of the Machine", machine_reads(&test, before)?);
    let change = json!({"data": {"userdata": null}, "stringData": {"userdata": "changed"}});
    test.api::<Secret>().patch("web-cloudinit", &PatchParams::default(), &Patch::Merge(change)).await?;
    test.wait_for_user_data("web-cloudinit", &text("other")).await?;

    // With a source Secret both parts are needed.
    test.create_secret("source", "userdata", "#!/bin/sh\ntrue\n").await?;
    test.edit_spec("web", &json!({"cloudInit": {"secretRef": {"name": "source"}}})).await?;
    let has_both = |secret: Option<&Secret>| {
        let data = secret.and_then(|secret| secret.data.as_ref()?.get("userdata"));
        let data = data.map(|data| String::from_utf8_lossy(&data.0)).unwrap_or_default();
        data.contains(&text("other")) && data.contains("#!/bin/sh")
    };
    test.lab.wait("both parts", MACHINE_PATIENCE, test.api::<Secret>(), "web-cloudinit", has_both).await?;
    Ok(())
}

async fn an_unreadable_source_secret_is_reported_and_recovers_when_granted(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "source-rights";
    let lab = Box::pin(labs.reference()).await?;
    let all = namespaced_rules(|_| {});
    let without_get = namespaced_rules(|rule| {
        if rule_is_about(rule, &["secrets"]) {
            rule.verbs.retain(|verb| verb != "get");
        }
    });
    lab.grant(NAMESPACE, ACCOUNT, &all).await?;
    grant_cluster_scoped_kinds(&lab, NAMESPACE).await?;
    let test = MachineTest::start_with_existing_permissions(lab.clone(), NAMESPACE).await?;
    test.create_secret("source", "userdata", "x").await?;
    let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source"}}});
    lab.change_grant(NAMESPACE, ACCOUNT, &without_get).await?;
    test.create_json(&machine("web", &spec)).await?;
    let refused = test.wait_for_reason("web", "PermissionMissing").await?;
    check_diagnosis(&refused, &["may not get secrets", "in namespace source-rights", "Secret source", "grant"])?;
    ensure!(phase(&refused) == Some("Pending"), "{:?}", refused.status);
    ensure!(test.vms().get_opt("web").await?.is_none(), "the operator created a VM without its user data");
    lab.change_grant(NAMESPACE, ACCOUNT, &all).await?;
    test.wait_until_running("web").await.map(|_| ())
}

async fn a_network_loses_its_finalizer_when_its_last_machine_leaves(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "let-go")).await?;
    test.create_networks(&["edited", "forced", "deleted"]).await?;
    let spec_on = |network: &str| json!({"template": "small", "networks": [{"name": "a", "networkName": network}]});
    let networks = test.api::<NetworkConfiguration>();
    for (name, network) in [("one", "edited"), ("two", "forced"), ("three", "deleted")] {
        test.create_json(&machine(name, &spec_on(network))).await?;
        test.wait_until_running(name).await?;
        ensure!(is_protected(&networks.get(network).await?), "{network} is in use and has no finalizer");
    }
    // An edit removes the network from the Machine.
    test.edit_spec("one", &json!({"networks": null})).await?;
    let has_no_finalizer =
        |network: Option<&NetworkConfiguration>| network.is_some_and(|have| have.finalizers().is_empty());
    test.lab.wait("no finalizer", MACHINE_PATIENCE, networks.clone(), "edited", has_no_finalizer).await?;
    test.delete_machine("one").await?;
    // The finalizer is removed before the deletion of the Machine completes.
    test.delete_machine("three").await?;
    ensure!(networks.get("deleted").await?.finalizers().is_empty(), "the network of a deleted Machine has a finalizer");
    // A forced deletion, with no other Machine in the namespace: the operator notices it afterwards.
    force_delete(&test, "two").await?;
    networks.delete("forced", &DeleteParams::default()).await?;
    test.wait_until_absent(networks, "forced").await
}

async fn a_network_abandoned_while_the_operator_is_down_loses_its_finalizer(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "left-alone")).await?;
    test.create_networks(&["net"]).await?;
    let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "net"}]});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    test.operator.signal(Signal::SIGTERM)?;
    let status = test.operator.wait(MACHINE_PATIENCE).await?;
    ensure!(status.success(), "the operator ended with {status}");
    force_delete(&test, "web").await?;
    let networks = test.api::<NetworkConfiguration>();
    networks.delete("net", &DeleteParams::default()).await?;
    ensure!(networks.get_opt("net").await?.is_some(), "the network had no finalizer");
    let _successor = Box::pin(MachineTest::start(&labs, "left-alone")).await?;
    test.wait_until_absent(networks, "net").await
}

/// Deletes a Machine and removes its finalizers, as a user may who does not want to wait.
async fn force_delete(test: &MachineTest, name: &str) -> Result<()> {
    test.machines().delete(name, &DeleteParams::default()).await?;
    if test.machines().get_opt(name).await?.is_some() {
        let without_finalizers = json!({"metadata": {"finalizers": null}});
        test.machines().patch(name, &PatchParams::default(), &Patch::Merge(without_finalizers)).await?;
    }
    test.wait_until_absent(test.machines(), name).await
}

async fn the_json_plan_lists_rejected_fields_and_mac_conflicts(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "plan-json")).await?;
    let networks = json!([{"name": "a", "networkName": "pod", "macAddress": "02:00:00:00:00:99"}]);
    let disks = |size: &str| json!([{"name": "data", "size": size}]);
    let spec = json!({"template": "small", "disks": disks("2Gi"), "networks": networks});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    let before = test.operator_requests()?.len();
    let cores = json!({"cpu": {"cores": 2}});
    let edited = json!({"template": "small", "disks": disks("1Gi"), "networks": networks, "resources": cores});
    let planned = failing_plan(&test, &machine("web", &edited)).await?;
    let at = |planned: &Value, pointer: &str| planned.pointer(pointer).cloned().unwrap_or_default();
    ensure!(at(&planned, "/objects/0/refused/0/field") == "spec.disks[data].size", "{planned:#}");
    let changes = at(&planned, "/objects/0/writes/0/changes");
    let is_of_cores = |change: &&Value| at(change, "/sourceField") == "spec.resources.cpu.cores";
    let change = changes.as_array().and_then(|all| all.iter().find(is_of_cores).cloned()).unwrap_or_default();
    ensure!(at(&change, "/effect") == "restart" && at(&change, "/to") == 2, "{planned:#}");
    let planned = failing_plan(&test, &machine("second", &spec)).await?;
    // The user creates the Machine, and the operator nothing.
    let writes = at(&planned, "/objects/0/writes");
    let is_machine = |write: &Value| (at(write, "/action"), at(write, "/kind")) == (json!("create"), json!("Machine"));
    ensure!(
        at(&planned, "/objects/0/result/reason") == "MacAddressInUse"
            && writes.as_array().is_some_and(|writes| writes.len() == 1 && writes.iter().all(is_machine)),
        "{planned:#}"
    );
    ensure!(test.writes_since(before)?.is_empty(), "the plan command wrote something");
    Ok(())
}

/// The JSON plan of a Machine with an error, for which the command must exit with an error status.
async fn failing_plan(test: &MachineTest, machine: &Value) -> Result<Value> {
    let (success, text) = test.run_plan_command(machine, &["-o", "json"]).await?;
    ensure!(!success, "the plan command reports no error: {text}");
    Ok(serde_json::from_str(&text)?)
}
