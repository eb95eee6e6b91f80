//! How a process ends: the first signal asks, the second insists.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub mod message {
    pub const SHUTTING_DOWN: &str = "shutting down";
    pub const STOPPED: &str = "stopped";
}

/// Cancels `shutdown` at the first SIGTERM or SIGINT and ends the process at the second.
pub fn listen(shutdown: CancellationToken) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let mut asked = false;
        loop {
            let (name, number) = tokio::select! {
                _ = terminate.recv() => ("SIGTERM", 15),
                _ = interrupt.recv() => ("SIGINT", 2),
            };
            if asked {
                tracing::warn!(signal = name, "second signal: ending at once");
                std::process::exit(128 + number);
            }
            asked = true;
            tracing::info!(signal = name, "{}", message::SHUTTING_DOWN);
            shutdown.cancel();
        }
    });
    Ok(())
}
