//! Objects for OpenShift: SecurityContextConstraints and the Route to virt-exportproxy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use crate::{
    config::DeploymentConfig,
    kind::Kind,
    metadata::{cluster_scoped, namespaced, strings},
    names::{CONTROLLER_SERVICE_ACCOUNT, HANDLER_SERVICE_ACCOUNT, VIRT_EXPORT_PROXY},
};

/// Every field that the API requires is written, even as null.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecurityContextConstraints {
    api_version: String,
    kind: &'static str,
    pub(crate) metadata: ObjectMeta,
    priority: Option<i32>,
    allow_privileged_container: bool,
    default_add_capabilities: Option<Vec<String>>,
    required_drop_capabilities: Option<Vec<String>>,
    allowed_capabilities: Option<Vec<String>>,
    allow_host_dir_volume_plugin: bool,
    volumes: Option<Vec<String>>,
    allow_host_network: bool,
    allow_host_ports: bool,
    #[serde(rename = "allowHostPID")]
    allow_host_pid: bool,
    #[serde(rename = "allowHostIPC")]
    allow_host_ipc: bool,
    se_linux_context: SccStrategy,
    run_as_user: SccStrategy,
    supplemental_groups: SccStrategy,
    fs_group: SccStrategy,
    read_only_root_filesystem: bool,
    users: Vec<String>,
    groups: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seccomp_profiles: Option<Vec<String>>,
}

#[derive(Clone, Copy, Serialize)]
struct SccStrategy {
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
}

const ANY: SccStrategy = SccStrategy { kind: Some("RunAsAny") };
const UNSET: SccStrategy = SccStrategy { kind: None };

pub(crate) fn constraints(config: &DeploymentConfig) -> Vec<SecurityContextConstraints> {
    let constraints = |account: &str, of_node: bool| SecurityContextConstraints {
        api_version: Kind::SecurityContextConstraints.api_version(),
        kind: Kind::SecurityContextConstraints.name(),
        metadata: cluster_scoped(account, &[]),
        priority: None,
        allow_privileged_container: of_node,
        default_add_capabilities: None,
        required_drop_capabilities: None,
        allowed_capabilities: None,
        allow_host_dir_volume_plugin: true,
        volumes: None,
        allow_host_network: false,
        allow_host_ports: of_node,
        allow_host_pid: of_node,
        allow_host_ipc: of_node,
        se_linux_context: ANY,
        run_as_user: ANY,
        supplemental_groups: UNSET,
        fs_group: UNSET,
        read_only_root_filesystem: false,
        users: vec![format!("system:serviceaccount:{}:{account}", config.namespace)],
        groups: None,
        seccomp_profiles: None,
    };
    vec![
        SecurityContextConstraints { volumes: Some(strings(&["*"])), ..constraints(HANDLER_SERVICE_ACCOUNT, true) },
        SecurityContextConstraints {
            // virt-launcher pins CPUs and answers DHCP.
            allowed_capabilities: Some(strings(&["SYS_NICE", "NET_BIND_SERVICE"])),
            seccomp_profiles: Some(strings(&["runtime/default", "unconfined", "localhost/kubevirt/kubevirt.json"])),
            ..constraints(CONTROLLER_SERVICE_ACCOUNT, false)
        },
    ]
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Route {
    api_version: String,
    kind: &'static str,
    pub(crate) metadata: ObjectMeta,
    spec: RouteSpec,
}

#[derive(Serialize)]
struct RouteSpec {
    to: RouteTarget,
    tls: RouteTls,
}

#[derive(Serialize)]
struct RouteTarget {
    kind: &'static str,
    name: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RouteTls {
    termination: &'static str,
    insecure_edge_termination_policy: &'static str,
}

/// Without its CA certificate, which is inserted when the Route is sent.
pub(crate) fn route(config: &DeploymentConfig) -> Route {
    Route {
        api_version: Kind::Route.api_version(),
        kind: Kind::Route.name(),
        metadata: namespaced(&config.namespace, VIRT_EXPORT_PROXY, &[]),
        spec: RouteSpec {
            to: RouteTarget { kind: "Service", name: VIRT_EXPORT_PROXY },
            tls: RouteTls { termination: "reencrypt", insecure_edge_termination_policy: "Redirect" },
        },
    }
}
