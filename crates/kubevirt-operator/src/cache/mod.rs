//! Everything that a reconcile of a Machine reads: one watch per kind, on every replica, projected to the fields that
//! are read.
//!
//! Of the kinds of which a cluster has many other objects, the watch selects only those with the operator's label. So
//! an object of another owner with a name that a Machine needs is not in these caches: the executor finds it when it
//! creates the object, and stops. `vitivirt_runtime::watch` has the caches themselves; this module declares what each
//! keeps.

mod compact;
mod kubevirt;
mod machine;
mod owned;

use std::sync::Arc;

use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{PersistentVolumeClaim, Secret},
        storage::v1::StorageClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource,
    core::{DynamicResourceScope, ObjectMeta, PartialObjectMeta},
};
use vitivirt_api::{
    ApiResource, ObjectKey,
    machine::{LABEL_MACHINE, LABEL_MANAGED_BY, MANAGED_BY, Machine, NetworkConfiguration},
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};
use vitivirt_runtime::watch::{Cache, Entry, Expression, KnownAbsent, SyncState, WatchConfig, WatchedKinds, Watches};

pub(crate) use self::{
    kubevirt::{VmEntry, VmiEntry},
    machine::{MachineEntry, in_namespace, interfaces},
    owned::{AttachmentEntry, ClassEntry, ImportEntry, NetworkEntry, PvcEntry, SecretEntry},
};
use crate::index::{Index, MacSources};

/// Handles to the caches. Clones share the content.
#[derive(Clone)]
pub(crate) struct Caches {
    pub(crate) machines: Cache<MachineEntry>,
    pub(crate) networks: Cache<NetworkEntry>,
    pub(crate) classes: Cache<ClassEntry>,
    pub(crate) secrets: Cache<SecretEntry>,
    pub(crate) pvcs: Cache<PvcEntry>,
    pub(crate) attachments: Cache<AttachmentEntry>,
    pub(crate) imports: Cache<ImportEntry>,
    pub(crate) vms: Cache<VmEntry>,
    pub(crate) vmis: Cache<VmiEntry>,
    pub(crate) crds: Cache<CrdVersion>,
    /// All of them but the CRDs.
    pub(crate) kinds: WatchedKinds,
    pub(crate) index: Arc<Index>,
}

impl Caches {
    /// Declares the watches, in one namespace or in all of them.
    pub(crate) fn new(watches: &mut Watches, namespace: Option<&str>) -> Self {
        let scope = WatchScope { client: watches.client.clone(), namespace };
        let all = WatchConfig::default;
        // Of kinds whose objects may be large: the peak of memory at start is one page.
        let small_pages = |config: WatchConfig| WatchConfig { page_size: 20, ..config };
        let ours = || WatchConfig::labels(Expression::Equal(LABEL_MANAGED_BY.to_owned(), MANAGED_BY.to_owned()));
        let of_a_machine = WatchConfig::labels(Expression::Exists(LABEL_MACHINE.to_owned()));
        // Readiness does not wait for the CRDs: without them, the operator only notices a new kind later.
        let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(scope.client.clone());
        let crds = watches.add_optional("customresourcedefinitions", api, small_pages(all()), &[], CrdVersion::project);
        let optional =
            |config: WatchConfig, of: &ApiResource| WatchConfig { known_absent: Some(has_no_crd(&crds, of)), ..config };
        let of = ApiResource::erase::<Machine>(&());
        let api = scope.typed::<Machine>();
        let machines =
            watches.add("machines", &of, api, small_pages(all()), &MachineEntry::indexes(), MachineEntry::project);
        let of = ApiResource::erase::<NetworkConfiguration>(&());
        let api = scope.dynamic(&of);
        let networks = watches.add("networkconfigurations", &of, api, all(), &[], NetworkEntry::project);
        let of = ApiResource::erase::<StorageClass>(&());
        let api = Api::<StorageClass>::all(scope.client.clone());
        let classes = watches.add("storageclasses", &of, api, all(), &[], ClassEntry::project);
        let of = ApiResource::erase::<Secret>(&());
        let api = scope.typed::<PartialObjectMeta<Secret>>();
        let secrets = watches.add("secrets", &of, api, ours(), &[], SecretEntry::project);
        let of = ApiResource::erase::<PersistentVolumeClaim>(&());
        let api = scope.typed::<PersistentVolumeClaim>();
        let pvcs = watches.add("persistentvolumeclaims", &of, api, ours(), &[], PvcEntry::project);
        let of = network_attachment_resource();
        let api = scope.dynamic(&of);
        let config = optional(ours(), &of);
        let attachments =
            watches.add("network-attachment-definitions", &of, api, config, &[], AttachmentEntry::project);
        let of = import_source_resource();
        let (api, config) = (scope.dynamic(&of), optional(ours(), &of));
        let imports = watches.add("volumeimportsources", &of, api, config, &[], ImportEntry::project);
        let of = virtual_machine_resource();
        let (api, config) = (scope.dynamic(&of), small_pages(optional(ours(), &of)));
        let vms = watches.add("virtualmachines", &of, api, config, &[], VmEntry::project);
        let of = virtual_machine_instance_resource();
        let (api, config) = (scope.dynamic(&of), optional(of_a_machine, &of));
        let vmis = watches.add("virtualmachineinstances", &of, api, config, &[], VmiEntry::project);
        let index = Arc::new(Index::default());
        let sources =
            MacSources { machines: machines.clone(), networks: networks.clone(), vms: vms.clone(), vmis: vmis.clone() };
        index.subscribe(&sources, &pvcs);
        let kinds = watches.kinds();
        Self { machines, networks, classes, secrets, pvcs, attachments, imports, vms, vmis, crds, kinds, index }
    }
}

