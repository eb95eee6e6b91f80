//! Everything that a pass over a Machine reads, followed on every replica and pruned to what is read.
//!
//! Only objects that carry our labels are followed where there may be many of other people's. A foreign object with a
//! name that we need is therefore not seen here: the executor finds it when it asks for the name, and stops.

mod compact;
mod kubevirt;
mod machine;
mod owned;

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::{DynamicResourceScope, ObjectMeta, PartialObjectMeta};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use vitivirt_api::ApiResource;
use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MANAGED_BY, MANAGED_BY, Machine, NetworkConfiguration};
use vitivirt_api::resources::{
    import_source_resource, network_attachment_resource, virtual_machine_instance_resource, virtual_machine_resource,
};
use vitivirt_runtime::program::Context;
use vitivirt_runtime::reconcile::Executor;
use vitivirt_runtime::watch::{Cache, Change, Entry, IndexFn, SyncState, WatchConfig, watch};

pub(crate) use self::kubevirt::{VmEntry, VmiEntry};
pub(crate) use self::machine::{MachineEntry, in_namespace, mac_hash};
pub(crate) use self::owned::{AttachmentEntry, ClassEntry, ImportEntry, NetworkEntry, PvcEntry, SecretEntry};
use crate::router::EventRouter;

/// Handles; clones share the content.
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
}

impl Caches {
    /// Follows everything from now on and until the program ends. `wake` learns of every change.
    pub(crate) fn start(context: &Context, namespace: Option<&str>, router: &Arc<EventRouter>) -> Self {
        let mut place = Place { context, namespace, tasks: Vec::new() };
        let ours = format!("{LABEL_MANAGED_BY}={MANAGED_BY}");
        let caches = Self {
            machines: place.watch(
                "machines",
                place.typed::<Machine>(),
                WatchConfig::default(),
                &MachineEntry::indexes(),
                MachineEntry::project,
                router.on(EventRouter::machine_changed),
            ),
            networks: place.watch(
                "networkconfigurations",
                place.dynamic(&ApiResource::erase::<NetworkConfiguration>(&())),
                WatchConfig::default(),
                &[],
                NetworkEntry::project,
                router.on(EventRouter::network_changed),
            ),
            classes: place.watch(
                "storageclasses",
                Api::<StorageClass>::all(place.client()),
                WatchConfig::default(),
                &[],
                ClassEntry::project,
                router.on(EventRouter::class_changed),
            ),
            secrets: place.watch(
                "secrets",
                place.typed::<PartialObjectMeta<Secret>>(),
                WatchConfig::labels(&ours),
                &[],
                SecretEntry::project,
                router.on(EventRouter::secret_changed),
            ),
            pvcs: place.watch(
                "persistentvolumeclaims",
                place.typed::<PersistentVolumeClaim>(),
                WatchConfig::labels(&ours),
                &[],
                PvcEntry::project,
                router.on(EventRouter::pvc_changed),
            ),
            attachments: place.watch(
                "network-attachment-definitions",
                place.dynamic(&network_attachment_resource()),
                WatchConfig::labels(&ours),
                &[],
                AttachmentEntry::project,
                router.on(EventRouter::attachment_changed),
            ),
            imports: place.watch(
                "volumeimportsources",
                place.dynamic(&import_source_resource()),
                WatchConfig::labels(&ours),
                &[],
                ImportEntry::project,
                router.on(EventRouter::import_changed),
            ),
            vms: place.watch(
                "virtualmachines",
                place.dynamic(&virtual_machine_resource()),
                WatchConfig::labels(&ours),
                &[],
                VmEntry::project,
                router.on(EventRouter::vm_changed),
            ),
            vmis: place.watch(
                "virtualmachineinstances",
                place.dynamic(&virtual_machine_instance_resource()),
                WatchConfig::labels(LABEL_MACHINE),
                &[],
                VmiEntry::project,
                router.on(EventRouter::vmi_changed),
            ),
        };
        let crds = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(place.client());
        // Not needed to be ready: without it an absent kind is only noticed later.
        let (_, following) = watch(
            crds,
            WatchConfig { page_size: 20, ..WatchConfig::default() },
            &[],
            crd_version,
            router.on(EventRouter::crd_changed),
            context.shutdown.clone(),
        );
        router.know(caches.clone());
        for (name, task) in place.tasks {
            context.spawn(name, task);
        }
        context.spawn("customresourcedefinitions", following);
        for sync in [
            caches.vms.sync_changes(),
            caches.vmis.sync_changes(),
            caches.attachments.sync_changes(),
            caches.imports.sync_changes(),
        ] {
            context.spawn("neighbours that come and go", Self::tell_of_neighbours(sync, router.clone()));
        }
        caches
    }

