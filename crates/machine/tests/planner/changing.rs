//! Edits of a running machine: changes that apply immediately, changes that wait for a restart, rejected changes.

use std::collections::BTreeSet;

use k8s_openapi::jiff::SignedDuration;
use serde_json::Value;
use vitivirt_api::{
    ErrorClass, EventKind, EventRecord, Failure, Outcome, Stop, Write,
    machine::{
        CloudInit, Cpu, Disk, DiskSource, Domain, Features, MachinePhase, MachineSpec, Memory, NamedSource, Network,
        Resources, condition_type as type_,
    },
    reason,
};
use vitivirt_machine::changes::{
    ChangeKind, ChangeRule, Effect, FieldChange, RULES, RejectedChange, changes_of, rule_of,
};

use crate::simulated_cluster::{SimulatedCluster, running};

fn small_spec() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

fn spec_with_resources(cores: Option<u32>, sockets: Option<u32>, memory: &str) -> MachineSpec {
    let cpu = Cpu { cores, sockets, threads: None };
    let memory = Memory { size: Some(memory.to_owned()) };
    MachineSpec { resources: Some(Resources { cpu: Some(cpu), memory: Some(memory) }), ..small_spec() }
}

/// What KubeVirt reports when it cannot hotplug a change.
fn restart_required(cluster: &mut SimulatedCluster, is: bool) {
    cluster.observed.vm.as_mut().unwrap().restart_required = is;
    cluster.reconcile_until_up_to_date();
}

fn restart_message(cluster: &SimulatedCluster) -> Option<String> {
    let status = cluster.status();
    status.conditions.into_iter().find(|have| have.type_ == type_::RESTART_REQUIRED).map(|have| have.message)
}

fn rejected_changes(cluster: &SimulatedCluster) -> Vec<RejectedChange> {
    cluster.assessed().assessment().rejected_changes.clone()
}

fn edit_plan(cluster: &mut SimulatedCluster, spec: MachineSpec) -> Vec<FieldChange> {
    cluster.edit(spec);
    let plan = cluster.plan();
    plan.steps.iter().flat_map(|step| &step.writes).flat_map(|write| changes_of(&cluster.observed, write)).collect()
}

fn effect(changes: &[FieldChange], field: &str) -> Option<Effect> {
    changes.iter().find(|change| change.machine_field.as_deref() == Some(field)).map(|change| change.effect)
}

#[test]
fn fields_that_wait_for_a_restart_are_listed_until_the_restart() {
    let mut cluster = running(small_spec());
    assert_eq!(restart_message(&cluster), None);
    let disk = Disk { name: "data".to_owned(), size: Some("1Gi".to_owned()), ..Disk::default() };
    let hyperv = Features { hyperv: Some(true), ..Features::default() };
    cluster.edit(MachineSpec {
        disks: vec![disk],
        domain: Some(Domain { features: Some(hyperv), ..Domain::default() }),
        ..spec_with_resources(Some(4), None, "2Gi")
    });
    cluster.reconcile_until_up_to_date();
    assert_eq!(restart_message(&cluster), None, "KubeVirt has not reported yet");
    restart_required(&mut cluster, true);
    let message = restart_message(&cluster).unwrap();
    for field in ["spec.resources.cpu.cores", "spec.disks[data]", "spec.domain.features.hyperv"] {
        assert!(message.contains(field), "{field} is missing in {message:?}");
    }
    for other in ["memory", "networks", "disks[root]", "cloudInit"] {
        assert!(!message.contains(other), "{other} does not wait for a restart: {message:?}");
    }
    assert!(cluster.condition(type_::READY).0 == "True", "still running");
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    restart_required(&mut cluster, false);
    assert_eq!(restart_message(&cluster), None, "the new guest has everything");
}

#[test]
fn a_field_that_waits_for_a_restart_names_the_template_that_sets_it() {
    let mut cluster = running(small_spec());
    cluster.edit(MachineSpec { template: Some("large".to_owned()), ..small_spec() });
    cluster.reconcile_until_up_to_date();
    restart_required(&mut cluster, true);
    let message = restart_message(&cluster).unwrap();
    assert!(message.contains("spec.resources.cpu.cores (from template large)"), "{message}");
    cluster.edit(MachineSpec { template: Some("large".to_owned()), ..spec_with_resources(Some(4), None, "8Gi") });
    cluster.reconcile_until_up_to_date();
    restart_required(&mut cluster, true);
    let message = restart_message(&cluster).unwrap();
    assert!(message.contains("spec.resources.cpu.cores,") && !message.contains("memory.size (from"), "{message}");
}

