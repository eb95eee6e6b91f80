//! KubeVirt's CRDs. Their schemas are data of the KubeVirt release.

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::Failure;

use crate::compressed::CompressedAsset;

/// One compressed CRD.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CrdSource {
    name: &'static str,
    asset: CompressedAsset,
}

macro_rules! crd {
    ($name:literal) => {
        CrdSource {
            name: $name,
            asset: CompressedAsset::new(include_bytes!(concat!("../assets/v1.8.4/crds/", $name, ".json.gz"))),
        }
    };
}

/// The CRD of KubeVirt itself. It is installed together with the operator, not by it.
pub const KUBEVIRT: CrdSource = crd!("kubevirts.kubevirt.io");

/// The CRDs that the operator installs, in the order of the install strategy.
pub(crate) const CRDS: [CrdSource; 18] = [
    crd!("virtualmachineinstances.kubevirt.io"),
    crd!("virtualmachineinstancepresets.kubevirt.io"),
    crd!("virtualmachineinstancereplicasets.kubevirt.io"),
    crd!("virtualmachines.kubevirt.io"),
    crd!("virtualmachineinstancemigrations.kubevirt.io"),
    crd!("virtualmachinesnapshots.snapshot.kubevirt.io"),
    crd!("virtualmachinesnapshotcontents.snapshot.kubevirt.io"),
    crd!("virtualmachinerestores.snapshot.kubevirt.io"),
    crd!("virtualmachineinstancetypes.instancetype.kubevirt.io"),
    crd!("virtualmachineclusterinstancetypes.instancetype.kubevirt.io"),
    crd!("virtualmachinepools.pool.kubevirt.io"),
    crd!("migrationpolicies.migrations.kubevirt.io"),
    crd!("virtualmachinepreferences.instancetype.kubevirt.io"),
    crd!("virtualmachineclusterpreferences.instancetype.kubevirt.io"),
    crd!("virtualmachineexports.export.kubevirt.io"),
    crd!("virtualmachineclones.clone.kubevirt.io"),
    crd!("virtualmachinebackups.backup.kubevirt.io"),
    crd!("virtualmachinebackuptrackers.backup.kubevirt.io"),
];

/// The CRDs of virt-template.
pub(crate) const TEMPLATE_CRDS: [CrdSource; 2] =
    [crd!("virtualmachinetemplaterequests.template.kubevirt.io"), crd!("virtualmachinetemplates.template.kubevirt.io")];

/// The content of the asset. All versions of a CRD share one schema.
#[derive(Deserialize)]
struct CrdAsset {
    #[serde(rename = "definition")]
    crd: Value,
    schema: Value,
}

/// The part of the asset that is read without the schema.
#[derive(Deserialize)]
struct CrdMetadataAsset {
    #[serde(rename = "definition")]
    crd: CrdMetadata,
}

#[derive(Deserialize)]
struct CrdMetadata {
    metadata: Value,
}

impl CrdSource {
    /// The plural and the group, separated by a dot.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The metadata of the object, without building its schema.
    pub(crate) fn metadata(&self) -> Result<Value, Failure> {
        Ok(self.asset.parse::<CrdMetadataAsset>()?.crd.metadata)
    }

    /// The compressed object.
    pub(crate) fn bytes(&self) -> &'static [u8] {
        self.asset.bytes()
    }

    /// The whole object. It is large: decompress one, send it and drop it.
    pub fn object(&self) -> Result<Value, Failure> {
        let CrdAsset { mut crd, schema } = self.asset.parse()?;
        let versions = crd.pointer_mut("/spec/versions").and_then(Value::as_array_mut);
        for version in versions.into_iter().flatten() {
            if let Some(version) = version.as_object_mut() {
                version.insert("schema".to_owned(), schema.clone());
            }
        }
        Ok(crd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crd_is_complete_and_without_descriptions() {
        for crd in CRDS.iter().chain(&TEMPLATE_CRDS).chain([&KUBEVIRT]) {
            let object = crd.object().unwrap();
            assert_eq!(object["metadata"]["name"], crd.name());
            let spec = &object["spec"];
            let name = format!("{}.{}", spec["names"]["plural"].as_str().unwrap(), spec["group"].as_str().unwrap());
            assert_eq!(name, crd.name());
            let versions = spec["versions"].as_array().unwrap();
            assert_eq!(versions.iter().filter(|version| version["storage"] == true).count(), 1, "{name}");
            for version in versions {
                assert!(version["schema"]["openAPIV3Schema"]["properties"].is_object(), "{name}");
            }
            assert!(!object.to_string().contains(r#""description":""#), "{name}");
        }
    }
}
