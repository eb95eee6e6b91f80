//! Every effect that both operators share.
//!
//! The crates `machine` and `install` decide the desired state without a client. This crate does the rest: requests,
//! watches, the lease, the queue, events, metrics, health, logs and shutdown. `program` assembles these parts, so that
//! the main function of an operator consists of its arguments and its controllers.

pub mod backoff;
pub mod client;
pub mod events;
pub mod health;
pub mod lease;
pub mod metrics;
pub mod program;
pub mod queue;
pub mod reconcile;
pub mod server;
mod shutdown;
pub mod telemetry;
pub mod tls;
mod verb;
pub mod watch;

#[cfg(test)]
mod testing;
