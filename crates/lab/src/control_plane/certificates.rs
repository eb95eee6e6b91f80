//! The certificates of one lab: a serving authority, a front-proxy authority for aggregated APIs, and the key that
//! signs service account tokens. Made anew for every lab; nothing of it leaves the lab's folder.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

pub(crate) struct Certificates {
    pub(crate) folder: PathBuf,
    /// The authority that signs the API server's and the fault proxy's certificate.
    pub(crate) authority_pem: String,
    pub(crate) proxy_certificate_pem: String,
    pub(crate) proxy_key_pem: String,
}

/// The name that front-proxy requests carry.
pub(crate) const FRONT_PROXY: &str = "front-proxy";

impl Certificates {
    pub(crate) fn make(folder: &Path, api_server: IpAddr, proxy: IpAddr) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let write =
            |name: &str, text: &str| std::fs::write(folder.join(name), text).with_context(|| format!("writing {name}"));

        let authority = make_authority("lab")?;
        write("ca.crt", &authority.pem())?;
        let names = ["kubernetes.default.svc", "kubernetes.default", "localhost"];
        let loopback: IpAddr = [127, 0, 0, 1].into();
        let (certificate, key) = serving(&authority, &names, &[api_server, loopback])?;
        write("apiserver.crt", &certificate)?;
        write("apiserver.key", &key)?;
        let (proxy_certificate_pem, proxy_key_pem) = serving(&authority, &names, &[proxy])?;

        let front = make_authority("lab-front-proxy")?;
        write("front-proxy-ca.crt", &front.pem())?;
        let mut params = named(FRONT_PROXY);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        write("front-proxy.crt", &params.signed_by(&key, &front)?.pem())?;
        write("front-proxy.key", &key.serialize_pem())?;

        let signing = KeyPair::generate()?;
        write("service-account.key", &signing.serialize_pem())?;
        write("service-account.pub", &signing.public_key_pem())?;

        Ok(Certificates {
            folder: folder.to_owned(),
            authority_pem: authority.pem(),
            proxy_certificate_pem,
            proxy_key_pem,
        })
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

fn make_authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    CertifiedIssuer::self_signed(params, KeyPair::generate()?).context("making a certificate authority")
}

fn serving(
    authority: &CertifiedIssuer<'static, KeyPair>,
    names: &[&str],
    addresses: &[IpAddr],
) -> Result<(String, String)> {
    let mut params = named("kube-apiserver");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    for name in names {
        params.subject_alt_names.push(SanType::DnsName((*name).try_into().context("a DNS name")?));
    }
    params.subject_alt_names.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, authority)?.pem(), key.serialize_pem()))
}
