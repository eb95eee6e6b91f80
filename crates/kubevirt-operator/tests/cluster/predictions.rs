//! Failures that a review of the operator predicted, on the lab. Each test names the numbers of that review.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{core::v1::PersistentVolumeClaim, events::v1::Event};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    config::Kubeconfig,
    runtime::wait::await_condition,
};
use kubevirt_operator::rbac;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use vitivirt_api::{
    machine::{
        ANNOTATION_CASCADE, LABEL_MACHINE, LABEL_MANAGED_BY, MANAGED_BY, Machine, NetworkConfiguration, condition_type,
    },
    resources::import_source_resource,
};
use vitivirt_lab::{
    harness::{SharedLabs, Suite},
    manifests,
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb, When},
};

use crate::{
    machine_test::{MACHINE_PATIENCE, MachineTest, condition, diagnosis, machine, phase, ready_reason},
    poll::poll_until,
    random_specs::create_import_source_crd,
    replica::PATIENCE,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        repairs_that_another_client_undoes_are_limited_and_reported,
        an_import_source_is_created_before_its_pvc_and_belongs_to_its_machine,
        restored_disks_earlier_objects_and_changed_networks_are_respected,
        a_deletion_reports_a_failed_live_check_and_ignores_a_foreign_vmi,
        a_user_without_cluster_permissions_can_plan,
    );
}

impl MachineTest {
    fn claims(&self) -> Api<PersistentVolumeClaim> {
        self.api()
    }

    async fn merge<K>(&self, api: &Api<K>, name: &str, change: &Value) -> Result<()>
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await?;
        Ok(())
    }
}

/// The finalizer of another client, which keeps an object in deletion.
fn kept(is: bool) -> Value {
    json!({"metadata": {"finalizers": if is { json!(["lab.vitistack.io/keep"]) } else { Value::Null }}})
}

const CORES: &str = "/spec/template/spec/domain/cpu/cores";

/// B26: both clients would write as fast as they can.
async fn repairs_that_another_client_undoes_are_limited_and_reported(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "predict-fight")).await?;
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    test.wait_until_running("web").await?;
    test.wait_until_idle().await?;
    let before = test.operator_requests()?.len();
    let until = Instant::now() + Duration::from_secs(8);
    let is_repaired =
        |vm: Option<&DynamicObject>| vm.is_some_and(|vm| vm.data.pointer(CORES).is_some_and(|cores| *cores == 1));
    let mut undone = 0;
    loop {
        let repaired = await_condition(test.vms(), "web", is_repaired);
        match timeout(until.saturating_duration_since(Instant::now()), repaired).await {
            Ok(found) => drop(found?),
            Err(_) => break,
        }
        let cores = json!({"spec": {"template": {"spec": {"domain": {"cpu": {"cores": 3}}}}}});
        let manager = PatchParams { field_manager: Some("autosizer".to_owned()), ..PatchParams::default() };
        test.vms().patch("web", &manager, &Patch::Merge(&cores)).await?;
        undone += 1;
    }
    let writes = test.writes_since(before)?.into_iter().filter(|record| record.resource == "virtualmachines").count();
    ensure!((5..=10).contains(&writes), "{writes} writes, {undone} undone");
    let is_reported = |event: &Event| {
        event.reason.as_deref() == Some("RepeatedDrift")
            && event.note.as_deref().unwrap_or_default().contains("autosizer")
    };
    let exists = || async { Ok(test.api::<Event>().list(&ListParams::default()).await?.items.iter().any(is_reported)) };
    poll_until(PATIENCE, exists, || "an event names the other client".to_owned()).await?;
    // An edit is written at once.
    test.edit_spec("web", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("web", "Stopped").await.map(|_| ())
}

