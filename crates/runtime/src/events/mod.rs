//! Events of `events.k8s.io/v1`, which `kubectl describe` shows.
//!
//! Recording an event never waits and never fails: the memory for records is bounded (`pending`), and a record that does
//! not fit is dropped and counted. One task decides what to send (`aggregate`) and sends it at a limited rate with the
//! client `unlimited`, so that events do not use the rate limit of other writes.

mod aggregate;
mod pending;
#[cfg(test)]
mod tests;

use std::{borrow::Cow, sync::Arc};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use vitivirt_api::{EventRecord, ObjectKey};

use self::{
    aggregate::{EventAggregator, EventLimits, EventWrite},
    pending::PendingRecords,
};
use crate::{client::Bucket, metrics::Metrics};

/// The server rejects a longer note.
const MAX_NOTE_BYTES: usize = 1024;
const CAPACITY: usize = 512;
const EVENTS_PER_SECOND: f64 = 20.0;
const EVENTS_BURST: u32 = 100;

/// Records events. Clones share the records.
#[derive(Clone)]
pub struct Recorder {
    records: Arc<Mutex<PendingRecords>>,
    /// One message for each pending record.
    added: mpsc::UnboundedSender<()>,
    metrics: Arc<Metrics>,
}

impl Recorder {
    pub(crate) fn record(&self, record: EventRecord) {
        self.metrics.count_event(record.kind, record.reason);
        let has_room = self.records.lock().push(record);
        if !has_room || self.added.send(()).is_err() {
            self.metrics.count_dropped_event();
        }
    }
}

/// The reporting controller and instance of an event: the program and the process.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    pub(crate) controller: String,
    pub(crate) instance: String,
}

/// A recorder, and the future that sends its records until every recorder is dropped.
pub(crate) fn recorder(
    client: Client,
    reporter: Reporter,
    metrics: Arc<Metrics>,
) -> (Recorder, impl Future<Output = ()>) {
    let records = Arc::new(Mutex::new(PendingRecords::new(CAPACITY)));
    let (added, received) = mpsc::unbounded_channel();
    (Recorder { records: records.clone(), added, metrics }, send_events(client, reporter, records, received))
}

async fn send_events(
    client: Client,
    reporter: Reporter,
    records: Arc<Mutex<PendingRecords>>,
    mut added: mpsc::UnboundedReceiver<()>,
) {
    let bucket = Bucket::new(EVENTS_PER_SECOND, EVENTS_BURST);
    let mut aggregator = EventAggregator::new(EventLimits::default());
    let mut failures = FailureLog::default();
    #[expect(clippy::disallowed_methods, reason = "the names of events are random")]
    let mut random = SmallRng::from_os_rng();
    loop {
        let due = aggregator.next_due();
        let writes = tokio::select! {
            message = added.recv() => {
                if message.is_none() {
                    return;
                }
                let Some(record) = records.lock().pop() else { continue };
                let suffix = format!("{:016x}", random.random::<u64>());
                aggregator.record(truncate_message(record), &suffix, Instant::now()).into_iter().collect()
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                aggregator.due_updates(Instant::now())
            }
        };
        for write in writes {
            bucket.wait().await;
            let (key, verb, result, is_missing) = match write {
                EventWrite::Create { record, name } => {
                    let key = ObjectKey::namespaced(namespace_of(&record), &name);
                    let result = create(&client, &reporter, record, name).await;
                    let is_missing = result.is_err();
                    (key, "create", result, is_missing)
                }
                EventWrite::UpdateCount { namespace, name, count } => {
                    let result = update_count(&client, &namespace, &name, count).await;
                    // The server deletes events after about an hour, and the namespace may have been created again.
                    let is_missing = matches!(&result, Err(kube::Error::Api(status)) if status.code == 404);
                    (ObjectKey::namespaced(&namespace, &name), "patch", result, is_missing)
                }
            };
            if is_missing {
                aggregator.forget(key.name());
            }
            if let Err(error) = result {
                failures.log(&error, verb, &key);
            }
        }
    }
}

/// Logs events that cannot be sent. A missing permission is a warning, once: it usually concerns every event.
#[derive(Default)]
struct FailureLog {
    is_refusal_logged: bool,
}

impl FailureLog {
    fn log(&mut self, error: &kube::Error, verb: &str, event: &ObjectKey) {
        if self.is_first_refusal(error) {
            tracing::warn!(verb, %event, %error, "events cannot be sent");
        } else {
            tracing::debug!(verb, %event, %error, "an event cannot be sent");
        }
    }

    fn is_first_refusal(&mut self, error: &kube::Error) -> bool {
        let is_forbidden = matches!(error, kube::Error::Api(status) if status.code == 403);
        is_forbidden && !std::mem::replace(&mut self.is_refusal_logged, true)
    }
}

#[expect(clippy::disallowed_methods, reason = "the event's time is informative; no decision reads it")]
async fn create(client: &Client, reporter: &Reporter, record: EventRecord, name: String) -> Result<(), kube::Error> {
    let event = event(reporter, record, name, Timestamp::now());
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    Api::<Event>::namespaced(client.clone(), &namespace).create(&PostParams::default(), &event).await.map(drop)
}

#[expect(clippy::disallowed_methods, reason = "the event's time is informative; no decision reads it")]
async fn update_count(client: &Client, namespace: &str, name: &str, count: i32) -> Result<(), kube::Error> {
    let series = json!({ "series": { "count": count, "lastObservedTime": MicroTime(Timestamp::now()) } });
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    api.patch(name, &PatchParams::default(), &Patch::Merge(series)).await.map(drop)
}

/// Events are namespaced. kubectl searches events about cluster-scoped objects in the namespace `default`.
fn namespace_of(record: &EventRecord) -> &str {
    record.about.key.namespace().unwrap_or("default")
}

fn event(reporter: &Reporter, record: EventRecord, name: String, now: Timestamp) -> Event {
    let namespace = record.about.key.namespace().map(ToOwned::to_owned);
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(namespace_of(&record).to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(reporter.controller.clone()),
        reporting_instance: Some(reporter.instance.chars().take(128).collect()),
        action: Some(record.action.to_owned()),
        reason: Some(record.reason.to_owned()),
        note: Some(record.message),
        type_: Some(record.kind.as_str().to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(record.about.api_version),
            kind: Some(record.about.kind),
            name: Some(record.about.key.name().to_owned()),
            namespace,
            uid: Some(record.about.uid),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

fn truncate_message(mut record: EventRecord) -> EventRecord {
    if let Cow::Owned(short) = vitivirt_api::text::truncate(&record.message, MAX_NOTE_BYTES) {
        record.message = short;
    }
    record
}
