//! Whether a newer virt-operator manages the installation already while this one still runs.
//!
//! While the Deployment of the operator rolls out a new version, replicas of both versions run, and a replica of the old
//! version can become the leader once more. It must not revert what the new version has written. After a rollback of the
//! Deployment no replica of the new version exists, and the old version continues.
//!
//! The status of the KubeVirt resource contains the version of the operator. The new version writes it before it changes
//! anything but certificates, so that the old one knows of it however early the new one ends. Certificates never wait, and
//! the old version renews them too.

use std::{cmp::Ordering, time::Duration};

use vitivirt_api::{ObjectKey, Outcome, Step, Stop, Wait};

use crate::{RELEASE, observed::Observed, order::parse_version, wait};

/// The newer operator.
#[derive(Debug, PartialEq, Eq)]
pub struct NewerOperator {
    /// The version that it reported in the status of the KubeVirt resource.
    pub version: String,
    /// One of its pods.
    pub pod: ObjectKey,
}

/// The newer operator that has written the status of the KubeVirt resource and still has a pod. `own_pod` is the pod of
/// this process.
pub fn newer_operator(observed: &Observed, own_pod: &ObjectKey) -> Option<NewerOperator> {
    if reported_version(observed)? != Ordering::Greater {
        return None;
    }
    let version = &observed.kubevirt.status.as_ref()?.operator_version;
    let (kind, name) = observed.pods.get(own_pod)?.workload.as_ref()?;
    let revision = &observed.pods.get(own_pod)?.revision;
    let mut others = observed.pods.of(*kind, name);
    let (pod, _) = others.find(|(_, pod)| pod.revision != *revision && pod.deleted.is_none() && !pod.ended)?;
    Some(NewerOperator { version: version.clone(), pod: pod.clone() })
}

/// The version in the status, compared with the version of this operator.
fn reported_version(observed: &Observed) -> Option<Ordering> {
    let reported = parse_version(&observed.kubevirt.status.as_ref()?.operator_version)?;
    Some(reported.cmp_precedence(&parse_version(RELEASE)?))
}

/// The wait of a new operator until the status contains its version.
pub(crate) fn announcement(observed: &Observed) -> Option<Step> {
    let is_older = reported_version(observed)? == Ordering::Less;
    let message = "the status is updated with the version of virt-operator".to_owned();
    let wait = Wait { reason: wait::ANNOUNCEMENT, message, requeue_after: Some(Duration::ZERO) };
    is_older.then(|| Step::new("operator version").wait(wait))
}

pub(crate) fn is_announcement(outcome: &Outcome) -> bool {
    matches!(&outcome.stop, Stop::Waiting { wait, .. } if wait.reason == wait::ANNOUNCEMENT)
}
