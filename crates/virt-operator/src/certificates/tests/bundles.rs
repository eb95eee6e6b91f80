//! What is trusted, over time and whatever users write.

use super::*;

fn bundle(world: &World, name: &str) -> String {
    world.issue().bundle(name).unwrap()
}

fn certificate(world: &World, ca: &str) -> String {
    text(world.holding.secrets.get(ca).unwrap().certificate.clone())
}

/// How `kubevirt-external-ca` names what it brought, in the bundle.
fn brought(certificate: &str) -> String {
    format!("# from kubevirt-external-ca\n{certificate}")
}

#[test]
fn each_authority_has_its_bundle() {
    let world = World::installed();
    for ca in [CA, EXPORT_CA, BACKUP_CA] {
        assert_eq!(bundle(&world, ca), certificate(&world, ca));
    }
}

#[test]
fn a_replaced_authority_is_trusted_for_the_overlap() {
    let mut world = World::installed();
    let (old, old_export) = (certificate(&world, CA), certificate(&world, EXPORT_CA));
    world.wanted = wanted(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    let replaced = world.now + HOUR;
    world.now = replaced;
    world.settle();
    let (new, new_export) = (certificate(&world, CA), certificate(&world, EXPORT_CA));
    assert_ne!(new, old);
    assert_eq!(bundle(&world, CA), format!("{new}{old}"));
    assert_eq!(bundle(&world, EXPORT_CA), format!("{new_export}{old_export}"));

    // The overlap is the time before its end at which an authority is renewed: a fifth of 100 h, or that of leaves.
    let export_leaves = replaced + Duration::from_secs(4 * 3600 + 48 * 60);
    assert_eq!(world.issue().next, Some(export_leaves));
    world.now = export_leaves;
    assert_eq!(bundle(&world, EXPORT_CA), new_export);
    assert_eq!(bundle(&world, CA), format!("{new}{old}"));
    world.settle();
    world.now = replaced + 20 * HOUR - Duration::from_secs(1);
    assert_eq!(bundle(&world, CA), format!("{new}{old}"));
    world.now = replaced + 20 * HOUR;
    assert_eq!(bundle(&world, CA), new);
}

#[test]
fn an_authority_that_is_being_replaced_is_trusted_even_where_its_bundle_is_lost() {
    let mut world = World::installed();
    let old = certificate(&world, CA);
    world.holding.bundles.clear();
    world.wanted = wanted(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    let issue = world.issue();
    let new = text(issue.key_pair(CA).unwrap().certificate);
    assert_eq!(issue.bundle(CA).unwrap(), format!("{new}{old}"));
}

#[test]
fn a_malformed_bundle_is_replaced() {
    let mut world = World::installed();
    let current = certificate(&world, CA);
    let block = "-----BEGIN CERTIFICATE-----";
    for malformed in [
        String::new(),
        "garbage".to_owned(),
        current.replace('M', "!"),
        format!("{block}\nMAAA\n-----END CERTIFICATE-----\n"),
        format!("{block}\n{current}"),
        format!("{current}{block}\nunfinished"),
        current.replace("CERTIFICATE", "PUBLIC KEY"),
        format!("{current}{current}\n\n{current}"),
        format!("some words\r\n{}", current.replace('\n', "\r\n")),
    ] {
        world.holding.bundles.insert(CA.to_owned(), malformed.clone());
        assert_eq!(bundle(&world, CA), current, "{malformed}");
    }
}

#[test]
fn what_others_add_stays_no_longer_than_the_overlap() {
    let mut world = World::installed();
    let current = certificate(&world, CA);
    let added = foreign("added", world.now - HOUR, 1000 * HOUR);
    let external = brought(&foreign("brought", world.now, 1000 * HOUR));
    world.holding.bundles.insert(CA.to_owned(), format!("{current}{external}{added}"));
    assert_eq!(bundle(&world, CA), format!("{current}{added}{external}"));
    world.now += 33 * HOUR + Duration::from_secs(36 * 60);
    assert_eq!(bundle(&world, CA), format!("{current}{external}"));
}

#[test]
fn what_users_bring_is_taken_over_and_stays() {
    let mut world = World::installed();
    // The authority has been there for long, so that nothing stays for the overlap.
    world.now += 100 * HOUR;
    world.settle();
    let current = certificate(&world, CA);
    let ends = 20 * HOUR;
    let external = foreign("kubevirt.io", world.now - HOUR, ends);
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), external.clone());

    let first = world.settle();
    assert_eq!(first.renewed, names([]));
    assert_eq!(first.bundle(CA).unwrap(), format!("{current}{}", brought(&external)));
    assert_eq!(first.bundle(EXTERNAL_CA).unwrap(), external, "it is not in the bundle of the cluster yet");
    let second = world.settle();
    assert_eq!(second.bundle(EXTERNAL_CA).unwrap(), "");
    assert_eq!(second.bundle(EXPORT_CA), Some(certificate(&world, EXPORT_CA)));

    let issued = world.now;
    world.now += 19 * HOUR - Duration::from_secs(1);
    assert_eq!(world.settle().bundle(CA).unwrap(), format!("{current}{}", brought(&external)));
    assert_eq!(world.issue().next, Some(issued + 19 * HOUR));
    world.now = issued + 19 * HOUR;
    assert_eq!(world.settle().bundle(CA).unwrap(), current, "it has ended");
}

