//! `virt-operator manifests`: the operator's Deployment and everything it needs, for `kubectl apply -f -`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use vitivirt_api::{IMAGE, text::is_label};
use vitivirt_cli::{CommandResult, ObjectFormat, OrInvalid, print_objects};
use vitivirt_install::manifests::Manifests;

#[derive(Debug, Clone, Args)]
pub(crate) struct ManifestsArguments {
    /// Image of the operator; KubeVirt's own images come from the KubeVirt release
    #[arg(long, default_value = IMAGE)]
    image: String,
    /// Namespace of the operator and of KubeVirt
    #[arg(short, long, value_name = "NAMESPACE", default_value = "kubevirt")]
    namespace: String,
}

pub(crate) fn run(arguments: ManifestsArguments) -> CommandResult<ExitCode> {
    let manifests = validate(arguments).or_invalid()?;
    let objects = manifests.objects().map_err(anyhow::Error::from)?;
    print_objects(objects.into_iter().map(Ok), ObjectFormat::Yaml)?;
    Ok(ExitCode::SUCCESS)
}

fn validate(arguments: ManifestsArguments) -> Result<Manifests> {
    let ManifestsArguments { image, namespace } = arguments;
    if !is_label(&namespace) {
        bail!("--namespace: invalid value {namespace:?}: must consist of lower-case letters, digits and hyphens");
    }
    if image.is_empty() || image.contains(char::is_whitespace) {
        bail!("--image: invalid value {image:?}: must be an image name such as registry.example.com/virt-operator:v1");
    }
    Ok(Manifests { namespace, image })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(namespace: &str, image: &str) -> ManifestsArguments {
        ManifestsArguments { namespace: namespace.to_owned(), image: image.to_owned() }
    }

    #[test]
    fn an_invalid_name_is_one_sentence_with_the_flag() {
        for (namespace, image, expected) in [
            ("Kube_Virt", "a", "--namespace: invalid value"),
            ("-a", "a", "--namespace: invalid value"),
            ("", "a", "--namespace: invalid value"),
            ("a", "", "--image: invalid value"),
            ("a", "a b", "--image: invalid value"),
        ] {
            let error = validate(arguments(namespace, image)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(validate(arguments("kube-virt", "a/b:c")).unwrap().namespace, "kube-virt");
    }
}
