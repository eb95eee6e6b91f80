//! Whether virt-api responds and accepts objects.

use std::sync::Arc;

use vitivirt_api::ObjectKey;

use crate::{
    installation::Installation,
    kind::Kind,
    live::{LiveObject, Rollout},
    names::{VIRT_API, annotation},
    observed::Observed,
    webhooks::BLOCKING_PREFIX,
};

/// Whether the API server accepts instancetypes: virt-api, which validates them, responds, and nothing blocks them.
pub(crate) fn accepts_instancetypes(observed: &Observed, installation: &Installation) -> bool {
    api_is_ready(observed, installation) && blocking_webhooks(observed).next().is_none()
}

pub(crate) fn blocking_webhooks(observed: &Observed) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
    let configurations = observed.objects.recognized(Kind::ValidatingWebhookConfiguration);
    configurations.filter(|(key, live)| key.name().starts_with(BLOCKING_PREFIX) && !live.deleting)
}

pub(crate) fn api_is_ready(observed: &Observed, installation: &Installation) -> bool {
    let key = ObjectKey::namespaced(&installation.config.namespace, VIRT_API);
    let live = observed.objects.get(Kind::Deployment, &key);
    let live = live.filter(|live| live.annotation(annotation::VERSION) == installation.config.kube_virt_version);
    live.and_then(|live| live.rollout).is_some_and(Rollout::is_complete)
}