/// Whether the cluster has no CRD of a kind. An API server that is starting may not serve a kind that has one.
fn has_no_crd(crds: &Cache<CrdVersion>, of: &ApiResource) -> KnownAbsent {
    let (crds, of) = (crds.clone(), of.clone());
    KnownAbsent::new(move || is_crd_absent(&crds, &of))
}

fn is_crd_absent(crds: &Cache<CrdVersion>, of: &ApiResource) -> bool {
    let key = ObjectKey::cluster(&format!("{}.{}", of.plural, of.group));
    crds.sync_state() == SyncState::Synced && crds.is_complete() && crds.get(&key).is_none()
}

impl Caches {
    /// Whether a Machine names this Secret as the source of its user data.
    pub(crate) fn is_source(&self, secret: &ObjectKey) -> bool {
        self.machines.is_in_index(MachineEntry::BY_SOURCE, &in_namespace(secret, secret.name()))
    }

    /// Whether the cluster has no CRD of this kind. False while that is unknown.
    pub(crate) fn is_crd_absent(&self, resource: &ApiResource) -> bool {
        is_crd_absent(&self.crds, resource)
    }
}

/// The resource version of a CRD of a group that this operator uses; nothing is kept of the others.
#[derive(Debug, PartialEq)]
pub(crate) struct CrdVersion(Option<Box<str>>);

impl CrdVersion {
    fn project(crd: PartialObjectMeta<CustomResourceDefinition>) -> Self {
        let name = crd.metadata.name.unwrap_or_default();
        let groups = [".vitistack.io", ".kubevirt.io", ".k8s.cni.cncf.io"];
        let is_used = groups.iter().any(|group| name.ends_with(group));
        Self(crd.metadata.resource_version.filter(|_| is_used).map(Into::into))
    }
}

/// The cache entry of an object that was read from the API server.
pub(crate) fn entry<V>(metadata: &ObjectMeta, value: V) -> Entry<V> {
    Entry {
        uid: metadata.uid.as_deref().unwrap_or_default().into(),
        resource_version: metadata.resource_version.as_deref().unwrap_or_default().into(),
        value: Arc::new(value),
    }
}

/// Where namespaced objects are watched.
struct WatchScope<'a> {
    client: Client,
    /// `None`: in all namespaces.
    namespace: Option<&'a str>,
}

impl WatchScope<'_> {
    fn typed<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        match self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    fn dynamic<K>(&self, resource: &ApiResource) -> Api<K>
    where
        K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        match self.namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        }
    }
}
