//! The ServiceMonitor and the PrometheusRule. Expressions are data of the KubeVirt release; the texts of alerts are in
//! `alerts`.

mod alerts;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vitivirt_api::{Failure, reason};

use crate::{
    compressed::CompressedAsset,
    config::DeploymentConfig,
    kind::Kind,
    metadata::{label_selector, namespaced, string_map, strings},
    names::label,
};

const NAME: &str = "prometheus-kubevirt-rules";
const RULES: CompressedAsset = CompressedAsset::new(include_bytes!("../../assets/v1.8.4/rules.json.gz"));
const NAMESPACE: &str = "{namespace}";
const RUNBOOK_URL_TEMPLATE: &str = "https://kubevirt.io/monitoring/runbooks/%s";
const APP: (&str, &str) = ("k8s-app", "kubevirt");
const SCRAPED: (&str, &str) = (label::PROMETHEUS, "true");

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceMonitor {
    api_version: String,
    kind: &'static str,
    pub(crate) metadata: ObjectMeta,
    spec: ServiceMonitorSpec,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceMonitorSpec {
    selector: LabelSelector,
    namespace_selector: NamespaceSelector,
    endpoints: Vec<ScrapeEndpoint>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NamespaceSelector {
    match_names: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ScrapeEndpoint {
    port: &'static str,
    scheme: &'static str,
    honor_labels: bool,
    tls_config: EndpointTls,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointTls {
    ca: Map<String, Value>,
    cert: Map<String, Value>,
    insecure_skip_verify: bool,
}

pub(crate) fn service_monitor(config: &DeploymentConfig, monitor_namespace: &str) -> ServiceMonitor {
    let namespace = config.service_monitor_namespace().unwrap_or(monitor_namespace);
    ServiceMonitor {
        api_version: Kind::ServiceMonitor.api_version(),
        kind: Kind::ServiceMonitor.name(),
        metadata: namespaced(namespace, NAME, &[APP, SCRAPED, (label::CLUSTER_MONITORING, "")]),
        spec: ServiceMonitorSpec {
            selector: label_selector(&[SCRAPED]),
            namespace_selector: NamespaceSelector { match_names: strings(&[&config.namespace]) },
            endpoints: vec![ScrapeEndpoint {
                port: "metrics",
                scheme: "https",
                honor_labels: true,
                // Prometheus does not trust KubeVirt's CA.
                tls_config: EndpointTls { ca: Map::new(), cert: Map::new(), insecure_skip_verify: true },
            }],
        },
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PrometheusRule {
    api_version: String,
    kind: &'static str,
    pub(crate) metadata: ObjectMeta,
    spec: Rules,
}

#[derive(Serialize)]
struct Rules {
    groups: Vec<AlertGroup>,
}

#[derive(Serialize, Deserialize)]
struct AlertGroup {
    name: String,
    rules: Vec<AlertRule>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
struct AlertRule {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alert: Option<String>,
    expr: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

pub(crate) fn prometheus_rule(
    config: &DeploymentConfig,
    runbook_url_template: Option<&str>,
) -> Result<PrometheusRule, Failure> {
    let template = runbook_url_template.unwrap_or(RUNBOOK_URL_TEMPLATE);
    if template.matches("%s").count() != 1 {
        let message = format!("RUNBOOK_URL_TEMPLATE: invalid value {template:?}: must contain %s exactly once");
        return Err(Failure::invalid(reason::INVALID_OBJECT, message));
    }
    let mut groups: Vec<AlertGroup> = RULES.parse()?;
    for rule in groups.iter_mut().flat_map(|group| &mut group.rules) {
        rule.expr = rule.expr.replace(NAMESPACE, &config.namespace);
        if let Some(alert) = &rule.alert {
            let severity = rule.extra.get("labels").and_then(|labels| labels.get("severity")).and_then(Value::as_str);
            let text = alerts::alert_text(alert, severity.unwrap_or_default());
            let runbook = template.replace("%s", alert);
            let mut annotations = string_map(&[("summary", text.summary), ("runbook_url", &runbook)]);
            annotations.extend(text.description.map(|text| ("description".to_owned(), text.to_owned())));
            rule.annotations = Some(annotations);
        }
    }
    Ok(PrometheusRule {
        api_version: Kind::PrometheusRule.api_version(),
        kind: Kind::PrometheusRule.name(),
        metadata: namespaced(&config.namespace, NAME, &[APP, SCRAPED]),
        spec: Rules { groups },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(template: Option<&str>) -> Result<Value, Failure> {
        let config = DeploymentConfig { namespace: "virt".to_owned(), ..DeploymentConfig::default() };
        Ok(serde_json::to_value(prometheus_rule(&config, template)?).unwrap())
    }

    fn alerts(rule: &Value) -> Vec<&Value> {
        let groups = rule["spec"]["groups"].as_array().unwrap().iter();
        groups.flat_map(|group| group["rules"].as_array().unwrap()).filter(|rule| rule.get("alert").is_some()).collect()
    }

    #[test]
    fn every_alert_has_its_own_summary() {
        let rule = rules(None).unwrap();
        let alerts = alerts(&rule);
        assert_eq!(alerts.len(), 38);
        for alert in alerts {
            let name = alert["alert"].as_str().unwrap();
            let summary = alert["annotations"]["summary"].as_str().unwrap();
            assert!(!summary.is_empty() && !summary.contains(name), "{name}: {summary}");
            let url = format!("https://kubevirt.io/monitoring/runbooks/{name}");
            assert_eq!(alert["annotations"]["runbook_url"], url.as_str());
        }
    }

    #[test]
    fn expressions_contain_the_namespace_of_the_installation() {
        let text = rules(None).unwrap().to_string();
        assert!(text.contains("namespace='virt'") && !text.contains(NAMESPACE));
    }

    #[test]
    fn the_runbook_url_template_can_be_set() {
        let rule = rules(Some("https://wiki/%s.html")).unwrap();
        let alert = alerts(&rule)[0].clone();
        let url = format!("https://wiki/{}.html", alert["alert"].as_str().unwrap());
        assert_eq!(alert["annotations"]["runbook_url"], url.as_str());
        for bad in ["https://wiki/", "%s/%s"] {
            assert_eq!(rules(Some(bad)).unwrap_err().class, vitivirt_api::ErrorClass::Invalid);
        }
    }
}
