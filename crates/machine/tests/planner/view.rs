//! One Machine as a tree, in each state of its life.

use serde_json::json;
use vitivirt_api::{
    machine::{MachineSpec, PrintableStatus, VmiPhase},
    view::{StepState, TreeStep},
};
use vitivirt_machine::view::{PodView, adoptable_items, machine_tree};

use crate::simulated_cluster::{SimulatedCluster, running};

fn spec() -> MachineSpec {
    serde_json::from_value(json!({
        "template": "small", "cloudInit": {"userData": "password: hunter2"},
        "networks": [{"name": "a", "networkName": "prod"}, {"name": "b", "networkName": "pod"}],
    }))
    .unwrap()
}

/// Kind, name and state of every step, from the top.
fn states(step: &TreeStep) -> Vec<(&'static str, String, StepState)> {
    let below = step.steps.iter().flat_map(states);
    [(step.kind, step.name.clone(), step.state)].into_iter().chain(below).collect()
}

fn state_of(cluster: &SimulatedCluster, kind: &str) -> StepState {
    let all = states(&machine_tree(&cluster.observed, None));
    all.into_iter().find(|(of, ..)| *of == kind).unwrap_or_else(|| panic!("no {kind}")).2
}

#[test]
fn every_step_of_a_running_machine_is_ok() {
    let cluster = running(spec());
    let tree = machine_tree(&cluster.observed, None);
    let all = states(&tree);
    let expected: Vec<(&str, &str)> = vec![
        ("Machine", "web"),
        ("VirtualMachine", "web"),
        ("VirtualMachineInstance", "web"),
        ("Pod", "virt-launcher-web-…"),
        ("PersistentVolumeClaim", "web-root"),
        ("NetworkConfiguration", "prod"),
        ("Network", "pod"),
        ("Secret", "web-cloudinit"),
    ];
    assert_eq!(all.iter().map(|(kind, name, _)| (*kind, name.as_str())).collect::<Vec<_>>(), expected);
    assert!(all.iter().all(|(.., state)| *state == StepState::Ok), "{all:?}");
    assert!(!serde_json::to_string(&tree).unwrap().contains("hunter2"));
}

#[test]
fn a_new_machine_waits_for_its_objects() {
    let cluster = SimulatedCluster::new(spec()).with_network("prod");
    for kind in ["Machine", "VirtualMachine", "PersistentVolumeClaim", "NetworkConfiguration", "Secret"] {
        assert_eq!(state_of(&cluster, kind), StepState::Waiting, "{kind}");
    }
    let without_network = SimulatedCluster::new(spec());
    assert_eq!(state_of(&without_network, "NetworkConfiguration"), StepState::Failed);
}

#[test]
fn the_step_that_fails_is_marked_and_says_why() {
    let mut cluster = running(spec());
    let vmi = cluster.observed.vmi.as_mut().unwrap();
    (vmi.phase, vmi.unschedulable) = (VmiPhase::Scheduling, Some("0/3 nodes are available".to_owned()));
    cluster.observed.vm.as_mut().unwrap().printable_status = PrintableStatus::ErrorUnschedulable;
    for kind in ["VirtualMachine", "VirtualMachineInstance", "Pod"] {
        assert_eq!(state_of(&cluster, kind), StepState::Failed, "{kind}");
    }
    let json = serde_json::to_string(&machine_tree(&cluster.observed, None)).unwrap();
    assert!(json.contains("cannot be scheduled: 0/3 nodes are available"), "{json}");

    let mut cluster = running(spec());
    cluster.observed.pvcs.clear();
    assert_eq!(state_of(&cluster, "PersistentVolumeClaim"), StepState::Failed, "it was bound, and is lost");
    let mut cluster = running(spec());
    cluster.observed.vm.as_mut().unwrap().controller_uid = Some("another".to_owned());
    assert_eq!(state_of(&cluster, "VirtualMachine"), StepState::Failed);
}

#[test]
fn pods_that_were_read_replace_what_the_vmi_shows() {
    let cluster = running(spec());
    let pod = PodView {
        name: "virt-launcher-web-x".to_owned(),
        phase: "Pending".to_owned(),
        node: None,
        ready: false,
        problem: Some("ErrImagePull: no such image".to_owned()),
    };
    let all = states(&machine_tree(&cluster.observed, Some(&[pod])));
    assert!(all.contains(&("Pod", "virt-launcher-web-x".to_owned(), StepState::Failed)), "{all:?}");
}

#[test]
fn the_pvc_of_an_earlier_machine_can_be_adopted() {
    let mut cluster = running(spec());
    assert_eq!(adoptable_items(&cluster.observed), Vec::<String>::new());
    let earlier = "0b7d8a52-8d44-4f4c-9a75-0d5a7f6f8d02";
    let labels = &mut cluster.observed.pvcs.get_mut("web-root").unwrap().labels;
    labels.insert("vitistack.io/machine-uid".to_owned(), earlier.to_owned());
    let pvc = cluster.observed.pvcs.get_mut("web-root").unwrap();
    pvc.identity = None;
    assert_eq!(adoptable_items(&cluster.observed), ["pvc/web-root"], "the guest keeps its identity");
    assert_eq!(state_of(&cluster, "PersistentVolumeClaim"), StepState::Failed);
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    assert_eq!(adoptable_items(&cluster.observed), [earlier]);
    assert_eq!(state_of(&cluster, "PersistentVolumeClaim"), StepState::Failed);
}
