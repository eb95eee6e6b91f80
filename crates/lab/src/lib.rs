//! A real Kubernetes and KubeVirt control plane on one Linux machine, with simulated nodes.
//!
//! etcd, kube-apiserver, kube-controller-manager, kube-scheduler, virt-api, virt-controller and the reference
//! operator are the real programs, built from pinned Go modules ([`components`]). This crate simulates nodes, the
//! kubelet, virt-handler and storage, with the same kube client as the operators. A lab runs in its own Linux
//! namespaces ([`isolate`]): it cannot reach other machines, and it leaves no processes or files behind.
//!
//! The modules, in the order in which to read them:
//!
//! - one lab: `cluster`, with `control_plane`, `server_process`, `credentials` and `addresses`
//! - the simulators: `node`, `kubelet`, `virt_handler`, `storage`, `vmi`, which the kubelet and virt-handler share, and
//!   `pace`, which sets their delays
//! - KubeVirt and our operators in a lab: `kubevirt`, `edited`, `operator_process`, `image`, `extensions`
//! - what tests observe and break: `audit`, `snapshot`, `skewed_client`, `node_failure`, [`leadership`], [`proxy`], [`browser`]
//! - programs that use a lab: [`harness`] runs test binaries, [`daemon`] background labs
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use vitivirt_lab::{KubeVirtInstaller, Lab, LabOptions};
//! let kubevirt = KubeVirtInstaller::Reference { custom_resource: None };
//! let lab = Lab::start(LabOptions { kubevirt, ..LabOptions::default() }).await?;
//! let client = lab.client();
//! # Ok(()) }
//! ```

#![expect(clippy::disallowed_methods, reason = "the lab runs real programs in real time")]

mod addresses;
mod audit;
pub mod browser;
mod cluster;
pub mod components;
mod control_plane;
mod credentials;
pub mod daemon;
mod edited;
mod extensions;
pub mod harness;
mod helm;
mod hex;
mod http_get;
mod image;
pub mod isolate;
mod kubectl;
mod kubelet;
mod kubevirt;
mod launch;
pub mod leadership;
pub mod manifests;
mod netlink;
mod node;
mod node_failure;
mod object_watch;
mod operator_process;
mod outage;
mod pace;
pub mod paths;
pub mod process_table;
pub mod proxy;
mod server_process;
pub mod shell_blocks;
mod skewed_client;
mod snapshot;
mod snapshots;
mod storage;
mod virt_handler;
mod vmi;

pub use addresses::loopback;
pub use audit::{Record, UsedPermission};
pub use cluster::{Lab, LabOptions};
pub use control_plane::{ApiServerLag, LagScope};
pub use credentials::Credentials;
pub use edited::EditedInstallation;
pub use extensions::Extension;
pub use helm::Helm;
pub use image::{ContainerImage, REFERENCE_ANNOTATION};
pub use kubelet::{CRASH_MESSAGE, OwnProgram, PodBehaviour, PodFate, PodRule};
pub use kubevirt::{KubeVirtInstaller, KubeVirtRelease, VIRT_OPERATOR_USER, VirtOperator, kubevirt_resource};
pub use node_failure::NodeTaints;
pub use operator_process::{OperatorProcess, OperatorProcessOptions, get_status_page};
pub use outage::{Outages, SubresourceClient};
pub use pace::{DelayRange, Pace};
pub use server_process::{LabHealth, ServerProcess};
pub use skewed_client::check_tls;
pub use storage::{CLASS_NEVER, CLASS_STANDARD, CLASS_WAIT};
pub use virt_handler::{GuestBehaviour, GuestEnd};
