//! The observe step: everything that a reconcile of a Machine decides on, from the caches. Requests read only the Secret
//! that `cloudInit.secretRef` refers to, when its data is needed; what a deletion, a replacement or a new owner reference
//! must confirm; a PVC that seems to be lost; and the pod of a guest that does not start.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use parking_lot::Mutex;
use vitivirt_api::{
    ErrorClass, Failure, ObjectKey,
    machine::{Adoption, CloudInit, LABEL_MACHINE, LABEL_MACHINE_UID},
    reason,
    resources::virtual_machine_resource,
};
use vitivirt_machine::{
    Assessed, Observed,
    observed::{
        ImportSourceView, Installed, NetworkAttachmentView, NetworkView, PvcView, SecretView, SourceView, VmiView,
    },
    render::{
        cloud_init::{digest, secret_name},
        object_labels,
    },
    resolve::{Resolved, SecretSource},
};
use vitivirt_runtime::watch::SyncState;

use crate::{
    cache::{
        AttachmentEntry, Caches, ClassEntry, ImportEntry, MachineEntry, NetworkEntry, PvcEntry, SecretEntry, VmEntry,
        VmiEntry,
    },
    index::segment_of,
    launcher::LauncherReader,
    live_check::LiveCheck,
    repairs::RepairHistory,
    source_secrets::{SecretState, SourceSecrets},
};

pub(crate) struct Observer {
    pub(crate) caches: Caches,
    pub(crate) sources: Arc<SourceSecrets>,
    live_check: LiveCheck,
    launcher: LauncherReader,
    repairs: Arc<RepairHistory>,
    /// The digests of the source Secrets, so that a Machine that is up to date needs no read.
    source_digests: Mutex<HashMap<ObjectKey, SourceDigest>>,
}

/// The result of one read of a source Secret.
#[derive(Clone, PartialEq)]
struct SourceDigest {
    version: Box<str>,
    /// The digest of everything but the source: after an edit of the Machine the source is needed again.
    inline: String,
    key: String,
    /// The digest of all cloud-init data. None: the Secret does not have the key.
    digest: Option<String>,
}

/// A failure of a read that a condition reports. As for writes, the reconcile fails and is retried instead if the Machine
/// has changed, or if a retry may help and the Machine has a condition already.
fn reported(observed: &Observed, failure: Failure) -> Result<Failure, Failure> {
    let has_conditions = observed.machine.status.as_ref().is_some_and(|status| !status.conditions.is_empty());
    let is_retried = match failure.class {
        ErrorClass::Conflict => true,
        ErrorClass::Transient => has_conditions || failure.is_unreachable(),
        ErrorClass::Invalid | ErrorClass::Forbidden | ErrorClass::Bug => false,
    };
    if is_retried { Err(failure) } else { Ok(failure) }
}

impl Observer {
    pub(crate) fn new(
        client: Client,
        caches: Caches,
        sources: Arc<SourceSecrets>,
        repairs: Arc<RepairHistory>,
    ) -> Self {
        let launcher = LauncherReader::new(client.clone());
        let live_check = LiveCheck { client };
        Self { caches, sources, live_check, launcher, repairs, source_digests: Mutex::default() }
    }

