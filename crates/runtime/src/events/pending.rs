//! The records that wait to be sent, by namespace. Namespaces take turns, and the one with the most records loses its
//! newest record when there is no room. So a flood in one namespace drops only its own records.

use std::collections::{BTreeMap, VecDeque};

use vitivirt_api::EventRecord;

#[derive(Debug)]
pub(super) struct PendingRecords {
    capacity: usize,
    len: usize,
    /// None of them is empty.
    namespaces: BTreeMap<String, VecDeque<EventRecord>>,
    /// The namespaces in the order of their turns.
    turns: VecDeque<String>,
}

impl PendingRecords {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, len: 0, namespaces: BTreeMap::new(), turns: VecDeque::new() }
    }

    /// Returns whether there was room. If not, the new record or an older one is dropped.
    pub(super) fn push(&mut self, record: EventRecord) -> bool {
        let namespace = record.about.key.namespace().unwrap_or_default().to_owned();
        let has_room = self.len < self.capacity;
        if !has_room {
            let longest = self.namespaces.iter().max_by_key(|(_, records)| records.len());
            let Some(longest) = longest.map(|(name, _)| name.clone()) else { return false };
            if longest == namespace {
                return false;
            }
            self.take(&longest, VecDeque::pop_back);
        }
        let records = self.namespaces.entry(namespace.clone()).or_default();
        if records.is_empty() {
            self.turns.push_back(namespace);
        }
        records.push_back(record);
        self.len += 1;
        has_room
    }

    pub(super) fn pop(&mut self) -> Option<EventRecord> {
        let namespace = self.turns.front().cloned()?;
        let record = self.take(&namespace, VecDeque::pop_front);
        if self.namespaces.contains_key(&namespace) {
            self.turns.rotate_left(1);
        }
        record
    }

    fn take(
        &mut self,
        namespace: &str,
        pop: fn(&mut VecDeque<EventRecord>) -> Option<EventRecord>,
    ) -> Option<EventRecord> {
        let records = self.namespaces.get_mut(namespace)?;
        let record = pop(records)?;
        self.len -= 1;
        if records.is_empty() {
            self.namespaces.remove(namespace);
            self.turns.retain(|turn| turn != namespace);
        }
        Some(record)
    }
}
