//! The order in which the objects of an installation are written, and what each wave waits for.
//!
//! Each stage belongs to one lane. Lanes are reconciled independently of each other: what is wrong in one lane does not
//! hold up another. The objects of one wave do not depend on each other, so the executor may write them concurrently.
//! `installation` assigns the stage of each object, and `plan` turns each wave into a step. The order of deletions is in
//! `orphans`.

use std::{cmp::Ordering, fmt};

use semver::Version;

/// A part of an installation that is reconciled on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// CAs, CA bundles and certificates. It works in every state of the KubeVirt resource.
    Certificates,
    /// Everything that KubeVirt needs to run. This lane also writes the status of the KubeVirt resource.
    Components,
    Monitoring,
    Instancetypes,
}

impl Lane {
    pub const ALL: [Self; 4] = [Self::Certificates, Self::Components, Self::Monitoring, Self::Instancetypes];
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificates => "certificates",
            Self::Components => "components",
            Self::Monitoring => "monitoring",
            Self::Instancetypes => "instancetypes",
        })
    }
}

/// What is wrong in a lane that only reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneProblem {
    /// Something is not reachable yet. The lane `Components` waits for it.
    Starting(String),
    /// The lane `Components` does not wait for it.
    Lasting(String),
}

/// A group of objects that are written in the same wave. A wave consists of one or more stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// The ConfigMap with the install strategy.
    Strategy,
    Crds,
    Monitoring,
    Rbac,
    /// After `Rbac`, because a binding needs its role.
    Bindings,
    SecurityConstraints,
    Services,
    Policies,
    CaSecrets,
    CaConfigMaps,
    Webhooks,
    ApiServices,
    Routes,
    Certificates,
    Api,
    Controller,
    ExportProxy,
    SynchronizationController,
    Template,
    Handler,
    /// After `Crds` and `Api`: the API server accepts these objects only when their CRDs exist and virt-api validates
    /// them.
    Instancetypes,
}

impl Stage {
    pub fn lane(self) -> Lane {
        match self {
            Self::CaSecrets | Self::CaConfigMaps | Self::Certificates => Lane::Certificates,
            Self::Monitoring => Lane::Monitoring,
            Self::Instancetypes => Lane::Instancetypes,
            _ => Lane::Components,
        }
    }
}

/// What must happen before the next wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitFor {
    /// Nothing but the writes.
    Written,
    /// Every pod of virt-api belongs to this deployment, and one of them is ready.
    ApiRolledOver,
    ControllerRolledOver,
    /// Every pod of virt-handler belongs to this deployment and is ready.
    HandlerRolledOver,
    /// Every component belongs to this deployment and is ready.
    EverythingRolledOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wave {
    pub(crate) stages: &'static [Stage],
    pub(crate) wait_for: WaitFor,
    /// Whether the wave is written although an earlier one failed or waits.
    pub(crate) independent: bool,
}

/// Everything except the workloads.
const FOUNDATION: [Wave; 3] = [
    Wave {
        stages: &[
            Stage::Strategy,
            Stage::Crds,
            Stage::Rbac,
            Stage::SecurityConstraints,
            Stage::Services,
            Stage::Policies,
        ],
        wait_for: WaitFor::Written,
        independent: false,
    },
    Wave { stages: &[Stage::Bindings], wait_for: WaitFor::Written, independent: false },
    Wave {
        stages: &[Stage::Webhooks, Stage::ApiServices, Stage::Routes],
        wait_for: WaitFor::Written,
        independent: false,
    },
];

/// For a first installation and a change within one version. The components do not need each other to start, so one
/// that does not come up does not keep the others from being written.
const INSTALL: [Wave; 4] = {
    let [a, b, c] = FOUNDATION;
    [
        Wave { independent: true, ..a },
        Wave { independent: true, ..b },
        Wave { independent: true, ..c },
        Wave {
            stages: &[
                Stage::Api,
                Stage::Controller,
                Stage::ExportProxy,
                Stage::SynchronizationController,
                Stage::Template,
                Stage::Handler,
            ],
            wait_for: WaitFor::EverythingRolledOver,
            independent: true,
        },
    ]
};