    pub(crate) async fn observe(&self, key: &ObjectKey) -> Result<Option<Assessed>, Failure> {
        let Some(mut observed) = self.cached(key)? else {
            self.source_digests.lock().remove(key);
            return Ok(None);
        };
        if observed.is_deleting() && observed.finalizer_index().is_none() {
            // The operator has removed its finalizer, and the watch has not delivered the deletion yet.
            return Ok(None);
        }
        observed.recent_writes = self.repairs.of(&observed);
        if observed.is_deleting() && (observed.own_vm().is_none() || observed.is_deleted_as_owners_say()) {
            let is_kubevirt_removed = self.caches.is_crd_absent(&virtual_machine_resource());
            let confirmed = self.live_check.confirm_vm_gone(&mut observed, is_kubevirt_removed).await;
            observed.live_check_failure = confirmed.err();
        }
        if !observed.is_deleting() {
            self.find_uncached_pvcs(&mut observed).await;
            observed.launcher = self.launcher.state(&observed).await;
        }
        let assessed = self.confirm_replaced(Assessed::new(observed)).await?;
        let assessed = self.confirm_machine(assessed).await?;
        let assessed = self.find_user_data(key, assessed).await?;
        if !assessed.discards_user_data() {
            return Ok(Some(assessed));
        }
        let mut observed = assessed.into_observed();
        if let Err(failure) = self.live_check.confirm_secret_unused(&mut observed).await {
            tracing::warn!(error = %failure, "obsolete cloud-init Secret kept: the live check failed");
            observed.secret = None;
        }
        Ok(Some(Assessed::new(observed)))
    }

    /// Reads the user data that the plan needs and the cache does not contain. None of it is needed before the VM can be
    /// created, so a Machine that another problem stops costs no request.
    async fn find_user_data(&self, key: &ObjectKey, assessed: Assessed) -> Result<Assessed, Failure> {
        let observed = assessed.observed();
        let has_source = observed.resolved.as_ref().is_ok_and(|resolved| resolved.source().is_some());
        if !has_source && observed.omitted_inline.is_none() {
            self.source_digests.lock().remove(key);
            return Ok(assessed);
        }
        if assessed.is_stopped() && observed.own_vm().is_none() {
            return Ok(assessed);
        }
        let mut observed = assessed.into_observed();
        let (source, source_read) = self.source(key, &mut observed).await?;
        (observed.source, observed.source_read) = (source, source_read);
        if let Err(failure) = self.find_inline_data(&mut observed).await {
            let failure = reported(&observed, failure)?;
            tracing::warn!(error = %failure, "long user data could not be read");
            observed.source = SourceView::Failed(failure.message);
        }
        Ok(Assessed::new(observed))
    }

    /// The plan replaces only what the API server has confirmed. If it cannot be read, the other parts
    /// are still applied.
    async fn confirm_replaced(&self, assessed: Assessed) -> Result<Assessed, Failure> {
        let (pvcs, vmi) = (assessed.unconfirmed_pvcs(), assessed.replaces_unconfirmed_vmi());
        if pvcs.is_empty() && !vmi {
            return Ok(assessed);
        }
        let mut observed = assessed.into_observed();
        if let Err(failure) = self.live_check.confirm_replaced(&mut observed, pvcs, vmi).await {
            let failure = reported(&observed, failure)?;
            tracing::warn!(error = %failure, "nothing is replaced: the live check failed");
            observed.live_check_failure = Some(failure);
        }
        Ok(Assessed::new(observed))
    }

    /// The plan sets owner references, and replaces a VM or Secret that existed, only if the API server has confirmed the
    /// Machine. If it cannot be read, the other parts are still applied.
    async fn confirm_machine(&self, assessed: Assessed) -> Result<Assessed, Failure> {
        if !assessed.needs_confirmed_machine() {
            return Ok(assessed);
        }
        let mut observed = assessed.into_observed();
        if let Err(failure) = self.live_check.confirm_machine(&mut observed).await {
            let failure = reported(&observed, failure)?;
            tracing::warn!(error = %failure, "no object gets an owner reference: the live check failed");
        }
        Ok(Assessed::new(observed))
    }

