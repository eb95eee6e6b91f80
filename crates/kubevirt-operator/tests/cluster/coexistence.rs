//! The operator and other operators: KubeVirt and Multus that are installed later or removed, and three operators on
//! one cluster that do not write each other's objects.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject},
};
use kubevirt_operator::rbac;
use serde_json::json;
use vitivirt_lab::{
    Extension, Lab, LabOptions, OperatorProcess, OperatorProcessOptions, Record, VIRT_OPERATOR_USER, VirtOperator,
    harness::{SharedLabs, Suite},
};
use vitivirt_runtime::lease::message::ACQUIRED;

use crate::{
    lifecycle::EXAMPLE_NETWORKS,
    machine_test::{MACHINE_PATIENCE, MachineTest, diagnosis, machine, operator_user, ready_reason},
    poll::poll_until,
};

const REMOVAL_PATIENCE: Duration = Duration::from_secs(120);
/// Namespace and service account of this project's virt-operator.
const VIRT_OPERATOR: &str = "our-virt-operator";

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        machines_wait_while_kubevirt_or_multus_is_not_installed,
        operators_on_one_cluster_do_not_write_each_others_objects,
    );
}

async fn machines_wait_while_kubevirt_or_multus_is_not_installed(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Arc::new(Box::pin(Lab::start(LabOptions::default())).await?);
    let test = MachineTest::start_on(lab.clone(), "installed-later").await?;
    test.create_yaml(EXAMPLE_NETWORKS).await?;
    let networked = json!({"template": "small", "networks": [{"name": "a", "networkName": "prod-network"}]});
    test.create_json(&machine("early", &json!({"template": "small"}))).await?;
    test.create_json(&machine("networked", &networked)).await?;
    test.wait_until_ready().await?;
    for (name, expected) in [("early", "KubeVirtApiError"), ("networked", "MultusNotInstalled")] {
        let waiting = test.wait_for(name, "a reason", |machine| ready_reason(machine).is_some()).await?;
        ensure!(ready_reason(&waiting) == Some(expected), "{:?}", waiting.status);
    }
    Box::pin(lab.create_virt_operator(&VirtOperator::reference())).await?;
    Box::pin(lab.deploy_kubevirt(None)).await?;
    test.wait_until_running("early").await?;
    lab.install(Extension::Multus).await?;
    test.wait_until_running("networked").await?;

    let kubevirts: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), "kubevirt", &vitivirt_lab::kubevirt_resource("KubeVirt"));
    kubevirts.delete("kubevirt", &DeleteParams::default()).await?;
    lab.wait("KubeVirt's removal", REMOVAL_PATIENCE, kubevirts, "kubevirt", |kubevirt| kubevirt.is_none()).await?;
    for name in ["early", "networked"] {
        let left = test.wait_for_reason(name, "KubeVirtApiError").await?;
        ensure!(diagnosis(&left).contains("KubeVirt is not installed"), "{:?}", left.status);
    }
    Box::pin(lab.deploy_kubevirt(None)).await?;
    for name in ["early", "networked"] {
        test.wait_until_running(name).await?;
    }
    test.check_operator_is_healthy().await
}

async fn operators_on_one_cluster_do_not_write_each_others_objects(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "neighbours")).await?;
    let virt_operator = start_second_virt_operator(&test.lab).await?;
    test.create_networks(&["net"]).await?;
    let spec = json!({
        "template": "small",
        "disks": [{"name": "kept", "size": "1Gi", "onDelete": "Retain"}],
        "networks": [{"name": "a", "networkName": "net"}],
        "cloudInit": {"userData": "#cloud-config\n"},
    });
    test.create_json(&machine("own", &spec)).await?;
    test.wait_until_running("own").await?;
    test.edit_spec("own", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("own", "Stopped").await?;
    test.delete_machine("own").await?;

    let writes: Vec<Record> = test.lab.audit()?.into_iter().filter(Record::is_write).collect();
    check_machine_operator_writes(&writes, test.namespace)?;
    check_reference_operator_writes(&writes)?;
    check_virt_operator_writes(&writes)?;
    drop(virt_operator);
    Ok(())
}

fn check_machine_operator_writes(writes: &[Record], namespace: &str) -> Result<()> {
    let user = operator_user(namespace);
    let own: Vec<_> = writes.iter().filter(|record| record.user == user).collect();
    ensure!(own.len() > 8, "kubevirt-operator wrote only {} objects", own.len());
    let strays: Vec<_> = own.iter().filter(|record| !is_write_for_test_machine(record, namespace)).collect();
    ensure!(strays.is_empty(), "kubevirt-operator wrote {strays:#?}");
    // The replicas of all tests on this lab: none may write KubeVirt's own objects.
    let strays: Vec<_> = writes
        .iter()
        .filter(|record| record.user_agent.starts_with("kubevirt-operator/"))
        .filter(|record| record.namespace == "kubevirt" || record.namespace.is_empty())
        .collect();
    ensure!(strays.is_empty(), "a kubevirt-operator wrote {strays:#?}");
    Ok(())
}

