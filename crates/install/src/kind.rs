//! The kinds of the objects of an installation.

use vitivirt_api::ApiResource;

/// In the order of the install strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    ServiceAccount,
    ClusterRole,
    ClusterRoleBinding,
    Role,
    RoleBinding,
    CustomResourceDefinition,
    Service,
    Secret,
    ValidatingWebhookConfiguration,
    MutatingWebhookConfiguration,
    ValidatingAdmissionPolicyBinding,
    ValidatingAdmissionPolicy,
    ApiService,
    Deployment,
    DaemonSet,
    SecurityContextConstraints,
    ServiceMonitor,
    PrometheusRule,
    ConfigMap,
    Route,
    Instancetype,
    Preference,
    /// Not part of a strategy: it follows from a Deployment.
    PodDisruptionBudget,
    /// Not part of an installation: it dumps the install strategy of another release.
    Job,
}

impl Kind {
    pub const ALL: [Self; 24] = [
        Self::ServiceAccount,
        Self::ClusterRole,
        Self::ClusterRoleBinding,
        Self::Role,
        Self::RoleBinding,
        Self::CustomResourceDefinition,
        Self::Service,
        Self::Secret,
        Self::ValidatingWebhookConfiguration,
        Self::MutatingWebhookConfiguration,
        Self::ValidatingAdmissionPolicyBinding,
        Self::ValidatingAdmissionPolicy,
        Self::ApiService,
        Self::Deployment,
        Self::DaemonSet,
        Self::SecurityContextConstraints,
        Self::ServiceMonitor,
        Self::PrometheusRule,
        Self::ConfigMap,
        Self::Route,
        Self::Instancetype,
        Self::Preference,
        Self::PodDisruptionBudget,
        Self::Job,
    ];

    /// Group, version, kind and plural.
    fn names(self) -> [&'static str; 4] {
        const RBAC: &str = "rbac.authorization.k8s.io";
        const ADMISSION: &str = "admissionregistration.k8s.io";
        const INSTANCETYPE: &str = "instancetype.kubevirt.io";
        match self {
            Self::ServiceAccount => ["", "v1", "ServiceAccount", "serviceaccounts"],
            Self::ClusterRole => [RBAC, "v1", "ClusterRole", "clusterroles"],
            Self::ClusterRoleBinding => [RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings"],
            Self::Role => [RBAC, "v1", "Role", "roles"],
            Self::RoleBinding => [RBAC, "v1", "RoleBinding", "rolebindings"],
            Self::CustomResourceDefinition => {
                ["apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"]
            }
            Self::Service => ["", "v1", "Service", "services"],
            Self::Secret => ["", "v1", "Secret", "secrets"],
            Self::ValidatingWebhookConfiguration => {
                [ADMISSION, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"]
            }
            Self::MutatingWebhookConfiguration => {
                [ADMISSION, "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations"]
            }
            Self::ValidatingAdmissionPolicyBinding => {
                [ADMISSION, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"]
            }
            Self::ValidatingAdmissionPolicy => {
                [ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies"]
            }
            Self::ApiService => ["apiregistration.k8s.io", "v1", "APIService", "apiservices"],
            Self::Deployment => ["apps", "v1", "Deployment", "deployments"],
            Self::DaemonSet => ["apps", "v1", "DaemonSet", "daemonsets"],
            Self::SecurityContextConstraints => {
                ["security.openshift.io", "v1", "SecurityContextConstraints", "securitycontextconstraints"]
            }
            Self::ServiceMonitor => ["monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"],
            Self::PrometheusRule => ["monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"],
            Self::ConfigMap => ["", "v1", "ConfigMap", "configmaps"],
            Self::Route => ["route.openshift.io", "v1", "Route", "routes"],
            Self::Instancetype => {
                [INSTANCETYPE, "v1beta1", "VirtualMachineClusterInstancetype", "virtualmachineclusterinstancetypes"]
            }
            Self::Preference => {
                [INSTANCETYPE, "v1beta1", "VirtualMachineClusterPreference", "virtualmachineclusterpreferences"]
            }
            Self::Job => ["batch", "v1", "Job", "jobs"],
            Self::PodDisruptionBudget => ["policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"],
        }
    }

    pub fn name(self) -> &'static str {
        let [_, _, name, _] = self.names();
        name
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub fn resource(self) -> ApiResource {
        let [group, version, kind, plural] = self.names();
        ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: self.api_version(),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        }
    }

    pub fn api_version(self) -> String {
        match self.names() {
            ["", version, ..] => version.to_owned(),
            [group, version, ..] => format!("{group}/{version}"),
        }
    }
}
