//! The certificates of a CA bundle: the current CA, earlier CAs as long as certificates that they signed may be in use,
//! and the CAs of users. `renewal` decides when there is a new CA.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use super::renewal::Validity;

/// The limit of upstream virt-operator.
pub(crate) const MAX_CERTIFICATES: usize = 50;

/// Every webhook contains the whole bundle in base64, and the configuration with the most webhooks must fit in one
/// object of 1.5 MiB. Fifty CAs that this operator issued are smaller.
pub(crate) const MAX_BYTES: usize = 30 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A CA of this operator. It is removed after the overlap.
    Own,
    /// A CA of a user. It is removed only when it expires.
    External,
}

/// A certificate of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedCertificate {
    /// In DER.
    pub certificate: Vec<u8>,
    pub validity: Validity,
    pub origin: Origin,
}

pub struct CaBundle {
    /// The current CA, then earlier ones and then those of users, each group with the newest first.
    pub certificates: Vec<TrustedCertificate>,
    /// When the next of them must be removed.
    pub next_removal: Option<SystemTime>,
}

/// A CA is removed when it expires, or when its successor has existed for the overlap.
pub fn merge(
    current: TrustedCertificate,
    others: Vec<TrustedCertificate>,
    overlap: Duration,
    now: SystemTime,
) -> CaBundle {
    let mut removed_at = saturating_add(current.validity.not_before, overlap);
    let mut bytes = current.certificate.len();
    let others = deduplicate(others.into_iter().filter(|other| other.certificate != current.certificate));
    let mut bundle = CaBundle { certificates: vec![current], next_removal: None };
    for trusted in others.into_iter().filter(|other| other.validity.not_after > now) {
        let Validity { not_before, not_after } = trusted.validity;
        let keep_until = match trusted.origin {
            Origin::Own => removed_at.min(not_after),
            Origin::External => not_after,
        };
        if trusted.origin == Origin::Own {
            removed_at = removed_at.min(saturating_add(not_before, overlap));
        }
        let size = trusted.certificate.len();
        if keep_until > now && bundle.certificates.len() < MAX_CERTIFICATES && bytes + size <= MAX_BYTES {
            bytes += size;
            bundle.certificates.push(trusted);
            bundle.next_removal = Some(bundle.next_removal.map_or(keep_until, |next| next.min(keep_until)));
        }
    }
    bundle
}

/// Without duplicates, own CAs first, the newest first. A CA that a user has added too counts as external.
fn deduplicate(certificates: impl Iterator<Item = TrustedCertificate>) -> Vec<TrustedCertificate> {
    let mut distinct = BTreeMap::<Vec<u8>, TrustedCertificate>::new();
    for trusted in certificates {
        let entry = distinct.entry(trusted.certificate.clone()).or_insert_with(|| trusted.clone());
        if trusted.origin == Origin::External {
            entry.origin = Origin::External;
        }
    }
    let mut sorted: Vec<TrustedCertificate> = distinct.into_values().collect();
    sorted.sort_by_key(|trusted| (trusted.origin == Origin::External, Reverse(trusted.validity.not_before)));
    sorted
}