/// B2: a source whose creation failed was never created again. B3: the source of an earlier Machine was used.
async fn an_import_source_is_created_before_its_pvc_and_belongs_to_its_machine(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "predict-import";
    let lab = Box::pin(labs.reference()).await?;
    create_import_source_crd(&lab).await?;
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    let sources = test.dynamic_api(&import_source_resource());
    let creates = Match::verb(RequestVerb::Create).user_agent("kubevirt-operator/").resource("volumeimportsources");
    let refuse = ProxyFault::Answer { status: 500, retry_after: None };
    let refuse = test.lab.proxy().add(ProxyRule::new(creates.namespace(NAMESPACE), When::First(1), refuse));
    let disk = |url: &str| json!([{"name": "root", "size": "1Gi", "source": {"http": {"url": url}}}]);
    let spec = |url: &str| json!({"template": "small", "disks": disk(url)});
    test.create_json(&machine("web", &spec("http://images.example/one.img"))).await?;
    test.wait_until_running("web").await?;
    refuse.remove();
    let source = sources.get("web-root").await?;
    ensure!(source.data.to_string().contains("one.img"), "{source:?}");
    let created = test.operator_requests()?.into_iter().filter(|record| record.verb == "create");
    let order: Vec<String> = created
        .filter(|record| record.code == Some(201))
        .map(|record| record.resource)
        .filter(|resource| ["volumeimportsources", "persistentvolumeclaims"].contains(&resource.as_str()))
        .collect();
    ensure!(order == ["volumeimportsources", "persistentvolumeclaims"], "{order:?}");

    // The source of an earlier Machine of the same name, which another client keeps.
    let mut earlier = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "VolumeImportSource",
        "metadata": {"name": "again-root", "labels": {LABEL_MANAGED_BY: MANAGED_BY, LABEL_MACHINE: "again"},
            "finalizers": ["lab.vitistack.io/keep"],
            "ownerReferences": [{"apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "name": "again",
                "uid": "11111111-52a5-4a7c-9d38-2f1f0f6f3d11", "controller": true}]},
        "spec": {"source": {"http": {"url": "http://images.example/old.img"}}},
    });
    test.create_json(&earlier.take()).await?;
    test.create_json(&machine("again", &spec("http://images.example/new.img"))).await?;
    let waiting = test.wait_for_reason("again", "WaitingForDeletion").await?;
    ensure!(phase(&waiting) != Some("Failed"), "{:?}", waiting.status);
    ensure!(test.claims().get_opt("again-root").await?.is_none(), "the PVC would be filled from the earlier source");
    // The garbage collector may be faster.
    let _ = sources.delete("again-root", &DeleteParams::default()).await;
    test.merge(&sources, "again-root", &kept(false)).await?;
    test.wait_until_running("again").await?;
    let source = sources.get("again-root").await?;
    ensure!(source.data.to_string().contains("new.img"), "{source:?}");
    test.delete_machine("web").await?;
    test.delete_machine("again").await
}

fn restart_message(machine: &Machine) -> String {
    condition(machine, condition_type::RESTART_REQUIRED).map(|have| have.message.clone()).unwrap_or_default()
}

async fn restored_disks_earlier_objects_and_changed_networks_are_respected(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "predict-life")).await?;
    test.create_networks(&["net"]).await?;
    let on_network = json!({"template": "small", "networks": [{"name": "a", "networkName": "net"}]});
    test.create_json(&machine("vlan", &on_network)).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    for name in ["restored", "again"] {
        test.create_json(&machine(name, &spec)).await?;
    }
    for name in ["vlan", "restored", "again"] {
        test.wait_until_running(name).await?;
    }
    a_restored_disk_stays(&test).await?;
    a_machine_waits_for_the_pvc_of_its_predecessor(&test, &spec).await?;
    a_changed_network_is_announced(&test).await
}

