//! The operator beside others: KubeVirt and Multus that come late and go again, and KubeVirt's own operator and ours, with
//! which it shares a cluster and not a single object.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::Api;
use kube::api::{DeleteParams, DynamicObject};
use kubevirt_operator::rbac;
use serde_json::json;
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Extension, Lab, LabOptions, OperatorProcess, OperatorProcessOptions, Record, VirtOperator};

use crate::replica::ACCOUNT;
use crate::world::{World, diagnosis, machine, reason};

const RUNNING: Duration = Duration::from_secs(90);
const REMOVED: Duration = Duration::from_secs(120);
const NETWORKS: &str = include_str!("../../../../examples/networks.yaml");
/// KubeVirt's own operator.
const REFERENCE: &str = "system:serviceaccount:kubevirt:kubevirt-operator";

pub(crate) fn add(suite: &mut Suite) {
    suite.test("kubevirt_and_multus_may_come_later_and_go_again", |_| async move {
        let lab = Arc::new(Box::pin(Lab::start(LabOptions::default())).await?);
        let world = World::begin_on(lab.clone(), "comes-later").await?;
        world.create(NETWORKS).await?;
        let networked = json!({"template": "small", "networks": [{"name": "a", "networkName": "prod-network"}]});
        world.create_json(&machine("early", &json!({"template": "small"}))).await?;
        world.create_json(&machine("networked", &networked)).await?;
        world.ready().await?;
        for (name, expected) in [("early", "KubeVirtApiError"), ("networked", "MultusNotInstalled")] {
            let waiting = world.until(name, "the explanation", |machine| reason(machine).is_some()).await?;
            ensure!(reason(&waiting) == Some(expected), "{:?}", waiting.status);
        }
        Box::pin(lab.create_virt_operator(&VirtOperator::reference())).await?;
        Box::pin(lab.deploy_kubevirt(None)).await?;
        world.running("early", RUNNING).await?;
        lab.install(Extension::Multus).await?;
        world.running("networked", RUNNING).await?;

        let kubevirts: Api<DynamicObject> =
            Api::namespaced_with(lab.client(), "kubevirt", &vitivirt_lab::kubevirt_resource("KubeVirt"));
        kubevirts.delete("kubevirt", &DeleteParams::default()).await?;
        lab.wait("KubeVirt's removal", REMOVED, kubevirts, "kubevirt", |kubevirt| kubevirt.is_none()).await?;
        for name in ["early", "networked"] {
            let left = world.expect(name, "KubeVirtApiError").await?;
            ensure!(diagnosis(&left).contains("KubeVirt is not installed"), "{:?}", left.status);
        }
        Box::pin(lab.deploy_kubevirt(None)).await?;
        for name in ["early", "networked"] {
            world.running(name, RUNNING).await?;
        }
        world.lives_on().await
    });

    suite.test("three_operators_share_a_cluster_and_no_object", |labs| async move {
        let world = Box::pin(World::begin(&labs, "neighbours")).await?;
        let virt_operator = beside_the_reference(&world.lab).await?;
        world.networks(&["net"]).await?;
        let spec = json!({
            "template": "small",
            "disks": [{"name": "kept", "size": "1Gi", "onDelete": "Retain"}],
            "networks": [{"name": "a", "networkName": "net"}],
            "cloudInit": {"userData": "#cloud-config\n"},
        });
        world.create_json(&machine("own", &spec)).await?;
        world.running("own", RUNNING).await?;
        world.edit("own", &json!({"powerState": "Stopped"})).await?;
        world.expect("own", "Stopped").await?;
        world.delete("own").await?;

        let records = world.lab.audit()?;
        let writes = || records.iter().filter(|record| record.is_write());
        let ours = format!("system:serviceaccount:{}:{ACCOUNT}", world.namespace);
        let strays: Vec<_> =
            writes().filter(|record| record.user == ours && !is_own(record, world.namespace)).collect();
        ensure!(strays.is_empty(), "the Machine operator wrote {strays:#?}");
        ensure!(writes().filter(|record| record.user == ours).count() > 8, "it did something");
        // Every replica of every test: none has any business with what KubeVirt is made of.
        let strays: Vec<_> = writes()
            .filter(|record| record.user_agent.starts_with("kubevirt-operator/"))
            .filter(|record| record.namespace == "kubevirt" || record.namespace.is_empty())
            .collect();
        ensure!(strays.is_empty(), "a Machine operator wrote {strays:#?}");
        let strays: Vec<_> = writes().filter(|record| record.user == REFERENCE && is_of_machines(record)).collect();
        ensure!(strays.is_empty(), "KubeVirt's operator wrote {strays:#?}");
        ensure!(writes().filter(|record| record.user == REFERENCE).count() > 50, "it installed KubeVirt");
        // It may do everything, and has no business here: the KubeVirt resource belongs to the operator beside it.
        let ours = format!("system:serviceaccount:{OURS}:{OURS}");
        let aside =
            |record: &Record| record.namespace == OURS && ["leases", "events"].contains(&record.resource.as_str());
        let strays: Vec<_> = writes().filter(|record| record.user == ours && !aside(record)).collect();
        ensure!(strays.is_empty(), "our virt-operator wrote {strays:#?}");
        ensure!(writes().any(|record| record.user == ours), "it leads");
        drop(virt_operator);
        Ok(())
    });
}

