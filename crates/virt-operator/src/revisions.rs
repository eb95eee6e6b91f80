//! Which pods of a DaemonSet have its current template. ControllerRevisions are read, not watched: they matter only
//! while a rollout is in progress, and the result does not change as long as the template does not.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::{Api, Client, api::ListParams};
use parking_lot::Mutex;
use vitivirt_api::ObjectKey;
use vitivirt_install::{Kind, Observed, current_revision, unfinished_daemon_sets};

#[derive(Default)]
pub(crate) struct Revisions(Mutex<BTreeMap<ObjectKey, (u64, Box<str>)>>);

impl Revisions {
    /// The current revision of each DaemonSet whose rollout is in progress, by its name. A revision that cannot be read
    /// is missing: the rollout then replaces one pod at a time.
    pub(crate) async fn current(&self, client: &Client, observed: &Observed) -> BTreeMap<String, Box<str>> {
        let unfinished = unfinished_daemon_sets(observed);
        self.0.lock().retain(|key, _| unfinished.iter().any(|(unfinished, _)| unfinished == key));
        let mut current = BTreeMap::new();
        for (key, digest) in unfinished {
            let known = self.0.lock().get(&key).filter(|(of, _)| *of == digest).map(|(_, revision)| revision.clone());
            let revision = match known {
                Some(revision) => Some(revision),
                None => read(client, observed, &key).await,
            };
            if let Some(revision) = revision {
                current.insert(key.name().to_owned(), revision.clone());
                self.0.lock().insert(key, (digest, revision));
            }
        }
        current
    }
}

async fn read(client: &Client, observed: &Observed, key: &ObjectKey) -> Option<Box<str>> {
    let live = observed.objects.get(Kind::DaemonSet, key)?;
    let api: Api<ControllerRevision> = Api::namespaced(client.clone(), key.namespace()?);
    // The controller labels revisions like the pods. virt-controller stores other revisions in the same namespace.
    let selected = ListParams::default().labels(&format!("kubevirt.io={}", key.name()));
    match api.list(&selected).await {
        Ok(revisions) => current_revision(live, &revisions.items),
        Err(error) => {
            tracing::warn!(daemon_set = key.name(), %error, "ControllerRevisions cannot be read");
            None
        }
    }
}
