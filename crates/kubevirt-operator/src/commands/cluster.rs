//! What the operator's caches would contain about one Machine, read from the cluster object by object, for commands
//! that run once. The objects are projected as in the caches, so the views are the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, bail};
use k8s_openapi::{
    api::{
        core::v1::{Namespace, PersistentVolumeClaim, Secret},
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
use tokio::{sync::OnceCell, time::sleep};
use vitivirt_api::{
    ApiResource, ErrorClass, ObjectKey, Target,
    machine::{
        Adoption, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY, Machine, NetworkConfiguration,
        POD_NETWORK,
    },
    reason,
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};
use vitivirt_machine::{
    Observed, SecretBytes,
    observed::{
        Deletion, ImportSourceView, Installed, NetworkAttachmentView, NetworkView, PvcView, SourceView,
        StorageClassView,
    },
    render::{cloud_init::secret_name, network},
    resolve::{DiskBacking, Resolved},
};
use vitivirt_runtime::{
    reconcile::{Executor, classify},
    watch::Entry,
};

use super::{
    files::{Files, placeholder_uid},
    neighbours::{Bridge, Neighbour, Neighbours},
};
use crate::{
    cache::{AttachmentEntry, ClassEntry, ImportEntry, NetworkEntry, PvcEntry, SecretEntry, VmEntry, VmiEntry, entry},
    mac_addresses::MachineInterface,
};

pub(crate) struct ClusterReader {
    client: Client,
    /// Used only to read.
    executor: Executor,
    /// Kinds and names of objects that the user is not allowed to read.
    unreadable: Mutex<Vec<(String, String)>>,
    /// What the user is not allowed to read, and what the plan assumes instead.
    warnings: Mutex<Vec<String>>,
    /// The Machines of each namespace that was listed.
    by_namespace: Mutex<BTreeMap<String, Arc<[Machine]>>>,
    /// The Machines of each namespace, with the interfaces of their VMs and guests.
    neighbours_by_namespace: Mutex<BTreeMap<String, Neighbours>>,
    /// The Machines, networks, VMs and guests of all namespaces, or why the user cannot list them.
    all_namespaces: OnceCell<Result<Neighbours, String>>,
}

/// The interfaces of a VM or a VMI.
type HeldInterfaces = (ObjectKey, Box<[MachineInterface]>);

/// The objects of one page of a list.
const PAGE: u32 = 500;
/// The delay before the next attempt to read a page, unless the server names one.
const RETRY: Duration = Duration::from_millis(200);
/// Attempts to read a page. If a page has too many bytes, the next attempt asks for a quarter of the objects.
const ATTEMPTS: usize = 5;

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
        let executor = Executor::new(client.clone(), MANAGED_BY);
        Self {
            executor,
            client,
            unreadable: Mutex::default(),
            warnings: Mutex::default(),
            by_namespace: Mutex::default(),
            neighbours_by_namespace: Mutex::default(),
            all_namespaces: OnceCell::new(),
        }
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

    /// The selected objects of a kind, which may not be served. The inner error says why the user cannot list them.
    async fn list_all<T>(
        &self,
        api: &Api<DynamicObject>,
        resource: ApiResource,
        selected: ListParams,
        project: impl Fn(DynamicObject) -> Option<T>,
    ) -> Result<Result<Vec<T>, String>> {
        let target = Target::new(resource, ObjectKey::cluster(""));
        let (mut found, mut failed) = (Vec::new(), 0);
        let first_page = selected.limit(PAGE);
        let mut parameters = first_page.clone();
        loop {
            let page = match api.list(&parameters).await {
                Ok(page) => page,
                Err(error) => {
                    let failure = classify(&error, "list", &target);
                    failed += 1;
                    match failure.class {
                        _ if failure.reason == reason::API_NOT_INSTALLED => return Ok(Ok(Vec::new())),
                        ErrorClass::Forbidden => return Ok(Err(failure.message)),
                        ErrorClass::Transient | ErrorClass::Conflict if failed < ATTEMPTS => {}
                        _ => bail!("{failure}"),
                    }
                    if failure.class == ErrorClass::Conflict {
                        // The continue token has expired.
                        found.clear();
                        parameters = first_page.clone();
                    }
                    sleep(failure.retry_after.unwrap_or(RETRY)).await;
                    continue;
                }
            };
            failed = 0;
            found.extend(page.items.into_iter().filter_map(&project));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(Ok(found)),
            }
        }
    }

    /// Changes a given Machine to what it would be if it were applied, and returns whether it exists. `position` is its
    /// place in the files.
    pub(crate) async fn complete(&self, given: &mut Machine, position: usize) -> Result<bool> {
        let key = ObjectKey::from_metadata(&given.metadata);
        let target = Target::of_kind::<Machine>(key.clone());
        match self.read(&target).await? {
            None => bail!("the cluster has no CRD for Machines; apply the output of `kubevirt-operator crds`"),
            Some(None) => {
                // Only the API server assigns a UID. No object of the cluster carries the placeholder.
                given.metadata.uid = Some(placeholder_uid(position));
                given.metadata.creation_timestamp = None;
                Ok(false)
            }
            Some(Some(json)) => {
                let Ok(mut live) = serde_json::from_value::<Machine>(json) else {
                    bail!("{target} has an unexpected form")
                };
                live.spec = std::mem::take(&mut given.spec);
                live.metadata.labels.get_or_insert_default().extend(given.metadata.labels.take().unwrap_or_default());
                // An annotation may be the consent to an adoption.
                let annotations = given.metadata.annotations.take().unwrap_or_default();
                live.metadata.annotations.get_or_insert_default().extend(annotations);
                *given = live;
                Ok(true)
            }
        }
    }

    /// Everything that a reconcile of the Machine would observe if the files were applied.
    pub(crate) async fn observe(&self, machine: Machine, files: &Files) -> Result<Observed> {
        let objects = self.objects(machine).await?;
        let machines = self.machines_in(objects.namespace()).await?;
        let uids = machines.iter().filter_map(ResourceExt::uid).filter(|uid| uid != objects.uid());
        let mut observed = Observed {
            storage_classes: self.classes(objects.resolved.as_ref().ok(), &objects.pvcs).await?,
            source: self.source(&objects.id.key(), objects.resolved.as_ref().ok()).await?,
            living_owners: uids.collect(),
            ..objects
        };
        files.add_to(&mut observed);
        observed.macs_in_use = self.macs_in_use(&observed, &machines, files).await?;
        Ok(observed)
    }

    /// The Machines of a namespace, listed once.
    async fn machines_in(&self, namespace: &str) -> Result<Arc<[Machine]>> {
        if let Some(machines) = self.by_namespace.lock().get(namespace) {
            return Ok(machines.clone());
        }
        let api: Api<Machine> = Api::namespaced(self.client.clone(), namespace);
        let assumption = "no other Machine uses the MAC addresses";
        let Some(machines) = self.list_or_warn(&api, &ListParams::default(), assumption).await? else {
            return Ok(Arc::default());
        };
        let machines: Arc<[Machine]> = machines.into();
        self.by_namespace.lock().insert(namespace.to_owned(), machines.clone());
        Ok(machines)
    }

    /// Whether the namespace exists. A user who cannot read it gets the benefit of the doubt.
    pub(crate) async fn has_namespace(&self, name: &str) -> Result<bool> {
        let api: Api<Namespace> = Api::all(self.client.clone());
        match api.get_metadata_opt(name).await {
            Ok(found) => Ok(found.is_some()),
            Err(error) => {
                let failure = classify(&error, "get", &Target::of_kind::<Namespace>(ObjectKey::cluster(name)));
                if failure.class == ErrorClass::Forbidden { Ok(true) } else { bail!("{failure}") }
            }
        }
    }

    /// The MAC addresses of the Machine that another one has. `of_namespace` are the Machines of its namespace.
    async fn macs_in_use(
        &self,
        observed: &Observed,
        of_namespace: &[Machine],
        files: &Files,
    ) -> Result<BTreeMap<(String, String), String>> {
        let Ok(resolved) = &observed.resolved else { return Ok(BTreeMap::new()) };
        // A pod network belongs to one namespace, so only a bridge concerns the others.
        let has_bridge = resolved.networks.iter().any(|network| network.configuration().is_some());
        let mut neighbours = match has_bridge {
            true => self.neighbours(observed.namespace(), of_namespace).await?,
            false => self.neighbours_in(observed.namespace(), of_namespace).await?,
        };
        neighbours.add_networks_of(observed);
        files.add_to_neighbours(&mut neighbours);
        Ok(neighbours.macs_in_use(observed))
    }

    /// The Machines of a namespace, with the interfaces of their VMs and guests.
    async fn neighbours_in(&self, namespace: &str, machines: &[Machine]) -> Result<Neighbours> {
        if let Some(known) = self.neighbours_by_namespace.lock().get(namespace) {
            return Ok(known.clone());
        }
        let mut neighbours = Neighbours::default();
        for machine in machines {
            neighbours.add_machine(ObjectKey::from_metadata(&machine.metadata), Neighbour::new(machine, 0));
        }
        match self.held_interfaces(Some(namespace)).await? {
            Ok(held) => {
                held.iter().for_each(|(key, interfaces)| neighbours.add_held(key.clone(), interfaces));
                self.neighbours_by_namespace.lock().insert(namespace.to_owned(), neighbours.clone());
            }
            Err(failure) => {
                let assumption = "they are the addresses in the specs of the Machines";
                self.warn("the MAC addresses of the VirtualMachines of the namespace", &failure, assumption);
            }
        }
        Ok(neighbours)
    }

    /// The interfaces of the VMs of Machines, and of their guests, which may differ until they restart.
    async fn held_interfaces(&self, namespace: Option<&str>) -> Result<Result<Vec<HeldInterfaces>, String>> {
        let of = |resource: &ApiResource| -> Api<DynamicObject> {
            match namespace {
                Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
                None => Api::all_with(self.client.clone(), resource),
            }
        };
        let key = |object: &DynamicObject| ObjectKey::from_metadata(&object.metadata);
        let resource = virtual_machine_resource();
        let ours = ListParams::default().labels(&format!("{LABEL_MANAGED_BY}={MANAGED_BY}"));
        let vm = |object: DynamicObject| Some((key(&object), VmEntry::project(object).interfaces));
        let mut held = match self.list_all(&of(&resource), resource, ours, vm).await? {
            Ok(vms) => vms,
            Err(failure) => return Ok(Err(failure)),
        };
        let resource = virtual_machine_instance_resource();
        let of_a_machine = ListParams::default().labels(LABEL_MACHINE);
        let vmi = |object: DynamicObject| Some((key(&object), VmiEntry::project(object).interfaces));
        Ok(self.list_all(&of(&resource), resource, of_a_machine, vmi).await?.map(|vmis| {
            held.extend(vmis);
            held
        }))
    }

    /// The Machines and networks of all namespaces. With a warning those of one namespace, if the user cannot list more.
    async fn neighbours(&self, namespace: &str, of_namespace: &[Machine]) -> Result<Neighbours> {
        let failure = match self.all_namespaces.get_or_try_init(|| self.list_all_namespaces()).await? {
            Ok(all) => return Ok(all.clone()),
            Err(failure) => failure,
        };
        let what = "the MAC addresses of Machines in other namespaces";
        self.warn(what, failure, "none of them is an address of this Machine");
        let mut neighbours = self.neighbours_in(namespace, of_namespace).await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &networks_resource());
        match self.list_all(&api, networks_resource(), ListParams::default(), network).await? {
            Ok(networks) => networks.into_iter().for_each(|(key, bridge)| neighbours.add_network(key, bridge)),
            Err(failure) => {
                let assumption = "no other one names the same bridge and VLAN";
                self.warn("the NetworkConfigurations of the namespace", &failure, assumption);
            }
        }
        Ok(neighbours)
    }

    async fn list_all_namespaces(&self) -> Result<Result<Neighbours, String>> {
        let resource = ApiResource::erase::<Machine>(&());
        let machine = |object: DynamicObject| {
            let key = ObjectKey::from_metadata(&object.metadata);
            let machine = object.try_parse::<Machine>();
            if machine.is_err() {
                let assumption = "none of its MAC addresses is an address of this Machine";
                self.warn(&format!("Machine {key}"), "it has an unexpected form", assumption);
            }
            Some((key, Neighbour::new(&machine.ok()?, 0)))
        };
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let machines = match self.list_all(&api, resource, ListParams::default(), machine).await? {
            Ok(machines) => machines,
            Err(failure) => return Ok(Err(failure)),
        };
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &networks_resource());
        let networks = match self.list_all(&api, networks_resource(), ListParams::default(), network).await? {
            Ok(networks) => networks,
            Err(failure) => return Ok(Err(failure)),
        };
        let held = match self.held_interfaces(None).await? {
            Ok(held) => held,
            Err(failure) => return Ok(Err(failure)),
        };
        let mut neighbours = Neighbours::default();
        machines.into_iter().for_each(|(key, machine)| neighbours.add_machine(key, machine));
        networks.into_iter().for_each(|(key, bridge)| neighbours.add_network(key, bridge));
        held.into_iter().for_each(|(key, interfaces)| neighbours.add_held(key, &interfaces));
        Ok(Ok(neighbours))
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
            // The beginning of the deletion was not observed.
            deletion: Deletion::Unknown,
            ..parsed
        })
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
        let adoption = Adoption::from_metadata(&observed.machine.metadata);
        let assumption = "the Machine has only the PVCs that its spec names";
        let labelled = ListParams::default().labels(LABEL_MACHINE_UID);
        for pvc in self.list_or_warn(&api, &labelled, assumption).await?.unwrap_or_default() {
            let (name, metadata) = (pvc.name_any(), pvc.metadata.clone());
            let found = entry(&metadata, PvcEntry::project(pvc));
            let (uid, machine) = (found.value.machine_uid(), found.value.machine());
            let has_uid = uid.is_some_and(|uid| uid == observed.uid() || adoption.includes_machine(uid));
            if has_uid || found.value.is_restored() && machine == Some(observed.name()) {
                pvcs.insert(name, PvcEntry::live_view(&found));
            }
        }
        let named = resolved.into_iter().flat_map(Resolved::pvc_names);
        let recorded = observed.machine.status.iter().flat_map(|status| &status.disks).map(|disk| disk.pvc.as_str());
        for name in named.chain(recorded).collect::<BTreeSet<_>>() {
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

fn networks_resource() -> ApiResource {
    ApiResource::erase::<NetworkConfiguration>(&())
}

/// The bridge and the VLAN of a NetworkConfiguration, as the operator's cache reads them.
fn network(object: DynamicObject) -> Option<(ObjectKey, Bridge)> {
    let key = ObjectKey::from_metadata(&object.metadata);
    let entry = NetworkEntry::project(object);
    let bridge = entry.bridge_and_vlan();
    Some((key, bridge.map_or((None, None), |(bridge, vlan)| (Some(bridge.to_owned()), vlan))))
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