/// B10: KubeVirt's restore replaces the PVC of a volume in the VM, and the operator put the earlier one back.
async fn a_restored_disk_stays(test: &MachineTest) -> Result<()> {
    test.edit_spec("restored", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("restored", "Stopped").await?;
    let pvc = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "restore-1"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    });
    test.create_json(&pvc).await?;
    let mut vm = test.vms().get("restored").await?;
    let volumes = vm.data.pointer_mut("/spec/template/spec/volumes").and_then(Value::as_array_mut);
    let volumes = volumes.context("the VM has no volumes")?;
    for volume in volumes.iter_mut() {
        if let Some(claim) = volume.pointer_mut("/persistentVolumeClaim/claimName") {
            *claim = "restore-1".into();
        }
    }
    let change = json!({"spec": {"template": {"spec": {"volumes": volumes}}}});
    test.merge(&test.vms(), "restored", &change).await?;
    test.edit_spec("restored", &json!({"powerState": "Running"})).await?;
    let running = test.wait_until_running("restored").await?;
    let storage = condition(&running, condition_type::STORAGE_READY).map(|have| have.message.clone());
    ensure!(storage.as_deref().is_some_and(|text| text.contains("restore-1")), "{storage:?}");
    for object in [test.vms().get("restored").await?, test.vmis().get("restored").await?] {
        let text = object.data.to_string();
        ensure!(text.contains("\"restore-1\"") && !text.contains("\"restored-root\""), "{text}");
    }
    ensure!(test.claims().get("restored-root").await?.metadata.deletion_timestamp.is_none(), "the old disk is gone");
    Ok(())
}

/// B14 and R14: a PVC of the predecessor that is being deleted was a conflict of names, and the Machine failed.
async fn a_machine_waits_for_the_pvc_of_its_predecessor(test: &MachineTest, spec: &Value) -> Result<()> {
    test.merge(&test.claims(), "again-root", &kept(true)).await?;
    let earlier = test.claims().get("again-root").await?;
    test.delete_machine("again").await?;
    test.create_json(&machine("again", spec)).await?;
    let waiting = test.wait_for_reason("again", "WaitingForDeletion").await?;
    ensure!(phase(&waiting) == Some("Pending"), "{:?}", waiting.status);
    test.merge(&test.claims(), "again-root", &kept(false)).await?;
    test.wait_until_running("again").await?;
    ensure!(test.claims().get("again-root").await?.uid() != earlier.uid(), "the new Machine has the old disk");
    Ok(())
}

/// B22: a running guest stays on the old VLAN until it restarts or migrates, and nothing said so.
async fn a_changed_network_is_announced(test: &MachineTest) -> Result<()> {
    ensure!(
        restart_message(&test.machines().get("vlan").await?).is_empty(),
        "no restart is required before the change"
    );
    test.merge(&test.api::<NetworkConfiguration>(), "net", &json!({"spec": {"vlan": 777}})).await?;
    let is_announced = |machine: &Machine| {
        let message = restart_message(machine);
        message.contains("NetworkConfiguration net") && message.contains("VLAN 777") && message.contains("VLAN 100")
    };
    test.wait_for("vlan", "the announcement of the new VLAN", is_announced).await?;
    test.wait_for_event("vlan", "PendingRestart").await?;
    let nad = test.nads().get("net").await?;
    ensure!(nad.data.to_string().contains("777"), "{nad:?}");
    test.restart_vmi("vlan").await?;
    test.wait_for("vlan", "no required restart", |machine| restart_message(machine).is_empty()).await.map(|_| ())
}

