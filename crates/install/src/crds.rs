//! The definitions of KubeVirt's custom resources: their schemas are data of the release.

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::Failure;

use crate::packed::Packed;

/// One definition, packed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CrdSource {
    name: &'static str,
    packed: Packed,
}

macro_rules! definition {
    ($name:literal) => {
        CrdSource {
            name: $name,
            packed: Packed::new(include_bytes!(concat!("../assets/v1.8.4/crds/", $name, ".json.gz"))),
        }
    };
}

/// The KubeVirt resource itself. It is installed together with the operator, not by it.
pub const KUBEVIRT: CrdSource = definition!("kubevirts.kubevirt.io");

/// What the operator installs, in its order.
pub const DEFINITIONS: [CrdSource; 18] = [
    definition!("virtualmachineinstances.kubevirt.io"),
    definition!("virtualmachineinstancepresets.kubevirt.io"),
    definition!("virtualmachineinstancereplicasets.kubevirt.io"),
    definition!("virtualmachines.kubevirt.io"),
    definition!("virtualmachineinstancemigrations.kubevirt.io"),
    definition!("virtualmachinesnapshots.snapshot.kubevirt.io"),
    definition!("virtualmachinesnapshotcontents.snapshot.kubevirt.io"),
    definition!("virtualmachinerestores.snapshot.kubevirt.io"),
    definition!("virtualmachineinstancetypes.instancetype.kubevirt.io"),
    definition!("virtualmachineclusterinstancetypes.instancetype.kubevirt.io"),
    definition!("virtualmachinepools.pool.kubevirt.io"),
    definition!("migrationpolicies.migrations.kubevirt.io"),
    definition!("virtualmachinepreferences.instancetype.kubevirt.io"),
    definition!("virtualmachineclusterpreferences.instancetype.kubevirt.io"),
    definition!("virtualmachineexports.export.kubevirt.io"),
    definition!("virtualmachineclones.clone.kubevirt.io"),
    definition!("virtualmachinebackups.backup.kubevirt.io"),
    definition!("virtualmachinebackuptrackers.backup.kubevirt.io"),
];

/// What comes with virt-template.
pub(crate) const TEMPLATE_DEFINITIONS: [CrdSource; 2] = [
    definition!("virtualmachinetemplaterequests.template.kubevirt.io"),
    definition!("virtualmachinetemplates.template.kubevirt.io"),
];

/// As it is packed: all versions of a resource share one schema.
#[derive(Deserialize)]
struct Unpacked {
    definition: Value,
    schema: Value,
}

impl CrdSource {
    /// The plural and the group with a dot between them.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The whole object. Big: unpack one, send it, forget it.
    pub fn object(&self) -> Result<Value, Failure> {
        let Unpacked { mut definition, schema } = self.packed.parse()?;
        let versions = definition.pointer_mut("/spec/versions").and_then(Value::as_array_mut);
        for version in versions.into_iter().flatten() {
            if let Some(version) = version.as_object_mut() {
                version.insert("schema".to_owned(), schema.clone());
            }
        }
        Ok(definition)
    }
}

/// Takes the status subresource away from the versions of `definition` that do not have it in `live`. A resource
/// that gains one must not before the components that write through it run; `None` if nothing was taken.
pub fn without_new_status(definition: &Value, live: &Value) -> Option<Value> {
    let has_status = |version: &Value| version.pointer("/subresources/status").is_some();
    let versions =
        |crd: &'_ Value| crd.pointer("/spec/versions").and_then(Value::as_array).cloned().unwrap_or_default();
    let live = versions(live);
    let lacks = |name: Option<&Value>| !live.iter().any(|version| version.get("name") == name && has_status(version));
    let mut reduced = definition.clone();
    let mut taken = false;
    for version in reduced.pointer_mut("/spec/versions").and_then(Value::as_array_mut).into_iter().flatten() {
        if has_status(version) && lacks(version.get("name")) {
            let subresources = version.get_mut("subresources").and_then(Value::as_object_mut);
            taken |= subresources.and_then(|subresources| subresources.remove("status")).is_some();
        }
    }
    taken.then_some(reduced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_definition_is_whole_and_without_prose() {
        for definition in DEFINITIONS.iter().chain(&TEMPLATE_DEFINITIONS).chain([&KUBEVIRT]) {
            let object = definition.object().unwrap();
            assert_eq!(object["metadata"]["name"], definition.name());
            let spec = &object["spec"];
            let name = format!("{}.{}", spec["names"]["plural"].as_str().unwrap(), spec["group"].as_str().unwrap());
            assert_eq!(name, definition.name());
            let versions = spec["versions"].as_array().unwrap();
            assert_eq!(versions.iter().filter(|version| version["storage"] == true).count(), 1, "{name}");
            for version in versions {
                assert!(version["schema"]["openAPIV3Schema"]["properties"].is_object(), "{name}");
            }
            assert!(!object.to_string().contains(r#""description":""#), "{name}");
        }
    }

    #[test]
    fn a_status_that_the_live_definition_lacks_comes_later() {
        let ours = DEFINITIONS[3].object().unwrap();
        assert_eq!(without_new_status(&ours, &ours), None);
        let mut live = ours.clone();
        live["spec"]["versions"][0]["subresources"] = Value::Null;
        let reduced = without_new_status(&ours, &live).unwrap();
        assert_eq!(reduced["spec"]["versions"][0]["subresources"].get("status"), None);
        assert!(reduced["spec"]["versions"][1]["subresources"].get("status").is_some());
    }
}
