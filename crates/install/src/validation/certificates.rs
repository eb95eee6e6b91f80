//! Lifetimes of certificates that contradict each other.

use api::kubevirt::SelfSigned;

use super::{Cause, Refusal};
use crate::certificates::{Lifetimes, SHORTEST, go_duration};

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

pub(super) fn lifetimes(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let Some(settings) = settings else { return Vec::new() };
    let lifetimes = match Lifetimes::new(Some(settings)) {
        Ok(lifetimes) => lifetimes,
        Err(error) => {
            let message = format!("must be a duration such as 24h or 90m, and {:?} is not", error.text);
            return vec![Refusal::new(Cause::Invalid, format!("{FIELD}.{}", error.field), message)];
        }
    };
    let mut refusals = Vec::new();
    let (authority, leaf) = (lifetimes.authority, lifetimes.leaf);
    for (name, lifetime) in [("ca", authority), ("server", leaf)] {
        if lifetime.duration < SHORTEST {
            let message = format!(
                "is {}, which is too short to be renewed in time; give it at least {}",
                go_duration(lifetime.duration),
                go_duration(SHORTEST),
            );
            refusals.push(Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.duration"), message));
        }
        if lifetime.renew_before > lifetime.duration {
            let message = format!(
                "is {}, which is longer than {name}.duration, {}: a certificate would be renewed before it is made; \
                 shorten it",
                go_duration(lifetime.renew_before),
                go_duration(lifetime.duration),
            );
            refusals.push(Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.renewBefore"), message));
        }
    }
    if leaf.duration > authority.duration {
        let message = format!(
            "is {}, which is longer than ca.duration, {}: a certificate cannot outlive the authority that signs it; \
             shorten it, or lengthen ca.duration",
            go_duration(leaf.duration),
            go_duration(authority.duration),
        );
        refusals.push(Refusal::new(Cause::Invalid, format!("{FIELD}.server.duration"), message));
    }
    refusals
}
