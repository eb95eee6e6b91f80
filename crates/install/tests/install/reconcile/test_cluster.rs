//! A cluster in memory: it stores writes as the API server does, and rolls out workloads as Kubernetes does.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::{SignedDuration, Timestamp},
};
use serde_json::{Value, json};
use vitivirt_api::{
    EventRecord, Failure, ObjectKey, Operation, Outcome, Plan, Report, Step, Stop, Target, Write, kubevirt::KubeVirt,
};
use vitivirt_install::{
    CertificateScope, Cluster, CrdCheck, DeploymentConfig, Desired, DesiredCertificates, Environment, InstallStrategy,
    Installation, Kind, Lane, LaneProblem, LiveCrd, LiveObject, NodeState, Objects, Observed, Repairs, StoredObjects,
    UpToDate, certificate_plan, certificate_report, check_crd, crds_to_check, desired_installation,
    is_of_another_release, lane_problem, owns,
    pods::Pods,
    previous_installation, record_repairs,
    removal::{Instance, MarkedNode, RemovalInput, RemovalMode, removal_plan, removal_report},
    report, running_installation,
    served::Served,
    up_to_date_after,
};

use crate::{TestCertificates, api_server};

const CRD: &str = "CustomResourceDefinition";
const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

pub(crate) struct TestCluster {
    pub(crate) kubevirt: KubeVirt,
    pub(crate) environment: Environment,
    pub(crate) cluster: Cluster,
    pub(crate) first_kubevirt: Option<ObjectKey>,
    pub(crate) crds_with_objects: BTreeSet<ObjectKey>,
    /// CRDs of which a removal has found no objects.
    pub(crate) empty_crds: Vec<ObjectKey>,
    crd_checks: BTreeMap<ObjectKey, CrdCheck>,
    /// The objects of a CRD that were stored again.
    pub(crate) stored_again: usize,
    pub(crate) now: Timestamp,
    /// Shared until they change, because CRDs are large.
    pub(crate) objects: BTreeMap<(String, ObjectKey), Arc<Value>>,
    pub(crate) up_to_date: Arc<UpToDate>,
    pub(crate) lane_problems: BTreeMap<Lane, LaneProblem>,
    /// The installation with the input that it was computed from, because that takes long.
    pub(crate) installation: RefCell<Option<(String, Arc<Installation>)>>,
    pub(crate) repairs: Arc<Repairs>,
    /// Whether `settle` starts the pods of workloads.
    pub(crate) rolls_out: bool,
    /// Every write of objects of this kind fails.
    pub(crate) fails: Option<(&'static str, Failure)>,
    pub(crate) pods: Pods,
    /// Nodes that are not ready. Those of `pods` are not tainted.
    pub(crate) dead_nodes: Vec<NodeState>,
    pub(crate) served: Served,
    serial: u64,
    /// The objects as the caches hold them, because most of them do not change between two reconciles.
    pub(crate) live: RefCell<LiveCache>,
    /// Objects that are in the caches although their label does not match, because the executor has read them.
    read_live: BTreeSet<(String, ObjectKey)>,
    /// Patches that the API server found equal.
    pub(crate) no_op_patches: Vec<String>,
    /// The architecture of the operator's node.
    pub(crate) architecture: &'static str,
}

/// Each live object, and the object that it was projected from.
pub(crate) type LiveCache = HashMap<(String, ObjectKey), (Arc<Value>, Arc<LiveObject>)>;

/// One reconcile.
pub(crate) struct Reconcile {
    pub(crate) plan: Plan,
    sent: Vec<String>,
    pub(crate) outcome: Outcome,
    pub(crate) report: Report,
}

impl Reconcile {
    pub(crate) fn writes(&self) -> Vec<String> {
        self.sent.clone()
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.outcome.written == 0
            && self.plan.is_empty()
            && self.report.events.is_empty()
            && self.report.status.as_ref().is_none_or(|status| !status.differs())
    }
}

impl TestCluster {
    pub(crate) fn new(spec: &Value) -> Self {
        let kubevirt = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt", "uid": "cr", "generation": 1},
            "spec": spec,
        });
        let variables =
            [("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4"), ("KUBEVIRT_VERSION", "v1.8.4")];
        let mut cluster = Self {
            kubevirt: serde_json::from_value(kubevirt).unwrap(),
            environment: Environment::from_variables(
                variables.map(|(name, value)| (name.to_owned(), value.to_owned())),
            ),
            cluster: Cluster { admission_policies: true, schedulable_nodes: 2, ..Cluster::default() },
            first_kubevirt: None,
            architecture: "amd64",
            crds_with_objects: BTreeSet::new(),
            empty_crds: Vec::new(),
            crd_checks: BTreeMap::new(),
            stored_again: 0,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            objects: BTreeMap::new(),
            up_to_date: Arc::default(),
            lane_problems: BTreeMap::new(),
            installation: RefCell::default(),
            repairs: Arc::default(),
            rolls_out: true,
            fails: None,
            pods: Pods::default(),
            dead_nodes: Vec::new(),
            served: Served::default(),
            serial: 0,
            live: RefCell::default(),
            read_live: BTreeSet::new(),
            no_op_patches: Vec::new(),
        };
        let namespace = json!({"kind": "Namespace", "metadata": {"name": "kubevirt", "labels": {"a": "b"}}});
        cluster.put("Namespace", ObjectKey::cluster("kubevirt"), namespace, "admin");
        cluster
    }

    pub(crate) fn edit(&mut self, spec: &Value) {
        self.kubevirt.spec = serde_json::from_value(spec.clone()).unwrap();
        *self.kubevirt.metadata.generation.as_mut().unwrap() += 1;
        self.up_to_date = Arc::default();
    }

    /// The operator restarts and loses its memory.
    pub(crate) fn restart(&mut self) {
        self.up_to_date = Arc::default();
        self.repairs = Arc::default();
    }

    pub(crate) fn observed(&self) -> Observed {
        let namespace = self.objects.get(&("Namespace".to_owned(), ObjectKey::cluster("kubevirt")));
        let mut observed = Observed {
            kubevirt: self.kubevirt.clone(),
            first_kubevirt: self.first_kubevirt.clone(),
            operator_namespace: "kubevirt".to_owned(),
            architecture: self.architecture,
            now: self.now,
            cluster: self.cluster.clone(),
            synchronization_addresses: Vec::new(),
            objects: self.live_objects(),
            namespace: namespace.map(|object| Arc::new(LiveObject::from_metadata(&metadata(object)))),
            caches_complete: true,
            pods: self.pods.clone(),
            served: self.served.clone(),
            crd_checks: BTreeMap::new(),
            storage_page: None,
            crds_with_objects: self.crds_with_objects.clone(),
            unchecked_orphans: None,
            lane_problems: self.lane_problems.clone(),
            repairs: self.repairs.clone(),
            nodes_held_until: None,
        };
        if !self.dead_nodes.is_empty() {
            observed
                .set_dead_nodes(self.dead_nodes.iter().map(|node| (node.name.clone(), Some(node.clone()))).collect());
        }
        observed
    }

    /// As the operator reads them before a plan.
    fn check_crds(&mut self, observed: &mut Observed, desired: &Desired) {
        let open = self.crd_checks.iter().filter(|(_, check)| check.is_open()).map(|(crd, _)| crd.clone());
        let open: Vec<ObjectKey> = open.collect();
        for crd in crds_to_check(observed, desired).into_iter().map(|(crd, _)| crd).chain(open) {
            let live = &self.objects[&("CustomResourceDefinition".to_owned(), crd.clone())];
            let live: LiveCrd = serde_json::from_value(Value::clone(live)).unwrap();
            let check = check_crd(desired, &crd, &live).unwrap();
            self.crd_checks.insert(crd, check);
        }
        observed.crd_checks.clone_from(&self.crd_checks);
        observed.storage_page = self.next_storage_page(observed);
    }

    pub(crate) fn desired(&self, observed: &Observed) -> Desired {
        let config = DeploymentConfig::new(&self.kubevirt, &self.environment);
        let dumped = observed.objects.strategy(&config.id);
        let dumped = dumped.filter(|_| is_of_another_release(&self.kubevirt, &self.environment)).map(|(key, _)| {
            let map = Value::clone(&self.objects[&("ConfigMap".to_owned(), key.clone())]);
            let yaml = |text: &str| serde_json::from_str(text).map_err(|error| error.to_string());
            InstallStrategy::decode(&serde_json::from_value(map).unwrap(), yaml).unwrap()
        });
        match desired_installation(observed, &self.environment, dumped) {
            Ok(Some(installation)) => {
                Desired::Installation { installation: Arc::new(installation), up_to_date: self.up_to_date.clone() }
            }
            Ok(None) => {
                let running = previous_installation(observed, &self.environment);
                let running = running.map(|running| (Arc::new(running), Arc::default()));
                Desired::StrategyPending { config: Arc::new(config), running }
            }
            Err(failure) => match running_installation(observed, &self.environment, &failure) {
                Some(running) => {
                    let up_to_date = self.up_to_date.clone();
                    Desired::Refused { failure, running: Arc::new(running), up_to_date }
                }
                None => Desired::Invalid(failure),
            },
        }
    }

    fn live_objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (id @ (kind, key), object) in &self.objects {
            if let Some(kind) = Kind::from_name(kind).filter(|kind| self.is_cached(*kind, id, object)) {
                objects.insert(kind, key.clone(), self.live_object(kind, id, object));
            }
        }
        objects
    }

    fn live_object(&self, kind: Kind, id: &(String, ObjectKey), object: &Arc<Value>) -> Arc<LiveObject> {
        let mut cache = self.live.borrow_mut();
        if let Some((_, live)) = cache.get(id).filter(|(of, _)| Arc::ptr_eq(of, object)) {
            return live.clone();
        }
        let live = Arc::new(match kind {
            Kind::CustomResourceDefinition => LiveObject::from_metadata(&metadata(object)),
            _ => LiveObject::new(&metadata(object), Value::clone(object)),
        });
        cache.insert(id.clone(), (object.clone(), live.clone()));
        live
    }

    /// Whether a watch of the operator delivers the object, or the executor has read it.
    fn is_cached(&self, kind: Kind, id: &(String, ObjectKey), object: &Value) -> bool {
        let manager = object["metadata"]["labels"]["app.kubernetes.io/managed-by"].as_str();
        matches!(kind, Kind::CustomResourceDefinition | Kind::ApiService)
            || manager.is_some_and(|manager| ["virt-operator", "kubevirt-operator"].contains(&manager))
            || self.read_live.contains(id)
    }

    /// Reconciles every lane once.
    pub(crate) fn reconcile(&mut self) -> Reconcile {
        let (steps, mut sent, events) = self.reconcile_certificates();
        let (mut plan, mut written) = (Plan { steps }, sent.len());
        let mut components = None;
        for lane in [Lane::Instancetypes, Lane::Monitoring, Lane::Components] {
            let mut observed = self.observed();
            let desired = self.desired(&observed);
            if lane == Lane::Components {
                self.check_crds(&mut observed, &desired);
            }
            let mut lane_sent = Vec::new();
            let (lane_plan, outcome) = match vitivirt_install::plan(&observed, &desired, lane) {
                Ok(plan) => {
                    let outcome = self.apply(&plan, &mut lane_sent);
                    (plan, outcome)
                }
                Err(failure) => {
                    let stop = Stop::Failed { step: "plan", failure };
                    (Plan::default(), Outcome { stop, written: 0 })
                }
            };
            let stored = self.stored_objects(&lane_plan, &lane_sent);
            // Without a plan no object was compared.
            let is_planned = !matches!(outcome.stop, Stop::Failed { step: "plan", .. });
            if is_planned && let Some(up_to_date) = up_to_date_after(&observed, &desired, &lane_plan, &stored, lane) {
                self.up_to_date = Arc::new(up_to_date);
            }
            record_repairs(Arc::make_mut(&mut self.repairs), &observed, &desired, &lane_plan, &stored);
            written += outcome.written;
            sent.extend(lane_sent);
            if lane == Lane::Components {
                let report = report(&observed, &desired, &lane_plan, &outcome);
                if let Some(status) = report.status.as_ref().filter(|status| status.differs()) {
                    self.kubevirt.status = Some(serde_json::from_value(status.desired.clone()).unwrap());
                }
                components = Some((outcome, report));
            } else if let Some(problem) = lane_problem(&outcome.stop) {
                self.lane_problems.remove(&lane);
                self.lane_problems.extend(problem.map(|problem| (lane, problem)));
            }
            plan.steps.extend(lane_plan.steps);
        }
        self.now += SignedDuration::from_secs(1);
        let (outcome, mut report) = components.unwrap();
        report.events.extend(events);
        Reconcile { plan, sent, outcome: Outcome { written, ..outcome }, report }
    }

    /// Reconciles only the lane `Monitoring`, which may see an edit before the others do.
    pub(crate) fn reconcile_monitoring(&mut self) {
        let observed = self.observed();
        let desired = self.desired(&observed);
        let plan = vitivirt_install::plan(&observed, &desired, Lane::Monitoring).unwrap();
        self.apply(&plan, &mut Vec::new());
    }

    fn reconcile_certificates(&mut self) -> (Vec<Step>, Vec<String>, Vec<EventRecord>) {
        let observed = self.observed();
        let exist = observed.objects.of_kind(Kind::Secret).next().is_some();
        let own = exist && !is_of_another_release(&self.kubevirt, &self.environment);
        let scope = match self.desired(&observed) {
            _ if own => CertificateScope::OwnRelease,
            Desired::Installation { installation, .. } | Desired::Refused { running: installation, .. } => {
                CertificateScope::Installation(installation)
            }
            _ => CertificateScope::Existing,
        };
        let certificates = DesiredCertificates::new(&observed, &self.environment, &scope).unwrap();
        let plan = certificate_plan(&observed, &certificates, &TestCertificates).unwrap();
        let mut sent = Vec::new();
        let outcome = self.apply(&plan, &mut sent);
        if let Some(problem) = lane_problem(&outcome.stop) {
            self.lane_problems.remove(&Lane::Certificates);
            self.lane_problems.extend(problem.map(|problem| (Lane::Certificates, problem)));
        }
        let events = certificate_report(&observed, &plan, &outcome, None).events;
        (plan.steps, sent, events)
    }

    /// Reconciles as often as an installation needs, for one with a problem that stays.
    pub(crate) fn reconcile_repeatedly(&mut self) {
        for _ in 0..5 {
            self.reconcile();
            self.roll_out();
        }
    }

    /// Reconciles until one changes nothing, and returns the others.
    pub(crate) fn settle(&mut self) -> Vec<Reconcile> {
        let mut reconciles = Vec::new();
        for _ in 0..12 {
            let reconcile = self.reconcile();
            if self.rolls_out {
                self.roll_out();
            }
            if reconcile.is_silent() {
                return reconciles;
            }
            reconciles.push(reconcile);
        }
        let last = reconciles.last().unwrap();
        panic!("the installation does not settle: {:?} {:?}", last.outcome.stop, last.writes());
    }

    /// What the API server stored for the writes of a plan.
    fn stored_objects(&self, plan: &Plan, sent: &[String]) -> StoredObjects {
        let live = self.live_objects();
        let writes = plan.steps.iter().flat_map(|step| &step.writes);
        let written = writes.filter(|write| sent.contains(&format!("{write:?}"))).map(Write::target);
        let stored = |target: &Target| {
            let kind = Kind::from_name(&target.resource.kind)?;
            Some(((kind, target.key.clone()), LiveObject::clone(live.get(kind, &target.key)?)))
        };
        written.filter_map(stored).collect()
    }

    /// As the executor does it.
    fn apply(&mut self, plan: &Plan, sent: &mut Vec<String>) -> Outcome {
        let (mut stop, mut written) = (Stop::Done, 0);
        for step in &plan.steps {
            if stop != Stop::Done && !step.independent {
                continue;
            }
            for write in &step.writes {
                let built = match write {
                    Write::Lazy { make, .. } => make.make(),
                    write => Ok(write.clone()),
                };
                let result = match built {
                    Ok(built) => {
                        assert_eq!((built.target(), built.verb()), (write.target(), write.verb()));
                        self.write(step.name, &built)
                    }
                    Err(failure) => Some(Stop::Failed { step: step.name, failure }),
                };
                if let Some(failed) = result {
                    stop = stop.or_worse(failed);
                    continue;
                }
                sent.push(format!("{write:?}"));
                written += 1;
            }
            if let Some(wait) = &step.wait {
                stop = stop.or_worse(Stop::Waiting { step: step.name, wait: wait.clone() });
            }
        }
        Outcome { stop, written }
    }

    fn write(&mut self, step: &'static str, write: &Write) -> Option<Stop> {
        let target = write.target();
        let (kind, key) = (target.resource.kind.clone(), target.key.clone());
        let id = (kind.clone(), key.clone());
        if let Some((_, failure)) = self.fails.as_ref().filter(|(fails, _)| *fails == kind) {
            return Some(Stop::Failed { step, failure: failure.clone() });
        }
        match write {
            Write::Create { body, .. } => {
                if let Some(live) = self.objects.get(&id) {
                    if owns(target, live) {
                        assert!(self.read_live.insert(id), "{target} already exists");
                        let failure = Failure::conflict("AlreadyExists", format!("{target} already exists"));
                        return Some(Stop::Failed { step, failure });
                    }
                    return Some(Stop::NameConflict { step, target: target.clone(), live: Value::clone(live).into() });
                }
                let mut object = body.json().clone();
                object["kind"] = json!(kind);
                object["metadata"]["name"] = json!(key.name());
                self.put(&kind, key, object, "virt-operator");
            }
            Write::Patch { operations, uid, .. } if kind == "KubeVirt" => {
                assert_eq!(uid, "cr");
                let mut object = serde_json::to_value(&self.kubevirt).unwrap();
                operations.iter().for_each(|operation| change(&mut object, operation));
                self.kubevirt = serde_json::from_value(object).unwrap();
            }
            // Nodes are not objects of this cluster.
            Write::Patch { .. } if kind == "Node" => {}
            Write::Patch { operations, uid, .. } => {
                assert_eq!(self.objects[&id]["metadata"]["uid"], **uid);
                let is_changed = self.change_as("virt-operator", &id, |object| {
                    operations.iter().for_each(|operation| change(object, operation));
                });
                if !is_changed {
                    self.no_op_patches.push(target.to_string());
                }
                self.collect(&id);
            }
            Write::Delete { uid, .. } => {
                let now = self.now;
                let metadata = &mut self.object_by_id(&id)["metadata"];
                assert_eq!(metadata["uid"], **uid);
                metadata["deletionTimestamp"] = json!(now);
                // The API server does so in every case. Only with another finalizer does it take time here.
                if let Some(finalizers) = metadata["finalizers"].as_array_mut().filter(|_| kind == CRD) {
                    finalizers.push(json!(CLEANUP_FINALIZER));
                }
                self.collect(&id);
            }
            Write::Status { body, uid, .. } if kind == CRD => {
                let object = self.object_by_id(&id);
                assert_eq!(object["metadata"]["uid"], **uid);
                object["status"]["storedVersions"] = body.json()["status"]["storedVersions"].clone();
            }
            Write::Apply { .. } | Write::Lazy { .. } | Write::Status { .. } => panic!("{write:?}"),
        }
        None
    }

    /// An object that is being deleted is gone without finalizers.
    fn collect(&mut self, id: &(String, ObjectKey)) {
        let metadata = &self.objects[id]["metadata"];
        let is_kept = metadata["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
        if !metadata["deletionTimestamp"].is_null() && !is_kept {
            self.objects.remove(id);
        }
    }

    /// The API server has deleted the objects of a CRD that is being deleted.
    pub(crate) fn delete_instances(&mut self, crd: &str) {
        let id = (CRD.to_owned(), ObjectKey::cluster(crd));
        let finalizers = self.object_by_id(&id)["metadata"]["finalizers"].as_array_mut().unwrap();
        finalizers.retain(|finalizer| finalizer != CLEANUP_FINALIZER);
        self.collect(&id);
    }

    fn removal_input(
        &self,
        observed: &mut Observed,
        mode: RemovalMode,
        instances: &[Instance],
        nodes: Vec<MarkedNode>,
    ) -> RemovalInput {
        RemovalInput {
            kubevirt: Some(self.kubevirt.clone()),
            namespace: "kubevirt".to_owned(),
            mode,
            now: self.now,
            objects: std::mem::take(&mut observed.objects),
            pods: observed.pods.clone(),
            complete: true,
            instances: instances.to_vec(),
            empty_crds: self.empty_crds.clone(),
            nodes,
        }
    }

    /// What a removal would write. `instances` are left.
    pub(crate) fn remove_plan(&self, mode: RemovalMode, instances: &[Instance]) -> Plan {
        removal_plan(&self.removal_input(&mut self.observed(), mode, instances, Vec::new()))
    }

    /// One reconcile of a resource that is being deleted. `instances` are left.
    pub(crate) fn remove(&mut self, mode: RemovalMode, instances: &[Instance], nodes: Vec<MarkedNode>) -> Reconcile {
        let mut observed = self.observed();
        let input = self.removal_input(&mut observed, mode, instances, nodes);
        let plan = removal_plan(&input);
        let mut sent = Vec::new();
        let outcome = self.apply(&plan, &mut sent);
        let report = removal_report(&observed, &input, &plan, &outcome);
        if let Some(status) = report.status.as_ref().filter(|status| status.differs()) {
            self.kubevirt.status = Some(serde_json::from_value(status.desired.clone()).unwrap());
        }
        self.now += SignedDuration::from_secs(1);
        Reconcile { plan, sent, outcome, report }
    }

    pub(crate) fn put(&mut self, kind: &str, key: ObjectKey, mut object: Value, manager: &str) {
        self.serial += 1;
        object["metadata"]["uid"] = json!(format!("uid-{}", self.serial));
        if api_server::has_generation(kind) {
            object["metadata"]["generation"] = json!(1);
        }
        object["metadata"].as_object_mut().unwrap().remove("managedFields");
        api_server::add_defaults(&mut object);
        if kind == "Service" && object["spec"].get("clusterIP").is_none() {
            let address = format!("10.96.0.{}", self.serial % 250);
            object["spec"]["clusterIPs"] = json!([address]);
            object["spec"]["clusterIP"] = json!(address);
        }
        api_server::set_managers(&json!({}), &mut object, manager);
        self.objects.insert((kind.to_owned(), key), Arc::new(object));
    }

    /// A client changes an object. Returns whether that made a difference.
    pub(crate) fn change_as(
        &mut self,
        manager: &str,
        id: &(String, ObjectKey),
        change: impl FnOnce(&mut Value),
    ) -> bool {
        let before = self.objects[id].clone();
        let mut object = Value::clone(&before);
        change(&mut object);
        api_server::add_defaults(&mut object);
        if object == *before {
            return false;
        }
        if api_server::has_generation(&id.0) && without_metadata(&object) != without_metadata(&before) {
            object["metadata"]["generation"] = json!(object["metadata"]["generation"].as_i64().unwrap() + 1);
        }
        api_server::set_managers(&before, &mut object, manager);
        self.objects.insert(id.clone(), Arc::new(object));
        true
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
        let object = self.objects.iter_mut().find(|((other_kind, key), _)| other_kind == kind && key.name() == name);
        Arc::make_mut(object.unwrap_or_else(|| panic!("{kind} {name} not found")).1)
    }

    pub(crate) fn object_by_id(&mut self, id: &(String, ObjectKey)) -> &mut Value {
        Arc::make_mut(self.objects.get_mut(id).unwrap())
    }

    pub(crate) fn has(&self, kind: &str, name: &str) -> bool {
        self.objects.keys().any(|(other_kind, key)| other_kind == kind && key.name() == name)
    }
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
    if let Some(expected) = &operation.expecting {
        assert_eq!(object.pointer(&operation.path).unwrap_or(&Value::Null), expected, "{}", operation.path);
    }
    let (parent, last) = operation.path.rsplit_once('/').unwrap();
    let last = last.replace("~1", "/").replace("~0", "~");
    let parent = object.pointer_mut(parent).unwrap_or_else(|| panic!("{} has no parent", operation.path));
    if let (Some(list), None) = (parent.as_array_mut(), &operation.value) {
        list.remove(last.parse().unwrap());
        return;
    }
    let parent = parent.as_object_mut().unwrap();
    match &operation.value {
        Some(value) => drop(parent.insert(last, value.clone())),
        None => drop(parent.remove(&last).unwrap_or_else(|| panic!("{} not found", operation.path))),
    }
}
