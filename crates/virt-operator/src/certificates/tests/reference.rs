//! What the reference's own code has issued, in the form in which its Secrets hold it. The keys are of no cluster.

use vitivirt_install::certificates::{VIRT_API, VIRT_HANDLER_CLIENT};

use super::*;

const AUTHORITY: &str = include_str!("authority.pem");
const SERVER: &str = include_str!("server.pem");
const CLIENT: &str = include_str!("client.pem");
/// It is in the name of the authority.
const ISSUED: u64 = 1_794_748_560;

fn held(text: &str, duration: &str) -> Held {
    let (certificate, key) = text.split_at(text.find("-----BEGIN EC PRIVATE KEY-----").unwrap());
    Held { certificate: certificate.into(), key: key.into(), duration: Some(duration.to_owned()) }
}

fn taken_over() -> World {
    let mut world = World { now: at(ISSUED) + HOUR, ..World::new() };
    let mut hold = |name: &str, held| world.holding.secrets.insert(name.to_owned(), held);
    hold(CA, held(AUTHORITY, "&Duration{Duration:168h0m0s,}"));
    hold(VIRT_API, held(SERVER, "&Duration{Duration:24h0m0s,}"));
    hold(VIRT_HANDLER_CLIENT, held(CLIENT, "&Duration{Duration:24h0m0s,}"));
    world
}

#[test]
fn it_is_kept_and_goes_on_signing() {
    let mut world = taken_over();
    let issue = world.settle();
    for kept in [CA, VIRT_API, VIRT_HANDLER_CLIENT] {
        assert!(!issue.renewed.contains(kept), "{kept}");
    }
    assert_eq!(issue.renewed.len(), 16 - 3);
    let held = held(AUTHORITY, "");
    assert!(issue.key_pair(CA).unwrap().key == held.key);
    assert_eq!(issue.bundle(CA).unwrap().into_bytes(), held.certificate);
    assert_eq!(world.issue().renewed, names([]));
    handshake::assert_all_verify(&world);
}

#[test]
fn a_key_is_written_as_the_reference_does() {
    let held = held(AUTHORITY, "");
    let pair = x509::Pair::read(&held).unwrap().to_pem();
    assert!(pair.key == held.key);
    assert!(pair.certificate == held.certificate);
}
