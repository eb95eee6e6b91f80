//! Each cause renews what it must and nothing else.

use vitivirt_api::ErrorClass;
use vitivirt_install::certificates::{SYNCHRONIZATION_CLIENT, VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER_CLIENT};

use super::*;

#[test]
fn what_is_missing() {
    let mut world = World::installed();
    world.holding.secrets.remove(VIRT_API);
    assert_eq!(world.issue().renewed, names([VIRT_API]));
}

#[test]
fn what_cannot_be_read() {
    let spoils: [fn(&mut Held); 7] = [
        |held| held.certificate.clear(),
        |held| held.key.clear(),
        |held| held.certificate = b"garbage".into(),
        |held| held.key = b"garbage".into(),
        |held| held.certificate = b"-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n".into(),
        |held| held.key = b"-----BEGIN EC PRIVATE KEY-----\nMAAA\n-----END EC PRIVATE KEY-----\n".into(),
        |held| held.certificate.truncate(held.certificate.len() / 2),
    ];
    for (number, spoil) in spoils.into_iter().enumerate() {
        let mut world = World::installed();
        spoil(world.held(VIRT_API));
        spoil(world.held(EXPORT_CA));
        assert_eq!(world.issue().renewed, names([VIRT_API, EXPORT_CA]), "{number}");
    }
}

#[test]
fn what_has_the_key_of_another() {
    let mut world = World::installed();
    world.held(VIRT_API).key = world.held(VIRT_CONTROLLER).key.clone();
    world.held(EXPORT_CA).key = world.held(BACKUP_CA).key.clone();
    assert_eq!(world.issue().renewed, names([VIRT_API, EXPORT_CA]));
}

#[test]
fn what_is_for_another_name_or_use() {
    let mut world = World::installed();
    let (api, controller, client) =
        (world.held(VIRT_API).clone(), world.held(VIRT_CONTROLLER).clone(), world.held(VIRT_HANDLER_CLIENT).clone());
    *world.held(VIRT_CONTROLLER) = api;
    *world.held(VIRT_API) = client;
    *world.held(VIRT_HANDLER_CLIENT) = controller;
    assert_eq!(world.issue().renewed, names([VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER_CLIENT]));
    for certificate in world.wanted.iter_mut().filter(|certificate| certificate.secret == SYNCHRONIZATION_CLIENT) {
        certificate.dns_names.push("another".to_owned());
    }
    world.settle();
    world.held(VIRT_API).duration = None;
    assert_eq!(world.issue().renewed, names([VIRT_API]));
}

#[test]
fn an_authority_that_cannot_sign() {
    let mut world = World::installed();
    // Only its use is wrong: it is not due for hours.
    *world.held(EXPORT_CA) = Held { duration: world.held(EXPORT_CA).duration.clone(), ..world.held(VIRT_API).clone() };
    assert_eq!(world.issue().renewed, names([EXPORT_CA]));
}

#[test]
fn what_was_signed_under_another_name_of_its_authority() {
    let mut world = World::installed();
    let key = key_of(world.held(CA));
    let ca = world.wanted.first().unwrap();
    let renamed = x509::Pair::ca(ca, key, world.now + Duration::from_secs(1)).unwrap();
    world.held(CA).certificate = renamed.to_pem().certificate;
    assert_eq!(world.issue().renewed, world.leaves());
}

#[test]
fn what_is_due() {
    let mut world = World::installed();
    let issued = world.now;
    let due = issued + 24 * HOUR - Duration::from_secs(4 * 3600 + 48 * 60);
    assert_eq!(world.issue().next, Some(due));
    world.now = due - Duration::from_secs(1);
    assert_eq!(world.issue().renewed, names([]));
    world.now = due;
    assert_eq!(world.settle().renewed, world.leaves());
    assert_eq!(world.issue().renewed, names([]));

    // The authority comes first, before what it has signed ends with it.
    let ca = issued + 168 * HOUR - Duration::from_secs(33 * 3600 + 36 * 60);
    while world.issue().next.unwrap() < ca {
        world.now = world.issue().next.unwrap();
        world.settle();
    }
    world.now = ca - Duration::from_secs(1);
    assert_eq!(world.settle().renewed, names([]));
    world.now = ca;
    let mut expected = world.leaves();
    expected.insert(CA.to_owned());
    assert_eq!(world.settle().renewed, expected);

    // Export and backup are renewed as late as a leaf is.
    let others = issued + 168 * HOUR - Duration::from_secs(4 * 3600 + 48 * 60);
    while world.issue().next.unwrap() < others {
        world.now = world.issue().next.unwrap();
        let renewed = world.settle().renewed;
        assert!(!renewed.contains(EXPORT_CA) && !renewed.contains(BACKUP_CA));
    }
    world.now = others;
    let renewed = world.settle().renewed;
    assert!(renewed.contains(EXPORT_CA) && renewed.contains(BACKUP_CA));
}

