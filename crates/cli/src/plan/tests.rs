//! The text and the JSON form of a plan, and its exit code.

use std::collections::BTreeSet;

use anstream::{ColorChoice, adapter::strip_str};
use serde_json::json;
use vitivirt_api::{ApiResource, ObjectKey};

use super::*;

fn target(api_version: &str, kind: &str, key: ObjectKey) -> Target {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let gvk = kube_core::GroupVersionKind::gvk(group, version, kind);
    Target::new(ApiResource::from_gvk(&gvk), key)
}

fn change(
    field: &str,
    source: Option<&str>,
    from: Option<Value>,
    to: Option<Value>,
    effect: ChangeEffect,
) -> PlannedChange {
    PlannedChange {
        field: field.to_owned(),
        source_field: source.map(ToOwned::to_owned),
        from,
        to,
        effect,
        reason: source.map(|_| "because".to_owned()),
    }
}

/// A Machine with everything that a plan can contain.
fn machine() -> PlannedObject {
    let key = ObjectKey::namespaced("ns", "web");
    let vm = target("kubevirt.io/v1", "VirtualMachine", key.clone());
    PlannedObject {
        identity: (&target("vitistack.io/v1alpha1", "Machine", key)).into(),
        exists: true,
        writes: vec![
            PlannedWrite::new(
                WriteAction::Create,
                &target("v1", "PersistentVolumeClaim", ObjectKey::namespaced("ns", "web-data")),
                vec![],
            ),
            PlannedWrite::new(
                WriteAction::Update,
                &vm,
                vec![
                    change(
                        "spec.runStrategy",
                        Some("spec.powerState"),
                        Some(json!("Always")),
                        Some(json!("Halted")),
                        ChangeEffect::Live,
                    ),
                    change(
                        "spec.x.sockets",
                        Some("spec.resources.cpu.sockets"),
                        Some(json!(1)),
                        Some(json!(2)),
                        ChangeEffect::LiveIfPossible,
                    ),
                    change("spec.x.disk", None, Some(json!("a")), None, ChangeEffect::Restart),
                ],
            ),
        ],
        refused: vec![RefusedField {
            field: "spec.disks[root].size".to_owned(),
            reason: "it cannot shrink".to_owned(),
        }],
        warnings: vec!["the root disk is empty".to_owned()],
        rollout: None,
        result: PlanResult {
            error: false,
            unknown: false,
            phase: Some("Running".to_owned()),
            ready: Some(true),
            reason: Some("Running".to_owned()),
            message: Some("Machine is running".to_owned()),
        },
    }
}

/// Everything that a rollout can contain.
fn rollout() -> PlannedRollout {
    let workload = |kind: &str, name: &str| target("apps/v1", kind, ObjectKey::namespaced("kubevirt", name));
    let vm = |name: &str, effect, reason: &str| {
        let vm = target("kubevirt.io/v1", "VirtualMachineInstance", ObjectKey::namespaced("ns", name));
        PlannedVm::new(&vm, effect, reason)
    };
    let pods = |count: usize| (1..=count).map(|number| format!("pod-{number}")).collect::<Vec<_>>();
    let crd = target("apiextensions.k8s.io/v1", "CustomResourceDefinition", ObjectKey::cluster("old.example.org"));
    PlannedRollout {
        from_version: Some("v1".to_owned()),
        to_version: Some("v2".to_owned()),
        unchanged: 7,
        kept: vec![KeptObject::new(&crd, "it still has objects")],
        preparations: vec!["3 objects are stored again".to_owned()],
        restarts: vec![
            PlannedRestart::new(&workload("DaemonSet", "virt-handler"), pods(12), vec![1, 2, 2, 2, 2, 2, 1]),
            PlannedRestart::new(&workload("DaemonSet", "single"), pods(1), vec![1]),
            PlannedRestart::new(&workload("Deployment", "virt-api"), pods(7), vec![]),
        ],
        vms: vec![
            vm("a", VmEffect::StayOutdated, "no method"),
            vm("b", VmEffect::Migrate, "it is live-migratable"),
            vm("c", VmEffect::Evict, "it is not live-migratable"),
            vm("d", VmEffect::Migrate, "it is live-migratable"),
        ],
        blockers: vec!["a version would be lost".to_owned()],
    }
}

