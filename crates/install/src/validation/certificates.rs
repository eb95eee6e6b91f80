//! Lifetimes of certificates that contradict each other.

use vitivirt_api::kubevirt::SelfSigned;

use super::{Cause, Refusal};
use crate::certificates::{Lifetime, Lifetimes, SHORTEST, go_duration};

const FIELD: &str = "spec.certificateRotateStrategy.selfSigned";

/// The older words win, so it is clear what is meant; but whoever reads it may think otherwise.
pub(super) fn mixed(settings: Option<&SelfSigned>) -> Option<Refusal> {
    let settings = settings?;
    let older = [&settings.ca_rotate_interval, &settings.cert_rotate_interval, &settings.ca_overlap_interval];
    let both = older.iter().any(|interval| interval.is_some()) && (settings.ca.is_some() || settings.server.is_some());
    let message = "mixes two ways to say the same: take away caRotateInterval, certRotateInterval and \
                   caOverlapInterval, which are deprecated, and keep ca and server";
    both.then(|| Refusal::new(Cause::NotSupported, FIELD, message))
}

/// By the names that they have in the resource.
fn named(lifetimes: &Lifetimes) -> [(&'static str, Lifetime); 2] {
    [("ca", lifetimes.authority), ("server", lifetimes.leaf)]
}

/// What nobody can issue by.
pub(super) fn unusable(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let lifetimes = match Lifetimes::new(settings) {
        Ok(lifetimes) => lifetimes,
        Err(error) => {
            let message = format!("must be a duration such as 24h or 90m, and {:?} is not", error.text);
            return vec![Refusal::new(Cause::Invalid, format!("{FIELD}.{}", error.field), message)];
        }
    };
    let short = named(&lifetimes).into_iter().filter_map(|(name, lifetime)| {
        let message = format!(
            "is {}, which is too short to be renewed in time; give it at least {}",
            go_duration(lifetime.duration),
            go_duration(SHORTEST),
        );
        (lifetime.duration < SHORTEST)
            .then(|| Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.duration"), message))
    });
    short.collect()
}

/// A renewal that is due before there is anything to renew. Certificates that exist are renewed at once, again and again.
pub(super) fn early_renewal(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let Ok(lifetimes) = Lifetimes::new(settings) else { return Vec::new() };
    let early = named(&lifetimes).into_iter().filter_map(|(name, lifetime)| {
        let message = format!(
            "is {}, which is longer than {name}.duration, {}: a certificate would be renewed before it is made; shorten it",
            go_duration(lifetime.renew_before),
            go_duration(lifetime.duration),
        );
        (lifetime.renew_before > lifetime.duration)
            .then(|| Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.renewBefore"), message))
    });
    early.collect()
}

/// A certificate that would outlive its authority. It ends with it, so it can be issued.
pub(super) fn outlives(settings: Option<&SelfSigned>) -> Option<Refusal> {
    let Lifetimes { authority, leaf, .. } = Lifetimes::new(settings).ok()?;
    let message = format!(
        "is {}, which is longer than ca.duration, {}: a certificate cannot outlive the authority that signs it; shorten \
         it, or lengthen ca.duration",
        go_duration(leaf.duration),
        go_duration(authority.duration),
    );
    (leaf.duration > authority.duration)
        .then(|| Refusal::new(Cause::Invalid, format!("{FIELD}.server.duration"), message))
}
