//! What the operator's caches would contain about one Machine, read from the cluster object by object, for commands
//! that run once. The objects are projected as in the caches, so the views are the same.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use k8s_openapi::{
    api::{
        core::v1::{PersistentVolumeClaim, Secret},
        storage::v1::StorageClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    core::{DynamicObject, PartialObjectMeta},
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vitivirt_api::{
    ApiResource, ErrorClass, ObjectKey, Target,
    machine::{LABEL_MACHINE_UID, Machine, NetworkConfiguration, POD_NETWORK},
    reason,
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};
use vitivirt_machine::{
    Observed, SecretBytes, macs,
    observed::{
        ImportSourceView, Installed, NetworkAttachmentView, NetworkView, PvcView, SourceView, StorageClassView,
    },
    render::{cloud_init::secret_name, network},
    resolve::{DiskBacking, Resolved},
};
use vitivirt_runtime::{
    reconcile::{Executor, classify},
    watch::Entry,
};

use super::files::placeholder_uid;
use crate::cache::{
    AttachmentEntry, ClassEntry, ImportEntry, NetworkEntry, PvcEntry, SecretEntry, VmEntry, VmiEntry, entry,
};

pub(crate) struct ClusterReader {
    client: Client,
    /// Used only to read.
    executor: Executor,
    /// Kinds and names of objects that the user is not allowed to read.
    unreadable: Mutex<Vec<(String, String)>>,
    /// What the user is not allowed to read, and what the plan assumes instead.
    warnings: Mutex<Vec<String>>,
}

/// The result of reading one object.
enum Lookup<V> {
    KindNotServed,
    NotFound,
    /// The user is not allowed to read it; the server's message.
    Forbidden(String),
    Object(Entry<V>),
}

impl<V> Lookup<V> {
    fn is_installed(&self) -> bool {
        !matches!(self, Lookup::KindNotServed)
    }

    fn view<T>(&self, view: impl FnOnce(&Entry<V>) -> T) -> Option<T> {
        match self {
            Lookup::Object(entry) => Some(view(entry)),
            Lookup::KindNotServed | Lookup::NotFound | Lookup::Forbidden(_) => None,
        }
    }
}

impl ClusterReader {
    pub(crate) fn new(client: Client) -> Self {
        let executor = Executor::new(client.clone(), vitivirt_api::machine::MANAGED_BY);
        Self { executor, client, unreadable: Mutex::default(), warnings: Mutex::default() }
    }

    /// Kinds and names of the objects that the user is not allowed to read.
    pub(crate) fn unreadable(&self) -> Vec<(String, String)> {
        self.unreadable.lock().clone()
    }

    /// The warnings since the last call.
    pub(crate) fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.warnings.lock())
    }

    /// A user may have fewer permissions than the operator. The rest of the plan is still useful.
    fn warn(&self, what: &str, failure: &str, assumption: &str) {
        self.warnings.lock().push(format!("cannot check {what}: {failure}; the plan assumes that {assumption}"));
    }

    async fn read(&self, target: &Target) -> Result<Option<Option<Value>>> {
        match self.executor.read(target).await {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.reason == reason::API_NOT_INSTALLED => Ok(None),
            Err(failure) => bail!("{failure}"),
        }
    }

    async fn find<K, V>(&self, resource: ApiResource, key: ObjectKey, project: fn(K) -> V) -> Result<Lookup<V>>
    where
        K: DeserializeOwned + kube::Resource,
    {
        let target = Target::new(resource, key);
        match self.executor.read(&target).await {
            Err(failure) if failure.reason == reason::API_NOT_INSTALLED => Ok(Lookup::KindNotServed),
            Err(failure) if failure.class == ErrorClass::Forbidden => {
                self.unreadable.lock().push((target.resource.kind.clone(), target.key.name().to_owned()));
                Ok(Lookup::Forbidden(failure.message))
            }
            Err(failure) => bail!("{failure}"),
            Ok(None) => Ok(Lookup::NotFound),
            Ok(Some(json)) => {
                // The error is dropped because it can quote a Secret.
                let Ok(object) = serde_json::from_value::<K>(json) else { bail!("{target} has an unexpected form") };
                let metadata = object.meta().clone();
                Ok(Lookup::Object(entry(&metadata, project(object))))
            }
        }
    }

    /// As [`Self::find`]. An object that the user cannot read counts as missing, with a warning.
    async fn find_or_warn<K, V>(&self, resource: ApiResource, key: ObjectKey, project: fn(K) -> V) -> Result<Lookup<V>>
    where
        K: DeserializeOwned + kube::Resource,
    {
        let target = Target::new(resource.clone(), key.clone());
        let found = self.find(resource, key, project).await?;
        if let Lookup::Forbidden(failure) = &found {
            self.warn(&target.to_string(), failure, "it does not exist");
        }
        Ok(found)
    }

    /// A list. None, with a warning, if the user is not allowed to list the objects.
    async fn list_or_warn<K>(&self, api: &Api<K>, parameters: &ListParams, assumption: &str) -> Result<Option<Vec<K>>>
    where
        K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let kind = K::plural(&());
        match api.list(parameters).await {
            Ok(list) => Ok(Some(list.items)),
            Err(error) => {
                let target = Target::of_kind::<K>(ObjectKey::cluster(&kind));
                let failure = classify(&error, "list", &target);
                if failure.class != ErrorClass::Forbidden {
                    bail!("{failure}");
                }
                self.warn(&kind, &failure.message, assumption);
                Ok(None)
            }
        }
    }

    /// The Machine as it would be if `given` were applied, and whether it exists.
    pub(crate) async fn machine(&self, given: Machine) -> Result<(Machine, bool)> {
        let key = ObjectKey::from_metadata(&given.metadata);
        let target = Target::of_kind::<Machine>(key.clone());
        match self.read(&target).await? {
            None => bail!("the cluster has no CRD for Machines; apply the output of `kubevirt-operator crds`"),
            Some(None) => {
                let mut new = given;
                // Only the API server assigns a UID. No object of the cluster carries the placeholder.
                new.metadata.uid = Some(placeholder_uid(0));
                Ok((new, false))
            }
            Some(Some(json)) => {
                let Ok(mut live) = serde_json::from_value::<Machine>(json) else {
                    bail!("{target} has an unexpected form")
                };
                live.spec = given.spec;
                live.metadata.labels.get_or_insert_default().extend(given.metadata.labels.unwrap_or_default());
                // An annotation may be the consent to an adoption.
                let annotations = given.metadata.annotations.unwrap_or_default();
                live.metadata.annotations.get_or_insert_default().extend(annotations);
                Ok((live, true))
            }
        }
    }

    /// Everything that a reconcile of the Machine would observe.
    pub(crate) async fn observe(&self, machine: Machine) -> Result<Observed> {
        let objects = self.objects(machine).await?;
        let (macs_in_use, living_owners) = self.other_machines(&objects).await?;
        Ok(Observed {
            storage_classes: self.classes(objects.resolved.as_ref().ok(), &objects.pvcs).await?,
            source: self.source(&objects.id.key(), objects.resolved.as_ref().ok()).await?,
            macs_in_use,
            living_owners,
            ..objects
        })
    }

    /// The Machine and the objects that it consists of or refers to.
    pub(crate) async fn objects(&self, machine: Machine) -> Result<Observed> {
        #[expect(clippy::disallowed_methods, reason = "the plan is made for the current time")]
        let parsed = Observed::new(machine, Timestamp::now())?;
        let key = parsed.id.key();
        let resolved = parsed.resolved.as_ref().ok();
        let own = key.sibling(&secret_name(key.name()));
        let secret = self.find_or_warn(
            ApiResource::erase::<Secret>(&()),
            own,
            SecretEntry::project as fn(PartialObjectMeta<Secret>) -> _,
        );
        let vm = self.find_or_warn(virtual_machine_resource(), key.clone(), VmEntry::project);
        let vmi = self.find_or_warn(virtual_machine_instance_resource(), key.clone(), VmiEntry::project);
        let (secret, vm, vmi) = (secret.await?, vm.await?, vmi.await?);
        let (mut networks, mut attachments, mut multus) = (BTreeMap::new(), BTreeMap::new(), true);
        let named = parsed.machine.spec.networks.iter().map(|network| &network.network_name);
        for name in named.filter(|name| *name != POD_NETWORK) {
            let resource = ApiResource::erase::<NetworkConfiguration>(&());
            let network = self.find_or_warn(resource, key.sibling(name), NetworkEntry::project).await?;
            let network = network.view(|entry| NetworkEntry::view(entry, false));
            let attachment =
                self.find(network_attachment_resource(), key.sibling(name), AttachmentEntry::project).await?;
            if let (Lookup::Forbidden(failure), Some(network)) = (&attachment, &network) {
                let what = format!("NetworkAttachmentDefinition {name}");
                self.warn(&what, failure, "it follows its NetworkConfiguration");
                attachments.insert(name.clone(), assumed_attachment(name, network));
            }
            networks.extend(network.map(|network| (name.clone(), network)));
            multus &= attachment.is_installed();
            attachments.extend(attachment.view(|entry| (name.clone(), AttachmentEntry::view(entry))));
        }
        let (pvcs, import_sources, cdi) = self.pvcs(&parsed, resolved).await?;
        Ok(Observed {
            installed: Installed { kubevirt: vm.is_installed() && vmi.is_installed(), multus, cdi },
            networks,
            network_attachments: attachments,
            secret: secret.view(SecretEntry::view),
            pvcs,
            import_sources,
            vm: vm.view(VmEntry::view),
            vmi: vmi.view(VmiEntry::live_view),
            ..parsed
        })
    }

    /// The other Machines of the namespace: the MAC addresses that they use, and their UIDs.
    async fn other_machines(
        &self,
        observed: &Observed,
    ) -> Result<(BTreeMap<(String, String), String>, BTreeSet<String>)> {
        let machines: Api<Machine> = Api::namespaced(self.client.clone(), observed.namespace());
        let assumption = "no other Machine uses the MAC addresses";
        let all = self.list_or_warn(&machines, &ListParams::default(), assumption).await?.unwrap_or_default();
        let uids = all.iter().filter_map(ResourceExt::uid).filter(|uid| uid != observed.uid()).collect();
        let Ok(resolved) = &observed.resolved else { return Ok((BTreeMap::new(), uids)) };
        Ok((macs::in_use(&observed.machine, resolved, &all), uids))
    }

    async fn classes(
        &self,
        resolved: Option<&Resolved>,
        pvcs: &BTreeMap<String, PvcView>,
    ) -> Result<Vec<StorageClassView>> {
        let assumption = "the StorageClasses exist, that there is a default one, and that they allow expansion";
        let api = Api::<StorageClass>::all(self.client.clone());
        let Some(classes) = self.list_or_warn(&api, &ListParams::default(), assumption).await? else {
            return Ok(assumed_classes(resolved, pvcs));
        };
        let all = classes.into_iter().map(|class| {
            let (name, metadata) = (class.name_any(), class.metadata.clone());
            (ObjectKey::cluster(&name), entry(&metadata, ClassEntry::project(class)))
        });
        Ok(ClassEntry::views(all.collect()))
    }

    async fn pvcs(
        &self,
        observed: &Observed,
        resolved: Option<&Resolved>,
    ) -> Result<(BTreeMap<String, PvcView>, BTreeMap<String, ImportSourceView>, bool)> {
        let (mut pvcs, mut imports, mut cdi) = (BTreeMap::new(), BTreeMap::new(), true);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), observed.namespace());
        let labelled = ListParams::default().labels(&format!("{LABEL_MACHINE_UID}={}", observed.uid()));
        let assumption = "the Machine has only the PVCs that its spec names";
        for pvc in self.list_or_warn(&api, &labelled, assumption).await?.unwrap_or_default() {
            let (name, metadata) = (pvc.name_any(), pvc.metadata.clone());
            pvcs.insert(name, PvcEntry::live_view(&entry(&metadata, PvcEntry::project(pvc))));
        }
        for name in resolved.into_iter().flat_map(Resolved::pvc_names) {
            let key = observed.id.sibling(name);
            let resource = ApiResource::erase::<PersistentVolumeClaim>(&());
            let pvc = self.find_or_warn(resource, key.clone(), PvcEntry::project).await?;
            pvcs.extend(pvc.view(|entry| (name.to_owned(), PvcEntry::live_view(entry))));
            let project = ImportEntry::project as fn(PartialObjectMeta<DynamicObject>) -> _;
            let import = self.find_or_warn(import_source_resource(), key, project).await?;
            cdi &= import.is_installed();
            imports.extend(import.view(|entry| (name.to_owned(), ImportEntry::view(entry))));
        }
        Ok((pvcs, imports, cdi))
    }

    async fn source(&self, key: &ObjectKey, resolved: Option<&Resolved>) -> Result<SourceView> {
        let Some(source) = resolved.and_then(Resolved::source) else { return Ok(SourceView::NotNeeded) };
        let api: Api<Secret> = Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default());
        let secret = match api.get_opt(&source.name).await {
            Ok(Some(secret)) => secret,
            Ok(None) => return Ok(SourceView::SecretMissing),
            Err(error) => {
                let failure = classify(&error, "get", &Target::of_kind::<Secret>(key.sibling(&source.name)));
                // The user can have fewer permissions than the operator; the rest of the plan is still useful.
                match failure.class {
                    ErrorClass::Forbidden => return Ok(SourceView::Forbidden(failure.message)),
                    _ => bail!("{failure}"),
                }
            }
        };
        let bytes = secret.data.and_then(|mut data| data.remove(&source.key));
        Ok(bytes.map_or(SourceView::KeyMissing, |bytes| SourceView::Read(SecretBytes(bytes.0))))
    }
}

