//! Objects that a cluster rejects: too large, of an unsupported machine type, over quota, or with a name that is in
//! use. The Machine reports the cause and recovers, and the operator changes no object of another owner.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Secret},
    events::v1::Event,
};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    PodFate, PodRule,
    harness::{SharedLabs, Suite},
};

use crate::{
    machine_test::{FAST_RECONCILE, MACHINE_PATIENCE, MachineTest, diagnosis, machine, ready_reason},
    poll::poll_until,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_machine_larger_than_any_node_is_reported_and_recovers,
        a_machine_type_rejected_by_kubevirt_reports_the_kubevirt_setting,
        a_machine_over_quota_reports_the_quota_and_recovers,
        pvcs_and_secrets_of_other_owners_are_not_changed,
        user_data_appears_only_in_its_secret,
        a_guest_whose_pod_does_not_start_reports_the_cause,
    );
}

async fn a_machine_larger_than_any_node_is_reported_and_recovers(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "too-big")).await?;
    let big = json!({"template": "small", "resources": {"memory": {"size": "4000Gi"}}});
    test.create_json(&machine("big", &big)).await?;
    let refused = test.wait_for_reason("big", "InsufficientResources").await?;
    ensure!(diagnosis(&refused).contains("request fewer resources"), "{:?}", refused.status);
    test.wait_for_error_counts(&["InsufficientResources"]).await?;
    test.edit_spec("big", &json!({"resources": {"memory": {"size": "1Gi"}}})).await?;
    test.wait_until_running("big").await.map(|_| ())
}

async fn a_machine_type_rejected_by_kubevirt_reports_the_kubevirt_setting(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "machine-type")).await?;
    let old = json!({"template": "small", "domain": {"machine": {"type": "pc-i440fx"}}});
    test.create_json(&machine("old", &old)).await?;
    let refused = test.wait_for_reason("old", "KubeVirtApiError").await?;
    ensure!(diagnosis(&refused).contains("emulatedMachines"), "{:?}", refused.status);
    test.wait_for_error_counts(&["KubeVirtApiError"]).await?;
    test.edit_spec("old", &json!({"domain": {"machine": {"type": "pc-q35"}}})).await?;
    test.wait_until_running("old").await.map(|_| ())
}

async fn a_machine_over_quota_reports_the_quota_and_recovers(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "quota")).await?;
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"},
        "spec": {"hard": {"persistentvolumeclaims": "0"}},
    });
    test.create_json(&quota).await?;
    let quotas = test.api::<ResourceQuota>();
    let is_in_force = |quota: Option<&ResourceQuota>| {
        quota.is_some_and(|quota| quota.status.as_ref().is_some_and(|status| status.hard.is_some()))
    };
    test.lab.wait("a quota in force", MACHINE_PATIENCE, quotas.clone(), "tight", is_in_force).await?;
    test.create_json(&machine("many", &json!({"template": "small"}))).await?;
    let refused = test.wait_for_reason("many", "QuotaExceeded").await?;
    ensure!(diagnosis(&refused).contains("exceeded quota"), "{:?}", refused.status);
    test.wait_for_error_counts(&["QuotaExceeded"]).await?;
    quotas.delete("tight", &DeleteParams::default()).await?;
    test.wait_until_running("many").await.map(|_| ())
}

async fn pvcs_and_secrets_of_other_owners_are_not_changed(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "foreign-children")).await?;
    let pvc = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "a-root"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    test.create_json(&pvc).await?;
    test.create_secret("b-cloudinit", "mine", "yes").await?;
    test.create_json(&machine("a", &json!({"template": "small"}))).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("b", &spec)).await?;
    for name in ["a", "b"] {
        let refused = test.wait_for_reason(name, "NameTaken").await?;
        ensure!(diagnosis(&refused).contains("does not change it"), "{:?}", refused.status);
        test.edit_spec(name, &json!({"resources": {"cpu": {"cores": 2}}})).await?;
        test.delete_machine(name).await?;
    }
    let pvc = test.api::<PersistentVolumeClaim>().get("a-root").await?;
    ensure!(pvc.metadata.labels.is_none() && pvc.metadata.deletion_timestamp.is_none(), "{pvc:?}");
    let secret = test.api::<Secret>().get("b-cloudinit").await?;
    ensure!(secret.metadata.labels.is_none(), "the operator labelled the Secret");
    ensure!(secret.data.is_some_and(|data| data.len() == 1), "the operator wrote to the Secret");
    Ok(())
}

