//! The removal of an installation: what has to be read before `vitivirt_install::removal` decides, and when the other
//! lanes end.

use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams},
};
use vitivirt_api::{Failure, ObjectKey, Target, kubevirt::KubeVirt};
use vitivirt_install::{
    Lane, Observed,
    removal::{
        Instance, MarkedNode, RemovalInput, RemovalMode, RemovalStage, Workloads, is_being_removed,
        is_namespace_deleted,
    },
    validation,
};
use vitivirt_runtime::reconcile::classify;

use crate::{controller::LaneContext, observe::served_resource, workloads::remaining_workloads};

/// The instances of a CRD are read when the removal has taken this long. Usually they are gone earlier.
const READ_INSTANCES_AFTER: Duration = Duration::from_secs(4);
/// So many instances of one CRD are read.
const INSTANCES: u32 = 500;
const NODES_PER_PAGE: u32 = 500;
const READS_AT_ONCE: usize = 6;

/// Whether the installation of a resource is removed.
pub(crate) enum Removal {
    No,
    /// The resource is being deleted, but spec.uninstallStrategy protects workloads. The installation stays.
    Guarded(String),
    InProgress(Box<RemovalInput>),
}

impl LaneContext {
    /// Closes the lanes that would create objects again, and reads what the present stage of the removal needs.
    pub(crate) async fn removal(&self, observed: &mut Observed) -> Result<Removal, Failure> {
        if !is_being_removed(observed) {
            return Ok(Removal::No);
        }
        let client = &self.observer.client;
        let namespace_deleted = is_namespace_deleted(observed);
        let uid = observed.kubevirt.metadata.uid.clone().unwrap_or_default();
        let mut input = RemovalInput {
            kubevirt: Some(observed.kubevirt.clone()),
            namespace: self.observer.namespace.clone(),
            mode: RemovalMode::Operator,
            now: observed.now,
            objects: std::mem::take(&mut observed.objects),
            pods: observed.pods.clone(),
            complete: observed.caches_complete,
            instances: Vec::new(),
            empty_crds: Vec::new(),
            nodes: Vec::new(),
        };
        if namespace_deleted {
            input.mode = RemovalMode::NamespaceDeleted(workloads(client, observed, &input).await);
        } else if let Some(refusal) = refusal(client, observed, &input).await? {
            observed.objects = input.objects;
            return Ok(Removal::Guarded(refusal));
        }
        self.gates.close(Lane::Monitoring, &uid).await?;
        self.read_objects(&mut input);
        if namespace_deleted || input.stage() > RemovalStage::Instances {
            // Certificates are renewed until no VM is left.
            self.gates.close(Lane::Certificates, &uid).await?;
            self.read_objects(&mut input);
        }
        let waits_long = namespace_deleted || is_older(observed, READ_INSTANCES_AFTER);
        if input.is_irrevocable() && waits_long {
            let crds: Vec<ObjectKey> = input.crds_with_instances().cloned().collect();
            read_instances(client, crds, &mut input).await;
        }
        if namespace_deleted {
            // The other writes are more important.
            input.nodes = marked_nodes(client).await.unwrap_or_default();
        } else if input.stage() == RemovalStage::Nodes {
            input.nodes = marked_nodes(client).await?;
        }
        Ok(Removal::InProgress(Box::new(input)))
    }

    fn read_objects(&self, input: &mut RemovalInput) {
        // Before the caches are read: a cache that is incomplete now may be complete when it is read.
        input.complete = self.observer.caches.are_complete();
        input.objects = self.observer.caches.objects();
        input.pods = self.observer.caches.pods();
    }
}

/// Why the installation is kept. The webhook has checked this when the resource was deleted, but a VM may have been
/// created after that, or the webhook did not run. When the CRDs are being deleted, it is too late.
async fn refusal(client: &Client, observed: &Observed, input: &RemovalInput) -> Result<Option<String>, Failure> {
    let kubevirt = &observed.kubevirt;
    if input.is_irrevocable() || !validation::protects_workloads(kubevirt) {
        return Ok(None);
    }
    let target = || Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&kubevirt.metadata));
    let remaining =
        remaining_workloads(client).await.map_err(|error| classify(&error, "list workloads of", &target()))?;
    Ok(validation::delete(kubevirt, &remaining).map(|refusal| refusal.message))
}

/// The namespace of the operator is being deleted, so there is no time to try again: workloads that cannot be listed
/// count as existing.
async fn workloads(client: &Client, observed: &Observed, input: &RemovalInput) -> Workloads {
    match remaining_workloads(client).await {
        Ok(remaining) if remaining.iter().all(|left| left.examples.is_empty()) => Workloads::None,
        _ if input.is_irrevocable() || !validation::protects_workloads(&observed.kubevirt) => Workloads::Deleted,
        _ => Workloads::Protected,
    }
}

