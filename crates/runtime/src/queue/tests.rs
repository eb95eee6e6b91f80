//! The rules of the queue, one by one and under random use.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use proptest::prelude::*;
use tokio::time::Instant;

use super::{Queue, QueueKey, QueueState, REQUEUE_DROPPED_AFTER};

/// The tenant of `a/1` is `a`. A key without a slash belongs to a tenant of no name.
impl QueueKey for &'static str {
    fn tenant(&self) -> &str {
        self.split_once('/').map_or("", |(tenant, _)| tenant)
    }
}

impl QueueKey for usize {
    fn tenant(&self) -> &'static str {
        ""
    }
}

impl QueueKey for u8 {
    fn tenant(&self) -> &'static str {
        ""
    }
}

#[test]
fn tenants_take_turns() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    for key in ["a/1", "a/2", "a/3", "a/4", "b/1", "c/1", "b/2"] {
        queue.add(key, now);
    }
    let taken: Vec<_> = std::iter::from_fn(|| queue.take(now)).collect();
    assert_eq!(taken, ["a/1", "b/1", "c/1", "a/2", "b/2", "a/3", "a/4"]);
}

#[test]
fn a_tenant_at_its_limit_waits_and_the_others_do_not() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    queue.limit_tenants(2);
    for key in ["a/1", "a/2", "a/3", "b/1"] {
        queue.add(key, now);
    }
    assert_eq!([queue.take(now), queue.take(now), queue.take(now)], [Some("a/1"), Some("b/1"), Some("a/2")]);
    assert_eq!((queue.take(now), queue.depth()), (None, 1));
    queue.done(&"b/1", now);
    assert_eq!(queue.take(now), None);
    queue.add("a/1", now);
    queue.done(&"a/1", now);
    assert_eq!([queue.take(now), queue.take(now)], [Some("a/3"), None]);
    queue.done(&"a/2", now);
    assert_eq!((queue.take(now), queue.depth()), (Some("a/1"), 0));
}

#[test]
fn keys_are_taken_once_in_the_order_in_which_they_were_added() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    for key in ["a", "b", "a", "c", "b"] {
        queue.add(key, now);
    }
    assert_eq!(queue.depth(), 3);
    assert_eq!(
        [queue.take(now), queue.take(now), queue.take(now), queue.take(now)],
        [Some("a"), Some("b"), Some("c"), None]
    );
}

#[test]
fn the_time_that_a_key_waits_for_a_worker_is_known() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.add("a", now);
    queue.add("a", after(1));
    queue.add_at("b", after(2));
    assert_eq!((queue.take(after(3)), queue.take(after(4))), (Some("a"), Some("b")));
    // A delayed key waits from the time at which a worker could have taken it.
    assert_eq!((queue.waited(&"a"), queue.waited(&"b")), (Duration::from_secs(3), Duration::from_secs(1)));
    assert_eq!((queue.take_added(), queue.take_added()), (2, 0));
}

#[test]
fn a_key_that_is_added_while_it_runs_goes_behind_all_waiting_keys() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    queue.add("selfish", now);
    assert_eq!(queue.take(now), Some("selfish"));
    queue.add("selfish", now);
    queue.add("b", now);
    assert_eq!(queue.take(now), Some("b"));
    queue.add("c", now);
    queue.done(&"selfish", now);
    assert_eq!(queue.take(now), Some("c"));
    assert_eq!(queue.take(now), Some("selfish"));
}

#[test]
fn a_key_has_one_timer_with_the_earliest_of_its_times() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.add_at("a", after(10));
    queue.add_at("a", after(5));
    queue.add_at("a", after(20));
    assert_eq!(queue.next_due(), Some(after(5)));
    assert_eq!(queue.take(after(4)), None);
    assert_eq!(queue.take(after(5)), Some("a"));
    queue.done(&"a", now);
    assert_eq!(queue.take(after(100)), None);
}

#[test]
fn taking_a_key_removes_its_timer() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    queue.add_at("a", now + Duration::from_secs(10));
    queue.add("a", now);
    assert_eq!(queue.take(now), Some("a"));
    assert_eq!(queue.next_due(), None);
    // A timer that is set while the key runs is kept.
    queue.add_at("a", now + Duration::from_secs(3));
    queue.done(&"a", now);
    assert_eq!(queue.take(now + Duration::from_secs(3)), Some("a"));
}

