//! Which notes become events, which become a number on an earlier one, and which are dropped. Pure: time is an argument.
//!
//! The first note of its kind about an object is sent at once. The same again within the window is counted, and the
//! count is sent now and then. One object can say only so much, and all that is remembered has a bound.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use vitivirt_api::EventRecord;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A note that is not repeated for this long is forgotten; the next one is a new event.
    pub window: Duration,
    /// The least time between two writes of one count.
    pub count_every: Duration,
    /// How many events one object may have within a window.
    pub per_object: u32,
    /// How many events are remembered. Beyond it, the one that was quiet the longest is forgotten.
    pub remembered: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(600),
            count_every: Duration::from_secs(30),
            per_object: 25,
            remembered: 1024,
        }
    }
}

/// What to write. `count` is how often the note came, so the first of a series has 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Send {
    New { note: EventRecord, name: String },
    Count { namespace: String, name: String, count: i32 },
}

#[derive(Debug)]
struct Known {
    name: String,
    namespace: String,
    count: i32,
    last_seen: Instant,
    last_sent: Instant,
    unsent: bool,
}

#[derive(Debug)]
pub struct Aggregate {
    limits: Limits,
    known: HashMap<EventRecord, Known>,
    /// By UID: how many events were made since when.
    budgets: HashMap<String, (u32, Instant)>,
}

impl Aggregate {
    pub fn new(limits: Limits) -> Self {
        Self { limits, known: HashMap::new(), budgets: HashMap::new() }
    }

    /// `suffix` makes the event's name unique. Nothing is returned for a note that is only counted or dropped.
    pub fn note(&mut self, note: EventRecord, suffix: &str, now: Instant) -> Option<Send> {
        self.forget(now);
        if let Some(known) = self.known.get_mut(&note) {
            known.count = known.count.saturating_add(1);
            known.last_seen = now;
            known.unsent = true;
            return known.send_if_due(now, self.limits.count_every);
        }
        let (used, _) = self.budgets.entry(note.about.uid.clone()).or_insert((0, now));
        if *used >= self.limits.per_object {
            return None;
        }
        *used += 1;
        if self.known.len() >= self.limits.remembered {
            let quietest = self.known.iter().min_by_key(|(_, known)| known.last_seen).map(|(note, _)| note.clone());
            quietest.and_then(|note| self.known.remove(&note));
        }
        let name = event_name(note.about.key.name(), suffix);
        let namespace = note.about.key.namespace().unwrap_or("default").to_owned();
        let known = Known { name: name.clone(), namespace, count: 1, last_seen: now, last_sent: now, unsent: false };
        self.known.insert(note.clone(), known);
        Some(Send::New { note, name })
    }

    /// The event of this name is not on the server: the next note of its kind is a new event.
    pub fn lost(&mut self, name: &str) {
        let lost = self.known.iter().find(|(_, known)| known.name == name).map(|(note, _)| note.clone());
        let Some(note) = lost else { return };
        self.known.remove(&note);
        if let Some((used, _)) = self.budgets.get_mut(&note.about.uid) {
            *used = used.saturating_sub(1);
        }
    }

    /// Counts that have waited long enough to be written.
    pub fn due(&mut self, now: Instant) -> Vec<Send> {
        let every = self.limits.count_every;
        self.known.values_mut().filter_map(|known| known.send_if_due(now, every)).collect()
    }

    /// When `due` has something to give.
    pub fn next_due(&self) -> Option<Instant> {
        self.known.values().filter(|known| known.unsent).map(|known| known.last_sent + self.limits.count_every).min()
    }

    fn forget(&mut self, now: Instant) {
        let window = self.limits.window;
        self.known.retain(|_, known| known.unsent || now.duration_since(known.last_seen) < window);
        self.budgets.retain(|_, (_, since)| now.duration_since(*since) < window);
        if self.budgets.len() > self.limits.remembered * 4 {
            // Objects come and go by the thousand: better that some may say a little more than that this grows.
            self.budgets.clear();
        }
    }
}

impl Known {
    fn send_if_due(&mut self, now: Instant, every: Duration) -> Option<Send> {
        if !self.unsent || now.duration_since(self.last_sent) < every {
            return None;
        }
        self.unsent = false;
        self.last_sent = now;
        Some(Send::Count { namespace: self.namespace.clone(), name: self.name.clone(), count: self.count })
    }
}

/// `<object>.<suffix>`, short enough to be a name.
fn event_name(object: &str, suffix: &str) -> String {
    let room = 253_usize.saturating_sub(suffix.len() + 1);
    let short: String = object.chars().take(room).collect();
    format!("{short}.{suffix}")
}

#[cfg(test)]
mod tests {
    use vitivirt_api::{EventKind, EventSubject, ObjectKey};

    use super::*;

    fn note(object: &str, message: &str) -> EventRecord {
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

    fn aggregate(limits: Limits) -> Aggregate {
        Aggregate::new(limits)
    }

    #[test]
    fn the_first_is_sent_and_repeats_become_a_count() {
        let mut all = aggregate(Limits::default());
        let t = Instant::now();
        assert!(matches!(all.note(note("a", "x"), "1", t), Some(Send::New { name, .. }) if name == "a.1"));
        for second in 1..20 {
            assert_eq!(all.note(note("a", "x"), "2", t + Duration::from_secs(second)), None);
        }
        assert!(all.due(t + Duration::from_secs(29)).is_empty());
        assert_eq!(all.next_due(), Some(t + Duration::from_secs(30)));
        let sent = all.due(t + Duration::from_secs(30));
        assert_eq!(sent, [Send::Count { namespace: "ns".to_owned(), name: "a.1".to_owned(), count: 20 }]);
        assert_eq!(all.next_due(), None);
    }

    #[test]
    fn after_a_quiet_window_it_is_news_again() {
        let mut all = aggregate(Limits::default());
        let t = Instant::now();
        all.note(note("a", "x"), "1", t);
        let later = t + Duration::from_secs(601);
        assert!(matches!(all.note(note("a", "x"), "2", later), Some(Send::New { name, .. }) if name == "a.2"));
    }

    #[test]
    fn one_object_cannot_flood_and_does_not_silence_another() {
        let mut all = aggregate(Limits::default());
        let t = Instant::now();
        let sent = (0..100).filter(|n| all.note(note("a", &n.to_string()), "s", t).is_some()).count();
        assert_eq!(sent, 25);
        assert!(all.note(note("b", "x"), "s", t).is_some());
        assert!(all.note(note("a", "fresh"), "s", t + Duration::from_secs(600)).is_some());
    }

    #[test]
    fn memory_is_bounded() {
        let limits = Limits { remembered: 10, ..Limits::default() };
        let mut all = aggregate(limits);
        let t = Instant::now();
        for n in 0..1000_u32 {
            all.note(note(&n.to_string(), "x"), "s", t + Duration::from_millis(u64::from(n)));
        }
        assert!(all.known.len() <= 10);
        assert!(all.budgets.len() <= 41);
    }

    #[test]
    fn names_fit() {
        assert_eq!(event_name(&"x".repeat(300), "abcd").len(), 253);
    }
}
