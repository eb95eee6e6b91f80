//! `observe`: everything that a pass over a Machine decides on, put together from the caches. The one thing that may be
//! fetched is the Secret that a Machine's cloud-init refers to, when its contents are needed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use parking_lot::Mutex;
use vitivirt_api::machine::Machine;
use vitivirt_api::{ErrorClass, Failure, ObjectKey, reason};
use vitivirt_machine::observed::{Installed, SecretView, SourceView};
use vitivirt_machine::render::cloud_init::{digest, secret_name};
use vitivirt_machine::render::labels;
use vitivirt_machine::resolve::{Content, Resolved, SecretSource, resolve};
use vitivirt_machine::{Observed, discards_user_data, macs};
use vitivirt_runtime::watch::SyncState;

use crate::cache::{
    AttachmentEntry, Caches, ClassEntry, ImportEntry, MachineEntry, NetworkEntry, PvcEntry, SecretEntry, VmEntry,
    VmiEntry, address,
};
use crate::live_check::LiveCheck;
use crate::source_secrets::{SecretState, SourceSecrets};

pub(crate) struct Observer {
    pub(crate) caches: Caches,
    pub(crate) sources: Arc<SourceSecrets>,
    live_check: LiveCheck,
    /// What is known of the sources, so that a Machine at rest needs no read.
    memory: Mutex<HashMap<ObjectKey, Known>>,
}

/// What one read of a source told.
#[derive(Clone, PartialEq)]
struct Known {
    version: Box<str>,
    /// The digest of all but the source: an edited Machine needs the contents again.
    inline: String,
    key: String,
    /// The digest of the whole. None: the Secret has no such key.
    digest: Option<String>,
}

impl Observer {
    pub(crate) fn new(client: Client, caches: Caches, sources: Arc<SourceSecrets>) -> Self {
        Self { caches, sources, live_check: LiveCheck { client }, memory: Mutex::default() }
    }

