//! How often the operator writes one object while the desired state of the object does not change.
//!
//! Another client may undo each repair: an autoscaler, a policy engine, a second operator. Without a limit both would
//! write as fast as they can, and each write of a pod template would start pods.

use std::collections::HashMap;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vitivirt_api::{Failure, ObjectKey, Plan, Target, Write};

use crate::{
    certificates::{CA, IssuedCertificates, NoCertificates},
    desired::Desired,
    kind::Kind,
    object::InstallationObject,
    observed::Observed,
    record::Digest,
    up_to_date::StoredObjects,
};

/// The writes that are not delayed. One more is allowed after each interval.
const BURST: i64 = 10;
const INTERVAL: SignedDuration = SignedDuration::from_mins(1);

/// The recent writes of each object. virt-operator keeps them between reconciles. They may be lost at any time.
#[derive(Clone, Debug, Default)]
pub struct Repairs(HashMap<(Kind, ObjectKey), RecentWrites>);

#[derive(Clone, Copy, Debug)]
struct RecentWrites {
    /// The desired object that was written.
    desired: Digest,
    /// Each write moves this time by one interval into the future.
    spent_until: Timestamp,
}

impl RecentWrites {
    fn next_write(self) -> Timestamp {
        self.spent_until - INTERVAL * i32::try_from(BURST - 1).unwrap_or_default()
    }
}

impl Repairs {
    fn add(&mut self, key: (Kind, ObjectKey), desired: Digest, now: Timestamp) {
        let before = self.0.get(&key).filter(|before| before.desired == desired);
        let spent_until = before.map_or(now, |before| before.spent_until.max(now)) + INTERVAL;
        self.0.insert(key, RecentWrites { desired, spent_until });
    }

    /// When the next write of this desired object is allowed, if it is not allowed now.
    fn next_write(&self, key: &(Kind, ObjectKey), desired: Option<Digest>, now: Timestamp) -> Option<Timestamp> {
        let recent = self.0.get(key).filter(|recent| desired.is_none_or(|desired| desired == recent.desired))?;
        Some(recent.next_write()).filter(|next| *next > now)
    }

    fn record(
        &mut self,
        now: Timestamp,
        plan: &Plan,
        is_written: impl Fn(&(Kind, ObjectKey)) -> bool,
        desired: impl Fn(&(Kind, ObjectKey)) -> Option<Digest>,
    ) {
        self.0.retain(|_, recent| recent.spent_until > now);
        let planned = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target).filter_map(object_key);
        for key in planned.filter(is_written) {
            if let Some(digest) = desired(&key) {
                self.add(key, digest, now);
            }
        }
    }

    /// Whether the object was written too often a moment ago.
    pub(crate) fn are_exhausted(&self, kind: Kind, key: &ObjectKey, now: Timestamp) -> bool {
        self.next_write(&(kind, key.clone()), None, now).is_some()
    }
}

/// Whether an object must not be written yet.
pub(crate) fn is_delayed(observed: &Observed, object: &InstallationObject) -> Result<bool, Failure> {
    let key = (object.kind, object.key.clone());
    // The digest is computed only for the few objects to which it matters.
    if observed.repairs.next_write(&key, None, observed.now).is_none() {
        return Ok(false);
    }
    let desired = desired_digest(object)?;
    Ok(observed.repairs.next_write(&key, Some(desired), observed.now).is_some())
}

/// Whether an object that holds certificates must not be written yet.
pub(crate) fn is_certificate_delayed(observed: &Observed, target: &Target, issued: &dyn IssuedCertificates) -> bool {
    let Some(key) = object_key(target) else { return false };
    let desired = certificate_digest(&key, issued);
    desired.is_some_and(|desired| observed.repairs.next_write(&key, Some(desired), observed.now).is_some())
}

fn object_key(target: &Target) -> Option<(Kind, ObjectKey)> {
    Some((Kind::from_name(&target.resource.kind)?, target.key.clone()))
}

/// Unlike a record, it covers the metadata.
fn desired_digest(object: &InstallationObject) -> Result<Digest, Failure> {
    if object.is_large() {
        return Ok(object.digest());
    }
    Ok(Digest::of_body(object.body(&NoCertificates)?.json()))
}

