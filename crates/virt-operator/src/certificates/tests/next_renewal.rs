//! `next` is in the future; nothing changes before it, and something changes at it.

use proptest::prelude::*;

use super::*;

/// The stored certificates and bundles.
fn snapshot(fixture: &CertificateFixture) -> (Vec<Vec<u8>>, Vec<String>) {
    let secrets = fixture.stored.secrets.values().map(|secret| secret.certificate.clone()).collect();
    (secrets, fixture.stored.bundles.values().cloned().collect())
}

fn seconds() -> impl Strategy<Value = u64> {
    prop_oneof![10..100_u64, 100..10_000_u64, 10_000..10_000_000_u64]
}

fn settings() -> impl Strategy<Value = SelfSigned> {
    let lifetimes = || {
        (seconds(), 0.0..1.5_f64).prop_map(|(duration, share)| {
            let renew_before = duration as f64 * share;
            lifetime(&format!("{duration}s"), Some(&format!("{renew_before:.3}s")))
        })
    };
    (lifetimes(), lifetimes()).prop_map(|(ca, server)| SelfSigned { ca, server, ..SelfSigned::default() })
}

#[derive(Clone, Debug)]
enum FixtureEvent {
    /// The user changes the lifetimes. The flag is the second argument of `first_few`.
    Settings(Box<SelfSigned>, bool),
    /// A user adds an external CA that is valid for this many seconds.
    AddExternalCa(u64),
    /// The Secret with this index is deleted.
    DeleteSecret(usize),
    /// Time passes: this many thousandths of the time until the next renewal.
    Wait(u64),
}

fn event() -> impl Strategy<Value = FixtureEvent> {
    prop_oneof![
        (settings(), any::<bool>()).prop_map(|(settings, all)| FixtureEvent::Settings(Box::new(settings), all)),
        seconds().prop_map(FixtureEvent::AddExternalCa),
        (0..16_usize).prop_map(FixtureEvent::DeleteSecret),
        (0..3000_u64).prop_map(FixtureEvent::Wait),
    ]
}

fn apply_event(fixture: &mut CertificateFixture, event: FixtureEvent, next: SystemTime) {
    match event {
        FixtureEvent::Settings(settings, all) => {
            fixture.desired = first_few(desired_certificates(Some(&settings)), all);
        }
        FixtureEvent::AddExternalCa(seconds) => {
            let external = foreign_ca("kubevirt.io", fixture.now, Duration::from_secs(seconds));
            fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), external);
        }
        FixtureEvent::DeleteSecret(number) => {
            let name = fixture.stored.secrets.keys().nth(number).cloned();
            name.map(|name| fixture.stored.secrets.remove(&name));
        }
        FixtureEvent::Wait(thousandths) => {
            let left = next.duration_since(fixture.now).unwrap();
            fixture.now += left.mul_f64(thousandths as f64 / 1000.0);
        }
    }
}

/// Two leaves test as much as thirteen, and are faster. Without `all_cas`, the export and backup CAs are left out: they
/// are often the first to be due and would hide the later renewals.
fn first_few(mut desired: Vec<Certificate>, all_cas: bool) -> Vec<Certificate> {
    desired.truncate(5);
    desired.retain(|certificate| all_cas || ![EXPORT_CA, BACKUP_CA].contains(&certificate.secret.as_str()));
    desired
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn next_is_the_time_of_the_next_change(
        settings in settings(),
        all in any::<bool>(),
        nanos in 0..1_000_000_000_u64,
        events in prop::collection::vec((event(), 0.0..1.0_f64), 1..8),
    ) {
        let mut fixture = CertificateFixture::new();
        fixture.desired = first_few(desired_certificates(Some(&settings)), all);
        fixture.now += Duration::from_nanos(nanos);
        for (event, share) in events {
            fixture.settle();
            let next = fixture.issue_and_store().next.unwrap();
            prop_assert!(next > fixture.now);

            let before = snapshot(&fixture);
            let now = fixture.now;
            fixture.now += next.duration_since(now).unwrap().mul_f64(share).saturating_sub(Duration::from_nanos(1000));
            prop_assert!(fixture.now < next);
            prop_assert_eq!(fixture.issue_and_store().next, Some(next));
            prop_assert_eq!(&snapshot(&fixture), &before, "nothing changes before next");

            let saved = (fixture.stored.clone(), fixture.now);
            fixture.now = next;
            let due = fixture.issue_and_store();
            prop_assert!(due.next.unwrap() > next);
            prop_assert_ne!(&snapshot(&fixture), &before, "something changes at next");
            if !matches!(event, FixtureEvent::Settings(..)) {
                (fixture.stored, fixture.now) = saved;
            }
            let next = fixture.issue().next.unwrap();
            apply_event(&mut fixture, event, next);
        }
    }
}
