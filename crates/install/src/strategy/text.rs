//! A strategy as text: documents with three dashes between them, gzipped and in base64 in a ConfigMap.
//!
//! Each document is JSON, which is YAML. The reference splits the text at every three dashes wherever they are, so none
//! may be in a document.

use std::io::{BufRead, BufReader, Read, Write};

use flate2::{Compression, GzBuilder, read::GzDecoder, write::GzEncoder};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use vitivirt_api::{Failure, reason};

use super::{Item, Source, Strategy};
use crate::{
    build::map,
    config::DeploymentConfig,
    kind::Kind,
    names::{annotation, label},
};

/// The key of the text in its ConfigMap.
pub const MANIFESTS: &str = "manifests";
pub const ENCODING: &str = "gzip+base64";
pub(crate) const GENERATE_NAME: &str = "kubevirt-install-strategy-";
const SEPARATOR: &str = "---";

/// The ConfigMap that tells what is installed for this configuration.
pub fn config_map(config: &DeploymentConfig, strategy: &Strategy) -> Result<ConfigMap, Failure> {
    let annotations = [
        (annotation::VERSION, config.kube_virt_version.as_str()),
        (annotation::REGISTRY, &config.registry),
        (annotation::IDENTIFIER, &config.id),
        (annotation::ENCODING, ENCODING),
    ];
    Ok(ConfigMap {
        metadata: ObjectMeta {
            generate_name: Some(GENERATE_NAME.to_owned()),
            namespace: Some(config.namespace.clone()),
            labels: Some(map(&[(label::MANAGED_BY, label::MANAGED_BY_VALUE), (label::INSTALL_STRATEGY, "")])),
            annotations: Some(map(&annotations)),
            ..ObjectMeta::default()
        },
        data: Some([(MANIFESTS.to_owned(), strategy.encode()?)].into()),
        ..ConfigMap::default()
    })
}

impl Strategy {
    /// One document at a time goes into the compressed text; the whole is never in memory.
    pub fn encode(&self) -> Result<String, Failure> {
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
            _ => Err(bug("base64 is no text")),
        }
    }

    /// Reads what another release's operator has left. `yaml` reads one document; JSON would not be enough, because
    /// the reference writes YAML. One document at a time is in memory, and big ones are packed again.
    pub fn decode(config_map: &ConfigMap, yaml: impl Fn(&str) -> Result<Value, String>) -> Result<Self, Failure> {
        let text = config_map.data.as_ref().and_then(|data| data.get(MANIFESTS));
        let text = text.ok_or_else(|| unreadable(format!("it has no {MANIFESTS}")))?;
        let annotations = config_map.metadata.annotations.as_ref();
        let encoded = annotations.is_some_and(|annotations| annotations.contains_key(annotation::ENCODING));
        let bytes: ByteString;
        let reader: Box<dyn Read + '_> = if encoded {
            bytes = serde_json::from_value(Value::String(text.trim().to_owned())).map_err(unreadable)?;
            Box::new(GzDecoder::new(bytes.0.as_slice()))
        } else {
            Box::new(text.as_bytes())
        };
        let mut items: Vec<Item> = Vec::new();
        let mut add = |document: &mut String| -> Result<(), Failure> {
            if !document.trim().is_empty() {
                let item = Item::read(yaml(document).map_err(unreadable)?)?;
                // The reference lists some of them twice.
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

impl Item {
    fn read(object: Value) -> Result<Self, Failure> {
        let name = object.get("kind").and_then(Value::as_str).unwrap_or_default();
        let kind = Kind::named(name).ok_or_else(|| unreadable(format!("it has a {name}")))?;
        let mut item = Self::new(kind, with_version(object, kind));
        if matches!(kind, Kind::CustomResourceDefinition | Kind::Instancetype | Kind::Preference)
            && let Source::Object(object) = &item.source
        {
            let mut out = GzEncoder::new(Vec::new(), Compression::fast());
            write!(out, "{object}").map_err(bug)?;
            item.source = Source::Repacked(out.finish().map_err(bug)?.into());
        }
        Ok(item)
    }
}

pub(super) fn unpack(bytes: &[u8]) -> Result<Value, Failure> {
    serde_json::from_reader(GzDecoder::new(bytes)).map_err(unreadable)
}

/// The reference writes a few objects with a version that the server would not know.
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

    fn strategy(properties: &[&str]) -> (DeploymentConfig, Strategy) {
        let config = DeploymentConfig {
            namespace: "kubevirt".to_owned(),
            registry: "r".to_owned(),
            kube_virt_version: "v1".to_owned(),
            additional_properties: properties.iter().map(|key| ((*key).to_owned(), String::new())).collect(),
            ..DeploymentConfig::default()
        };
        let strategy = Strategy::generate(&config, Some("monitoring"), None).unwrap();
        (config, strategy)
    }

    #[test]
    fn what_is_written_is_read_back() {
        let (config, strategy) = strategy(&["VirtTemplateDeploymentEnabled"]);
        let map = config_map(&config, &strategy).unwrap();
        let back =
            Strategy::decode(&map, |text| serde_json::from_str(text).map_err(|error| error.to_string())).unwrap();
        assert_eq!(back.items.len(), strategy.items.len());
        for (ours, read) in strategy.items.iter().zip(&back.items) {
            assert_eq!((ours.kind, &ours.key), (read.kind, &read.key));
            assert_eq!(ours.object().unwrap(), read.object().unwrap());
        }
        assert_eq!(map.data, config_map(&config, &strategy).unwrap().data, "the same each time");
    }

    #[test]
    fn a_strategy_that_cannot_be_read_says_so() {
        let (config, strategy) = strategy(&[]);
        let mut map = config_map(&config, &strategy).unwrap();
        let decode = |map: &ConfigMap| {
            Strategy::decode(map, |text| serde_json::from_str(text).map_err(|error| error.to_string())).map(|_| ())
        };
        map.data = Some([(MANIFESTS.to_owned(), "!".to_owned())].into());
        assert_eq!(decode(&map).unwrap_err().class, vitivirt_api::ErrorClass::Invalid);
        map.metadata.annotations = None;
        map.data = Some([(MANIFESTS.to_owned(), "---\n{\"kind\":\"Unheard\"}".to_owned())].into());
        assert!(decode(&map).unwrap_err().message.contains("it has a Unheard"));
        map.data = None;
        assert!(decode(&map).unwrap_err().message.contains("no manifests"));
    }
}
