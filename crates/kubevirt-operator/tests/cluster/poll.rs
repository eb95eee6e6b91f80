//! Waiting for a condition that no watch reports: a log line, a metric, a probe, the audit log.

use std::time::Duration;

use anyhow::{Result, bail};

const INTERVAL: Duration = Duration::from_millis(50);

/// Checks `condition` until it is true. Fails with the condition's own error, or after `timeout` with the condition's
/// description.
pub(crate) async fn poll_until<F>(
    timeout: Duration,
    mut condition: impl FnMut() -> F + Send,
    description: impl FnOnce() -> String + Send,
) -> Result<()>
where
    F: Future<Output = Result<bool>> + Send,
{
    let holds = async {
        while !condition().await? {
            tokio::time::sleep(INTERVAL).await;
        }
        anyhow::Ok(())
    };
    match tokio::time::timeout(timeout, holds).await {
        Ok(result) => result,
        Err(_) => bail!("not within {timeout:?}: {}", description()),
    }
}
