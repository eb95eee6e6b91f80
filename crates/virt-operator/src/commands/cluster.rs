//! What the operator's caches would contain, read once, for commands that run once.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        core::v1::{Namespace, Node, Pod as KubernetesPod, ServiceAccount},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams},
    core::DynamicObject,
};
use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};
use vitivirt_cli::ClusterArguments;
use vitivirt_install::{
    Cluster, DeploymentConfig, Kind, LiveObject, Objects,
    pods::{Pod, Pods},
};
use vitivirt_runtime::{
    client::{configuration, connect},
    metrics::Metrics,
    root_cause::root_cause,
};

use crate::{
    cache::{component_pods_selector, managed_selector, schedulable_selector},
    workloads::found_or_none,
};

const PAGE: u32 = 50;
const OPERATOR_WEBHOOKS: &str = "virt-operator-validator";

pub(crate) struct InstallationReader {
    client: Client,
}

/// The managed objects of the cluster, and the APIs that it has.
pub(crate) struct ClusterState {
    pub(crate) objects: Objects,
    pub(crate) cluster: Cluster,
}

impl InstallationReader {
    pub(crate) async fn connect(cluster: &ClusterArguments) -> Result<Self> {
        let config = configuration(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await?;
        let agent = concat!("virt-operator/", env!("CARGO_PKG_VERSION"));
        Ok(Self { client: connect(&config, agent, None, &Arc::new(Metrics::new("command")))?.rate_limited })
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    pub(crate) async fn kubevirts(&self) -> Result<Vec<KubeVirt>> {
        let Some(kubevirts) = self.list_kubevirts().await? else {
            bail!("the cluster has no CRD for KubeVirt resources; apply the output of `virt-operator manifests`")
        };
        Ok(kubevirts)
    }

    /// A cluster without the CRD has none.
    pub(crate) async fn kubevirts_if_served(&self) -> Result<Vec<KubeVirt>> {
        Ok(self.list_kubevirts().await?.unwrap_or_default())
    }

    async fn list_kubevirts(&self) -> Result<Option<Vec<KubeVirt>>> {
        let api: Api<KubeVirt> = Api::all(self.client());
        let list = found_or_none(api.list(&ListParams::default()).await);
        let list = list.map_err(failed("cannot list KubeVirt resources".to_owned()))?;
        Ok(list.map(|list| list.items))
    }

    pub(crate) async fn namespace(&self, name: &str) -> Result<Option<Arc<LiveObject>>> {
        let api: Api<Namespace> = Api::all(self.client());
        let found = api.get_metadata_opt(name).await.map_err(failed(format!("cannot read Namespace {name}")))?;
        Ok(found.map(|namespace| Arc::new(LiveObject::from_metadata(&namespace.metadata))))
    }

    /// Every managed object.
    pub(crate) async fn objects(&self) -> Result<Objects> {
        let mut objects = Objects::default();
        for kind in Kind::ALL {
            self.list_into(kind, &mut objects).await?;
        }
        Ok(objects)
    }

    /// Deletes the webhooks that check the KubeVirt resource itself.
    /// The pods of KubeVirt's components in a namespace.
    pub(crate) async fn component_pods(&self, namespace: &str) -> Result<Pods> {
        let pods: Api<KubernetesPod> = Api::namespaced(self.client(), namespace);
        let selected = ListParams::default().labels_from(&component_pods_selector());
        let list = pods.list(&selected).await.with_context(|| format!("cannot list pods in namespace {namespace}"))?;
        let key = |pod: &KubernetesPod| ObjectKey::from_metadata(&pod.metadata);
        Ok(list.into_iter().map(|pod| (key(&pod), Arc::new(Pod::new(pod)))).collect())
    }

    pub(crate) async fn delete_operator_webhooks(&self) -> Result<()> {
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client());
        let what = || format!("cannot delete ValidatingWebhookConfiguration {OPERATOR_WEBHOOKS}");
        found_or_none(api.delete(OPERATOR_WEBHOOKS, &DeleteParams::background()).await).map_err(failed(what()))?;
        Ok(())
    }

    pub(crate) async fn read_state(&self, config: &DeploymentConfig) -> Result<ClusterState> {
        let mut objects = Objects::default();
        let mut absent = Vec::new();
        for kind in Kind::ALL {
            if !self.list_into(kind, &mut objects).await? {
                absent.push(kind);
            }
        }
        let has = |kind: Kind| !absent.contains(&kind);
        let nodes: Api<Node> = Api::all(self.client());
        let nodes = nodes
            .list_metadata(&ListParams::default().labels_from(&schedulable_selector()))
            .await
            .map_err(failed("cannot list nodes".to_owned()))?;
        let monitor_namespace = if has(Kind::ServiceMonitor) { self.monitor_namespace(config).await? } else { None };
        let cluster = Cluster { monitor_namespace, ..Cluster::from_kinds(has, nodes.items.len()) };
        Ok(ClusterState { objects, cluster })
    }

    /// The first namespace with the ServiceAccount of the monitoring stack.
    pub(crate) async fn monitor_namespace(&self, config: &DeploymentConfig) -> Result<Option<String>> {
        let Some(account) = config.monitor_account() else { return Ok(None) };
        for namespace in config.monitor_namespaces() {
            let api: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
            let found = api.get_metadata_opt(account).await;
            if found.map_err(failed(format!("cannot read ServiceAccount {namespace}/{account}")))?.is_some() {
                return Ok(Some(namespace.to_owned()));
            }
        }
        Ok(None)
    }

    /// Whether the cluster serves the kind, which is not one of the core API group. It needs no permission.
    pub(crate) async fn serves_kind(&self, kind: Kind) -> Result<bool> {
        let resource = kind.resource();
        match self.client().list_api_group_resources(&resource.api_version).await {
            Ok(served) => Ok(served.resources.iter().any(|served| served.name == resource.plural)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => bail!("cannot read which kinds {} has: {}", resource.api_version, root_cause(&error)),
        }
    }

    async fn list_into(&self, kind: Kind, objects: &mut Objects) -> Result<bool> {
        let plural = kind.resource().plural;
        let mut parameters = ListParams::default().labels_from(&managed_selector()).limit(PAGE);
        loop {
            let more = match kind {
                Kind::CustomResourceDefinition => {
                    let api: Api<CustomResourceDefinition> = Api::all(self.client());
                    let list = api.list_metadata(&parameters).await.map_err(failed(format!("cannot list {plural}")))?;
                    for item in list.items {
                        let key = ObjectKey::from_metadata(&item.metadata);
                        objects.insert(kind, key, Arc::new(LiveObject::from_metadata(&item.metadata)));
                    }
                    list.metadata.continue_
                }
                _ => {
                    let api: Api<DynamicObject> = Api::all_with(self.client(), &kind.resource());
                    let list = match api.list(&parameters).await {
                        Ok(list) => list,
                        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(false),
                        Err(error) => bail!("cannot list {plural}: {}", root_cause(&error)),
                    };
                    for item in list.items {
                        let key = ObjectKey::from_metadata(&item.metadata);
                        objects.insert(kind, key, Arc::new(LiveObject::new(&item.metadata, item.data)));
                    }
                    list.metadata.continue_
                }
            };
            match more.filter(|token| !token.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => return Ok(true),
            }
        }
    }
}

/// An error with its root cause, because kube's errors repeat their sources.
fn failed(what: String) -> impl FnOnce(kube::Error) -> anyhow::Error {
    move |error| anyhow!("{what}: {}", root_cause(&error))
}
