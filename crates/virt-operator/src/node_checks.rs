//! Which nodes are not ready. A DaemonSet is complete without them, and conditions name them.
//!
//! Nodes are not watched for that: virt-handler and the kubelet change each node every minute, and a node is a large
//! object. A dead node shows in its pods first, because the node lifecycle controller sets their condition Ready. So
//! the operator reads a node only when one of its pods is not ready, and remembers the result. An installation whose
//! pods are ready reads no node.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::Instant;
use vitivirt_install::NodeState;

/// A node whose pod is not ready may die at any time.
const RECHECK_READY: Duration = Duration::from_secs(60);
/// A dead node that returns reports the states of its pods, so it is checked before this time.
const RECHECK_DEAD: Duration = Duration::from_secs(300);
const READS_AT_ONCE: usize = 8;

#[derive(Default)]
pub(crate) struct NodeChecks(Mutex<BTreeMap<String, NodeCheck>>);

struct NodeCheck {
    state: CheckedNode,
    /// The pods for which the node was read.
    digest: u64,
    at: Instant,
}

#[derive(Clone)]
enum CheckedNode {
    Ready,
    Dead(NodeState),
    /// Its pods are deleted soon.
    Missing,
}

impl NodeCheck {
    fn is_current(&self, digest: u64) -> bool {
        let limit = if matches!(self.state, CheckedNode::Ready) { RECHECK_READY } else { RECHECK_DEAD };
        self.digest == digest && self.at.elapsed() < limit
    }
}

impl NodeChecks {
    /// The nodes among these that are not ready. `None` stands for a node that does not exist. `nodes` has for each node a
    /// digest of the pods for which it is checked.
    pub(crate) async fn dead_nodes(
        &self,
        client: &Client,
        nodes: BTreeMap<String, u64>,
    ) -> BTreeMap<String, Option<NodeState>> {
        let due: Vec<(String, u64)> = {
            let mut known = self.0.lock();
            known.retain(|node, _| nodes.contains_key(node));
            let is_due =
                |(node, digest): &(String, u64)| !known.get(node).is_some_and(|check| check.is_current(*digest));
            nodes.into_iter().filter(is_due).collect()
        };
        let reads = due.into_iter().map(|(node, digest)| async move {
            let state = read(client, &node).await;
            (node, state.map(|state| NodeCheck { state, digest, at: Instant::now() }))
        });
        let reads: Vec<(String, Option<NodeCheck>)> =
            stream::iter(reads).buffer_unordered(READS_AT_ONCE).collect().await;
        let mut known = self.0.lock();
        // The result of an earlier read stays if this one failed.
        known.extend(reads.into_iter().filter_map(|(node, check)| Some((node, check?))));
        let dead = known.iter().filter_map(|(node, check)| match &check.state {
            CheckedNode::Ready => None,
            CheckedNode::Dead(state) => Some((node.clone(), Some(state.clone()))),
            CheckedNode::Missing => Some((node.clone(), None)),
        });
        dead.collect()
    }
}

/// `None` if its state is not known.
async fn read(client: &Client, name: &str) -> Option<CheckedNode> {
    match Api::<Node>::all(client.clone()).get_opt(name).await {
        Ok(Some(node)) => {
            let state = NodeState::new(node);
            Some(if state.is_ready { CheckedNode::Ready } else { CheckedNode::Dead(state) })
        }
        Ok(None) => Some(CheckedNode::Missing),
        Err(error) => {
            tracing::warn!(node = name, %error, "node cannot be read");
            None
        }
    }
}