/// The digest of what the lane `Certificates` writes into an object. A renewal changes it, so renewals are not limited.
fn certificate_digest((kind, key): &(Kind, ObjectKey), issued: &dyn IssuedCertificates) -> Option<Digest> {
    match kind {
        Kind::Secret => Some(Digest::of_bytes(&issued.key_pair(key.name())?.certificate)),
        Kind::ConfigMap => Some(Digest::of_bytes(issued.bundle(key.name())?.as_bytes())),
        _ => Some(Digest::of_bytes(issued.bundle(CA)?.as_bytes())),
    }
}

/// Records the writes of a reconcile that the API server stored.
pub fn record_repairs(
    repairs: &mut Repairs,
    observed: &Observed,
    desired: &Desired,
    plan: &Plan,
    stored_objects: &StoredObjects,
) {
    let installation = desired.installation();
    repairs.record(
        observed.now,
        plan,
        |key| stored_objects.contains_key(key),
        |(kind, key)| {
            let objects = &installation?.objects;
            desired_digest(objects.iter().find(|object| object.kind == *kind && object.key == *key)?).ok()
        },
    );
}

/// As [`record_repairs`], for the lane `Certificates`.
pub fn record_certificate_repairs(
    repairs: &mut Repairs,
    observed: &Observed,
    issued: &dyn IssuedCertificates,
    plan: &Plan,
    stored_objects: &StoredObjects,
) {
    let digest = |key: &(Kind, ObjectKey)| certificate_digest(key, issued);
    repairs.record(observed.now, plan, |key| stored_objects.contains_key(key), digest);
}

/// An object that another client changes again and again.
pub(crate) struct Fight {
    pub(crate) target: Target,
    /// The other clients, as `managedFields` name them.
    pub(crate) managers: Vec<String>,
}

/// The objects of which one more write, the one in this plan, exhausts the limit.
pub(crate) fn fights(observed: &Observed, plan: &Plan) -> Vec<Fight> {
    let planned = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target);
    let fights = planned.filter_map(|target| {
        let key = object_key(target)?;
        observed.repairs.0.get(&key).filter(|recent| recent.next_write() + INTERVAL > observed.now)?;
        let live = observed.objects.get(key.0, &key.1);
        let managers = live.and_then(|live| live.fields().ok()?).map(|fields| fields.managers).unwrap_or_default();
        Some(Fight { target: target.clone(), managers })
    });
    fights.collect()
}

/// When the first delayed write is allowed.
pub(crate) fn next_repair(observed: &Observed) -> Option<Timestamp> {
    let recent = observed.repairs.0.values().map(|recent| recent.next_write());
    recent.filter(|next| *next > observed.now).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    fn key() -> (Kind, ObjectKey) {
        (Kind::Deployment, ObjectKey::namespaced("kubevirt", "virt-api"))
    }

    /// The other client undoes each repair at once, for five minutes.
    #[test]
    fn a_fight_costs_ten_writes_in_the_first_minute_and_then_one_per_minute() {
        let desired = Digest::of_bytes(b"one");
        let mut repairs = Repairs::default();
        let mut writes = Vec::new();
        for second in 0..300 {
            for _ in 0..20 {
                if repairs.next_write(&key(), Some(desired), at(second)).is_none() {
                    repairs.add(key(), desired, at(second));
                    writes.push(second);
                }
            }
        }
        assert_eq!(writes.iter().filter(|second| **second < 60).count(), 10);
        assert_eq!(writes.split_off(10), [60, 120, 180, 240]);
        assert_eq!(repairs.next_write(&key(), Some(desired), at(299)), Some(at(300)), "it ends within a minute");
    }

    #[test]
    fn a_new_desired_state_is_written_at_once() {
        let (one, two) = (Digest::of_bytes(b"one"), Digest::of_bytes(b"two"));
        let mut repairs = Repairs::default();
        (0..10).for_each(|_| repairs.add(key(), one, at(0)));
        assert!(repairs.next_write(&key(), Some(one), at(0)).is_some());
        assert_eq!(repairs.next_write(&key(), Some(two), at(0)), None);
        repairs.add(key(), two, at(0));
        assert_eq!(repairs.next_write(&key(), Some(two), at(0)), None);
    }

    #[test]
    fn rare_repairs_are_never_delayed() {
        let desired = Digest::of_bytes(b"one");
        let mut repairs = Repairs::default();
        for repair in 0..100 {
            assert_eq!(repairs.next_write(&key(), Some(desired), at(60 * repair)), None);
            repairs.add(key(), desired, at(60 * repair));
        }
    }
}