/// The NetworkAttachmentDefinition as the operator writes it.
fn assumed_attachment(name: &str, view: &NetworkView) -> NetworkAttachmentView {
    NetworkAttachmentView {
        uid: String::new(),
        controller_uid: Some(view.uid.clone()),
        labels: network::labels(),
        config: network::spec(name, view).config,
        segments: None,
        annotated: true,
    }
}

/// The StorageClasses that the Machine names or has, and a default one.
fn assumed_classes(resolved: Option<&Resolved>, pvcs: &BTreeMap<String, PvcView>) -> Vec<StorageClassView> {
    let disks = resolved.into_iter().flat_map(|resolved| &resolved.disks);
    let named = disks.filter_map(|disk| match &disk.backing {
        DiskBacking::Pvc { storage_class, .. } => storage_class.clone(),
        DiskBacking::ContainerDisk { .. } => None,
    });
    let names: BTreeSet<String> = named.chain(pvcs.values().filter_map(|pvc| pvc.storage_class.clone())).collect();
    let class = |name: String, is_default| StorageClassView {
        name,
        is_default,
        waits_for_consumer: false,
        allows_expansion: true,
    };
    let named = names.into_iter().map(|name| class(name, false));
    named.chain([class("the default StorageClass".to_owned(), true)]).collect()
}
