//! Rollouts on a simulated cluster: a DaemonSet controller, kubelets and an operator that act in a random order.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::{
        ContainerState, ContainerStateTerminated, ContainerStatus, Pod as KubernetesPod, PodCondition, PodSpec,
        PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time},
};
use proptest::prelude::*;
use vitivirt_api::ObjectKey;

use super::*;
use crate::pods::Pod;

const NAME: &str = "virt-handler";

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct SimulatedPod {
    template: usize,
    ready: bool,
    restarts: i32,
    deleted: bool,
}

#[derive(Clone, Debug)]
struct Node {
    dead: bool,
    /// Whether the status of the DaemonSet leaves it out, because of its taints.
    tainted: bool,
    pod: Option<SimulatedPod>,
}

impl Node {
    fn works(&self) -> bool {
        !self.dead && self.pod.is_some_and(|pod| pod.ready && !pod.deleted)
    }
}

/// A cluster with one DaemonSet.
#[derive(Clone, Debug)]
struct World {
    nodes: Vec<Node>,
    template: usize,
    /// The template that the controller has noticed.
    noticed: usize,
    limit: IntOrString,
    /// A template whose pods crash.
    broken: Option<usize>,
    limits: Vec<IntOrString>,
}

impl World {
    /// The first of the nodes are dead, and the first of these are tainted.
    fn new(nodes: usize, dead: usize, tainted: usize) -> Self {
        let node = |number: usize| {
            let (dead, tainted) = (number < dead, number < dead.min(tainted));
            let pod = SimulatedPod { template: 0, ready: !dead, restarts: 0, deleted: false };
            Node { dead, tainted, pod: Some(pod) }
        };
        Self {
            nodes: (0..nodes).map(node).collect(),
            template: 0,
            noticed: 0,
            limit: IntOrString::Int(1),
            broken: None,
            limits: Vec::new(),
        }
    }

    fn pods(&self) -> Pods {
        let pods = self.nodes.iter().enumerate().filter_map(|(number, node)| {
            let pod = pod(&format!("node-{number}"), node.pod?);
            Some((ObjectKey::namespaced("kubevirt", &format!("{NAME}-{number}")), Arc::new(Pod::new(pod))))
        });
        let mut pods: Pods = pods.collect();
        let names = |matches: &dyn Fn(&Node) -> bool| {
            let nodes = self.nodes.iter().enumerate().filter(|(_, node)| matches(node));
            nodes.map(|(number, _)| format!("node-{number}")).collect()
        };
        pods.dead_nodes = names(&|node| node.dead);
        pods.set_uncounted_nodes(NAME, names(&|node| node.dead && node.tainted));
        if self.noticed == self.template {
            pods.current_revisions.insert(NAME.to_owned(), self.template.to_string().into());
        }
        pods
    }

    fn rollout(&self) -> Rollout {
        let count = |matches: &dyn Fn(&SimulatedPod) -> bool| {
            let pods = self.nodes.iter().filter(|node| !node.tainted).filter_map(|node| node.pod);
            i64::try_from(pods.filter(|pod| !pod.deleted && matches(pod)).count()).unwrap()
        };
        Rollout {
            current: self.noticed == self.template,
            pods: i64::try_from(self.counted()).unwrap(),
            updated: count(&|pod| pod.template == self.noticed),
            ready: count(&|pod| pod.ready),
            every_node: true,
        }
    }

    fn counted(&self) -> usize {
        self.nodes.iter().filter(|node| !node.tainted).count()
    }

    /// What the operator writes at the next reconcile.
    fn operate(&mut self, desired: usize) {
        let pods = self.pods();
        let value = if desired == self.template {
            RolloutNodes::observe(&pods, NAME, self.rollout(), now())
                .map_or_else(|| self.limit.clone(), RolloutNodes::max_unavailable)
        } else {
            allow(1, pods.unreachable_nodes(NAME).len())
        };
        self.template = desired;
        if self.limit != value {
            self.limits.push(value.clone());
            self.limit = value;
        }
    }

    /// As the DaemonSet controller of Kubernetes without `maxSurge`. It creates no pod on a tainted node, and counts the
    /// pods there as unavailable.
    fn control(&mut self) {
        self.noticed = self.template;
        for node in self.nodes.iter_mut().filter(|node| !node.tainted) {
            let started = SimulatedPod { template: self.noticed, ready: false, restarts: 0, deleted: false };
            node.pod = node.pod.or(Some(started));
        }
        let allowed = match &self.limit {
            IntOrString::Int(number) => usize::try_from(*number).unwrap(),
            IntOrString::String(_) => self.counted().div_ceil(10),
        };
        let current = self.noticed;
        let is_available = |node: &Node| node.pod.is_some_and(|pod| pod.ready && !pod.deleted);
        let unavailable = self.nodes.iter().filter(|node| !is_available(node)).count();
        let mut left = allowed.saturating_sub(unavailable);
        for node in &mut self.nodes {
            let available = is_available(node);
            let Some(pod) = node.pod.as_mut().filter(|pod| pod.template != current && !pod.deleted) else { continue };
            if !available {
                pod.deleted = true;
            } else if left > 0 {
                left -= 1;
                pod.deleted = true;
            }
        }
    }

