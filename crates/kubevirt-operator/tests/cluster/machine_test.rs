//! The fixture of most tests: a namespace on a shared lab, and an operator that watches this namespace only.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, future::BoxFuture, stream};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{core::v1::Secret, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use vitivirt_api::machine::{Machine, MachinePhase, NetworkConfiguration, condition_type, crds};
use vitivirt_lab::{Extension, Lab, OperatorProcess, Record, harness::SharedLabs, manifests};
use vitivirt_runtime::lease::message;

use crate::{
    poll::poll_until,
    replica::{ACCOUNT, PATIENCE, grant_permissions, start_with_environment},
};

/// Enough for a Machine to be created, changed, recovered or deleted on a busy lab.
pub(crate) const MACHINE_PATIENCE: Duration = Duration::from_secs(120);

/// Makes the operator reconcile often. Some recoveries trigger no watch event: the deletion of an admission policy, or
/// of an object that another owner had created.
pub(crate) const FAST_RECONCILE: (&str, &str) = ("RECONCILE_INTERVAL", "2s");

pub(crate) struct MachineTest {
    pub(crate) lab: Arc<Lab>,
    pub(crate) namespace: &'static str,
    pub(crate) operator: OperatorProcess,
    environment: Vec<(&'static str, &'static str)>,
    through_proxy: bool,
}

impl MachineTest {
    pub(crate) async fn start(labs: &SharedLabs, namespace: &'static str) -> Result<Self> {
        Self::start_with_environment(labs, namespace, vec![]).await
    }

    pub(crate) async fn start_with_environment(
        labs: &SharedLabs,
        namespace: &'static str,
        environment: Vec<(&'static str, &'static str)>,
    ) -> Result<Self> {
        let lab = Box::pin(labs.reference()).await?;
        lab.install(Extension::Multus).await?;
        grant_permissions(&lab, namespace).await?;
        Self::start_operator(lab, namespace, environment, false).await
    }

    pub(crate) async fn start_on(lab: Arc<Lab>, namespace: &'static str) -> Result<Self> {
        grant_permissions(&lab, namespace).await?;
        Self::start_operator(lab, namespace, vec![], false).await
    }

    /// Starts an operator whose requests go through the lab's proxy, so that rules can make them fail.
    pub(crate) async fn start_behind_proxy(labs: &SharedLabs, namespace: &'static str) -> Result<Self> {
        let lab = Box::pin(labs.reference()).await?;
        grant_permissions(&lab, namespace).await?;
        Self::start_operator(lab, namespace, vec![], true).await
    }

    /// Grants nothing: the operator has the permissions that the namespace's service account already has.
    pub(crate) async fn start_with_existing_permissions(lab: Arc<Lab>, namespace: &'static str) -> Result<Self> {
        Self::start_operator(lab, namespace, vec![], false).await
    }

    async fn start_operator(
        lab: Arc<Lab>,
        namespace: &'static str,
        mut environment: Vec<(&'static str, &'static str)>,
        through_proxy: bool,
    ) -> Result<Self> {
        create_crds(&lab).await?;
        environment.push(("WATCH_NAMESPACE", namespace));
        let operator = Self::start_leader(&lab, namespace, &environment, through_proxy).await?;
        Ok(MachineTest { lab, namespace, operator, environment, through_proxy })
    }

    async fn start_leader(
        lab: &Lab,
        namespace: &str,
        environment: &[(&str, &str)],
        through_proxy: bool,
    ) -> Result<OperatorProcess> {
        let operator = start_with_environment(lab, namespace, through_proxy, environment).await?;
        operator.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        Ok(operator)
    }

    /// Replaces the operator's process.
    pub(crate) async fn restart_operator(&mut self) -> Result<()> {
        self.stop_operator().await?;
        self.start_operator_again().await
    }

    pub(crate) async fn stop_operator(&mut self) -> Result<()> {
        self.operator.signal(Signal::SIGTERM)?;
        let status = self.operator.wait(PATIENCE).await?;
        ensure!(status.success(), "{status}");
        Ok(())
    }

