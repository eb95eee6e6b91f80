//! Decides which records become new events, which update the count of an earlier event, and which are dropped. Pure:
//! time is an argument.
//!
//! The first record of its kind is sent at once. A repetition within the window is counted, and the count is sent from
//! time to time. The number of events per object and the memory of earlier events are bounded.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use vitivirt_api::EventRecord;

#[derive(Clone, Copy, Debug)]
pub(super) struct EventLimits {
    /// A record that is not repeated for this time is forgotten. The next one is a new event.
    window: Duration,
    /// The minimum time between two updates of one count.
    count_every: Duration,
    /// The maximum number of events of one object within a window.
    per_object: u32,
    /// The maximum number of remembered events. Beyond it, the least recently repeated one is forgotten.
    remembered: usize,
}

impl Default for EventLimits {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(600),
            count_every: Duration::from_secs(30),
            per_object: 25,
            remembered: 1024,
        }
    }
}

/// What to write. `count` is the number of records, so the first update of a series has at least 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EventWrite {
    Create { record: EventRecord, name: String },
    UpdateCount { namespace: String, name: String, count: i32 },
}

/// An event and its repetitions.
#[derive(Debug)]
struct EventSeries {
    name: String,
    namespace: String,
    count: i32,
    last_seen: Instant,
    last_sent: Instant,
    unsent: bool,
}

#[derive(Debug)]
pub(super) struct EventAggregator {
    limits: EventLimits,
    series: HashMap<EventRecord, EventSeries>,
    /// By UID: the number of created events, and since when they are counted.
    budgets: HashMap<String, (u32, Instant)>,
}

impl EventAggregator {
    pub(super) fn new(limits: EventLimits) -> Self {
        Self { limits, series: HashMap::new(), budgets: HashMap::new() }
    }

    /// `suffix` makes the event's name unique. Returns `None` for a record that is only counted, or dropped.
    pub(super) fn record(&mut self, record: EventRecord, suffix: &str, now: Instant) -> Option<EventWrite> {
        self.expire(now);
        if let Some(series) = self.series.get_mut(&record) {
            series.count = series.count.saturating_add(1);
            series.last_seen = now;
            series.unsent = true;
            return series.update_if_due(now, self.limits.count_every);
        }
        let (used, _) = self.budgets.entry(record.about.uid.clone()).or_insert((0, now));
        if *used >= self.limits.per_object {
            return None;
        }
        *used += 1;
        if self.series.len() >= self.limits.remembered {
            let oldest =
                self.series.iter().min_by_key(|(_, series)| series.last_seen).map(|(record, _)| record.clone());
            oldest.and_then(|record| self.series.remove(&record));
        }
        let name = event_name(record.about.key.name(), suffix);
        let namespace = record.about.key.namespace().unwrap_or("default").to_owned();
        let series =
            EventSeries { name: name.clone(), namespace, count: 1, last_seen: now, last_sent: now, unsent: false };
        self.series.insert(record.clone(), series);
        Some(EventWrite::Create { record, name })
    }

    /// The event with this name does not exist on the server. The next record of its kind is a new event.
    pub(super) fn forget(&mut self, name: &str) {
        let found = self.series.iter().find(|(_, series)| series.name == name).map(|(record, _)| record.clone());
        let Some(record) = found else { return };
        self.series.remove(&record);
        if let Some((used, _)) = self.budgets.get_mut(&record.about.uid) {
            *used = used.saturating_sub(1);
        }
    }

    /// The counts that are due to be updated.
    pub(super) fn due_updates(&mut self, now: Instant) -> Vec<EventWrite> {
        let every = self.limits.count_every;
        self.series.values_mut().filter_map(|series| series.update_if_due(now, every)).collect()
    }

    /// When the next count is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let unsent = self.series.values().filter(|series| series.unsent);
        unsent.map(|series| series.last_sent + self.limits.count_every).min()
    }

    fn expire(&mut self, now: Instant) {
        let window = self.limits.window;
        self.series.retain(|_, series| series.unsent || now.duration_since(series.last_seen) < window);
        self.budgets.retain(|_, (_, since)| now.duration_since(*since) < window);
        if self.budgets.len() > self.limits.remembered * 4 {
            // Clusters create and delete thousands of objects. It is better that some objects exceed their budget than
            // that this map grows.
            self.budgets.clear();
        }
    }
}

