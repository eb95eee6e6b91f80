//! CA bundles as PEM text.
//!
//! A comment line before a certificate marks it as imported from `kubevirt-external-ca`. The certificate itself does
//! not show that: the CA of another cluster looks like an earlier CA of this one. PEM parsers skip such lines.

use vitivirt_install::certificates::bundle::{Origin, TrustedCertificate};

use super::{key::encode_pem, x509};

const EXTERNAL_MARKER: &str = "# from kubevirt-external-ca";

/// Parses a bundle. Blocks that are not valid certificates are left out.
pub(super) fn parse_bundle(text: &str) -> Vec<TrustedCertificate> {
    let mut certificates = Vec::new();
    let mut origin = Origin::Own;
    let mut block: Option<String> = None;
    for line in text.lines().map(str::trim) {
        if line.starts_with("-----BEGIN ") {
            block = Some(String::new());
        }
        match &mut block {
            Some(lines) => {
                lines.push_str(line);
                lines.push('\n');
                if line.starts_with("-----END ") {
                    certificates.extend(parse_certificate(lines, origin));
                    (block, origin) = (None, Origin::Own);
                }
            }
            None if line == EXTERNAL_MARKER => origin = Origin::External,
            None if line.is_empty() => {}
            None => origin = Origin::Own,
        }
    }
    certificates
}

fn parse_certificate(block: &str, origin: Origin) -> Option<TrustedCertificate> {
    let block = pem::parse(block).ok().filter(|block| block.tag() == "CERTIFICATE")?;
    let validity = x509::validity(&x509::parse(block.contents())?)?;
    Some(TrustedCertificate { certificate: block.into_contents(), validity, origin })
}

pub(super) fn format_bundle(certificates: &[TrustedCertificate]) -> String {
    let mut text = String::new();
    for trusted in certificates {
        if trusted.origin == Origin::External {
            text.push_str(EXTERNAL_MARKER);
            text.push('\n');
        }
        text.push_str(&encode_pem("CERTIFICATE", trusted.certificate.clone()));
    }
    text
}
