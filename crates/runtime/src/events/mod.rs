//! Events of `events.k8s.io/v1`, which people read with `kubectl describe`.
//!
//! Recording one never waits and never fails: notes go into a bounded channel, and what does not fit is dropped and
//! counted. One task decides what to send (`aggregate`) and sends it at a bounded rate on the urgent client, so that
//! events never take a turn from the writes that matter.

mod aggregate;
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
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use vitivirt_api::EventRecord;

pub use self::aggregate::{Aggregate, Limits, Send};
use crate::{client::Bucket, metrics::Metrics};

/// The server refuses a longer note.
const NOTE_LIMIT: usize = 1024;
const WAITING_LIMIT: usize = 512;
const PER_SECOND: f64 = 20.0;
const AT_ONCE: u32 = 100;

/// Takes notes from everywhere; clones share the channel.
#[derive(Clone)]
pub struct Recorder {
    notes: mpsc::Sender<EventRecord>,
    metrics: Arc<Metrics>,
}

impl Recorder {
    pub fn record(&self, note: EventRecord) {
        if self.notes.try_send(note).is_err() {
            self.metrics.count_dropped_event();
        }
    }
}

/// Who reports: the program, and which process of it.
#[derive(Clone, Debug)]
pub struct Reporter {
    pub controller: String,
    pub instance: String,
}

/// A recorder and the future that sends what it is told, until every recorder is gone.
pub fn recorder(client: Client, reporter: Reporter, metrics: Arc<Metrics>) -> (Recorder, impl Future<Output = ()>) {
    let (notes, received) = mpsc::channel(WAITING_LIMIT);
    (Recorder { notes, metrics }, send_all(client, reporter, received))
}

async fn send_all(client: Client, reporter: Reporter, mut notes: mpsc::Receiver<EventRecord>) {
    let bucket = Bucket::new(PER_SECOND, AT_ONCE);
    let mut aggregate = Aggregate::new(Limits::default());
    let mut random = SmallRng::from_os_rng();
    loop {
        let due = aggregate.next_due();
        let ready = tokio::select! {
            note = notes.recv() => {
                let Some(note) = note else { return };
                let suffix = format!("{:016x}", random.random::<u64>());
                aggregate.note(bounded(note), &suffix, Instant::now()).into_iter().collect()
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => aggregate.due(Instant::now()),
        };
        for send in ready {
            bucket.wait().await;
            let (name, result, lost) = match send {
                Send::New { note, name } => {
                    let result = create(&client, &reporter, note, name.clone()).await;
                    let lost = result.is_err();
                    (name, result, lost)
                }
                Send::Count { namespace, name, count } => {
                    let result = recount(&client, &namespace, &name, count).await;
                    // The server keeps events for an hour or so, and a namespace may have gone and come back.
                    let lost = matches!(&result, Err(kube::Error::Api(status)) if status.code == 404);
                    (name, result, lost)
                }
            };
            if lost {
                aggregate.lost(&name);
            }
            if let Err(error) = result {
                tracing::debug!(error = %error, "an event could not be sent");
            }
        }
    }
}

async fn create(client: &Client, reporter: &Reporter, note: EventRecord, name: String) -> Result<(), kube::Error> {
    let event = event(reporter, note, name, Timestamp::now());
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    Api::<Event>::namespaced(client.clone(), &namespace).create(&PostParams::default(), &event).await.map(drop)
}

async fn recount(client: &Client, namespace: &str, name: &str, count: i32) -> Result<(), kube::Error> {
    let series = json!({ "series": { "count": count, "lastObservedTime": MicroTime(Timestamp::now()) } });
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    api.patch(name, &PatchParams::default(), &Patch::Merge(series)).await.map(drop)
}

fn event(reporter: &Reporter, note: EventRecord, name: String, now: Timestamp) -> Event {
    let namespace = note.about.key.namespace().map(ToOwned::to_owned);
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            // An event about a cluster-scoped object has to live somewhere; kubectl looks here.
            namespace: Some(namespace.clone().unwrap_or_else(|| "default".to_owned())),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(reporter.controller.clone()),
        reporting_instance: Some(reporter.instance.chars().take(128).collect()),
        action: Some(note.action.to_owned()),
        reason: Some(note.reason.to_owned()),
        note: Some(note.message),
        type_: Some(note.kind.as_str().to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(note.about.api_version),
            kind: Some(note.about.kind),
            name: Some(note.about.key.name().to_owned()),
            namespace,
            uid: Some(note.about.uid),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

fn bounded(mut note: EventRecord) -> EventRecord {
    if let Cow::Owned(short) = vitivirt_api::text::truncate(&note.message, NOTE_LIMIT) {
        note.message = short;
    }
    note
}