/// KubeVirt may have restored a disk, or virtctl may have added one, and the cache does not show it yet.
#[test]
fn a_list_of_the_vm_is_replaced_only_if_it_is_the_one_that_was_observed() {
    let mut cluster = running(small_spec());
    let network = Network { name: "a".to_owned(), network_name: "pod".to_owned(), ..Network::default() };
    cluster.edit(MachineSpec { networks: vec![network], ..small_spec() });
    let plan = cluster.plan();
    let observed = &cluster.observed.vm.as_ref().unwrap().spec;
    let mut lists = 0;
    for write in plan.steps.iter().flat_map(|step| &step.writes) {
        let Write::Patch { operations, .. } = write else { continue };
        for operation in operations.iter().filter(|operation| operation.value.as_ref().is_some_and(Value::is_array)) {
            let before = operation.path.strip_prefix("/spec").and_then(|path| observed.pointer(path));
            assert!(before.is_some() && operation.expecting.as_ref() == before, "{}", operation.path);
            lists += 1;
        }
    }
    assert!(lists >= 2, "interfaces and networks");
}

#[test]
fn an_edit_that_is_reverted_waits_for_no_restart() {
    let mut cluster = running(small_spec());
    cluster.edit(spec_with_resources(Some(4), None, "2Gi"));
    cluster.reconcile_until_up_to_date();
    restart_required(&mut cluster, true);
    assert!(restart_message(&cluster).unwrap().contains("cores"));
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    restart_required(&mut cluster, false);
    assert_eq!(restart_message(&cluster), None);
}

/// The guest of a Machine has the hardware of its architecture.
#[test]
fn kubevirt_chooses_the_machine_type_and_only_an_edit_changes_it() {
    let new = SimulatedCluster::new(small_spec());
    let plan = new.plan();
    let vm = plan.steps.iter().flat_map(|step| &step.writes).find_map(|write| match write {
        Write::Create { target, body } if target.resource.kind == "VirtualMachine" => Some(body.json()),
        _ => None,
    });
    let domain = &vm.unwrap()["spec"]["template"]["spec"]["domain"];
    assert!(domain["firmware"].is_object() && domain["machine"].is_null(), "{domain}");

    let machine_type = |cluster: &SimulatedCluster| {
        cluster.observed.vm.as_ref().unwrap().spec["template"]["spec"]["domain"]["machine"]["type"].clone()
    };
    let mut cluster = running(small_spec());
    assert_eq!(machine_type(&cluster), "q35");
    // KubeVirt's default on arm64.
    cluster.observed.vm.as_mut().unwrap().spec["template"]["spec"]["domain"]["machine"]["type"] = "virt".into();
    cluster.reconcile_until_up_to_date();
    assert_eq!(machine_type(&cluster), "virt");
    let mut asks = small_spec();
    asks.domain = serde_json::from_value(serde_json::json!({"machine": {"type": "pc-i440fx"}})).unwrap();
    cluster.edit(asks);
    cluster.reconcile_until_up_to_date();
    assert_eq!(machine_type(&cluster), "pc");
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    assert_eq!(machine_type(&cluster), "pc", "without the field the guest keeps its hardware");
}

