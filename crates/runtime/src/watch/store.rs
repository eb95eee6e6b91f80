//! What a cache holds, without the watching: objects pruned to what is read, our own writes laid over them until the
//! watch has caught up, and indexes over both.
//!
//! A list replaces the content by mark and sweep, so a relist never needs memory for two copies. An own write is kept
//! against older news of the watch by comparing resource versions, which Kubernetes defines to be ordered integers.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use vitivirt_api::ObjectKey;

use super::object_id::{ResourceVersion, Uid};

/// Computes the values under which an object can be found in an index.
pub type IndexFn<V> = fn(&ObjectKey, &V) -> Vec<Box<str>>;

/// One object: identity and version as the server told them, and what we kept of the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry<V> {
    pub uid: Uid,
    pub resource_version: ResourceVersion,
    pub value: Arc<V>,
}

/// What a change did to a key. At least one side is present.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<V> {
    pub key: ObjectKey,
    pub old: Option<Arc<V>>,
    pub new: Option<Arc<V>>,
}

#[derive(Debug)]
struct Slot<V> {
    /// `None`: deleted by ourselves, and the watch does not know yet.
    entry: Option<Entry<V>>,
    /// Set while the watch has not yet shown what we wrote.
    own: Option<Box<Own>>,
    round: u32,
}

/// Boxed, because hardly any object has one at a time.
#[derive(Debug)]
enum Own {
    Written(ResourceVersion),
    Deleted(Uid),
}

#[derive(Debug)]
pub(super) struct Store<V> {
    slots: HashMap<ObjectKey, Slot<V>>,
    indexes: Vec<Index<V>>,
    /// Counts lists; a slot of an older round was not in the last list.
    round: u32,
    /// The highest version that the watch has shown: of everything up to here, the store knows what became of it.
    shown: Option<ResourceVersion>,
    /// The highest version in the list that is under way. It counts when the list is complete.
    listed: Option<ResourceVersion>,
}

