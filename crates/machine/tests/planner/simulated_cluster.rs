//! A cluster as the planner sees it. The writes of a plan change the views, and nothing else happens: the tests do what
//! KubeVirt and the storage would do.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::{
    Failure, Operation, Outcome, Plan, Report, Stop, Write,
    machine::{FINALIZER_NETWORK, Machine, MachineId, MachineSpec, MachineStatus, PrintableStatus, PvcPhase, VmiPhase},
};
use vitivirt_machine::{
    Assessed, Observed,
    observed::{
        ImportSourceView, NetworkAttachmentView, NetworkView, PvcView, SecretView, StorageClassView, VmView, VmiView,
    },
    render::pvc::marked_disk,
    resolve::resolve,
    vmi_spec::{comparable_spec, references_secret},
};

#[derive(Clone)]
pub(crate) struct SimulatedCluster {
    pub(crate) observed: Observed,
    /// The Machine object is deleted.
    pub(crate) machine_deleted: bool,
    uids: u32,
}

pub(crate) const UID: &str = "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11";

/// The spec of a VM as KubeVirt stores it, with its default on amd64.
pub(crate) fn with_machine_type(mut spec: Value) -> Value {
    let domain = spec["template"]["spec"]["domain"].as_object_mut().unwrap();
    domain.entry("machine").or_insert_with(|| serde_json::json!({"type": "q35"}));
    spec
}

/// A Machine with a running guest.
pub(crate) fn running(spec: MachineSpec) -> SimulatedCluster {
    let mut cluster = SimulatedCluster::new(spec).with_network("prod");
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.reconcile_until_up_to_date();
    cluster
}

impl SimulatedCluster {
    pub(crate) fn new(spec: MachineSpec) -> Self {
        let mut machine = Machine { spec, ..Machine::default() };
        machine.metadata.name = Some("web".to_owned());
        machine.metadata.namespace = Some("shop".to_owned());
        machine.metadata.uid = Some(UID.to_owned());
        machine.metadata.generation = Some(1);
        machine.metadata.resource_version = Some("1".to_owned());
        let class = |name: &str, is_default| StorageClassView {
            name: name.to_owned(),
            is_default,
            waits_for_consumer: false,
            allows_expansion: true,
        };
        let observed = Observed {
            storage_classes: vec![class("standard", true), class("fast-ssd", false)],
            ..Observed::new(machine, Timestamp::UNIX_EPOCH).unwrap()
        };
        SimulatedCluster { observed, machine_deleted: false, uids: 0 }
    }

    pub(crate) fn with_network(mut self, name: &str) -> Self {
        let uid = self.uid();
        let network = NetworkView {
            uid,
            vlan: Some(100),
            bridge: Some("br1".to_owned()),
            finalizer_index: None,
            deleting: false,
            other_users: false,
        };
        self.observed.networks.insert(name.to_owned(), network);
        self
    }

    fn uid(&mut self) -> String {
        self.uids += 1;
        format!("uid-{}", self.uids)
    }

    /// The observed state, assessed. Tests edit the Machine in place, so it is parsed again.
    pub(crate) fn assessed(&self) -> Assessed {
        let machine = &self.observed.machine;
        Assessed::new(Observed {
            id: MachineId::from_metadata(&machine.metadata).unwrap(),
            resolved: resolve(machine),
            ..self.observed.clone()
        })
    }

    pub(crate) fn plan(&self) -> Plan {
        vitivirt_machine::plan(&self.assessed()).unwrap()
    }

    /// One reconcile: the plan is applied, the status is written. Returns the plan and the report.
    pub(crate) fn reconcile(&mut self) -> (Plan, Report<MachineStatus>) {
        let before = self.assessed();
        let plan = vitivirt_machine::plan(&before).unwrap();
        let outcome = self.apply(&plan);
        let report = self.report(&before, &plan, &outcome);
        (plan, report)
    }

    /// One reconcile whose first write fails.
    pub(crate) fn reconcile_with_failure(&mut self, failure: &Failure) -> Report<MachineStatus> {
        let before = self.assessed();
        let plan = vitivirt_machine::plan(&before).unwrap();
        let step = plan.steps.first().map_or("nothing to write", |step| step.name);
        let outcome = Outcome { stop: Stop::Failed { step, failure: failure.clone() }, written: 0 };
        self.report(&before, &plan, &outcome)
    }

