//! A cluster in memory: what the API server does with our writes, and what Kubernetes does with workloads.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_api::{ObjectKey, Operation, Outcome, Plan, Report, Stop, Write};
use vitivirt_install::certificates::{Issued, KeyPair};
use vitivirt_install::{
    Cluster, DeploymentConfig, Desired, Environment, Installation, Kind, LiveObject, Objects, Observed, UpToDate,
    is_of_another_release,
};

#[path = "../parity/server.rs"]
mod server;

pub(crate) struct World {
    pub(crate) kubevirt: KubeVirt,
    pub(crate) environment: Environment,
    pub(crate) cluster: Cluster,
    pub(crate) earlier: Option<ObjectKey>,
    pub(crate) in_use: std::collections::BTreeSet<ObjectKey>,
    pub(crate) now: Timestamp,
    /// Shared until they change: definitions are big.
    pub(crate) objects: BTreeMap<(String, ObjectKey), Arc<Value>>,
    pub(crate) up_to_date: Arc<UpToDate>,
    /// Whether pods start by themselves.
    pub(crate) rolls_out: bool,
    serial: u64,
    /// Of the operator's own node.
    pub(crate) architecture: &'static str,
}

struct SomethingIssued;

impl Issued for SomethingIssued {
    fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        Some(KeyPair { certificate: secret.as_bytes().to_vec(), key: b"key".to_vec() })
    }

    fn bundle(&self, _: &str) -> Option<String> {
        Some("bundle".to_owned())
    }
}

pub(crate) struct Pass {
    pub(crate) plan: Plan,
    done: Vec<String>,
    pub(crate) outcome: Outcome,
    pub(crate) report: Report,
}

impl Pass {
    pub(crate) fn writes(&self) -> Vec<String> {
        self.done.clone()
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.outcome.written == 0
            && self.plan.is_settled()
            && self.report.events.is_empty()
            && self.report.status.as_ref().is_none_or(|status| !status.differs())
    }
}

