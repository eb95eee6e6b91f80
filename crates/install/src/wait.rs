//! Reasons of waits.

pub(crate) const ROLLOUT: &str = "WaitingForPods";
/// A rollout whose pods fail for a reason that does not end with time.
pub(crate) const FAILING_PODS: &str = "PodsFail";
/// A rollout that has stopped, because the first updated pod fails.
pub(crate) const FAILING_CANARY: &str = "FailedUpdate";
pub(crate) const DELETION: &str = "WaitingForDeletion";
pub(crate) const STRATEGY: &str = "WaitingForInstallStrategy";
pub(crate) const CERTIFICATES: &str = "WaitingForCertificates";
/// For a user who must remove CAs, see `certificates::bundle`.
pub(crate) const LEFT_OUT: &str = "CertificatesLeftOut";
/// Of the lane `Components`, for another lane that cannot reach something yet.
pub(crate) const UNREACHABLE: &str = "WaitingForServer";
/// For objects that are stored again, see `storage`.
pub const STORAGE: &str = "StoringObjects";
/// For a user who must change stored versions, see `crd_checks`.
pub(crate) const STORED_VERSIONS: &str = "StoredVersions";
/// Of the lane `Components`, for another lane.
pub const LANE: &str = "WaitingForObjects";
/// For the version of this operator in the status, see `superseded`.
pub(crate) const ANNOUNCEMENT: &str = "WaitingForStatus";