async fn a_guest_whose_pod_does_not_start_reports_the_cause(labs: Arc<SharedLabs>) -> Result<()> {
    const IMAGE: &str = "quay.io/example/pod-does-not-start";
    let test = Box::pin(MachineTest::start_with_environment(&labs, "stuck-pod", vec![FAST_RECONCILE])).await?;
    let rule = PodRule { image_contains: IMAGE.to_owned(), fate: PodFate::NeverReady };
    test.lab.set_pods(|pods| pods.rules.push(rule));
    let disk = json!({"name": "root", "source": {"containerDisk": {"image": IMAGE}}});
    test.create_json(&machine("stuck", &json!({"template": "small", "disks": [disk]}))).await?;
    let pods = test.api::<Pod>();
    let of_machine = ListParams::default().labels("vm.kubevirt.io/name=stuck");
    let exists = || async { Ok(!pods.list(&of_machine).await?.items.is_empty()) };
    poll_until(MACHINE_PATIENCE, exists, || "the pod of the guest exists".to_owned()).await?;
    let pod = pods.list(&of_machine).await?.items.pop().context("no pod")?;
    // What the attach-detach controller reports after the loss of a node.
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "stuck.multi-attach"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "stuck-pod", "name": pod.name_any(), "uid": pod.uid()},
        "reason": "FailedAttachVolume", "message": "Multi-Attach error for volume \"pvc-1\"", "type": "Warning",
        "source": {"component": "attachdetach-controller"}, "lastTimestamp": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    test.create_json(&event).await?;
    let stuck = test
        .wait_for_within(MACHINE_PATIENCE, "stuck", "PodNotStarted", |machine| {
            ready_reason(machine) == Some("PodNotStarted")
        })
        .await?;
    ensure!(
        diagnosis(&stuck).contains("Multi-Attach error") && diagnosis(&stuck).contains("out-of-service"),
        "{:?}",
        stuck.status
    );
    test.lab.set_pods(|pods| pods.rules.retain(|rule| rule.image_contains != IMAGE));
    test.delete_machine("stuck").await
}

async fn user_data_appears_only_in_its_secret(labs: Arc<SharedLabs>) -> Result<()> {
    const CANARY: &str = "canary-7f3a9";
    let test = Box::pin(MachineTest::start(&labs, "canary")).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": format!("#cloud-config\npassword: {CANARY}\n")}});
    test.create_json(&machine("singer", &spec)).await?;
    let machine = test.wait_until_running("singer").await?;
    let secret = test.api::<Secret>().get("singer-cloudinit").await?;
    let data = secret.data.context("the Secret has no data")?;
    let holds_canary = data.values().any(|value| String::from_utf8_lossy(&value.0).contains(CANARY));
    ensure!(holds_canary, "the user data is not in the Secret");
    let all = ListParams::default();
    let (_, metrics) = test.operator.get(8080, "/metrics").await?;
    let elsewhere: Vec<(&str, Value)> = vec![
        ("the Machine's status", json!(machine.status)),
        ("a VM", json!(test.vms().list(&all).await?.items)),
        ("a VMI", json!(test.vmis().list(&all).await?.items)),
        ("a PVC", json!(test.api::<PersistentVolumeClaim>().list(&all).await?.items)),
        ("a pod", json!(test.api::<Pod>().list(&all).await?.items)),
        ("an event", json!(test.api::<Event>().list(&all).await?.items)),
        ("the metrics", json!(metrics)),
        ("the log", json!(test.operator.log_text())),
    ];
    for (place, text) in elsewhere {
        ensure!(!text.to_string().contains(CANARY), "{place} contains user data");
    }
    Ok(())
}
