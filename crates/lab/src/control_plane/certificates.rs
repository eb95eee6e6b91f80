//! The certificates of one lab: a CA for serving certificates, a front-proxy CA for aggregated APIs, and the key that
//! signs service account tokens. Each lab generates its own and keeps them in its folder.

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
    /// The CA that signs the certificates of the API server and the fault proxy.
    pub(crate) ca_pem: String,
    pub(crate) proxy_certificate_pem: String,
    pub(crate) proxy_key_pem: String,
}

/// The common name of the front-proxy client certificate.
pub(crate) const FRONT_PROXY: &str = "front-proxy";

impl Certificates {
    pub(crate) fn generate(folder: &Path, api_servers: &[IpAddr], proxy: IpAddr) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let write =
            |name: &str, text: &str| std::fs::write(folder.join(name), text).with_context(|| format!("writing {name}"));

        let ca = generate_ca("lab")?;
        write("ca.crt", &ca.pem())?;
        let names = ["kubernetes.default.svc", "kubernetes.default", "localhost"];
        let loopback: IpAddr = [127, 0, 0, 1].into();
        let (certificate, key) = serving(&ca, &names, &[api_servers, &[loopback]].concat())?;
        write("apiserver.crt", &certificate)?;
        write("apiserver.key", &key)?;
        let (proxy_certificate_pem, proxy_key_pem) = serving(&ca, &names, &[proxy])?;

        let front = generate_ca("lab-front-proxy")?;
        write("front-proxy-ca.crt", &front.pem())?;
        let mut params = params_with_common_name(FRONT_PROXY);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        write("front-proxy.crt", &params.signed_by(&key, &front)?.pem())?;
        write("front-proxy.key", &key.serialize_pem())?;

        let signing = KeyPair::generate()?;
        write("service-account.key", &signing.serialize_pem())?;
        write("service-account.pub", &signing.public_key_pem())?;

        Ok(Certificates { folder: folder.to_owned(), ca_pem: ca.pem(), proxy_certificate_pem, proxy_key_pem })
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

fn params_with_common_name(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

fn generate_ca(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = params_with_common_name(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    CertifiedIssuer::self_signed(params, KeyPair::generate()?).context("generating a CA")
}

fn serving(ca: &CertifiedIssuer<'static, KeyPair>, names: &[&str], addresses: &[IpAddr]) -> Result<(String, String)> {
    let mut params = params_with_common_name("kube-apiserver");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    for name in names {
        params.subject_alt_names.push(SanType::DnsName((*name).try_into().context("invalid DNS name")?));
    }
    params.subject_alt_names.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, ca)?.pem(), key.serialize_pem()))
}
