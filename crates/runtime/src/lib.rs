//! Everything with side effects that both operators share: API requests, watches and caches, the lease, the work queue,
//! the reconcile loop, events, metrics, health endpoints, TLS, logs and shutdown.
//!
//! This crate knows neither Machines nor KubeVirt resources. The crates `vitivirt-machine` and `vitivirt-install`
//! decide what to write, without a client, as values of `vitivirt-api`; this crate writes it. An operator crate
//! supplies its watches and controllers, and [`program`] runs them. Start reading at [`program`] and [`reconcile`].

pub mod access;
mod authorization;
pub mod backoff;
pub mod client;
pub mod events;
pub mod health;
pub mod lease;
pub mod metrics;
pub mod preflight;
pub mod program;
pub mod queue;
pub mod reconcile;
pub mod root_cause;
pub mod server;
mod shutdown;
pub mod telemetry;
pub mod tls;
mod verb;
pub mod watch;

#[cfg(test)]
mod testing;
