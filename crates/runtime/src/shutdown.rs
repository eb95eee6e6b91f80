//! Shutdown by signals: the first one stops the program gracefully, the second one ends it at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub(crate) mod message {
    pub(crate) const SHUTTING_DOWN: &str = "shutting down";
    pub(crate) const STOPPED: &str = "stopped";
}

/// Cancels `shutdown` at the first SIGTERM or SIGINT, and exits the process at the second one.
pub(crate) fn listen(shutdown: CancellationToken) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let mut is_second = false;
        loop {
            let (name, number) = tokio::select! {
                _ = terminate.recv() => ("SIGTERM", 15),
                _ = interrupt.recv() => ("SIGINT", 2),
            };
            if is_second {
                tracing::warn!(signal = name, "second signal, exiting immediately");
                std::process::exit(128 + number);
            }
            is_second = true;
            tracing::info!(signal = name, "{}", message::SHUTTING_DOWN);
            shutdown.cancel();
        }
    });
    Ok(())
}
