//! The content of a cache, without the watch: projected objects, indexes over them, and the operator's own writes,
//! which win over the watch until it has caught up.
//!
//! A list replaces the content by mark and sweep, so a relist never needs memory for two copies. A write of the
//! operator wins over older events of the watch. The store compares their resource versions, which Kubernetes defines
//! as ordered integers.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use vitivirt_api::ObjectKey;

use super::object_id::{ResourceVersion, Uid};

/// Computes the values of an object in an index.
pub type IndexFn<V> = fn(&ObjectKey, &V) -> Vec<Box<str>>;

/// One object: its UID, its resource version and its projection.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry<V> {
    pub uid: Uid,
    pub resource_version: ResourceVersion,
    pub value: Arc<V>,
}

/// A change of one object. At least one side is present.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<V> {
    pub key: ObjectKey,
    pub old: Option<Arc<V>>,
    pub new: Option<Arc<V>>,
    /// The watch delivered `new` directly after `old`. A list, or the response to a request, may skip states in between.
    pub is_next: bool,
}

#[derive(Debug)]
struct Slot<V> {
    /// `None`: this operator deleted the object, and the watch has not delivered the deletion yet.
    entry: Option<Entry<V>>,
    /// Boxed, because few objects have one at a time.
    pending: Option<Box<PendingWrite>>,
    /// The last list when the object was listed or changed.
    list_generation: u32,
    /// The last list that contained the object.
    listed_generation: u32,
}

/// A write of the operator that the watch has not delivered yet.
#[derive(Debug)]
enum PendingWrite {
    Written(ResourceVersion),
    Deleted(Uid),
}

#[derive(Debug)]
pub(super) struct Store<V> {
    slots: HashMap<ObjectKey, Slot<V>>,
    /// The number of slots with an entry.
    len: usize,
    indexes: Vec<StoreIndex<V>>,
    /// Counts lists. A slot with an older generation was not in the last list.
    list_generation: u32,
    /// The highest version that the watch has delivered. The store knows the effect of all writes up to it.
    newest_seen: Option<ResourceVersion>,
    /// The highest version in the list that is in progress. It counts when the list is complete.
    newest_listed: Option<ResourceVersion>,
}

