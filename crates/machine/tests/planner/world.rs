//! A cluster as far as the decisions see one: writes of a plan change the views, nothing else happens. What KubeVirt and
//! storage do by themselves is a call of a test.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::machine::{FINALIZER_NETWORK, Machine, MachineSpec, MachineStatus};
use vitivirt_api::{Failure, Operation, Outcome, Plan, Report, Stop, Write};
use vitivirt_machine::observed::{
    AttachmentView, NetworkView, Observed, OwnedView, PvcView, SecretView, StorageClassView, VmView, VmiView,
};

pub(crate) struct World {
    pub(crate) observed: Observed,
    /// The Machine object itself is gone.
    pub(crate) gone: bool,
    uids: u32,
}

pub(crate) const UID: &str = "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11";

/// A Machine whose guest runs.
pub(crate) fn running(spec: MachineSpec) -> World {
    let mut world = World::new(spec).with_network("prod");
    world.settle();
    world.bind_pvcs();
    world.start_guest("Running");
    world.settle();
    world
}

impl World {
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
            expands: true,
        };
        let observed = Observed {
            storage_classes: vec![class("standard", true), class("fast-ssd", false)],
            ..Observed::of(machine, Timestamp::UNIX_EPOCH)
        };
        World { observed, gone: false, uids: 0 }
    }

    pub(crate) fn with_network(mut self, name: &str) -> Self {
        let uid = self.uid();
        let network = NetworkView {
            uid,
            vlan: Some(100),
            bridge: Some("br1".to_owned()),
            protected: None,
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

    /// One pass: the plan is carried out, the status is written. Returns what was planned and said.
    pub(crate) fn reconcile(&mut self) -> (Plan, Report) {
        let plan = vitivirt_machine::plan(&self.observed);
        let before = self.observed.clone();
        let outcome = self.apply(&plan);
        let report = self.report(&before, &plan, &outcome);
        (plan, report)
    }

    /// One pass whose first write is refused.
    pub(crate) fn refused(&mut self, failure: &Failure) -> Report {
        let plan = vitivirt_machine::plan(&self.observed);
        let step = plan.steps.first().map_or("nothing to write", |step| step.name);
        let outcome = Outcome { stop: Stop::Failed { step, failure: failure.clone() }, written: 0 };
        self.report(&self.observed.clone(), &plan, &outcome)
    }

    fn report(&mut self, before: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
        let report = vitivirt_machine::report(before, plan, outcome);
        if let Some(status) = report.status.as_ref().filter(|status| status.differs()) {
            let status: MachineStatus = serde_json::from_value(status.desired.clone()).unwrap();
            self.observed.machine.status = Some(status);
        }
        report
    }

    /// Passes until nothing is written any more.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10 {
            let (plan, report) = self.reconcile();
            if plan.write_count() == 0 && !report.status.is_some_and(|status| status.differs()) {
                return;
            }
        }
        panic!("it never settles: {:?}", vitivirt_machine::plan(&self.observed));
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
                for operation in operations {
                    if operation.path.starts_with("/metadata/finalizers/") {
                        self.remove_finalizer(&kind, &name, operation);
                        continue;
                    }
                    match operation.path.strip_prefix("/spec").filter(|_| kind == "VirtualMachine") {
                        Some(path) => {
                            edit(&mut self.observed.vm.as_mut().unwrap().spec, path, operation.value.as_ref());
                        }
                        None => self.patch(&kind, &name, &operation.path, operation.value.as_ref().unwrap()),
                    }
                }
            }
            Write::Delete { .. } => self.delete(&kind, &name),
            Write::Lazy { .. } => panic!("nothing of a Machine is big"),
            Write::Status { .. } => panic!("a plan writes no status"),
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
                    controller_uid,
                    labels,
                    spec: body["spec"].clone(),
                    deleting: false,
                    printable_status: "Starting".to_owned(),
                    ready: false,
                    restart_required: false,
                    failure: None,
                });
            }
            "Secret" => {
                let content = text("/metadata/annotations/vitistack.io~1content");
                assert!(self.observed.secret.is_none(), "a second Secret");
                self.observed.secret = Some(SecretView {
                    uid,
                    controller_uid,
                    labels,
                    annotated: content.is_some(),
                    content,
                    tampered: false,
                    began_with: None,
                    deleting: false,
                });
            }
            "PersistentVolumeClaim" => {
                let pvc = PvcView {
                    uid,
                    labels,
                    phase: "Pending".to_owned(),
                    requested: text("/spec/resources/requests/storage").unwrap(),
                    storage_class: text("/spec/storageClassName"),
                    access_mode: text("/spec/accessModes/0").unwrap(),
                    volume_mode: text("/spec/volumeMode").unwrap(),
                    source: text("/metadata/annotations/vitistack.io~1source"),
                    deleting: false,
                    created: self.observed.now.as_second(),
                };
                assert!(self.observed.pvcs.insert(name.to_owned(), pvc).is_none(), "a second PVC");
            }
            "NetworkAttachmentDefinition" => {
                let view = AttachmentView { uid, controller_uid, labels, config: text("/spec/config").unwrap() };
                assert!(self.observed.attachments.insert(name.to_owned(), view).is_none(), "a second NAD");
            }
            "VolumeImportSource" => {
                self.observed.import_sources.insert(name.to_owned(), OwnedView { uid, controller_uid });
            }
            other => panic!("nobody creates a {other}"),
        }
    }

    /// As the server does: what somebody else put there stays.
    fn apply_finalizers(&mut self, kind: &str, name: &str, body: &Value) {
        let finalizers: Vec<String> = serde_json::from_value(body["metadata"]["finalizers"].clone()).unwrap();
        match kind {
            "Machine" => {
                self.observed.machine.metadata.finalizers.get_or_insert_default().extend(finalizers);
            }
            "NetworkConfiguration" => {
                assert_eq!(finalizers, [FINALIZER_NETWORK]);
                self.observed.networks.get_mut(name).unwrap().protected = Some(0);
            }
            other => panic!("nobody applies to a {other}"),
        }
    }

    fn remove_finalizer(&mut self, kind: &str, name: &str, operation: &Operation) {
        let index: usize = operation.path.strip_prefix("/metadata/finalizers/").unwrap().parse().unwrap();
        let seen = operation.expecting.as_ref().and_then(Value::as_str).unwrap();
        match kind {
            "Machine" => {
                let finalizers = self.observed.machine.metadata.finalizers.as_mut().unwrap();
                assert_eq!(finalizers.remove(index), seen);
                self.gone = self.observed.machine.metadata.deletion_timestamp.is_some() && finalizers.is_empty();
            }
            "NetworkConfiguration" => {
                let network = self.observed.networks.get_mut(name).unwrap();
                assert_eq!((network.protected.take(), seen), (Some(index), FINALIZER_NETWORK));
            }
            other => panic!("nobody takes a finalizer from a {other}"),
        }
    }

    fn patch(&mut self, kind: &str, name: &str, path: &str, value: &Value) {
        let text = || value.as_str().unwrap().to_owned();
        let label = path.strip_prefix("/metadata/labels/").map(|key| key.replace("~1", "/").replace("~0", "~"));
        match (kind, label) {
            ("VirtualMachine", Some(label)) => _ = self.observed.vm.as_mut().unwrap().labels.insert(label, text()),
            ("Secret", Some(label)) => _ = self.observed.secret.as_mut().unwrap().labels.insert(label, text()),
            ("PersistentVolumeClaim", Some(label)) => {
                _ = self.observed.pvcs.get_mut(name).unwrap().labels.insert(label, text());
            }
            ("NetworkAttachmentDefinition", Some(label)) => {
                _ = self.observed.attachments.get_mut(name).unwrap().labels.insert(label, text());
            }
            ("Secret", None) if path == "/data" => self.observed.secret.as_mut().unwrap().tampered = false,
            ("Secret", None) if path == "/metadata/annotations/vitistack.io~1content" => {
                let secret = self.observed.secret.as_mut().unwrap();
                assert!(secret.annotated, "the server has nowhere to put an annotation");
                secret.content = Some(text());
            }
            ("Secret", None) if path == "/metadata/annotations" => {
                let secret = self.observed.secret.as_mut().unwrap();
                assert!(!secret.annotated, "annotations of others are lost");
                secret.annotated = true;
                secret.content = value["vitistack.io/content"].as_str().map(str::to_owned);
            }
            ("Secret", None) if path == "/metadata/annotations/vitistack.io~1guest-began-with" => {
                self.observed.secret.as_mut().unwrap().began_with = Some(text());
            }
            ("PersistentVolumeClaim", None) if path == "/spec/resources/requests/storage" => {
                self.observed.pvcs.get_mut(name).unwrap().requested = text();
            }
            ("NetworkAttachmentDefinition", None) if path == "/metadata/labels" => {
                self.observed.attachments.get_mut(name).unwrap().labels =
                    serde_json::from_value(value.clone()).unwrap();
            }
            ("NetworkAttachmentDefinition", None) if path == "/spec" => {
                self.observed.attachments.get_mut(name).unwrap().config = value["config"].as_str().unwrap().to_owned();
            }
            other => panic!("nobody patches {path} of {other:?}"),
        }
    }

    fn delete(&mut self, kind: &str, name: &str) {
        match kind {
            "VirtualMachine" => self.observed.vm.as_mut().unwrap().deleting = true,
            "VirtualMachineInstance" => self.observed.vmi = None,
            "PersistentVolumeClaim" => assert!(self.observed.pvcs.remove(name).is_some(), "{name} is not there"),
            "Secret" => assert!(self.observed.secret.take().is_some(), "{name} is not there"),
            other => panic!("nobody deletes a {other}"),
        }
    }

    // What others do.

    pub(crate) fn edit(&mut self, spec: MachineSpec) {
        self.observed.machine.spec = spec;
        let generation = self.observed.machine.metadata.generation.unwrap_or(0);
        self.observed.machine.metadata.generation = Some(generation + 1);
    }

    pub(crate) fn bind_pvcs(&mut self) {
        for pvc in self.observed.pvcs.values_mut() {
            pvc.phase = "Bound".to_owned();
        }
    }

    pub(crate) fn start_guest(&mut self, phase: &str) {
        let vm = self.observed.vm.as_mut().unwrap();
        vm.printable_status = phase.to_owned();
        self.observed.vmi = Some(VmiView {
            uid: "vmi".to_owned(),
            spec: vitivirt_machine::vmi_spec::comparable_spec(&vm.spec["template"]["spec"]),
            needs_user_data: vitivirt_machine::vmi_spec::names_secret(&vm.spec["template"]["spec"], "web-cloudinit"),
            phase: phase.to_owned(),
            node: Some("node-1".to_owned()),
            addresses: vec!["10.1.2.3".to_owned()],
            paused: false,
            migrating: false,
            vm_generation: Some(vm.generation),
            unschedulable: None,
            failure: None,
            deleting: false,
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

    pub(crate) fn status(&self) -> MachineStatus {
        self.observed.machine.status.clone().unwrap_or_default()
    }

    pub(crate) fn condition(&self, type_: &str) -> (String, String, String) {
        let status = self.status();
        let condition = status.conditions.iter().find(|condition| condition.type_ == type_).unwrap();
        (condition.status.clone(), condition.reason.clone(), condition.message.clone())
    }
}

/// One operation of a JSON patch on a document.
fn edit(document: &mut Value, path: &str, value: Option<&Value>) {
    let (parent, key) = path.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/").replace("~0", "~");
    let parent = document.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => _ = parent.insert(key, value.clone()),
        None => assert!(parent.remove(&key).is_some(), "{path} is not there"),
    }
}

fn labels(body: &Value) -> BTreeMap<String, String> {
    body.pointer("/metadata/labels").map(|labels| serde_json::from_value(labels.clone()).unwrap()).unwrap_or_default()
}