    /// What the caches contain about a Machine, without any request. The Secret of `cloudInit.secretRef` and the pod of the
    /// guest are not among it.
    pub(crate) fn cached(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        let Some(entry) = self.caches.machines.entry(key) else { return Ok(None) };
        let machine = entry.value.machine(&entry.resource_version).map_err(|error| {
            // The text of the error may contain user data.
            let position = (error.line(), error.column());
            Failure::bug(reason::UNREADABLE_ANSWER, format!("cached Machine is unreadable at {position:?}"))
        })?;
        #[expect(clippy::disallowed_methods, reason = "a reconcile observes the current time here")]
        let now = Timestamp::now();
        let parsed = Observed::new(machine, now)?;
        let resolved = parsed.resolved.as_ref().ok();
        let networks = self.networks(key, &entry.value);
        let mut observed = Observed {
            installed: self.installed(),
            omitted_inline: entry.value.omitted_inline.as_deref().map(str::to_owned),
            storage_classes: ClassEntry::views(self.caches.classes.entries()),
            network_attachments: self.network_attachments(key, networks.keys()),
            networks,
            secret: self.secret(key),
            pvcs: self.pvcs(key, &parsed),
            import_sources: self.import_sources(key, resolved),
            vm: self.caches.vms.entry(key).as_ref().map(VmEntry::view),
            deletion: self.caches.index.deletions.of(key),
            machine_confirmed: false,
            macs_in_use: self.macs_in_use(key, &parsed),
            ..parsed
        };
        observed.vmi = self.vmi(key, &observed);
        observed.living_owners = self.living_owners(key, &observed);
        Ok(Some(observed))
    }

    pub(crate) fn installed(&self) -> Installed {
        Installed {
            kubevirt: self.caches.vms.sync_state() == SyncState::Synced
                && self.caches.vmis.sync_state() == SyncState::Synced,
            multus: self.caches.attachments.sync_state() == SyncState::Synced,
            cdi: self.caches.imports.sync_state() == SyncState::Synced,
        }
    }

    fn secret(&self, key: &ObjectKey) -> Option<SecretView> {
        self.caches.secrets.entry(&key.sibling(&secret_name(key.name()))).as_ref().map(SecretEntry::view)
    }

    fn networks(&self, key: &ObjectKey, machine: &MachineEntry) -> BTreeMap<String, NetworkView> {
        let view = |name: &str| {
            let entry = self.caches.networks.entry(&key.sibling(name))?;
            Some((
                name.to_owned(),
                NetworkEntry::view(&entry, self.caches.index.network_users.has_other_users(key, name, machine)),
            ))
        };
        machine.networks.iter().filter_map(|name| view(name)).collect()
    }

