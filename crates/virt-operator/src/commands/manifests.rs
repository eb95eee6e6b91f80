//! `virt-operator manifests`: the operator's Deployment and everything it needs, for `kubectl apply -f -`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use vitivirt_api::{
    IMAGE,
    text::{is_label, is_subdomain},
};
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
    /// Secret with the credentials of the image's registry; can be repeated
    ///
    /// It must be in the namespace of the operator. The images of KubeVirt use spec.imagePullSecrets of the KubeVirt
    /// resource.
    #[arg(long = "image-pull-secret", value_name = "NAME")]
    image_pull_secrets: Vec<String>,
}

pub(crate) fn run(arguments: ManifestsArguments) -> CommandResult<ExitCode> {
    let manifests = validate(arguments).or_invalid()?;
    let objects = manifests.objects().map_err(anyhow::Error::from)?;
    print_objects(objects.into_iter().map(Ok), ObjectFormat::Yaml)?;
    Ok(ExitCode::SUCCESS)
}

fn validate(arguments: ManifestsArguments) -> Result<Manifests> {
    let ManifestsArguments { image, namespace, image_pull_secrets } = arguments;
    if !is_label(&namespace) {
        bail!("--namespace: invalid value {namespace:?}: must consist of lower-case letters, digits and hyphens");
    }
    if image.is_empty() || image.contains(char::is_whitespace) {
        bail!("--image: invalid value {image:?}: must be an image name such as registry.example.com/virt-operator:v1");
    }
    if let Some(invalid) = image_pull_secrets.iter().find(|name| !is_subdomain(name)) {
        bail!(
            "--image-pull-secret: invalid value {invalid:?}: must consist of lower-case letters, digits, hyphens and \
             periods"
        );
    }
    Ok(Manifests { namespace, image, image_pull_secrets })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(namespace: &str, image: &str) -> ManifestsArguments {
        ManifestsArguments { namespace: namespace.to_owned(), image: image.to_owned(), image_pull_secrets: Vec::new() }
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
        let secrets = ManifestsArguments { image_pull_secrets: vec!["A_B".to_owned()], ..arguments("a", "a") };
        let error = validate(secrets).unwrap_err().to_string();
        assert!(error.contains("--image-pull-secret: invalid value \"A_B\""), "{error}");
    }

    #[test]
    fn the_operators_pods_have_the_pull_secrets_in_the_given_order() {
        let pull_secrets = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let manifests = validate(ManifestsArguments { image_pull_secrets: names, ..arguments("a", "a") }).unwrap();
            let objects = manifests.objects().unwrap();
            let deployment = objects.iter().find(|object| object["kind"] == "Deployment").unwrap();
            deployment.pointer("/spec/template/spec/imagePullSecrets").cloned()
        };
        assert_eq!(pull_secrets(&[]), None);
        assert_eq!(
            pull_secrets(&["mirror", "other"]),
            Some(serde_json::json!([{"name": "mirror"}, {"name": "other"}]))
        );
    }
}
