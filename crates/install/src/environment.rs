//! What an installation depends on besides the KubeVirt resource: the operator's own environment variables, and what
//! the cluster offers. Both are given as data; reading them is the program's part.

use std::collections::BTreeMap;

use crate::kind::Kind;

const PASSED_ON: &str = "KV_IO_EXTRA_ENV_";

/// The environment variables that the operator's Deployment sets, in the names of the release.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `VIRT_OPERATOR_IMAGE`: every component's image is derived from it.
    pub operator_image: String,
    /// `KUBEVIRT_VERSION`: the version when the image has none.
    pub kubevirt_version: String,
    pub images: ImageOverrides,
    /// `KV_IO_EXTRA_ENV_*` without the prefix: given to every component.
    pub passed_on: BTreeMap<String, String>,
    /// `RUNBOOK_URL_TEMPLATE`: where alerts point to, with one `%s` for the alert's name.
    pub runbook_url_template: Option<String>,
}

/// `VIRT_*_IMAGE` and its like: an image that is not derived. Empty is derived.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageOverrides {
    pub api: String,
    pub controller: String,
    pub handler: String,
    pub launcher: String,
    pub export_proxy: String,
    pub export_server: String,
    pub synchronization_controller: String,
    pub template_api_server: String,
    pub template_controller: String,
    pub guestfs: String,
    pub persistent_reservation_helper: String,
    pub sidecar_shim: String,
}

impl Environment {
    /// From pairs of names and values, as `std::env::vars` gives them.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let variables: BTreeMap<String, String> = variables.into_iter().collect();
        let get = |name: &str| variables.get(name).cloned().unwrap_or_default();
        let first = |names: [&str; 2]| names.map(get).into_iter().find(|value| !value.is_empty()).unwrap_or_default();
        Self {
            operator_image: first(["VIRT_OPERATOR_IMAGE", "OPERATOR_IMAGE"]),
            kubevirt_version: get("KUBEVIRT_VERSION"),
            images: ImageOverrides {
                api: get("VIRT_API_IMAGE"),
                controller: get("VIRT_CONTROLLER_IMAGE"),
                handler: get("VIRT_HANDLER_IMAGE"),
                launcher: get("VIRT_LAUNCHER_IMAGE"),
                export_proxy: get("VIRT_EXPORTPROXY_IMAGE"),
                export_server: get("VIRT_EXPORTSERVER_IMAGE"),
                synchronization_controller: get("VIRT_SYNCHRONIZATIONCONTROLLER_IMAGE"),
                template_api_server: get("VIRT_TEMPLATE_APISERVER_IMAGE"),
                template_controller: get("VIRT_TEMPLATE_CONTROLLER_IMAGE"),
                guestfs: get("GS_IMAGE"),
                persistent_reservation_helper: get("PR_HELPER_IMAGE"),
                sidecar_shim: get("SIDECAR_SHIM_IMAGE"),
            },
            passed_on: variables
                .iter()
                .filter_map(|(name, value)| {
                    // The release keeps what stands before a second equals sign, and the identifier of the deployment
                    // is computed from it.
                    let value = value.split('=').next().unwrap_or_default();
                    Some((name.strip_prefix(PASSED_ON)?.to_owned(), value.to_owned()))
                })
                .collect(),
            runbook_url_template: variables.get("RUNBOOK_URL_TEMPLATE").cloned(),
        }
    }
}

/// What the cluster offers, as far as it changes what is installed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    pub service_monitors: bool,
    pub prometheus_rules: bool,
    pub admission_policies: bool,
    pub security_context_constraints: bool,
    pub routes: bool,
    /// The first of `DeploymentConfig::monitor_namespaces` in which `DeploymentConfig::monitor_account` exists.
    pub monitor_namespace: Option<String>,
    /// Nodes with the label `kubevirt.io/schedulable=true`.
    pub schedulable_nodes: usize,
}

impl Cluster {
    /// What follows from the kinds that it has.
    pub fn with(has: impl Fn(Kind) -> bool, schedulable_nodes: usize) -> Self {
        Self {
            service_monitors: has(Kind::ServiceMonitor),
            prometheus_rules: has(Kind::PrometheusRule),
            admission_policies: has(Kind::ValidatingAdmissionPolicy) && has(Kind::ValidatingAdmissionPolicyBinding),
            security_context_constraints: has(Kind::SecurityContextConstraints),
            routes: has(Kind::Route),
            monitor_namespace: None,
            schedulable_nodes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        Environment::from_variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn the_older_name_of_the_operators_image_counts_when_the_newer_is_empty() {
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a")]).operator_image, "a");
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a"), ("VIRT_OPERATOR_IMAGE", "")]).operator_image, "a");
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a"), ("VIRT_OPERATOR_IMAGE", "b")]).operator_image, "b");
    }

    #[test]
    fn extra_variables_lose_their_prefix_and_what_follows_a_second_equals_sign() {
        let passed_on = environment(&[("KV_IO_EXTRA_ENV_A", "x=y"), ("KV_IO_EXTRA", "z")]).passed_on;
        assert_eq!(passed_on, BTreeMap::from([("A".to_owned(), "x".to_owned())]));
    }
}