    fn report(&mut self, before: &Assessed, plan: &Plan, outcome: &Outcome) -> Report<MachineStatus> {
        let report = vitivirt_machine::report(before, plan, outcome);
        if let Some(status) = report.status.as_ref().filter(|status| status.differs()) {
            self.observed.machine.status = Some(status.desired.clone());
        }
        report
    }

    /// Reconciles until nothing is written any more.
    pub(crate) fn reconcile_until_up_to_date(&mut self) {
        for _ in 0..10 {
            let (plan, report) = self.reconcile();
            if plan.write_count() == 0 && !report.status.is_some_and(|status| status.differs()) {
                return;
            }
        }
        panic!("every reconcile writes: {:?}", self.plan());
    }

    pub(crate) fn apply(&mut self, plan: &Plan) -> Outcome {
        let mut written = 0;
        for step in &plan.steps {
            for write in &step.writes {
                self.write(write);
                written += 1;
            }
            if let Some(wait) = &step.wait {
                return Outcome { stop: Stop::Waiting { step: step.name, wait: wait.clone() }, written };
            }
        }
        Outcome { stop: Stop::Done, written }
    }

    fn write(&mut self, write: &Write) {
        let name = write.target().key.name().to_owned();
        let kind = write.target().resource.kind.clone();
        match write {
            Write::Create { body, .. } => self.create(&kind, &name, body.json()),
            Write::Apply { body, .. } => self.apply_finalizers(&kind, &name, body.json()),
            Write::Patch { operations, .. } => {
                if kind == "VirtualMachine" && operations.iter().any(|operation| operation.path.starts_with("/spec")) {
                    self.observed.vm.as_mut().unwrap().generation += 1;
                }
                if kind == "PersistentVolumeClaim" {
                    // The admission policy refuses a change of the spec before the PVC has the label with the UID.
                    let expands = operations.iter().any(|operation| operation.path.starts_with("/spec"));
                    assert!(!expands || operations.len() == 1, "the labels wait for the expansion");
                }
                for operation in operations {
                    if operation.path.starts_with("/metadata/finalizers/") {
                        self.remove_finalizer(&kind, &name, operation);
                        continue;
                    }
                    match operation.path.strip_prefix("/spec").filter(|_| kind == "VirtualMachine") {
                        Some(path) => {
                            edit(&mut self.observed.vm.as_mut().unwrap().spec, path, operation.value.as_ref());
                        }
                        None if operation.value.is_none() => self.remove(&kind, &name, &operation.path),
                        None => self.patch(&kind, &name, &operation.path, operation.value.as_ref().unwrap()),
                    }
                }
            }
            Write::Delete { .. } => self.delete(&kind, &name),
            Write::Lazy { .. } => panic!("a Machine has no lazy writes"),
            Write::Status { .. } => panic!("a plan has no status write"),
        }
    }

