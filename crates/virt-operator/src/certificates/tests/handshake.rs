//! Whether TLS peers accept the issued certificates: handshakes with rustls, at the fixture's time.

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
struct FixedClock(SystemTime);

impl TimeProvider for FixedClock {
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

fn identity(stored: &StoredSecret) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificates = CertificateDer::pem_slice_iter(&stored.certificate).collect::<Result<_, _>>().unwrap();
    (certificates, PrivateKeyDer::from_pem_slice(&stored.key).unwrap())
}

/// Connects a client to a server by `name`. Both trust `bundle`; the server asks for a certificate if the client has
/// one.
fn connect(
    fixture: &CertificateFixture,
    bundle: &str,
    server: &StoredSecret,
    name: &str,
    client: Option<&StoredSecret>,
) -> Result<(), rustls::Error> {
    let clock = Arc::new(FixedClock(fixture.now));
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
    let server_config = builder.with_single_cert(certificates, key)?;

    let builder = ClientConfig::builder_with_details(provider(), clock)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(bundle));
    let client_config = match client.map(identity) {
        Some((certificates, key)) => builder.with_client_auth_cert(certificates, key)?,
        None => builder.with_no_client_auth(),
    };

    let mut client: Connection =
        ClientConnection::new(Arc::new(client_config), name.to_owned().try_into().unwrap())?.into();
    let mut server: Connection = ServerConnection::new(Arc::new(server_config))?.into();
    while client.is_handshaking() || server.is_handshaking() {
        transfer(&mut client, &mut server)?;
        transfer(&mut server, &mut client)?;
    }
    Ok(())
}

fn transfer(from: &mut Connection, to: &mut Connection) -> Result<(), rustls::Error> {
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

/// Verifies every server certificate under each of its names, and every client certificate at a server that asks for
/// it.
pub(super) fn assert_all_verify(fixture: &CertificateFixture) {
    let bundle = fixture.stored.bundles.get(CA).unwrap();
    let stored = |secret: &str| fixture.stored.secrets.get(secret).unwrap();
    for desired in &fixture.desired {
        match desired.usage {
            Usage::Ca => {}
            Usage::Server => {
                assert_eq!(desired.dns_names.len(), 4);
                for name in &desired.dns_names {
                    let result = connect(fixture, bundle, stored(&desired.secret), name, None);
                    assert!(result.is_ok(), "{} as {name}: {result:?}", desired.secret);
                }
            }
            Usage::Client => {
                let result = connect(fixture, bundle, stored(VIRT_API), "virt-api", Some(stored(&desired.secret)));
                assert!(result.is_ok(), "{}: {result:?}", desired.secret);
            }
        }
    }
}

#[test]
fn every_leaf_certificate_is_accepted() {
    let fixture = CertificateFixture::installed();
    assert_all_verify(&fixture);
}

#[test]
fn a_certificate_with_a_wrong_name_ca_usage_or_time_is_rejected() {
    let mut fixture = CertificateFixture::installed();
    let bundle = fixture.stored.bundles.get(CA).unwrap().clone();
    let export = fixture.stored.bundles.get(EXPORT_CA).unwrap().clone();
    let (api, client) = (fixture.secret_mut(VIRT_API).clone(), fixture.secret_mut(SYNCHRONIZATION_CLIENT).clone());
    let handler = fixture.secret_mut(VIRT_HANDLER_SERVER).clone();
    assert!(connect(&fixture, &bundle, &api, "virt-handler", None).is_err(), "another name");
    assert!(connect(&fixture, &export, &api, "virt-api", None).is_err(), "another CA");
    assert!(connect(&fixture, &bundle, &client, "virt-api", None).is_err(), "a client certificate for a server");
    assert!(connect(&fixture, &bundle, &api, "virt-api", Some(&handler)).is_err(), "a server certificate for a client");
    assert!(connect(&fixture, &bundle, &api, "virt-api", Some(&client)).is_ok());
    fixture.now += 25 * HOUR;
    assert!(connect(&fixture, &bundle, &api, "virt-api", None).is_err(), "an expired certificate");
}

/// While a CA is replaced, components have an old or a new certificate. The new bundle verifies both.
#[test]
fn old_and_new_leaf_certificates_are_accepted_in_the_overlap() {
    let mut fixture = CertificateFixture::installed();
    let old = fixture.secret_mut(VIRT_API).clone();
    fixture.desired = desired_certificates(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    fixture.settle();
    assert_all_verify(&fixture);
    assert_eq!(fixture.secret_mut(VIRT_API).certificate, old.certificate, "the new CA may not be trusted everywhere");
    fixture.settle_after_propagation();
    assert_ne!(fixture.secret_mut(VIRT_API).certificate, old.certificate);
    assert_all_verify(&fixture);
    let bundle = fixture.stored.bundles.get(CA).unwrap();
    connect(&fixture, bundle, &old, "virt-api.kubevirt.svc", None).unwrap();
    let new = fixture.stored.secrets.get(VIRT_API).unwrap();
    connect(
        &fixture,
        bundle,
        new,
        "virt-api.kubevirt.svc",
        Some(fixture.stored.secrets.get(SYNCHRONIZATION_CLIENT).unwrap()),
    )
    .unwrap();
}

#[test]
fn rustls_reads_a_bundle_that_contains_an_external_ca() {
    let mut fixture = CertificateFixture::installed();
    let external = foreign_ca("kubevirt.io", fixture.now, 1000 * HOUR);
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), external);
    fixture.settle();
    assert_eq!(roots(fixture.stored.bundles.get(CA).unwrap()).len(), 2);
    assert_all_verify(&fixture);
}

/// Each of the two peers may have a clock that is up to five minutes late.
#[test]
fn a_new_certificate_is_accepted_on_a_node_whose_clock_is_late() {
    let mut fixture = CertificateFixture::installed();
    fixture.now -= Duration::from_secs(299);
    assert_all_verify(&fixture);
}