    pub(crate) async fn start_operator_again(&mut self) -> Result<()> {
        self.operator = Self::start_leader(&self.lab, self.namespace, &self.environment, self.through_proxy).await?;
        self.wait_until_ready().await
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.lab.client(), self.namespace)
    }

    pub(crate) fn machines(&self) -> Api<Machine> {
        self.api()
    }

    pub(crate) fn dynamic_api(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), self.namespace, resource)
    }

    pub(crate) fn vms(&self) -> Api<DynamicObject> {
        self.dynamic_api(&vitivirt_api::resources::virtual_machine_resource())
    }

    pub(crate) fn vmis(&self) -> Api<DynamicObject> {
        self.dynamic_api(&vitivirt_api::resources::virtual_machine_instance_resource())
    }

    pub(crate) fn nads(&self) -> Api<DynamicObject> {
        self.dynamic_api(&vitivirt_api::resources::network_attachment_resource())
    }

    /// The sorted names of all objects of a kind.
    pub(crate) async fn object_names<K>(&self) -> Result<Vec<String>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let list = self.api::<K>().list(&ListParams::default()).await?;
        let mut names: Vec<String> = list.items.iter().map(ResourceExt::name_any).collect();
        names.sort();
        Ok(names)
    }

    /// Creates objects from YAML, with the test's namespace in place of `default`.
    pub(crate) async fn create_yaml(&self, yaml: &str) -> Result<()> {
        self.lab.create(&yaml.replace("namespace: default", &format!("namespace: {}", self.namespace))).await
    }

    /// Creates an object in the test's namespace.
    pub(crate) async fn create_json(&self, object: &Value) -> Result<()> {
        manifests::create(&self.lab.client(), &[in_namespace(object, self.namespace)]).await
    }

    /// Creates a StorageClass of the lab's provisioner that binds PVCs immediately.
    pub(crate) async fn create_storage_class(&self, name: &str) -> Result<()> {
        create_storage_class(&self.lab, name).await
    }

    /// Creates a NetworkConfiguration with each of these names, each with its own VLAN.
    pub(crate) async fn create_networks(&self, names: &[&str]) -> Result<()> {
        for (vlan, name) in (100..).zip(names) {
            let network = json!({
                "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration", "metadata": {"name": name},
                "spec": {"bridge": "br1", "vlan": vlan},
            });
            self.create_json(&network).await?;
        }
        Ok(())
    }

    pub(crate) async fn create_secret(&self, name: &str, key: &str, text: &str) -> Result<()> {
        let secret =
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {key: text}});
        self.create_json(&secret).await
    }

    /// Merges these fields into a Machine's spec.
    pub(crate) async fn edit_spec(&self, name: &str, spec: &Value) -> Result<()> {
        self.machines().patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await?;
        Ok(())
    }

    pub(crate) async fn wait_for(
        &self,
        name: &str,
        what: &str,
        condition: impl Fn(&Machine) -> bool + Send + Sync,
    ) -> Result<Machine> {
        self.wait_for_within(PATIENCE, name, what, condition).await
    }

    pub(crate) async fn wait_for_within(
        &self,
        timeout: Duration,
        name: &str,
        what: &str,
        condition: impl Fn(&Machine) -> bool + Send + Sync,
    ) -> Result<Machine> {
        let holds = |machine: Option<&Machine>| machine.is_some_and(&condition);
        let found = self.lab.wait(what, timeout, self.machines(), name, holds).await;
        found
            .with_context(|| format!("waiting for {what} of Machine {name}; {}", self.operator_log()))?
            .with_context(|| format!("Machine {name} not found"))
    }

    /// Waits until the condition Ready has this reason.
    pub(crate) async fn wait_for_reason(&self, name: &str, expected: &'static str) -> Result<Machine> {
        self.wait_for(name, expected, |machine| ready_reason(machine) == Some(expected)).await
    }

    pub(crate) async fn wait_until_running(&self, name: &str) -> Result<Machine> {
        let is_running =
            |machine: &Machine| phase(machine) == Some("Running") && ready_reason(machine) == Some("Running");
        self.wait_for_within(MACHINE_PATIENCE, name, "Running", is_running).await
    }

    /// Waits until the status is about the Machine's present spec.
    pub(crate) async fn wait_until_observed(&self, name: &str) -> Result<Machine> {
        self.wait_for(name, "a reconcile of the present spec", is_observed).await
    }

    /// Deletes a Machine and waits until it no longer exists.
    pub(crate) async fn delete_machine(&self, name: &str) -> Result<()> {
        self.machines().delete(name, &DeleteParams::default()).await?;
        self.wait_until_deleted(name).await
    }

    pub(crate) async fn wait_until_deleted(&self, name: &str) -> Result<()> {
        let deleted = self.wait_until_absent(self.machines(), name).await;
        deleted.with_context(|| self.operator_log())
    }

    /// Waits until an object of any kind does not exist.
    pub(crate) async fn wait_until_absent<K>(&self, api: Api<K>, name: &str) -> Result<()>
    where
        K: Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug + Send + 'static,
    {
        let is_absent = |object: Option<&K>| object.is_none();
        self.lab.wait("the deletion", MACHINE_PATIENCE, api, name, is_absent).await.map(|_| ())
    }

    /// Waits until the Secret's key `userdata` has these contents.
    pub(crate) async fn wait_for_user_data(&self, secret: &str, expected: &str) -> Result<Option<Secret>> {
        let is_expected = |secret: Option<&Secret>| {
            let data = secret.and_then(|secret| secret.data.as_ref()?.get("userdata"));
            data.is_some_and(|data| data.0 == expected.as_bytes())
        };
        let what = format!("user data {expected:?}");
        self.lab.wait(&what, MACHINE_PATIENCE, self.api::<Secret>(), secret, is_expected).await
    }

    /// Deletes the VMI, if there is one, and waits until another one runs.
    pub(crate) async fn restart_vmi(&self, name: &str) -> Result<()> {
        let before = self.vmis().get_opt(name).await?.and_then(|vmi| vmi.uid());
        match self.vmis().delete(name, &DeleteParams::default()).await.map(|_| ()) {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            result => result?,
        }
        let is_another = |vmi: Option<&DynamicObject>| {
            vmi.is_some_and(|vmi| {
                vmi.uid() != before && vmi.data.pointer("/status/phase").is_some_and(|phase| phase == "Running")
            })
        };
        self.lab.wait("another running VMI", PATIENCE, self.vmis(), name, is_another).await.map(|_| ())
    }

    pub(crate) async fn wait_until_ready(&self) -> Result<()> {
        let is_ready = || async { Ok(self.operator.get(8081, "/readyz").await.is_ok_and(|(status, _)| status == 200)) };
        poll_until(PATIENCE, is_ready, || format!("the operator is ready; {}", self.operator_log())).await
    }

    /// The operator's requests about Machines and their objects, without those about its Lease and events.
    pub(crate) fn operator_requests(&self) -> Result<Vec<Record>> {
        let is_counted = |record: &Record| {
            is_operator_request(record, self.namespace)
                && record.verb != "watch"
                // The operator also lists kinds that are not installed. That is not about a Machine.
                && !(record.verb == "list" && record.name.is_empty())
        };
        Ok(self.lab.audit()?.into_iter().filter(is_counted).collect())
    }

    /// The writes after the first `before` of the operator's requests.
    pub(crate) fn writes_since(&self, before: usize) -> Result<Vec<Record>> {
        Ok(self.operator_requests()?.split_off(before).into_iter().filter(Record::is_write).collect())
    }

    /// Waits until the operator is ready and has sent no request for two seconds. The sleep is the assertion: idle
    /// means that nothing happens for this time.
    pub(crate) async fn wait_until_idle(&self) -> Result<()> {
        self.wait_until_ready().await?;
        let mut before = usize::MAX;
        loop {
            let now = self.operator_requests()?.len();
            if now == before {
                return Ok(());
            }
            before = now;
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// Runs `kubevirt-operator plan` for a Machine: whether it exits with status 0, and what it prints.
    pub(crate) async fn run_plan_command(&self, machine: &Value, arguments: &[&str]) -> Result<(bool, String)> {
        let file = self.lab.folder().join(format!("{}.plan.json", self.namespace));
        std::fs::write(&file, in_namespace(machine, self.namespace).to_string())?;
        let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubevirt-operator"))
            .args(["plan".as_ref(), "-f".as_ref(), file.as_os_str()])
            .args(arguments)
            .env("KUBECONFIG", self.lab.kubeconfig())
            .output()
            .await?;
        ensure!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Waits until the metrics count an error of each of these types, which happens shortly after the status write.
    pub(crate) async fn wait_for_error_counts(&self, reasons: &[&str]) -> Result<()> {
        let is_counted = |text: &str, reason: &str| {
            let labels = format!("{{controller=\"Machine\",error_type=\"{reason}\"}} ");
            let line = format!("kubevirt_operator_reconciliation_errors_total{labels}");
            text.lines().any(|have| have.strip_prefix(&line).is_some_and(|count| count != "0"))
        };
        let are_counted = || async {
            let (_, text) = self.operator.get(8080, "/metrics").await?;
            Ok(reasons.iter().all(|reason| is_counted(&text, reason)))
        };
        poll_until(PATIENCE, are_counted, || format!("the metrics count errors of each type {reasons:?}")).await
    }

    /// Waits for an event with this reason about this Machine.
    pub(crate) async fn wait_for_event(&self, name: &str, reason: &str) -> Result<()> {
        let is_expected = |event: &Event| {
            let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
            regarding == Some(name) && event.reason.as_deref() == Some(reason)
        };
        let exists =
            || async { Ok(self.api::<Event>().list(&ListParams::default()).await?.items.iter().any(is_expected)) };
        poll_until(PATIENCE, exists, || format!("an event {reason} about Machine {name}")).await
    }

    /// Fails if the operator's process has ended, is not healthy or has panicked.
    pub(crate) async fn check_operator_is_healthy(&self) -> Result<()> {
        let (status, text) = self.operator.get(8081, "/healthz").await.context("the operator does not respond")?;
        ensure!(status == 200, "{status}: {text}");
        let log = self.operator.log_text();
        ensure!(!log.contains("panic"), "{log}");
        Ok(())
    }

    pub(crate) fn operator_log(&self) -> String {
        format!("the operator's log:\n{}", self.operator.log_text())
    }
}

/// Whether the operator of this namespace sent the request, and not about its Lease or an event.
pub(crate) fn is_operator_request(record: &Record, namespace: &str) -> bool {
    record.user == operator_user(namespace) && !["leases", "events"].contains(&record.resource.as_str())
}

pub(crate) fn operator_user(namespace: &str) -> String {
    format!("system:serviceaccount:{namespace}:{ACCOUNT}")
}

pub(crate) async fn create_storage_class(lab: &Lab, name: &str) -> Result<()> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
        "provisioner": "lab.vitistack.io/binding", "allowVolumeExpansion": true,
    });
    manifests::create(&lab.client(), &[class]).await
}