impl<V: PartialEq> Store<V> {
    pub(super) fn new(indexes: &[(&'static str, IndexFn<V>)]) -> Self {
        Self {
            slots: HashMap::new(),
            len: 0,
            indexes: indexes
                .iter()
                .map(|(name, values)| StoreIndex { name, values: *values, keys: HashMap::new() })
                .collect(),
            list_generation: 0,
            newest_seen: None,
            newest_listed: None,
        }
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<&Entry<V>> {
        self.slots.get(key)?.entry.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &Entry<V>)> {
        self.slots.iter().filter_map(|(key, slot)| Some((key, slot.entry.as_ref()?)))
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn keys_by(&self, index: &str, value: &str) -> impl Iterator<Item = &ObjectKey> {
        let keys =
            self.indexes.iter().find(|candidate| candidate.name == index).and_then(|index| index.keys.get(value));
        keys.into_iter().flatten()
    }

    /// A list begins.
    pub(super) fn begin_list(&mut self) {
        self.list_generation += 1;
        self.newest_listed = None;
    }

    /// The list is complete: objects that were not in it do not exist, except those that the operator wrote after it. A
    /// write that is not newer than an object in the list is older than the list.
    pub(super) fn end_list(&mut self) -> Vec<Change<V>> {
        if let Some(newest_listed) = &self.newest_listed {
            raise_to(&mut self.newest_seen, newest_listed);
        }
        let current = self.list_generation;
        let is_older_than_list = |slot: &Slot<V>| match (slot.pending.as_deref(), &self.newest_listed) {
            (Some(PendingWrite::Written(version)), Some(newest)) => !newest.is_older_than(version),
            _ => false,
        };
        let is_gone = |slot: &Slot<V>| {
            slot.list_generation < current || slot.listed_generation < current && is_older_than_list(slot)
        };
        let deleted: Vec<ObjectKey> =
            self.slots.iter().filter(|(_, slot)| is_gone(slot)).map(|(key, _)| key.clone()).collect();
        deleted.into_iter().filter_map(|key| self.replace(key, None)).collect()
    }

    /// The kind is not served any more: none of its objects exists.
    pub(super) fn clear(&mut self) -> Vec<Change<V>> {
        self.newest_seen = None;
        let all: Vec<ObjectKey> = self.slots.keys().cloned().collect();
        all.into_iter().filter_map(|key| self.replace(key, None)).collect()
    }

    /// A list returned an object. Lists are ordered by name, so objects with older versions may follow.
    pub(super) fn apply_listed(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        raise_to(&mut self.newest_listed, &entry.resource_version);
        let listed = key.clone();
        let change = self.upsert_from_server(key, entry);
        self.mark_listed(&listed);
        change
    }

    /// A list returned an object that is not readable. What is known of it stays.
    pub(super) fn skip_listed(&mut self, key: &ObjectKey, resource_version: &ResourceVersion) {
        raise_to(&mut self.newest_listed, resource_version);
        self.mark_listed(key);
    }

    fn mark_listed(&mut self, key: &ObjectKey) {
        if let Some(slot) = self.slots.get_mut(key) {
            (slot.list_generation, slot.listed_generation) = (self.list_generation, self.list_generation);
        }
    }

    /// The watch delivered an object. `is_next`: no event of the object was skipped before it. Returns `None` if nothing
    /// changed.
    pub(super) fn apply_watched(&mut self, key: ObjectKey, entry: Entry<V>, is_next: bool) -> Option<Change<V>> {
        raise_to(&mut self.newest_seen, &entry.resource_version);
        self.upsert_from_server(key, entry).map(|change| Change { is_next, ..change })
    }

    fn upsert_from_server(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        if let Some(slot) = self.slots.get_mut(&key) {
            let is_outdated = match slot.pending.as_deref() {
                Some(PendingWrite::Written(version)) => entry.resource_version.is_older_than(version),
                // A list that began after the operator's deletion and still contains the object is correct.
                Some(PendingWrite::Deleted(uid)) => *uid == entry.uid && slot.list_generation == self.list_generation,
                None => false,
            };
            if is_outdated {
                slot.list_generation = self.list_generation;
                return None;
            }
        }
        self.replace(key, Some((entry, None)))
    }

    /// The watch delivered the deletion of an object.
    pub(super) fn apply_watched_delete(
        &mut self,
        key: ObjectKey,
        resource_version: &ResourceVersion,
    ) -> Option<Change<V>> {
        raise_to(&mut self.newest_seen, resource_version);
        let slot = self.slots.get(&key)?;
        if let Some(PendingWrite::Written(version)) = slot.pending.as_deref()
            && resource_version.is_older_than(version)
        {
            return None;
        }
        self.replace(key, None)
    }

    /// The server accepted a write of the operator and responded with this object. `selected`: the watch selects its
    /// labels.
    pub(super) fn apply_own_write(&mut self, key: ObjectKey, entry: Entry<V>, selected: bool) -> Option<Change<V>> {
        let slot = self.slots.get(&key);
        if let Some(PendingWrite::Deleted(uid)) = slot.and_then(|slot| slot.pending.as_deref())
            && *uid == entry.uid
        {
            return None;
        }
        let is_known = slot.is_some_and(|slot| slot.entry.is_some());
        // An unknown object that is not newer than everything the watch has delivered has been deleted since: no event
        // would ever remove it from the store again. The same holds for an object that the watch does not select.
        let was_deleted = self.newest_seen.as_ref().is_some_and(|seen| !seen.is_older_than(&entry.resource_version));
        if !is_known && (was_deleted || !selected) {
            return None;
        }
        self.insert_own_write(key, entry)
    }

    /// A live read returned this object. Its version may be old, and the watch may not select its labels any more. The
    /// store keeps it until a write, the watch or a list changes it.
    pub(super) fn apply_live_read(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        self.insert_own_write(key, entry)
    }

    fn insert_own_write(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        if let Some(current) = self.get(&key)
            && !current.resource_version.is_older_than(&entry.resource_version)
        {
            // The watch was faster than the response.
            return None;
        }
        let pending = PendingWrite::Written(entry.resource_version.clone());
        self.replace(key, Some((entry, Some(pending))))
    }

    /// The server deleted the object at the operator's request, and no finalizer keeps it.
    pub(super) fn apply_own_delete(&mut self, key: ObjectKey, uid: &Uid) -> Option<Change<V>> {
        let list_generation = self.list_generation;
        let slot = self.slots.get_mut(&key)?;
        let entry = slot.entry.take_if(|entry| entry.uid == *uid)?;
        self.len -= 1;
        slot.pending = Some(Box::new(PendingWrite::Deleted(entry.uid)));
        slot.list_generation = list_generation;
        self.indexes.iter_mut().for_each(|index| index.remove(&key, &entry.value));
        Some(Change { key, old: Some(entry.value), new: None, is_next: false })
    }

    fn replace(&mut self, key: ObjectKey, new: Option<(Entry<V>, Option<PendingWrite>)>) -> Option<Change<V>> {
        let slot = self.slots.remove(&key);
        let listed_generation = slot.as_ref().map_or(0, |slot| slot.listed_generation);
        let old = slot.and_then(|slot| slot.entry);
        self.len = self.len + usize::from(new.is_some()) - usize::from(old.is_some());
        let Some((mut entry, pending)) = new else {
            let old = old?;
            self.indexes.iter_mut().for_each(|index| index.remove(&key, &old.value));
            return Some(Change { key, old: Some(old.value), new: None, is_next: false });
        };
        // The projection of the object did not change: only the version moves, and no change is reported.
        let same = old.as_ref().is_some_and(|old| old.uid == entry.uid && old.value == entry.value);
        if same && let Some(old) = &old {
            entry.value = old.value.clone();
        } else {
            if let Some(old) = &old {
                self.indexes.iter_mut().for_each(|index| index.remove(&key, &old.value));
            }
            self.indexes.iter_mut().for_each(|index| index.add(&key, &entry.value));
        }
        let value = entry.value.clone();
        let list_generation = self.list_generation;
        let slot = Slot { entry: Some(entry), pending: pending.map(Box::new), list_generation, listed_generation };
        self.slots.insert(key.clone(), slot);
        (!same).then(|| Change { key, old: old.map(|old| old.value), new: Some(value), is_next: false })
    }
}

#[derive(Debug)]
struct StoreIndex<V> {
    name: &'static str,
    values: IndexFn<V>,
    keys: HashMap<Box<str>, BTreeSet<ObjectKey>>,
}

impl<V> StoreIndex<V> {
    fn add(&mut self, key: &ObjectKey, object: &V) {
        for value in (self.values)(key, object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &ObjectKey, object: &V) {
        for value in (self.values)(key, object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

/// Ignores a version that is not a number: it is not comparable and would stay forever.
fn raise_to(highest: &mut Option<ResourceVersion>, version: &ResourceVersion) {
    let is_number = matches!(version, ResourceVersion::Number(_));
    if is_number && highest.as_ref().is_none_or(|highest| highest.is_older_than(version)) {
        *highest = Some(version.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::namespaced("ns", name)
    }

    fn entry(uid: &str, version: &str, value: &str) -> Entry<String> {
        Entry { uid: uid.into(), resource_version: version.into(), value: Arc::new(value.to_owned()) }
    }

    fn store() -> Store<String> {
        Store::new(&[("first letter", |_, value: &String| vec![value.chars().take(1).collect::<String>().into()])])
    }

    fn value(store: &Store<String>, name: &str) -> Option<String> {
        store.get(&key(name)).map(|entry| entry.value.to_string())
    }

    #[test]
    fn a_write_of_the_operator_wins_over_older_watch_events() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "8", "old"), true);
        assert!(store.apply_own_write(key("a"), entry("u", "10", "mine"), true).is_some());
        assert!(store.apply_watched(key("a"), entry("u", "9", "outdated"), true).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("mine"));
        // The watch delivers the write itself: nothing changes.
        assert!(store.apply_watched(key("a"), entry("u", "10", "mine"), true).is_none());
        assert!(store.apply_watched(key("a"), entry("u", "11", "theirs"), true).is_some());
        assert_eq!(value(&store, "a").as_deref(), Some("theirs"));
    }

    #[test]
    fn a_response_that_is_older_than_the_watch_changes_nothing() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "12", "newer"), true);
        assert!(store.apply_own_write(key("a"), entry("u", "11", "mine"), true).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("newer"));
    }

    /// The response to a delete says that finalizers keep the object, which were removed before the response arrived.
    #[test]
    fn a_response_that_arrives_after_the_deletion_does_not_restore_the_object() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "12", "x"), true);
        store.apply_watched_delete(key("a"), &"21".into());
        assert!(store.apply_own_write(key("a"), entry("u", "20", "marked"), true).is_none());
        assert_eq!(store.len(), 0);
        // An object that the operator creates after that is new.
        assert!(store.apply_own_write(key("a"), entry("v", "22", "mine"), true).is_some());
        // The response to a write that the operator sent before its deletion.
        store.apply_own_delete(key("a"), &"v".into());
        assert!(store.apply_own_write(key("a"), entry("v", "23", "late"), true).is_none());
        assert_eq!(store.len(), 0);
    }

