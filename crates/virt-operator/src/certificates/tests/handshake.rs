//! Whether others accept what was issued: TLS with rustls, at the world's time.

use std::sync::Arc;

use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::WebPkiClientVerifier,
    time_provider::TimeProvider,
};
use vitivirt_install::certificates::{SYNCHRONIZATION_CLIENT, VIRT_API, VIRT_HANDLER_SERVER};

use super::*;

#[derive(Debug)]
struct Clock(SystemTime);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        self.0.duration_since(SystemTime::UNIX_EPOCH).ok().map(UnixTime::since_unix_epoch)
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn roots(bundle: &str) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    Arc::new(roots)
}

fn identity(held: &Held) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificates = CertificateDer::pem_slice_iter(&held.certificate).collect::<Result<_, _>>().unwrap();
    (certificates, PrivateKeyDer::from_pem_slice(&held.key).unwrap())
}

/// A client that knows the server by this name, trusts this bundle and shows its own certificate, if it has one.
fn connect(world: &World, bundle: &str, server: &Held, name: &str, client: Option<&Held>) -> Result<(), rustls::Error> {
    let clock = Arc::new(Clock(world.now));
    let builder =
        ServerConfig::builder_with_details(provider(), clock.clone()).with_safe_default_protocol_versions()?;
    let builder = match client {
        Some(_) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots(bundle), provider()).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let (certificates, key) = identity(server);
    let serving = builder.with_single_cert(certificates, key)?;

    let builder = ClientConfig::builder_with_details(provider(), clock)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(bundle));
    let calling = match client.map(identity) {
        Some((certificates, key)) => builder.with_client_auth_cert(certificates, key)?,
        None => builder.with_no_client_auth(),
    };

    let mut client: Connection = ClientConnection::new(Arc::new(calling), name.to_owned().try_into().unwrap())?.into();
    let mut server: Connection = ServerConnection::new(Arc::new(serving))?.into();
    while client.is_handshaking() || server.is_handshaking() {
        carry(&mut client, &mut server)?;
        carry(&mut server, &mut client)?;
    }
    Ok(())
}

fn carry(from: &mut Connection, to: &mut Connection) -> Result<(), rustls::Error> {
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).unwrap();
    }
    let mut bytes = bytes.as_slice();
    while !bytes.is_empty() {
        to.read_tls(&mut bytes).unwrap();
        to.process_new_packets()?;
    }
    Ok(())
}

/// Every server by each of its names, and every client by a server that asks for its certificate.
pub(super) fn assert_all_verify(world: &World) {
    let bundle = world.holding.bundles.get(CA).unwrap();
    let held = |secret: &str| world.holding.secrets.get(secret).unwrap();
    for wanted in &world.wanted {
        match wanted.usage {
            Usage::Ca => {}
            Usage::Server => {
                assert_eq!(wanted.dns_names.len(), 4);
                for name in &wanted.dns_names {
                    let result = connect(world, bundle, held(&wanted.secret), name, None);
                    assert!(result.is_ok(), "{} as {name}: {result:?}", wanted.secret);
                }
            }
            Usage::Client => {
                let result = connect(world, bundle, held(VIRT_API), "virt-api", Some(held(&wanted.secret)));
                assert!(result.is_ok(), "{}: {result:?}", wanted.secret);
            }
        }
    }
}

#[test]
fn every_leaf_is_accepted() {
    let world = World::installed();
    assert_all_verify(&world);
}

#[test]
fn others_are_not() {
    let mut world = World::installed();
    let bundle = world.holding.bundles.get(CA).unwrap().clone();
    let export = world.holding.bundles.get(EXPORT_CA).unwrap().clone();
    let (api, client) = (world.held(VIRT_API).clone(), world.held(SYNCHRONIZATION_CLIENT).clone());
    let handler = world.held(VIRT_HANDLER_SERVER).clone();
    assert!(connect(&world, &bundle, &api, "virt-handler", None).is_err(), "another name");
    assert!(connect(&world, &export, &api, "virt-api", None).is_err(), "another authority");
    assert!(connect(&world, &bundle, &client, "virt-api", None).is_err(), "a client that serves");
    assert!(connect(&world, &bundle, &api, "virt-api", Some(&handler)).is_err(), "a server that calls");
    assert!(connect(&world, &bundle, &api, "virt-api", Some(&client)).is_ok());
    world.now += 25 * HOUR;
    assert!(connect(&world, &bundle, &api, "virt-api", None).is_err(), "an ended one");
}

/// While an authority is replaced, whoever has the old certificate or the new one is trusted by the new bundle.
#[test]
fn old_and_new_leaves_are_accepted_in_the_overlap() {
    let mut world = World::installed();
    let old = world.held(VIRT_API).clone();
    world.wanted = wanted(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    world.settle();
    assert_all_verify(&world);
    let bundle = world.holding.bundles.get(CA).unwrap();
    connect(&world, bundle, &old, "virt-api.kubevirt.svc", None).unwrap();
    let new = world.holding.secrets.get(VIRT_API).unwrap();
    connect(
        &world,
        bundle,
        new,
        "virt-api.kubevirt.svc",
        Some(world.holding.secrets.get(SYNCHRONIZATION_CLIENT).unwrap()),
    )
    .unwrap();
}

#[test]
fn a_bundle_with_what_users_brought_is_read_by_others() {
    let mut world = World::installed();
    let external = foreign("kubevirt.io", world.now, 1000 * HOUR);
    world.holding.bundles.insert(EXTERNAL_CA.to_owned(), external);
    world.settle();
    assert_eq!(roots(world.holding.bundles.get(CA).unwrap()).len(), 2);
    assert_all_verify(&world);
}
