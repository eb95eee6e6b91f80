//! What an installation depends on besides the KubeVirt resource: the environment variables of the operator and the
//! features of the cluster. Both are arguments; virt-operator reads them.

use std::collections::BTreeMap;

use crate::{
    images::{OperatorImage, is_image, is_tag},
    kind::Kind,
};

const PASSED_ON: &str = "KV_IO_EXTRA_ENV_";

/// Names of the variables for single images.
mod variable {
    pub(super) const API: &str = "VIRT_API_IMAGE";
    pub(super) const CONTROLLER: &str = "VIRT_CONTROLLER_IMAGE";
    pub(super) const HANDLER: &str = "VIRT_HANDLER_IMAGE";
    pub(super) const LAUNCHER: &str = "VIRT_LAUNCHER_IMAGE";
    pub(super) const EXPORT_PROXY: &str = "VIRT_EXPORTPROXY_IMAGE";
    pub(super) const EXPORT_SERVER: &str = "VIRT_EXPORTSERVER_IMAGE";
    pub(super) const SYNCHRONIZATION_CONTROLLER: &str = "VIRT_SYNCHRONIZATIONCONTROLLER_IMAGE";
    pub(super) const TEMPLATE_API_SERVER: &str = "VIRT_TEMPLATE_APISERVER_IMAGE";
    pub(super) const TEMPLATE_CONTROLLER: &str = "VIRT_TEMPLATE_CONTROLLER_IMAGE";
    pub(super) const GUESTFS: &str = "GS_IMAGE";
    pub(super) const PERSISTENT_RESERVATION_HELPER: &str = "PR_HELPER_IMAGE";
    pub(super) const SIDECAR_SHIM: &str = "SIDECAR_SHIM_IMAGE";
}

/// The environment variables of the operator's Deployment, with the names of upstream virt-operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `VIRT_OPERATOR_IMAGE`: the images of the components are derived from it.
    pub operator_image: String,
    /// `KUBEVIRT_VERSION`: the version, if the image has no tag.
    pub kubevirt_version: String,
    pub images: ImageOverrides,
    /// `KV_IO_EXTRA_ENV_*` without the prefix: set for every component.
    pub passed_on: BTreeMap<String, String>,
    /// `RUNBOOK_URL_TEMPLATE`: the runbook URL of alerts, with one `%s` for the name of the alert.
    pub runbook_url_template: Option<String>,
}

