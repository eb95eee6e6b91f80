//! Names of images: the parts of the operator's image, and the syntax of image names.

/// The parts of `registry/prefixvirt-operator:tag`. Every image name that KubeVirt accepts has this form.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OperatorImage<'a> {
    pub(crate) registry: &'a str,
    pub(crate) prefix: &'a str,
    /// Empty, `:tag` or `@digest`.
    suffix: &'a str,
}

impl<'a> OperatorImage<'a> {
    const NAME: &'static str = "virt-operator";

    pub(crate) fn parse(image: &'a str) -> Option<Self> {
        // Both the registry and the prefix are as long as possible.
        let slashes = image.rmatch_indices('/').map(|(at, _)| at);
        slashes.into_iter().find_map(|at| {
            let (registry, rest) = (image.get(..at)?, image.get(at + 1..)?);
            rest.rmatch_indices(Self::NAME).find_map(|(start, name)| {
                let suffix = rest.get(start + name.len()..)?;
                let ends = suffix.is_empty() || suffix.starts_with([':', '@']);
                ends.then_some(Self { registry, prefix: rest.get(..start)?, suffix })
            })
        })
    }

    /// The tag of the other images. A digest identifies only this image.
    pub(crate) fn tag(&self) -> Option<&'a str> {
        match self.suffix {
            "" => Some("latest"),
            suffix => suffix.strip_prefix(':'),
        }
    }

    /// Whether images can be derived from it. With a tag and a digest, the derived images would get the digest of this
    /// one.
    pub(crate) fn is_derivable(&self) -> bool {
        let suffix = match self.suffix.split_at_checked(1) {
            Some((":", tag)) => is_tag(tag),
            Some(("@", digest)) => is_digest(digest),
            _ => self.suffix.is_empty(),
        };
        suffix && is_registry(self.registry) && is_part(&format!("{}{}", self.prefix, Self::NAME))
    }
}

/// `registry/name`, optionally with a tag and a digest.
pub(crate) fn is_image(text: &str) -> bool {
    let (text, digest) = text.split_once('@').map_or((text, true), |(text, digest)| (text, is_digest(digest)));
    // A colon before the last slash belongs to a port.
    let tagged = text.rsplit_once(':').filter(|(_, tag)| !tag.contains('/'));
    let (name, tag) = tagged.map_or((text, true), |(name, tag)| (name, is_tag(tag)));
    // Without a registry the name refers to the default registry of the runtime, which has no capital letters.
    digest && tag && (is_part(name) || name.contains('/') && is_registry(name))
}

pub(crate) fn is_tag(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|byte| word(byte) || b".-".contains(&byte))
}

fn is_digest(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+._-".contains(&byte);
    text.split_once(':').is_some_and(|(algorithm, hex)| {
        has_alphanumeric_ends(algorithm)
            && algorithm.bytes().all(plain)
            && hex.len() >= 32
            && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// A host, optionally with a path.
pub(crate) fn is_registry(text: &str) -> bool {
    let (host, path) = text.split_once('/').map_or((text, None), |(host, path)| (host, Some(path)));
    is_host(host) && path.is_none_or(|path| path.split('/').all(is_part))
}

/// A name or an address, optionally with a port.
fn is_host(text: &str) -> bool {
    let port = |text: &str| text.parse::<u16>().is_ok();
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        return address.parse::<std::net::Ipv6Addr>().is_ok()
            && (rest.is_empty() || rest.strip_prefix(':').is_some_and(port));
    }
    let (name, good_port) = text.split_once(':').map_or((text, true), |(name, number)| (name, port(number)));
    good_port
        && has_alphanumeric_ends(name)
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

fn is_part(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    has_alphanumeric_ends(text) && text.bytes().all(plain)
}

fn has_alphanumeric_ends(text: &str) -> bool {
    let alphanumeric = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    alphanumeric(text.as_bytes().first()) && alphanumeric(text.as_bytes().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_split_into_its_parts() {
        for (image, expected) in [
            ("quay.io/kubevirt/virt-operator:v1.8.4", Some(("quay.io/kubevirt", "", Some("v1.8.4")))),
            ("reg:5000/a/kube-virt-operator:v1", Some(("reg:5000/a", "kube-", Some("v1")))),
            ("reg/virt-operator", Some(("reg", "", Some("latest")))),
            ("reg/virt-operator@sha256:00", Some(("reg", "", None))),
            ("reg/virt-operator-virt-operator:x", Some(("reg", "virt-operator-", Some("x")))),
            ("ghcr.io/vitistack/kubevirt-operator", Some(("ghcr.io/vitistack", "kube", Some("latest")))),
            ("virt-operator:v1", None),
            ("reg/virt-operator-x:v1", None),
            ("", None),
        ] {
            let parsed = OperatorImage::parse(image).map(|image| (image.registry, image.prefix, image.tag()));
            assert_eq!(parsed, expected, "{image}");
        }
    }

    #[test]
    fn image_names_are_checked() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for image in [
            "quay.io/kubevirt/virt-api:v1.8.4",
            "virt-api",
            "virt-api:v1",
            "localhost:5000/virt-api",
            "[::1]:5000/a/b:c",
            "Registry.example/a:b",
            &format!("reg:5000/a/virt-api@{digest}"),
            &format!("reg/virt-api:v1@{digest}"),
        ] {
            assert!(is_image(image), "{image}");
        }
        for image in [
            "",
            " ",
            "a b",
            "Capital:v1",
            "reg/Name:v1",
            "reg/a:",
            "reg/a:b:c",
            "reg/a:sha256:00",
            "reg/a@sha256:00",
            "reg/a@",
            "https://reg/a",
            "reg/a/",
            "/a",
            "reg//a",
        ] {
            assert!(!is_image(image), "{image}");
        }
    }
}
