//! Every effect that both operators share.
//!
//! What should be is decided elsewhere (`machine`, `install`), without a client; here it is done: requests, watches,
//! the lease, the queue, events, metrics, health, logs and the end of the process. `program` puts these together, so
//! that the main function of an operator is its arguments and its controllers.

pub mod client;
pub mod events;
pub mod health;
pub mod lease;
pub mod metrics;
pub mod program;
pub mod queue;
pub mod reconcile;
pub mod server;
pub mod shutdown;
pub mod telemetry;
pub mod tls;
pub mod watch;

#[cfg(test)]
mod testing;