fn is_older(observed: &Observed, than: Duration) -> bool {
    let deleted = observed.kubevirt.metadata.deletion_timestamp.as_ref();
    deleted.is_some_and(|at| observed.now.duration_since(at.0).unsigned_abs() >= than)
}

/// Adds the objects of these CRDs. What cannot be read is missing.
pub(crate) async fn read_instances(client: &Client, crds: Vec<ObjectKey>, input: &mut RemovalInput) {
    let reads = crds.into_iter().map(|crd| async move {
        let read = read_instances_of(client, &crd).await;
        (crd, read)
    });
    let mut reads = stream::iter(reads).buffered(READS_AT_ONCE);
    while let Some((crd, read)) = reads.next().await {
        match read {
            Ok(instances) if instances.is_empty() => input.empty_crds.push(crd),
            Ok(instances) => input.instances.extend(instances),
            Err(error) => {
                tracing::warn!(crd = crd.name(), error = error.message, "objects of a CRD cannot be listed");
            }
        }
    }
}

async fn read_instances_of(client: &Client, crd: &ObjectKey) -> Result<Vec<Instance>, Failure> {
    let Some(resource) = served_resource(client, crd).await? else { return Ok(Vec::new()) };
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let list = api.list_metadata(&ListParams::default().limit(INSTANCES)).await;
    let list =
        list.map_err(|error| classify(&error, "list", &Target::new(resource.clone(), ObjectKey::cluster("*"))))?;
    let instances = list.items.iter().map(|object| {
        let target = Target::new(resource.clone(), ObjectKey::from_metadata(&object.metadata));
        Instance::new(target, &object.metadata)
    });
    Ok(instances.collect())
}

/// The nodes with labels or annotations of KubeVirt. A cluster may have thousands of nodes, so they are read in pages.
pub(crate) async fn marked_nodes(client: &Client) -> Result<Vec<MarkedNode>, Failure> {
    let nodes: Api<Node> = Api::all(client.clone());
    let mut parameters = ListParams::default().limit(NODES_PER_PAGE);
    let mut marked = Vec::new();
    loop {
        let target = || Target::of_kind::<Node>(ObjectKey::cluster("*"));
        let page = nodes.list_metadata(&parameters).await.map_err(|error| classify(&error, "list", &target()))?;
        marked.extend(page.items.iter().filter_map(|node| MarkedNode::new(&node.metadata)));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(marked),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use http_body_util::Full;
    use kube::client::Body;
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tower::{BoxError, service_fn};

    use super::*;

    /// Of every page, the first node has a label of KubeVirt and the second has none.
    fn page(number: u32, next: &str) -> Value {
        let node = |name: String, labels: Value| {
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": {"name": name, "uid": "u", "labels": labels}})
        };
        json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {"continue": next},
            "items": [
                node(format!("marked-{number}"), json!({"kubevirt.io/schedulable": "true"})),
                node(format!("other-{number}"), json!({"kubernetes.io/os": "linux"})),
            ],
        })
    }

    /// A server with three pages of nodes. Returns the requests that it received.
    fn start(fails: bool) -> (Client, Arc<Mutex<Vec<String>>>) {
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = requests.clone();
        let service = service_fn(move |request: http::Request<Body>| {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let token = query.split('&').find_map(|parameter| parameter.strip_prefix("continue="));
            let (status, body) = match token {
                None => (200, page(1, "second")),
                Some("second") if fails => (
                    410,
                    json!({
                        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
                        "message": "the provided continue parameter is too old",
                    }),
                ),
                Some("second") => (200, page(2, "third")),
                Some("third") => (200, page(3, "")),
                Some(other) => panic!("continue token {other}"),
            };
            seen.lock().push(query);
            let response = http::Response::builder().status(status).body(Full::new(Bytes::from(body.to_string())));
            async move { response.map_err(BoxError::from) }
        });
        (Client::new(service, "default"), requests)
    }

    #[tokio::test]
    async fn the_marked_nodes_of_every_page_are_read() {
        let (client, requests) = start(false);
        let marked = marked_nodes(&client).await.unwrap();
        let names: Vec<&str> = marked.iter().map(MarkedNode::name).collect();
        assert_eq!(names, ["marked-1", "marked-2", "marked-3"]);
        let requests = requests.lock();
        assert_eq!(requests.len(), 3, "{requests:?}");
        assert!(requests.iter().all(|query| query.contains("limit=500")), "{requests:?}");
    }

    /// The result of the first page alone would leave the marks of the other nodes.
    #[tokio::test]
    async fn a_page_that_cannot_be_read_fails_the_whole_read() {
        let (client, requests) = start(true);
        assert!(marked_nodes(&client).await.is_err());
        assert_eq!(requests.lock().len(), 2);
    }
}
