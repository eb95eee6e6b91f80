//! A namespace of a test's own with an operator that looks after it alone, on a cluster that tests share.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, Resource, ResourceExt};
use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vitivirt_api::machine::{Machine, MachinePhase, condition_type, crds};
use vitivirt_lab::harness::SharedLabs;
use vitivirt_lab::{Extension, Lab, Program, manifests};
use vitivirt_runtime::lease::message;

use crate::replica::{PATIENCE, grant, start_with};

pub(crate) struct World {
    pub(crate) lab: Arc<Lab>,
    pub(crate) namespace: &'static str,
    pub(crate) program: Program,
    environment: Vec<(&'static str, &'static str)>,
    through_proxy: bool,
}

/// An operator that looks soon again at what nobody tells it of: a policy that is gone, a foreign object that is gone.
pub(crate) const IMPATIENT: (&str, &str) = ("RECONCILE_INTERVAL", "2s");

impl World {
    pub(crate) async fn begin(labs: &SharedLabs, namespace: &'static str) -> Result<Self> {
        Self::begin_with(labs, namespace, vec![]).await
    }

    pub(crate) async fn begin_with(
        labs: &SharedLabs,
        namespace: &'static str,
        environment: Vec<(&'static str, &'static str)>,
    ) -> Result<Self> {
        let lab = Box::pin(labs.reference()).await?;
        lab.install(Extension::Multus).await?;
        grant(&lab, namespace).await?;
        Self::begin_granted(lab, namespace, environment).await
    }

    pub(crate) async fn begin_on(lab: Arc<Lab>, namespace: &'static str) -> Result<Self> {
        grant(&lab, namespace).await?;
        Self::begin_granted(lab, namespace, vec![]).await
    }

    /// With an operator whose requests may be struck by rules of the lab's proxy.
    pub(crate) async fn begin_behind_proxy(labs: &SharedLabs, namespace: &'static str) -> Result<Self> {
        let lab = Box::pin(labs.reference()).await?;
        grant(&lab, namespace).await?;
        Self::start(lab, namespace, vec![], true).await
    }

    /// With whatever the account of the namespace may do.
    pub(crate) async fn begin_granted(
        lab: Arc<Lab>,
        namespace: &'static str,
        environment: Vec<(&'static str, &'static str)>,
    ) -> Result<Self> {
        Self::start(lab, namespace, environment, false).await
    }

    async fn start(
        lab: Arc<Lab>,
        namespace: &'static str,
        mut environment: Vec<(&'static str, &'static str)>,
        through_proxy: bool,
    ) -> Result<Self> {
        let definitions: Vec<Value> = crds().iter().map(|definition| json!(definition)).collect();
        manifests::create(&lab.client(), &definitions).await?;
        environment.push(("WATCH_NAMESPACE", namespace));
        let program = Self::leader(&lab, namespace, &environment, through_proxy).await?;
        Ok(World { lab, namespace, program, environment, through_proxy })
    }

    async fn leader(lab: &Lab, namespace: &str, environment: &[(&str, &str)], through_proxy: bool) -> Result<Program> {
        let program = start_with(lab, namespace, through_proxy, environment).await?;
        program.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        Ok(program)
    }