fn check_reference_operator_writes(writes: &[Record]) -> Result<()> {
    let own: Vec<_> = writes.iter().filter(|record| record.user == VIRT_OPERATOR_USER).collect();
    ensure!(own.len() > 50, "the reference operator wrote only {} objects", own.len());
    let strays: Vec<_> = own.iter().filter(|record| is_about_machines(record)).collect();
    ensure!(strays.is_empty(), "the reference operator wrote {strays:#?}");
    Ok(())
}

/// This project's virt-operator has all permissions, and the KubeVirt resource belongs to the reference operator. So it
/// writes nothing but its Lease and events.
fn check_virt_operator_writes(writes: &[Record]) -> Result<()> {
    let user = format!("system:serviceaccount:{VIRT_OPERATOR}:{VIRT_OPERATOR}");
    let own: Vec<_> = writes.iter().filter(|record| record.user == user).collect();
    ensure!(!own.is_empty(), "virt-operator did not write its Lease");
    let is_expected =
        |record: &Record| record.namespace == VIRT_OPERATOR && ["leases", "events"].contains(&record.resource.as_str());
    let strays: Vec<_> = own.iter().filter(|record| !is_expected(record)).collect();
    ensure!(strays.is_empty(), "virt-operator wrote {strays:#?}");
    Ok(())
}

/// Starts this project's virt-operator in its own namespace with all permissions, and waits until it is ready and
/// leads.
async fn start_second_virt_operator(lab: &Lab) -> Result<OperatorProcess> {
    let file = PathBuf::from(env!("CARGO_BIN_EXE_kubevirt-operator")).with_file_name("virt-operator");
    ensure!(file.exists(), "virt-operator is not built; run `cargo build --workspace` first");
    let everything = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    lab.grant(VIRT_OPERATOR, VIRT_OPERATOR, &everything).await?;
    lab.create(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: {VIRT_OPERATOR}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}}
subjects: [{{kind: ServiceAccount, name: {VIRT_OPERATOR}, namespace: {VIRT_OPERATOR}}}]
"
    ))
    .await?;
    let image = ("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned());
    let program = lab
        .run(OperatorProcessOptions {
            file,
            namespace: VIRT_OPERATOR.to_owned(),
            service_account: VIRT_OPERATOR.to_owned(),
            arguments: ["--listen", "{address}"].map(str::to_owned).to_vec(),
            environment: vec![("NAMESPACE".to_owned(), VIRT_OPERATOR.to_owned()), image],
            through_proxy: false,
        })
        .await?;
    let is_ready = || async { Ok(program.get_over_tls(8186, "/readyz").await.is_ok_and(|(status, _)| status == 200)) };
    poll_until(MACHINE_PATIENCE, is_ready, || "virt-operator is ready".to_owned()).await?;
    program.wait_for_message(ACQUIRED, MACHINE_PATIENCE).await?;
    Ok(program)
}

/// Whether the operator may write this for a Machine `own` on a network `net`.
fn is_write_for_test_machine(record: &Record, namespace: &str) -> bool {
    let expected: &[&str] = match record.resource.as_str() {
        "machines" | "virtualmachines" => &["own"],
        "networkconfigurations" | "network-attachment-definitions" => &["net"],
        "persistentvolumeclaims" => &["own-root", "own-kept"],
        "secrets" => &["own-cloudinit"],
        "leases" => &["kubevirt-operator"],
        // The names of events are not predictable.
        "events" => return record.namespace == namespace,
        _ => return false,
    };
    // The audit log has no name for a create request: it is in the body only.
    let is_expected = expected.contains(&record.name.as_str()) || (record.verb == "create" && record.name.is_empty());
    record.namespace == namespace && is_expected
}

/// Whether this is about an object of kubevirt-operator, of its installation or of its users.
fn is_about_machines(record: &Record) -> bool {
    let installed = [rbac::MANAGER_ROLE, rbac::LEASE_ROLE, rbac::LEASE_BINDING];
    record.group.ends_with("vitistack.io")
        || record.name.ends_with(".vitistack.io")
        || installed.contains(&record.name.as_str())
        || record.name.starts_with(rbac::MANAGER_BINDING)
        || !(record.namespace.is_empty() || record.namespace.starts_with("kube") || record.namespace == "default")
}
