//! Properties that hold for every valid spec.

use proptest::{collection::vec, prelude::*};
use serde_json::json;
use vitivirt_api::machine::MachineSpec;
use vitivirt_machine::{render::vm, resolve::resolve, testing::machine_spec as spec};

use crate::simulated_cluster::{SimulatedCluster, with_machine_type};

fn cluster(spec: MachineSpec) -> SimulatedCluster {
    SimulatedCluster::new(spec).with_network("prod").with_network("storage")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn the_plan_is_empty_after_it_was_applied(spec in spec()) {
        let mut cluster = cluster(spec);
        let (first, _) = cluster.reconcile();
        prop_assert!(cluster.observed.vm.is_some(), "a valid spec gets a VM: {first:?}, {:?}", cluster.status().diagnosis);
        cluster.reconcile_until_up_to_date();
        cluster.bind_pvcs();
        cluster.reconcile_until_up_to_date();
        prop_assert_eq!(cluster.plan().write_count(), 0);
    }

    #[test]
    fn a_deletion_ends_and_leaves_only_retained_pvcs(spec in spec()) {
        let mut cluster = cluster(spec);
        cluster.reconcile_until_up_to_date();
        cluster.delete_machine();
        cluster.reconcile();
        prop_assert!(!cluster.machine_deleted, "the VM is still shutting down");
        cluster.finish_shutdown();
        cluster.reconcile();
        prop_assert!(cluster.machine_deleted);
        let kept = cluster.observed.pvcs.values().all(|pvc| pvc.labels["vitistack.io/on-delete"] == "Retain");
        prop_assert!(kept, "{:?}", cluster.observed.pvcs);
        prop_assert!(cluster.observed.networks.values().all(|network| network.finalizer_index.is_none()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_series_of_edits_ends_in_the_same_vm_as_the_last_edit_alone(edits in vec(spec(), 2..5)) {
        let last = edits.last().cloned().unwrap_or_default();
        let mut chained = cluster(MachineSpec::default());
        for edit in edits {
            chained.edit(edit);
            chained.reconcile_until_up_to_date();
        }
        let machine = &chained.observed.machine;
        let expected = with_machine_type(json!(vm::spec(&resolve(machine).unwrap())));
        prop_assert_eq!(&chained.observed.vm.as_ref().unwrap().spec, &expected);
        let mut direct = cluster(last);
        direct.reconcile_until_up_to_date();
        prop_assert_eq!(&direct.observed.vm.as_ref().unwrap().spec, &expected);
        // When a guest runs with the last edit, the Secret of earlier edits is deleted.
        chained.start_guest("Running");
        chained.reconcile_until_up_to_date();
        prop_assert_eq!(chained.observed.secret.is_some(), direct.observed.secret.is_some());
    }
}