const OURS: &str = "our-virt-operator";

/// Our virt-operator in a namespace of its own, with every right there is, when it knows the cluster.
async fn beside_the_reference(lab: &Lab) -> Result<OperatorProcess> {
    let file = PathBuf::from(env!("CARGO_BIN_EXE_kubevirt-operator")).with_file_name("virt-operator");
    ensure!(file.exists(), "virt-operator is not built; run `cargo build --workspace` first");
    let leases = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    lab.grant(OURS, OURS, &leases).await?;
    lab.create(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: {OURS}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}}
subjects: [{{kind: ServiceAccount, name: {OURS}, namespace: {OURS}}}]
"
    ))
    .await?;
    let image = ("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned());
    let program = lab
        .run(OperatorProcessOptions {
            file,
            namespace: OURS.to_owned(),
            service_account: OURS.to_owned(),
            arguments: ["--listen", "{address}"].map(str::to_owned).to_vec(),
            environment: vec![("NAMESPACE".to_owned(), OURS.to_owned()), image],
            through_proxy: false,
        })
        .await?;
    let ready = async {
        while !program.get_over_tls(8186, "/readyz").await.is_ok_and(|(status, _)| status == 200) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(RUNNING, ready).await.context("our virt-operator is not ready")?;
    program.wait_for_message(vitivirt_runtime::lease::message::ACQUIRED, RUNNING).await?;
    Ok(program)
}

/// What the operator may write for a Machine `own` on a network `net`.
fn is_own(record: &Record, namespace: &str) -> bool {
    let expected: &[&str] = match record.resource.as_str() {
        "machines" | "virtualmachines" => &["own"],
        "networkconfigurations" | "network-attachment-definitions" => &["net"],
        "persistentvolumeclaims" => &["own-root", "own-kept"],
        "secrets" => &["own-cloudinit"],
        "leases" => &["kubevirt-operator"],
        // Named by a number.
        "events" => return record.namespace == namespace,
        _ => return false,
    };
    // A create carries its name in the body only.
    let named = expected.contains(&record.name.as_str()) || (record.verb == "create" && record.name.is_empty());
    record.namespace == namespace && named
}

/// Anything that the Machine operator, its installation or its users' objects are made of.
fn is_of_machines(record: &Record) -> bool {
    let installed = [rbac::MANAGER_ROLE, rbac::LEASE_ROLE, rbac::LEASE_BINDING];
    record.group.ends_with("vitistack.io")
        || record.name.ends_with(".vitistack.io")
        || installed.contains(&record.name.as_str())
        || record.name.starts_with(rbac::MANAGER_BINDING)
        || !(record.namespace.is_empty() || record.namespace.starts_with("kube") || record.namespace == "default")
}

impl World {
    /// The same process as at the beginning, well, and without a panic behind it.
    pub(crate) async fn lives_on(&self) -> Result<()> {
        let (status, text) = self.program.get(8081, "/healthz").await.context("the operator is gone")?;
        ensure!(status == 200, "{status}: {text}");
        let log = self.program.log_text();
        ensure!(!log.contains("panic"), "{log}");
        Ok(())
    }
}
