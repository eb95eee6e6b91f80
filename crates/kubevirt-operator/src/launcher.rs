//! Why the pod of a VMI does not start: read from the pod and its events, only for a VMI that has been starting for a while.
//! A VMI that starts in time costs no request.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{Event, Pod},
    jiff::{SignedDuration, Timestamp},
};
use kube::{Api, Client, ResourceExt, api::ListParams};
use tokio::sync::Semaphore;
use vitivirt_api::{Failure, Target, machine::VmiPhase, text::truncate};
use vitivirt_machine::{
    Observed,
    observed::{LauncherProblem, LauncherView, VmiView},
};
use vitivirt_runtime::reconcile::classify;

/// A guest usually starts within this time.
const USUAL_START: SignedDuration = SignedDuration::from_secs(15);
/// How old a reported event may be. The kubelet repeats what still fails within a few minutes.
const RECENT: SignedDuration = SignedDuration::from_mins(10);
const MESSAGE_LIMIT: usize = 512;
pub(crate) const CREATED_BY: &str = "kubevirt.io/created-by";
/// Reads at a time. Thousands of Machines may wait for the same cause.
const CONCURRENT_READS: usize = 2;
const READ_DEADLINE: Duration = Duration::from_secs(5);

pub(crate) struct LauncherReader {
    client: Client,
    permits: Semaphore,
}

impl LauncherReader {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, permits: Semaphore::new(CONCURRENT_READS) }
    }

    /// Why the pod of a VMI that is overdue does not start. Unknown, if other pods are being read.
    pub(crate) async fn state(&self, observed: &Observed) -> LauncherView {
        let Some(vmi) = overdue(observed) else { return LauncherView::NoProblem };
        let Ok(_permit) = self.permits.try_acquire() else { return LauncherView::Unknown };
        match tokio::time::timeout(READ_DEADLINE, self.read(observed.namespace(), &vmi.uid, observed.now)).await {
            Ok(Ok(problem)) => problem.map_or(LauncherView::NoProblem, LauncherView::Problem),
            Ok(Err(failure)) => {
                tracing::debug!(error = %failure, "pod of a VMI could not be read");
                LauncherView::Unknown
            }
            Err(_) => LauncherView::Unknown,
        }
    }

    async fn read(&self, namespace: &str, vmi: &str, now: Timestamp) -> Result<Option<LauncherProblem>, Failure> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let of_vmi = ListParams::default().labels(&format!("{CREATED_BY}={vmi}")).limit(5);
        let failed = |error: &kube::Error, target| classify(error, "list", &target);
        let target = Target::of_kind::<Pod>(vitivirt_api::ObjectKey::namespaced(namespace, ""));
        let found = pods.list(&of_vmi).await.map_err(|error| failed(&error, target))?;
        let newest =
            found.items.into_iter().max_by_key(|pod| pod.metadata.creation_timestamp.clone().map(|time| time.0));
        let Some(pod) = newest else { return Ok(None) };
        if let Some(problem) = waiting_container(&pod) {
            return Ok(Some(problem));
        }
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let of_pod = format!("involvedObject.uid={},type=Warning", pod.uid().unwrap_or_default());
        let target = Target::of_kind::<Event>(vitivirt_api::ObjectKey::namespaced(namespace, ""));
        let found = events.list(&ListParams::default().fields(&of_pod).limit(50)).await;
        let mut events = found.map_err(|error| failed(&error, target))?.items;
        events.retain(|event| !is_outdated(event, &pod));
        Ok(latest(&events, now))
    }
}

/// The VMI, if it has been starting for longer than usual.
fn overdue(observed: &Observed) -> Option<&VmiView> {
    let vmi = observed.vmi.as_ref().filter(|vmi| !vmi.deleting && vmi.unschedulable.is_none())?;
    let is_starting = matches!(vmi.phase, VmiPhase::Pending | VmiPhase::Scheduling | VmiPhase::Scheduled);
    let created = Timestamp::from_second(vmi.created).ok()?;
    (is_starting && observed.now.duration_since(created) >= USUAL_START).then_some(vmi)
}

/// A container that waits because of an error.
pub(crate) fn waiting_container(pod: &Pod) -> Option<LauncherProblem> {
    let status = pod.status.as_ref()?;
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let mut waiting = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let waiting = waiting.find(|waiting| {
        let usual = ["ContainerCreating", "PodInitializing"];
        waiting.reason.as_deref().is_some_and(|reason| !usual.contains(&reason))
    })?;
    Some(problem(waiting.reason.as_deref(), waiting.message.as_deref()))
}

/// A pod that has a node waited for one before, usually for its volumes.
fn is_outdated(event: &Event, pod: &Pod) -> bool {
    let is_scheduled = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    is_scheduled && event.reason.as_deref() == Some("FailedScheduling")
}

/// The latest recent event.
fn latest(events: &[Event], now: Timestamp) -> Option<LauncherProblem> {
    let time = |event: &Event| {
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
        let last = event.last_timestamp.as_ref().map(|time| time.0);
        let first = event.event_time.as_ref().map(|time| time.0);
        [series, last, first].into_iter().flatten().max()
    };
    let recent = events.iter().filter_map(|event| Some((time(event)?, event)));
    let (_, event) = recent.filter(|(time, _)| now.duration_since(*time) < RECENT).max_by_key(|(time, _)| *time)?;
    Some(problem(event.reason.as_deref(), event.message.as_deref()))
}

fn problem(reason: Option<&str>, message: Option<&str>) -> LauncherProblem {
    LauncherProblem {
        reason: truncate(reason.unwrap_or("Unknown"), 63).into_owned(),
        message: truncate(message.unwrap_or_default(), MESSAGE_LIMIT).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_latest_recent_event_counts() {
        let event = |reason: &str, time: &str| -> Event {
            serde_json::from_value(json!({
                "metadata": {"name": reason}, "involvedObject": {}, "reason": reason, "message": "m", "lastTimestamp": time,
            }))
            .unwrap()
        };
        let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let events = vec![
            event("FailedMount", "2026-01-01T00:59:00Z"),
            event("FailedAttachVolume", "2026-01-01T00:59:30Z"),
            event("FailedScheduling", "2026-01-01T00:10:00Z"),
        ];
        assert_eq!(latest(&events, now).unwrap().reason, "FailedAttachVolume");
        assert_eq!(latest(&events[2..], now), None);
    }

    #[test]
    fn a_pod_with_a_node_does_not_wait_for_the_scheduler() {
        let event = |reason: &str| Event { reason: Some(reason.to_owned()), ..Event::default() };
        let pod = |spec: serde_json::Value| -> Pod { serde_json::from_value(json!({"spec": spec})).unwrap() };
        let scheduled = pod(json!({"containers": [], "nodeName": "node-1"}));
        assert!(is_outdated(&event("FailedScheduling"), &scheduled));
        assert!(!is_outdated(&event("FailedMount"), &scheduled));
        assert!(!is_outdated(&event("FailedScheduling"), &pod(json!({"containers": []}))));
    }

    #[test]
    fn a_container_that_waits_because_of_an_error_counts() {
        let pod = |reason: &str| -> Pod {
            let waiting = json!({"waiting": {"reason": reason, "message": "m"}});
            let containers = json!([{"name": "compute", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": waiting}]);
            serde_json::from_value(json!({"status": {"containerStatuses": containers}})).unwrap()
        };
        assert_eq!(waiting_container(&pod("ContainerCreating")), None);
        assert_eq!(waiting_container(&pod("ErrImagePull")).unwrap().reason, "ErrImagePull");
    }
}
