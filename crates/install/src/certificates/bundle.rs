//! The certificates of a CA bundle: the current CA, earlier CAs as long as certificates that they signed may be in use,
//! and the CAs of users. `renewal` decides when there is a new CA.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use super::renewal::Validity;

/// The limit of upstream virt-operator.
pub const MAX_CERTIFICATES: usize = 50;

/// Every webhook contains the whole bundle in base64, and the configuration with the most webhooks must fit in one
/// object of 1.5 MiB. Fifty CAs that this operator issued are smaller.
pub const MAX_BYTES: usize = 30 * 1024;

/// A new CA of a user leaves room for this many CAs of the operator, so that a rotation does not displace it later.
const OWN_CERTIFICATES: usize = 4;
/// More than such a CA has.
const OWN_BYTES: usize = 1024;

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
    /// The number of CAs of users that do not fit.
    pub left_out: usize,
}

/// A CA is removed when it expires, or when its successor has existed for the overlap. `stored` is the present bundle, and
/// `imported` are the CAs of users that may not be in it yet: they do not displace those that are.
pub fn merge(
    current: TrustedCertificate,
    stored: &[TrustedCertificate],
    imported: Vec<TrustedCertificate>,
    overlap: Duration,
    now: SystemTime,
) -> CaBundle {
    let mut removed_at = saturating_add(current.validity.not_before, overlap);
    let others = stored.iter().cloned().chain(imported).filter(|other| other.certificate != current.certificate);
    let (own, external): (Vec<_>, Vec<_>) = deduplicate(others.filter(|other| other.validity.not_after > now))
        .into_iter()
        .partition(|trusted| trusted.origin == Origin::Own);
    let mut bundle = CaBundle { certificates: vec![current], next_removal: None, left_out: 0 };
    for trusted in own {
        let Validity { not_before, not_after } = trusted.validity;
        let keep_until = removed_at.min(not_after);
        removed_at = removed_at.min(saturating_add(not_before, overlap));
        if keep_until > now && bundle.has_room_for(&trusted, 0) {
            bundle.keep(trusted, keep_until);
        }
    }
    let own = bundle.certificates.len();
    let is_stored =
        |trusted: &TrustedCertificate| stored.iter().any(|stored| stored.certificate == trusted.certificate);
    let (known, new): (Vec<_>, Vec<_>) = external.into_iter().partition(is_stored);
    let known = known.into_iter().map(|trusted| (trusted, 0));
    let new = new.into_iter().map(|trusted| (trusted, OWN_CERTIFICATES.saturating_sub(own)));
    for (trusted, reserved) in known.chain(new) {
        let keep_until = trusted.validity.not_after;
        if bundle.has_room_for(&trusted, reserved) {
            bundle.keep(trusted, keep_until);
        } else {
            bundle.left_out += 1;
        }
    }
    if let Some(external) = bundle.certificates.get_mut(own..) {
        external.sort_by_key(|trusted| Reverse(trusted.validity.not_before));
    }
    bundle
}

impl CaBundle {
    /// Whether a certificate fits, next to this many CAs that the operator may add.
    fn has_room_for(&self, trusted: &TrustedCertificate, reserved: usize) -> bool {
        let bytes: usize = self.certificates.iter().map(|trusted| trusted.certificate.len()).sum();
        self.certificates.len() + reserved < MAX_CERTIFICATES
            && bytes + trusted.certificate.len() + reserved * OWN_BYTES <= MAX_BYTES
    }

    fn keep(&mut self, trusted: TrustedCertificate, until: SystemTime) {
        self.certificates.push(trusted);
        self.next_removal = Some(self.next_removal.map_or(until, |next| next.min(until)));
    }
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
    fn merged(current: TrustedCertificate, others: &[TrustedCertificate], now: u64) -> (Vec<String>, Option<u64>) {
        let bundle = merge(current, others, Vec::new(), Duration::from_secs(OVERLAP), second(now));
        let name = |trusted: &TrustedCertificate| String::from_utf8_lossy(&trusted.certificate).into_owned();
        let next = bundle.next_removal.map(|next| next.duration_since(second(0)).unwrap().as_secs());
        (bundle.certificates.iter().map(name).collect(), next)
    }

    #[test]
    fn the_current_ca_is_first_and_the_newest_follows() {
        let others = vec![own_ca("a", 50, 500), own_ca("c", 70, 500), own_ca("current", 75, 500), own_ca("b", 60, 500)];
        let (names, next) = merged(own_ca("current", 75, 500), &others, 69);
        assert_eq!(names, ["current", "c", "b", "a"]);
        assert_eq!(next, Some(70), "b has existed for the overlap");
    }

    #[test]
    fn a_ca_is_removed_when_its_successor_has_existed_for_the_overlap() {
        let others = || vec![own_ca("a", 50, 500), own_ca("b", 60, 500)];
        assert_eq!(
            merged(own_ca("current", 65, 500), &others(), 69),
            (vec!["current".into(), "b".into(), "a".into()], Some(70))
        );
        assert_eq!(merged(own_ca("current", 65, 500), &others(), 70), (vec!["current".into(), "b".into()], Some(75)));
        assert_eq!(merged(own_ca("current", 65, 500), &others(), 74), (vec!["current".into(), "b".into()], Some(75)));
        assert_eq!(merged(own_ca("current", 65, 500), &others(), 75), (vec!["current".into()], None));
    }

