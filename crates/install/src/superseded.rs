//! Whether a newer virt-operator manages the installation already while this one still runs.
//!
//! While the Deployment of the operator rolls out a new version, replicas of both versions run, and a replica of the old
//! version can become the leader once more. It must not revert what the new version has written. After a rollback of the
//! Deployment no replica of the new version exists, and the old version continues.

use std::cmp::Ordering;

use vitivirt_api::ObjectKey;

use crate::{RELEASE, observed::Observed, order::parse_version};

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
    let version = &observed.kubevirt.status.as_ref()?.operator_version;
    let reported = parse_version(version)?;
    if reported.cmp_precedence(&parse_version(RELEASE)?) != Ordering::Greater {
        return None;
    }
    let (kind, name) = observed.pods.get(own_pod)?.workload.as_ref()?;
    let revision = &observed.pods.get(own_pod)?.revision;
    let mut others = observed.pods.of(*kind, name);
    let (pod, _) = others.find(|(_, pod)| pod.revision != *revision && pod.deleted.is_none() && !pod.ended)?;
    Some(NewerOperator { version: version.clone(), pod: pod.clone() })
}
