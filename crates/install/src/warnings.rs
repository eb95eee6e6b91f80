//! Warnings about a KubeVirt resource: settings that are deprecated, have no effect or contradict each other. They
//! change no object.

use serde_json::Value;
use vitivirt_api::{
    kubevirt::{Configuration, KubeVirt},
    text::is_subdomain,
};

use crate::{customize, installation::Installation, names::event_reason, validation};

/// Feature gates of features that are always enabled.
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
const REMOVED: [&str; 4] = ["ExperimentalVirtiofsSupport", "Macvtap", "Passt", "PasstIPStackMigration"];

pub(crate) struct Warning {
    /// The reason of its event.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// One sentence for each warning. Patches that match no object, and the number of nodes, are known only with an
/// installation.
pub fn warnings(kubevirt: &KubeVirt, installation: Option<&Installation>) -> Vec<String> {
    all_warnings(kubevirt, installation, 0).into_iter().map(|warning| warning.message).collect()
}

/// `handler_nodes`: the nodes on which virt-handler should run, if that is known. When it has just started, not all of
/// them are marked as schedulable.
pub(crate) fn all_warnings(
    kubevirt: &KubeVirt,
    installation: Option<&Installation>,
    handler_nodes: usize,
) -> Vec<Warning> {
    let spec = &kubevirt.spec;
    let warning = |reason| move |message| Warning { reason, message };
    let nodes = installation.map_or(0, |installation| installation.schedulable_nodes).max(handler_nodes);
    let questionable = validation::questionable(kubevirt).into_iter().map(|setting| setting.to_string());
    let flags = customize::flags_in_lower_case(&spec.customize_components);
    let questionable = questionable.chain(single_replica(kubevirt, nodes)).chain(flags);
    let unused = installation.into_iter().flat_map(|installation| installation.unused_customizations.iter().cloned());
    let account = (!spec.monitor_account.is_empty() && !is_subdomain(&spec.monitor_account)).then(|| {
        format!(
            "spec.monitorAccount: invalid value {:?}: must be the name of a ServiceAccount such as prometheus-k8s; \
             until then KubeVirt is not monitored",
            spec.monitor_account
        )
    });
    let unused = customize::unsupported_kinds(&spec.customize_components).chain(unused).chain(account);
    let deprecated = deprecated(kubevirt).into_iter().map(warning(event_reason::DEPRECATED));
    let questionable = questionable.map(warning(event_reason::CONFIGURATION_WARNING));
    deprecated.chain(questionable).chain(unused.map(warning(event_reason::NO_EFFECT))).collect()
}

/// A single replica on a cluster with several nodes. While the node of the only pod of virt-api is drained, nothing
/// answers the webhook that turns the eviction of a VM into a live migration.
pub fn single_replica(kubevirt: &KubeVirt, nodes: usize) -> Option<String> {
    let replicas = kubevirt.spec.infra.as_ref().and_then(|infra| infra.replicas);
    (replicas == Some(1) && nodes > 1).then(|| {
        "spec.infra.replicas: 1 is too few for a cluster with several nodes: while the node of the only virt-api pod is \
         drained or fails, VMs cannot be created, changed or migrated, and a drain may stop them instead of migrating \
         them; remove the field to run 2 replicas"
            .to_owned()
    })
}

/// In the order of the fields of the resource.
fn deprecated(kubevirt: &KubeVirt) -> Vec<String> {
    let configuration = &kubevirt.spec.configuration;
    let gates = configuration.feature_gates().iter().filter_map(|gate| {
        let what = match gate.as_str() {
            known if ALWAYS_ON.contains(&known) => "is always enabled in this release; remove it from the list",
            known if DEPRECATED.contains(&known) => {
                "is deprecated and will be ignored in a later release; remove it from the list"
            }
            known if REMOVED.contains(&known) => {
                "has no effect, because this release no longer has the feature; remove it from the list"
            }
            _ => return None,
        };
        Some(format!("spec.configuration.developerConfiguration.featureGates: {gate} {what}"))
    });
    let slirp = configuration.extra.get("network").and_then(|network| network.get("permitSlirpInterface"));
    let slirp = slirp.map(|_: &Value| {
        "spec.configuration.network.permitSlirpInterface has no effect: KubeVirt no longer supports slirp \
         interfaces; remove the field"
            .to_owned()
    });
    let architectures = configuration.architecture_configuration.as_ref();
    let ppc64le = architectures.and_then(|architectures| architectures.extra.get("ppc64le")).map(|_: &Value| {
        "spec.configuration.architectureConfiguration.ppc64le has no effect: KubeVirt no longer supports ppc64le; \
         remove the field"
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
        .map(|(older, newer, _)| {
            format!("spec.certificateRotateStrategy.selfSigned.{older} is deprecated; use {newer}")
        })
    });
    gates.chain(slirp).chain(old_device_type_fields(configuration)).chain(ppc64le).chain(older).collect()
}

/// The field with the older spelling, for the cluster and for single nodes.
fn old_device_type_fields(configuration: &Configuration) -> impl Iterator<Item = String> {
    const OLDER: &str = "mediatedDevicesTypes";
    let devices = configuration.extra.get("mediatedDevicesConfiguration");
    let nodes = devices.and_then(|devices| devices.get("nodeMediatedDeviceTypes")).and_then(Value::as_array);
    let nodes = nodes.into_iter().flatten().enumerate().filter(|(_, node)| node.get(OLDER).is_some());
    let nodes = nodes.map(|(index, _)| format!("nodeMediatedDeviceTypes[{index}].{OLDER}"));
    let cluster = devices.and_then(|devices| devices.get(OLDER)).map(|_: &Value| OLDER.to_owned());
    cluster.into_iter().chain(nodes).map(|field| {
        format!("spec.configuration.mediatedDevicesConfiguration.{field} is deprecated; use mediatedDeviceTypes")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn warnings_for(spec: &Value) -> Vec<String> {
        let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "spec": spec});
        warnings(&serde_json::from_value(object).unwrap(), None)
    }

    #[test]
    fn every_deprecated_setting_has_a_warning() {
        let warnings = warnings_for(&json!({
            "configuration": {
                "developerConfiguration": {"featureGates":
                    ["HotplugVolumes", "LiveMigration", "Snapshot", "CPUManager", "NUMA", "HypervStrictCheck"]},
                "network": {"defaultNetworkInterface": "masquerade", "permitSlirpInterface": false},
            },
            "certificateRotateStrategy": {"selfSigned": {"caRotateInterval": "168h", "certRotateInterval": "24h"}},
        }));
        let about = ["LiveMigration", "NUMA", "permitSlirpInterface", "caRotateInterval", "certRotateInterval"];
        assert_eq!(warnings.len(), about.len(), "{warnings:?}");
        for (warning, about) in warnings.iter().zip(about) {
            assert!(warning.contains(about), "{warning}");
        }
    }

    #[test]
    fn a_monitor_account_with_an_invalid_name_has_a_warning() {
        for (account, good) in [("prometheus-k8s", true), ("a.b", true), ("a=b", false), ("A", false), ("-a", false)] {
            let warnings = warnings_for(&json!({"monitorAccount": account}));
            assert_eq!(warnings.is_empty(), good, "{account}: {warnings:?}");
        }
    }

    #[test]
    fn a_minimal_resource_has_no_warnings() {
        assert_eq!(warnings_for(&json!({})), [""; 0]);
        assert_eq!(
            warnings_for(&json!({"configuration": {"developerConfiguration": {"featureGates": ["VMExport"]}}})),
            [""; 0]
        );
    }

    #[test]
    fn settings_that_upstream_rejects_but_installs_have_warnings() {
        let warnings = warnings_for(&json!({
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
            "selfSigned: deprecated fields cannot be combined",
            "additionalGuestMemoryOverheadRatio: invalid value",
            "virtTemplateDeployment.enabled: invalid value true",
            "roleAggregationStrategy: invalid value Manual",
            "tlsConfiguration.ciphers: cannot be configured",
            "customProfile: required value",
            "VMExport is also in disabledFeatureGates",
        ] {
            assert_eq!(warnings.iter().filter(|warning| warning.contains(about)).count(), 1, "{about}: {warnings:?}");
        }
        assert_eq!(warnings.len(), 8, "{warnings:?}");
    }

    #[test]
    fn an_invalid_setting_is_not_a_warning() {
        let registry = json!({"infra": {"replicas": 0}, "imageRegistry": "not a registry"});
        assert_eq!(warnings_for(&registry), [""; 0]);
    }

    #[test]
    fn a_renewal_that_pods_notice_too_late_is_named() {
        let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
        let settings = json!({"ca": {"duration": "1h", "renewBefore": "10m"}, "server": {"duration": "10m"}});
        let found = warnings_for(&selfsigned(settings));
        let expected = "spec.certificateRotateStrategy.selfSigned.server.renewBefore: 2m0s is too short: a kubelet may need \
                        90s to update a mounted Secret, and until then pods serve the old certificate; set at least 3m0s";
        assert_eq!(found, [expected]);
        assert_eq!(warnings_for(&selfsigned(json!({}))), [""; 0]);
    }

    #[test]
    fn fault_8_a_patch_of_a_monitoring_object_has_a_warning() {
        for (kind, remedy) in [
            ("PrometheusRule", "; to change alerts, use Alertmanager or create your own PrometheusRule"),
            ("servicemonitor", "; create your own ServiceMonitor"),
        ] {
            let patch = json!({"resourceType": kind, "resourceName": "prometheus-kubevirt-rules", "type": "json", "patch": "[]"});
            let warnings = warnings_for(&json!({"customizeComponents": {"patches": [patch]}}));
            let expected =
                format!("spec.customizeComponents.patches[0] has no effect: resourceType: unsupported value {kind:?}");
            assert!(warnings.len() == 1 && warnings[0].starts_with(&expected), "{warnings:?}");
            assert!(warnings[0].ends_with(remedy), "{warnings:?}");
        }
    }

    #[test]
    fn a_flag_with_upper_case_letters_has_a_warning() {
        let flags = json!({"handler": {"kubelet-pods-dir": "/Data/pods"}, "api": {"v": "4"}});
        assert_eq!(
            warnings_for(&json!({"customizeComponents": {"flags": flags}})),
            [
                "spec.customizeComponents.flags.handler: --kubelet-pods-dir /Data/pods is passed in lower case, as upstream \
              virt-operator does; to pass it unchanged, use a patch that adds it to the args of the container"
            ]
        );
    }

    #[test]
    fn a_patch_of_an_unsupported_kind_has_a_warning() {
        let patch = |kind: &str| json!({"resourceType": kind, "resourceName": "*", "type": "merge", "patch": "{}"});
        let warnings = warnings_for(
            &json!({"customizeComponents": {"patches": [patch("deployment"), patch("ClusterRole"), patch("*")]}}),
        );
        assert_eq!(
            warnings,
            [
                "spec.customizeComponents.patches[1] has no effect: resourceType: unsupported value \"ClusterRole\"; supported \
                 values: Deployment, DaemonSet, Service, Secret, APIService, ValidatingWebhookConfiguration, \
                 MutatingWebhookConfiguration"
            ]
        );
    }
}