#[test]
fn events_wait_for_a_held_key_and_an_urgent_change_does_not() {
    let (mut queue, now) = (QueueState::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.add("a", now);
    assert_eq!(queue.take(now), Some("a"));
    // Events while it runs, before and after the failure is known.
    queue.add("a", now);
    queue.add_at("a", after(1));
    queue.hold("a", after(10));
    queue.done(&"a", now);
    queue.add("a", after(2));
    queue.add_at("a", after(3));
    assert_eq!((queue.take(after(9)), queue.next_due()), (None, Some(after(10))));
    queue.add_urgent("a", after(9));
    assert_eq!(queue.take(after(9)), Some("a"));
    // It failed again, and its time did not change. A second urgent change arrived meanwhile.
    queue.add_urgent("a", after(9));
    queue.hold("a", after(10));
    queue.done(&"a", after(9));
    assert_eq!(queue.take(after(9)), Some("a"));
    queue.release(&"a");
    queue.done(&"a", after(9));
    queue.add("a", after(9));
    assert_eq!(queue.take(after(9)), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn a_waiting_worker_gets_delayed_keys_when_they_are_due() {
    let queue: Queue<&str> = Queue::default();
    let begin = Instant::now();
    let waiter = tokio::spawn({
        let queue = queue.clone();
        async move {
            let mut order = Vec::new();
            for _ in 0..3 {
                let item = queue.next().await;
                order.push((*item, begin.elapsed().as_secs()));
                item.done();
            }
            order
        }
    });
    tokio::task::yield_now().await;
    queue.add_after("late", Duration::from_secs(60));
    queue.add_after("soon", Duration::from_secs(5));
    queue.add("now");
    assert_eq!(waiter.await.unwrap(), [("now", 0), ("soon", 5), ("late", 60)]);
}

#[tokio::test(start_paused = true)]
async fn a_burst_within_the_window_is_taken_once() {
    let queue = Queue::new(Duration::from_millis(500));
    let begin = Instant::now();
    for _ in 0..10 {
        queue.add_coalesced("a");
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    let item = queue.next().await;
    assert_eq!((*item, begin.elapsed()), ("a", Duration::from_millis(500)));
    item.done();
    tokio::select! {
        _ = queue.next() => panic!("the burst was taken twice"),
        () = tokio::time::sleep(Duration::from_secs(5)) => {}
    }
    // `add` does not wait for the window.
    queue.add_coalesced("a");
    queue.add("a");
    let urgent = Instant::now();
    queue.next().await.done();
    assert_eq!(urgent.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropping_a_work_item_requeues_its_key() {
    let queue = Queue::default();
    queue.add("a");
    drop(queue.next().await);
    let begin = Instant::now();
    tokio::time::timeout(REQUEUE_DROPPED_AFTER * 2, queue.next()).await.expect("it was not requeued").done();
    assert_eq!(begin.elapsed(), REQUEUE_DROPPED_AFTER);
    tokio::select! {
        _ = queue.next() => panic!("it was requeued after it was done"),
        () = tokio::time::sleep(Duration::from_secs(60)) => {}
    }
}

#[derive(Clone, Debug)]
enum Op {
    Add(u8),
    Urgent(u8),
    AddAfter(u8, u64),
    Take,
    /// Ends the n-th running key.
    Done(usize),
    /// Ends the n-th running key, and holds it for so many seconds.
    Hold(usize, u64),
    /// Advances the clock by so many seconds.
    Advance(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..12_u8).prop_map(Op::Add),
        1 => (0..12_u8).prop_map(Op::Urgent),
        2 => (0..12_u8, 0..50_u64).prop_map(|(key, after)| Op::AddAfter(key, after)),
        4 => Just(Op::Take),
        3 => (0..8_usize).prop_map(Op::Done),
        2 => (0..8_usize, 1..50_u64).prop_map(|(n, seconds)| Op::Hold(n, seconds)),
        1 => (1..30_u64).prop_map(Op::Advance),
    ]
}

proptest! {
    /// Compared with a simple model: no key has two workers, no request is lost, no key is taken without a request or
    /// while it is held, and no key is overtaken by many that were added later.
    #[test]
    fn the_queue_behaves_like_a_simple_model(ops in prop::collection::vec(op(), 1..300)) {
        let mut now = Instant::now();
        let mut queue = QueueState::default();
        let mut running: Vec<u8> = Vec::new();
        // The keys that were added since they were last taken: those that are due (true: by an urgent change), and
        // those that are delayed.
        let mut requested: HashMap<u8, bool> = HashMap::new();
        let mut later: HashMap<u8, Instant> = HashMap::new();
        let mut held: HashMap<u8, Instant> = HashMap::new();
        // How many other keys were taken while this key was waiting.
        let mut overtaken: HashMap<u8, usize> = HashMap::new();
        for op in ops {
            match op {
                Op::Add(key) => {
                    queue.add(key, now);
                    let waits = held.get(&key).copied().filter(|until| *until > now && !running.contains(&key));
                    match waits {
                        Some(_) if requested.contains_key(&key) => {}
                        Some(until) => drop(later.entry(key).or_insert(until)),
                        None => drop(requested.entry(key).or_insert(false)),
                    }
                }
                Op::Urgent(key) => {
                    queue.add_urgent(key, now);
                    requested.insert(key, true);
                }
                Op::AddAfter(key, after) => {
                    let at = now + Duration::from_secs(after);
                    queue.add_at(key, at);
                    let at = held.get(&key).map_or(at, |until| at.max(*until));
                    // A waiting key is taken before any timer is due.
                    if !requested.contains_key(&key) || running.contains(&key) {
                        later.entry(key).and_modify(|have| *have = (*have).min(at)).or_insert(at);
                    }
                }
                Op::Advance(seconds) => now += Duration::from_secs(seconds),
                Op::Done(n) => {
                    if !running.is_empty() {
                        let key = running.remove(n % running.len());
                        queue.release(&key);
                        queue.done(&key, now);
                        held.remove(&key);
                    }
                }
                Op::Hold(n, seconds) => {
                    if !running.is_empty() {
                        let (key, until) = (running.remove(n % running.len()), now + Duration::from_secs(seconds));
                        queue.hold(key, until);
                        queue.done(&key, now);
                        held.insert(key, until);
                        later.insert(key, until);
                        if requested.get(&key) == Some(&false) {
                            requested.remove(&key);
                        }
                    }
                }
                Op::Take => {
                    later.retain(|key, at| {
                        let due = *at <= now;
                        if due {
                            requested.entry(*key).or_insert(false);
                        }
                        !due
                    });
                    let taken = queue.take(now);
                    let free: Vec<u8> = requested.keys().filter(|key| !running.contains(key)).copied().collect();
                    match taken {
                        Some(key) => {
                            prop_assert!(!running.contains(&key), "two workers on {key}");
                            let urgent = requested.remove(&key);
                            prop_assert!(urgent.is_some(), "{key} was not requested");
                            let is_held = held.get(&key).is_some_and(|until| *until > now);
                            prop_assert!(!is_held || urgent == Some(true), "{key} is held");
                            later.remove(&key);
                            overtaken.remove(&key);
                            running.push(key);
                            for other in free.into_iter().filter(|other| *other != key) {
                                let count = overtaken.entry(other).or_insert(0);
                                *count += 1;
                                // Each other key can overtake it once.
                                prop_assert!(*count <= 12, "{other} starves");
                            }
                        }
                        None => prop_assert!(free.is_empty(), "{free:?} were lost"),
                    }
                }
            }
        }
        // In the end every requested key is taken.
        for key in running.drain(..) {
            queue.done(&key, now);
        }
        now += Duration::from_secs(100);
        let mut requested: HashSet<u8> = requested.into_keys().chain(later.into_keys()).collect();
        while let Some(key) = queue.take(now) {
            prop_assert!(requested.remove(&key), "{key} was not requested");
            queue.done(&key, now);
        }
        prop_assert!(requested.is_empty(), "{requested:?} were lost");
        prop_assert_eq!(queue.next_due(), None);
    }
}

/// On real threads: no key has two workers, and the last request of every key is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_workers_on_threads_share_one_queue() {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };
    const KEYS: usize = 7;
    let queue: Queue<usize> = Queue::default();
    let busy: Arc<Vec<AtomicBool>> = Arc::new((0..KEYS).map(|_| AtomicBool::new(false)).collect());
    let requested: Arc<Vec<AtomicU64>> = Arc::new((0..KEYS).map(|_| AtomicU64::new(0)).collect());
    let served: Arc<Vec<AtomicU64>> = Arc::new((0..KEYS).map(|_| AtomicU64::new(0)).collect());
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (queue, busy, requested, served) = (queue.clone(), busy.clone(), requested.clone(), served.clone());
            tokio::spawn(async move {
                loop {
                    let item = queue.next().await;
                    let key = *item;
                    assert!(!busy[key].swap(true, Ordering::SeqCst), "two workers on {key}");
                    let seen = requested[key].load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    served[key].store(seen, Ordering::SeqCst);
                    busy[key].store(false, Ordering::SeqCst);
                    item.done();
                }
            })
        })
        .collect();
    for n in 0..20_000 {
        let key = n % KEYS;
        requested[key].fetch_add(1, Ordering::SeqCst);
        if n % 3 == 0 {
            queue.add_after(key, Duration::from_micros(50));
        } else {
            queue.add(key);
        }
        if n % 64 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let all_served = async {
        while (0..KEYS).any(|key| served[key].load(Ordering::SeqCst) != requested[key].load(Ordering::SeqCst)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all_served).await.expect("a request was lost");
    for worker in workers {
        assert!(!worker.is_finished());
        worker.abort();
    }
}
