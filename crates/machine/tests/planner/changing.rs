//! Edits of a running machine: changes that apply immediately, changes that wait for a restart, rejected changes.

use std::collections::BTreeSet;

use vitivirt_api::{
    ErrorClass, Failure, Outcome, Stop,
    machine::{
        CloudInit, Cpu, Disk, DiskSource, Domain, Features, MachinePhase, MachineSpec, Memory, NamedSource, Network,
        Resources, condition_type as type_,
    },
    reason,
};
use vitivirt_machine::{
    changes::{ChangeKind, ChangeRule, Effect, FieldChange, RULES, RejectedChange, changes_of, rule_of},
    discards_user_data,
};

use crate::world::{World, running};

fn small() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

fn with(cores: Option<u32>, sockets: Option<u32>, memory: &str) -> MachineSpec {
    let cpu = Cpu { cores, sockets, threads: None };
    let memory = Memory { size: Some(memory.to_owned()) };
    MachineSpec { resources: Some(Resources { cpu: Some(cpu), memory: Some(memory) }), ..small() }
}

/// What KubeVirt reports when it cannot hotplug a change.
fn restart_required(world: &mut World, is: bool) {
    world.observed.vm.as_mut().unwrap().restart_required = is;
    world.settle();
}

fn restart_message(world: &World) -> Option<String> {
    let status = world.status();
    status.conditions.into_iter().find(|have| have.type_ == type_::RESTART_REQUIRED).map(|have| have.message)
}

fn rejected_changes(world: &World) -> Vec<RejectedChange> {
    world.assessed().assessment().rejected_changes.clone()
}

fn edit_plan(world: &mut World, spec: MachineSpec) -> Vec<FieldChange> {
    world.edit(spec);
    let plan = world.plan();
    plan.steps.iter().flat_map(|step| &step.writes).flat_map(|write| changes_of(&world.observed, write)).collect()
}

fn effect(changes: &[FieldChange], field: &str) -> Option<Effect> {
    changes.iter().find(|change| change.machine_field.as_deref() == Some(field)).map(|change| change.effect)
}

#[test]
fn fields_that_wait_for_a_restart_are_listed_until_the_restart() {
    let mut world = running(small());
    assert_eq!(restart_message(&world), None);
    let disk = Disk { name: "data".to_owned(), size: Some("1Gi".to_owned()), ..Disk::default() };
    let hyperv = Features { hyperv: Some(true), ..Features::default() };
    world.edit(MachineSpec {
        disks: vec![disk],
        domain: Some(Domain { features: Some(hyperv), ..Domain::default() }),
        ..with(Some(4), None, "2Gi")
    });
    world.settle();
    assert_eq!(restart_message(&world), None, "KubeVirt has not reported yet");
    restart_required(&mut world, true);
    let message = restart_message(&world).unwrap();
    for field in ["spec.resources.cpu.cores", "spec.disks[data]", "spec.domain.features.hyperv"] {
        assert!(message.contains(field), "{field} is missing in {message:?}");
    }
    for other in ["memory", "networks", "disks[root]", "cloudInit"] {
        assert!(!message.contains(other), "{other} does not wait for a restart: {message:?}");
    }
    assert!(world.condition(type_::READY).0 == "True", "still running");
    world.bind_pvcs();
    world.start_guest("Running");
    restart_required(&mut world, false);
    assert_eq!(restart_message(&world), None, "the new guest has everything");
}

#[test]
fn an_edit_that_is_reverted_waits_for_no_restart() {
    let mut world = running(small());
    world.edit(with(Some(4), None, "2Gi"));
    world.settle();
    restart_required(&mut world, true);
    assert!(restart_message(&world).unwrap().contains("cores"));
    world.edit(small());
    world.settle();
    restart_required(&mut world, false);
    assert_eq!(restart_message(&world), None);
}

#[test]
fn a_pending_restart_has_one_event() {
    let mut world = running(small());
    world.edit(with(Some(4), None, "2Gi"));
    world.settle();
    world.observed.vm.as_mut().unwrap().restart_required = true;
    let events =
        |world: &mut World| world.reconcile().1.events.iter().filter(|event| event.reason == "PendingRestart").count();
    assert_eq!((events(&mut world), events(&mut world)), (1, 0));
}

