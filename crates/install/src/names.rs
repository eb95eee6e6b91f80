//! Names that more than one object of an installation uses: components, labels, annotations, feature gates.

pub const VIRT_API: &str = "virt-api";
pub const VIRT_CONTROLLER: &str = "virt-controller";
pub(crate) const VIRT_EXPORT_PROXY: &str = "virt-exportproxy";
pub const VIRT_HANDLER: &str = "virt-handler";
pub const VIRT_OPERATOR: &str = "virt-operator";
pub const VIRT_SYNCHRONIZATION_CONTROLLER: &str = "virt-synchronization-controller";
pub(crate) const VIRT_TEMPLATE_API_SERVER: &str = "virt-template-apiserver";
pub(crate) const VIRT_TEMPLATE_CONTROLLER: &str = "virt-template-controller";

pub const OPERATOR_SERVICE_ACCOUNT: &str = "kubevirt-operator";
pub(crate) const API_SERVICE_ACCOUNT: &str = "kubevirt-apiserver";
pub(crate) const CONTROLLER_SERVICE_ACCOUNT: &str = "kubevirt-controller";
pub(crate) const HANDLER_SERVICE_ACCOUNT: &str = "kubevirt-handler";
pub(crate) const EXPORT_PROXY_SERVICE_ACCOUNT: &str = "kubevirt-exportproxy";
pub(crate) const SYNCHRONIZATION_SERVICE_ACCOUNT: &str = "kubevirt-synchronization-controller";

pub(crate) const OPERATOR_WEBHOOK_SERVICE: &str = "kubevirt-operator-webhook";

/// Keeps the KubeVirt resource until its installation is deleted.
pub(crate) const FINALIZER: &str = "foregroundDeleteKubeVirt";

/// The field manager of the operator's writes. Upstream virt-operator uses the same name.
pub const FIELD_MANAGER: &str = "virt-operator";

/// How the name of a ConfigMap with an install strategy begins.
pub(crate) const STRATEGY_GENERATE_NAME: &str = "kubevirt-install-strategy-";

/// The key of the manifests in that ConfigMap.
pub(crate) const STRATEGY_MANIFESTS: &str = "manifests";

/// The value of the label `kubevirt.io` of the pods that write an install strategy.
pub(crate) const STRATEGY_JOB_APP: &str = "virt-operator-strategy-dumper";

/// Labels.
pub mod label {
    pub(crate) const APP: &str = "kubevirt.io";
    pub(crate) const COMPONENT: &str = "app.kubernetes.io/component";
    pub const INSTALL_STRATEGY: &str = "kubevirt.io/install-strategy";
    pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
    pub const MANAGED_BY_VALUE: &str = "virt-operator";
    pub const NAME: &str = "app.kubernetes.io/name";
    pub(crate) const PART_OF: &str = "app.kubernetes.io/part-of";
    pub(crate) const PROMETHEUS: &str = "prometheus.kubevirt.io";
    pub const VERSION: &str = "app.kubernetes.io/version";
    /// This virt-handler checks the client certificate of a migration.
    pub(crate) const CHECKS_MIGRATION_NAMES: &str = "kubevirt.io/supports-migration-cn-types";
    pub(crate) const MAY_REACH_CLUSTER_SERVICES: &str = "np.kubevirt.io/allow-access-cluster-services";
    pub(crate) const CLUSTER_MONITORING: &str = "openshift.io/cluster-monitoring";
    /// The label of the installation's namespace, so that OpenShift's Prometheus scrapes it.
    pub const OF_NAMESPACE: (&str, &str) = (CLUSTER_MONITORING, "true");
}

/// Annotations.
pub mod annotation {
    pub(crate) const CERTIFICATE_SECRET: &str = "certificates.kubevirt.io/secret";
    pub(crate) const CUSTOMIZER_IDENTIFIER: &str = "kubevirt.io/customizer-identifier";
    pub const DURATION: &str = "kubevirt.io/duration";
    pub(crate) const ENCODING: &str = "kubevirt.io/install-strategy-cm-encoding";
    pub(crate) const GENERATION: &str = "kubevirt.io/generation";
    pub const IDENTIFIER: &str = "kubevirt.io/install-strategy-identifier";
    pub(crate) const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
    pub(crate) const REGISTRY: &str = "kubevirt.io/install-strategy-registry";
    pub(crate) const REQUIRED_SCC: &str = "openshift.io/required-scc";
    /// `kubectl rollout restart` sets it in the pod template.
    pub(crate) const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";
    pub const VERSION: &str = "kubevirt.io/install-strategy-version";
}

/// Reasons of events about a KubeVirt resource.
pub(crate) mod event_reason {
    pub(crate) const CERTIFICATE_NOT_LOADED: &str = "CertificateNotLoaded";
    pub(crate) const CERTIFICATE_REFUSED: &str = "CertificateRefused";
    pub(crate) const CONFIGURATION_WARNING: &str = "ConfigurationWarning";
    pub(crate) const DELETING: &str = "Deleting";
    pub(crate) const DELETION_BLOCKED: &str = "DeletionBlocked";
    pub(crate) const DELETION_FAILED: &str = "DeletionFailed";
    pub(crate) const DEPLOYED: &str = "Deployed";
    pub(crate) const DEPRECATED: &str = "Deprecated";
    pub(crate) const FAILED: &str = "DeploymentFailed";
    /// Upstream virt-operator uses it too.
    pub(crate) const FAILED_UPDATE: &str = "FailedUpdate";
    pub(crate) const NODE_NOT_READY: &str = "NodeNotReady";
    pub(crate) const NOT_INSTALLED: &str = "ExistingDeployment";
    pub(crate) const NO_EFFECT: &str = "NoEffect";
    pub(crate) const PODS_FAIL: &str = "PodsFail";
    pub(crate) const POD_DELETED: &str = "PodDeleted";
    pub(crate) const PROBLEM: &str = "PartiallySynchronized";
    pub(crate) const REPEATED_DRIFT: &str = "RepeatedDrift";
    pub(crate) const REPLICAS: &str = "AdvancedFeatureUse";
}

/// Feature gates that change the installation. Each is off unless the resource lists it.
pub mod gate {
    pub(crate) const CONFIGURABLE_HYPERVISOR: &str = "ConfigurableHypervisor";
    pub(crate) const CONTAINER_PATH_VOLUMES: &str = "ContainerPathVolumes";
    pub const DECENTRALIZED_LIVE_MIGRATION: &str = "DecentralizedLiveMigration";
    pub(crate) const EXTERNAL_NET_RESOURCE_INJECTION: &str = "ExternalNetResourceInjection";
    pub(crate) const OPT_OUT_ROLE_AGGREGATION: &str = "OptOutRoleAggregation";
    pub(crate) const PERSISTENT_RESERVATION: &str = "PersistentReservation";
    pub(crate) const TEMPLATE: &str = "Template";
    pub(crate) const VM_EXPORT: &str = "VMExport";
}

/// Annotations that identify the deployment of a pod. A change of them alone must not restart the pod.
pub(crate) const IDENTITY: [&str; 3] = [annotation::VERSION, annotation::REGISTRY, annotation::IDENTIFIER];