/// A guest is on the VLAN that the network had when its pod started.
#[test]
fn a_changed_network_waits_for_the_restart_of_its_guests() {
    let network = Network { name: "a".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let mut cluster = running(MachineSpec { networks: vec![network], ..small_spec() });
    let set_vlan = |cluster: &mut SimulatedCluster, vlan| {
        cluster.observed.now += SignedDuration::from_secs(10);
        cluster.observed.networks.get_mut("prod").unwrap().vlan = Some(vlan);
        cluster.reconcile_until_up_to_date();
    };
    assert_eq!(restart_message(&cluster), None);
    set_vlan(&mut cluster, 200);
    let message = restart_message(&cluster).unwrap();
    assert!(
        message.contains(
            "NetworkConfiguration prod (now bridge br1 VLAN 200; the guest is connected to bridge br1 VLAN 100)"
        ),
        "{message}"
    );
    set_vlan(&mut cluster, 300);
    assert!(restart_message(&cluster).unwrap().contains("connected to bridge br1 VLAN 100"));
    set_vlan(&mut cluster, 100);
    assert_eq!(restart_message(&cluster), None, "the network is again as the guest has it");
    set_vlan(&mut cluster, 200);
    // Drift of the NAD is repaired, and concerns no guest that runs.
    cluster.observed.now += SignedDuration::from_secs(10);
    cluster.observed.vmi.as_mut().unwrap().connected_since = cluster.observed.now.as_second();
    cluster.observed.network_attachments.get_mut("prod").unwrap().config =
        r#"{"type": "bridge", "bridge": "br9"}"#.to_owned();
    cluster.observed.now += SignedDuration::from_secs(10);
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.network_attachments["prod"].config.contains("br1"));
    assert_eq!(restart_message(&cluster), None);
    // A NAD of an earlier version has no record.
    let attachment = cluster.observed.network_attachments.get_mut("prod").unwrap();
    attachment.segments = None;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.network_attachments["prod"].segments, None, "nothing is written without a change");
    set_vlan(&mut cluster, 400);
    assert!(restart_message(&cluster).unwrap().contains("connected to bridge br1 VLAN 200"));
}

#[test]
fn a_pending_restart_has_one_event() {
    let mut cluster = running(small_spec());
    cluster.edit(spec_with_resources(Some(4), None, "2Gi"));
    cluster.reconcile_until_up_to_date();
    cluster.observed.vm.as_mut().unwrap().restart_required = true;
    let events = |cluster: &mut SimulatedCluster| {
        cluster.reconcile().1.events.iter().filter(|event| event.reason == "PendingRestart").count()
    };
    assert_eq!((events(&mut cluster), events(&mut cluster)), (1, 0));
}

/// KubeVirt does not compare the Secret, so it never reports that a restart is needed.
#[test]
fn changed_user_data_waits_for_a_restart_until_it_is_reverted() {
    let cloud_init = |text: &str| MachineSpec { cloud_init: user_data(text), ..small_spec() };
    let mut cluster = running(cloud_init("one"));
    for (text, waits) in [("two", true), ("three", true), ("one", false), ("four", true)] {
        cluster.edit(cloud_init(text));
        cluster.reconcile_until_up_to_date();
        cluster.reconcile_until_up_to_date();
        assert_eq!(
            restart_message(&cluster).is_some_and(|message| message.contains("spec.cloudInit")),
            waits,
            "{text}"
        );
    }
    cluster.observed.vmi.as_mut().unwrap().uid = "another guest".to_owned();
    cluster.reconcile_until_up_to_date();
    assert_eq!(restart_message(&cluster), None);
}

fn user_data(text: &str) -> Option<CloudInit> {
    Some(CloudInit { user_data: Some(text.to_owned()), ..CloudInit::default() })
}

#[test]
fn an_obsolete_cloud_init_secret_is_deleted_when_no_vmi_needs_it() {
    let mut cluster = running(MachineSpec { cloud_init: user_data("one"), ..small_spec() });
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some(), "a migration of the VMI reads it again");
    cluster.observed.vmi.as_mut().unwrap().deleting = true;
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some(), "the VMI is still shutting down");
    cluster.observed.vmi = None;
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some(), "the next VMI may be created from the earlier VM");
    cluster.start_guest("Running");
    let foreign = cluster.observed.secret.as_mut().unwrap().controller_uid.replace("another".to_owned());
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some(), "it belongs to another owner");
    cluster.observed.secret.as_mut().unwrap().controller_uid = foreign;
    cluster.observed.secret.as_mut().unwrap().deleting = true;
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some(), "it is already being deleted");
    cluster.observed.secret.as_mut().unwrap().deleting = false;
    assert!(cluster.assessed().discards_user_data(), "the observer does a live check");
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_none());
    assert!(!cluster.assessed().discards_user_data());
}

