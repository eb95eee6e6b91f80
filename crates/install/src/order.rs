//! The order in which the objects of an installation are written, and what each wave waits for.
//!
//! The objects of one wave do not depend on each other, so the executor may write them concurrently. `installation`
//! assigns the stage of each object, and `plan` turns each wave into a step. The order of deletions is in `orphans`.

use std::cmp::Ordering;

use semver::Version;

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
}

/// Everything except the workloads.
const FOUNDATION: [Wave; 5] = [
    Wave {
        stages: &[
            Stage::Strategy,
            Stage::Crds,
            Stage::Monitoring,
            Stage::Rbac,
            Stage::SecurityConstraints,
            Stage::Services,
            Stage::Policies,
        ],
        wait_for: WaitFor::Written,
    },
    Wave { stages: &[Stage::CaSecrets, Stage::Bindings], wait_for: WaitFor::Written },
    Wave { stages: &[Stage::CaConfigMaps], wait_for: WaitFor::Written },
    Wave { stages: &[Stage::Webhooks, Stage::ApiServices, Stage::Routes], wait_for: WaitFor::Written },
    // After the CA bundles: a client must trust a new CA before a server uses a certificate that this CA signed.
    Wave { stages: &[Stage::Certificates], wait_for: WaitFor::Written },
];

/// For a first installation, a change within one version and a downgrade: virt-api, which validates objects, is written
/// before the components that act on them.
const INSTALL: [Wave; 8] = {
    let [a, b, c, d, e] = FOUNDATION;
    [
        a,
        b,
        c,
        d,
        e,
        Wave { stages: &[Stage::Api], wait_for: WaitFor::ApiRolledOver },
        Wave {
            stages: &[
                Stage::Controller,
                Stage::ExportProxy,
                Stage::SynchronizationController,
                Stage::Template,
                Stage::Handler,
            ],
            wait_for: WaitFor::Written,
        },
        // Instancetypes need only virt-api, so they are written while the other pods start.
        Wave { stages: &[Stage::Instancetypes], wait_for: WaitFor::EverythingRolledOver },
    ]
};

/// For an upgrade, virt-api is written after the components that act on objects: they must understand what the newer
/// virt-api accepts.
const UPDATE: [Wave; 9] = {
    let [a, b, c, d, e] = FOUNDATION;
    [
        a,
        b,
        c,
        d,
        e,
        Wave { stages: &[Stage::Handler], wait_for: WaitFor::HandlerRolledOver },
        Wave { stages: &[Stage::Controller], wait_for: WaitFor::ControllerRolledOver },
        Wave {
            stages: &[Stage::ExportProxy, Stage::SynchronizationController, Stage::Template, Stage::Api],
            wait_for: WaitFor::EverythingRolledOver,
        },
        Wave { stages: &[Stage::Instancetypes], wait_for: WaitFor::Written },
    ]
};

/// The waves for a change from the version `installed`, which is empty at the first installation, to the version
/// `target`.
pub(crate) fn waves(target: &str, installed: &str) -> &'static [Wave] {
    if is_upgrade(target, installed) { &UPDATE } else { &INSTALL }
}

/// A version that is not semantic counts as newer.
fn is_upgrade(target: &str, installed: &str) -> bool {
    if installed.is_empty() || target == installed {
        return false;
    }
    match (parse_version(target), parse_version(installed)) {
        (Some(target), Some(installed)) => target.cmp_precedence(&installed) == Ordering::Greater,
        _ => true,
    }
}

fn parse_version(text: &str) -> Option<Version> {
    Version::parse(text.strip_prefix('v').unwrap_or(text)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_newer_version_is_an_upgrade() {
        for (target, installed, is_upgrade) in [
            ("v1.8.4", "", false),
            ("v1.8.4", "v1.8.4", false),
            ("latest", "latest", false),
            ("v1.8.4", "v1.7.0", true),
            ("v1.7.0", "v1.8.4", false),
            ("v1.10.0", "v1.9.0", true),
            ("v1.8.4", "v1.8.4-rc.1", true),
            ("v1.8.4-rc.2", "v1.8.4-rc.10", false),
            ("v1.8.4-rc.1", "v1.8.4-alpha", true),
            ("latest", "v1.8.4", true),
            ("v1.8", "v1.8.4", true),
        ] {
            let expected: &[Wave] = if is_upgrade { &UPDATE } else { &INSTALL };
            assert_eq!(waves(target, installed), expected, "{installed} to {target}");
        }
    }

    #[test]
    fn both_orders_contain_every_stage_once() {
        let stages = |waves: &[Wave]| {
            let mut stages: Vec<Stage> = waves.iter().flat_map(|wave| wave.stages).copied().collect();
            stages.sort_unstable();
            stages
        };
        assert_eq!(stages(&INSTALL), stages(&UPDATE));
        let stages = stages(&INSTALL);
        assert_eq!(stages.len(), 21);
        assert!(stages.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
