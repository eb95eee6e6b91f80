//! An install strategy as text: documents separated by three dashes, compressed and base64-encoded in a ConfigMap.
//!
//! Each document is JSON, which is valid YAML. Upstream virt-operator splits the text at every three dashes, so a
//! document must not contain any.

use std::io::{BufRead, BufReader, Read, Write};

use flate2::{Compression, GzBuilder, read::GzDecoder, write::GzEncoder};
use k8s_openapi::{ByteString, api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::Value;
use vitivirt_api::{Failure, reason};

use super::{InstallStrategy, ItemSource, StrategyItem};
use crate::{
    config::DeploymentConfig,
    kind::Kind,
    metadata::string_map,
    names::{STRATEGY_GENERATE_NAME, STRATEGY_MANIFESTS, annotation, label},
};

const ENCODING: &str = "gzip+base64";
const SEPARATOR: &str = "---";

/// The ConfigMap with the install strategy of a configuration.
pub fn config_map(config: &DeploymentConfig, strategy: &InstallStrategy) -> Result<ConfigMap, Failure> {
    let annotations = [
        (annotation::VERSION, config.kube_virt_version.as_str()),
        (annotation::REGISTRY, &config.registry),
        (annotation::IDENTIFIER, &config.id),
        (annotation::ENCODING, ENCODING),
    ];
    Ok(ConfigMap {
        metadata: ObjectMeta {
            generate_name: Some(STRATEGY_GENERATE_NAME.to_owned()),
            namespace: Some(config.namespace.clone()),
            labels: Some(string_map(&[(label::MANAGED_BY, label::MANAGED_BY_VALUE), (label::INSTALL_STRATEGY, "")])),
            annotations: Some(string_map(&annotations)),
            ..ObjectMeta::default()
        },
        data: Some([(STRATEGY_MANIFESTS.to_owned(), strategy.encode()?)].into()),
        ..ConfigMap::default()
    })
}

impl InstallStrategy {
    /// Compresses one document at a time, so that the whole text is never in memory.
    fn encode(&self) -> Result<String, Failure> {
        let mut out = GzBuilder::new().write(Vec::new(), Compression::default());
        for item in &self.items {
            let text = item.object()?.to_string();
            if text.contains(SEPARATOR) {
                return Err(bug(format!("{} {} contains {SEPARATOR}", item.kind.name(), item.key)));
            }
            writeln!(out, "{SEPARATOR}\n{text}").map_err(bug)?;
        }
        let bytes = ByteString(out.finish().map_err(bug)?);
        match serde_json::to_value(bytes).map_err(bug)? {
            Value::String(text) => Ok(text),
            _ => Err(bug("base64 is not text")),
        }
    }

    /// Reads the ConfigMap that the operator of another release has written. `yaml` parses one document: upstream
    /// virt-operator writes YAML. One document at a time is in memory, and large objects are compressed again.
    pub fn decode(config_map: &ConfigMap, yaml: impl Fn(&str) -> Result<Value, String>) -> Result<Self, Failure> {
        let text = config_map.data.as_ref().and_then(|data| data.get(STRATEGY_MANIFESTS));
        let text = text.ok_or_else(|| unreadable(format!("key {STRATEGY_MANIFESTS} not found")))?;
        let annotations = config_map.metadata.annotations.as_ref();
        let encoded = annotations.is_some_and(|annotations| annotations.contains_key(annotation::ENCODING));
        let bytes: ByteString;
        let reader: Box<dyn Read + '_> = if encoded {
            bytes = serde_json::from_value(Value::String(text.trim().to_owned())).map_err(unreadable)?;
            Box::new(GzDecoder::new(bytes.0.as_slice()))
        } else {
            Box::new(text.as_bytes())
        };
        let mut items: Vec<StrategyItem> = Vec::new();
        let mut add = |document: &mut String| -> Result<(), Failure> {
            if !document.trim().is_empty() {
                let item = StrategyItem::read(yaml(document).map_err(unreadable)?)?;
                // Upstream virt-operator lists some objects twice.
                if !items.iter().any(|other| other.kind == item.kind && other.key == item.key) {
                    items.push(item);
                }
            }
            document.clear();
            Ok(())
        };
        let mut document = String::new();
        for line in BufReader::new(reader).lines() {
            let line = line.map_err(unreadable)?;
            if line.trim_end() == SEPARATOR {
                add(&mut document)?;
            } else {
                document.push_str(&line);
                document.push('\n');
            }
        }
        add(&mut document)?;
        items.sort_by_key(|item| item.kind);
        Ok(Self { items })
    }
}