    /// Every Machine may be waiting for a neighbour that was just installed.
    async fn tell_of_neighbours(mut sync: tokio::sync::watch::Receiver<SyncState>, router: Arc<EventRouter>) {
        while sync.changed().await.is_ok() {
            router.all();
        }
    }

    /// Returns when all of them can be believed.
    pub(crate) async fn ready(&self) {
        self.machines.ready().await;
        self.networks.ready().await;
        self.classes.ready().await;
        self.secrets.ready().await;
        self.pvcs.ready().await;
        self.attachments.ready().await;
        self.imports.ready().await;
        self.vms.ready().await;
        self.vmis.ready().await;
    }

    /// Somebody saw this definition come or change.
    pub(crate) fn retry_now(&self, crd: &str) {
        match crd {
            "machines.vitistack.io" => self.machines.retry_now(),
            "networkconfigurations.vitistack.io" => self.networks.retry_now(),
            "virtualmachines.kubevirt.io" => self.vms.retry_now(),
            "virtualmachineinstances.kubevirt.io" => self.vmis.retry_now(),
            "network-attachment-definitions.k8s.cni.cncf.io" => self.attachments.retry_now(),
            "volumeimportsources.cdi.kubevirt.io" => self.imports.retry_now(),
            _ => {}
        }
    }

    /// Lets every cache know of what the executor writes.
    pub(crate) fn over(&self, executor: Executor) -> Executor {
        executor
            .observe_writes(&ApiResource::erase::<Machine>(&()), Arc::new(self.machines.clone()))
            .observe_writes(&ApiResource::erase::<NetworkConfiguration>(&()), Arc::new(self.networks.clone()))
            .observe_writes(&ApiResource::erase::<Secret>(&()), Arc::new(self.secrets.clone()))
            .observe_writes(&ApiResource::erase::<PersistentVolumeClaim>(&()), Arc::new(self.pvcs.clone()))
            .observe_writes(&network_attachment_resource(), Arc::new(self.attachments.clone()))
            .observe_writes(&import_source_resource(), Arc::new(self.imports.clone()))
            .observe_writes(&virtual_machine_resource(), Arc::new(self.vms.clone()))
            .observe_writes(&virtual_machine_instance_resource(), Arc::new(self.vmis.clone()))
    }
}

/// Only that a definition changed is of interest, and that only for a few of them.
fn crd_version(crd: PartialObjectMeta<CustomResourceDefinition>) -> Option<Box<str>> {
    let name = crd.metadata.name.unwrap_or_default();
    let groups = [".vitistack.io", ".kubevirt.io", ".k8s.cni.cncf.io"];
    let ours = groups.iter().any(|group| name.ends_with(group));
    crd.metadata.resource_version.filter(|_| ours).map(Into::into)
}

/// What a cache would hold of an object that was read by itself.
pub(crate) fn entry<V>(metadata: &ObjectMeta, value: V) -> Entry<V> {
    Entry {
        uid: metadata.uid.as_deref().unwrap_or_default().into(),
        resource_version: metadata.resource_version.as_deref().unwrap_or_default().into(),
        value: Arc::new(value),
    }
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where objects are looked for, and what keeps the caches going.
struct Place<'a> {
    context: &'a Context,
    /// `None`: everywhere.
    namespace: Option<&'a str>,
    tasks: Vec<(&'static str, Task)>,
}

impl Place<'_> {
    fn client(&self) -> Client {
        self.context.clients.rate_limited.clone()
    }

    fn typed<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        match self.namespace {
            Some(namespace) => Api::namespaced(self.client(), namespace),
            None => Api::all(self.client()),
        }
    }

    fn dynamic<K>(&self, resource: &ApiResource) -> Api<K>
    where
        K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        match self.namespace {
            Some(namespace) => Api::namespaced_with(self.client(), namespace, resource),
            None => Api::all_with(self.client(), resource),
        }
    }

    fn watch<K, V>(
        &mut self,
        name: &'static str,
        api: Api<K>,
        selection: WatchConfig,
        indexes: &[(&'static str, IndexFn<V>)],
        project: fn(K) -> V,
        on_change: impl Fn(&Change<V>) + Send + Sync + 'static,
    ) -> Cache<V>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + Sync + 'static,
    {
        let (cache, following) = watch(api, selection, indexes, project, on_change, self.context.shutdown.clone());
        let handle = cache.clone();
        self.context.health.require(name, move || handle.sync_state() != SyncState::Pending);
        self.tasks.push((name, Box::pin(following)));
        cache
    }
}
