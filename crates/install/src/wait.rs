//! Reasons of waits.

pub(crate) const ROLLOUT: &str = "WaitingForPods";
/// A rollout whose pods fail for a reason that does not end with time.
pub(crate) const FAILING_PODS: &str = "PodsFail";
/// A rollout that has stopped, because the first updated pod fails.
pub(crate) const FAILING_CANARY: &str = "FailedUpdate";
pub(crate) const DELETION: &str = "WaitingForDeletion";
pub(crate) const STRATEGY: &str = "WaitingForInstallStrategy";
pub(crate) const CERTIFICATES: &str = "WaitingForCertificates";
/// Of the lane `Components`, for another lane that cannot reach something yet.
pub(crate) const UNREACHABLE: &str = "WaitingForServer";
/// For objects that are stored again, see `storage`.
pub const STORAGE: &str = "StoringObjects";
/// Of the lane `Components`, for another lane.
pub const LANE: &str = "WaitingForObjects";
/// For a user who must change stored versions, see `crd_checks`.
pub(crate) const STORED_VERSIONS: &str = "StoredVersions";
/// For the version of this operator in the status, see `superseded`.
pub(crate) const ANNOUNCEMENT: &str = "WaitingForStatus";
