//! What is accepted but does nothing, or soon will not, or contradicts itself: things to tell an administrator that
//! change no object.

use serde_json::Value;
use vitivirt_api::{
    kubevirt::{Configuration, KubeVirt},
    text::is_subdomain,
};

use crate::{customize, installation::Installation, report::event, validation};

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

pub(crate) struct Warning {
    /// Of the event that tells it.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// What can be told of the resource alone, one sentence for each.
pub fn warnings(kubevirt: &KubeVirt) -> Vec<String> {
    messages(all(kubevirt, None))
}

pub(crate) fn messages(warnings: Vec<Warning>) -> Vec<String> {
    warnings.into_iter().map(|warnings| warnings.message).collect()
}

/// Without an installation it cannot be known which patches found nothing that they are for.
pub(crate) fn all(kubevirt: &KubeVirt, installation: Option<&Installation>) -> Vec<Warning> {
    let spec = &kubevirt.spec;
    let as_advice = |reason| move |message| Warning { reason, message };
    let doubts = validation::doubts(kubevirt).into_iter().map(|doubt| doubt.to_string());
    let idle = installation.into_iter().flat_map(|installation| installation.idle.iter().cloned());
    let account = (!spec.monitor_account.is_empty() && !is_subdomain(&spec.monitor_account)).then(|| {
        format!(
            "spec.monitorAccount {:?} is no name of a service account, so KubeVirt is not monitored: give the account \
             of the monitoring stack, such as prometheus-k8s",
            spec.monitor_account
        )
    });
    let idle = customize::without_effect(&spec.customize_components).chain(idle).chain(account);
    let all = deprecated(kubevirt).into_iter().map(as_advice(event::DEPRECATED));
    all.chain(doubts.map(as_advice(event::DOUBTFUL))).chain(idle.map(as_advice(event::NO_EFFECT))).collect()
}

/// In the order of the resource.
fn deprecated(kubevirt: &KubeVirt) -> Vec<String> {
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
    fn an_account_that_cannot_exist_is_told() {
        for (account, good) in [("prometheus-k8s", true), ("a.b", true), ("a=b", false), ("A", false), ("-a", false)] {
            let told = of(&json!({"monitorAccount": account}));
            assert_eq!(told.is_empty(), good, "{account}: {told:?}");
        }
    }

    #[test]
    fn nothing_to_tell_of_a_plain_resource() {
        assert_eq!(of(&json!({})), [""; 0]);
        assert_eq!(of(&json!({"configuration": {"developerConfiguration": {"featureGates": ["VMExport"]}}})), [""; 0]);
    }

    #[test]
    fn what_the_release_installs_although_it_would_refuse_it_is_told() {
        let told = of(&json!({
            "configuration": {
                "developerConfiguration": {"featureGates": ["VMExport"], "disabledFeatureGates": ["VMExport"]},
                "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "ciphers": ["TLS_AES_128_GCM_SHA256"]},
                "virtTemplateDeployment": {"enabled": true},
                "roleAggregationStrategy": "Manual",
                "additionalGuestMemoryOverheadRatio": "0.5",
                "seccompConfiguration": {"virtualMachineInstanceProfile": {}},
            },
            "certificateRotateStrategy": {"selfSigned": {"caRotateInterval": "168h", "server": {"duration": "24h"}}},
        }));
        for about in [
            "caRotateInterval is deprecated",
            "selfSigned mixes two ways",
            "additionalGuestMemoryOverheadRatio must be",
            "virtTemplateDeployment.enabled cannot be true",
            "roleAggregationStrategy cannot be Manual",
            "tlsConfiguration.ciphers can only",
            "customProfile must be set",
            "both name VMExport",
        ] {
            assert_eq!(told.iter().filter(|told| told.contains(about)).count(), 1, "{about}: {told:?}");
        }
        assert_eq!(told.len(), 8, "{told:?}");
    }

    #[test]
    fn what_can_be_installed_by_nobody_is_no_advice() {
        let registry = json!({"infra": {"replicas": 0}, "imageRegistry": "not a registry"});
        assert_eq!(of(&registry), [""; 0]);
    }

    #[test]
    fn a_patch_of_what_is_never_patched_is_told() {
        let patch = |kind: &str| json!({"resourceType": kind, "resourceName": "*", "type": "merge", "patch": "{}"});
        let told =
            of(&json!({"customizeComponents": {"patches": [patch("deployment"), patch("ClusterRole"), patch("*")]}}));
        assert_eq!(
            told,
            [
                "spec.customizeComponents.patches[1] changes nothing: objects of the type \"ClusterRole\" are not patched, \
                 only Deployment, DaemonSet, Service, Secret, APIService, ValidatingWebhookConfiguration, \
                 MutatingWebhookConfiguration"
            ]
        );
    }
}
