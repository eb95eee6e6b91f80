//! The install strategy of another release, from a file.

use std::path::Path;

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;
use vitivirt_cli::{CommandResult, Document, OrInvalid, read_manifests};
use vitivirt_install::{DeploymentConfig, InstallStrategy, names::annotation};

/// The key of the manifests in a ConfigMap with an install strategy.
const MANIFESTS: &str = "manifests";

/// The strategy, and a warning if it was written for another configuration. The file has ConfigMaps with install
/// strategies, or the objects of one strategy.
pub(super) fn read_file(file: &Path, config: &DeploymentConfig) -> CommandResult<(InstallStrategy, Option<String>)> {
    let documents = read_manifests(&[file.to_owned()])?;
    decode(&file.display().to_string(), &documents, config).or_invalid()
}

fn decode(file: &str, documents: &[Document], config: &DeploymentConfig) -> Result<(InstallStrategy, Option<String>)> {
    let version = &config.kube_virt_version;
    let is_strategy = |document: &&Document| {
        document.kind() == "ConfigMap" && document.object.pointer(&format!("/data/{MANIFESTS}")).is_some()
    };
    let maps: Vec<&Document> = documents.iter().filter(is_strategy).collect();
    let yaml = |text: &str| serde_saphyr::from_str(text).map_err(|error| error.to_string());
    if maps.is_empty() {
        let objects: Vec<String> = documents.iter().map(|document| document.object.to_string()).collect();
        let data = serde_json::json!({"data": {MANIFESTS: objects.join("\n---\n")}});
        let strategy = InstallStrategy::decode(&serde_json::from_value(data)?, yaml)?;
        if strategy.items().is_empty() {
            bail!("{file}: no object of an install strategy found");
        }
        return Ok((strategy, None));
    }
    let mark = |document: &Document, key: &str| -> String {
        let annotations = document.object.pointer("/metadata/annotations");
        annotations.and_then(|all| all.get(key)).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let Some(map) = maps.iter().find(|map| mark(map, annotation::VERSION) == *version) else {
        let found: Vec<String> = maps.iter().map(|map| mark(map, annotation::VERSION)).collect();
        bail!("{file}: the install strategy is for KubeVirt {}; must be for {version}", found.join(", "));
    };
    let typed: ConfigMap = serde_json::from_value(map.object.clone())?;
    let is_of_this = mark(map, annotation::IDENTIFIER) == config.id;
    let warning = (!is_of_this).then(|| {
        format!(
            "{file}: the install strategy was written for another configuration, so registry, namespace or names of \
             images may differ from what the operator installs"
        )
    });
    Ok((InstallStrategy::decode(&typed, yaml)?, warning))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vitivirt_api::kubevirt::KubeVirt;
    use vitivirt_cli::parse_manifests;
    use vitivirt_install::{Environment, config_map};

    use super::*;

    fn config(tag: &str) -> DeploymentConfig {
        let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": {"imageTag": tag}});
        let kubevirt: KubeVirt = serde_json::from_value(object).unwrap();
        let image = ("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned());
        DeploymentConfig::new(&kubevirt, &Environment::from_variables([image]))
    }

    fn map(config: &DeploymentConfig) -> Value {
        let strategy = InstallStrategy::generate(config, None, None).unwrap();
        let map = serde_json::to_value(config_map(config, &strategy).unwrap()).unwrap();
        let mut map = map.as_object().unwrap().clone();
        map.insert("apiVersion".to_owned(), json!("v1"));
        map.insert("kind".to_owned(), json!("ConfigMap"));
        Value::Object(map)
    }

    fn read(object: &Value, config: &DeploymentConfig) -> Result<(InstallStrategy, Option<String>)> {
        decode("file", &parse_manifests("file", &object.to_string()).unwrap(), config)
    }

    #[test]
    fn the_config_map_of_the_release_is_chosen_from_a_list() {
        let (old, new) = (config("v1.7.0"), config("v1.9.0"));
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [map(&old), map(&new)]});
        let (strategy, warning) = read(&list, &new).unwrap();
        assert_eq!((strategy.items().is_empty(), warning), (false, None));
        let error = read(&list, &config("v1.6.0")).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "file: the install strategy is for KubeVirt v1.7.0, v1.9.0; must be for v1.6.0");
    }

    #[test]
    fn a_strategy_of_another_configuration_causes_a_warning() {
        let config = config("v1.7.0");
        let mut map = map(&config);
        map["metadata"]["annotations"][annotation::IDENTIFIER] = json!("other");
        let (_, warning) = read(&map, &config).unwrap();
        assert!(warning.unwrap().contains("another configuration"));
    }

    #[test]
    fn the_objects_of_a_strategy_need_no_config_map() {
        let config = config("v1.7.0");
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "a---b"}, "rules": []});
        assert_eq!(read(&role, &config).unwrap().0.items().len(), 1);
        let error = read(&json!({"apiVersion": "v1", "kind": "Pod"}), &config).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("unsupported kind \"Pod\""), "{error}");
    }
}
