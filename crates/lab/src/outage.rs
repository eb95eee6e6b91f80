//! A client that asks virt-api's subresources all the time, for tests of what users notice of an upgrade.

use std::{sync::Arc, time::Duration};

use kube::Client;
use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::Instant};

const EVERY: Duration = Duration::from_millis(200);
/// A request without an answer for this time has failed.
const TIMEOUT: Duration = Duration::from_secs(2);
/// virt-api answers it itself, without virt-handler.
const PATH: &str = "/apis/subresources.kubevirt.io/v1/version";

/// What the client has seen.
#[derive(Clone, Debug, Default)]
pub struct Outages {
    pub requests: usize,
    pub failed: usize,
    /// The longest time from the start of a request that failed until the next answer.
    pub longest: Duration,
    /// The first error of the longest outage.
    pub error: String,
}

/// Ends when it is dropped.
pub struct SubresourceClient {
    seen: Arc<Mutex<Outages>>,
    task: JoinHandle<()>,
}

impl SubresourceClient {
    pub(crate) fn start(client: Client) -> Self {
        let seen = Arc::new(Mutex::new(Outages::default()));
        let task = tokio::spawn(ask(client, Arc::clone(&seen)));
        SubresourceClient { seen, task }
    }

    pub fn seen(&self) -> Outages {
        self.seen.lock().clone()
    }
}

impl Drop for SubresourceClient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ask(client: Client, seen: Arc<Mutex<Outages>>) {
    let mut outage: Option<(Instant, String)> = None;
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let started = Instant::now();
        let Ok(request) = http::Request::get(PATH).body(Vec::new()) else { return };
        let answer = match tokio::time::timeout(TIMEOUT, client.request_text(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
        };
        let mut seen = seen.lock();
        seen.requests += 1;
        let succeeded = answer.is_ok();
        if let Err(error) = answer {
            seen.failed += 1;
            outage.get_or_insert((started, error));
        }
        if let Some((since, error)) = &outage
            && since.elapsed() > seen.longest
        {
            seen.longest = since.elapsed();
            seen.error.clone_from(error);
        }
        if succeeded {
            outage = None;
        }
    }
}
