//! Which program a pod runs, by image and command of its container.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use k8s_openapi::api::core::v1::Container;

use crate::{
    components::{self, ComponentGroup},
    image::ContainerImage,
};

/// The programs with a `--listen` option: KubeVirt's, and our replacement for one of them.
pub(super) const LISTENERS: [&str; 3] = ["virt-api", "virt-controller", "virt-operator"];

/// One of our programs, and the image that contains it.
#[derive(Clone, Debug)]
pub struct OwnProgram {
    /// Matches the image's repository, without registry and tag: `vitistack/virt-operator`.
    pub image: String,
    pub file: PathBuf,
}

impl OwnProgram {
    /// Whether a container with this image and command runs this program. An image may contain several programs, and
    /// the file names of these are their commands.
    fn is_run_by(&self, repository: &str, command: Option<&str>, own: &[OwnProgram]) -> bool {
        let is_of_image = |program: &OwnProgram| repository.ends_with(&program.image);
        let is_alone = own.iter().filter(|program| is_of_image(program)).count() == 1;
        is_of_image(self) && (is_alone || self.file.file_name().and_then(|name| name.to_str()) == command)
    }
}

/// What pods of a lab can run in addition to KubeVirt's programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Programs {
    pub(crate) own: Vec<OwnProgram>,
    pub(crate) images: Vec<ContainerImage>,
}

/// The program of a pod.
#[derive(Debug)]
pub(super) struct PodProgram {
    /// A file of this machine, or of the image.
    pub(super) file: PathBuf,
    pub(super) image: Option<ContainerImage>,
}

impl Programs {
    /// The program for a container's image and command. None if the container is only simulated.
    pub(super) fn of(&self, container: &Container) -> Option<Result<PodProgram>> {
        let image = container.image.as_deref().unwrap_or_default();
        let first = container.command.as_ref().and_then(|command| command.first());
        if let Some(found) = self.images.iter().find(|own| own.is_named_by(image)) {
            let file = found.program(first.map(String::as_str));
            return Some(file.map(|file| PodProgram { file, image: Some(found.clone()) }));
        }
        if self.images.iter().any(|own| own.is_of_repository(image)) {
            return Some(Err(anyhow!("image {image} not found: the lab has another tag or digest of it")));
        }
        let on_machine = |file| PodProgram { file, image: None };
        let (repository, tag) = split_image(image);
        let command = first.and_then(|command| Path::new(command).file_name()?.to_str());
        if let Some(program) = self.own.iter().find(|program| program.is_run_by(repository, command, &self.own)) {
            return Some(Ok(on_machine(program.file.clone())));
        }
        let name = command?;
        if !LISTENERS.contains(&name) {
            return None;
        }
        // Tests rename images and use digests. Only the previous release must be distinguished.
        let group = if tag == Some("v1.7.0") { ComponentGroup::KubeVirtPrevious } else { ComponentGroup::KubeVirt };
        Some(components::binary(group, name).map(on_machine))
    }
}

/// `registry:5000/a/b:tag@sha256:…` → (`registry:5000/a/b`, `tag`)
pub(crate) fn split_image(image: &str) -> (&str, Option<&str>) {
    let undigested = image.split('@').next().unwrap_or_default();
    let slash = undigested.rfind('/').map_or(0, |slash| slash + 1);
    match undigested.get(slash..).and_then(|name| name.find(':')) {
        Some(colon) => (undigested.get(..slash + colon).unwrap_or_default(), undigested.get(slash + colon + 1..)),
        None => (undigested, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_split_into_repository_and_tag() {
        for (image, expected) in [
            ("quay.io/kubevirt/virt-api:v1.8.4", ("quay.io/kubevirt/virt-api", Some("v1.8.4"))),
            ("registry:5000/virt-api", ("registry:5000/virt-api", None)),
            ("registry:5000/virt-api:x@sha256:abc", ("registry:5000/virt-api", Some("x"))),
            ("virt-api@sha256:abc", ("virt-api", None)),
        ] {
            assert_eq!(split_image(image), expected, "{image}");
        }
    }

    #[test]
    fn a_pod_runs_the_image_that_its_tag_or_digest_names() {
        let folder = tempfile::tempdir().unwrap();
        let digest = format!("sha256:{}", "0".repeat(64));
        std::fs::create_dir_all(folder.path().join("bin")).unwrap();
        for program in ["one", "two"] {
            std::fs::write(folder.path().join("bin").join(program), "").unwrap();
        }
        let configuration = serde_json::json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/sbin:/bin"], "Entrypoint": ["/bin/one"]},
            "rootfs": {"type": "layers", "diff_ids": []},
        });
        let image = ContainerImage {
            reference: Some("registry:5000/team/both:1.0".to_owned()),
            digest: digest.clone(),
            configuration: serde_json::from_value(configuration).unwrap(),
            root: folder.path().to_owned(),
            user: (65532, 65532),
        };
        let programs = Programs { own: Vec::new(), images: vec![image] };
        let run = |image: &str, command: Option<&str>| {
            let container = serde_json::json!({"name": "x", "image": image, "command": command.map(|word| [word])});
            let program = programs.of(&serde_json::from_value(container).unwrap())?;
            Some(program.map(|program| program.file.display().to_string()).map_err(|error| error.to_string()))
        };
        let found = |file: &str| Some(Ok(file.to_owned()));
        assert_eq!(run("registry:5000/team/both:1.0", None), found("/bin/one"));
        assert_eq!(run("registry:5000/team/both:1.0", Some("two")), found("/bin/two"));
        assert_eq!(run(&format!("registry:5000/team/both@{digest}"), Some("/bin/two")), found("/bin/two"));
        for (image, command) in [
            ("registry:5000/team/both:1.1", None),
            (&*format!("registry:5000/team/both@sha256:{}", "1".repeat(64)), None),
            ("registry:5000/team/both:1.0", Some("three")),
            ("registry:5000/team/both:1.0", Some("/bin/../bin/two")),
        ] {
            assert!(matches!(run(image, command), Some(Err(_))), "{image} {command:?}");
        }
        assert_eq!(run("registry:5000/team/other:1.0", None), None);
    }
}