fn kubevirt() -> PlannedObject {
    let write = |action, kind, key, changes| PlannedWrite::new(action, &target("apps/v1", kind, key), changes);
    let api = || ObjectKey::namespaced("kubevirt", "virt-api");
    PlannedObject {
        identity: (&target("kubevirt.io/v1", "KubeVirt", ObjectKey::namespaced("kubevirt", "kubevirt"))).into(),
        exists: false,
        writes: vec![
            write(
                WriteAction::Restart,
                "Deployment",
                api(),
                vec![change("spec.template.spec", None, None, None, ChangeEffect::Restart)],
            ),
            write(WriteAction::Delete, "ClusterRole", ObjectKey::cluster("old"), vec![]),
            write(WriteAction::Delete, "ClusterRole", ObjectKey::cluster("older"), vec![]),
        ],
        refused: vec![],
        warnings: vec![],
        rollout: Some(rollout()),
        result: PlanResult { error: true, message: Some("no such patch".to_owned()), ..PlanResult::default() },
    }
}

fn document(objects: Vec<PlannedObject>) -> PlanDocument {
    PlanDocument { objects, warnings: vec!["file.yaml: Namespace x: ignored".to_owned()] }
}

fn plain(document: &PlanDocument) -> String {
    strip_str(&document.format(PlanFormat::Text).unwrap()).to_string()
}

#[test]
fn the_text_has_every_write_field_refusal_warning_and_result() {
    let expected = "\
warning: file.yaml: Namespace x: ignored
Machine ns/web (exists)
  + create  PersistentVolumeClaim ns/web-data
  ~ update  VirtualMachine ns/web
      spec.runStrategy: \"Always\" → \"Halted\" (live)
        spec.powerState: because
      spec.x.sockets: 1 → 2 (live if KubeVirt can hotplug it, otherwise at restart)
        spec.resources.cpu.sockets: because
      spec.x.disk: \"a\" is removed (at restart)
  ! refused spec.disks[root].size: it cannot shrink
  warning: the root disk is empty
  1 to create, 1 to update
  → phase Running, Ready: Machine is running
KubeVirt kubevirt/kubevirt (does not exist yet)
  ~ restart Deployment kubevirt/virt-api
      spec.template.spec (at restart)
  - delete  ClusterRole old
  - delete  ClusterRole older
  = keep    CustomResourceDefinition old.example.org: it still has objects
  v1 → v2
  first: 3 objects are stored again
  pods restart, in this order:
    1. DaemonSet kubevirt/virt-handler, 12 pods: on 1 node first, then on 2 nodes at a time (7 batches)
    2. DaemonSet kubevirt/single, 1 pod: on 1 node first
    3. Deployment kubevirt/virt-api, 7 pods: pod-1, pod-2, pod-3, pod-4, pod-5 and 2 more
  VMs, when KubeVirt is updated:
    migrate     2 ns/b, ns/d
        it is live-migratable
    evict       1 ns/c
        it is not live-migratable
    outdated    1 ns/a
        no method
  ! blocked a version would be lost
  1 to restart, 2 to delete, 7 unchanged
  → error: no such patch
";
    assert_eq!(plain(&document(vec![machine(), kubevirt()])), expected);
}

#[test]
fn the_result_names_a_reason_that_is_not_the_phase() {
    let line = |result: PlanResult| {
        let object = PlannedObject { writes: vec![], refused: vec![], warnings: vec![], result, ..machine() };
        plain(&document(vec![object])).lines().skip(2).map(str::trim).collect::<Vec<_>>().join("\n")
    };
    let failed = PlanResult {
        error: true,
        unknown: false,
        phase: Some("Failed".to_owned()),
        ready: Some(false),
        reason: Some("SecretNotFound".to_owned()),
        message: Some("Secret x not found".to_owned()),
    };
    assert_eq!(line(failed), "nothing to write\n→ phase Failed, not Ready (SecretNotFound): Secret x not found");
    let up_to_date = PlanResult { message: Some("up to date".to_owned()), ..PlanResult::default() };
    assert_eq!(line(up_to_date), "nothing to write\n→ up to date");
}

#[test]
fn styles_do_not_change_the_alignment() {
    let text = document(vec![machine(), kubevirt()]).format(PlanFormat::Text).unwrap();
    assert!(text.contains("\u{1b}[31m! refused\u{1b}[0m spec.disks"), "{text}");
    assert!(text.contains("\u{1b}[32m+ create \u{1b}[0m Persistent"), "{text}");
}

#[test]
fn color_never_removes_the_escape_codes_and_always_keeps_them() {
    use std::io::Write;
    let text = document(vec![machine()]).format(PlanFormat::Text).unwrap();
    let written = |choice| {
        let mut out = anstream::AutoStream::new(Vec::new(), choice);
        out.write_all(text.as_bytes()).unwrap();
        String::from_utf8(out.into_inner()).unwrap()
    };
    assert_eq!(written(ColorChoice::Always), text);
    assert!(!written(ColorChoice::Never).contains('\u{1b}'));
    // A buffer is not a terminal.
    assert!(!written(ColorChoice::Auto).contains('\u{1b}'));
}

