//! An installation whose KubeVirt resource is edited, and its comparison with a fresh installation.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::sleep;
use vitivirt_snapshot::{Comparison, Snapshot, compare};

use crate::{
    Extension, Lab, LabOptions, Record,
    kubevirt::{NAMESPACE, VIRT_OPERATOR_USER, VirtOperator, kubevirt_resource},
};

/// How long an edit may take. It may restart every pod.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The namespaces in which a KubeVirt resource may expect the monitoring stack. Each has its service account.
const MONITORING: [&str; 2] = ["monitoring", "observability"];
/// A namespace for ServiceMonitors only.
const MONITORS: &str = "monitors";
/// In this time a new leader has reconciled what it found.
const QUIET: Duration = Duration::from_secs(3);

/// One installation in its own lab, on a cluster with a monitoring stack.
pub struct EditedInstallation {
    pub lab: Lab,
    operator: VirtOperator,
}

impl EditedInstallation {
    /// Installs the first KubeVirt resource.
    pub async fn start(operator: VirtOperator, spec: &Value) -> Result<Self> {
        let lab = Lab::start(LabOptions { extensions: vec![Extension::Monitoring], ..LabOptions::default() }).await?;
        for namespace in MONITORING.iter().chain([&MONITORS]) {
            lab.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}).to_string())
                .await?;
        }
        for namespace in MONITORING {
            let metadata = json!({"name": "prometheus-k8s", "namespace": namespace});
            lab.create(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}).to_string())
                .await?;
        }
        lab.create_virt_operator(&operator).await?;
        lab.wait_for_virt_operator(TIMEOUT).await?;
        let kubevirt = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
            "spec": spec,
        });
        lab.deploy_kubevirt(Some(kubevirt)).await?;
        Ok(Self { lab, operator })
    }

    pub fn kubevirts(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &kubevirt_resource("KubeVirt"))
    }

    /// Replaces the whole spec; nothing is merged. It does not wait.
    pub async fn edit(&self, spec: &Value) -> Result<()> {
        let patch = serde_json::from_value(json!([{"op": "replace", "path": "/spec", "value": spec}]))?;
        let patched = self.kubevirts().patch("kubevirt", &PatchParams::default(), &Patch::<()>::Json(patch)).await;
        patched.map(|_| ()).context("editing the KubeVirt resource")
    }

    /// Waits until the installation of the present generation is complete.
    pub async fn wait_until_complete(&self) -> Result<()> {
        let is_complete = |kubevirt: Option<&DynamicObject>| {
            kubevirt.is_some_and(|kubevirt| {
                let observed = kubevirt.data.pointer("/status/observedGeneration").and_then(Value::as_i64);
                observed.is_some() && observed == kubevirt.metadata.generation
            })
        };
        self.lab.wait("the edit is complete", TIMEOUT, self.kubevirts(), "kubevirt", is_complete).await.map(|_| ())
    }

    pub async fn snapshot(&self) -> Result<Snapshot> {
        self.lab.installed(None).await
    }

    /// Compares with a fresh installation of `spec` in a new lab.
    pub async fn compare_with_fresh(&self, spec: &Value) -> Result<Comparison> {
        let fresh = Box::pin(Self::start(self.operator.clone(), spec)).await.context("in a new lab")?;
        let expected = fresh.snapshot().await?;
        fresh.lab.stop().await?;
        Ok(compare(&expected, &self.snapshot().await?))
    }

    /// Replaces the pods of the operator, and returns what the new leader writes, except for its Lease, events and the
    /// status: nothing, if the installation is complete.
    pub async fn writes_of_a_new_leader(&self) -> Result<Vec<Record>> {
        let pods: Api<Pod> = Api::namespaced(self.lab.client(), NAMESPACE);
        let old = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
        let old: Vec<String> = old.iter().map(ResourceExt::name_any).collect();
        let before = self.lab.audit()?.len();
        for pod in &old {
            pods.delete(pod, &DeleteParams::default()).await?;
        }
        let leases: Api<Lease> = Api::namespaced(self.lab.client(), NAMESPACE);
        let lease = self
            .lab
            .wait("a new pod leads", TIMEOUT, leases, "virt-operator", |lease| {
                let holder =
                    lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref()).unwrap_or_default();
                !holder.is_empty() && !old.iter().any(|pod| holder.starts_with(pod.as_str()))
            })
            .await?;
        // The old leader may have written until then: a certificate is renewed when its time has come.
        let acquired = lease.and_then(|lease| lease.spec?.acquire_time).context("the Lease has no acquireTime")?.0;
        sleep(QUIET).await;
        let is_related = |record: &Record| {
            record.is_write()
                && record.time >= acquired
                && record.user == VIRT_OPERATOR_USER
                && !["leases", "events"].contains(&record.resource.as_str())
                && record.subresource != "status"
        };
        Ok(self.lab.audit()?.into_iter().skip(before).filter(is_related).collect())
    }
}
