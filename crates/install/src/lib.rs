//! The desired state of a KubeVirt installation: every object of the KubeVirt release for a given KubeVirt resource,
//! the order in which they are applied, and the data of the release from which they are generated.
//!
//! Pure functions from observations to data. This crate must never contain a client, async code, a clock or randomness:
//! time, keys and random values are arguments, and every effect is returned as data. `runtime` performs the effects,
//! and the program `virt-operator` observes the cluster.
//!
//! ```text
//! KubeVirt + Environment ─► DeploymentConfig ─► InstallStrategy ─┐      as the release defines it, one file per family
//! KubeVirt + Cluster ────────────────────────────────────────────┴─► Installation      customized and placed
//! Installation ─► Desired
//! Observed + Desired ─► plan ─► Plan ─► (runtime) ─► Outcome ─► report ─► Report
//! ```
//!
//! The modules, in the order in which to read them:
//!
//! - the input: `observed`, `live`, `pods`, `node_state`, `served`, `environment`, `kind`, `names`
//! - the objects of the release: `config`, `strategy`, and one module per family (`rbac`, `crds`, `webhooks`,
//!   `workloads`, `certificates`, `monitoring`, …)
//! - the objects of one installation: `validation`, `customize`, `placement`, `installation`, `object`
//! - one reconcile: `eligibility`, `superseded`, `desired`, `plan` (with `order`, `rollout`, `crd_checks`, `storage`, `record`, `drift`, `repairs`,
//!   `up_to_date` and `orphans`), `report` (with `warnings`)
//! - the end of an installation: `removal`
//! - outside of a reconcile: `rehearsal` shows what a change would do, `admission` validates requests, `manifests` installs
//!   the operator itself, `view` is what people see of an installation

pub mod admission;
mod api_readiness;
mod api_services;
pub mod certificates;
mod compressed;
mod config;
mod crd_checks;
pub mod crds;
mod customize;
mod desired;
mod desired_certificates;
mod digest;
mod drift;
mod eligibility;
mod environment;
mod finalizer;
mod images;
mod installation;
mod instancetypes;
mod kind;
mod live;
mod managed_metadata;
pub mod manifests;
mod metadata;
mod monitoring;
pub mod names;
mod node_state;
mod object;
mod observed;
mod openshift;
mod order;
mod orphans;
mod placement;
mod plan;
pub mod pods;
mod policy;
mod rbac;
mod record;
pub mod rehearsal;
pub mod removal;
mod repairs;
mod report;
mod rollout;
mod selectors;
pub mod served;
mod services;
mod stable_text;
mod storage;
mod strategy;
mod superseded;
mod template;
#[cfg(feature = "testing")]
pub mod testing;
mod trust;
mod up_to_date;
pub mod validation;
pub mod view;
mod wait;
mod warnings;
mod webhooks;
mod workloads;

pub use config::DeploymentConfig;
pub use crd_checks::{LiveCrd, check_crd, crds_to_check, lost_versions};
pub use desired::{
    Desired, MatchingObject, UpToDate, desired_installation, previous_installation, running_installation,
};
pub use desired_certificates::{CertificateScope, DesiredCertificates, certificate_plan};
pub use eligibility::is_eligible;
pub use environment::{Cluster, Environment};
pub use finalizer::RESOURCE_STEP;
pub use installation::{INVALID_DURATION, Installation};
pub use kind::Kind;
pub use live::{Finalizer, LiveObject};
pub use node_state::NodeState;
pub use object::InstallationObject;
pub use observed::{CrdCheck, Objects, Observed, Repairs, StorageMigration, StoragePage};
pub use order::{Lane, LaneProblem, Stage};
pub use orphans::{orphans, recorded_namespaces};
pub use plan::{owns, plan};
pub use repairs::{record_certificate_repairs, record_repairs};
pub use report::{certificate_report, lane_problem, lane_report, problem, report};
pub use rollout::{
    HeldNodes, NodeHistory, api_replicas,
    revision::{current_revision, unfinished_daemon_sets},
};
pub use storage::{next_migration, preparation};
pub use strategy::{
    InstallStrategy, StrategyItem, config_map,
    job::{is_of_another_release, variable},
};
pub use superseded::{NewerOperator, newer_operator};
pub use trust::{TRUSTING_KINDS, trusted_bundles};
pub use up_to_date::{StoredObjects, up_to_date_after};
pub use wait::{LANE as LANE_WAIT, STORAGE as STORAGE_WAIT};
pub use warnings::{single_replica, warnings};

/// The KubeVirt release whose data this program contains.
pub const RELEASE: &str = vitivirt_api::KUBEVIRT_RELEASE;