    #[test]
    fn a_ca_is_removed_when_it_expires() {
        let others = || vec![own_ca("a", 60, 72), own_ca("b", 50, 500)];
        assert_eq!(
            merged(own_ca("current", 68, 500), &others(), 69),
            (vec!["current".into(), "a".into(), "b".into()], Some(70))
        );
        let others = || vec![own_ca("a", 64, 72), own_ca("b", 50, 500)];
        assert_eq!(
            merged(own_ca("current", 68, 500), &others(), 71),
            (vec!["current".into(), "a".into(), "b".into()], Some(72))
        );
        // An expired CA does not show how long its successor has existed.
        assert_eq!(merged(own_ca("current", 68, 500), &others(), 77), (vec!["current".into(), "b".into()], Some(78)));
    }

    #[test]
    fn a_ca_newer_than_the_current_one_is_removed_with_the_others() {
        let others = || vec![own_ca("newer", 90, 500), own_ca("older", 60, 500)];
        assert_eq!(merged(own_ca("current", 85, 500), &others(), 94).0, ["current", "newer", "older"]);
        assert_eq!(merged(own_ca("current", 85, 500), &others(), 95), (vec!["current".into()], None));
    }

    #[test]
    fn a_ca_of_a_user_is_kept_until_it_expires() {
        let others = || vec![external_ca("x", 1, 300), own_ca("b", 60, 500), external_ca("y", 70, 200)];
        assert_eq!(merged(own_ca("current", 65, 500), &others(), 74).0, ["current", "b", "y", "x"]);
        assert_eq!(
            merged(own_ca("current", 65, 500), &others(), 199),
            (vec!["current".into(), "y".into(), "x".into()], Some(200))
        );
        assert_eq!(merged(own_ca("current", 65, 500), &others(), 200), (vec!["current".into(), "x".into()], Some(300)));
    }

    #[test]
    fn a_bundle_has_no_duplicates() {
        let others = vec![
            own_ca("b", 60, 500),
            own_ca("current", 65, 500),
            external_ca("b", 60, 500),
            external_ca("current", 65, 500),
        ];
        assert_eq!(merged(own_ca("current", 65, 500), &others, 100), (vec!["current".into(), "b".into()], Some(500)));
    }

    #[test]
    fn a_bundle_has_at_most_fifty_certificates() {
        let others: Vec<_> = (0..60).map(|number| own_ca(&format!("{number:02}"), number, 5000)).collect();
        let names = merge_all(&others, Vec::new()).0;
        assert_eq!(names.len(), 50);
        assert_eq!(names.get(..2).unwrap(), ["current", "59"]);
        assert_eq!(names.last().unwrap(), "11");
    }

    #[test]
    fn large_certificates_do_not_exceed_the_size_limit() {
        let large = |name: &str, from| external_ca(&name.repeat(MAX_BYTES / 3), from, 5000);
        let others = vec![large("a", 1), large("b", 2), large("c", 3), external_ca("small", 0, 5000)];
        let (names, left_out) = merge_all(&others, Vec::new());
        let names: Vec<&str> = names.iter().map(|name| name.get(..1).unwrap()).collect();
        assert_eq!((names, left_out), (vec!["c", "c", "b", "s"], 1));
    }

    #[test]
    fn a_new_ca_of_a_user_displaces_no_stored_one_and_leaves_room_for_a_rotation() {
        let large = |name: &str, from| external_ca(&name.repeat(MAX_BYTES / 3), from, 5000);
        let (names, left_out) = merge_all(&[large("a", 1), large("b", 2)], vec![large("x", 3), large("b", 2)]);
        let names: Vec<&str> = names.iter().map(|name| name.get(..1).unwrap()).collect();
        assert_eq!((names, left_out), (vec!["c", "b", "a"], 1));

        let cas = |count: u64| (0..count).map(|number| external_ca(&format!("{number:02}"), number, 5000)).collect();
        let (names, left_out) = merge_all(&[], cas(60));
        assert_eq!((names.len(), left_out), (1 + 46, 14));
        let mut stored: Vec<TrustedCertificate> = cas(46);
        stored.extend((0..3).map(|number| own_ca(&format!("own-{number}"), 90 + number, 5000)));
        let (names, left_out) = merge_all(&stored, Vec::new());
        assert_eq!((names.len(), left_out), (50, 0));
    }

    /// The names, and the number of CAs that do not fit.
    fn merge_all(stored: &[TrustedCertificate], imported: Vec<TrustedCertificate>) -> (Vec<String>, usize) {
        let bundle = merge(own_ca("current", 100, 5000), stored, imported, Duration::from_secs(4000), second(101));
        let name = |trusted: &TrustedCertificate| String::from_utf8_lossy(&trusted.certificate).into_owned();
        (bundle.certificates.iter().map(name).collect(), bundle.left_out)
    }
}
