//! Where images come from: the operator's own image, taken apart.

/// `registry/prefixvirt-operator:tag` in its parts. Every image name that the release accepts has this shape; for any
/// other all parts are empty and nothing can be derived.
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
        // Both the registry and the prefix reach as far to the right as they can.
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

    /// The tag that the other images have; a digest says nothing about them.
    pub(crate) fn tag(&self) -> Option<&'a str> {
        match self.suffix {
            "" => Some("latest"),
            suffix => suffix.strip_prefix(':'),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_in_its_parts() {
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
}