/// For a downgrade, virt-api, which validates objects, is written before the components that act on them: they do not
/// understand what the newer virt-api accepts.
const DOWNGRADE: [Wave; 5] = {
    let [a, b, c] = FOUNDATION;
    [
        a,
        b,
        c,
        Wave { stages: &[Stage::Api], wait_for: WaitFor::ApiRolledOver, independent: false },
        Wave {
            stages: &[
                Stage::Controller,
                Stage::ExportProxy,
                Stage::SynchronizationController,
                Stage::Template,
                Stage::Handler,
            ],
            wait_for: WaitFor::EverythingRolledOver,
            independent: false,
        },
    ]
};

/// For an upgrade, virt-api is written after the components that act on objects: they must understand what the newer
/// virt-api accepts.
const UPGRADE: [Wave; 6] = {
    let [a, b, c] = FOUNDATION;
    [
        a,
        b,
        c,
        Wave { stages: &[Stage::Handler], wait_for: WaitFor::HandlerRolledOver, independent: false },
        Wave { stages: &[Stage::Controller], wait_for: WaitFor::ControllerRolledOver, independent: false },
        Wave {
            stages: &[Stage::ExportProxy, Stage::SynchronizationController, Stage::Template, Stage::Api],
            wait_for: WaitFor::EverythingRolledOver,
            independent: false,
        },
    ]
};

/// The only wave of the lane `Monitoring`.
pub(crate) const MONITORING: Wave =
    Wave { stages: &[Stage::Monitoring], wait_for: WaitFor::Written, independent: false };
/// The only wave of the lane `Instancetypes`.
pub(crate) const INSTANCETYPES: Wave =
    Wave { stages: &[Stage::Instancetypes], wait_for: WaitFor::Written, independent: false };

/// The waves of the components for a change from the version `installed`, which is empty at the first installation, to
/// the version `target`.
pub(crate) fn waves(target: &str, installed: &str) -> &'static [Wave] {
    if installed.is_empty() || target == installed {
        &INSTALL
    } else if is_newer(target, installed) {
        &UPGRADE
    } else {
        &DOWNGRADE
    }
}

/// A version that is not semantic counts as newer.
pub(crate) fn is_newer(target: &str, installed: &str) -> bool {
    match (parse_version(target), parse_version(installed)) {
        (Some(target), Some(installed)) => target.cmp_precedence(&installed) == Ordering::Greater,
        _ => true,
    }
}

pub(crate) fn parse_version(text: &str) -> Option<Version> {
    Version::parse(text.strip_prefix('v').unwrap_or(text)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_depends_on_both_versions() {
        for (target, installed, expected) in [
            ("v1.8.4", "", INSTALL.as_slice()),
            ("v1.8.4", "v1.8.4", &INSTALL),
            ("latest", "latest", &INSTALL),
            ("v1.8.4", "v1.7.0", &UPGRADE),
            ("v1.7.0", "v1.8.4", &DOWNGRADE),
            ("v1.10.0", "v1.9.0", &UPGRADE),
            ("v1.8.4", "v1.8.4-rc.1", &UPGRADE),
            ("v1.8.4-rc.2", "v1.8.4-rc.10", &DOWNGRADE),
            ("v1.8.4-rc.1", "v1.8.4-alpha", &UPGRADE),
            ("latest", "v1.8.4", &UPGRADE),
            ("v1.8", "v1.8.4", &UPGRADE),
        ] {
            assert_eq!(waves(target, installed), expected, "{installed} to {target}");
        }
    }

    #[test]
    fn every_order_contains_every_stage_of_the_components_once() {
        let stages = |waves: &[Wave]| {
            let mut stages: Vec<Stage> = waves.iter().flat_map(|wave| wave.stages).copied().collect();
            stages.sort_unstable();
            stages
        };
        assert_eq!(stages(&INSTALL), stages(&UPGRADE));
        assert_eq!(stages(&INSTALL), stages(&DOWNGRADE));
        let stages = stages(&INSTALL);
        assert_eq!(stages.len(), 16);
        assert!(stages.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(stages.iter().all(|stage| stage.lane() == Lane::Components));
    }
}