    pub(crate) async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        let Some(entry) = self.caches.machines.entry(key) else {
            self.memory.lock().remove(key);
            return Ok(None);
        };
        let machine = entry.value.machine(&entry.resource_version).map_err(|error| {
            // The error may quote what it could not read.
            let place = (error.line(), error.column());
            Failure::bug(reason::UNREADABLE_ANSWER, format!("a cached Machine could not be read back at {place:?}"))
        })?;
        let resolved = resolve(&machine).ok();
        let secret = self.secret(key);
        let source = self.source(key, &machine, resolved.as_ref(), secret.as_ref()).await?;
        let networks = self.networks(key, &entry.value);
        let attachment = |name: &String| {
            Some((name.clone(), AttachmentEntry::view(&self.caches.attachments.entry(&beside(key, name))?)))
        };
        let mut observed = Observed {
            installed: self.installed(),
            storage_classes: ClassEntry::views(self.caches.classes.all()),
            attachments: networks.keys().filter_map(attachment).collect(),
            networks,
            secret,
            source,
            pvcs: self.pvcs(key, &machine, resolved.as_ref()),
            import_sources: self.import_sources(key, resolved.as_ref()),
            vm: self.caches.vms.entry(key).as_ref().map(VmEntry::view),
            vmi: self.caches.vmis.entry(key).as_ref().map(VmiEntry::view),
            macs_in_use: resolved.map(|resolved| self.macs_in_use(key, &machine, &resolved)).unwrap_or_default(),
            machine,
            #[expect(clippy::disallowed_methods, reason = "a reconcile observes the current time here")]
            now: Timestamp::now(),
        };
        if observed.is_deleting() && observed.vm.is_none() {
            self.live_check.confirm_vm_gone(&mut observed).await?;
        }
        if discards_user_data(&observed)
            && let Err(failure) = self.live_check.confirm_secret_unused(&mut observed).await
        {
            tracing::warn!(error = %failure, "user data that is not wanted any more stays: it cannot be looked at");
            observed.secret = None;
        }
        Ok(Some(observed))
    }

    fn installed(&self) -> Installed {
        Installed {
            kubevirt: self.caches.vms.sync_state() == SyncState::Synced
                && self.caches.vmis.sync_state() == SyncState::Synced,
            multus: self.caches.attachments.sync_state() == SyncState::Synced,
            cdi: self.caches.imports.sync_state() == SyncState::Synced,
        }
    }

    fn secret(&self, key: &ObjectKey) -> Option<SecretView> {
        self.caches.secrets.entry(&beside(key, &secret_name(key.name()))).as_ref().map(SecretEntry::view)
    }

    fn networks(
        &self,
        key: &ObjectKey,
        own: &MachineEntry,
    ) -> BTreeMap<String, vitivirt_machine::observed::NetworkView> {
        let view = |name: &str| {
            let entry = self.caches.networks.entry(&beside(key, name))?;
            Some((
                name.to_owned(),
                NetworkEntry::view(&entry, self.caches.index.network_users.has_other_users(key, name, own)),
            ))
        };
        own.networks.iter().filter_map(|name| view(name)).collect()
    }

    fn pvcs(
        &self,
        key: &ObjectKey,
        machine: &Machine,
        resolved: Option<&Resolved>,
    ) -> BTreeMap<String, vitivirt_machine::observed::PvcView> {
        let uid = machine.metadata.uid.as_deref().unwrap_or_default();
        let carried = self.caches.index.pvcs.names(uid).into_iter().map(String::from);
        let needed = pvc_names(resolved).map(str::to_owned);
        carried
            .chain(needed)
            .filter_map(|name| {
                let view = PvcEntry::view(&self.caches.pvcs.entry(&beside(key, &name))?);
                Some((name, view))
            })
            .collect()
    }

    fn import_sources(
        &self,
        key: &ObjectKey,
        resolved: Option<&Resolved>,
    ) -> BTreeMap<String, vitivirt_machine::observed::OwnedView> {
        pvc_names(resolved)
            .filter_map(|name| {
                let view = ImportEntry::view(&self.caches.imports.entry(&beside(key, name))?);
                Some((name.to_owned(), view))
            })
            .collect()
    }

    /// Addresses that an older Machine of the namespace has on the same network.
    fn macs_in_use(
        &self,
        key: &ObjectKey,
        machine: &Machine,
        resolved: &Resolved,
    ) -> BTreeMap<(String, String), String> {
        let namespace = key.namespace().unwrap_or_default();
        let all = macs::addresses(resolved).map(|(network, mac)| address(namespace, network, mac));
        let shared: Vec<u64> = all.filter(|address| self.caches.index.mac_addresses.is_shared(*address)).collect();
        if shared.is_empty() {
            return BTreeMap::new();
        }
        let suspects = self.caches.machines.all().into_iter().filter_map(|(_, entry)| {
            let suspect = entry.value.addresses.iter().any(|address| shared.contains(address));
            suspect.then(|| entry.value.machine(&entry.resource_version).ok())?
        });
        macs::in_use(machine, resolved, &suspects.collect::<Vec<_>>())
    }

    /// Nothing is read while the Machine goes, or while it cannot be understood.
    async fn source(
        &self,
        key: &ObjectKey,
        machine: &Machine,
        resolved: Option<&Resolved>,
        secret: Option<&SecretView>,
    ) -> Result<SourceView, Failure> {
        let wanted = resolved.and_then(|resolved| resolved.cloud_init.as_ref()?.source.as_ref());
        let Some(wanted) = wanted.filter(|_| machine.metadata.deletion_timestamp.is_none()) else {
            self.memory.lock().remove(key);
            return Ok(SourceView::NotNeeded);
        };
        let seen = self.sources.state(&beside(key, &wanted.name));
        if seen == SecretState::Missing {
            return Ok(SourceView::SecretMissing);
        }
        let inline = digest(machine, None);
        let known = self.memory.lock().get(key).cloned().filter(|known| {
            seen == SecretState::Version(known.version.clone()) && known.inline == inline && known.key == wanted.key
        });
        match known {
            Some(Known { digest: None, .. }) => return Ok(SourceView::KeyMissing),
            Some(Known { digest: Some(digest), .. }) if is_settled(machine, secret, &digest) => {
                return Ok(SourceView::Unchanged(digest));
            }
            _ => {}
        }
        self.read_source(key, machine, wanted, inline).await
    }

    async fn read_source(
        &self,
        key: &ObjectKey,
        machine: &Machine,
        wanted: &SecretSource,
        inline: String,
    ) -> Result<SourceView, Failure> {
        let read = match self.sources.read(key.namespace().unwrap_or_default(), wanted).await {
            Ok(Some(read)) => read,
            Ok(None) => return Ok(SourceView::SecretMissing),
            Err(failure) if failure.class == ErrorClass::Forbidden => {
                return Ok(SourceView::Forbidden(failure.message));
            }
            Err(failure) => return Err(failure),
        };
        let digest = read.bytes.as_ref().map(|bytes| digest(machine, Some(&bytes.0)));
        let known = Known { version: read.version, inline, key: wanted.key.clone(), digest };
        self.memory.lock().insert(key.clone(), known);
        Ok(read.bytes.map_or(SourceView::KeyMissing, SourceView::Read))
    }
}

/// Whether nothing about the cloud-init Secret needs a write. Then, and only then, its source need not be read.
fn is_settled(machine: &Machine, secret: Option<&SecretView>, digest: &str) -> bool {
    secret.is_some_and(|secret| {
        let labelled = labels(machine).iter().all(|(key, value)| secret.labels.get(key) == Some(value));
        secret.content.as_deref() == Some(digest) && !secret.tampered && labelled
    })
}

fn beside(key: &ObjectKey, name: &str) -> ObjectKey {
    ObjectKey::namespaced(key.namespace().unwrap_or_default(), name)
}

fn pvc_names(resolved: Option<&Resolved>) -> impl Iterator<Item = &str> {
    resolved.into_iter().flat_map(|resolved| &resolved.disks).filter_map(|disk| match &disk.content {
        Content::Pvc { pvc, .. } => Some(pvc.as_str()),
        Content::ContainerDisk { .. } => None,
    })
}
