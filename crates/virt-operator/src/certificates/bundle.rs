//! Bundles as text. A line before a certificate says that a user has brought it, since nothing in a certificate does:
//! the authority of another cluster looks like one that was once ours. Readers of PEM pass over such lines.

use vitivirt_install::certificates::bundle::{Origin, Trusted};

use super::{key::encode, x509};

const BROUGHT: &str = "# from kubevirt-external-ca";

/// What can be read of a bundle; the rest is left out.
pub(super) fn read(text: &str) -> Vec<Trusted> {
    let mut all = Vec::new();
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
                    all.extend(trusted(lines, origin));
                    (block, origin) = (None, Origin::Own);
                }
            }
            None if line == BROUGHT => origin = Origin::External,
            None if line.is_empty() => {}
            None => origin = Origin::Own,
        }
    }
    all
}

fn trusted(block: &str, origin: Origin) -> Option<Trusted> {
    let block = pem::parse(block).ok().filter(|block| block.tag() == "CERTIFICATE")?;
    let validity = x509::validity(&x509::parse(block.contents())?)?;
    Some(Trusted { certificate: block.into_contents(), validity, origin })
}

pub(super) fn write(certificates: &[Trusted]) -> String {
    let mut text = String::new();
    for trusted in certificates {
        if trusted.origin == Origin::External {
            text.push_str(BROUGHT);
            text.push('\n');
        }
        text.push_str(&encode("CERTIFICATE", trusted.certificate.clone()));
    }
    text
}
