//! Names that no image can have. The release accepts them and then waits for a pod that can never start.

use api::kubevirt::KubeVirtSpec;

use super::{Cause, Refusal};

pub(super) fn images(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let fields = [
        (
            "spec.imageRegistry",
            (&old.image_registry, &new.image_registry),
            is_registry(&new.image_registry),
            "must be a registry with a path, such as quay.io/kubevirt, without a scheme and without a slash at its end",
        ),
        (
            "spec.imageTag",
            (&old.image_tag, &new.image_tag),
            is_tag(&new.image_tag),
            "must be a tag of KubeVirt's images, such as v1.8.4",
        ),
    ];
    let refused = fields.into_iter().filter(|(_, (old, new), good, _)| old != new && !new.is_empty() && !good);
    refused
        .map(|(field, (_, new), _, wanted)| {
            Refusal::new(Cause::Invalid, field, format!("{wanted}, and {new:?} is not"))
        })
        .collect()
}

fn is_tag(text: &str) -> bool {
    let digest = |hex: &str| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let tag = || {
        text.len() <= 128
            && text.bytes().next().is_some_and(word)
            && text.bytes().all(|byte| word(byte) || b".-".contains(&byte))
    };
    text.strip_prefix("sha256:").map_or_else(tag, digest)
}

fn is_registry(text: &str) -> bool {
    let (host, path) = text.split_once('/').map_or((text, None), |(host, path)| (host, Some(path)));
    is_host(host) && path.is_none_or(|path| path.split('/').all(is_part))
}

/// A name or an address, perhaps with a port.
fn is_host(text: &str) -> bool {
    let port = |text: &str| text.parse::<u16>().is_ok();
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        return address.parse::<std::net::Ipv6Addr>().is_ok()
            && (rest.is_empty() || rest.strip_prefix(':').is_some_and(port));
    }
    let (name, good_port) = text.split_once(':').map_or((text, true), |(name, number)| (name, port(number)));
    good_port && ends_well(name) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

fn is_part(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    ends_well(text) && text.bytes().all(plain)
}

fn ends_well(text: &str) -> bool {
    let alphanumeric = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    alphanumeric(text.as_bytes().first()) && alphanumeric(text.as_bytes().last())
}
