//! A real Kubernetes and KubeVirt control plane on one Linux machine, with simulated nodes.
//!
//! etcd, kube-apiserver, kube-controller-manager, kube-scheduler, virt-api, virt-controller and the reference
//! virt-operator are the real programs, built from pinned Go modules ([`parts`]). Nodes, the kubelet, virt-handler and
//! storage are simulated here, on the same kube client as the product. Everything runs in namespaces of its own
//! ([`isolate`]): nothing leaves the machine and nothing is left behind.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use lab::{KubeVirt, Lab, LabOptions};
//! let lab = Lab::start(LabOptions { kubevirt: KubeVirt::Reference { custom_resource: None }, ..LabOptions::default() }).await?;
//! let client = lab.client();
//! # Ok(()) }
//! ```

#![expect(clippy::disallowed_methods, reason = "the lab runs real programs in real time")]

mod addresses;
mod audit;
mod cluster;
mod control_plane;
mod credentials;
mod extensions;
mod follow;
pub mod harness;
mod http_get;
pub mod isolate;
mod kubelet;
mod kubevirt;
mod launch;
pub mod leadership;
pub mod manifests;
mod netlink;
mod node;
pub mod parts;
pub mod place;
pub mod process_table;
mod program;
pub mod proxy;
pub mod resident;
mod server;
mod snapshot;
mod storage;
mod virt_handler;
mod vmi;

pub use audit::Record;
pub use cluster::{Lab, LabOptions};
pub use credentials::Credentials;
pub use extensions::Extension;
pub use kubelet::{OwnProgram, PodBehaviour, PodFate, PodRule};
pub use kubevirt::{KubeVirt, VirtOperator, default_custom_resource, kubevirt_resource};
pub use program::{Program, ProgramOptions};
pub use server::{Health, Server};
pub use storage::{CLASS_NEVER, CLASS_STANDARD, CLASS_WAIT};
pub use virt_handler::{GuestBehaviour, GuestEnd};
