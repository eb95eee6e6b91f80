//! Why pods of a workload are not ready: one sentence for each kind of problem, with one pod as the example.
//!
//! The sentences are part of conditions. They contain no number that changes while nothing else does, such as a count
//! of restarts, because each change would be a status write.

use vitivirt_api::ObjectKey;

use super::{CRASH_LOOP, Container, Pod, PodReason, Pods};
use crate::{kind::Kind, live::Rollout};

/// The kinds of problems of one workload that a message names.
const SENTENCES: usize = 3;
/// The names in one list.
const NAMES: usize = 3;
/// Larger numbers are rounded down to one of these.
const ROUND_NUMBERS: [usize; 8] = [1000, 500, 200, 100, 50, 20, 10, 5];

/// What the kubelet reports while it starts a container.
const STARTING: [&str; 2] = ["ContainerCreating", "PodInitializing"];
const IMAGE_ERRORS: [&str; 8] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "ErrImagePullBackOff",
];

/// The problems of the pods of one workload.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Problems {
    pub(crate) sentences: Vec<String>,
    /// Whether one of them lasts until a user or the cluster changes something. The others may end when the pods have
    /// had enough time.
    pub(crate) certain: bool,
    /// Whether the labels of a node are one of the reasons why a pod cannot be scheduled.
    pub(crate) misplaced: bool,
}

impl Problems {
    pub(crate) fn of_start(sentence: impl Into<String>) -> Self {
        Self { sentences: vec![sentence.into()], certain: false, misplaced: false }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sentences.is_empty()
    }

    pub(crate) fn text(&self) -> String {
        self.sentences.join("; ")
    }
}

/// What is wrong with one pod, in words that all pods with the same problem share.
#[derive(PartialEq, Eq)]
struct PodProblem {
    what: String,
    remedy: &'static str,
    certain: bool,
}

impl Pods {
    /// What a rollout waits for. `None` if it is complete on every node that is ready.
    pub(crate) fn incomplete_rollout(&self, kind: Kind, name: &str, rollout: Rollout) -> Option<Problems> {
        let on_ready_nodes = self.rollout_on_ready_nodes(name, rollout);
        if on_ready_nodes.is_complete() {
            return None;
        }
        let problems = self.problems(kind, name);
        if !problems.is_empty() {
            return Some(problems);
        }
        Some(Problems::of_start(match on_ready_nodes.pods {
            0 if !self.unreachable_nodes(name).is_empty() => "none of its nodes are ready".to_owned(),
            _ => on_ready_nodes.missing(),
        }))
    }

    pub(crate) fn problems(&self, kind: Kind, name: &str) -> Problems {
        let mut found: Vec<(PodProblem, Vec<(&ObjectKey, &Pod)>)> = Vec::new();
        for (key, pod) in self.of(kind, name) {
            let Some(problem) = self.problem(pod) else { continue };
            match found.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, pods)) => pods.push((key, pod)),
                None => found.push((problem, vec![(key, pod)])),
            }
        }
        let certain = found.iter().any(|(problem, _)| problem.certain);
        // Pods that are only starting explain nothing if others have failed.
        found.retain(|(problem, _)| problem.certain == certain);
        let sentences = found.iter().take(SENTENCES).map(|(problem, pods)| sentence(problem, pods)).collect();
        let misplaced = self.of(kind, name).any(|(_, pod)| pod.has_no_matching_node());
        Problems { sentences, certain, misplaced }
    }

    fn problem(&self, pod: &Pod) -> Option<PodProblem> {
        let problem = |what: String, remedy, certain| Some(PodProblem { what, remedy, certain });
        if self.is_on_dead_node(pod) {
            // A DaemonSet is complete without these pods.
            let is_awaited = pod.workload.as_ref().is_some_and(|(kind, _)| *kind != Kind::DaemonSet);
            return is_awaited.then(|| PodProblem {
                what: "its node is not ready".to_owned(),
                remedy: "",
                certain: true,
            });
        }
        if let Some(reason) = &pod.reason {
            return match reason {
                PodReason::Unschedulable(message) => problem(format!("cannot be scheduled: {message}"), "", true),
                PodReason::Failed(message) => problem(format!("failed: {message}"), "", false),
            };
        }
        if pod.ready || pod.ended || pod.deleted.is_some() {
            return None;
        }
        let unready = || pod.containers.iter().filter(|container| !container.ready);
        if let Some(problem) = unready().find_map(container_problem) {
            return Some(problem);
        }
        let started = unready().any(|container| container.waiting.is_none());
        match (pod.node.is_empty(), started) {
            (true, _) => problem("not scheduled yet".to_owned(), "", false),
            (false, true) => {
                problem("running, but not ready".to_owned(), "see the readiness probe in its events", false)
            }
            (false, false) => problem("not started yet".to_owned(), "see its events", false),
        }
    }
}

