//! Which nodes are not ready. A DaemonSet is complete without them, and conditions name them.
//!
//! Nodes are not watched for that: virt-handler and the kubelet change each node every minute, and a node is a large
//! object. A dead node shows in its pods first, because the node lifecycle controller sets their condition Ready. So
//! the operator reads a node only when one of its pods is not ready, and remembers the result. An installation whose
//! pods are ready reads no node.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::Instant;

/// A node whose pod is not ready may die at any time.
const RECHECK_READY: Duration = Duration::from_secs(60);
/// A dead node that returns reports the states of its pods, so it is checked before this time.
const RECHECK_DEAD: Duration = Duration::from_secs(300);
const READS_AT_ONCE: usize = 8;

#[derive(Default)]
pub(crate) struct NodeChecks(Mutex<BTreeMap<String, NodeCheck>>);

#[derive(Clone, Copy)]
struct NodeCheck {
    dead: bool,
    /// The pods for which the node was read.
    digest: u64,
    at: Instant,
}

impl NodeCheck {
    fn is_current(&self, digest: u64) -> bool {
        let limit = if self.dead { RECHECK_DEAD } else { RECHECK_READY };
        self.digest == digest && self.at.elapsed() < limit
    }
}

impl NodeChecks {
    /// The nodes among these that are not ready. `nodes` has for each node a digest of the pods for which it is checked.
    pub(crate) async fn dead_nodes(&self, client: &Client, nodes: BTreeMap<String, u64>) -> BTreeSet<String> {
        let due: Vec<(String, u64)> = {
            let mut known = self.0.lock();
            known.retain(|node, _| nodes.contains_key(node));
            let is_due =
                |(node, digest): &(String, u64)| !known.get(node).is_some_and(|check| check.is_current(*digest));
            nodes.into_iter().filter(is_due).collect()
        };
        let reads = due.into_iter().map(|(node, digest)| async move {
            let dead = is_dead(client, &node).await;
            (node, dead.map(|dead| NodeCheck { dead, digest, at: Instant::now() }))
        });
        let reads: Vec<(String, Option<NodeCheck>)> =
            stream::iter(reads).buffer_unordered(READS_AT_ONCE).collect().await;
        let mut known = self.0.lock();
        // The result of an earlier read stays if this one failed.
        known.extend(reads.into_iter().filter_map(|(node, check)| Some((node, check?))));
        known.iter().filter(|(_, check)| check.dead).map(|(node, _)| node.clone()).collect()
    }
}

/// `None` if that is not known. A node that does not exist is dead: its pods are deleted soon.
async fn is_dead(client: &Client, name: &str) -> Option<bool> {
    match Api::<Node>::all(client.clone()).get_opt(name).await {
        Ok(node) => Some(node.is_none_or(|node| !is_ready(&node))),
        Err(error) => {
            tracing::warn!(node = name, %error, "node cannot be read");
            None
        }
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
