//! Other clients change or delete objects of a Machine. The operator restores each object with one write.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{
    ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_CLUSTER, LABEL_MACHINE, LABEL_MANAGED_BY};
use vitivirt_lab::{
    Record,
    harness::{SharedLabs, Suite},
};

use crate::machine_test::{MachineTest, machine, run_concurrently};

const REPAIR_PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; each_drifted_object_is_restored_with_one_write);
}

async fn each_drifted_object_is_restored_with_one_write(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "drift")).await?;
    let cases = drift_cases();
    for case in &cases {
        let name = case.machine;
        test.create_networks(&[name]).await?;
        let spec = json!({
            "template": "small",
            "networks": [{"name": "a", "networkName": name}],
            "cloudInit": {"userData": "#cloud-config\n"},
        });
        let mut object = machine(name, &spec);
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("labels".to_owned(), json!({LABEL_CLUSTER: "blue"}));
        }
        test.create_json(&object).await?;
    }
    for case in &cases {
        test.wait_until_running(case.machine).await?;
    }
    test.wait_until_idle().await?;

    let before = test.operator_requests()?.len();
    run_concurrently(cases.iter().map(|case| drift_and_wait_for_repair(&test, case).boxed()).collect()).await?;
    for case in &cases {
        test.wait_until_running(case.machine).await?;
    }
    test.wait_until_idle().await?;
    let writes = test.writes_since(before)?;
    for case in &cases {
        let (resource, name) = (case.resource(), case.object_name());
        // An object that lost the label by which the operator watches it seems to be missing. The operator then tries
        // to create it: a create that fails with 409 is not counted.
        let repairs: Vec<_> = writes
            .iter()
            .filter(|record| record.resource == resource.plural && record.code != Some(409))
            .filter(|record| record.name == name)
            .collect();
        ensure!(repairs.len() == 1, "{}: {repairs:#?}", case.machine);
    }
    let is_unexpected =
        |record: &&Record| record.resource != "machines" && !cases.iter().any(|case| record.name == case.object_name());
    let others: Vec<_> = writes.iter().filter(is_unexpected).collect();
    ensure!(others.is_empty(), "the operator wrote objects that had not drifted: {others:#?}");
    Ok(())
}

#[derive(Clone, Copy)]
enum DriftedKind {
    Vm,
    Pvc,
    Secret,
    Nad,
}

enum DriftAction {
    Merge(Value),
    Delete,
}

/// A Machine, and what another client does to one of its objects.
struct DriftCase {
    machine: &'static str,
    kind: DriftedKind,
    action: DriftAction,
}

fn drift_cases() -> Vec<DriftCase> {
    use DriftAction::{Delete, Merge};
    use DriftedKind::{Nad, Pvc, Secret, Vm};
    let case = |machine, kind, action| DriftCase { machine, kind, action };
    let label = |key: &str, value: Value| Merge(json!({"metadata": {"labels": {key: value}}}));
    let spec = |spec: Value| Merge(json!({"spec": spec}));
    vec![
        case("vm-cpu", Vm, spec(json!({"template": {"spec": {"domain": {"cpu": {"cores": 2}}}}}))),
        case("vm-more", Vm, spec(json!({"template": {"spec": {"terminationGracePeriodSeconds": 5}}}))),
        // What `virtctl stop` does.
        case("vm-stopped", Vm, spec(json!({"runStrategy": "Halted"}))),
        case("vm-label", Vm, label(LABEL_CLUSTER, json!("red"))),
        case("vm-unlabelled", Vm, label(LABEL_MANAGED_BY, Value::Null)),
        case("vm-deleted", Vm, Delete),
        case("pvc-label", Pvc, label(LABEL_CLUSTER, json!("red"))),
        case("pvc-machine", Pvc, label(LABEL_MACHINE, json!("another-machine"))),
        case("pvc-unlabelled", Pvc, label(LABEL_MANAGED_BY, Value::Null)),
        case("secret-data", Secret, Merge(json!({"stringData": {"userdata": "evil", "more": "evil"}}))),
        case("secret-label", Secret, label(LABEL_CLUSTER, json!("red"))),
        case("secret-unlabelled", Secret, label(LABEL_MANAGED_BY, Value::Null)),
        case("secret-deleted", Secret, Delete),
        case("net-config", Nad, spec(json!({"config": "{}"}))),
        case("net-unlabelled", Nad, label(LABEL_MANAGED_BY, Value::Null)),
        case("net-deleted", Nad, Delete),
    ]
}

impl DriftCase {
    fn resource(&self) -> ApiResource {
        match self.kind {
            DriftedKind::Vm => vitivirt_api::resources::virtual_machine_resource(),
            DriftedKind::Pvc => ApiResource::erase::<PersistentVolumeClaim>(&()),
            DriftedKind::Secret => ApiResource::erase::<Secret>(&()),
            DriftedKind::Nad => vitivirt_api::resources::network_attachment_resource(),
        }
    }

    fn object_name(&self) -> String {
        match self.kind {
            DriftedKind::Vm | DriftedKind::Nad => self.machine.to_owned(),
            DriftedKind::Pvc => format!("{}-root", self.machine),
            DriftedKind::Secret => format!("{}-cloudinit", self.machine),
        }
    }
}

/// Changes the object as another client, and waits until it is as before.
async fn drift_and_wait_for_repair(test: &MachineTest, case: &DriftCase) -> Result<()> {
    let name = case.object_name();
    let api = test.dynamic_api(&case.resource());
    let before = api.get(&name).await?;
    match &case.action {
        DriftAction::Merge(change) => {
            let after = api.patch(&name, &PatchParams::default(), &Patch::Merge(change)).await?;
            ensure!(comparable_fields(&after) != comparable_fields(&before), "the patch changed nothing");
        }
        DriftAction::Delete => _ = api.delete(&name, &DeleteParams::default()).await?,
    }
    let is_restored = |object: Option<&DynamicObject>| {
        object.is_some_and(|object| {
            object.metadata.deletion_timestamp.is_none() && comparable_fields(object) == comparable_fields(&before)
        })
    };
    let restored = test.lab.wait("the repair", REPAIR_PATIENCE, api, &name, is_restored).await.map(|_| ());
    restored.with_context(|| format!("{}; {}", case.machine, test.operator_log()))
}

/// The fields that a drift case changes.
fn comparable_fields(object: &DynamicObject) -> Value {
    json!({"labels": object.labels(), "spec": object.data.get("spec"), "data": object.data.get("data")})
}