#[test]
fn what_has_ended() {
    let mut world = World::installed();
    world.now += 1000 * HOUR;
    let all: BTreeSet<String> = world.wanted.iter().map(|certificate| certificate.secret.clone()).collect();
    let issue = world.settle();
    assert_eq!(issue.renewed, all);
    assert_eq!(issue.bundle(CA).unwrap().matches("BEGIN").count(), 1, "the old one has ended too");
    assert_eq!(world.issue().renewed, names([]));
}

#[test]
fn what_a_wrong_clock_issued() {
    let mut world = World::new();
    let right = world.now;
    world.now += 10_000 * HOUR;
    world.settle();
    world.now = right;
    assert_eq!(world.settle().renewed.len(), 16);
    assert_eq!(world.issue().renewed, names([]));
}

#[test]
fn another_duration_of_leaves_renews_leaves() {
    let mut world = World::installed();
    world.wanted = wanted(Some(&SelfSigned { server: lifetime("12h", None), ..SelfSigned::default() }));
    assert_eq!(world.settle().renewed, world.leaves());
    assert_eq!(world.issue().renewed, names([]));
}

#[test]
fn another_duration_of_authorities_renews_them_and_what_they_sign() {
    let mut world = World::installed();
    world.wanted = wanted(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    assert_eq!(world.settle().renewed.len(), 16);
    assert_eq!(world.issue().renewed, names([]));
}

#[test]
fn another_time_of_renewal_renews_nothing_that_is_not_due() {
    let mut world = World::installed();
    let settings = SelfSigned { ca: lifetime("168h", Some("1h")), ..SelfSigned::default() };
    world.wanted = wanted(Some(&settings));
    assert_eq!(world.issue().renewed, names([]));
    world.now += 2 * HOUR;
    world.wanted = wanted(Some(&SelfSigned { ca: lifetime("168h", Some("167h")), ..settings }));
    assert_eq!(world.issue().renewed, names([]), "a tenth of its life is lived");
    world.now += 15 * HOUR;
    assert!(world.issue().renewed.contains(CA));
}

#[test]
fn what_another_authority_signed() {
    let mut world = World::installed();
    let other = World::installed();
    world.holding.secrets.insert(CA.to_owned(), other.holding.secrets.get(CA).unwrap().clone());
    world.holding.secrets.insert(BACKUP_CA.to_owned(), other.holding.secrets.get(BACKUP_CA).unwrap().clone());
    assert_eq!(world.issue().renewed, world.leaves(), "the replaced authority itself is good");
}

#[test]
fn a_failing_source_of_keys_fails_the_call() {
    let world = World::new();
    let mut keys = || Err(vitivirt_api::Failure::transient("NoRandomness", "none left"));
    let failure = issue(&world.wanted, &world.holding, world.now, &mut keys).err().unwrap();
    assert_eq!(failure.reason, "NoRandomness");
    let world = World::installed();
    assert!(issue(&world.wanted, &world.holding, world.now, &mut keys).is_ok(), "no key is needed");
}

#[test]
fn a_duration_that_is_too_short_is_refused() {
    for (settings, field) in [
        (SelfSigned { ca: lifetime("9s", None), ..SelfSigned::default() }, "ca.duration"),
        (SelfSigned { server: lifetime("0", None), ..SelfSigned::default() }, "server.duration"),
    ] {
        let world = World { wanted: wanted(Some(&settings)), ..World::new() };
        let failure = issue(&world.wanted, &world.holding, world.now, &mut Key::generate).err().unwrap();
        assert_eq!((failure.class, failure.reason), (ErrorClass::Invalid, "InvalidCertificateDuration"));
        assert!(failure.message.contains(field), "{failure}");
    }
}