/// `VIRT_*_IMAGE` and similar variables: images that are not derived. An empty image is derived.
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
    /// From pairs of names and values, such as those of `std::env::vars`.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let variables: BTreeMap<String, String> = variables.into_iter().collect();
        let get = |name: &str| variables.get(name).cloned().unwrap_or_default();
        let first = |names: [&str; 2]| names.map(get).into_iter().find(|value| !value.is_empty()).unwrap_or_default();
        Self {
            operator_image: first(["VIRT_OPERATOR_IMAGE", "OPERATOR_IMAGE"]),
            kubevirt_version: get("KUBEVIRT_VERSION"),
            images: ImageOverrides {
                api: get(variable::API),
                controller: get(variable::CONTROLLER),
                handler: get(variable::HANDLER),
                launcher: get(variable::LAUNCHER),
                export_proxy: get(variable::EXPORT_PROXY),
                export_server: get(variable::EXPORT_SERVER),
                synchronization_controller: get(variable::SYNCHRONIZATION_CONTROLLER),
                template_api_server: get(variable::TEMPLATE_API_SERVER),
                template_controller: get(variable::TEMPLATE_CONTROLLER),
                guestfs: get(variable::GUESTFS),
                persistent_reservation_helper: get(variable::PERSISTENT_RESERVATION_HELPER),
                sidecar_shim: get(variable::SIDECAR_SHIM),
            },
            passed_on: variables
                .iter()
                .filter_map(|(name, value)| {
                    // KubeVirt keeps only the text before a second equals sign, and computes the identifier of the
                    // deployment from it.
                    let value = value.split('=').next().unwrap_or_default();
                    Some((name.strip_prefix(PASSED_ON)?.to_owned(), value.to_owned()))
                })
                .collect(),
            runbook_url_template: variables.get("RUNBOOK_URL_TEMPLATE").cloned(),
        }
    }

    /// Why no images can be derived from these variables. Upstream virt-operator detects only a missing image of the
    /// operator; with any other mistake it waits for pods that can never start.
    pub fn problem(&self) -> Option<String> {
        let image = self.operator_image.as_str();
        let rule = "must be a registry, a name that ends in virt-operator, and a tag or a digest, such as \
                    quay.io/kubevirt/virt-operator:v1.8.4; the images of KubeVirt's components are derived from it";
        if image.is_empty() {
            return Some(format!("VIRT_OPERATOR_IMAGE: required value: {rule}"));
        }
        let Some(parsed) = OperatorImage::parse(image).filter(OperatorImage::is_derivable) else {
            // If every image is set explicitly, none is derived, and this one may have any name.
            return if self.images.name_all_components() && is_image(image) {
                self.single_image_problem()
            } else {
                Some(format!("VIRT_OPERATOR_IMAGE: invalid value {image:?}: {rule}"))
            };
        };
        let version = self.kubevirt_version.as_str();
        if parsed.tag().is_none() && !version.is_empty() && !is_tag(version) {
            return Some(format!(
                "KUBEVIRT_VERSION: invalid value {version:?}: must be the tag of KubeVirt's images, such as v1.8.4, because \
                 VIRT_OPERATOR_IMAGE has no tag"
            ));
        }
        self.single_image_problem()
    }

    fn single_image_problem(&self) -> Option<String> {
        let (name, image) =
            self.images.by_variable().into_iter().find(|(_, image)| !image.is_empty() && !is_image(image))?;
        Some(format!(
            "{name}: invalid value {image:?}: must be an image with a registry and a tag or a digest; remove it to derive the \
             image from VIRT_OPERATOR_IMAGE"
        ))
    }
}

impl ImageOverrides {
    fn name_all_components(&self) -> bool {
        [&self.api, &self.controller, &self.handler, &self.launcher].iter().all(|image| !image.is_empty())
    }

