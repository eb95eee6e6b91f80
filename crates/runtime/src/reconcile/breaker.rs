//! Limits the writes that hang. Pure: the caller supplies the clock.
//!
//! A server behind the API server, such as a webhook, may not respond at all. Each write to it then occupies a reconcile
//! until its deadline. After three such writes of a kind in a row only a few more are sent at a time, and the others
//! fail at once. The first response ends this.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use vitivirt_api::{Failure, Write, reason};

/// The writes in a row without a response after which a kind, or a kind in one namespace, is limited.
const LIMIT_AFTER: u32 = 3;
/// The writes of a limited kind that are sent at the same time, at most one of them in each namespace.
const PROBES: usize = 5;
/// Those of them in namespaces in which the last write had no response. The others are for namespaces that may work.
const FAILING_PROBES: usize = 3;
/// A kind is limited as a whole only if writes have no response in so many namespaces.
const FAILING_NAMESPACES: usize = 2;
/// After this time without another one, writes without a response do not count. It is longer than the time between two
/// attempts of a write.
const FORGET_AFTER: Duration = Duration::from_secs(120);
/// When a write that was not sent may be tried again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// The verb, the group and the plural of the writes.
type KindOfWrite = (&'static str, String, String);

#[derive(Default)]
pub(super) struct Breaker(Mutex<HashMap<KindOfWrite, LimitedKind>>);

/// Exists only for a kind with writes that had no response.
#[derive(Default)]
struct LimitedKind {
    timeouts: Timeouts,
    namespaces: HashMap<String, LimitedNamespace>,
}

#[derive(Default)]
struct LimitedNamespace {
    timeouts: Timeouts,
    is_probed: bool,
}

/// Writes in a row without a response.
#[derive(Default)]
struct Timeouts {
    count: u32,
    /// The first and the last one.
    period: Option<(Instant, Instant)>,
}

impl Timeouts {
    fn add(&mut self, now: Instant) {
        if self.is_empty(now) {
            *self = Self::default();
        }
        self.count = self.count.saturating_add(1);
        self.period = Some((self.period.map_or(now, |(first, _)| first), now));
    }

    fn is_empty(&self, now: Instant) -> bool {
        self.period.is_none_or(|(_, last)| now > last + FORGET_AFTER)
    }

    /// Since when they limit further writes.
    fn limit_since(&self, now: Instant) -> Option<Instant> {
        let (first, _) = self.period.filter(|_| self.count >= LIMIT_AFTER && !self.is_empty(now))?;
        Some(first)
    }
}

/// The permission to send one write.
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    kind: KindOfWrite,
    namespace: String,
    is_probe: bool,
}

/// A write that is not sent, because others of its kind had no response.
#[derive(Debug, PartialEq)]
pub(super) struct Rejected {
    pub(super) failure: Failure,
    pub(super) retry_after: Duration,
}

impl Breaker {
    pub(super) fn permit(&self, write: &Write, now: Instant) -> Result<Permit<'_>, Rejected> {
        let (verb, target) = (write.verb(), write.target());
        let kind = (verb, target.resource.group.clone(), target.resource.plural.clone());
        let namespace = target.key.namespace().unwrap_or_default().to_owned();
        let mut states = self.0.lock();
        let mut is_probe = false;
        if let Some(state) = states.get_mut(&kind)
            && let Some(since) = state.limited_since(&namespace, now)
        {
            if !state.may_probe(&namespace, now) {
                let message = format!(
                    "cannot {verb} {target}: the API server did not respond to other requests to {verb} {}",
                    kind.2
                );
                let mut failure = Failure::transient(reason::API_UNAVAILABLE, message);
                failure.failing_for = now - since;
                return Err(Rejected { failure, retry_after: RETRY_AFTER });
            }
            state.namespaces.entry(namespace.clone()).or_default().is_probed = true;
            is_probe = true;
        }
        Ok(Permit { breaker: self, kind, namespace, is_probe })
    }
}

impl LimitedKind {
    /// Since when writes in this namespace are limited.
    fn limited_since(&self, namespace: &str, now: Instant) -> Option<Instant> {
        let own = self.namespaces.get(namespace).and_then(|namespace| namespace.timeouts.limit_since(now));
        let failing = self.namespaces.values().filter(|namespace| namespace.is_failing(now)).count();
        own.or_else(|| self.timeouts.limit_since(now).filter(|_| failing >= FAILING_NAMESPACES))
    }

    fn may_probe(&self, namespace: &str, now: Instant) -> bool {
        let probed = || self.namespaces.values().filter(|namespace| namespace.is_probed);
        let own = self.namespaces.get(namespace);
        !own.is_some_and(|own| own.is_probed)
            && probed().count() < PROBES
            && (!own.is_some_and(|own| own.is_failing(now))
                || probed().filter(|other| other.is_failing(now)).count() < FAILING_PROBES)
    }
}

impl LimitedNamespace {
    fn is_failing(&self, now: Instant) -> bool {
        !self.timeouts.is_empty(now)
    }
}

