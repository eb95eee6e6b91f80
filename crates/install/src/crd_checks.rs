//! What an upgrade must know about a live CRD before it changes the CRD. CRDs are watched as metadata only, so
//! virt-operator reads each CRD once before it writes it.
//!
//! - A version in `status.storedVersions` that the new CRD does not have: the API server rejects the new CRD, and objects
//!   of that version could not be read. If the API server stores objects in a version that the new CRD has, they are
//!   stored again (`storage`). Otherwise the upgrade is refused before anything changes.
//! - A version that gets the status subresource: from then on the API server ignores the status in ordinary updates, and
//!   pods of the previous version still write it there. So the subresource is added when all of them are gone.

use std::{collections::BTreeMap, time::Duration};

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::{ApiResource, Failure, ObjectKey, Stop, Wait};

use crate::{
    certificates::NoCertificates,
    desired::Desired,
    drift::metadata_patch,
    kind::Kind,
    live::LiveObject,
    object::InstallationObject,
    observed::{CrdCheck, Observed, StorageMigration},
    record::ContentRecord,
    wait,
};

/// An event reports the change that continues the upgrade. This is for events that are lost.
const RETRY: Duration = Duration::from_secs(60);

/// The part of a live CRD that is checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct LiveCrd {
    spec: LiveCrdSpec,
    status: LiveCrdStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct LiveCrdSpec {
    group: String,
    names: LiveCrdNames,
    versions: Vec<LiveCrdVersion>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct LiveCrdNames {
    kind: String,
    plural: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct LiveCrdVersion {
    name: String,
    served: bool,
    storage: bool,
    subresources: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct LiveCrdStatus {
    stored_versions: Vec<String>,
}

impl CrdCheck {
    fn new(desired: &Value, live: &LiveCrd) -> Self {
        let versions = desired.pointer("/spec/versions").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let name = |version: &Value| version.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let names: Vec<String> = versions.iter().map(name).collect();
        let (mut kept, lost): (Vec<_>, Vec<_>) =
            live.status.stored_versions.iter().cloned().partition(|stored| names.contains(stored));
        let storage = versions.iter().filter(|version| version.get("storage") == Some(&Value::Bool(true))).map(name);
        kept.extend(storage.filter(|storage| !live.status.stored_versions.contains(storage)));
        let gets_status = |version: &&Value| {
            let of_live = live.spec.versions.iter().find(|live| live.name == name(version));
            version.pointer("/subresources/status").is_some_and(|status| !status.is_null())
                && of_live.is_some_and(|live| live.subresources.get("status").is_none_or(Value::is_null))
        };
        let new_status = versions.iter().filter(gets_status).map(name).collect();
        let migration = if lost.is_empty() { None } else { migration(&names, &lost, live) };
        Self { lost_versions: lost, kept_versions: kept, migration, new_status }
    }

    /// Whether the upgrade is refused because of it.
    pub fn blocks(&self) -> bool {
        !self.lost_versions.is_empty() && self.migration.is_none()
    }

    /// The kind whose objects are stored again before the CRD changes.
    pub fn migrated_kind(&self) -> Option<&ApiResource> {
        self.migration.as_ref().map(|migration| &migration.resource)
    }

    /// Plans as if every stored version were in the new CRD.
    pub fn ignore_lost_versions(&mut self) {
        self.lost_versions.clear();
        self.migration = None;
    }

    /// Whether the CRD must be read again when it has changed.
    pub fn is_open(&self) -> bool {
        !self.lost_versions.is_empty() || !self.new_status.is_empty()
    }

    /// Whether its status decides what happens next. The status changes without a new generation.
    pub fn depends_on_status(&self) -> bool {
        !self.lost_versions.is_empty()
    }
}

/// The API server must serve the version that it stores, so that objects can be written, and the new CRD must have that
/// version.
fn migration(new_versions: &[String], lost: &[String], live: &LiveCrd) -> Option<StorageMigration> {
    let LiveCrdSpec { group, names, versions } = &live.spec;
    let storage = versions.iter().find(|version| version.storage && version.served)?;
    let is_readable = lost.iter().all(|lost| versions.iter().any(|version| version.name == *lost));
    if !is_readable || !new_versions.contains(&storage.name) {
        return None;
    }
    let mut stored_versions = live.status.stored_versions.clone();
    stored_versions.retain(|stored| new_versions.contains(stored));
    if !stored_versions.contains(&storage.name) {
        stored_versions.push(storage.name.clone());
    }
    let resource = ApiResource {
        group: group.clone(),
        version: storage.name.clone(),
        api_version: format!("{group}/{}", storage.name),
        kind: names.kind.clone(),
        plural: names.plural.clone(),
    };
    Some(StorageMigration { resource, stored_versions })
}

/// The CRDs that the next plan writes, with their generation. virt-operator reads them before.
pub fn crds_to_check(observed: &Observed, desired: &Desired) -> Vec<(ObjectKey, i64)> {
    let Some((installation, up_to_date)) = desired.compared() else { return Vec::new() };
    let crds = installation.objects.iter().filter(|object| object.kind == Kind::CustomResourceDefinition);
    crds.filter_map(|object| {
        let live = observed.objects.get(object.kind, &object.key)?;
        let is_known =
            up_to_date.get(&(object.kind, object.key.clone())).is_some_and(|matching| matching.digest == live.digest);
        // A CRD that cannot be compared is read too. The plan reports why.
        let is_written = !is_known && !live.deleting && is_crd_written(observed, object, live).unwrap_or(true);
        is_written.then(|| (object.key.clone(), live.generation))
    })
    .collect()
}

/// Whether a CRD may differ from the desired one, according to its metadata and its record.
pub(crate) fn is_crd_written(
    observed: &Observed,
    object: &InstallationObject,
    live: &LiveObject,
) -> Result<bool, Failure> {
    let recorded = observed.recorded_generation(object.kind, &object.key);
    let record = ContentRecord::new(object, live)?;
    let is_recorded = recorded.is_some_and(|recorded| {
        let is_same = recorded.hash.is_empty() || record == ContentRecord::parse(&recorded.hash);
        recorded.last_generation == live.generation && is_same
    });
    Ok(!is_recorded || !metadata_patch(object.kind, &object.metadata_only()?, live).is_empty())
}

/// Checks one CRD of the installation.
pub fn check_crd(desired: &Desired, crd: &ObjectKey, live: &LiveCrd) -> Result<CrdCheck, Failure> {
    let objects = desired.compared().into_iter().flat_map(|(installation, _)| &installation.objects);
    let mut objects = objects.filter(|object| object.kind == Kind::CustomResourceDefinition);
    match objects.find(|object| object.key == *crd) {
        Some(object) => Ok(CrdCheck::new(object.body(&NoCertificates)?.json(), live)),
        None => Ok(CrdCheck::default()),
    }
}

/// The wait for a user, if a stored version would be lost: the upgrade is refused. It is not a failure of the plan, which
/// would hold events back, such as that of the CRD that the user has corrected.
pub(crate) fn refused_upgrade(observed: &Observed, version: &str) -> Option<Wait> {
    let lost = lost_versions(observed, version);
    let first = lost.first()?;
    let more = match lost.len() - 1 {
        0 => String::new(),
        more => format!("; the same applies to {more} more CustomResourceDefinitions"),
    };
    let message = format!("{first}{more}; nothing was changed; the operator retries automatically");
    Some(Wait { reason: wait::STORED_VERSIONS, message, requeue_after: Some(RETRY) })
}

/// The failure that a refused upgrade is reported as.
pub(crate) fn refusal(stop: &Stop) -> Option<Failure> {
    match stop {
        Stop::Waiting { wait, .. } if wait.reason == wait::STORED_VERSIONS => {
            Some(Failure::invalid(wait.reason, wait.message.clone()))
        }
        _ => None,
    }
}

/// The CRDs with stored versions that would be lost, and what to do: one sentence for each.
pub fn lost_versions(observed: &Observed, version: &str) -> Vec<String> {
    let lost = observed.crd_checks.iter().filter(|(_, check)| check.blocks());
    lost.map(|(crd, check)| {
        let name = crd.name();
        let kept: Vec<String> = check.kept_versions.iter().map(|version| format!("{version:?}")).collect();
        format!(
            "CustomResourceDefinition {name} has objects that are stored in version {}, which KubeVirt {version} does not \
             have; store the objects in the current version: `kubectl get {name} -A -o json | kubectl replace -f -`, then \
             remove the old version: `kubectl patch crd {name} --subresource=status --type=merge -p \
             '{{\"status\":{{\"storedVersions\":[{}]}}}}'`",
            check.lost_versions.join(", "),
            kept.join(","),
        )
    })
    .collect()
}

/// Removes the status subresource from these versions of a CRD.
pub(crate) fn without_status(crd: &mut Value, versions: &[String]) {
    for version in crd.pointer_mut("/spec/versions").and_then(Value::as_array_mut).into_iter().flatten() {
        let name = version.get("name").and_then(Value::as_str).unwrap_or_default();
        if versions.iter().any(|without| without == name)
            && let Some(subresources) = version.get_mut("subresources").and_then(Value::as_object_mut)
        {
            subresources.remove("status");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn live(versions: &Value, stored: &Value) -> LiveCrd {
        serde_json::from_value(
            json!({"spec": {"versions": versions, "other": 1}, "status": {"storedVersions": stored}}),
        )
        .unwrap()
    }

    fn desired() -> Value {
        json!({"spec": {"versions": [
            {"name": "v1alpha1", "storage": false},
            {"name": "v1beta1", "storage": true, "subresources": {"status": {}, "scale": {}}},
        ]}})
    }

    #[test]
    fn a_stored_version_that_the_new_crd_does_not_have_is_lost() {
        for (stored, lost, kept) in [
            (json!(["v1beta1"]), vec![], vec!["v1beta1"]),
            (json!(["v1alpha1", "v1beta1"]), vec![], vec!["v1alpha1", "v1beta1"]),
            (json!(["v1alpha0", "v1beta1"]), vec!["v1alpha0"], vec!["v1beta1"]),
            (json!(["v1alpha0"]), vec!["v1alpha0"], vec!["v1beta1"]),
        ] {
            let check = CrdCheck::new(&desired(), &live(&json!([]), &stored));
            assert_eq!(
                (check.lost_versions, &check.kept_versions),
                (
                    lost.iter().map(|v: &&str| (*v).to_owned()).collect(),
                    &kept.iter().map(|v| (*v).to_owned()).collect::<Vec<_>>()
                ),
                "{stored}"
            );
        }
    }

    #[test]
    fn objects_are_stored_again_only_in_a_version_that_both_crds_have() {
        let version =
            |name: &str, served: bool, storage: bool| json!({"name": name, "served": served, "storage": storage});
        let check = |versions: Value| {
            let mut live = live(&versions, &json!(["v1alpha0", "v1beta1"]));
            live.spec.group = "example.org".to_owned();
            live.spec.names = LiveCrdNames { kind: "Thing".to_owned(), plural: "things".to_owned() };
            CrdCheck::new(&desired(), &live)
        };
        let migrated = check(json!([version("v1alpha0", false, false), version("v1beta1", true, true)]));
        let kind = migrated.migrated_kind().unwrap();
        assert_eq!((kind.api_version.as_str(), kind.plural.as_str()), ("example.org/v1beta1", "things"));
        assert_eq!(migrated.migration.as_ref().unwrap().stored_versions, ["v1beta1"]);
        assert!(!migrated.blocks() && migrated.is_open() && migrated.depends_on_status());
        for refused in [
            // The version that is stored now would be lost too.
            json!([version("v1alpha0", true, true), version("v1beta1", true, false)]),
            // Its objects cannot be written.
            json!([version("v1alpha0", true, false), version("v1beta1", false, true)]),
            // The API server cannot read the old objects any more.
            json!([version("v1beta1", true, true)]),
        ] {
            let check = check(refused.clone());
            assert!(check.blocks() && check.migrated_kind().is_none(), "{refused}");
        }
    }

    #[test]
    fn a_status_subresource_is_new_only_for_a_version_that_exists_without_it() {
        let status = |versions: Value| CrdCheck::new(&desired(), &live(&versions, &json!([]))).new_status;
        assert_eq!(status(json!([{"name": "v1beta1"}])), ["v1beta1"]);
        assert_eq!(status(json!([{"name": "v1beta1", "subresources": {"scale": {}}}])), ["v1beta1"]);
        assert_eq!(status(json!([{"name": "v1beta1", "subresources": {"status": {}}}])), [""; 0]);
        assert_eq!(status(json!([{"name": "v1alpha1"}])), [""; 0], "no object has that version yet");
        let mut crd = desired();
        without_status(&mut crd, &["v1beta1".to_owned()]);
        assert_eq!(crd["spec"]["versions"][1]["subresources"], json!({"scale": {}}));
    }
}