pub(crate) async fn create_crds(lab: &Lab) -> Result<()> {
    let crds: Vec<Value> = crds().iter().map(|crd| json!(crd)).collect();
    manifests::create(&lab.client(), &crds).await
}

/// Runs eight of these at a time. The first error cancels the rest.
pub(crate) async fn run_concurrently<T: Send>(futures: Vec<BoxFuture<'_, Result<T>>>) -> Result<Vec<T>> {
    stream::iter(futures).buffer_unordered(8).try_collect().await
}

pub(crate) fn machine(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": name}, "spec": spec})
}

/// A VM that no Machine owns. It does not run.
pub(crate) fn foreign_vm(name: &str) -> Value {
    let template = json!({"spec": {"domain": {"devices": {}, "memory": {"guest": "128Mi"}}}});
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": name, "labels": {"of": "another-owner"}},
        "spec": {"runStrategy": "Halted", "template": template},
    })
}

pub(crate) fn in_namespace(object: &Value, namespace: &str) -> Value {
    let mut object = object.clone();
    if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
        metadata.insert("namespace".to_owned(), namespace.into());
    }
    object
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

/// The reason of the condition Ready.
pub(crate) fn ready_reason(machine: &Machine) -> Option<&str> {
    condition(machine, condition_type::READY).map(|have| have.reason.as_str())
}

/// Fails if one of these texts is missing in the Machine's diagnosis.
pub(crate) fn check_diagnosis(machine: &Machine, expected: &[&str]) -> Result<()> {
    for text in expected {
        ensure!(diagnosis(machine).contains(text), "{text:?} is missing in {:?}", machine.status);
    }
    Ok(())
}

/// Whether the status is about the Machine's present spec.
pub(crate) fn is_observed(machine: &Machine) -> bool {
    let observed = machine.status.as_ref().and_then(|status| status.observed_generation);
    observed.is_some() && observed == machine.metadata.generation
}

/// Whether the network has the finalizer that protects it from deletion while a Machine uses it.
pub(crate) fn is_protected(network: &NetworkConfiguration) -> bool {
    network.finalizers().iter().any(|finalizer| finalizer == vitivirt_api::machine::FINALIZER_NETWORK)
}
