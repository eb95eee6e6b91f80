//! Invalid names of images. Upstream virt-operator accepts them and then waits for a pod that can never start.

use vitivirt_api::kubevirt::KubeVirtSpec;

use super::{Cause, Refusal};
use crate::images::{is_registry, is_tag};

pub(super) fn images(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let fields = [
        (
            "spec.imageRegistry",
            (&old.image_registry, &new.image_registry),
            is_registry(&new.image_registry),
            "must be a registry with a path, such as quay.io/kubevirt, without a scheme and a trailing slash",
        ),
        (
            "spec.imageTag",
            (&old.image_tag, &new.image_tag),
            is_tag(&new.image_tag),
            "must be a tag of KubeVirt's images, such as v1.8.4",
        ),
    ];
    let refused = fields.into_iter().filter(|(_, (old, new), valid, _)| old != new && !new.is_empty() && !valid);
    refused
        .map(|(field, (_, new), _, rule)| Refusal::new(Cause::Invalid, field, format!("invalid value {new:?}: {rule}")))
        .collect()
}
