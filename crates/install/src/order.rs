//! In which order the objects of an installation are written, what each step waits for, and in which order they go.
//!
//! Objects of one turn do not depend on each other and may be written at once.

use std::cmp::Ordering;

use crate::kind::Kind;

/// The step that an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// The ConfigMap that says what is being installed.
    Strategy,
    Crds,
    Monitoring,
    Rbac,
    /// Nobody may be given a role that does not exist.
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
    /// Only with these does the API server take them: the definitions, and a virt-api that checks them.
    Instancetypes,
}

/// What must be seen before the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Nothing: what was written is enough.
    Written,
    /// The new definitions are served.
    Served,
    /// Every pod of virt-api is of this deployment, and one of them is ready.
    ApiRolledOver,
    ControllerRolledOver,
    /// Every node's virt-handler is of this deployment and ready.
    HandlerRolledOver,
    /// Every component is of this deployment and ready.
    EverythingRolledOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wave {
    pub stages: &'static [Stage],
    pub wait_for: WaitFor,
}

/// Everything but the workloads.
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
    Wave { stages: &[Stage::Webhooks, Stage::ApiServices, Stage::Routes], wait_for: WaitFor::Served },
    // What is signed by a new authority comes after everybody trusts it.
    Wave { stages: &[Stage::Certificates], wait_for: WaitFor::Written },
];

/// A first installation, a change without a newer version, and the way back to an older one: what checks objects comes
/// before what acts on them.
pub const INSTALL: [Wave; 8] = {
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
        // Written while pods start: of all components they need virt-api alone.
        Wave { stages: &[Stage::Instancetypes], wait_for: WaitFor::EverythingRolledOver },
    ]
};

/// To a newer version: what acts on objects must know what the newer virt-api lets through.
pub const UPDATE: [Wave; 9] = {
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

/// The order for this change. Nothing is known of versions that are not semantic, so they are taken for newer.
pub fn order(target: &str, observed: &str) -> &'static [Wave] {
    let newer = match (Version::parse(target), Version::parse(observed)) {
        _ if observed.is_empty() => false,
        (Some(target), Some(observed)) => target.cmp(&observed) == Ordering::Greater,
        _ => true,
    };
    if newer { &UPDATE } else { &INSTALL }
}

/// What is no longer part of an installation goes in this order: first what could forbid the rest to go.
pub const OBSOLETE: [Kind; 21] = [
    Kind::ValidatingWebhookConfiguration,
    Kind::MutatingWebhookConfiguration,
    Kind::ApiService,
    Kind::Secret,
    Kind::ConfigMap,
    Kind::ValidatingAdmissionPolicyBinding,
    Kind::ValidatingAdmissionPolicy,
    Kind::CustomResourceDefinition,
    Kind::DaemonSet,
    Kind::Deployment,
    Kind::Service,
    Kind::ClusterRoleBinding,
    Kind::ClusterRole,
    Kind::RoleBinding,
    Kind::Role,
    Kind::ServiceAccount,
    Kind::SecurityContextConstraints,
    Kind::PrometheusRule,
    Kind::ServiceMonitor,
    Kind::Instancetype,
    Kind::Preference,
];

/// How an installation goes. The definitions first and for good, with the control plane still there to end the
/// machines; then everything else.
pub const UNINSTALL: [Kind; 21] = [
    Kind::CustomResourceDefinition,
    Kind::DaemonSet,
    Kind::PodDisruptionBudget,
    Kind::Deployment,
    Kind::ValidatingWebhookConfiguration,
    Kind::MutatingWebhookConfiguration,
    Kind::ApiService,
    Kind::Service,
    Kind::ServiceMonitor,
    Kind::PrometheusRule,
    Kind::ClusterRoleBinding,
    Kind::ClusterRole,
    Kind::RoleBinding,
    Kind::Role,
    Kind::ServiceAccount,
    Kind::Secret,
    Kind::ConfigMap,
    Kind::SecurityContextConstraints,
    Kind::Route,
    Kind::ValidatingAdmissionPolicyBinding,
    Kind::ValidatingAdmissionPolicy,
];

#[derive(PartialEq, Eq)]
struct Version<'a> {
    numbers: [u64; 3],
    /// Empty for a release.
    preview: Vec<&'a str>,
}

impl<'a> Version<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let text = text.split_once('+').map_or(text, |(version, _)| version);
        let (numbers, preview) = text.split_once('-').unwrap_or((text, ""));
        let mut numbers = numbers.split('.').map(str::parse);
        let mut next = || numbers.next()?.ok();
        let parsed = [next()?, next()?, next()?];
        let preview = preview.split('.').filter(|part| !part.is_empty()).collect();
        numbers.next().is_none().then_some(Self { numbers: parsed, preview })
    }

    fn cmp(&self, other: &Self) -> Ordering {
        self.numbers.cmp(&other.numbers).then_with(|| match (self.preview.is_empty(), other.preview.is_empty()) {
            (true, true) => Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => {
                let parts = self.preview.iter().zip(&other.preview);
                let first = parts.map(|(ours, theirs)| part(ours, theirs)).find(|ordering| ordering.is_ne());
                first.unwrap_or_else(|| self.preview.len().cmp(&other.preview.len()))
            }
        })
    }
}

/// Numbers by value, and before words.
fn part(ours: &str, theirs: &str) -> Ordering {
    match (ours.parse::<u64>(), theirs.parse::<u64>()) {
        (Ok(ours), Ok(theirs)) => ours.cmp(&theirs),
        (Ok(_), Err(_)) => Ordering::Less,
        (Err(_), Ok(_)) => Ordering::Greater,
        (Err(_), Err(_)) => ours.cmp(theirs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_newer_version_is_an_update() {
        for (target, observed, update) in [
            ("v1.8.4", "", false),
            ("v1.8.4", "v1.8.4", false),
            ("v1.8.4", "v1.7.0", true),
            ("v1.7.0", "v1.8.4", false),
            ("v1.10.0", "v1.9.0", true),
            ("v1.8.4", "v1.8.4-rc.1", true),
            ("v1.8.4-rc.2", "v1.8.4-rc.10", false),
            ("v1.8.4-rc.1", "v1.8.4-alpha", true),
            ("latest", "v1.8.4", true),
            ("v1.8", "v1.8.4", true),
        ] {
            let expected: &[Wave] = if update { &UPDATE } else { &INSTALL };
            assert_eq!(order(target, observed), expected, "{observed} to {target}");
        }
    }

    #[test]
    fn every_stage_has_its_turn_once_in_both_orders() {
        let stages = |waves: &[Wave]| {
            let mut all: Vec<Stage> = waves.iter().flat_map(|wave| wave.stages).copied().collect();
            all.sort_unstable();
            all
        };
        assert_eq!(stages(&INSTALL), stages(&UPDATE));
        let all = stages(&INSTALL);
        assert_eq!(all.len(), 21);
        assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
