//! What a KubeVirt installation should be: every object of the release for a given KubeVirt resource, in the order in
//! which they are applied, and the data of the release that they are made from.
//!
//! Pure functions from what was observed to data. A client, async, a clock and randomness must never enter this crate:
//! time, keys and random values come as arguments, and everything it wants to happen leaves it as data. The doing is
//! in `runtime`, the observing in the program `virt-operator`.
//!
//! ```text
//! KubeVirt + Environment ─► DeploymentConfig ─► Strategy ─┐      as the release defines it, one file per family
//! KubeVirt + Cluster ─────────────────────────────────────┴─► Installation      customized, placed, marked
//! Object::body(Issued) ─► Body      with certificates, one at a time
//! ```

mod api_services;
mod build;
pub mod certificates;
mod config;
pub mod crds;
mod customize;
mod drift;
mod environment;
mod images;
mod installation;
mod instancetypes;
mod kind;
mod live;
mod managed_metadata;
pub mod manifests;
mod monitoring;
pub mod names;
mod object;
mod observed;
mod openshift;
pub mod order;
mod packed;
mod placement;
mod plan;
mod policy;
mod rbac;
mod report;
mod rollout;
mod services;
mod strategy;
mod template;
pub mod validation;
mod warnings;
mod webhooks;
mod workloads;

pub use config::{ComponentImages, DeploymentConfig};
pub use customize::{Customizer, INVALID_CUSTOMIZATION};
pub use drift::{Drift, drift};
pub use environment::{Cluster, Environment, ImageOverrides};
pub use installation::{INVALID_DURATION, Installation, UNKNOWN_CERTIFICATE};
pub use kind::Kind;
pub use live::{End, LiveObject, Rollout};
pub use object::Object;
pub use observed::{Desired, Objects, Observed, StoredObjects, UpToDate};
pub use order::Stage;
pub use plan::{obsolete, owns, plan, wait};
pub use report::{event, is_refused, problem, report};
pub use strategy::{
    ENCODING, Item, MANIFESTS, Strategy, config_map,
    job::{is_of_another_release, variable},
};
pub use warnings::warnings;
pub use webhooks::{BLOCKING_PREFIX, blocking};

/// The release whose data this program holds.
pub const RELEASE: &str = vitivirt_api::KUBEVIRT_RELEASE;