#[test]
fn json_and_yaml_have_the_same_shape_for_both_programs() {
    let document = document(vec![machine(), kubevirt()]);
    insta::assert_snapshot!(document.format(PlanFormat::Json).unwrap());
    let yaml: Value = serde_saphyr::from_str(&document.format(PlanFormat::Yaml).unwrap()).unwrap();
    assert_eq!(yaml, serde_json::to_value(&document).unwrap());
}

#[test]
fn every_field_of_the_json_form_is_documented() {
    fn keys(value: &Value, into: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    into.insert(name.clone());
                    keys(value, into);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| keys(item, into)),
            _ => {}
        }
    }
    let mut all = BTreeSet::new();
    let mut unknown = kubevirt();
    unknown.result.unknown = true;
    keys(&serde_json::to_value(document(vec![machine(), unknown])).unwrap(), &mut all);
    assert!(all.len() > 15, "{all:?}");
    for key in all {
        let ways = [format!("`{key}`"), format!(".{key}`"), format!("{key}[]`")];
        assert!(ways.iter().any(|way| PLAN_FORMAT.contains(way)), "{key} is not documented");
    }
}

#[test]
fn values_of_a_secret_never_appear() {
    let secret = target("v1", "Secret", ObjectKey::namespaced("ns", "web-cloud-init"));
    let changes =
        vec![change("data.userdata", None, Some(json!("hunter1")), Some(json!("hunter2")), ChangeEffect::Live)];
    let write = PlannedWrite::new(WriteAction::Update, &secret, changes);
    let document = document(vec![PlannedObject { writes: vec![write], ..machine() }]);
    for format in [PlanFormat::Text, PlanFormat::Json, PlanFormat::Yaml] {
        let text = document.format(format).unwrap();
        assert!(text.contains("data.userdata") && !text.contains("hunter"), "{text}");
    }
}

#[test]
fn a_refused_field_or_an_error_exits_with_1() {
    let exit = |refused: bool, error: bool| {
        let mut object = PlannedObject { refused: vec![], ..machine() };
        if refused {
            object.refused = machine().refused;
        }
        object.result.error = error;
        document(vec![object]).exit_code()
    };
    assert_eq!(exit(false, false), ExitCode::SUCCESS);
    assert_eq!(exit(true, false), ExitCode::FAILURE);
    assert_eq!(exit(false, true), ExitCode::FAILURE);
}

#[test]
fn a_blocked_rollout_exits_with_1_and_an_incomplete_plan_with_2() {
    let exit = |blocked: bool, unknown: bool| {
        let mut object = PlannedObject { refused: vec![], rollout: Some(PlannedRollout::default()), ..machine() };
        object.result.unknown = unknown;
        if blocked {
            object.rollout = Some(rollout());
        }
        document(vec![object]).exit_code()
    };
    assert_eq!(exit(false, false), ExitCode::SUCCESS);
    assert_eq!(exit(true, false), ExitCode::FAILURE);
    assert_eq!(exit(false, true), ExitCode::from(2));
    assert_eq!(exit(true, true), ExitCode::FAILURE, "it cannot take effect in any case");
}

#[test]
fn many_objects_of_which_only_the_metadata_changes_are_one_line() {
    let update = |number: usize, field: &str| {
        let key = ObjectKey::cluster(&format!("role-{number}"));
        let changes = vec![change(field, None, None, None, ChangeEffect::Live)];
        PlannedWrite::new(WriteAction::Update, &target("rbac.authorization.k8s.io/v1", "ClusterRole", key), changes)
    };
    let text = |count: usize| {
        let labels = (0..count).map(|number| update(number, "metadata.labels.a"));
        let writes = labels.chain([update(99, "rules")]).collect();
        plain(&document(vec![PlannedObject { writes, ..kubevirt() }]))
    };
    let few = text(10);
    assert!(few.contains("~ update  ClusterRole role-9\n") && few.contains("~ update  ClusterRole role-99"), "{few}");
    let many = text(11);
    assert!(many.contains("~ update  11 objects: only labels and annotations; -o json lists them"), "{many}");
    assert!(many.contains("ClusterRole role-99") && !many.contains("ClusterRole role-9\n"), "{many}");
    assert!(many.contains("12 to update, 7 unchanged"), "{many}");
}