    #[test]
    fn a_version_that_is_not_a_number_hides_no_write_of_the_operator() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "", "x"), true);
        store.apply_watched(key("b"), entry("v", "odd", "x"), true);
        assert!(store.apply_own_write(key("c"), entry("w", "5", "mine"), true).is_some());
    }

    #[test]
    fn a_list_in_progress_does_not_hide_an_object_that_the_operator_creates() {
        let mut store = store();
        store.begin_list();
        store.apply_listed(key("z"), entry("1", "50", "x"));
        assert!(store.apply_own_write(key("a"), entry("u", "40", "mine"), true).is_some());
        store.apply_listed(key("a"), entry("u", "40", "mine"));
        store.end_list();
        assert_eq!(store.len(), 2);
        // The list is complete: an older object that is not in it was deleted.
        assert!(store.apply_own_write(key("b"), entry("w", "45", "late"), true).is_none());
    }

    #[test]
    fn an_object_that_the_watch_does_not_select_is_kept_only_after_a_live_read() {
        let mut store = store();
        store.apply_watched(key("other"), entry("o", "9", "x"), true);
        assert!(store.apply_own_write(key("a"), entry("u", "10", "mine"), false).is_none());
        assert!(store.apply_live_read(key("a"), entry("u", "3", "lost its labels")).is_some());
        // A write that does not restore the labels does not hide it. After one that does, the watch delivers it again.
        assert!(store.apply_own_write(key("a"), entry("u", "11", "still without"), false).is_some());
        assert!(store.apply_own_write(key("a"), entry("u", "12", "labelled"), true).is_some());
        assert!(store.apply_watched(key("a"), entry("u", "12", "labelled"), true).is_none());
        // The next list removes an object that is still not selected.
        store.apply_live_read(key("b"), entry("v", "4", "without"));
        store.begin_list();
        store.apply_listed(key("a"), entry("u", "12", "labelled"));
        store.apply_listed(key("other"), entry("o", "9", "x"));
        assert_eq!(store.end_list().len(), 1);
        assert_eq!(value(&store, "b"), None);
    }

    #[test]
    fn an_old_deletion_does_not_remove_an_object_that_was_created_since() {
        let mut store = store();
        store.apply_own_write(key("a"), entry("second", "20", "mine"), true);
        assert!(store.apply_watched_delete(key("a"), &"15".into()).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("mine"));
        assert!(store.apply_watched_delete(key("a"), &"21".into()).is_some());
        assert_eq!(store.len(), 0);
    }

    #[test]
    fn a_deletion_by_the_operator_hides_the_object_until_the_watch_delivers_a_new_one() {
        let mut store = store();
        store.apply_watched(key("a"), entry("first", "5", "x"), true);
        assert!(store.apply_own_delete(key("a"), &"another".into()).is_none());
        assert!(store.apply_own_delete(key("a"), &"first".into()).is_some());
        assert!(store.apply_watched(key("a"), entry("first", "6", "x2"), true).is_none());
        assert_eq!(value(&store, "a"), None);
        assert!(store.apply_watched(key("a"), entry("second", "9", "new"), true).is_some());
        assert_eq!(value(&store, "a").as_deref(), Some("new"));
    }

    #[test]
    fn only_the_watch_shows_every_state_of_an_object() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "1", "x"), true);
        assert!(store.apply_watched(key("a"), entry("u", "2", "y"), true).unwrap().is_next);
        assert!(!store.apply_watched(key("a"), entry("u", "4", "z"), false).unwrap().is_next);
        assert!(!store.apply_own_write(key("a"), entry("u", "6", "mine"), true).unwrap().is_next);
        store.begin_list();
        assert!(!store.apply_listed(key("a"), entry("u", "8", "listed")).unwrap().is_next);
    }

    #[test]
    fn a_list_removes_missing_objects_but_not_those_written_meanwhile() {
        let mut store = store();
        store.begin_list();
        store.apply_watched(key("kept"), entry("1", "1", "a"), true);
        store.apply_watched(key("deleted"), entry("2", "2", "b"), true);
        assert!(store.end_list().is_empty());
        store.begin_list();
        store.apply_watched(key("kept"), entry("1", "1", "a"), true);
        store.apply_own_write(key("created"), entry("3", "7", "c"), true);
        let deleted = store.end_list();
        assert_eq!(deleted.len(), 1);
        assert_eq!(deleted[0].key, key("deleted"));
        assert_eq!(value(&store, "created").as_deref(), Some("c"));
    }

    /// Another client deleted it after the write and before the list, and no watch was open.
    #[test]
    fn a_list_removes_an_object_that_was_written_before_the_list_was_read() {
        let mut store = store();
        store.begin_list();
        store.apply_listed(key("gone"), entry("1", "1", "a"));
        store.apply_listed(key("listed"), entry("2", "2", "b"));
        store.end_list();
        store.begin_list();
        store.apply_own_write(key("gone"), entry("1", "5", "mine"), true);
        store.apply_own_write(key("listed"), entry("2", "6", "mine"), true);
        store.apply_listed(key("listed"), entry("2", "6", "mine"));
        store.apply_own_write(key("new"), entry("4", "9", "mine"), true);
        store.apply_listed(key("other"), entry("3", "8", "c"));
        let deleted = store.end_list();
        assert_eq!(deleted.iter().map(|change| change.key.name()).collect::<Vec<_>>(), ["gone"]);
        assert_eq!(value(&store, "listed").as_deref(), Some("mine"));
    }

    #[test]
    fn unchanged_values_are_not_reported_and_share_memory() {
        let mut store = store();
        store.apply_watched(key("a"), entry("u", "1", "x"), true);
        let before = store.get(&key("a")).unwrap().value.clone();
        assert!(store.apply_watched(key("a"), entry("u", "2", "x"), true).is_none());
        assert!(Arc::ptr_eq(&before, &store.get(&key("a")).unwrap().value));
        assert_eq!(store.get(&key("a")).unwrap().resource_version, "2".into());
        // A new object with the same content is a change.
        assert!(store.apply_watched(key("a"), entry("v", "3", "x"), true).is_some());
    }

    #[test]
    fn every_change_updates_the_length() {
        let mut store = store();
        let check = |store: &Store<String>, expected: usize| {
            assert_eq!((store.len(), store.iter().count()), (expected, expected));
        };
        store.apply_watched(key("a"), entry("1", "1", "x"), true);
        store.apply_watched(key("a"), entry("1", "2", "y"), true);
        store.apply_own_write(key("b"), entry("2", "3", "x"), true);
        store.apply_live_read(key("c"), entry("3", "3", "x"));
        check(&store, 3);
        store.apply_own_delete(key("b"), &"another".into());
        check(&store, 3);
        store.apply_own_delete(key("b"), &"2".into());
        store.apply_own_delete(key("b"), &"2".into());
        check(&store, 2);
        store.apply_watched_delete(key("b"), &"9".into());
        store.apply_watched_delete(key("a"), &"9".into());
        check(&store, 1);
        store.begin_list();
        store.apply_listed(key("d"), entry("4", "9", "x"));
        store.end_list();
        check(&store, 1);
        store.clear();
        check(&store, 0);
    }

    #[test]
    fn every_change_updates_the_indexes() {
        let mut store = store();
        let find = |store: &Store<String>, letter: &str| -> Vec<String> {
            store.keys_by("first letter", letter).map(|key| key.name().to_owned()).collect()
        };
        store.apply_watched(key("a"), entry("1", "1", "xa"), true);
        store.apply_own_write(key("b"), entry("2", "2", "xb"), true);
        assert_eq!(find(&store, "x"), ["a", "b"]);
        store.apply_watched(key("a"), entry("1", "3", "ya"), true);
        assert_eq!(find(&store, "x"), ["b"]);
        assert_eq!(find(&store, "y"), ["a"]);
        store.apply_own_delete(key("b"), &"2".into());
        assert!(find(&store, "x").is_empty());
        store.clear();
        assert!(find(&store, "y").is_empty());
    }
}
