//! What somebody else changes about the objects of a Machine is put back, with one write for each object.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_CLUSTER, LABEL_MACHINE, LABEL_MANAGED_BY};
use vitivirt_lab::harness::Suite;

use crate::world::{World, at_once};

const REPAIRED: Duration = Duration::from_secs(60);
const RUNNING: Duration = Duration::from_secs(120);

pub(crate) fn add(suite: &mut Suite) {
    suite.test("drift_is_repaired_with_one_write_per_object", |labs| async move {
        let world = Box::pin(World::begin(&labs, "drift")).await?;
        let drifts = drifts();
        for drift in &drifts {
            let name = drift.machine;
            world.networks(&[name]).await?;
            let spec = json!({
                "template": "small",
                "networks": [{"name": "a", "networkName": name}],
                "cloudInit": {"userData": "#cloud-config\n"},
            });
            let metadata = json!({"name": name, "labels": {LABEL_CLUSTER: "blue"}});
            let object = json!({
                "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": metadata, "spec": spec,
            });
            world.create_json(&object).await?;
        }
        for drift in &drifts {
            world.running(drift.machine, RUNNING).await?;
        }
        world.settled().await?;

        let before = world.requests()?.len();
        at_once(drifts.iter().map(|drift| world.disturb(drift).boxed()).collect()).await?;
        for drift in &drifts {
            world.running(drift.machine, RUNNING).await?;
        }
        world.settled().await?;
        let writes = world.writes_since(before)?;
        for drift in &drifts {
            let (resource, name) = (drift.resource(), drift.object_name());
            // A create that finds its own object, which lost the labels by which it is followed, is not a write.
            let about: Vec<_> = writes
                .iter()
                .filter(|record| record.resource == resource.plural && record.code != Some(409))
                .filter(|record| record.name == name)
                .collect();
            ensure!(about.len() == 1, "{}: {about:#?}", drift.machine);
        }
        let allowed = |record: &&vitivirt_lab::Record| {
            record.resource != "machines" && !drifts.iter().any(|drift| record.name == drift.object_name())
        };
        let others: Vec<_> = writes.iter().filter(allowed).collect();
        ensure!(others.is_empty(), "nobody touched these: {others:#?}");
        Ok(())
    });
}

#[derive(Clone, Copy)]
enum Of {
    VirtualMachine,
    Pvc,
    Secret,
    Attachment,
}

enum Act {
    Merge(Value),
    Delete,
}

/// One Machine, and what happens to one of its objects.
struct Drift {
    machine: &'static str,
    of: Of,
    act: Act,
}

fn drifts() -> Vec<Drift> {
    let drift = |machine, of, act| Drift { machine, of, act };
    let labels = |key: &str, value: Value| Act::Merge(json!({"metadata": {"labels": {key: value}}}));
    let spec = |spec: Value| Act::Merge(json!({"spec": spec}));
    vec![
        drift("vm-cpu", Of::VirtualMachine, spec(json!({"template": {"spec": {"domain": {"cpu": {"cores": 2}}}}}))),
        drift("vm-more", Of::VirtualMachine, spec(json!({"template": {"spec": {"terminationGracePeriodSeconds": 5}}}))),
        drift("vm-label", Of::VirtualMachine, labels(LABEL_CLUSTER, json!("red"))),
        drift("vm-unlabelled", Of::VirtualMachine, labels(LABEL_MANAGED_BY, Value::Null)),
        drift("vm-deleted", Of::VirtualMachine, Act::Delete),
        drift("claim-label", Of::Pvc, labels(LABEL_CLUSTER, json!("red"))),
        drift("claim-machine", Of::Pvc, labels(LABEL_MACHINE, json!("nobody"))),
        drift("claim-unlabelled", Of::Pvc, labels(LABEL_MANAGED_BY, Value::Null)),
        drift("secret-data", Of::Secret, Act::Merge(json!({"stringData": {"userdata": "evil", "more": "evil"}}))),
        drift("secret-label", Of::Secret, labels(LABEL_CLUSTER, json!("red"))),
        drift("secret-unlabelled", Of::Secret, labels(LABEL_MANAGED_BY, Value::Null)),
        drift("secret-deleted", Of::Secret, Act::Delete),
        drift("net-config", Of::Attachment, spec(json!({"config": "{}"}))),
        drift("net-unlabelled", Of::Attachment, labels(LABEL_MANAGED_BY, Value::Null)),
        drift("net-deleted", Of::Attachment, Act::Delete),
    ]
}

impl Drift {
    fn resource(&self) -> ApiResource {
        match self.of {
            Of::VirtualMachine => vitivirt_api::resources::virtual_machine_resource(),
            Of::Pvc => ApiResource::erase::<PersistentVolumeClaim>(&()),
            Of::Secret => ApiResource::erase::<Secret>(&()),
            Of::Attachment => vitivirt_api::resources::network_attachment_resource(),
        }
    }

    fn object_name(&self) -> String {
        match self.of {
            Of::VirtualMachine | Of::Attachment => self.machine.to_owned(),
            Of::Pvc => format!("{}-root", self.machine),
            Of::Secret => format!("{}-cloudinit", self.machine),
        }
    }
}

impl World {
    /// Returns when the object is again as it was.
    async fn disturb(&self, drift: &Drift) -> Result<()> {
        let (name, resource) = (drift.object_name(), drift.resource());
        let api: Api<DynamicObject> = Api::namespaced_with(self.lab.client(), self.namespace, &resource);
        let before = api.get(&name).await?;
        match &drift.act {
            Act::Merge(change) => {
                let after = api.patch(&name, &PatchParams::default(), &Patch::Merge(change)).await?;
                ensure!(comparable_spec(&after) != comparable_spec(&before), "nothing was changed");
            }
            Act::Delete => _ = api.delete(&name, &DeleteParams::default()).await?,
        }
        let is_back = |object: Option<&DynamicObject>| {
            object.is_some_and(|object| {
                object.metadata.deletion_timestamp.is_none() && comparable_spec(object) == comparable_spec(&before)
            })
        };
        let repaired = self.lab.wait("the repair", REPAIRED, api, &name, is_back).await.map(|_| ());
        repaired.with_context(|| format!("{}; the operator's log:\n{}", drift.machine, self.program.log_text()))
    }
}

/// What somebody may have changed.
fn comparable_spec(object: &DynamicObject) -> Value {
    json!({"labels": object.labels(), "spec": object.data.get("spec"), "data": object.data.get("data")})
}