/// KubeVirt does not compare the Secret, so it never reports that a restart is needed.
#[test]
fn changed_user_data_waits_for_a_restart_until_it_is_reverted() {
    let cloud_init = |text: &str| MachineSpec { cloud_init: user_data(text), ..small() };
    let mut world = running(cloud_init("one"));
    for (text, waits) in [("two", true), ("three", true), ("one", false), ("four", true)] {
        world.edit(cloud_init(text));
        world.settle();
        world.settle();
        assert_eq!(restart_message(&world).is_some_and(|message| message.contains("spec.cloudInit")), waits, "{text}");
    }
    world.observed.vmi.as_mut().unwrap().uid = "another guest".to_owned();
    world.settle();
    assert_eq!(restart_message(&world), None);
}

fn user_data(text: &str) -> Option<CloudInit> {
    Some(CloudInit { user_data: Some(text.to_owned()), ..CloudInit::default() })
}

#[test]
fn an_obsolete_cloud_init_secret_is_deleted_when_no_vmi_needs_it() {
    let mut world = running(MachineSpec { cloud_init: user_data("one"), ..small() });
    world.edit(small());
    world.settle();
    assert!(world.observed.secret.is_some(), "a migration of the VMI reads it again");
    world.observed.vmi.as_mut().unwrap().deleting = true;
    world.settle();
    assert!(world.observed.secret.is_some(), "the VMI is still shutting down");
    world.observed.vmi = None;
    world.settle();
    assert!(world.observed.secret.is_some(), "the next VMI may be created from the earlier VM");
    world.start_guest("Running");
    let foreign = world.observed.secret.as_mut().unwrap().controller_uid.replace("another".to_owned());
    world.settle();
    assert!(world.observed.secret.is_some(), "it belongs to another owner");
    world.observed.secret.as_mut().unwrap().controller_uid = foreign;
    world.observed.secret.as_mut().unwrap().deleting = true;
    world.settle();
    assert!(world.observed.secret.is_some(), "it is already being deleted");
    world.observed.secret.as_mut().unwrap().deleting = false;
    assert!(discards_user_data(&world.assessed()), "the observer does a live check");
    world.settle();
    assert!(world.observed.secret.is_none());
    assert!(!discards_user_data(&world.assessed()));
}

/// An older role or a policy may forbid the deletion.
#[test]
fn a_machine_is_ready_although_its_obsolete_secret_cannot_be_deleted() {
    let mut world = running(MachineSpec { cloud_init: user_data("one"), ..small() });
    world.edit(small());
    world.settle();
    world.start_guest("Running");
    let plan = world.plan();
    let step = plan.steps.last().unwrap();
    assert_eq!((step.writes.len(), step.writes[0].verb()), (1, "delete"));
    let message = |failure: Failure| {
        let outcome = Outcome { stop: Stop::Failed { step: step.name, failure }, written: 0 };
        let status = vitivirt_machine::report(&world.assessed(), &plan, &outcome).status.unwrap().desired;
        assert_eq!(status.phase, Some(MachinePhase::Running));
        let ready = status.conditions.into_iter().find(|condition| condition.type_ == type_::READY).unwrap();
        assert_eq!(ready.status, "True");
        ready.message
    };
    let forbidden =
        Failure { class: ErrorClass::Forbidden, ..Failure::transient(reason::PERMISSION_MISSING, "it may not") };
    assert!(
        message(forbidden).contains("the obsolete cloud-init Secret web-cloudinit could not be deleted: it may not")
    );
    assert!(!message(Failure::transient(reason::WEBHOOK_UNREACHABLE, "later")).contains("later"));
}

#[test]
fn an_obsolete_cloud_init_secret_of_a_stopped_machine_is_deleted_immediately() {
    let stopped = MachineSpec { power_state: Some("Stopped".to_owned()), ..small() };
    let mut world = World::new(MachineSpec { cloud_init: user_data("one"), ..stopped.clone() });
    world.settle();
    assert!(world.observed.secret.is_some());
    world.edit(stopped);
    world.settle();
    assert!(world.observed.secret.is_none());
}