    fn network_attachments<'a>(
        &self,
        key: &ObjectKey,
        names: impl Iterator<Item = &'a String>,
    ) -> BTreeMap<String, NetworkAttachmentView> {
        let view = |name: &String| {
            let entry = self.caches.attachments.entry(&key.sibling(name))?;
            Some((name.clone(), AttachmentEntry::view(&entry)))
        };
        names.filter_map(view).collect()
    }

    /// The VMI of the Machine.
    fn vmi(&self, key: &ObjectKey, observed: &Observed) -> Option<VmiView> {
        self.caches.vmis.entry(key).filter(|entry| entry.value.belongs_to(observed)).as_ref().map(VmiEntry::view)
    }

    /// PVCs that carry the UID of the Machine, or of one that it adopts; PVCs of restored disks that name it; PVCs with a name
    /// that it needs; and PVCs that it had.
    fn pvcs(&self, key: &ObjectKey, observed: &Observed) -> BTreeMap<String, PvcView> {
        let index = &self.caches.index.pvcs;
        let adoption = Adoption::from_metadata(&observed.machine.metadata);
        let uids = std::iter::once(observed.uid()).chain(adoption.machines());
        let labelled = uids.flat_map(|uid| index.names(uid)).chain(index.restored(key)).map(String::from);
        let resolved = observed.resolved.as_ref().ok();
        let needed = resolved.into_iter().flat_map(Resolved::pvc_names).map(str::to_owned);
        let recorded = observed.machine.status.iter().flat_map(|status| &status.disks).map(|disk| disk.pvc.clone());
        let view = |name: String| {
            let view = PvcEntry::view(&self.caches.pvcs.entry(&key.sibling(&name))?);
            Some((name, view))
        };
        labelled.chain(needed).chain(recorded).filter_map(view).collect()
    }

    /// The UIDs of existing Machines that own the observed PVCs.
    fn living_owners(&self, key: &ObjectKey, observed: &Observed) -> BTreeSet<String> {
        let owner = |pvc: &PvcView| {
            let uid = pvc.labels.get(LABEL_MACHINE_UID).filter(|uid| *uid != observed.uid())?;
            let machine = self.caches.machines.entry(&key.sibling(pvc.labels.get(LABEL_MACHINE)?))?;
            (machine.uid.to_string() == *uid).then(|| uid.clone())
        };
        observed.pvcs.values().filter_map(owner).collect()
    }

    /// Reads the PVCs that the Machine had and that no cache has. If a read fails, the operator neither reports the PVC as
    /// lost nor replaces it.
    async fn find_uncached_pvcs(&self, observed: &mut Observed) {
        for pvc in observed.uncached_pvcs() {
            match self.live_check.get_pvc(observed, &pvc).await {
                Ok(Some(view)) => _ = observed.pvcs.insert(pvc, view),
                Ok(None) => {}
                Err(failure) => {
                    tracing::warn!(error = %failure, pvc, "whether a PVC still exists is unknown: the live check failed");
                    observed.live_check_failure = Some(failure);
                }
            }
        }
    }

    fn import_sources(&self, key: &ObjectKey, resolved: Option<&Resolved>) -> BTreeMap<String, ImportSourceView> {
        let view = |name: &str| {
            let view = ImportEntry::view(&self.caches.imports.entry(&key.sibling(name))?);
            Some((name.to_owned(), view))
        };
        resolved.into_iter().flat_map(Resolved::pvc_names).filter_map(view).collect()
    }

    /// The MAC addresses that another Machine has on the same segment.
    fn macs_in_use(&self, key: &ObjectKey, observed: &Observed) -> BTreeMap<(String, String), String> {
        let Ok(resolved) = &observed.resolved else { return BTreeMap::new() };
        let segment = |network: &str| segment_of(key, network, &self.caches.networks);
        self.caches.index.mac_addresses.in_use(key, resolved, &segment)
    }

    /// A source that cannot be read stops only the user data, and is reported.
    async fn source(&self, key: &ObjectKey, observed: &mut Observed) -> Result<(SourceView, Option<String>), Failure> {
        match self.try_source(key, observed).await {
            Ok(source) => Ok(source),
            Err(failure) => {
                let failure = reported(observed, failure)?;
                tracing::warn!(error = %failure, "source Secret could not be read");
                Ok((SourceView::Failed(failure.message), None))
            }
        }
    }

    /// The source is not read while the Machine is being deleted, or while its spec is invalid.
    async fn try_source(
        &self,
        key: &ObjectKey,
        observed: &mut Observed,
    ) -> Result<(SourceView, Option<String>), Failure> {
        let secret = observed.secret.as_ref();
        let resolved = observed.resolved.as_ref().ok().filter(|_| !observed.is_deleting());
        let needed = resolved.and_then(|resolved| Some((resolved, resolved.source()?)));
        let (Some((resolved, source)), Some(given)) = (needed, &observed.machine.spec.cloud_init) else {
            self.source_digests.lock().remove(key);
            return Ok((SourceView::NotNeeded, None));
        };
        let source_key = key.sibling(&source.name);
        let state = self.sources.state(&source_key).await;
        self.sources.stop_unless(&source_key, || self.caches.is_source(&source_key));
        if state == SecretState::Missing {
            return Ok((SourceView::SecretMissing, None));
        }
        let inline = observed.omitted_inline.clone().unwrap_or_else(|| digest(&observed.id, given, None));
        let known = self.source_digests.lock().get(key).cloned().filter(|known| {
            state == SecretState::Version(known.version.clone()) && known.inline == inline && known.key == source.key
        });
        match known.clone() {
            Some(SourceDigest { digest: None, .. }) => return Ok((SourceView::KeyMissing, None)),
            Some(SourceDigest { digest: Some(digest), .. }) if is_up_to_date(resolved, secret, &digest) => {
                return Ok((SourceView::Unchanged(digest), None));
            }
            _ => {}
        }
        if let (None, SecretState::Version(version)) = (&known, &state)
            && let Some(digest) = digest_of_another_replica(secret, &source_read(source, version, &inline))
            && is_up_to_date(resolved, secret, &digest)
        {
            let known = SourceDigest {
                version: version.clone(),
                inline,
                key: source.key.clone(),
                digest: Some(digest.clone()),
            };
            self.source_digests.lock().insert(key.clone(), known);
            return Ok((SourceView::Unchanged(digest), None));
        }
        let source = source.clone();
        self.read_inline_data(observed).await?;
        let Some(given) = &observed.machine.spec.cloud_init else { return Ok((SourceView::NotNeeded, None)) };
        self.read_source(key, observed, given, &source, inline).await
    }

    /// The cache does not contain long inline data. It is read if the cloud-init Secret needs a write.
    async fn find_inline_data(&self, observed: &mut Observed) -> Result<(), Failure> {
        let resolved = observed.resolved.as_ref().ok().filter(|_| !observed.is_deleting());
        let (Some(resolved), Some(digest), SourceView::NotNeeded) =
            (resolved, &observed.omitted_inline, &observed.source)
        else {
            return Ok(());
        };
        if is_up_to_date(resolved, observed.secret.as_ref(), digest) {
            observed.source = SourceView::Unchanged(digest.clone());
            return Ok(());
        }
        self.read_inline_data(observed).await
    }

    /// Reads the inline data that the cache does not contain.
    async fn read_inline_data(&self, observed: &mut Observed) -> Result<(), Failure> {
        if observed.omitted_inline.is_none() {
            return Ok(());
        }
        let machine = self.live_check.get_machine(observed).await?;
        observed.machine.spec.cloud_init = machine.spec.cloud_init;
        observed.omitted_inline = None;
        Ok(())
    }

    async fn read_source(
        &self,
        key: &ObjectKey,
        observed: &Observed,
        given: &CloudInit,
        source: &SecretSource,
        inline: String,
    ) -> Result<(SourceView, Option<String>), Failure> {
        let read = match self.sources.read(key.namespace().unwrap_or_default(), source).await {
            Ok(Some(read)) => read,
            Ok(None) => return Ok((SourceView::SecretMissing, None)),
            Err(failure) if failure.class == ErrorClass::Forbidden => {
                return Ok((SourceView::Forbidden(failure.message), None));
            }
            Err(failure) => return Err(failure),
        };
        let digest = read.bytes.as_ref().map(|bytes| digest(&observed.id, given, Some(bytes)));
        let record = source_read(source, &read.version, &inline);
        let known = SourceDigest { version: read.version, inline, key: source.key.clone(), digest };
        self.source_digests.lock().insert(key.clone(), known);
        Ok(read.bytes.map_or((SourceView::KeyMissing, None), |bytes| (SourceView::Read(bytes), Some(record))))
    }
}

/// Identifies the key and the version of a source Secret, and the rest of the user data.
fn source_read(source: &SecretSource, version: &str, inline: &str) -> String {
    format!("{} {} {version} {inline}", source.name, source.key)
}

/// The digest of the cloud-init Secret, if it was written from the present version of its source. So a new leader does
/// not read the source of each Machine.
fn digest_of_another_replica(secret: Option<&SecretView>, expected: &str) -> Option<String> {
    secret.filter(|secret| secret.source_read.as_deref() == Some(expected))?.content.clone()
}

/// Whether the cloud-init Secret needs no write. Only then its source need not be read.
fn is_up_to_date(resolved: &Resolved, secret: Option<&SecretView>, digest: &str) -> bool {
    secret.is_some_and(|secret| {
        let labelled = object_labels(resolved).iter().all(|(key, value)| secret.labels.get(key) == Some(value));
        secret.content.as_deref() == Some(digest) && !secret.tampered && labelled && secret.controller_uid.is_some()
    })
}
