//! What a rehearsal reads in addition to the installation: nodes, VMs, PodDisruptionBudgets, CRDs and RBAC.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{Node, Pod as KubernetesPod, ServiceAccount},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use vitivirt_api::{ObjectKey, kubevirt::GROUP};
use vitivirt_install::{
    Installation, LiveCrd, NodeState,
    names::OPERATOR_SERVICE_ACCOUNT,
    pods::{FOREIGN_PODS, Pod, Pods},
    rehearsal::{Access, Budget, Launchers, RbacObjects, Vmi},
};
use vitivirt_runtime::root_cause::root_cause;

use crate::{cache::component_pods_selector, workloads::found_or_none};

const PAGE: u32 = 500;
/// The label of a virt-launcher pod with the UID of its VMI.
const CREATED_BY: &str = "kubevirt.io/created-by";

pub(super) struct RehearsalReader {
    pub(super) client: Client,
}

impl RehearsalReader {
    pub(super) async fn nodes(&self) -> Result<Vec<NodeState>> {
        let nodes = all::<Node>(&Api::all(self.client.clone()), "nodes", ListParams::default()).await?;
        Ok(nodes.into_iter().map(NodeState::new).collect())
    }

    /// The pods of the components.
    pub(super) async fn pods(&self, namespace: &str) -> Result<Pods> {
        let api: Api<KubernetesPod> = Api::namespaced(self.client.clone(), namespace);
        let selected = ListParams::default().labels_from(&component_pods_selector());
        let pods = all(&api, "pods", selected).await?;
        Ok(pods.into_iter().map(|pod| (ObjectKey::from_metadata(&pod.metadata), Pod::new(pod).into())).collect())
    }

    /// A cluster without the CRD has none.
    pub(super) async fn vmis(&self) -> Result<Vec<Vmi>> {
        let kind = GroupVersionKind::gvk(GROUP, "v1", "VirtualMachineInstance");
        let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let vmis = all(&api, "VirtualMachineInstances", ListParams::default()).await?;
        Ok(vmis.iter().map(|vmi| Vmi::new(&vmi.metadata, &vmi.data)).collect())
    }

    /// The PodDisruptionBudgets that allow no disruption, and the pods of VMIs.
    pub(super) async fn budgets(&self) -> Result<(Vec<Budget>, Launchers)> {
        let api: Api<PodDisruptionBudget> = Api::all(self.client.clone());
        let budgets = all(&api, "PodDisruptionBudgets", ListParams::default()).await?;
        let budgets: Vec<Budget> = budgets.into_iter().filter_map(Budget::new).collect();
        let mut launchers = Launchers::new();
        if budgets.is_empty() {
            return Ok((budgets, launchers));
        }
        let (key, value) = FOREIGN_PODS;
        let api: Api<KubernetesPod> = Api::all(self.client.clone());
        let pods = all(&api, "pods", ListParams::default().labels(&format!("{key}={value}"))).await?;
        for pod in pods {
            let labels = pod.metadata.labels.unwrap_or_default();
            if let Some(vmi) = labels.get(CREATED_BY).cloned() {
                launchers.entry(vmi).or_default().push(labels);
            }
        }
        Ok((budgets, launchers))
    }

    /// What is checked of a live CRD, and its `spec`. `None` if it does not exist.
    pub(super) async fn crd(&self, crd: &ObjectKey) -> Result<Option<(LiveCrd, Value)>> {
        let resource = ApiResource::erase::<CustomResourceDefinition>(&());
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let found = found_or_none(api.get(crd.name()).await)
            .map_err(|error| anyhow!("cannot read CustomResourceDefinition {crd}: {}", root_cause(&error)))?;
        let Some(mut found) = found else { return Ok(None) };
        let checked = serde_json::from_value(found.data.clone())?;
        Ok(Some((checked, found.data.get_mut("spec").map(Value::take).unwrap_or_default())))
    }

    /// The number of objects of a kind.
    pub(super) async fn count(&self, resource: &ApiResource) -> Result<usize> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), resource);
        let page = api.list_metadata(&ListParams::default().limit(1)).await;
        let page = page.map_err(|error| anyhow!("cannot list {}: {}", resource.plural, root_cause(&error)))?;
        let more = page.metadata.remaining_item_count.and_then(|more| usize::try_from(more).ok());
        Ok(page.items.len() + more.unwrap_or_default())
    }

    /// What the operator's ServiceAccount may do. `None` if it does not exist.
    pub(super) async fn access(&self, installation: &Installation) -> Result<Option<Access>> {
        let namespace = &installation.config.namespace;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let account = accounts.get_metadata_opt(OPERATOR_SERVICE_ACCOUNT).await;
        let account = account.map_err(|error| {
            anyhow!("cannot read ServiceAccount {namespace}/{OPERATOR_SERVICE_ACCOUNT}: {}", root_cause(&error))
        })?;
        if account.is_none() {
            return Ok(None);
        }
        let everything = ListParams::default;
        let cluster_roles: Api<ClusterRole> = Api::all(self.client.clone());
        let cluster_role_bindings: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        let mut objects = RbacObjects {
            cluster_roles: all(&cluster_roles, "ClusterRoles", everything()).await?,
            cluster_role_bindings: all(&cluster_role_bindings, "ClusterRoleBindings", everything()).await?,
            ..RbacObjects::default()
        };
        let namespaces: BTreeSet<&str> =
            installation.objects.iter().filter_map(|object| object.key.namespace()).collect();
        for namespace in namespaces {
            objects.roles.extend(self.in_namespace::<Role>(namespace, "Roles").await?);
            objects.role_bindings.extend(self.in_namespace::<RoleBinding>(namespace, "RoleBindings").await?);
        }
        Ok(Some(Access::new(namespace, OPERATOR_SERVICE_ACCOUNT, &objects)))
    }

    async fn in_namespace<K>(&self, namespace: &str, plural: &str) -> Result<Vec<K>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        all(&Api::<K>::namespaced(self.client.clone(), namespace), plural, ListParams::default()).await
    }
}

/// Every object, page by page. A kind that is not served has none.
async fn all<K: Clone + DeserializeOwned + std::fmt::Debug>(
    api: &Api<K>,
    plural: &str,
    parameters: ListParams,
) -> Result<Vec<K>> {
    let mut parameters = parameters.limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = found_or_none(api.list(&parameters).await)
            .map_err(|error| anyhow!("cannot list {plural}: {}", root_cause(&error)))?;
        let Some(page) = page else { return Ok(objects) };
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(objects),
        }
    }
}
