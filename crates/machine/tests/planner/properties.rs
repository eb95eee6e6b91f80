//! What holds for every spec.

use proptest::collection::vec;
use proptest::prelude::*;
use vitivirt_api::machine::MachineSpec;
use vitivirt_machine::render::vm;
use vitivirt_machine::resolve::resolve;

use crate::specs::spec;
use crate::world::World;

fn world(spec: MachineSpec) -> World {
    World::new(spec).with_network("prod").with_network("storage")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// Planning again after applying gives nothing, whatever the spec.
    #[test]
    fn a_plan_is_done_once(spec in spec()) {
        let mut world = world(spec);
        let (first, _) = world.reconcile();
        prop_assert!(world.observed.vm.is_some(), "a valid spec has a VM: {first:?}, {:?}", world.status().diagnosis);
        world.settle();
        world.bind_pvcs();
        world.settle();
        prop_assert_eq!(vitivirt_machine::plan(&world.observed).write_count(), 0);
    }

    /// A deletion leaves nothing but what is to be kept, and ends.
    #[test]
    fn a_deletion_leaves_only_what_is_kept(spec in spec()) {
        let mut world = world(spec);
        world.settle();
        world.delete_machine();
        world.reconcile();
        prop_assert!(!world.gone, "the VM is still shutting down");
        world.finish_shutdown();
        world.reconcile();
        prop_assert!(world.gone);
        let kept = world.observed.pvcs.values().all(|pvc| pvc.labels["vitistack.io/on-delete"] == "Retain");
        prop_assert!(kept, "{:?}", world.observed.pvcs);
        prop_assert!(world.observed.networks.values().all(|network| network.protected.is_none()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// S0 → S1 → … → Sn ends in the same VM as Sn alone.
    #[test]
    fn edits_leave_no_trace(edits in vec(spec(), 2..5)) {
        let last = edits.last().cloned().unwrap_or_default();
        let mut chained = world(MachineSpec::default());
        for edit in edits {
            chained.edit(edit);
            chained.settle();
        }
        let machine = &chained.observed.machine;
        let expected = vm::spec(machine, &resolve(machine).unwrap());
        prop_assert_eq!(&chained.observed.vm.as_ref().unwrap().spec, &expected);
        let mut direct = world(last);
        direct.settle();
        prop_assert_eq!(&direct.observed.vm.as_ref().unwrap().spec, &expected);
        // With the guest that has what the last edit gave it, what the others gave goes too.
        chained.start_guest("Running");
        chained.settle();
        prop_assert_eq!(chained.observed.secret.is_some(), direct.observed.secret.is_some());
    }
}
