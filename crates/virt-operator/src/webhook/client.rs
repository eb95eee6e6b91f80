//! The requests to the API server that an admission decision needs. They read few objects, and have their own rate
//! limit, because every client in the cluster can call the webhooks.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource,
    api::{ListParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::validation::{DryRun, DryRunObject, Refusal, Remaining};
use vitivirt_runtime::client::Bucket;

use crate::{
    cache::schedulable_selector,
    workloads::{self, found_or_none},
};

/// A message names two objects of a kind at most.
const LIST_LIMIT: u32 = 2;
const REQUESTS_PER_SECOND: f64 = 10.0;
const BURST: u32 = 20;
pub(super) struct AdmissionClient {
    client: Client,
    rate_limit: Bucket,
}

/// The result of creating a component with a dry run.
pub(super) enum DryRunResult {
    Accepted,
    Rejected(Vec<Refusal>),
    /// The dry run failed for another reason. Contains a warning with that reason.
    Unknown(String),
}

impl AdmissionClient {
    pub(super) fn new(client: Client) -> Self {
        Self { client, rate_limit: Bucket::new(REQUESTS_PER_SECOND, BURST) }
    }

    pub(super) async fn kubevirt(&self, key: &ObjectKey) -> Result<Option<KubeVirt>, kube::Error> {
        self.rate_limit.wait().await;
        let namespace = key.namespace().unwrap_or_default();
        found_or_none(Api::<KubeVirt>::namespaced(self.client.clone(), namespace).get(key.name()).await)
    }

    /// The KubeVirt resources of one namespace, or of all namespaces.
    pub(super) async fn kubevirts(&self, namespace: Option<&str>) -> Result<Vec<KubeVirt>, kube::Error> {
        self.rate_limit.wait().await;
        let api: Api<KubeVirt> = match namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let list = api.list(&ListParams::default().limit(LIST_LIMIT)).await;
        Ok(found_or_none(list)?.map(|list| list.items).unwrap_or_default())
    }

    /// The number of nodes that can run VMs: zero, one or several. Zero if it is not known.
    pub(super) async fn schedulable_nodes(&self) -> usize {
        self.rate_limit.wait().await;
        let parameters = ListParams::default().labels_from(&schedulable_selector()).limit(LIST_LIMIT);
        Api::<Node>::all(self.client.clone()).list_metadata(&parameters).await.map_or(0, |nodes| nodes.items.len())
    }

    /// Examples of the workloads that still exist, by kind.
    pub(super) async fn remaining_workloads(&self) -> Result<Vec<Remaining>, kube::Error> {
        for _ in 0..workloads::REQUESTS {
            self.rate_limit.wait().await;
        }
        workloads::remaining_workloads(&self.client).await
    }

    pub(super) async fn dry_run(&self, namespace: &str, dry_run: &DryRun) -> DryRunResult {
        self.rate_limit.wait().await;
        let result = match &dry_run.object {
            DryRunObject::Deployment(deployment) => self.create_dry_run(namespace, &**deployment).await,
            DryRunObject::DaemonSet(daemon_set) => self.create_dry_run(namespace, &**daemon_set).await,
        };
        let status = match result {
            Ok(()) => return DryRunResult::Accepted,
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => status,
            Err(error) => return DryRunResult::Unknown(format!("{} was not checked: {error}", dry_run.field)),
        };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        let mut refusals: Vec<Refusal> = causes.map(|cause| dry_run.refusal(&cause.field, &cause.message)).collect();
        if refusals.is_empty() {
            refusals.push(dry_run.refusal("", &status.message));
        }
        DryRunResult::Rejected(refusals)
    }

    async fn create_dry_run<K>(&self, namespace: &str, object: &K) -> Result<(), kube::Error>
    where
        K: Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + Serialize
            + DeserializeOwned,
    {
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        Api::<K>::namespaced(self.client.clone(), namespace).create(&parameters, object).await.map(drop)
    }
}