#[test]
fn what_users_bring_survives_a_new_authority() {
    let mut world = World::installed();
    let external = foreign("kubevirt.io", world.now - HOUR, 10_000 * HOUR);
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), external.clone());
    let mut authorities = BTreeSet::new();
    while authorities.len() < 4 {
        let issue = world.settle();
        assert!(issue.bundle(CA).unwrap().ends_with(&brought(&external)));
        authorities.insert(certificate(&world, CA));
        world.now = issue.next.unwrap();
    }
}

#[test]
fn a_user_may_bring_what_is_in_the_bundle_already() {
    let mut world = World::installed();
    let current = certificate(&world, CA);
    let external = foreign("kubevirt.io", world.now - HOUR, 1000 * HOUR);
    world.holding.bundles.insert(CA.to_owned(), format!("{current}{external}"));
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), format!("{external}{current}{external}"));
    let first = world.settle();
    assert_eq!(first.bundle(CA).unwrap(), format!("{current}{}", brought(&external)));
    assert_eq!(world.settle().bundle(EXTERNAL_CA).unwrap(), "");
}

#[test]
fn of_what_users_bring_the_unusable_is_left_out() {
    let mut world = World::installed();
    let current = certificate(&world, CA);
    let good = foreign("good", world.now - HOUR, 1000 * HOUR);
    let ended = foreign("ended", world.now - 10 * HOUR, 10 * HOUR);
    let later = foreign("later", world.now + HOUR, 1000 * HOUR);
    let text =
        format!("words {}{ended}{later}-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n{good}", '\n');
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), text);
    let bundle = format!("{current}{}{}", brought(&later), brought(&good));
    assert_eq!(world.settle().bundle(CA).unwrap(), bundle);
    assert_eq!(world.settle().bundle(EXTERNAL_CA).unwrap(), "");

    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), format!("{ended}nothing"));
    let issue = world.settle();
    assert_eq!((issue.bundle(CA).unwrap(), issue.bundle(EXTERNAL_CA).unwrap()), (bundle, String::new()));
}

#[test]
fn users_cannot_bring_more_than_fifty() {
    let mut world = World::installed();
    let many: String = (0..60).map(|number| foreign(&format!("{number}"), world.now, 1000 * HOUR)).collect();
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), many);
    assert_eq!(world.settle().bundle(CA).unwrap().matches("BEGIN").count(), 50);
    let second = world.settle();
    assert_eq!(second.bundle(CA).unwrap().matches("BEGIN").count(), 50);
    assert_eq!(second.bundle(EXTERNAL_CA).unwrap(), "");
}