fn container_problem(container: &Container) -> Option<PodProblem> {
    let Container { name, image, .. } = container;
    let kind = if container.init { "init container" } else { "container" };
    let with = |cause: &str| if cause.is_empty() { String::new() } else { format!(": {cause}") };
    let (reason, message) =
        container.waiting.as_ref().map(|(reason, message)| (&**reason, &**message)).unwrap_or_default();
    if IMAGE_ERRORS.contains(&reason) {
        let what = format!("image {image} cannot be pulled{}", with(pull_error(message)));
        let remedy = "check the image and spec.imagePullSecrets";
        return Some(PodProblem { what, remedy, certain: true });
    }
    if let Some(exit) = &container.exit {
        let reason_of_exit = if matches!(&*exit.reason, "" | "Error" | "Completed") {
            String::new()
        } else {
            format!(" ({})", exit.reason)
        };
        let what =
            format!("{kind} {name} exits with code {}{reason_of_exit}{}", exit.code, with(exit.message.as_ref()));
        // The first exit may be the last one.
        let certain = reason == CRASH_LOOP || container.restarts >= 2;
        return Some(PodProblem { what, remedy: "see the log of the container", certain });
    }
    let fails = !reason.is_empty() && !STARTING.contains(&reason);
    fails.then(|| {
        let cause = if message.is_empty() { reason } else { message };
        PodProblem { what: format!("{kind} {name} cannot be started: {cause}"), remedy: "", certain: true }
    })
}

/// The kubelet alternates between the error of the last attempt and the wait for the next one. The message of the wait
/// repeats the error.
fn pull_error(message: &str) -> &str {
    let error = match message.split_once("ErrImagePull: ") {
        Some((_, error)) => error,
        None if message.starts_with("Back-off pulling image") => "",
        None => message,
    };
    // The status of the RPC to the container runtime comes first, then names that the sentence contains too.
    match error.strip_prefix("rpc error: code = ") {
        Some(status) => status.split_once(" desc = ").map_or(status, |(_, description)| description),
        None => error,
    }
}

fn sentence(problem: &PodProblem, pods: &[(&ObjectKey, &Pod)]) -> String {
    let pods = examples(pods.iter().map(|(key, pod)| match &*pod.node {
        "" => format!("pod {}", key.name()),
        node => format!("pod {} on node {node}", key.name()),
    }));
    let remedy = if problem.remedy.is_empty() { String::new() } else { format!("; {}", problem.remedy) };
    format!("{} ({pods}){remedy}", problem.what)
}

/// The first pod, and how many others there are.
pub(crate) fn examples(mut pods: impl ExactSizeIterator<Item = String>) -> String {
    let first = pods.next().unwrap_or_default();
    match pods.len() {
        0 => first,
        1 => format!("{first}, 1 more pod"),
        count => format!("{first}, {} more pods", rounded(count)),
    }
}

fn rounded(count: usize) -> String {
    match ROUND_NUMBERS.iter().find(|round| **round <= count) {
        Some(round) => format!("at least {round}"),
        None => count.to_string(),
    }
}

/// A list of names, of which the first few are written out.
pub(crate) fn list<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(NAMES);
    let text = names.take(NAMES).collect::<Vec<_>>().join(", ");
    match more {
        0 => text,
        1 => format!("{text} and 1 more"),
        more => format!("{text} and {} more", rounded(more)),
    }
}
