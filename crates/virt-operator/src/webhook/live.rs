//! What has to be asked of the API server before a question of its can be answered: little of each, and at a rate of its
//! own, because anybody in the cluster can ask us.

use std::fmt::Debug;

use kube::{
    Api, Client, Resource,
    api::{ListParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde::{Serialize, de::DeserializeOwned};
use vitivirt_api::{
    ObjectKey,
    kubevirt::{GROUP, KubeVirt},
};
use vitivirt_install::validation::{DryRun, DryRunObject, Refusal, Remaining};
use vitivirt_runtime::client::Bucket;

/// Two are enough for a sentence that names one and says that there are others.
const A_FEW: u32 = 2;
const PER_SECOND: f64 = 10.0;
const AT_ONCE: u32 = 20;
/// In words, kind, plural.
const WORKLOADS: [(&str, &str, &str); 3] = [
    ("Virtual Machine Instances", "VirtualMachineInstance", "virtualmachineinstances"),
    ("Virtual Machines", "VirtualMachine", "virtualmachines"),
    ("Virtual Machine Instance Replica Sets", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets"),
];

pub(super) struct Cluster {
    client: Client,
    turns: Bucket,
}

/// What the server says about a placement.
pub(super) enum Judgement {
    Good,
    Bad(Vec<Refusal>),
    /// It said something else: why is in the sentence.
    Unknown(String),
}

impl Cluster {
    pub(super) fn new(client: Client) -> Self {
        Self { client, turns: Bucket::new(PER_SECOND, AT_ONCE) }
    }

    pub(super) async fn kubevirt(&self, key: &ObjectKey) -> Result<Option<KubeVirt>, kube::Error> {
        self.turns.wait().await;
        let namespace = key.namespace().unwrap_or_default();
        if_there(Api::<KubeVirt>::namespaced(self.client.clone(), namespace).get(key.name()).await)
    }

    /// Of one namespace, or of all.
    pub(super) async fn kubevirts(&self, namespace: Option<&str>) -> Result<Vec<KubeVirt>, kube::Error> {
        self.turns.wait().await;
        let api: Api<KubeVirt> = match namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let list = api.list(&ListParams::default().limit(A_FEW)).await;
        Ok(if_there(list)?.map(|list| list.items).unwrap_or_default())
    }

    pub(super) async fn remaining(&self) -> Result<Vec<Remaining>, kube::Error> {
        let mut all = Vec::new();
        for (words, kind, plural) in WORKLOADS {
            self.turns.wait().await;
            let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", kind), plural);
            let api = Api::<DynamicObject>::all_with(self.client.clone(), &resource);
            let Some(list) = if_there(api.list_metadata(&ListParams::default().limit(A_FEW)).await)? else { continue };
            let mut examples: Vec<ObjectKey> =
                list.items.iter().map(|object| ObjectKey::of(&object.metadata)).collect();
            let more = list.metadata.continue_.is_some_and(|token| !token.is_empty());
            examples.truncate(A_FEW as usize);
            all.push(Remaining { kind: words, examples, more });
        }
        Ok(all)
    }

    pub(super) async fn judge(&self, namespace: &str, dry_run: &DryRun) -> Judgement {
        self.turns.wait().await;
        let result = match &dry_run.object {
            DryRunObject::Deployment(deployment) => self.dry_run(namespace, &**deployment).await,
            DryRunObject::DaemonSet(daemon_set) => self.dry_run(namespace, &**daemon_set).await,
        };
        let status = match result {
            Ok(()) => return Judgement::Good,
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => status,
            Err(error) => return Judgement::Unknown(format!("{} was not checked: {error}", dry_run.field)),
        };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        let mut refusals: Vec<Refusal> = causes.map(|cause| dry_run.refusal(&cause.field, &cause.message)).collect();
        if refusals.is_empty() {
            refusals.push(dry_run.refusal("", &status.message));
        }
        Judgement::Bad(refusals)
    }

    async fn dry_run<K>(&self, namespace: &str, object: &K) -> Result<(), kube::Error>
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

/// What is not there is no error: neither an object nor a kind. A kind that is not served has no objects.
fn if_there<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}
