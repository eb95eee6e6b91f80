//! Lifetimes of certificates that contradict each other.

use std::time::Duration;

use vitivirt_api::kubevirt::SelfSigned;

use super::{Cause, Refusal};
use crate::certificates::{Lifetime, Lifetimes, MIN_LIFETIME, go_duration};

const FIELD: &str = "spec.certificateRotateStrategy.selfSigned";
/// Until each pod has loaded a new certificate: the kubelet's delay, with a margin.
const KUBELET_DELAY: Duration = Duration::from_secs(180);
/// No kubelet updates a mounted Secret, and no component loads it, in less time.
const MIN_RENEWAL: Duration = Duration::from_secs(5);

/// The deprecated fields take precedence, but a reader of the resource may expect otherwise.
pub(super) fn mixes_old_and_new_fields(settings: Option<&SelfSigned>) -> Option<Refusal> {
    let settings = settings?;
    let older = [&settings.ca_rotate_interval, &settings.cert_rotate_interval, &settings.ca_overlap_interval];
    let both = older.iter().any(|interval| interval.is_some()) && (settings.ca.is_some() || settings.server.is_some());
    let message = "deprecated fields cannot be combined with ca and server; remove caRotateInterval, certRotateInterval \
                   and caOverlapInterval";
    both.then(|| Refusal::new(Cause::NotSupported, FIELD, message))
}

/// The lifetimes by the names of their fields.
fn by_field(lifetimes: &Lifetimes) -> [(&'static str, Lifetime); 2] {
    [("ca", lifetimes.ca), ("server", lifetimes.leaf)]
}

/// Lifetimes with which no certificate can be issued.
pub(super) fn invalid_lifetimes(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let lifetimes = match Lifetimes::new(settings) {
        Ok(lifetimes) => lifetimes,
        Err(error) => {
            let message = format!("invalid value {:?}: must be a duration such as 24h or 90m", error.text);
            return vec![Refusal::new(Cause::Invalid, format!("{FIELD}.{}", error.field), message)];
        }
    };
    let short = by_field(&lifetimes).into_iter().filter_map(|(name, lifetime)| {
        let message = format!(
            "invalid value {}: must be at least {}, so that certificates can be renewed in time",
            go_duration(lifetime.duration),
            go_duration(MIN_LIFETIME),
        );
        (lifetime.duration < MIN_LIFETIME)
            .then(|| Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.duration"), message))
    });
    short.collect()
}

/// Renewals that come too early or too late: in every reconcile, or when no pod can load the new certificate in time.
pub(super) fn invalid_renewals(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let Ok(lifetimes) = Lifetimes::new(settings) else { return Vec::new() };
    let invalid = by_field(&lifetimes).into_iter().filter_map(|(name, lifetime)| {
        let problem = if lifetime.renew_before > lifetime.duration {
            format!("must not be longer than {name}.duration, which is {}", go_duration(lifetime.duration))
        } else if lifetime.renew_before < MIN_RENEWAL && lifetime.duration >= MIN_LIFETIME {
            format!(
                "must be at least {}, because pods load a new certificate some time after it is issued",
                go_duration(MIN_RENEWAL)
            )
        } else {
            return None;
        };
        let message = format!("invalid value {}: {problem}", go_duration(lifetime.renew_before));
        Some(Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.renewBefore"), message))
    });
    invalid.collect()
}

/// Renewals that pods may notice too late. The installation works, but on a real cluster calls fail after each renewal.
pub(crate) fn hasty_renewals(settings: Option<&SelfSigned>) -> Vec<Refusal> {
    let Ok(lifetimes) = Lifetimes::new(settings) else { return Vec::new() };
    let hasty = by_field(&lifetimes).into_iter().filter(|(_, lifetime)| lifetime.renew_before < KUBELET_DELAY);
    let refusal = |(name, lifetime): (&str, Lifetime)| {
        let message = format!(
            "{} is too short: a kubelet may need 90s to update a mounted Secret, and until then pods serve the old \
             certificate; set at least {}",
            go_duration(lifetime.renew_before),
            go_duration(KUBELET_DELAY),
        );
        Refusal::new(Cause::Invalid, format!("{FIELD}.{name}.renewBefore"), message)
    };
    hasty.map(refusal).collect()
}

/// A certificate would outlive its CA. It can be issued, because it expires with the CA.
pub(super) fn certificate_outlives_ca(settings: Option<&SelfSigned>) -> Option<Refusal> {
    let Lifetimes { ca, leaf, .. } = Lifetimes::new(settings).ok()?;
    let message = format!(
        "invalid value {}: must not be longer than ca.duration, which is {}: a certificate cannot outlive its CA",
        go_duration(leaf.duration),
        go_duration(ca.duration),
    );
    (leaf.duration > ca.duration).then(|| Refusal::new(Cause::Invalid, format!("{FIELD}.server.duration"), message))
}
