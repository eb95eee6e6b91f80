//! Storage migration: before an upgrade drops a version of a CRD, every object that may be stored in that version is stored
//! again in the present one. Then the version is removed from `status.storedVersions` of the CRD.
//!
//! A patch without changes is enough: the API server encodes the object in the version that it stores, and writes it only
//! if the result differs. So an object that is already stored in that version costs one request and no write, and an
//! operator that restarts begins again without harm.
//!
//! virt-operator lists the objects page by page. One reconcile stores one page. Until the last one nothing else is
//! changed, so the components of the previous version still validate the objects.

use std::time::Duration;

use serde_json::json;
use vitivirt_api::{Body, ObjectKey, Step, Target, Wait, Write};

use crate::{
    kind::Kind,
    observed::{CrdCheck, Observed, StorageMigration},
    wait,
};

/// The next page is stored at once.
const NEXT_PAGE: Duration = Duration::from_millis(50);
/// The watch of the CRD reports the change of its status earlier.
const NEXT_CRD: Duration = Duration::from_secs(1);

/// The CRD whose objects are stored again next.
pub fn next_migration(observed: &Observed) -> Option<(&ObjectKey, &StorageMigration)> {
    migrations(observed).next().map(|(crd, _, migration)| (crd, migration))
}

fn migrations(observed: &Observed) -> impl Iterator<Item = (&ObjectKey, &CrdCheck, &StorageMigration)> {
    observed.crd_checks.iter().filter_map(|(crd, check)| Some((crd, check, check.migration.as_ref()?)))
}

/// What is stored again before an upgrade, for a rehearsal. `count` are the objects of the CRD.
pub fn preparation(crd: &ObjectKey, check: &CrdCheck, count: usize) -> Option<String> {
    let migration = check.migration.as_ref()?;
    let objects = if count == 1 { "1 object is".to_owned() } else { format!("{count} objects are") };
    Some(format!(
        "CustomResourceDefinition {}: {objects} stored again in version {}, because the new CRD does not have the stored \
         version {}",
        crd.name(),
        migration.resource.version,
        check.lost_versions.join(", ")
    ))
}

/// The steps of one page. Empty if no CRD needs them.
pub(crate) fn steps(observed: &Observed) -> Vec<Step> {
    let Some((crd, check, migration)) = migrations(observed).next() else { return Vec::new() };
    let name = crd.name();
    let wait = |message, requeue_after| Wait { reason: wait::STORAGE, message, requeue_after: Some(requeue_after) };
    let progress = |done: usize, remaining: usize| {
        format!(
            "CustomResourceDefinition {name}: {done} of {} objects are stored in version {} instead of {}; the upgrade \
             continues when all of them are",
            done + remaining,
            migration.resource.version,
            check.lost_versions.join(", ")
        )
    };
    let page = observed.storage_page.as_ref().filter(|page| page.crd == *crd);
    let Some(page) = page else {
        let message =
            format!("CustomResourceDefinition {name}: the operator is listing the objects that must be stored again");
        return vec![Step::new(STORAGE_STEP).wait(wait(message, NEXT_CRD))];
    };
    let mut step = Step::new(STORAGE_STEP);
    step.writes = page
        .objects
        .iter()
        .map(|(key, uid)| {
            let target = Target::new(migration.resource.clone(), key.clone());
            Write::Patch { target, uid: uid.clone(), operations: Vec::new() }
        })
        .collect();
    let done = page.done + page.objects.len();
    if !page.is_last {
        return vec![step.wait(wait(progress(done, page.remaining), NEXT_PAGE))];
    }
    let uid = observed.objects.get(Kind::CustomResourceDefinition, crd).map(|live| live.uid.clone());
    let write = Write::Status {
        target: Target::new(Kind::CustomResourceDefinition.resource(), crd.clone()),
        uid: uid.unwrap_or_default(),
        body: Body::from(json!({"status": {"storedVersions": migration.stored_versions}})),
    };
    vec![step, Step::new(STORED_VERSIONS_STEP).write(write).wait(wait(progress(done, 0), NEXT_CRD))]
}

const STORAGE_STEP: &str = "storage";
const STORED_VERSIONS_STEP: &str = "stored versions";

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::{
        crds::{CRDS, TEMPLATE_CRDS},
        rbac::{operator, previous::grants, rule},
    };

    #[test]
    fn the_operator_may_store_the_objects_of_every_crd_again() {
        let held = operator::cluster_rules();
        for crd in CRDS.iter().chain(&TEMPLATE_CRDS) {
            let object = crd.object().unwrap();
            let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap().to_owned();
            let (group, plural) = (text("/spec/group"), text("/spec/names/plural"));
            let needed = rule(&[&group], &[&plural], &["list", "patch"]);
            assert!(grants(&held, &needed), "{plural}.{group}");
        }
        assert!(grants(&held, &rule(&["apiextensions.k8s.io"], &["customresourcedefinitions/status"], &["patch"])));
    }
}