#[test]
fn every_changed_field_has_the_effect_of_its_rule() {
    let network =
        |name: &str, on: &str| Network { name: name.to_owned(), network_name: on.to_owned(), ..Network::default() };
    let mut world = running(MachineSpec { networks: vec![network("a", "pod")], ..with(Some(2), Some(1), "2Gi") });
    let live = |spec: MachineSpec| MachineSpec { networks: vec![network("a", "pod")], ..spec };
    let more = edit_plan(&mut world, live(with(Some(2), Some(2), "4Gi")));
    assert_eq!(effect(&more, "spec.resources.cpu.sockets"), Some(Effect::LiveIfPossible));
    assert_eq!(effect(&more, "spec.resources.memory.size"), Some(Effect::LiveIfPossible));
    let with_cores = edit_plan(&mut world, live(with(Some(4), Some(2), "4Gi")));
    assert_eq!(
        effect(&with_cores, "spec.resources.cpu.sockets"),
        Some(Effect::Restart),
        "nothing is hotplugged while another change waits"
    );
    let interface =
        MachineSpec { networks: vec![network("a", "pod"), network("b", "prod")], ..with(Some(2), Some(1), "2Gi") };
    assert_eq!(effect(&edit_plan(&mut world, interface), "spec.networks[b]"), Some(Effect::LiveIfPossible));
    let stopped = MachineSpec { power_state: Some("Stopped".to_owned()), ..live(with(Some(2), Some(1), "2Gi")) };
    assert_eq!(effect(&edit_plan(&mut world, stopped), "spec.powerState"), Some(Effect::Live));
    let retained = Disk { name: "root".to_owned(), on_delete: Some("Retain".to_owned()), ..Disk::default() };
    let kept = MachineSpec { disks: vec![retained], ..live(with(Some(2), Some(1), "2Gi")) };
    assert_eq!(effect(&edit_plan(&mut world, kept), "spec.disks[root].onDelete"), Some(Effect::Live));
}

#[test]
fn changes_that_a_pvc_does_not_allow_are_rejected_and_the_others_apply() {
    let disk = |change: fn(&mut Disk)| {
        let mut disk = Disk { name: "data".to_owned(), size: Some("10Gi".to_owned()), ..Disk::default() };
        change(&mut disk);
        MachineSpec { disks: vec![disk], power_state: Some("Stopped".to_owned()), ..small() }
    };
    for (change, field) in [
        ((|disk| disk.size = Some("5Gi".to_owned())) as fn(&mut Disk), "spec.disks[data].size"),
        (|disk| disk.storage_class = Some("fast-ssd".to_owned()), "spec.disks[data].storageClass"),
        (|disk| disk.access_mode = Some("ReadWriteMany".to_owned()), "spec.disks[data].accessMode"),
        (|disk| disk.volume_mode = Some("Block".to_owned()), "spec.disks[data].volumeMode"),
        (
            |disk| {
                let pvc = Some(NamedSource { name: "p".to_owned() });
                disk.source = Some(DiskSource { pvc, ..DiskSource::default() });
            },
            "spec.disks[data].source",
        ),
    ] {
        let mut world = running(disk(|_| {}));
        let pvc = world.observed.pvcs["web-data"].clone();
        world.edit(disk(change));
        world.settle();
        let rejected = rejected_changes(&world);
        assert_eq!(rejected.iter().map(|change| change.field.as_str()).collect::<Vec<_>>(), [field]);
        let rule = rule_of(field, ChangeKind::Shrinks).unwrap();
        assert!(rule.effect == Effect::Refused && rejected[0].reason.contains(rule.why), "{rejected:?}");
        assert_eq!(world.observed.pvcs["web-data"], pvc, "{field}");
        assert_eq!(world.observed.vm.as_ref().unwrap().spec["runStrategy"], "Halted", "the other change applies");
        world.edit(disk(|_| {}));
        world.settle();
        assert!(rejected_changes(&world).is_empty());
    }
}