impl Permit<'_> {
    /// The write has ended. `failure` is its error.
    pub(super) fn finish(self, failure: Option<&Failure>, now: Instant) {
        let mut states = self.breaker.0.lock();
        match failure.map(|failure| failure.reason) {
            Some(reason::DEADLINE_EXCEEDED) => {
                let state = states.entry(self.kind.clone()).or_default();
                state.timeouts.add(now);
                state.namespaces.retain(|_, namespace| namespace.is_probed || namespace.is_failing(now));
                state.namespaces.entry(self.namespace.clone()).or_default().timeouts.add(now);
                if state.timeouts.count == LIMIT_AFTER {
                    let (verb, _, resource) = &self.kind;
                    tracing::warn!(verb, resource, "requests have no response; only a few are sent at a time");
                }
            }
            // It was not sent.
            Some(reason::NOT_LEADING) => {}
            // Any other result is a response.
            _ => {
                if let Some(state) = states.get_mut(&self.kind) {
                    state.timeouts = Timeouts::default();
                    if let Some(namespace) = state.namespaces.get_mut(&self.namespace) {
                        namespace.timeouts = Timeouts::default();
                    }
                }
            }
        }
        drop(states);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut states = self.breaker.0.lock();
        let Some(state) = states.get_mut(&self.kind) else { return };
        if let Some(namespace) = state.namespaces.get_mut(&self.namespace) {
            namespace.is_probed &= !self.is_probe;
            if !namespace.is_probed && namespace.timeouts.count == 0 {
                state.namespaces.remove(&self.namespace);
            }
        }
        if state.namespaces.is_empty() && state.timeouts.count == 0 {
            states.remove(&self.kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Secret};
    use serde_json::json;
    use vitivirt_api::{ObjectKey, Target};

    use super::*;

    fn create(namespace: &str) -> Write {
        let target = Target::of_kind::<Secret>(ObjectKey::namespaced(namespace, "a"));
        Write::Create { target, body: json!({}).into() }
    }

    fn time_out(breaker: &Breaker, namespace: &str, now: Instant) {
        let failure = Failure::transient(reason::DEADLINE_EXCEEDED, "no response");
        breaker.permit(&create(namespace), now).ok().unwrap().finish(Some(&failure), now);
    }

    #[test]
    fn after_three_writes_without_a_response_one_write_of_the_namespace_is_sent_at_a_time() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        (0..3).for_each(|_| time_out(&breaker, "a", now));
        let later = now + Duration::from_secs(40);
        let probe = breaker.permit(&create("a"), later).ok().unwrap();
        let Err(rejected) = breaker.permit(&create("a"), later) else { panic!("two writes at the same time") };
        assert!(rejected.failure.is_unreachable() && !rejected.failure.is_not_reachable_yet());
        // Other namespaces, verbs and kinds are not limited.
        assert!(breaker.permit(&create("b"), later).is_ok());
        let target = Target::of_kind::<ConfigMap>(ObjectKey::namespaced("a", "a"));
        let delete = Write::Delete { target, uid: String::new(), resource_version: None };
        let (_first, second) = (breaker.permit(&delete, later).ok().unwrap(), breaker.permit(&delete, later));
        assert!(second.is_ok());
        // A reconcile that is dropped returns its permission. A response ends the limit.
        drop(probe);
        let refused = Failure::invalid(reason::ADMISSION_REFUSED, "refused");
        breaker.permit(&create("a"), later).ok().unwrap().finish(Some(&refused), later);
        let permits: Vec<_> = (0..20).map(|_| breaker.permit(&create("a"), later)).collect();
        assert!(permits.iter().all(Result::is_ok));
        drop(permits);
        assert!(breaker.0.lock().is_empty());
    }

    #[test]
    fn writes_that_hang_everywhere_leave_room_for_a_namespace_that_may_work() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        (0..50).for_each(|n| time_out(&breaker, &format!("slow-{}", n % 6), now));
        let slow: Vec<_> = (0..6).filter_map(|n| breaker.permit(&create(&format!("slow-{n}")), now).ok()).collect();
        assert_eq!(slow.len(), FAILING_PROBES);
        let others: Vec<_> = (0..6).filter_map(|n| breaker.permit(&create(&format!("new-{n}")), now).ok()).collect();
        assert_eq!(others.len(), PROBES - FAILING_PROBES);
        others.into_iter().for_each(|permit| permit.finish(None, now));
        assert!(breaker.permit(&create("new-5"), now).is_ok());
        assert!(breaker.permit(&create("slow-5"), now).is_err(), "its own writes had no response");
    }

    #[test]
    fn writes_without_a_response_are_forgotten() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        (0..6).for_each(|n| time_out(&breaker, &format!("slow-{}", n % 2), now));
        let later = now + FORGET_AFTER + Duration::from_secs(1);
        let permits = [breaker.permit(&create("slow-0"), later), breaker.permit(&create("slow-0"), later)];
        assert!(permits.iter().all(Result::is_ok));
        time_out(&breaker, "new", later);
        let states = breaker.0.lock();
        assert_eq!(
            states.values().map(|state| (state.timeouts.count, state.namespaces.len())).collect::<Vec<_>>(),
            [(1, 1)]
        );
    }
}
