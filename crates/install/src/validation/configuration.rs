//! Rules of `spec.configuration`.

use serde_json::Value;
use vitivirt_api::kubevirt::{Configuration, Tls};

use super::{Cause, Refusal};
use crate::names::gate;

const CIPHERS: &str = "spec.configuration.tlsConfiguration.ciphers";

pub(super) fn refusals(old: &Configuration, new: &Configuration) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    refusals.extend(overhead_ratio(new));
    refusals.extend(needs_template_gate(new));
    refusals.extend(needs_aggregation_gate(new));
    if old.tls_configuration != new.tls_configuration {
        refusals.extend(new.tls_configuration.as_ref().map(tls_ciphers).unwrap_or_default());
    }
    let seccomp = |configuration: &Configuration| configuration.extra.get("seccompConfiguration").cloned();
    if seccomp(old) != seccomp(new) {
        refusals.extend(seccomp(new).as_ref().and_then(custom_profile));
    }
    if (old.feature_gates(), disabled(old)) != (new.feature_gates(), disabled(new)) {
        refusals.extend(gates_enabled_and_disabled(new));
    }
    refusals
}

fn overhead_ratio(configuration: &Configuration) -> Option<Refusal> {
    let field = "additionalGuestMemoryOverheadRatio";
    let text = configuration.extra.get(field)?.as_str()?;
    let enough = text.parse::<f64>().is_ok_and(|ratio| ratio.is_finite() && ratio >= 1.0);
    let message = || format!("invalid value {text:?}: must be a number of at least 1.0, such as \"1.5\"");
    (!enough).then(|| Refusal::new(Cause::NotSupported, format!("spec.configuration.{field}"), message()))
}

fn needs_template_gate(configuration: &Configuration) -> Option<Refusal> {
    let is_set = configuration.virt_template_deployment.as_ref()?.enabled == Some(true);
    needs_gate(configuration, is_set, gate::TEMPLATE, "virtTemplateDeployment.enabled", "true")
}

fn needs_aggregation_gate(configuration: &Configuration) -> Option<Refusal> {
    let strategy = configuration.role_aggregation_strategy.as_deref()?;
    let is_set = strategy != "AggregateToDefault";
    needs_gate(configuration, is_set, gate::OPT_OUT_ROLE_AGGREGATION, "roleAggregationStrategy", strategy)
}

fn needs_gate(configuration: &Configuration, is_set: bool, gate: &str, field: &str, value: &str) -> Option<Refusal> {
    let missing = is_set && !configuration.feature_gates().iter().any(|enabled| enabled == gate);
    let message = || {
        format!(
            "invalid value {value}: requires the feature gate {gate}; add it to \
             spec.configuration.developerConfiguration.featureGates"
        )
    };
    missing.then(|| Refusal::new(Cause::Invalid, format!("spec.configuration.{field}"), message()))
}

fn tls_ciphers(tls: &Tls) -> Vec<Refusal> {
    let named = tls.ciphers.as_deref().unwrap_or_default();
    let version = tls.min_tls_version.as_str();
    if named.is_empty() {
        return Vec::new();
    }
    if matches!(version, "" | "VersionTLS13") {
        let message = "cannot be configured for TLS 1.3; set minTLSVersion to VersionTLS12, or remove the ciphers";
        return vec![Refusal::new(Cause::NotSupported, CIPHERS, message)];
    }
    let unknown = named.iter().enumerate().filter(|(_, name)| !SUITES.contains(&name.as_str()));
    let message =
        |name: &str| format!("unsupported value {name:?}; use a name such as TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256");
    unknown
        .map(|(index, name)| Refusal::new(Cause::NotSupported, format!("{CIPHERS}[{index}]"), message(name)))
        .collect()
}

fn custom_profile(seccomp: &Value) -> Option<Refusal> {
    let profile = seccomp.get("virtualMachineInstanceProfile").filter(|profile| !profile.is_null())?;
    let field = "spec.configuration.seccompConfiguration.virtualMachineInstanceProfile.customProfile";
    let message = match profile.get("customProfile").filter(|custom| !custom.is_null()) {
        None => {
            "required value: set localhostProfile or runtimeDefaultProfile, or remove virtualMachineInstanceProfile"
        }
        Some(custom) => {
            let local = custom.get("localhostProfile").is_some_and(|profile| !profile.is_null());
            let default = custom.get("runtimeDefaultProfile") == Some(&Value::Bool(true));
            if !(local && default) {
                return None;
            }
            "localhostProfile and runtimeDefaultProfile are mutually exclusive; remove one of them"
        }
    };
    Some(Refusal::new(Cause::Invalid, field, message))
}

fn disabled(configuration: &Configuration) -> &[String] {
    let developer = configuration.developer_configuration.as_ref();
    developer.and_then(|developer| developer.disabled_feature_gates.as_deref()).unwrap_or_default()
}

fn gates_enabled_and_disabled(configuration: &Configuration) -> impl Iterator<Item = Refusal> {
    let both = configuration.feature_gates().iter().filter(|gate| disabled(configuration).contains(gate));
    both.map(|gate| {
        let message = format!("{gate} is also in disabledFeatureGates; remove it from one of the lists");
        Refusal::new(Cause::Forbidden, "spec.configuration.developerConfiguration.featureGates", message)
    })
}

/// Every cipher suite that KubeVirt's components support, including weak ones.
const SUITES: [&str; 25] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];