impl EventSeries {
    fn update_if_due(&mut self, now: Instant, every: Duration) -> Option<EventWrite> {
        if !self.unsent || now.duration_since(self.last_sent) < every {
            return None;
        }
        self.unsent = false;
        self.last_sent = now;
        Some(EventWrite::UpdateCount { namespace: self.namespace.clone(), name: self.name.clone(), count: self.count })
    }
}

/// `<object>.<suffix>`, truncated to the maximum length of a name.
fn event_name(object: &str, suffix: &str) -> String {
    let room = 253_usize.saturating_sub(suffix.len() + 1);
    let short: String = object.chars().take(room).collect();
    format!("{short}.{suffix}")
}

#[cfg(test)]
mod tests {
    use vitivirt_api::{EventKind, EventSubject, ObjectKey};

    use super::*;

    fn event(object: &str, message: &str) -> EventRecord {
        EventRecord {
            about: EventSubject {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                key: ObjectKey::namespaced("ns", object),
                uid: format!("uid of {object}"),
            },
            kind: EventKind::Normal,
            reason: "Created",
            action: "Create",
            message: message.to_owned(),
        }
    }

    #[test]
    fn the_first_record_creates_an_event_and_repetitions_update_its_count() {
        let mut aggregator = EventAggregator::new(EventLimits::default());
        let t = Instant::now();
        assert!(
            matches!(aggregator.record(event("a", "x"), "1", t), Some(EventWrite::Create { name, .. }) if name == "a.1")
        );
        for second in 1..20 {
            assert_eq!(aggregator.record(event("a", "x"), "2", t + Duration::from_secs(second)), None);
        }
        assert!(aggregator.due_updates(t + Duration::from_secs(29)).is_empty());
        assert_eq!(aggregator.next_due(), Some(t + Duration::from_secs(30)));
        let sent = aggregator.due_updates(t + Duration::from_secs(30));
        assert_eq!(sent, [EventWrite::UpdateCount { namespace: "ns".to_owned(), name: "a.1".to_owned(), count: 20 }]);
        assert_eq!(aggregator.next_due(), None);
    }

    #[test]
    fn a_repetition_after_the_window_is_a_new_event() {
        let mut aggregator = EventAggregator::new(EventLimits::default());
        let t = Instant::now();
        aggregator.record(event("a", "x"), "1", t);
        let later = t + Duration::from_secs(601);
        assert!(
            matches!(aggregator.record(event("a", "x"), "2", later), Some(EventWrite::Create { name, .. }) if name == "a.2")
        );
    }

    #[test]
    fn the_number_of_events_is_limited_per_object() {
        let mut aggregator = EventAggregator::new(EventLimits::default());
        let t = Instant::now();
        let sent = (0..100).filter(|n| aggregator.record(event("a", &n.to_string()), "s", t).is_some()).count();
        assert_eq!(sent, 25);
        assert!(aggregator.record(event("b", "x"), "s", t).is_some());
        assert!(aggregator.record(event("a", "fresh"), "s", t + Duration::from_secs(600)).is_some());
    }

    #[test]
    fn the_number_of_remembered_events_and_budgets_is_bounded() {
        let limits = EventLimits { remembered: 10, ..EventLimits::default() };
        let mut aggregator = EventAggregator::new(limits);
        let t = Instant::now();
        for n in 0..1000_u32 {
            aggregator.record(event(&n.to_string(), "x"), "s", t + Duration::from_millis(u64::from(n)));
        }
        assert!(aggregator.series.len() <= 10);
        assert!(aggregator.budgets.len() <= 41);
    }

    #[test]
    fn event_names_have_at_most_253_characters() {
        assert_eq!(event_name(&"x".repeat(300), "abcd").len(), 253);
    }
}
