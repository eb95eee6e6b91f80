//! The answers of the API server about tokens, for a limited time and of a limited number.
//!
//! Permitted and refused tokens have separate limits, so that many invalid tokens cannot displace the token of a client
//! that has permission.

use std::{collections::HashMap, time::Duration};

use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// How long a client keeps its access after its permission was removed.
const ALLOWED_TTL: Duration = Duration::from_secs(60);
/// How long a client waits for its access after its permission was granted.
const REFUSED_TTL: Duration = Duration::from_secs(10);
const MAX_ALLOWED: usize = 128;
const MAX_REFUSED: usize = 1024;

/// What the API server answered about a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Allowed,
    /// The token is not valid.
    Unauthenticated,
    /// The user of the token has no permission.
    Forbidden {
        user: String,
    },
}

/// A hash of a token: the memory of the program does not keep tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TokenHash([u8; 32]);

impl TokenHash {
    pub(super) fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }
}

pub(super) struct DecisionCache {
    allowed: Decisions,
    refused: Decisions,
}

impl Default for DecisionCache {
    fn default() -> Self {
        Self { allowed: Decisions::new(ALLOWED_TTL, MAX_ALLOWED), refused: Decisions::new(REFUSED_TTL, MAX_REFUSED) }
    }
}

impl DecisionCache {
    pub(super) fn get(&self, token: &TokenHash, now: Instant) -> Option<Decision> {
        self.allowed.get(token, now).or_else(|| self.refused.get(token, now))
    }

    pub(super) fn insert(&mut self, token: TokenHash, decision: Decision, now: Instant) {
        let (same, other) = match decision {
            Decision::Allowed => (&mut self.allowed, &mut self.refused),
            Decision::Unauthenticated | Decision::Forbidden { .. } => (&mut self.refused, &mut self.allowed),
        };
        other.entries.remove(&token);
        same.insert(token, decision, now);
    }
}

/// Decisions with the same lifetime.
struct Decisions {
    ttl: Duration,
    limit: usize,
    entries: HashMap<TokenHash, (Decision, Instant)>,
}

impl Decisions {
    fn new(ttl: Duration, limit: usize) -> Self {
        Self { ttl, limit, entries: HashMap::new() }
    }

    fn get(&self, token: &TokenHash, now: Instant) -> Option<Decision> {
        let (decision, expires) = self.entries.get(token)?;
        (now < *expires).then(|| decision.clone())
    }

    fn insert(&mut self, token: TokenHash, decision: Decision, now: Instant) {
        if self.entries.len() >= self.limit {
            self.entries.retain(|_, (_, expires)| now < *expires);
        }
        if self.entries.len() >= self.limit {
            let oldest = self.entries.iter().min_by_key(|(_, (_, expires))| *expires).map(|(token, _)| *token);
            oldest.and_then(|oldest| self.entries.remove(&oldest));
        }
        self.entries.insert(token, (decision, now + self.ttl));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forbidden() -> Decision {
        Decision::Forbidden { user: "a".to_owned() }
    }

    #[test]
    fn a_permission_is_kept_longer_than_a_refusal() {
        let (mut cache, now) = (DecisionCache::default(), Instant::now());
        let [good, bad, other] = ["good", "bad", "other"].map(TokenHash::of);
        cache.insert(good, Decision::Allowed, now);
        cache.insert(bad, Decision::Unauthenticated, now);
        cache.insert(other, forbidden(), now);
        let soon = now + REFUSED_TTL - Duration::from_millis(1);
        assert_eq!(cache.get(&bad, soon), Some(Decision::Unauthenticated));
        assert_eq!(cache.get(&other, soon), Some(forbidden()));
        assert_eq!(cache.get(&bad, now + REFUSED_TTL), None);
        assert_eq!(cache.get(&good, now + ALLOWED_TTL - Duration::from_millis(1)), Some(Decision::Allowed));
        assert_eq!(cache.get(&good, now + ALLOWED_TTL), None);
    }

    #[test]
    fn a_new_decision_replaces_the_old_one() {
        let (mut cache, now) = (DecisionCache::default(), Instant::now());
        let token = TokenHash::of("token");
        for decision in [Decision::Allowed, forbidden(), Decision::Unauthenticated, Decision::Allowed] {
            cache.insert(token, decision.clone(), now);
            assert_eq!(cache.get(&token, now), Some(decision));
        }
    }

    #[test]
    fn invalid_tokens_displace_each_other_and_no_permitted_token() {
        let (mut cache, now) = (DecisionCache::default(), Instant::now());
        let good = TokenHash::of("good");
        cache.insert(good, Decision::Allowed, now);
        for number in 0..(MAX_REFUSED as u32 + 100) {
            let at = now + Duration::from_micros(number.into());
            cache.insert(TokenHash::of(&number.to_string()), Decision::Unauthenticated, at);
        }
        assert_eq!(cache.refused.entries.len(), MAX_REFUSED);
        let soon = now + Duration::from_secs(1);
        assert_eq!(cache.get(&TokenHash::of("0"), soon), None, "the oldest is displaced first");
        assert_eq!(cache.get(&TokenHash::of("1100"), soon), Some(Decision::Unauthenticated));
        assert_eq!(cache.get(&good, soon), Some(Decision::Allowed));
    }

    #[test]
    fn expired_entries_are_removed_before_others() {
        let (mut cache, now) = (DecisionCache::default(), Instant::now());
        for number in 0..MAX_ALLOWED {
            cache.insert(TokenHash::of(&number.to_string()), Decision::Allowed, now);
        }
        cache.insert(TokenHash::of("late"), Decision::Allowed, now + ALLOWED_TTL);
        assert_eq!(cache.allowed.entries.len(), 1);
    }
}
