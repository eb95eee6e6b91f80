//! Progress output: one line per step, with its duration.

use std::time::Instant;

use anyhow::Result;

/// Runs a step and prints its duration. The caller reports an error.
pub(crate) async fn step<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    eprintln!("→ {what} …");
    let started = Instant::now();
    let result = work.await;
    if result.is_ok() {
        eprintln!("  done in {:.1} s", started.elapsed().as_secs_f64());
    }
    result
}
