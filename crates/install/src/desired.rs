//! The desired state of a KubeVirt resource: the step between `observed` and `plan`.
//!
//! It decides whether there is an installation and of which release. `installation` builds the objects of that
//! installation. Certificates are a lane of their own, see `certificates`.

use std::{collections::HashMap, sync::Arc};

use vitivirt_api::{Failure, ObjectKey, reason};

use crate::{
    config::DeploymentConfig,
    environment::Environment,
    installation::{Installation, UNKNOWN_CERTIFICATE},
    kind::Kind,
    names::annotation,
    observed::Observed,
    record::ContentRecord,
    strategy::{InstallStrategy, job::is_of_another_release},
    validation,
};

/// The live objects that match the desired state. An object is compared again when its digest or the desired state
/// changes.
pub type UpToDate = HashMap<(Kind, ObjectKey), MatchingObject>;

/// A live object that matches the desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchingObject {
    /// The digest of the live object.
    pub(crate) digest: u64,
    /// What the status of the KubeVirt resource records of it.
    pub(crate) record: Option<ContentRecord>,
}

#[derive(Clone)]
pub enum Desired {
    Installation {
        installation: Arc<Installation>,
        /// Live objects that are known to match this installation.
        up_to_date: Arc<UpToDate>,
    },
    /// Another KubeVirt release, whose install strategy is not in the cluster yet. The release that runs, if it is
    /// known, is kept until then.
    StrategyPending { config: Arc<DeploymentConfig>, running: Option<(Arc<Installation>, Arc<UpToDate>)> },
    /// The KubeVirt resource asks for a release that this operator cannot install. The release that runs is kept.
    Refused { failure: Failure, running: Arc<Installation>, up_to_date: Arc<UpToDate> },
    /// The KubeVirt resource is invalid.
    Invalid(Failure),
    /// The KubeVirt resource is not eligible for an installation, see [`crate::is_eligible`].
    Nothing,
}

impl Desired {
    /// Why the KubeVirt resource cannot be installed.
    pub(crate) fn invalid(&self) -> Option<&Failure> {
        match self {
            Self::Invalid(failure) | Self::Refused { failure, .. } => Some(failure),
            Self::Installation { .. } | Self::StrategyPending { .. } | Self::Nothing => None,
        }
    }

    pub fn installation(&self) -> Option<&Arc<Installation>> {
        match self {
            Self::Installation { installation, .. } => Some(installation),
            Self::StrategyPending { .. } | Self::Refused { .. } | Self::Invalid(_) | Self::Nothing => None,
        }
    }

    /// The installation that live objects are compared with: the desired one, or the one that is kept.
    pub fn compared(&self) -> Option<(&Arc<Installation>, &Arc<UpToDate>)> {
        match self {
            Self::Installation { installation, up_to_date }
            | Self::Refused { running: installation, up_to_date, .. } => Some((installation, up_to_date)),
            Self::StrategyPending { running, .. } => {
                running.as_ref().map(|(installation, up_to_date)| (installation, up_to_date))
            }
            Self::Invalid(_) | Self::Nothing => None,
        }
    }

    pub(crate) fn config(&self) -> Option<&DeploymentConfig> {
        match self {
            Self::Installation { installation, .. } => Some(&installation.config),
            Self::StrategyPending { config, .. } => Some(config),
            Self::Refused { .. } | Self::Invalid(_) | Self::Nothing => None,
        }
    }
}

/// The installation of a KubeVirt resource. `dumped` is the install strategy of another release,
/// which the operator of that release dumped. Returns `None` if the resource is valid, but needs the strategy of
/// another release, and that strategy is not in the cluster yet.
pub fn desired_installation(
    observed: &Observed,
    environment: &Environment,
    dumped: Option<InstallStrategy>,
) -> Result<Option<Installation>, Failure> {
    let (kubevirt, cluster) = (&observed.kubevirt, &observed.cluster);
    if !is_of_another_release(kubevirt, environment) {
        return Installation::new(kubevirt, environment, cluster).map(Some);
    }
    let Some(strategy) = dumped else {
        // An invalid resource must not start the Job that dumps the strategy.
        validation::check_installable(kubevirt)?;
        return Ok(None);
    };
    let config = DeploymentConfig::new(kubevirt, environment);
    Installation::from_strategy(strategy, config, kubevirt, cluster).map(Some)
}

/// The installation that runs, if the resource asks for another release and this operator cannot install that release.
pub fn running_installation(observed: &Observed, environment: &Environment, failure: &Failure) -> Option<Installation> {
    let is_unsupported = [UNKNOWN_CERTIFICATE, reason::UNREADABLE_ANSWER].contains(&failure.reason);
    is_unsupported.then(|| observed_installation(observed, environment))?
}

/// The installation that runs, if the resource asks for another release whose install strategy is not known yet.
/// `None` if that release replaces one that was not complete: its objects are of different releases.
pub fn previous_installation(observed: &Observed, environment: &Environment) -> Option<Installation> {
    let installation = observed_installation(observed, environment)?;
    let version = &installation.config.kube_virt_version;
    let mut objects = installation.objects.iter();
    let is_uniform = objects.all(|object| {
        let live = observed.objects.get(object.kind, &object.key);
        live.map(|live| live.annotation(annotation::VERSION)).is_none_or(|live| live.is_empty() || live == version)
    });
    is_uniform.then_some(installation)
}

/// The installation that was complete last, if the resource asks for another release. It is known only if it is of the
/// release whose data this program contains.
fn observed_installation(observed: &Observed, environment: &Environment) -> Option<Installation> {
    if !is_of_another_release(&observed.kubevirt, environment) {
        return None;
    }
    let mut kubevirt = observed.kubevirt.clone();
    kubevirt.spec.image_tag.clear();
    let status = kubevirt.status.as_ref()?;
    let running = DeploymentConfig::new(&kubevirt, environment);
    let is_running = status.observed_kube_virt_version == running.kube_virt_version
        && status.observed_kube_virt_registry == running.registry;
    // A resource that is invalid for another reason too changes nothing.
    is_running.then(|| Installation::new(&kubevirt, environment, &observed.cluster).ok())?
}