    /// The images by the names of their variables.
    fn by_variable(&self) -> [(&'static str, &str); 12] {
        [
            (variable::API, &self.api),
            (variable::CONTROLLER, &self.controller),
            (variable::HANDLER, &self.handler),
            (variable::LAUNCHER, &self.launcher),
            (variable::EXPORT_PROXY, &self.export_proxy),
            (variable::EXPORT_SERVER, &self.export_server),
            (variable::SYNCHRONIZATION_CONTROLLER, &self.synchronization_controller),
            (variable::TEMPLATE_API_SERVER, &self.template_api_server),
            (variable::TEMPLATE_CONTROLLER, &self.template_controller),
            (variable::GUESTFS, &self.guestfs),
            (variable::PERSISTENT_RESERVATION_HELPER, &self.persistent_reservation_helper),
            (variable::SIDECAR_SHIM, &self.sidecar_shim),
        ]
    }
}

/// The features of the cluster that change the installation.
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
    /// The features that follow from the kinds that the cluster serves.
    pub fn from_kinds(has: impl Fn(Kind) -> bool, schedulable_nodes: usize) -> Self {
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
    fn the_old_variable_of_the_operator_image_is_used_if_the_new_one_is_empty() {
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a")]).operator_image, "a");
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a"), ("VIRT_OPERATOR_IMAGE", "")]).operator_image, "a");
        assert_eq!(environment(&[("OPERATOR_IMAGE", "a"), ("VIRT_OPERATOR_IMAGE", "b")]).operator_image, "b");
    }

    #[test]
    fn extra_variables_lose_their_prefix_and_the_text_after_a_second_equals_sign() {
        let passed_on = environment(&[("KV_IO_EXTRA_ENV_A", "x=y"), ("KV_IO_EXTRA", "z")]).passed_on;
        assert_eq!(passed_on, BTreeMap::from([("A".to_owned(), "x".to_owned())]));
    }

    #[test]
    fn valid_images_are_accepted() {
        let digest = "a".repeat(64);
        for image in [
            "quay.io/kubevirt/virt-operator:v1.8.4",
            "reg:5000/a/kube-virt-operator:v1",
            "reg/virt-operator",
            "[::1]:5000/x/my.virt-operator:latest",
            "ghcr.io/vitistack/virt-operator:0.1.0",
            &format!("reg:5000/virt/virt-operator@sha256:{digest}"),
        ] {
            for version in ["", "v1.8.4", "20260101_abc-dirty"] {
                let problem = environment(&[("VIRT_OPERATOR_IMAGE", image), ("KUBEVIRT_VERSION", version)]).problem();
                assert_eq!(problem, None, "{image}");
            }
        }
        assert_eq!(environment(&[("OPERATOR_IMAGE", "reg/virt-operator:v1")]).problem(), None);
        // No image is derived from it.
        let components = ["VIRT_API_IMAGE", "VIRT_CONTROLLER_IMAGE", "VIRT_HANDLER_IMAGE", "VIRT_LAUNCHER_IMAGE"];
        for image in [
            format!("registry.example.com/virt/virt-operator-rhel9@sha256:{digest}"),
            format!("quay.io/kubevirt/virt-operator:v1.8.4@sha256:{digest}"),
        ] {
            let own = ("VIRT_OPERATOR_IMAGE", image.as_str());
            assert!(environment(&[own]).problem().is_some(), "{image}: no image can be derived from it");
            let mut all = vec![own];
            all.extend(components.map(|name| (name, "reg/x:v1")));
            assert_eq!(environment(&all).problem(), None, "{image}");
        }
        let given = format!("other:5000/virt-api:v1@sha256:{digest}");
        let given = [("VIRT_OPERATOR_IMAGE", "reg/virt-operator:v1"), ("VIRT_API_IMAGE", given.as_str())];
        assert_eq!(environment(&given).problem(), None);
    }

    #[test]
    fn the_message_about_an_invalid_image_names_its_variable() {
        let both = format!("reg/virt-operator:v1@sha256:{}", "a".repeat(64));
        for image in [
            "",
            " ",
            "junk",
            "virt-operator:v1",
            "/virt-operator:v1",
            "reg/virt-api:v1",
            "reg/virt-operator:",
            "reg/virt-operator:a b",
            "reg/virt-operator@sha256:0",
            "https://reg/virt-operator:v1",
            "reg/A-virt-operator",
            "a b/virt-operator:v1",
            both.as_str(),
        ] {
            let problem = environment(&[("VIRT_OPERATOR_IMAGE", image), ("KUBEVIRT_VERSION", "v1")]).problem().unwrap();
            let expected = match image {
                "" => "VIRT_OPERATOR_IMAGE: required value: must be".to_owned(),
                image => format!("VIRT_OPERATOR_IMAGE: invalid value {image:?}: must be"),
            };
            assert!(problem.starts_with(&expected) && !problem.contains('\n'), "{problem}");
        }
        for (name, image) in [("VIRT_API_IMAGE", " "), ("GS_IMAGE", "a b"), ("PR_HELPER_IMAGE", "reg/x:sha256:0")] {
            let problem =
                environment(&[("VIRT_OPERATOR_IMAGE", "reg/virt-operator:v1"), (name, image)]).problem().unwrap();
            assert!(problem.starts_with(&format!("{name}: invalid value {image:?}: must be an image")), "{problem}");
        }
        let digest = format!("reg/virt-operator@sha256:{}", "a".repeat(64));
        let problem =
            environment(&[("VIRT_OPERATOR_IMAGE", &digest), ("KUBEVIRT_VERSION", "no tag")]).problem().unwrap();
        assert!(problem.starts_with("KUBEVIRT_VERSION: invalid value \"no tag\": must be"), "{problem}");
    }
}