fn saturating_add(time: SystemTime, duration: Duration) -> SystemTime {
    time.checked_add(duration).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OVERLAP: u64 = 10;

    fn second(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + second)
    }

    fn own_ca(name: &str, from: u64, to: u64) -> TrustedCertificate {
        let validity = Validity { not_before: second(from), not_after: second(to) };
        TrustedCertificate { certificate: name.into(), validity, origin: Origin::Own }
    }

    fn external_ca(name: &str, from: u64, to: u64) -> TrustedCertificate {
        TrustedCertificate { origin: Origin::External, ..own_ca(name, from, to) }
    }

    /// The names, and when the next CA is removed.
    fn merged(current: TrustedCertificate, others: Vec<TrustedCertificate>, now: u64) -> (Vec<String>, Option<u64>) {
        let bundle = merge(current, others, Duration::from_secs(OVERLAP), second(now));
        let name = |trusted: &TrustedCertificate| String::from_utf8_lossy(&trusted.certificate).into_owned();
        let next = bundle.next_removal.map(|next| next.duration_since(second(0)).unwrap().as_secs());
        (bundle.certificates.iter().map(name).collect(), next)
    }

    #[test]
    fn the_current_ca_is_first_and_the_newest_follows() {
        let others = vec![own_ca("a", 50, 500), own_ca("c", 70, 500), own_ca("current", 75, 500), own_ca("b", 60, 500)];
        let (names, next) = merged(own_ca("current", 75, 500), others, 69);
        assert_eq!(names, ["current", "c", "b", "a"]);
        assert_eq!(next, Some(70), "b has existed for the overlap");
    }

    #[test]
    fn a_ca_is_removed_when_its_successor_has_existed_for_the_overlap() {
        let others = || vec![own_ca("a", 50, 500), own_ca("b", 60, 500)];
        assert_eq!(
            merged(own_ca("current", 65, 500), others(), 69),
            (vec!["current".into(), "b".into(), "a".into()], Some(70))
        );
        assert_eq!(merged(own_ca("current", 65, 500), others(), 70), (vec!["current".into(), "b".into()], Some(75)));
        assert_eq!(merged(own_ca("current", 65, 500), others(), 74), (vec!["current".into(), "b".into()], Some(75)));
        assert_eq!(merged(own_ca("current", 65, 500), others(), 75), (vec!["current".into()], None));
    }

    #[test]
    fn a_ca_is_removed_when_it_expires() {
        let others = || vec![own_ca("a", 60, 72), own_ca("b", 50, 500)];
        assert_eq!(
            merged(own_ca("current", 68, 500), others(), 69),
            (vec!["current".into(), "a".into(), "b".into()], Some(70))
        );
        let others = || vec![own_ca("a", 64, 72), own_ca("b", 50, 500)];
        assert_eq!(
            merged(own_ca("current", 68, 500), others(), 71),
            (vec!["current".into(), "a".into(), "b".into()], Some(72))
        );
        // An expired CA does not show how long its successor has existed.
        assert_eq!(merged(own_ca("current", 68, 500), others(), 77), (vec!["current".into(), "b".into()], Some(78)));
    }

    #[test]
    fn a_ca_newer_than_the_current_one_is_removed_with_the_others() {
        let others = || vec![own_ca("newer", 90, 500), own_ca("older", 60, 500)];
        assert_eq!(merged(own_ca("current", 85, 500), others(), 94).0, ["current", "newer", "older"]);
        assert_eq!(merged(own_ca("current", 85, 500), others(), 95), (vec!["current".into()], None));
    }

    #[test]
    fn a_ca_of_a_user_is_kept_until_it_expires() {
        let others = || vec![external_ca("x", 1, 300), own_ca("b", 60, 500), external_ca("y", 70, 200)];
        assert_eq!(merged(own_ca("current", 65, 500), others(), 74).0, ["current", "b", "y", "x"]);
        assert_eq!(
            merged(own_ca("current", 65, 500), others(), 199),
            (vec!["current".into(), "y".into(), "x".into()], Some(200))
        );
        assert_eq!(merged(own_ca("current", 65, 500), others(), 200), (vec!["current".into(), "x".into()], Some(300)));
    }

    #[test]
    fn a_bundle_has_no_duplicates() {
        let others = vec![
            own_ca("b", 60, 500),
            own_ca("current", 65, 500),
            external_ca("b", 60, 500),
            external_ca("current", 65, 500),
        ];
        assert_eq!(merged(own_ca("current", 65, 500), others, 100), (vec!["current".into(), "b".into()], Some(500)));
    }

    #[test]
    fn a_bundle_has_at_most_fifty_certificates() {
        let others = (0..60).map(|number| own_ca(&format!("{number:02}"), number, 5000)).collect();
        let (names, _) = merge_all(others);
        assert_eq!(names.len(), 50);
        assert_eq!(names.get(..2).unwrap(), ["current", "59"]);
        assert_eq!(names.last().unwrap(), "11");
    }

    #[test]
    fn large_certificates_do_not_exceed_the_size_limit() {
        let large = |name: &str, from| external_ca(&name.repeat(MAX_BYTES / 3), from, 5000);
        let others = vec![large("a", 1), large("b", 2), large("c", 3), external_ca("small", 0, 5000)];
        let (names, _) = merge_all(others);
        let names: Vec<&str> = names.iter().map(|name| name.get(..1).unwrap()).collect();
        assert_eq!(names, ["c", "c", "b", "s"]);
    }

    fn merge_all(others: Vec<TrustedCertificate>) -> (Vec<String>, Option<SystemTime>) {
        let bundle = merge(own_ca("current", 100, 5000), others, Duration::from_secs(4000), second(101));
        let name = |trusted: &TrustedCertificate| String::from_utf8_lossy(&trusted.certificate).into_owned();
        (bundle.certificates.iter().map(name).collect(), bundle.next_removal)
    }
}