impl World {
    pub(crate) fn new(spec: &Value) -> Self {
        let kubevirt = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt", "uid": "cr", "generation": 1},
            "spec": spec,
        });
        let variables =
            [("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4"), ("KUBEVIRT_VERSION", "v1.8.4")];
        let mut world = Self {
            kubevirt: serde_json::from_value(kubevirt).unwrap(),
            environment: Environment::from_variables(
                variables.map(|(name, value)| (name.to_owned(), value.to_owned())),
            ),
            cluster: Cluster { admission_policies: true, schedulable_nodes: 2, ..Cluster::default() },
            earlier: None,
            architecture: "amd64",
            in_use: std::collections::BTreeSet::new(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            objects: BTreeMap::new(),
            up_to_date: Arc::default(),
            rolls_out: true,
            serial: 0,
        };
        let namespace = json!({"kind": "Namespace", "metadata": {"name": "kubevirt", "labels": {"a": "b"}}});
        world.put("Namespace", ObjectKey::cluster("kubevirt"), namespace, "admin");
        world
    }

    pub(crate) fn edit(&mut self, spec: &Value) {
        self.kubevirt.spec = serde_json::from_value(spec.clone()).unwrap();
        *self.kubevirt.metadata.generation.as_mut().unwrap() += 1;
        self.up_to_date = Arc::default();
    }

    /// The operator begins anew and remembers nothing.
    pub(crate) fn restart(&mut self) {
        self.up_to_date = Arc::default();
    }

    pub(crate) fn observed(&self) -> Observed {
        let config = DeploymentConfig::new(&self.kubevirt, &self.environment);
        let objects = self.live();
        let wanted = if is_of_another_release(&self.kubevirt, &self.environment) {
            match objects.strategy(&config.id) {
                None => Desired::strategy(&self.kubevirt, config),
                Some((key, _)) => {
                    let map = Value::clone(&self.objects[&("ConfigMap".to_owned(), key.clone())]);
                    let map = serde_json::from_value(map).unwrap();
                    let yaml = |text: &str| serde_json::from_str(text).map_err(|error| error.to_string());
                    let strategy = vitivirt_install::Strategy::decode(&map, yaml).unwrap();
                    Installation::of(strategy, config, &self.kubevirt, &self.cluster)
                        .map(|installation| Desired::Installation(Arc::new(installation)))
                }
            }
        } else {
            Installation::new(&self.kubevirt, &self.environment, &self.cluster)
                .map(|installation| Desired::Installation(Arc::new(installation)))
        };
        let namespace = self.objects.get(&("Namespace".to_owned(), ObjectKey::cluster("kubevirt")));
        Observed {
            kubevirt: self.kubevirt.clone(),
            earlier: self.earlier.clone(),
            operator_namespace: "kubevirt".to_owned(),
            architecture: self.architecture,
            now: self.now,
            desired: wanted.unwrap_or_else(Desired::Invalid),
            issued: Arc::new(SomethingIssued),
            renewal: None,
            synchronization: Vec::new(),
            objects,
            namespace: namespace.map(|object| Arc::new(LiveObject::of_metadata(&metadata(object)))),
            up_to_date: self.up_to_date.clone(),
            complete: true,
            in_use: self.in_use.clone(),
        }
    }

    fn live(&self) -> Objects {
        let mut objects = Objects::default();
        for ((kind, key), object) in &self.objects {
            if let Some(kind) = Kind::named(kind) {
                let live = match kind {
                    Kind::CustomResourceDefinition => LiveObject::of_metadata(&metadata(object)),
                    _ => LiveObject::new(&metadata(object), Value::clone(object)),
                };
                objects.insert(kind, key.clone(), Arc::new(live));
            }
        }
        objects
    }

    pub(crate) fn reconcile(&mut self) -> Pass {
        let observed = self.observed();
        let plan = vitivirt_install::plan(&observed);
        let mut done = Vec::new();
        let outcome = self.apply(&plan, &mut done);
        let report = vitivirt_install::report(&observed, &plan, &outcome);
        if let Some(status) = report.status.as_ref().filter(|status| status.differs()) {
            self.kubevirt.status = Some(serde_json::from_value(status.desired.clone()).unwrap());
        }
        let answers = self.answers(&plan, &done);
        self.up_to_date = Arc::new(observed.up_to_date_after(&plan, &answers));
        self.now += k8s_openapi::jiff::SignedDuration::from_secs(1);
        Pass { plan, done, outcome, report }
    }

    /// Passes until nothing is left to do; what each of them did.
    pub(crate) fn settle(&mut self) -> Vec<Pass> {
        let mut passes = Vec::new();
        for _ in 0..12 {
            let pass = self.reconcile();
            if self.rolls_out {
                self.roll_out();
            }
            if pass.is_silent() {
                return passes;
            }
            passes.push(pass);
        }
        let last = passes.last().unwrap();
        panic!("it does not come to rest: {:?} {:?}", last.outcome.stop, last.writes());
    }

    /// What the server has made of the writes of a plan.
    fn answers(&self, plan: &Plan, done: &[String]) -> vitivirt_install::StoredObjects {
        let live = self.live();
        let all = plan.steps.iter().flat_map(|step| &step.writes);
        let written = all.filter(|write| done.contains(&format!("{write:?}"))).map(Write::target);
        let digest = |target: &vitivirt_api::Target| {
            let kind = Kind::named(&target.resource.kind)?;
            Some(((kind, target.key.clone()), LiveObject::clone(live.get(kind, &target.key)?)))
        };
        written.filter_map(digest).collect()
    }

    fn apply(&mut self, plan: &Plan, done: &mut Vec<String>) -> Outcome {
        let mut written = 0;
        for step in &plan.steps {
            for write in &step.writes {
                let made = match write {
                    Write::Lazy { make, .. } => match make.make() {
                        Ok(made) => made,
                        Err(failure) => return Outcome { stop: Stop::Failed { step: step.name, failure }, written },
                    },
                    write => write.clone(),
                };
                assert_eq!((made.target(), made.verb()), (write.target(), write.verb()));
                if let Some(stop) = self.write(step.name, &made) {
                    return Outcome { stop, written };
                }
                done.push(format!("{write:?}"));
                written += 1;
            }
            if let Some(wait) = &step.wait {
                return Outcome { stop: Stop::Waiting { step: step.name, wait: wait.clone() }, written };
            }
        }
        Outcome { stop: Stop::Done, written }
    }

    fn write(&mut self, step: &'static str, write: &Write) -> Option<Stop> {
        let target = write.target();
        let (kind, key) = (target.resource.kind.clone(), target.key.clone());
        let place = (kind.clone(), key.clone());
        match write {
            Write::Create { body, .. } => {
                if let Some(live) = self.objects.get(&place) {
                    assert!(!vitivirt_install::owns(live), "{target} is there and was to be created");
                    return Some(Stop::NameConflict { step, target: target.clone(), live: Value::clone(live).into() });
                }
                let mut object = body.json().clone();
                object["kind"] = json!(kind);
                object["metadata"]["name"] = json!(key.name());
                server::complete(&mut object);
                self.put(&kind, key, object, "virt-operator");
            }
            Write::Patch { operations, uid, .. } if kind == "KubeVirt" => {
                assert_eq!(uid, "cr");
                let mut object = serde_json::to_value(&self.kubevirt).unwrap();
                operations.iter().for_each(|operation| change(&mut object, operation));
                self.kubevirt = serde_json::from_value(object).unwrap();
            }
            Write::Patch { operations, uid, .. } => {
                let mut object = Value::clone(&self.objects[&place]);
                assert_eq!(object["metadata"]["uid"], **uid);
                let before = object.clone();
                operations.iter().for_each(|operation| change(&mut object, operation));
                server::complete(&mut object);
                assert!(object != before, "a patch of {target} that changes nothing");
                if without_metadata(&object) != without_metadata(&before) {
                    object["metadata"]["generation"] = json!(object["metadata"]["generation"].as_i64().unwrap() + 1);
                }
                // Whoever changes a field takes it from those who set it before.
                object["metadata"]["managedFields"] = by("virt-operator");
                self.objects.insert(place, Arc::new(object));
            }
            Write::Delete { uid, .. } => {
                let object = self.objects.remove(&place).unwrap();
                assert_eq!(object["metadata"]["uid"], **uid);
            }
            Write::Apply { .. } | Write::Lazy { .. } | Write::Status { .. } => panic!("{write:?}"),
        }
        None
    }

    pub(crate) fn put(&mut self, kind: &str, key: ObjectKey, mut object: Value, manager: &str) {
        self.serial += 1;
        object["metadata"]["uid"] = json!(format!("uid-{}", self.serial));
        object["metadata"]["generation"] = json!(1);
        object["metadata"]["managedFields"] = by(manager);
        self.objects.insert((kind.to_owned(), key), Arc::new(object));
    }

    /// Kubernetes starts the pods of every workload.
    pub(crate) fn roll_out(&mut self) {
        for ((kind, _), object) in &mut self.objects {
            if !["Deployment", "DaemonSet"].contains(&kind.as_str()) {
                continue;
            }
            let object = Arc::make_mut(object);
            let generation = object["metadata"]["generation"].clone();
            let replicas = object["spec"]["replicas"].clone();
            object["status"] = match kind.as_str() {
                "Deployment" => json!({"observedGeneration": generation, "replicas": replicas,
                    "updatedReplicas": replicas, "readyReplicas": replicas}),
                _ => json!({"observedGeneration": generation, "desiredNumberScheduled": 2,
                    "updatedNumberScheduled": 2, "numberReady": 2}),
            };
        }
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::to_value(&self.kubevirt.status).unwrap()
    }

    pub(crate) fn object(&mut self, kind: &str, name: &str) -> &mut Value {
        let found = self.objects.iter_mut().find(|((of, key), _)| of == kind && key.name() == name);
        Arc::make_mut(found.unwrap_or_else(|| panic!("there is no {kind} {name}")).1)
    }

    pub(crate) fn at(&mut self, place: &(String, ObjectKey)) -> &mut Value {
        Arc::make_mut(self.objects.get_mut(place).unwrap())
    }

    pub(crate) fn has(&self, kind: &str, name: &str) -> bool {
        self.objects.keys().any(|(of, key)| of == kind && key.name() == name)
    }
}

fn by(manager: &str) -> Value {
    json!([{"manager": manager, "operation": "Update", "fieldsV1": {}}])
}

fn metadata(object: &Value) -> ObjectMeta {
    serde_json::from_value(object["metadata"].clone()).unwrap()
}

fn without_metadata(object: &Value) -> Value {
    let mut object = object.clone();
    object.as_object_mut().unwrap().remove("metadata");
    object.as_object_mut().unwrap().remove("status");
    object
}

fn change(object: &mut Value, operation: &Operation) {
    if let Some(seen) = &operation.expecting {
        assert_eq!(object.pointer(&operation.path).unwrap_or(&Value::Null), seen, "{}", operation.path);
    }
    let (parent, last) = operation.path.rsplit_once('/').unwrap();
    let last = last.replace("~1", "/").replace("~0", "~");
    let parent = object.pointer_mut(parent).unwrap_or_else(|| panic!("{} has no parent", operation.path));
    let parent = parent.as_object_mut().unwrap();
    match &operation.value {
        Some(value) => drop(parent.insert(last, value.clone())),
        None => drop(parent.remove(&last).unwrap_or_else(|| panic!("{} is not there", operation.path))),
    }
}