impl StrategyItem {
    fn read(object: Value) -> Result<Self, Failure> {
        let name = object.get("kind").and_then(Value::as_str).unwrap_or_default();
        let kind = Kind::from_name(name).ok_or_else(|| unreadable(format!("unsupported kind {name:?}")))?;
        let mut item = Self::new(kind, with_version(object, kind));
        if matches!(kind, Kind::CustomResourceDefinition | Kind::Instancetype | Kind::Preference)
            && let ItemSource::Object(object) = &item.source
        {
            let mut out = GzEncoder::new(Vec::new(), Compression::fast());
            write!(out, "{object}").map_err(bug)?;
            item.source = ItemSource::Compressed(out.finish().map_err(bug)?.into());
        }
        Ok(item)
    }
}

pub(super) fn decompress(bytes: &[u8]) -> Result<Value, Failure> {
    serde_json::from_reader(GzDecoder::new(bytes)).map_err(unreadable)
}

/// Upstream virt-operator writes a few objects with an API version that does not exist.
fn with_version(mut object: Value, kind: Kind) -> Value {
    if let Some(object) = object.as_object_mut() {
        object.insert("apiVersion".to_owned(), Value::String(kind.api_version()));
        object.remove("status");
    }
    object
}

fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::invalid(reason::UNREADABLE_ANSWER, format!("the install strategy cannot be read: {error}"))
}

fn bug(error: impl std::fmt::Display) -> Failure {
    Failure::bug(reason::BAD_REQUEST, format!("the install strategy cannot be written: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strategy(properties: &[&str]) -> (DeploymentConfig, InstallStrategy) {
        let config = DeploymentConfig {
            namespace: "kubevirt".to_owned(),
            registry: "r".to_owned(),
            kube_virt_version: "v1".to_owned(),
            additional_properties: properties.iter().map(|key| ((*key).to_owned(), String::new())).collect(),
            ..DeploymentConfig::default()
        };
        let strategy = InstallStrategy::generate(&config, Some("monitoring"), None).unwrap();
        (config, strategy)
    }

    #[test]
    fn an_encoded_strategy_is_decoded_to_the_same_objects() {
        let (config, strategy) = strategy(&["VirtTemplateDeploymentEnabled"]);
        let map = config_map(&config, &strategy).unwrap();
        let back = InstallStrategy::decode(&map, |text| serde_json::from_str(text).map_err(|error| error.to_string()))
            .unwrap();
        assert_eq!(back.items.len(), strategy.items.len());
        for (ours, read) in strategy.items.iter().zip(&back.items) {
            assert_eq!((ours.kind, &ours.key), (read.kind, &read.key));
            assert_eq!(ours.object().unwrap(), read.object().unwrap());
        }
        assert_eq!(map.data, config_map(&config, &strategy).unwrap().data, "the encoding is deterministic");
    }

    #[test]
    fn an_unreadable_strategy_is_an_invalid_failure() {
        let (config, strategy) = strategy(&[]);
        let mut map = config_map(&config, &strategy).unwrap();
        let decode = |map: &ConfigMap| {
            InstallStrategy::decode(map, |text| serde_json::from_str(text).map_err(|error| error.to_string()))
                .map(|_| ())
        };
        map.data = Some([(STRATEGY_MANIFESTS.to_owned(), "!".to_owned())].into());
        assert_eq!(decode(&map).unwrap_err().class, vitivirt_api::ErrorClass::Invalid);
        map.metadata.annotations = None;
        map.data = Some([(STRATEGY_MANIFESTS.to_owned(), "---\n{\"kind\":\"Unheard\"}".to_owned())].into());
        assert!(decode(&map).unwrap_err().message.contains("unsupported kind \"Unheard\""));
        map.data = None;
        assert!(decode(&map).unwrap_err().message.contains("key manifests not found"));
    }
}