/// An older role or a policy may forbid the deletion.
#[test]
fn a_machine_is_ready_although_its_obsolete_secret_cannot_be_deleted() {
    let mut cluster = running(MachineSpec { cloud_init: user_data("one"), ..small_spec() });
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    cluster.start_guest("Running");
    let plan = cluster.plan();
    let step = plan.steps.last().unwrap();
    assert_eq!((step.writes.len(), step.writes[0].verb()), (1, "delete"));
    let message = |failure: Failure| {
        let outcome = Outcome { stop: Stop::Failed { step: step.name, failure }, written: 0 };
        let status = vitivirt_machine::report(&cluster.assessed(), &plan, &outcome).status.unwrap().desired;
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
    let stopped = MachineSpec { power_state: Some("Stopped".to_owned()), ..small_spec() };
    let mut cluster = SimulatedCluster::new(MachineSpec { cloud_init: user_data("one"), ..stopped.clone() });
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_some());
    cluster.edit(stopped);
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.secret.is_none());
}

#[test]
fn every_changed_field_has_the_effect_of_its_rule() {
    let network =
        |name: &str, on: &str| Network { name: name.to_owned(), network_name: on.to_owned(), ..Network::default() };
    let mut cluster =
        running(MachineSpec { networks: vec![network("a", "pod")], ..spec_with_resources(Some(2), Some(1), "2Gi") });
    let live = |spec: MachineSpec| MachineSpec { networks: vec![network("a", "pod")], ..spec };
    let more = edit_plan(&mut cluster, live(spec_with_resources(Some(2), Some(2), "4Gi")));
    assert_eq!(effect(&more, "spec.resources.cpu.sockets"), Some(Effect::LiveIfPossible));
    assert_eq!(effect(&more, "spec.resources.memory.size"), Some(Effect::LiveIfPossible));
    let with_cores = edit_plan(&mut cluster, live(spec_with_resources(Some(4), Some(2), "4Gi")));
    assert_eq!(
        effect(&with_cores, "spec.resources.cpu.sockets"),
        Some(Effect::Restart),
        "nothing is hotplugged while another change waits"
    );
    let interface = MachineSpec {
        networks: vec![network("a", "pod"), network("b", "prod")],
        ..spec_with_resources(Some(2), Some(1), "2Gi")
    };
    assert_eq!(effect(&edit_plan(&mut cluster, interface), "spec.networks[b]"), Some(Effect::LiveIfPossible));
    let stopped =
        MachineSpec { power_state: Some("Stopped".to_owned()), ..live(spec_with_resources(Some(2), Some(1), "2Gi")) };
    assert_eq!(effect(&edit_plan(&mut cluster, stopped), "spec.powerState"), Some(Effect::Live));
    let retained = Disk { name: "root".to_owned(), on_delete: Some("Retain".to_owned()), ..Disk::default() };
    let kept = MachineSpec { disks: vec![retained], ..live(spec_with_resources(Some(2), Some(1), "2Gi")) };
    assert_eq!(effect(&edit_plan(&mut cluster, kept), "spec.disks[root].onDelete"), Some(Effect::Live));
}

#[test]
fn changes_that_a_pvc_does_not_allow_are_rejected_and_the_others_apply() {
    let disk = |change: fn(&mut Disk)| {
        let mut disk = Disk { name: "data".to_owned(), size: Some("10Gi".to_owned()), ..Disk::default() };
        change(&mut disk);
        MachineSpec { disks: vec![disk], power_state: Some("Stopped".to_owned()), ..small_spec() }
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
        let mut cluster = running(disk(|_| {}));
        let pvc = cluster.observed.pvcs["web-data"].clone();
        cluster.edit(disk(change));
        cluster.reconcile_until_up_to_date();
        let rejected = rejected_changes(&cluster);
        assert_eq!(rejected.iter().map(|change| change.field.as_str()).collect::<Vec<_>>(), [field]);
        let rule = rule_of(field, ChangeKind::Shrinks).unwrap();
        assert!(rule.effect == Effect::Refused && rejected[0].reason.contains(rule.why), "{rejected:?}");
        assert_eq!(cluster.observed.pvcs["web-data"], pvc, "{field}");
        assert_eq!(cluster.observed.vm.as_ref().unwrap().spec["runStrategy"], "Halted", "the other change applies");
        cluster.edit(disk(|_| {}));
        cluster.reconcile_until_up_to_date();
        assert!(rejected_changes(&cluster).is_empty());
    }
}