#[test]
fn growth_is_rejected_if_the_storage_class_does_not_allow_expansion() {
    let disk = |size: &str| MachineSpec {
        disks: vec![Disk { name: "data".to_owned(), size: Some(size.to_owned()), ..Disk::default() }],
        ..small()
    };
    let mut world = running(disk("10Gi"));
    world.observed.storage_classes.iter_mut().for_each(|class| class.allows_expansion = false);
    world.edit(disk("20Gi"));
    world.settle();
    let rejected = rejected_changes(&world);
    assert!(rejected.len() == 1 && rejected[0].reason.contains("does not allow expansion"), "{rejected:?}");
}

#[test]
fn the_first_and_the_last_feature_are_listed_by_name() {
    let acpi = Features { acpi: Some(false), ..Features::default() };
    let with_acpi = MachineSpec { domain: Some(Domain { features: Some(acpi), ..Domain::default() }), ..small() };
    for (from, to) in [(small(), with_acpi.clone()), (with_acpi, small())] {
        let mut world = running(from);
        let fields: Vec<_> = edit_plan(&mut world, to).into_iter().filter_map(|change| change.machine_field).collect();
        assert_eq!(fields, ["spec.domain.features.acpi"]);
        world.settle();
        restart_required(&mut world, true);
        assert!(
            restart_message(&world).unwrap().contains("to apply spec.domain.features.acpi;"),
            "{:?}",
            restart_message(&world)
        );
    }
}

#[test]
fn a_change_of_the_source_is_not_rejected_if_the_source_of_the_pvc_is_unknown() {
    let disk = |name: &str| {
        let source = DiskSource { pvc: Some(NamedSource { name: name.to_owned() }), ..DiskSource::default() };
        let disk =
            Disk { name: "data".to_owned(), size: Some("1Gi".to_owned()), source: Some(source), ..Disk::default() };
        MachineSpec { disks: vec![disk], ..small() }
    };
    let mut world = running(disk("one"));
    assert!(rejected_changes(&world).is_empty());
    world.edit(disk("two"));
    assert_eq!(rejected_changes(&world).len(), 1);
    world.observed.pvcs.get_mut("web-data").unwrap().source = Some(String::new());
    assert!(rejected_changes(&world).is_empty());
}

/// Every field has a rule, and every rule has a field.
#[test]
fn the_table_and_the_schema_have_the_same_fields() {
    let crd = &vitivirt_api::machine::crds()[0];
    let schema = serde_json::to_value(crd.spec.versions[0].schema.as_ref().unwrap()).unwrap();
    let mut fields = BTreeSet::new();
    leaves("spec", &schema["openAPIV3Schema"]["properties"]["spec"], &mut fields);
    let known: BTreeSet<&str> = RULES.iter().map(|rule| rule.field).collect();
    for field in &fields {
        // The name identifies an item; a source and a reference change as a whole.
        let covered = known.iter().any(|rule| field == rule || field.starts_with(&format!("{rule}.")));
        assert!(covered || field.ends_with("[].name"), "{field} has no rule");
    }
    for rule in known.iter().filter(|rule| rule.starts_with("spec.")) {
        let exists = fields.iter().any(|field| field == rule || field.starts_with(*rule));
        assert!(exists, "{rule} is not a field");
    }
}

#[test]
fn no_field_has_two_rules_for_the_same_kind_of_change() {
    for (index, rule) in RULES.iter().enumerate() {
        let same = |other: &ChangeRule| other.field == rule.field && other.change == rule.change;
        assert!(!RULES.iter().skip(index + 1).any(same), "{rule:?}");
        assert!(!rule.why.is_empty());
    }
}

fn leaves(path: &str, schema: &serde_json::Value, found: &mut BTreeSet<String>) {
    match (schema.get("properties"), schema.get("items")) {
        (Some(properties), _) => {
            for (name, inner) in properties.as_object().unwrap() {
                leaves(&format!("{path}.{name}"), inner, found);
            }
        }
        (None, Some(items)) if items.get("properties").is_some() => leaves(&format!("{path}[]"), items, found),
        _ => _ = found.insert(path.to_owned()),
    }
}