    fn create(&mut self, kind: &str, name: &str, body: &Value) {
        let uid = self.uid();
        let labels = labels(body);
        let controller_uid = body.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str).map(str::to_owned);
        let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        match kind {
            "VirtualMachine" => {
                assert!(self.observed.vm.is_none(), "a second VM");
                self.observed.vm = Some(VmView {
                    uid,
                    generation: 1,
                    has_owners: controller_uid.is_some(),
                    controller_uid,
                    controller_index: 0,
                    labels,
                    spec: with_machine_type(body["spec"].clone()),
                    deleting: false,
                    printable_status: PrintableStatus::Starting,
                    ready: false,
                    restoring: false,
                    migration_sources: BTreeMap::new(),
                    needs_recovery: false,
                    restart_required: false,
                    failure: None,
                    other_managers: Vec::new(),
                });
            }
            "Secret" => {
                let content = text("/metadata/annotations/vitistack.io~1content");
                assert!(self.observed.secret.is_none(), "a second Secret");
                self.observed.secret = Some(SecretView {
                    uid,
                    has_owners: controller_uid.is_some(),
                    controller_uid,
                    controller_index: 0,
                    labels,
                    annotated: content.is_some(),
                    content,
                    tampered: false,
                    started_with: None,
                    source_read: None,
                    adopt_by: None,
                    deleting: false,
                });
            }
            "PersistentVolumeClaim" => {
                let pvc = PvcView {
                    uid,
                    live_version: Some("1".to_owned()),
                    labels,
                    phase: PvcPhase::Pending,
                    requested: text("/spec/resources/requests/storage").unwrap(),
                    storage_class: text("/spec/storageClassName"),
                    access_mode: text("/spec/accessModes/0").unwrap().as_str().into(),
                    volume_mode: text("/spec/volumeMode").unwrap().as_str().into(),
                    source: text("/metadata/annotations/vitistack.io~1source"),
                    volume: None,
                    identity: text("/metadata/annotations/vitistack.io~1identity"),
                    adopt_by: None,
                    disk: None,
                    annotated: true,
                    has_owners: false,
                    vm_owner: None,
                    deleting: false,
                    created: self.observed.now.as_second(),
                };
                assert!(self.observed.pvcs.insert(name.to_owned(), pvc).is_none(), "a second PVC");
            }
            "NetworkAttachmentDefinition" => {
                let view = NetworkAttachmentView {
                    uid,
                    controller_uid,
                    labels,
                    config: text("/spec/config").unwrap(),
                    segments: text("/metadata/annotations/vitistack.io~1segments"),
                    annotated: true,
                };
                assert!(self.observed.network_attachments.insert(name.to_owned(), view).is_none(), "a second NAD");
            }
            "VolumeImportSource" => {
                let source = text("/metadata/annotations/vitistack.io~1source");
                let view = ImportSourceView { uid, controller_uid, labels, source, deleting: false };
                assert!(self.observed.import_sources.insert(name.to_owned(), view).is_none(), "a second source");
            }
            other => panic!("unexpected create of a {other}"),
        }
    }

    /// Like the server: finalizers of other clients stay.
    fn apply_finalizers(&mut self, kind: &str, name: &str, body: &Value) {
        let finalizers: Vec<String> = serde_json::from_value(body["metadata"]["finalizers"].clone()).unwrap();
        match kind {
            "Machine" => {
                self.observed.machine.metadata.finalizers.get_or_insert_default().extend(finalizers);
            }
            "NetworkConfiguration" => {
                assert_eq!(finalizers, [FINALIZER_NETWORK]);
                self.observed.networks.get_mut(name).unwrap().finalizer_index = Some(0);
            }
            other => panic!("unexpected apply to a {other}"),
        }
    }

    fn remove_finalizer(&mut self, kind: &str, name: &str, operation: &Operation) {
        let index: usize = operation.path.strip_prefix("/metadata/finalizers/").unwrap().parse().unwrap();
        let expected = operation.expecting.as_ref().and_then(Value::as_str).unwrap();
        match kind {
            "Machine" => {
                let finalizers = self.observed.machine.metadata.finalizers.as_mut().unwrap();
                assert_eq!(finalizers.remove(index), expected);
                self.machine_deleted =
                    self.observed.machine.metadata.deletion_timestamp.is_some() && finalizers.is_empty();
            }
            "NetworkConfiguration" => {
                let network = self.observed.networks.get_mut(name).unwrap();
                assert_eq!((network.finalizer_index.take(), expected), (Some(index), FINALIZER_NETWORK));
            }
            other => panic!("unexpected removal of a finalizer of a {other}"),
        }
    }

    /// The owner references of VM or Secret: whether there are any, and the controller.
    fn owners(&mut self, kind: &str) -> (&mut bool, &mut Option<String>) {
        if kind == "Secret" {
            let secret = self.observed.secret.as_mut().unwrap();
            return (&mut secret.has_owners, &mut secret.controller_uid);
        }
        let vm = self.observed.vm.as_mut().unwrap();
        (&mut vm.has_owners, &mut vm.controller_uid)
    }

    fn remove(&mut self, kind: &str, name: &str, path: &str) {
        if matches!(kind, "VirtualMachine" | "Secret") && path == "/metadata/ownerReferences/0" {
            let (has_owners, controller_uid) = self.owners(kind);
            assert!(controller_uid.take().is_some(), "the {kind} has no owner");
            *has_owners = false;
            return;
        }
        if (kind, path) == ("PersistentVolumeClaim", "/metadata/ownerReferences/0") {
            let pvc = self.observed.pvcs.get_mut(name).unwrap();
            assert!(pvc.vm_owner.take().is_some(), "the PVC has no owner");
            pvc.has_owners = false;
            return;
        }
        if path == "/metadata/annotations/vitistack.io~1disk" {
            let pvc = self.observed.pvcs.get_mut(name).unwrap();
            assert!(pvc.disk.take().is_some(), "the PVC names no disk");
            return;
        }
        let label = path.strip_prefix("/metadata/labels/").unwrap().replace("~1", "/").replace("~0", "~");
        let labels = match kind {
            "VirtualMachine" => &mut self.observed.vm.as_mut().unwrap().labels,
            "Secret" => &mut self.observed.secret.as_mut().unwrap().labels,
            "PersistentVolumeClaim" => &mut self.observed.pvcs.get_mut(name).unwrap().labels,
            other => panic!("unexpected removal of a label of a {other}"),
        };
        assert!(labels.remove(&label).is_some(), "{path} does not exist");
    }

    fn patch(&mut self, kind: &str, name: &str, path: &str, value: &Value) {
        let text = || value.as_str().unwrap().to_owned();
        let label = path.strip_prefix("/metadata/labels/").map(|key| key.replace("~1", "/").replace("~0", "~"));
        match (kind, label) {
            // The precondition of its removal.
            ("VirtualMachine" | "Secret" | "PersistentVolumeClaim", None)
                if path == "/metadata/ownerReferences/0/uid" => {}
            ("VirtualMachine" | "Secret", None) if path.starts_with("/metadata/ownerReferences") => {
                let owner = if path.ends_with("/-") { value } else { &value[0] };
                let uid = owner["uid"].as_str().map(str::to_owned);
                let (has_owners, controller_uid) = self.owners(kind);
                assert_eq!(*has_owners, path.ends_with("/-"), "the path fits the object");
                (*has_owners, *controller_uid) = (true, uid);
            }
            ("PersistentVolumeClaim", None) if path == "/metadata/ownerReferences" => {
                self.observed.pvcs.get_mut(name).unwrap().has_owners = false;
            }
            ("PersistentVolumeClaim", None) if path == "/metadata/labels" => {
                let labels = serde_json::from_value(value.clone()).unwrap();
                self.observed.pvcs.get_mut(name).unwrap().labels = labels;
            }
            ("VirtualMachine", Some(label)) => _ = self.observed.vm.as_mut().unwrap().labels.insert(label, text()),
            ("Secret", Some(label)) => _ = self.observed.secret.as_mut().unwrap().labels.insert(label, text()),
            ("PersistentVolumeClaim", Some(label)) => {
                _ = self.observed.pvcs.get_mut(name).unwrap().labels.insert(label, text());
            }
            ("NetworkAttachmentDefinition", Some(label)) => {
                _ = self.observed.network_attachments.get_mut(name).unwrap().labels.insert(label, text());
            }
            ("NetworkAttachmentDefinition", None) if path == "/metadata/annotations/vitistack.io~1segments" => {
                let attachment = self.observed.network_attachments.get_mut(name).unwrap();
                assert!(attachment.annotated, "the server rejects the path: the NAD has no annotations");
                attachment.segments = Some(text());
            }
            ("Secret", None) if path == "/data" => self.observed.secret.as_mut().unwrap().tampered = false,
            ("Secret", None) if path == "/metadata/annotations/vitistack.io~1content" => {
                let secret = self.observed.secret.as_mut().unwrap();
                assert!(secret.annotated, "the server rejects the path: the Secret has no annotations");
                secret.content = Some(text());
            }
            ("Secret", None) if path == "/metadata/annotations" => {
                let secret = self.observed.secret.as_mut().unwrap();
                assert!(!secret.annotated, "the patch removes annotations of other clients");
                secret.annotated = true;
                secret.content = value["vitistack.io/content"].as_str().map(str::to_owned);
            }
            ("Secret", None) if path == "/metadata/annotations/vitistack.io~1guest-began-with" => {
                self.observed.secret.as_mut().unwrap().started_with = Some(text());
            }
            ("PersistentVolumeClaim", None) if path == "/metadata/annotations/vitistack.io~1disk" => {
                let pvc = self.observed.pvcs.get_mut(name).unwrap();
                assert!(pvc.annotated, "the server rejects the path: the PVC has no annotations");
                pvc.disk = marked_disk(value.as_str().unwrap(), name).map(str::to_owned);
            }
            ("PersistentVolumeClaim", None) if path == "/metadata/annotations" => {
                let pvc = self.observed.pvcs.get_mut(name).unwrap();
                assert!(!pvc.annotated, "the patch removes annotations of other clients");
                pvc.annotated = true;
                pvc.disk =
                    value["vitistack.io/disk"].as_str().and_then(|mark| marked_disk(mark, name)).map(str::to_owned);
            }
            ("PersistentVolumeClaim", None) if path == "/spec/resources/requests/storage" => {
                self.observed.pvcs.get_mut(name).unwrap().requested = text();
            }
            ("NetworkAttachmentDefinition", None) if path == "/metadata/labels" => {
                self.observed.network_attachments.get_mut(name).unwrap().labels =
                    serde_json::from_value(value.clone()).unwrap();
            }
            ("NetworkAttachmentDefinition", None) if path == "/spec" => {
                self.observed.network_attachments.get_mut(name).unwrap().config =
                    value["config"].as_str().unwrap().to_owned();
            }
            other => panic!("unexpected patch of {path} of {other:?}"),
        }
    }

    fn delete(&mut self, kind: &str, name: &str) {
        match kind {
            "VirtualMachine" => self.observed.vm.as_mut().unwrap().deleting = true,
            "VirtualMachineInstance" => self.observed.vmi = None,
            "PersistentVolumeClaim" => assert!(self.observed.pvcs.remove(name).is_some(), "{name} does not exist"),
            "VolumeImportSource" => {
                assert!(self.observed.import_sources.remove(name).is_some(), "{name} does not exist");
            }
            "Secret" => assert!(self.observed.secret.take().is_some(), "{name} does not exist"),
            other => panic!("unexpected delete of a {other}"),
        }
    }

    // What users, KubeVirt and the storage do.

    pub(crate) fn edit(&mut self, spec: MachineSpec) {
        self.observed.machine.spec = spec;
        let generation = self.observed.machine.metadata.generation.unwrap_or(0);
        self.observed.machine.metadata.generation = Some(generation + 1);
    }

    pub(crate) fn bind_pvcs(&mut self) {
        for (name, pvc) in &mut self.observed.pvcs {
            pvc.phase = PvcPhase::Bound;
            pvc.volume.get_or_insert_with(|| format!("pv-{name}-{}", pvc.uid));
        }
    }

    pub(crate) fn start_guest(&mut self, phase: &str) {
        let vm = self.observed.vm.as_mut().unwrap();
        vm.printable_status = PrintableStatus::from(phase);
        self.observed.vmi = Some(VmiView {
            uid: "vmi".to_owned(),
            live_version: Some("1".to_owned()),
            spec: comparable_spec(&vm.spec["template"]["spec"]),
            needs_user_data: references_secret(&vm.spec["template"]["spec"], "web-cloudinit"),
            phase: VmiPhase::from(phase),
            node: Some("node-1".to_owned()),
            addresses: vec!["10.1.2.3".to_owned()],
            paused: false,
            not_ready: None,
            migrating: false,
            vm_generation: Some(vm.generation),
            unschedulable: None,
            failure: None,
            deleting: false,
            created: 0,
            connected_since: self.observed.now.as_second(),
        });
    }

    pub(crate) fn delete_machine(&mut self) {
        use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
        self.observed.machine.metadata.deletion_timestamp = Some(Time(self.observed.now));
    }

    pub(crate) fn finish_shutdown(&mut self) {
        self.observed.vm = None;
        self.observed.vmi = None;
    }

    pub(crate) fn annotate(&mut self, key: &str, value: &str) {
        let annotations = self.observed.machine.metadata.annotations.get_or_insert_default();
        annotations.insert(key.to_owned(), value.to_owned());
    }

    pub(crate) fn status(&self) -> MachineStatus {
        self.observed.machine.status.clone().unwrap_or_default()
    }

    pub(crate) fn condition(&self, type_: &str) -> (String, String, String) {
        let status = self.status();
        let condition = status.conditions.iter().find(|condition| condition.type_ == type_).unwrap();
        (condition.status.clone(), condition.reason.clone(), condition.message.clone())
    }
}

/// Applies one operation of a JSON patch.
fn edit(document: &mut Value, path: &str, value: Option<&Value>) {
    let (parent, key) = path.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/").replace("~0", "~");
    let parent = document.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => _ = parent.insert(key, value.clone()),
        None => assert!(parent.remove(&key).is_some(), "{path} does not exist"),
    }
}

fn labels(body: &Value) -> BTreeMap<String, String> {
    body.pointer("/metadata/labels").map(|labels| serde_json::from_value(labels.clone()).unwrap()).unwrap_or_default()
}
