//! `virt-operator manifests`: what must exist before the operator runs, and its Deployment, for `kubectl apply -f -`.

use std::io;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use vitivirt_api::text::is_label;
use vitivirt_cli::{write_yaml, written};
use vitivirt_install::manifests::Manifests;

#[derive(Debug, Clone, Args)]
pub(crate) struct ManifestsArguments {
    /// The image of the operator itself; those of KubeVirt are the release's
    #[arg(long, default_value = concat!("ghcr.io/vitistack/virt-operator:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// Where the operator and KubeVirt run
    #[arg(long, value_name = "NAME", default_value = "kubevirt")]
    namespace: String,
}

pub(crate) fn run(arguments: ManifestsArguments) -> Result<ExitCode> {
    let manifests = checked(arguments)?;
    let mut out = io::stdout().lock();
    written(manifests.objects()?.iter().try_for_each(|object| write_yaml(&mut out, object)))?;
    Ok(ExitCode::SUCCESS)
}

fn checked(arguments: ManifestsArguments) -> Result<Manifests> {
    let ManifestsArguments { image, namespace } = arguments;
    if !is_label(&namespace) {
        bail!("--namespace must be lower-case letters, digits and dashes, and {namespace:?} is not");
    }
    if image.is_empty() || image.contains(char::is_whitespace) {
        bail!("--image must name an image, and {image:?} does not");
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
    fn what_no_cluster_would_take_is_told_in_one_sentence() {
        for (namespace, image, expected) in [
            ("Kube_Virt", "a", "--namespace must be"),
            ("-a", "a", "--namespace must be"),
            ("", "a", "--namespace must be"),
            ("a", "", "--image must"),
            ("a", "a b", "--image must"),
        ] {
            let error = checked(arguments(namespace, image)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(checked(arguments("kube-virt", "a/b:c")).unwrap().namespace, "kube-virt");
    }
}