impl<V: PartialEq> Store<V> {
    pub(super) fn new(indexes: &[(&'static str, IndexFn<V>)]) -> Self {
        Self {
            slots: HashMap::new(),
            indexes: indexes.iter().map(|(name, of)| Index { name, of: *of, keys: HashMap::new() }).collect(),
            round: 0,
            shown: None,
            listed: None,
        }
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<&Entry<V>> {
        self.slots.get(key)?.entry.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &Entry<V>)> {
        self.slots.iter().filter_map(|(key, slot)| Some((key, slot.entry.as_ref()?)))
    }

    pub(super) fn len(&self) -> usize {
        self.slots.values().filter(|slot| slot.entry.is_some()).count()
    }

    pub(super) fn keys_by(&self, index: &str, value: &str) -> impl Iterator<Item = &ObjectKey> {
        let found = self.indexes.iter().find(|have| have.name == index).and_then(|index| index.keys.get(value));
        found.into_iter().flatten()
    }

    /// A list begins.
    pub(super) fn begin_list(&mut self) {
        self.round += 1;
        self.listed = None;
    }

    /// The list is complete: what was not in it is gone, except what we wrote after it had begun.
    pub(super) fn end_list(&mut self) -> Vec<Change<V>> {
        if let Some(listed) = &self.listed {
            raise(&mut self.shown, listed);
        }
        let gone: Vec<ObjectKey> =
            self.slots.iter().filter(|(_, slot)| slot.round < self.round).map(|(key, _)| key.clone()).collect();
        gone.into_iter().filter_map(|key| self.replace(key, None)).collect()
    }

    /// The kind itself is gone, and everything of it.
    pub(super) fn clear(&mut self) -> Vec<Change<V>> {
        self.shown = None;
        let all: Vec<ObjectKey> = self.slots.keys().cloned().collect();
        all.into_iter().filter_map(|key| self.replace(key, None)).collect()
    }

    /// A list shows an object. It does so in the order of names: versions before it may be still to come.
    pub(super) fn listed(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        raise(&mut self.listed, &entry.resource_version);
        self.shows(key, entry)
    }

    /// The watch shows an object. Nothing is returned when it shows nothing new.
    pub(super) fn seen(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        raise(&mut self.shown, &entry.resource_version);
        self.shows(key, entry)
    }

    fn shows(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        if let Some(slot) = self.slots.get_mut(&key) {
            let older_than_ours = match slot.own.as_deref() {
                Some(Own::Written(version)) => entry.resource_version.is_older_than(version),
                // A list that began after our deletion and still names the object is right.
                Some(Own::Deleted(uid)) => *uid == entry.uid && slot.round == self.round,
                None => false,
            };
            if older_than_ours {
                slot.round = self.round;
                return None;
            }
        }
        self.replace(key, Some((entry, None)))
    }

    /// The watch shows that an object was deleted.
    pub(super) fn seen_deleted(&mut self, key: ObjectKey, resource_version: &ResourceVersion) -> Option<Change<V>> {
        raise(&mut self.shown, resource_version);
        let slot = self.slots.get(&key)?;
        if let Some(Own::Written(version)) = slot.own.as_deref()
            && resource_version.is_older_than(version)
        {
            return None;
        }
        self.replace(key, None)
    }

    /// The server accepted our write and answered with this object, which is `selected` by what is followed or not.
    pub(super) fn wrote(&mut self, key: ObjectKey, entry: Entry<V>, selected: bool) -> Option<Change<V>> {
        let slot = self.slots.get(&key);
        if let Some(Own::Deleted(uid)) = slot.and_then(|slot| slot.own.as_deref())
            && *uid == entry.uid
        {
            return None;
        }
        let known = slot.is_some_and(|slot| slot.entry.is_some());
        // An object that we do not know and that is not newer than everything the watch has shown was here and is gone:
        // no news would ever take it away again. The same holds for one that the watch does not follow.
        let unknown = self.shown.as_ref().is_some_and(|shown| !shown.is_older_than(&entry.resource_version));
        if !known && (unknown || !selected) {
            return None;
        }
        self.put(key, entry)
    }

    /// A live read showed this object. Its version may be an old one, and it may have left the selection: it is kept
    /// until a write, the watch or a list says otherwise.
    pub(super) fn found(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        self.put(key, entry)
    }

    fn put(&mut self, key: ObjectKey, entry: Entry<V>) -> Option<Change<V>> {
        if let Some(current) = self.get(&key)
            && !current.resource_version.is_older_than(&entry.resource_version)
        {
            // The watch was faster than the answer.
            return None;
        }
        let own = Own::Written(entry.resource_version.clone());
        self.replace(key, Some((entry, Some(own))))
    }

    /// The server deleted the object at our request, for good.
    pub(super) fn deleted(&mut self, key: ObjectKey, uid: &Uid) -> Option<Change<V>> {
        let round = self.round;
        let slot = self.slots.get_mut(&key)?;
        let entry = slot.entry.take_if(|entry| entry.uid == *uid)?;
        slot.own = Some(Box::new(Own::Deleted(entry.uid)));
        slot.round = round;
        self.indexes.iter_mut().for_each(|index| index.remove(&key, &entry.value));
        Some(Change { key, old: Some(entry.value), new: None })
    }

    fn replace(&mut self, key: ObjectKey, new: Option<(Entry<V>, Option<Own>)>) -> Option<Change<V>> {
        let old = self.slots.remove(&key).and_then(|slot| slot.entry);
        let Some((mut entry, own)) = new else {
            let old = old?;
            self.indexes.iter_mut().for_each(|index| index.remove(&key, &old.value));
            return Some(Change { key, old: Some(old.value), new: None });
        };
        // Same object with nothing new that is kept: only the version moves, nobody is told.
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
        self.slots.insert(key.clone(), Slot { entry: Some(entry), own: own.map(Box::new), round: self.round });
        (!same).then(|| Change { key, old: old.map(|old| old.value), new: Some(value) })
    }
}

#[derive(Debug)]
struct Index<V> {
    name: &'static str,
    of: IndexFn<V>,
    keys: HashMap<Box<str>, BTreeSet<ObjectKey>>,
}

impl<V> Index<V> {
    fn add(&mut self, key: &ObjectKey, object: &V) {
        for value in (self.of)(key, object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &ObjectKey, object: &V) {
        for value in (self.of)(key, object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

/// What is no number cannot be compared with anything, and would stay for ever.
fn raise(highest: &mut Option<ResourceVersion>, version: &ResourceVersion) {
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
    fn an_own_write_stays_until_the_watch_has_caught_up() {
        let mut store = store();
        store.seen(key("a"), entry("u", "8", "old"));
        assert!(store.wrote(key("a"), entry("u", "10", "mine"), true).is_some());
        assert!(store.seen(key("a"), entry("u", "9", "late news")).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("mine"));
        // The write itself comes back: no news for anybody.
        assert!(store.seen(key("a"), entry("u", "10", "mine")).is_none());
        assert!(store.seen(key("a"), entry("u", "11", "theirs")).is_some());
        assert_eq!(value(&store, "a").as_deref(), Some("theirs"));
    }

    #[test]
    fn an_answer_that_comes_after_the_watch_does_not_turn_time_back() {
        let mut store = store();
        store.seen(key("a"), entry("u", "12", "newer"));
        assert!(store.wrote(key("a"), entry("u", "11", "mine"), true).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("newer"));
    }

    /// The answer to a delete says that finalizers keep the object; before it was read, they were gone.
    #[test]
    fn an_answer_that_comes_after_the_end_does_not_bring_the_object_back() {
        let mut store = store();
        store.seen(key("a"), entry("u", "12", "x"));
        store.seen_deleted(key("a"), &"21".into());
        assert!(store.wrote(key("a"), entry("u", "20", "marked"), true).is_none());
        assert_eq!(store.len(), 0);
        // What we make after that is as new as ever.
        assert!(store.wrote(key("a"), entry("v", "22", "mine"), true).is_some());
        // An answer to a write before our own deletion.
        store.deleted(key("a"), &"v".into());
        assert!(store.wrote(key("a"), entry("v", "23", "late"), true).is_none());
        assert_eq!(store.len(), 0);
    }

    #[test]
    fn a_version_that_is_no_number_hides_nothing() {
        let mut store = store();
        store.seen(key("a"), entry("u", "", "x"));
        store.seen(key("b"), entry("v", "odd", "x"));
        assert!(store.wrote(key("c"), entry("w", "5", "mine"), true).is_some());
    }

    #[test]
    fn a_list_that_is_under_way_does_not_hide_what_we_make() {
        let mut store = store();
        store.begin_list();
        store.listed(key("z"), entry("1", "50", "x"));
        assert!(store.wrote(key("a"), entry("u", "40", "mine"), true).is_some());
        store.listed(key("a"), entry("u", "40", "mine"));
        store.end_list();
        assert_eq!(store.len(), 2);
        // It is complete: what it does not name, and is older, is gone.
        assert!(store.wrote(key("b"), entry("w", "45", "late"), true).is_none());
    }

    #[test]
    fn what_is_not_followed_is_shown_only_when_it_was_found() {
        let mut store = store();
        store.seen(key("other"), entry("o", "9", "x"));
        assert!(store.wrote(key("a"), entry("u", "10", "mine"), false).is_none());
        assert!(store.found(key("a"), entry("u", "3", "lost its labels")).is_some());
        // A write that does not bring the labels back does not hide it; one that does makes it one of ours again.
        assert!(store.wrote(key("a"), entry("u", "11", "still without"), false).is_some());
        assert!(store.wrote(key("a"), entry("u", "12", "labelled"), true).is_some());
        assert!(store.seen(key("a"), entry("u", "12", "labelled")).is_none());
        // One that stays outside goes with the next list.
        store.found(key("b"), entry("v", "4", "without"));
        store.begin_list();
        store.listed(key("a"), entry("u", "12", "labelled"));
        store.listed(key("other"), entry("o", "9", "x"));
        assert_eq!(store.end_list().len(), 1);
        assert_eq!(value(&store, "b"), None);
    }

    #[test]
    fn an_old_deletion_does_not_remove_what_we_made_since() {
        let mut store = store();
        store.wrote(key("a"), entry("second", "20", "mine"), true);
        assert!(store.seen_deleted(key("a"), &"15".into()).is_none());
        assert_eq!(value(&store, "a").as_deref(), Some("mine"));
        assert!(store.seen_deleted(key("a"), &"21".into()).is_some());
        assert_eq!(store.len(), 0);
    }

    #[test]
    fn an_own_deletion_hides_the_object_until_the_watch_agrees() {
        let mut store = store();
        store.seen(key("a"), entry("first", "5", "x"));
        assert!(store.deleted(key("a"), &"somebody else".into()).is_none());
        assert!(store.deleted(key("a"), &"first".into()).is_some());
        assert!(store.seen(key("a"), entry("first", "6", "x2")).is_none());
        assert_eq!(value(&store, "a"), None);
        assert!(store.seen(key("a"), entry("second", "9", "new")).is_some());
        assert_eq!(value(&store, "a").as_deref(), Some("new"));
    }

    #[test]
    fn a_list_removes_what_it_does_not_name_but_not_what_we_wrote_meanwhile() {
        let mut store = store();
        store.begin_list();
        store.seen(key("stays"), entry("1", "1", "a"));
        store.seen(key("goes"), entry("2", "2", "b"));
        assert!(store.end_list().is_empty());
        store.begin_list();
        store.seen(key("stays"), entry("1", "1", "a"));
        store.wrote(key("made"), entry("3", "7", "c"), true);
        let gone = store.end_list();
        assert_eq!(gone.len(), 1);
        assert_eq!(gone[0].key, key("goes"));
        assert_eq!(value(&store, "made").as_deref(), Some("c"));
    }

    #[test]
    fn unchanged_values_are_not_news_and_share_memory() {
        let mut store = store();
        store.seen(key("a"), entry("u", "1", "x"));
        let before = store.get(&key("a")).unwrap().value.clone();
        assert!(store.seen(key("a"), entry("u", "2", "x")).is_none());
        assert!(Arc::ptr_eq(&before, &store.get(&key("a")).unwrap().value));
        assert_eq!(store.get(&key("a")).unwrap().resource_version, "2".into());
        // A new object of the same content is news.
        assert!(store.seen(key("a"), entry("v", "3", "x")).is_some());
    }

    #[test]
    fn indexes_follow_every_change() {
        let mut store = store();
        let find = |store: &Store<String>, letter: &str| -> Vec<String> {
            store.keys_by("first letter", letter).map(|key| key.name().to_owned()).collect()
        };
        store.seen(key("a"), entry("1", "1", "xa"));
        store.wrote(key("b"), entry("2", "2", "xb"), true);
        assert_eq!(find(&store, "x"), ["a", "b"]);
        store.seen(key("a"), entry("1", "3", "ya"));
        assert_eq!(find(&store, "x"), ["b"]);
        assert_eq!(find(&store, "y"), ["a"]);
        store.deleted(key("b"), &"2".into());
        assert!(find(&store, "x").is_empty());
        store.clear();
        assert!(find(&store, "y").is_empty());
    }
}