/// The condition and the event do not depend on whether the machine is ready.
#[test]
fn a_rejected_change_has_a_condition_until_it_is_reverted_and_one_warning() {
    let sized = |size: &str| MachineSpec {
        disks: vec![Disk { name: "data".to_owned(), size: Some(size.to_owned()), ..Disk::default() }],
        ..small_spec()
    };
    let mut cluster = running(sized("10Gi"));
    cluster.observed.vmi = None;
    cluster.edit(sized("5Gi"));
    let warnings = |cluster: &mut SimulatedCluster| {
        let (_, report) = cluster.reconcile();
        let is_warning =
            |event: &&EventRecord| event.reason == "ImpossibleChange" && matches!(event.kind, EventKind::Warning);
        report.events.iter().filter(is_warning).count()
    };
    assert_eq!((warnings(&mut cluster), warnings(&mut cluster)), (1, 0));
    assert_eq!(cluster.condition(type_::READY).0, "False");
    let (status, _, message) = cluster.condition(type_::CHANGES_REJECTED);
    assert!(status == "True" && message.starts_with("spec.disks[data].size: cannot change"), "{message}");
    cluster.edit(sized("10Gi"));
    assert_eq!(warnings(&mut cluster), 0);
    let conditions = cluster.status().conditions;
    assert!(conditions.iter().all(|condition| condition.type_ != type_::CHANGES_REJECTED), "{conditions:?}");
}

#[test]
fn growth_is_rejected_if_the_storage_class_does_not_allow_expansion() {
    let disk = |size: &str| MachineSpec {
        disks: vec![Disk { name: "data".to_owned(), size: Some(size.to_owned()), ..Disk::default() }],
        ..small_spec()
    };
    let mut cluster = running(disk("10Gi"));
    cluster.observed.storage_classes.iter_mut().for_each(|class| class.allows_expansion = false);
    cluster.edit(disk("20Gi"));
    cluster.reconcile_until_up_to_date();
    let rejected = rejected_changes(&cluster);
    assert!(rejected.len() == 1 && rejected[0].reason.contains("does not allow expansion"), "{rejected:?}");
}

#[test]
fn the_first_and_the_last_feature_are_listed_by_name() {
    let acpi = Features { acpi: Some(false), ..Features::default() };
    let with_acpi = MachineSpec { domain: Some(Domain { features: Some(acpi), ..Domain::default() }), ..small_spec() };
    for (from, to) in [(small_spec(), with_acpi.clone()), (with_acpi, small_spec())] {
        let mut cluster = running(from);
        let fields: Vec<_> =
            edit_plan(&mut cluster, to).into_iter().filter_map(|change| change.machine_field).collect();
        assert_eq!(fields, ["spec.domain.features.acpi"]);
        cluster.reconcile_until_up_to_date();
        restart_required(&mut cluster, true);
        assert!(
            restart_message(&cluster).unwrap().contains("to apply spec.domain.features.acpi;"),
            "{:?}",
            restart_message(&cluster)
        );
    }
}

#[test]
fn a_change_of_the_source_is_not_rejected_if_the_source_of_the_pvc_is_unknown() {
    let disk = |name: &str| {
        let source = DiskSource { pvc: Some(NamedSource { name: name.to_owned() }), ..DiskSource::default() };
        let disk =
            Disk { name: "data".to_owned(), size: Some("1Gi".to_owned()), source: Some(source), ..Disk::default() };
        MachineSpec { disks: vec![disk], ..small_spec() }
    };
    let mut cluster = running(disk("one"));
    assert!(rejected_changes(&cluster).is_empty());
    cluster.edit(disk("two"));
    assert_eq!(rejected_changes(&cluster).len(), 1);
    cluster.observed.pvcs.get_mut("web-data").unwrap().source = Some(String::new());
    assert!(rejected_changes(&cluster).is_empty());
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

fn leaves(path: &str, schema: &Value, found: &mut BTreeSet<String>) {
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