    /// The kubelet of one node: it removes a deleted pod, and starts a new one.
    fn run_kubelet(&mut self, number: usize) {
        let count = self.nodes.len();
        let node = &mut self.nodes[number % count];
        if node.dead {
            return;
        }
        node.pod = node.pod.filter(|pod| !pod.deleted);
        if let Some(pod) = &mut node.pod {
            pod.ready = self.broken != Some(pod.template);
            pod.restarts += i32::from(!pod.ready);
        }
    }

    fn act(&mut self, action: &Action, desired: usize) {
        match action {
            Action::Operator => self.operate(desired),
            Action::Controller => self.control(),
            Action::Kubelet(number) => self.run_kubelet(*number),
        }
    }

    /// Everything acts until nothing changes.
    fn settle(&mut self, desired: usize) {
        for _ in 0..4 * self.nodes.len() + 20 {
            self.operate(desired);
            self.control();
            (0..self.nodes.len()).for_each(|number| self.run_kubelet(number));
        }
    }

    fn broken_nodes(&self) -> usize {
        self.nodes.iter().filter(|node| !node.dead && !node.works()).count()
    }

    fn with_template(&self, template: usize) -> usize {
        let has = |node: &&Node| !node.dead && node.pod.is_some_and(|pod| pod.template == template && !pod.deleted);
        self.nodes.iter().filter(has).count()
    }
}

fn pod(node: &str, pod: SimulatedPod) -> KubernetesPod {
    let owner = OwnerReference {
        kind: "DaemonSet".to_owned(),
        name: NAME.to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    };
    let ended = ContainerStateTerminated { exit_code: 1, ..ContainerStateTerminated::default() };
    let container = ContainerStatus {
        name: NAME.to_owned(),
        ready: pod.ready,
        restart_count: pod.restarts,
        last_state: (pod.restarts > 0).then(|| ContainerState { terminated: Some(ended), ..ContainerState::default() }),
        ..ContainerStatus::default()
    };
    let ready = PodCondition {
        type_: "Ready".to_owned(),
        status: if pod.ready { "True" } else { "False" }.to_owned(),
        last_transition_time: Some(Time(now() - SignedDuration::from_secs(1))),
        ..PodCondition::default()
    };
    KubernetesPod {
        metadata: ObjectMeta {
            labels: Some([("controller-revision-hash".to_owned(), pod.template.to_string())].into()),
            owner_references: Some(vec![owner]),
            deletion_timestamp: pod.deleted.then(|| Time(now())),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec { node_name: Some(node.to_owned()), ..PodSpec::default() }),
        status: Some(PodStatus {
            phase: Some("Running".to_owned()),
            conditions: Some(vec![ready]),
            container_statuses: Some(vec![container]),
            ..PodStatus::default()
        }),
    }
}

#[derive(Clone, Debug)]
enum Action {
    Operator,
    Controller,
    Kubelet(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        2 => Just(Action::Operator),
        2 => Just(Action::Controller),
        4 => any::<usize>().prop_map(Action::Kubelet),
    ];
    prop::collection::vec(action, 0..150)
}

