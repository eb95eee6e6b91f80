//! What is accepted but does nothing, or soon will not: things to tell an administrator that change no object.

use api::kubevirt::{Configuration, KubeVirt};
use serde_json::Value;

/// Gates of features that are always on.
const ALWAYS_ON: [&str; 21] = [
    "AutoResourceLimitsGate",
    "BochsDisplayForEFIGuests",
    "CPUNodeDiscovery",
    "ClusterProfiler",
    "CommonInstancetypesDeploymentGate",
    "DisableCustomSELinuxPolicy",
    "DynamicPodInterfaceNaming",
    "EnableVirtioFsConfigVolumes",
    "GPU",
    "HotplugNICs",
    "InstancetypeReferencePolicy",
    "LiveMigration",
    "NUMA",
    "NetworkBindingPlugins",
    "NonRoot",
    "PSA",
    "SRIOVLiveMigration",
    "VMLiveUpdateFeatures",
    "VMPersistentState",
    "VolumeMigration",
    "VolumesUpdateStrategy",
];
const DEPRECATED: [&str; 3] = ["DisableMDEVConfiguration", "DockerSELinuxMCSWorkaround", "MultiArchitecture"];
const GONE: [&str; 4] = ["ExperimentalVirtiofsSupport", "Macvtap", "Passt", "PasstIPStackMigration"];

/// One sentence for each, in the order of the resource.
pub fn warnings(kubevirt: &KubeVirt) -> Vec<String> {
    let configuration = &kubevirt.spec.configuration;
    let gates = configuration.gates().iter().filter_map(|gate| {
        let what = match gate.as_str() {
            known if ALWAYS_ON.contains(&known) => "is always on in this release and can be taken off the list",
            known if DEPRECATED.contains(&known) => "is deprecated and will be ignored in a later release",
            known if GONE.contains(&known) => "is no longer part of KubeVirt and does nothing",
            _ => return None,
        };
        Some(format!("feature gate {gate} {what}"))
    });
    let slirp = configuration.extra.get("network").and_then(|network| network.get("permitSlirpInterface"));
    let slirp = slirp.map(|_: &Value| {
        "spec.configuration.network.permitSlirpInterface does nothing: KubeVirt no longer has slirp interfaces"
            .to_owned()
    });
    let architectures = configuration.architecture_configuration.as_ref();
    let ppc64le = architectures.and_then(|architectures| architectures.extra.get("ppc64le")).map(|_: &Value| {
        "spec.configuration.architectureConfiguration.ppc64le does nothing: KubeVirt no longer runs on ppc64le"
            .to_owned()
    });
    let older = kubevirt.spec.self_signed().into_iter().flat_map(|settings| {
        [
            ("caRotateInterval", "ca.duration", settings.ca_rotate_interval.is_some()),
            ("certRotateInterval", "server.duration", settings.cert_rotate_interval.is_some()),
            ("caOverlapInterval", "ca.renewBefore", settings.ca_overlap_interval.is_some()),
        ]
        .into_iter()
        .filter(|(_, _, given)| *given)
        .map(|(older, newer, _)| format!("selfSigned.{older} is deprecated: use selfSigned.{newer}"))
    });
    gates.chain(slirp).chain(misspelt_device_types(configuration)).chain(ppc64le).chain(older).collect()
}

/// The field of the older spelling, of the cluster and of single nodes.
fn misspelt_device_types(configuration: &Configuration) -> impl Iterator<Item = String> {
    const OLDER: &str = "mediatedDevicesTypes";
    let devices = configuration.extra.get("mediatedDevicesConfiguration");
    let nodes = devices.and_then(|devices| devices.get("nodeMediatedDeviceTypes")).and_then(Value::as_array);
    let nodes = nodes.into_iter().flatten().enumerate().filter(|(_, node)| node.get(OLDER).is_some());
    let nodes = nodes.map(|(index, _)| format!("nodeMediatedDeviceTypes[{index}].{OLDER}"));
    let all = devices.and_then(|devices| devices.get(OLDER)).map(|_: &Value| OLDER.to_owned());
    all.into_iter().chain(nodes).map(|field| {
        format!("spec.configuration.mediatedDevicesConfiguration.{field} is deprecated: use mediatedDeviceTypes")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(spec: &Value) -> Vec<String> {
        let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "spec": spec});
        warnings(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn the_seeds_resource_is_told_what_it_need_not_say() {
        let told = of(&json!({
            "configuration": {
                "developerConfiguration": {"featureGates":
                    ["HotplugVolumes", "LiveMigration", "Snapshot", "CPUManager", "NUMA", "HypervStrictCheck"]},
                "network": {"defaultNetworkInterface": "masquerade", "permitSlirpInterface": false},
            },
            "certificateRotateStrategy": {"selfSigned": {"caRotateInterval": "168h", "certRotateInterval": "24h"}},
        }));
        let about = ["LiveMigration", "NUMA", "permitSlirpInterface", "caRotateInterval", "certRotateInterval"];
        assert_eq!(told.len(), about.len(), "{told:?}");
        for (told, about) in told.iter().zip(about) {
            assert!(told.contains(about), "{told}");
        }
    }

    #[test]
    fn nothing_to_tell_of_a_plain_resource() {
        assert_eq!(of(&json!({})), [""; 0]);
        assert_eq!(of(&json!({"configuration": {"developerConfiguration": {"featureGates": ["VMExport"]}}})), [""; 0]);
    }
}
