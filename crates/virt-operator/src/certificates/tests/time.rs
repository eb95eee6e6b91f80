//! The time that `next` names is to come, nothing happens before it, and then something does.

use proptest::prelude::*;

use super::*;

/// What is held of the world after everything is written.
fn held(world: &World) -> (Vec<Vec<u8>>, Vec<String>) {
    let secrets = world.holding.secrets.values().map(|held| held.certificate.clone()).collect();
    (secrets, world.holding.bundles.values().cloned().collect())
}

fn seconds() -> impl Strategy<Value = u64> {
    prop_oneof![10..100_u64, 100..10_000_u64, 10_000..10_000_000_u64]
}

fn settings() -> impl Strategy<Value = SelfSigned> {
    let term = || {
        (seconds(), 0.0..1.5_f64).prop_map(|(duration, share)| {
            let renew_before = duration as f64 * share;
            lifetime(&format!("{duration}s"), Some(&format!("{renew_before:.3}s")))
        })
    };
    (term(), term()).prop_map(|(ca, server)| SelfSigned { ca, server, ..SelfSigned::default() })
}

#[derive(Clone, Debug)]
enum Event {
    Settings(Box<SelfSigned>, bool),
    /// A user brings an authority that lives this long.
    Bring(u64),
    Lose(usize),
    /// Time goes on, by parts of what is left until something is due, in thousandths.
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (settings(), any::<bool>()).prop_map(|(settings, all)| Event::Settings(Box::new(settings), all)),
        seconds().prop_map(Event::Bring),
        (0..16_usize).prop_map(Event::Lose),
        (0..3000_u64).prop_map(Event::Wait),
    ]
}

fn happen(world: &mut World, event: Event, next: SystemTime) {
    match event {
        Event::Settings(settings, all) => world.wanted = only_a_few(wanted(Some(&settings)), all),
        Event::Bring(seconds) => {
            let external = foreign("kubevirt.io", world.now, Duration::from_secs(seconds));
            world.holding.bundles.insert(EXTERNAL_CA.to_owned(), external);
        }
        Event::Lose(number) => {
            let name = world.holding.secrets.keys().nth(number).cloned();
            name.map(|name| world.holding.secrets.remove(&name));
        }
        Event::Wait(thousandths) => {
            let left = next.duration_since(world.now).unwrap();
            world.now += left.mul_f64(thousandths as f64 / 1000.0);
        }
    }
}

/// Two leaves are as good as thirteen, and faster. The authorities that sign none of them are often the first to be
/// due, so that they hide what is due later.
fn only_a_few(mut wanted: Vec<Certificate>, all_authorities: bool) -> Vec<Certificate> {
    wanted.truncate(5);
    wanted.retain(|certificate| all_authorities || ![EXPORT_CA, BACKUP_CA].contains(&certificate.secret.as_str()));
    wanted
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn next_is_when_something_is_due(
        settings in settings(),
        all in any::<bool>(),
        nanos in 0..1_000_000_000_u64,
        events in prop::collection::vec((event(), 0.0..1.0_f64), 1..8),
    ) {
        let mut world = World { wanted: only_a_few(wanted(Some(&settings)), all), ..World::new() };
        world.now += Duration::from_nanos(nanos);
        for (event, earlier) in events {
            world.settle();
            // What a user has brought is blanked when it has been seen in the bundle.
            let next = world.settle().next.unwrap();
            prop_assert!(next > world.now);

            let settled = held(&world);
            let now = world.now;
            world.now += next.duration_since(now).unwrap().mul_f64(earlier).saturating_sub(Duration::from_nanos(1000));
            prop_assert!(world.now < next);
            prop_assert_eq!(world.settle().next, Some(next));
            prop_assert_eq!(&held(&world), &settled, "nothing happens before");

            let saved = (world.holding.clone(), world.now);
            world.now = next;
            let due = world.settle();
            prop_assert!(due.next.unwrap() > next);
            prop_assert_ne!(&held(&world), &settled, "something happens then");
            if !matches!(event, Event::Settings(..)) {
                (world.holding, world.now) = saved;
            }
            let next = world.issue().next.unwrap();
            happen(&mut world, event, next);
        }
    }
}