async fn a_deletion_reports_a_failed_live_check_and_ignores_a_foreign_vmi(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "predict-delete";
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    for name in ["blind", "held"] {
        test.create_json(&machine(name, &json!({"template": "small"}))).await?;
    }
    for name in ["blind", "held"] {
        test.wait_until_running(name).await?;
    }
    // B15: a deletion whose last check failed said nothing. R14: it must not delete the disk either.
    let reads = Match::verb(RequestVerb::Get).user_agent("kubevirt-operator/").resource("virtualmachines");
    let fail = ProxyFault::Answer { status: 500, retry_after: None };
    let fail = test.lab.proxy().add(ProxyRule::always(reads.namespace(NAMESPACE).name("blind"), fail));
    test.machines().delete("blind", &DeleteParams::default()).await?;
    let is_reported = |machine: &Machine| {
        ready_reason(machine) == Some("Deleting")
            && diagnosis(machine).contains("could not check whether its VirtualMachine still exists")
    };
    test.wait_for_within(MACHINE_PATIENCE, "blind", "the failed check", is_reported).await?;
    ensure!(test.claims().get("blind-root").await?.metadata.deletion_timestamp.is_none(), "the disk is being deleted");
    fail.remove();
    test.wait_until_deleted("blind").await?;
    test.wait_until_absent(test.claims(), "blind-root").await?;

    // A VMI of the same name that has the label, and that no VM of the Machine started, does not block the deletion.
    let mut test = test;
    test.operator.signal(Signal::SIGTERM)?;
    test.operator.wait(PATIENCE).await?;
    test.machines().delete("held", &DeleteParams::default()).await?;
    test.vms().delete("held", &DeleteParams::default()).await?;
    test.wait_until_absent(test.vms(), "held").await?;
    test.wait_until_absent(test.vmis(), "held").await?;
    let foreign = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "held", "labels": {LABEL_MACHINE: "held"}},
        "spec": {"terminationGracePeriodSeconds": 0, "domain": {"devices": {}, "memory": {"guest": "128Mi"}}},
    });
    test.create_json(&foreign).await?;
    let uid = test.vmis().get("held").await?.uid();
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    // The operator did not see the deletion begin, and nothing is left that shows how the Machine is deleted.
    test.wait_for_reason("held", "DeletionUnconfirmed").await?;
    let answer = json!({"metadata": {"annotations": {ANNOTATION_CASCADE: "background"}}});
    test.machines().patch("held", &PatchParams::default(), &Patch::Merge(answer)).await?;
    test.wait_until_deleted("held").await?;
    test.wait_until_absent(test.claims(), "held-root").await?;
    let left = test.vmis().get("held").await?;
    ensure!(left.uid() == uid && left.metadata.deletion_timestamp.is_none(), "{left:?}");
    test.vmis().delete("held", &DeleteParams::default()).await?;
    Ok(())
}

/// B23: the command needed permissions that users of the role machine-edit do not have.
async fn a_user_without_cluster_permissions_can_plan(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "predict-plan";
    let test = Box::pin(MachineTest::start(&labs, NAMESPACE)).await?;
    test.create_networks(&["net"]).await?;
    let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "net"}]});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    let group = "rbac.authorization.k8s.io";
    let bind = |role: &str| {
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": NAMESPACE},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "User", "apiGroup": group, "name": "planner"}],
        })
    };
    let roles = rbac::user_roles().into_iter().map(|role| json!(role));
    manifests::create(&test.lab.client(), &roles.chain([bind("machine-edit"), bind("edit")]).collect::<Vec<_>>())
        .await?;
    let mut kubeconfig = Kubeconfig::read_from(test.lab.kubeconfig())?;
    for user in &mut kubeconfig.auth_infos {
        user.auth_info.get_or_insert_default().impersonate = Some("planner".to_owned());
    }
    let file = test.lab.folder().join("planner.kubeconfig");
    std::fs::write(&file, serde_json::to_string(&kubeconfig)?)?;
    let arguments = ["--kubeconfig", file.to_str().context("the path is not UTF-8")?];
    let (success, text) = test.run_plan_command(&machine("web", &spec), &arguments).await?;
    ensure!(success && text.contains("nothing to write"), "{text}");
    for what in ["cannot check storageclasses", "cannot check NetworkAttachmentDefinition net"] {
        ensure!(text.contains(what), "{what:?} is missing in {text}");
    }
    let (success, text) = test.run_plan_command(&machine("new", &spec), &arguments).await?;
    ensure!(success && text.contains("+ create  VirtualMachine predict-plan/new"), "{text}");
    Ok(())
}
