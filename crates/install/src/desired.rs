//! The desired state of a KubeVirt resource: the step between `observed` and `plan`.
//!
//! It decides whether there is an installation and of which release. `installation` builds the objects of that
//! installation. Certificates are a lane of their own, see `certificates`.

use std::{collections::HashMap, sync::Arc};

use vitivirt_api::{Failure, ObjectKey};

use crate::{
    config::DeploymentConfig,
    environment::Environment,
    installation::Installation,
    kind::Kind,
    observed::Observed,
    record::Record,
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
    pub(crate) record: Option<Record>,
}

#[derive(Clone)]
pub enum Desired {
    Installation {
        installation: Arc<Installation>,
        /// Live objects that are known to match this installation.
        up_to_date: Arc<UpToDate>,
    },
    /// Another KubeVirt release, whose install strategy is not in the cluster yet.
    StrategyPending(Arc<DeploymentConfig>),
    /// The KubeVirt resource is invalid.
    Invalid(Failure),
    /// The KubeVirt resource is not eligible for an installation, see [`crate::is_eligible`].
    Nothing,
}

impl Desired {
    /// Why the KubeVirt resource cannot be installed.
    pub(crate) fn invalid(&self) -> Option<&Failure> {
        match self {
            Self::Invalid(failure) => Some(failure),
            Self::Installation { .. } | Self::StrategyPending(_) | Self::Nothing => None,
        }
    }

    pub fn installation(&self) -> Option<&Arc<Installation>> {
        match self {
            Self::Installation { installation, .. } => Some(installation),
            Self::StrategyPending(_) | Self::Invalid(_) | Self::Nothing => None,
        }
    }

    pub(crate) fn config(&self) -> Option<&DeploymentConfig> {
        match self {
            Self::Installation { installation, .. } => Some(&installation.config),
            Self::StrategyPending(config) => Some(config),
            Self::Invalid(_) | Self::Nothing => None,
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