    /// Another process takes over.
    pub(crate) async fn restart(&mut self) -> Result<()> {
        self.program.signal(Signal::SIGTERM)?;
        let status = self.program.wait(PATIENCE).await?;
        ensure!(status.success(), "{status}");
        self.program = Self::leader(&self.lab, self.namespace, &self.environment, self.through_proxy).await?;
        self.ready().await
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.lab.client(), self.namespace)
    }

    pub(crate) fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.lab.client(), self.namespace)
    }

    fn dynamic(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), self.namespace, resource)
    }

    pub(crate) fn vms(&self) -> Api<DynamicObject> {
        self.dynamic(&vitivirt_api::resources::virtual_machine_resource())
    }

    pub(crate) fn vmis(&self) -> Api<DynamicObject> {
        self.dynamic(&vitivirt_api::resources::virtual_machine_instance_resource())
    }

    pub(crate) fn attachments(&self) -> Api<DynamicObject> {
        self.dynamic(&vitivirt_api::resources::network_attachment_resource())
    }

    /// The names of all objects of a kind that labels select, in order.
    pub(crate) async fn names<K>(&self, labels: &str) -> Result<Vec<String>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let list = self.api::<K>().list(&ListParams::default().labels(labels)).await?;
        let mut names: Vec<String> = list.items.iter().map(ResourceExt::name_any).collect();
        names.sort();
        Ok(names)
    }

    /// Creates what a YAML text says, here instead of in the namespace `default`.
    pub(crate) async fn create(&self, yaml: &str) -> Result<()> {
        self.lab.create(&yaml.replace("namespace: default", &format!("namespace: {}", self.namespace))).await
    }

    pub(crate) async fn create_json(&self, object: &Value) -> Result<()> {
        let mut object = object.clone();
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("namespace".to_owned(), self.namespace.into());
        }
        manifests::create(&self.lab.client(), &[object]).await
    }

    /// A class of the lab's own storage that binds at once.
    pub(crate) async fn storage_class(&self, name: &str) -> Result<()> {
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
            "provisioner": "lab.vitistack.io/binding", "allowVolumeExpansion": true,
        });
        manifests::create(&self.lab.client(), &[class]).await
    }

    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        is_so: impl Fn(&Machine) -> bool + Send + Sync,
    ) -> Result<Machine> {
        self.until_within(PATIENCE, name, what, is_so).await
    }

    pub(crate) async fn until_within(
        &self,
        patience: Duration,
        name: &str,
        what: &str,
        is_so: impl Fn(&Machine) -> bool + Send + Sync,
    ) -> Result<Machine> {
        let found = self.lab.wait(what, patience, self.machines(), name, |machine| machine.is_some_and(&is_so)).await;
        let log = || format!("waiting for {what} of {name}; the operator's log:\n{}", self.program.log_text());
        found.with_context(log)?.with_context(|| format!("{name} is gone"))
    }

    /// Waits until this is why the Machine is ready or not.
    pub(crate) async fn expect(&self, name: &str, expected: &'static str) -> Result<Machine> {
        self.until(name, expected, |machine| reason(machine) == Some(expected)).await
    }

    pub(crate) async fn running(&self, name: &str, patience: Duration) -> Result<Machine> {
        let is_running = |machine: &Machine| phase(machine) == Some("Running") && reason(machine) == Some("Running");
        self.until_within(patience, name, "Running", is_running).await
    }

    /// Deletes a Machine and waits until it is gone.
    pub(crate) async fn delete(&self, name: &str) -> Result<()> {
        self.machines().delete(name, &DeleteParams::default()).await?;
        self.gone(name).await
    }

    pub(crate) async fn gone(&self, name: &str) -> Result<()> {
        let gone =
            self.lab.wait("the end", Duration::from_secs(90), self.machines(), name, |machine| machine.is_none());
        gone.await.with_context(|| format!("the operator's log:\n{}", self.program.log_text())).map(|_| ())
    }

    pub(crate) async fn ready(&self) -> Result<()> {
        let ready = async {
            loop {
                if self.program.get(8081, "/readyz").await.is_ok_and(|(status, _)| status == 200) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let last = || format!("not ready; the operator's log:\n{}", self.program.log_text());
        tokio::time::timeout(PATIENCE, ready).await.with_context(last)
    }

    /// Requests of the operator about Machines and what is made of them; its Lease and its events aside.
    pub(crate) fn requests(&self) -> Result<Vec<vitivirt_lab::Record>> {
        let user = format!("system:serviceaccount:{}:{}", self.namespace, crate::replica::ACCOUNT);
        let counted = |record: &vitivirt_lab::Record| {
            record.user == user && record.verb != "watch" && !["leases", "events"].contains(&record.resource.as_str())
        };
        // Looking for kinds that are not installed is not about any Machine.
        let about = |record: &vitivirt_lab::Record| !(record.verb == "list" && record.name.is_empty());
        Ok(self.lab.audit()?.into_iter().filter(|record| counted(record) && about(record)).collect())
    }

    /// The writes among the requests that came after the first `before` of them.
    pub(crate) fn writes_since(&self, before: usize) -> Result<Vec<vitivirt_lab::Record>> {
        Ok(self.requests()?.split_off(before).into_iter().filter(vitivirt_lab::Record::is_write).collect())
    }

    /// Returns when another guest runs.
    pub(crate) async fn restart_guest(&self, name: &str) -> Result<()> {
        let before = self.vmis().get_opt(name).await?.and_then(|vmi| vmi.uid());
        match self.vmis().delete(name, &DeleteParams::default()).await.map(|_| ()) {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            result => result?,
        }
        let another = |vmi: Option<&DynamicObject>| {
            vmi.is_some_and(|vmi| {
                vmi.uid() != before && vmi.data.pointer("/status/phase").is_some_and(|phase| phase == "Running")
            })
        };
        self.lab.wait("another guest", PATIENCE, self.vmis(), name, another).await.map(|_| ())
    }

    /// NetworkConfigurations of these names.
    pub(crate) async fn networks(&self, names: &[&str]) -> Result<()> {
        for name in names {
            let network = json!({
                "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration", "metadata": {"name": name},
                "spec": {"bridge": "br1", "vlan": 100},
            });
            self.create_json(&network).await?;
        }
        Ok(())
    }

    /// Changes these fields of a Machine's spec.
    pub(crate) async fn edit(&self, name: &str, spec: &Value) -> Result<()> {
        self.machines().patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await?;
        Ok(())
    }

    /// Returns when nothing has been asked for two seconds.
    pub(crate) async fn settled(&self) -> Result<()> {
        self.ready().await?;
        let mut before = usize::MAX;
        loop {
            let now = self.requests()?.len();
            if now == before {
                return Ok(());
            }
            before = now;
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// What `kubevirt-operator plan` says about a Machine, and whether it finds nothing wrong.
    pub(crate) async fn plan(&self, machine: &Value, arguments: &[&str]) -> Result<(bool, String)> {
        let mut machine = machine.clone();
        if let Some(Value::Object(metadata)) = machine.get_mut("metadata") {
            metadata.insert("namespace".to_owned(), self.namespace.into());
        }
        let file = self.lab.folder().join(format!("{}.plan.json", self.namespace));
        std::fs::write(&file, machine.to_string())?;
        let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubevirt-operator"))
            .args(["plan".as_ref(), "-f".as_ref(), file.as_os_str()])
            .args(arguments)
            .env("KUBECONFIG", self.lab.kubeconfig())
            .output()
            .await?;
        ensure!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Returns when an error of each of these types has been counted: a moment after the status that tells of it.
    pub(crate) async fn counts_errors(&self, reasons: &[&str]) -> Result<()> {
        let is_counted = |text: &str, reason: &str| {
            let labels = format!("{{controller=\"Machine\",error_type=\"{reason}\"}} ");
            let line = format!("kubevirt_operator_reconciliation_errors_total{labels}");
            text.lines().any(|have| have.strip_prefix(&line).is_some_and(|count| count != "0"))
        };
        let counted = async {
            loop {
                let (_, text) = self.program.get(8080, "/metrics").await?;
                if reasons.iter().all(|reason| is_counted(&text, reason)) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, counted).await.with_context(|| format!("not all of {reasons:?} are counted"))?
    }

    /// Returns when an event with this reason is about this Machine.
    pub(crate) async fn told(&self, name: &str, reason: &str) -> Result<()> {
        let is_it = |event: &Event| {
            let about = event.regarding.as_ref().is_some_and(|about| about.name.as_deref() == Some(name));
            about && event.reason.as_deref() == Some(reason)
        };
        let told = async {
            while !self.api::<Event>().list(&ListParams::default()).await?.items.iter().any(is_it) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(PATIENCE, told).await.with_context(|| format!("no event {reason} about {name}"))?
    }

    pub(crate) async fn metrics_are_told(&self) -> Result<()> {
        let (status, text) = self.program.get(8080, "/metrics").await?;
        ensure!(status == 200, "{status}");
        for line in [
            "kubevirt_operator_machines_total{phase=\"Running\",template=\"medium\"} 2",
            "kubevirt_operator_machines_total{phase=\"Running\",template=\"small\"} 1",
            "kubevirt_operator_virtual_machines_total{status=\"Running\"} 4",
            "kubevirt_operator_storage_provisioning_duration_seconds_count{storage_class=\"fast-ssd\"} 1",
            "kubevirt_operator_machine_time_to_running_seconds_count 4",
        ] {
            ensure!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        Ok(())
    }
}

/// Runs all of these, a few at a time; the first that fails ends the rest.
pub(crate) async fn at_once<T: Send>(futures: Vec<BoxFuture<'_, Result<T>>>) -> Result<Vec<T>> {
    stream::iter(futures).buffer_unordered(8).try_collect().await
}

pub(crate) fn machine(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": name}, "spec": spec})
}

pub(crate) fn condition<'a>(machine: &'a Machine, type_: &str) -> Option<&'a Condition> {
    machine.status.as_ref()?.conditions.iter().find(|have| have.type_ == type_)
}

pub(crate) fn phase(machine: &Machine) -> Option<&'static str> {
    machine.status.as_ref()?.phase.map(MachinePhase::as_str)
}

pub(crate) fn diagnosis(machine: &Machine) -> String {
    machine.status.as_ref().and_then(|status| status.diagnosis.clone()).unwrap_or_default()
}

/// Why the Machine is ready or not.
pub(crate) fn reason(machine: &Machine) -> Option<&str> {
    condition(machine, condition_type::READY).map(|have| have.reason.as_str())
}
