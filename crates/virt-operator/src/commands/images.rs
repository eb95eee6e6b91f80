//! `virt-operator images`: every image that an installation of KubeVirt pulls, to copy them into another registry.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Args, ValueEnum, builder::NonEmptyStringValueParser};
use serde::Serialize;
use serde_json::Value;
use vitivirt_api::IMAGE;
use vitivirt_cli::{CommandResult, FileArguments, print};
use vitivirt_install::DeploymentConfig;

use super::render::{self, ClusterApi};

#[derive(Debug, Clone, Args)]
pub(crate) struct ImagesArguments {
    #[command(flatten)]
    input: FileArguments,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    output: ImagesFormat,
    /// Image of the operators, as it is named in the mirror
    #[arg(long, value_name = "IMAGE", default_value = IMAGE, value_parser = NonEmptyStringValueParser::new())]
    operator_image: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum ImagesFormat {
    /// One image per line
    #[default]
    Text,
    /// One JSON document, with the users of each image
    Json,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct ImageList {
    images: Vec<Image>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Image {
    image: String,
    /// Objects and containers that use it.
    used_by: BTreeSet<String>,
}

pub(crate) fn run(arguments: &ImagesArguments) -> CommandResult<ExitCode> {
    let (kubevirt, environment) = render::read_input(&arguments.input)?;
    let with = [ClusterApi::Monitoring, ClusterApi::Openshift];
    let objects = render::all_objects(&kubevirt, &environment, &with)?;
    let guestfs = DeploymentConfig::new(&kubevirt, &environment).guestfs_image();
    let images = with_others(images_of(&objects), guestfs, arguments.operator_image.clone());
    print(&format_list(images, arguments.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds the images that no object of the installation names.
fn with_others(
    mut images: BTreeMap<String, BTreeSet<String>>,
    guestfs: String,
    operator: String,
) -> BTreeMap<String, BTreeSet<String>> {
    images.entry(guestfs).or_default().insert("virtctl guestfs".to_owned());
    images.entry(operator).or_default().insert("Deployment virt-operator, and kubevirt-operator".to_owned());
    images
}

fn format_list(images: BTreeMap<String, BTreeSet<String>>, format: ImagesFormat) -> Result<String> {
    if format == ImagesFormat::Text {
        return Ok(images.keys().map(|image| format!("{image}\n")).collect());
    }
    let images = images.into_iter().map(|(image, used_by)| Image { image, used_by }).collect();
    Ok(format!("{}\n", serde_json::to_string_pretty(&ImageList { images })?))
}

/// The images of containers, and those that containers get as an argument or a variable, for pods that they create.
fn images_of(objects: &[Value]) -> BTreeMap<String, BTreeSet<String>> {
    let mut images: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for object in objects {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let user = format!("{} {}", text("/kind"), text("/metadata/name"));
        let mut add = |image: &str, user: String| images.entry(image.to_owned()).or_default().insert(user);
        for list in ["/spec/template/spec/containers", "/spec/template/spec/initContainers"] {
            let containers = object.pointer(list).and_then(Value::as_array);
            for container in containers.into_iter().flatten() {
                if let Some(image) = container.get("image").and_then(Value::as_str) {
                    add(image, user.clone());
                }
                for (name, image) in image_arguments(container) {
                    add(image, format!("{user}, {name}"));
                }
            }
        }
    }
    images
}

/// Arguments such as `--launcher-image x`, and variables such as `SIDECAR_SHIM_IMAGE`.
fn image_arguments(container: &Value) -> Vec<(&str, &str)> {
    let words = |name: &str| container.get(name).and_then(Value::as_array).into_iter().flatten();
    let words: Vec<&str> = words("command").chain(words("args")).filter_map(Value::as_str).collect();
    let arguments = words.iter().zip(words.iter().skip(1)).filter_map(|(name, value)| {
        let is_image = name.starts_with("--") && name.ends_with("-image");
        is_image.then_some((*name, *value))
    });
    let variables = container.get("env").and_then(Value::as_array).into_iter().flatten().filter_map(|variable| {
        let (name, value) = (variable.get("name")?.as_str()?, variable.get("value")?.as_str()?);
        name.ends_with("_IMAGE").then_some((name, value))
    });
    arguments.chain(variables).collect()
}

#[cfg(test)]
mod tests {
    use vitivirt_api::kubevirt::KubeVirt;

    use super::*;

    const REGISTRY: &str = "registry.mirror.example/kv";

    fn objects(spec: &Value) -> Vec<Value> {
        let kubevirt: KubeVirt = serde_json::from_value(serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": spec,
        }))
        .unwrap();
        let environment = render::environment(std::iter::empty()).unwrap();
        render::all_objects(&kubevirt, &environment, &[ClusterApi::Monitoring]).unwrap()
    }

    /// Every string of the objects, wherever it is, that names the registry.
    fn words_with_registry(objects: &[Value]) -> BTreeSet<String> {
        let text = serde_json::to_string(objects).unwrap();
        let is_part = |character: char| character.is_ascii_alphanumeric() || "./:-_@".contains(character);
        let words = text.split(|character: char| !is_part(character));
        words.filter(|word| word.starts_with(&format!("{REGISTRY}/"))).map(str::to_owned).collect()
    }

    #[test]
    fn every_image_of_the_rendered_objects_is_listed() {
        let gates = serde_json::json!(["PersistentReservation", "VMExport", "DecentralizedLiveMigration", "Sidecar"]);
        for spec in [
            serde_json::json!({"imageRegistry": REGISTRY}),
            serde_json::json!({
                "imageRegistry": REGISTRY, "imagePullSecrets": [{"name": "mirror"}],
                "configuration": {"developerConfiguration": {"featureGates": gates}},
            }),
        ] {
            let objects = objects(&spec);
            let listed: BTreeSet<String> = images_of(&objects).into_keys().collect();
            assert_eq!(listed, words_with_registry(&objects));
            for name in
                ["virt-api", "virt-controller", "virt-handler", "virt-launcher", "virt-exportserver", "sidecar-shim"]
            {
                let expected = format!("{REGISTRY}/{name}:v1.8.4");
                assert!(listed.contains(&expected), "{expected} is not in {listed:?}");
            }
        }
    }

    #[test]
    fn the_image_of_the_operators_has_the_given_name() {
        let operator = "registry.mirror.example/operators/kubevirt-operator:0.1.0";
        let images =
            with_others(images_of(&objects(&serde_json::json!({}))), "guestfs".to_owned(), operator.to_owned());
        assert!(images.contains_key(operator) && images.contains_key("guestfs") && !images.contains_key(IMAGE));
    }

    #[test]
    fn an_image_is_listed_once_with_all_its_users() {
        let images = images_of(&objects(&serde_json::json!({})));
        let launcher = images.get("quay.io/kubevirt/virt-launcher:v1.8.4").unwrap();
        let expected = ["DaemonSet virt-handler", "Deployment virt-controller, --launcher-image"];
        assert_eq!(launcher.iter().collect::<Vec<_>>(), expected);
        let text = format_list(images.clone(), ImagesFormat::Text).unwrap();
        assert_eq!(text.lines().count(), images.len());
        let json: Value = serde_json::from_str(&format_list(images, ImagesFormat::Json).unwrap()).unwrap();
        assert!(json["images"][0]["usedBy"].is_array(), "{json}");
    }
}