/// A cluster, some nodes of which are not ready.
fn worlds() -> impl Strategy<Value = World> {
    (1_usize..60)
        .prop_flat_map(|nodes| (Just(nodes), 0..nodes.min(8), 0..8_usize))
        .prop_map(|(nodes, dead, tainted)| World::new(nodes, dead, tainted))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_rollout_ends_and_breaks_at_most_a_tenth_of_the_nodes(mut world in worlds(), actions in actions()) {
        let ready = world.nodes.iter().filter(|node| !node.dead).count();
        for action in &actions {
            world.act(action, 1);
            prop_assert!(world.broken_nodes() <= ready.div_ceil(10), "{} of {ready}", world.broken_nodes());
        }
        world.settle(1);
        prop_assert_eq!(world.with_template(1), ready);
        prop_assert_eq!(world.broken_nodes(), 0);
        prop_assert_eq!(&world.limit, &IntOrString::Int(1));
        prop_assert!(world.limits.len() <= 3, "{:?}", world.limits);
        // The nodes return.
        world.nodes.iter_mut().for_each(|node| (node.dead, node.tainted) = (false, false));
        world.settle(1);
        prop_assert_eq!(world.with_template(1), world.nodes.len());
        prop_assert_eq!(&world.limit, &IntOrString::Int(1));
    }

    #[test]
    fn a_broken_template_reaches_one_node_and_is_taken_back(mut world in worlds(), actions in actions()) {
        world.broken = Some(1);
        let ready = world.nodes.iter().filter(|node| !node.dead).count();
        for action in &actions {
            world.act(action, 1);
            prop_assert!(world.broken_nodes() <= 1);
        }
        world.settle(1);
        prop_assert_eq!(world.with_template(1), 1);
        let nodes = RolloutNodes::observe(&world.pods(), NAME, world.rollout(), now()).unwrap();
        prop_assert_eq!(nodes.is_stopped(), ready > 1);
        // The previous operator, or the previous release, writes its template.
        for action in &actions {
            world.act(action, 0);
            prop_assert!(world.broken_nodes() <= ready.div_ceil(10));
        }
        world.settle(0);
        prop_assert_eq!(world.with_template(0), ready);
        prop_assert_eq!(world.broken_nodes(), 0);
        prop_assert_eq!(&world.limit, &IntOrString::Int(1));
    }

    /// The function has no memory, so this is about the next edit: it starts with one node again.
    #[test]
    fn an_edit_in_the_middle_of_a_rollout_starts_with_one_node(mut world in worlds(), actions in actions()) {
        for action in &actions {
            world.act(action, 1);
        }
        world.broken = Some(2);
        let before = world.broken_nodes();
        let dead = world.nodes.iter().filter(|node| node.dead).count();
        world.operate(2);
        let allowed = match &world.limit {
            IntOrString::Int(number) => usize::try_from(*number).unwrap(),
            IntOrString::String(text) => panic!("{text}"),
        };
        prop_assert_eq!(allowed, 1 + dead);
        world.settle(2);
        prop_assert!(world.with_template(2) <= before.max(1), "{} nodes", world.with_template(2));
    }
}

#[test]
fn a_new_daemon_set_is_not_a_rollout() {
    let mut world = World::new(40, 0, 0);
    world.nodes.iter_mut().for_each(|node| node.pod = None);
    world.control();
    for number in 0..40 {
        world.operate(0);
        world.run_kubelet(number);
    }
    assert_eq!(world.limits, []);
}

/// A container that crashes may be ready for a moment after each restart.
#[test]
fn a_pod_that_was_restarted_does_not_count_until_it_is_stable() {
    let mut world = World::new(50, 0, 0);
    (world.template, world.noticed) = (1, 1);
    world.nodes[0].pod = Some(SimulatedPod { template: 1, ready: true, restarts: 1, deleted: false });
    world.operate(1);
    assert_eq!(world.limits, []);
    let later = now() + STABLE_AFTER;
    let nodes = RolloutNodes::observe(&world.pods(), NAME, world.rollout(), later).unwrap();
    assert_eq!(nodes.max_unavailable(), IntOrString::String("10%".to_owned()));
}

#[test]
fn small_clusters_need_no_second_limit() {
    let limits = |nodes: usize, dead: usize, tainted: usize| {
        let mut world = World::new(nodes, dead, tainted);
        world.settle(1);
        world.limits
    };
    assert_eq!(limits(10, 0, 0), []);
    assert_eq!(limits(11, 0, 0), [IntOrString::String("10%".to_owned()), IntOrString::Int(1)]);
    for tainted in [0, 1] {
        assert_eq!(limits(5, 1, tainted), [IntOrString::Int(2), IntOrString::Int(1)]);
        assert_eq!(limits(50, 1, tainted), [IntOrString::Int(2), IntOrString::Int(6), IntOrString::Int(1)]);
    }
    // A tenth of the 41 nodes that are ready, and not of one node less.
    assert_eq!(limits(42, 1, 1), [IntOrString::Int(2), IntOrString::Int(6), IntOrString::Int(1)]);
}

#[test]
fn a_new_template_reaches_one_node_then_a_tenth_at_a_time_until_all_have_it() {
    for (nodes, expected) in [
        (0, vec![]),
        (1, vec![1]),
        (3, vec![1, 1, 1]),
        (12, vec![1, 2, 2, 2, 2, 2, 1]),
        (100, vec![1, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9]),
    ] {
        let rollout = Rollout { pods: nodes, every_node: true, ..Rollout::default() };
        assert_eq!(RolloutNodes::batches(&Pods::default(), "virt-handler", rollout), expected, "{nodes} nodes");
    }
}
