//! Limits the repairs of an object that another client changes again and again ([`RecentWrites`]). Without a limit each
//! write of a pod template would start pods.

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Plan, RecentWrites, Target, Write};

use crate::{
    certificates::{CA, IssuedCertificates, NoCertificates},
    desired::Desired,
    digest::Digest,
    kind::Kind,
    object::{CERTIFICATE, InstallationObject, key_pair_data},
    observed::{Observed, Repairs},
    order::Lane,
    up_to_date::StoredObjects,
};

impl Repairs {
    /// Whether the object was written too often a moment ago.
    pub(crate) fn are_exhausted(&self, kind: Kind, key: &ObjectKey, now: Timestamp) -> bool {
        self.objects.get(&(kind, key.clone())).is_some_and(|recent| recent.is_exhausted(now))
    }

    fn forget_old(&mut self, now: Timestamp) {
        for recent in [&mut self.objects, &mut self.certificates] {
            recent.retain(|_, recent| !recent.is_old(now));
        }
    }
}

/// Whether an object must not be written yet.
pub(crate) fn is_delayed(observed: &Observed, object: &InstallationObject) -> Result<bool, Failure> {
    let recent = observed.repairs.objects.get(&(object.kind, object.key.clone()));
    // The digest is computed only for the few objects to which it matters.
    let Some(recent) = recent.filter(|recent| recent.is_exhausted(observed.now)) else { return Ok(false) };
    Ok(recent.written() == desired_digest(object)?)
}

/// Whether an object that holds certificates must not be written yet.
pub(crate) fn is_certificate_delayed(observed: &Observed, target: &Target, issued: &dyn IssuedCertificates) -> bool {
    let Some(key) = object_key(target) else { return false };
    let recent = repeated_write(observed, &key, issued);
    recent.is_some_and(|recent| recent.is_exhausted(observed.now))
}

fn object_key(target: &Target) -> Option<(Kind, ObjectKey)> {
    Some((Kind::from_name(&target.resource.kind)?, target.key.clone()))
}

/// Unlike a record, it covers the metadata: every edit of the resource changes it.
fn desired_digest(object: &InstallationObject) -> Result<Digest, Failure> {
    if object.is_large() {
        return Ok(object.digest());
    }
    Ok(Digest::of_bytes(object.body(&NoCertificates)?.json().to_string().as_bytes()))
}

/// The writes that the next write of the lane `Certificates` repeats. Renewals are not limited: a Secret that still holds
/// what the operator wrote is renewed, and one that holds something else is repaired with yet another certificate.
fn repeated_write<'a>(
    observed: &'a Observed,
    key: &(Kind, ObjectKey),
    issued: &dyn IssuedCertificates,
) -> Option<&'a RecentWrites<Digest>> {
    let recent = observed.repairs.certificates.get(key)?;
    let is_repeated = match key.0 {
        Kind::Secret => {
            let live = observed.objects.get(Kind::Secret, &key.1).and_then(|live| live.data(CERTIFICATE));
            live.map(|live| Digest::of_bytes(live.as_bytes())) != Some(recent.written())
        }
        _ => certificate_digest(key, issued) == Some(recent.written()),
    };
    is_repeated.then_some(recent)
}

/// The digest of what the lane `Certificates` writes into an object.
fn certificate_digest((kind, key): &(Kind, ObjectKey), issued: &dyn IssuedCertificates) -> Option<Digest> {
    let digest = |text: &str| Digest::of_bytes(text.as_bytes());
    match kind {
        Kind::Secret => {
            let data = key_pair_data(&issued.key_pair(key.name())?);
            data.get(CERTIFICATE).and_then(Value::as_str).map(digest)
        }
        Kind::ConfigMap => issued.bundle(key.name()).as_deref().map(digest),
        _ => issued.bundle(CA).as_deref().map(digest),
    }
}

/// The objects of a plan that its writes changed. A patch that the API server found equal is not a repair.
fn changed_objects(
    observed: &Observed,
    plan: &Plan,
    stored_objects: &StoredObjects,
) -> impl Iterator<Item = (Kind, ObjectKey)> {
    let planned = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target).filter_map(object_key);
    planned.filter(|(kind, key)| {
        let stored = stored_objects.get(&(*kind, key.clone())).map(|stored| stored.digest);
        stored.is_some() && stored != observed.objects.get(*kind, key).map(|live| live.digest)
    })
}

/// Records the writes of a reconcile that the API server stored.
pub fn record_repairs(
    repairs: &mut Repairs,
    observed: &Observed,
    desired: &Desired,
    plan: &Plan,
    stored_objects: &StoredObjects,
) {
    repairs.forget_old(observed.now);
    let Some((installation, _)) = desired.compared() else { return };
    for key in changed_objects(observed, plan, stored_objects) {
        let object = installation.objects.iter().find(|object| object.kind == key.0 && object.key == key.1);
        if let Some(Ok(written)) = object.map(desired_digest) {
            let before = repairs.objects.get(&key).filter(|before| before.written() == written);
            let recent = RecentWrites::after(before, written, observed.now);
            repairs.objects.insert(key, recent);
        }
    }
}

/// As [`record_repairs`], for the lane `Certificates`.
pub fn record_certificate_repairs(
    repairs: &mut Repairs,
    observed: &Observed,
    issued: &dyn IssuedCertificates,
    plan: &Plan,
    stored_objects: &StoredObjects,
) {
    repairs.forget_old(observed.now);
    for key in changed_objects(observed, plan, stored_objects) {
        if let Some(written) = certificate_digest(&key, issued) {
            let recent = RecentWrites::after(repeated_write(observed, &key, issued), written, observed.now);
            repairs.certificates.insert(key, recent);
        }
    }
}

/// An object that another client changes again and again.
pub(crate) struct Fight {
    pub(crate) target: Target,
    /// The other clients, as `managedFields` name them.
    pub(crate) managers: Vec<String>,
}

/// The objects of which one more write, the one in this plan, exhausts the limit.
pub(crate) fn fights(observed: &Observed, plan: &Plan, lane: Lane) -> Vec<Fight> {
    let recent = match lane {
        Lane::Certificates => &observed.repairs.certificates,
        Lane::Components | Lane::Monitoring | Lane::Instancetypes => &observed.repairs.objects,
    };
    let planned = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target);
    let fights = planned.filter_map(|target| {
        let key = object_key(target)?;
        recent.get(&key).filter(|recent| recent.exhausts_with_next(observed.now))?;
        let live = observed.objects.get(key.0, &key.1);
        let managers = live.and_then(|live| live.fields().ok()?).map(|fields| fields.managers).unwrap_or_default();
        Some(Fight { target: target.clone(), managers })
    });
    fights.collect()
}

/// When the first delayed write is allowed.
pub(crate) fn next_repair(observed: &Observed) -> Option<Timestamp> {
    let recent = observed.repairs.objects.values().chain(observed.repairs.certificates.values());
    recent.map(RecentWrites::next_write).filter(|next| *next > observed.now).min()
}
