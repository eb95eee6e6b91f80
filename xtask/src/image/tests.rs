use std::{collections::BTreeSet, fs};

use clap::ValueEnum;
use serde_json::Value;
use vitivirt_lab::ContainerImage;

use super::*;
use crate::programs::root;

const REVISION: &str = "1a2b3c4d5e6f7081920a1b2c3d4e5f6071829304";

fn source() -> Source {
    Source { revision: REVISION.to_owned(), time: 1_767_225_600 }
}

fn small_variant(architecture: ImageArchitecture, sbom: bool) -> Variant {
    let file = |path: String, mode, content: &[u8]| ImageFile { path, mode, content: content.to_vec() };
    let mut files: Vec<ImageFile> = PROGRAMS
        .iter()
        .map(|program| {
            file(format!("{PROGRAM_FOLDER}/{program}"), 0o755, format!("{program} {architecture:?}").as_bytes())
        })
        .collect();
    files.push(file("licenses/LICENSE".to_owned(), 0o644, b"text"));
    let sboms = if sbom { vec![("a.cdx.json".to_owned(), b"{\"a\":1}".to_vec())] } else { Vec::new() };
    Variant { architecture, files, sboms }
}

fn small_image() -> Layout {
    let variants = [small_variant(ImageArchitecture::host().unwrap(), true)];
    Layout::new(&variants, IMAGE, &source()).unwrap()
}

fn unpack(layout: &Layout) -> (tempfile::TempDir, ContainerImage) {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("image.tar");
    fs::write(&archive, layout.archive().unwrap()).unwrap();
    let image = ContainerImage::unpack(&archive, &folder.path().join("unpacked")).unwrap();
    (folder, image)
}

/// The image and command of every container of a manifest.
fn containers(text: &str) -> Vec<(String, Vec<String>)> {
    let documents = vitivirt_lab::manifests::parse(text).unwrap();
    let containers = documents
        .iter()
        .filter_map(|document| document.pointer("/spec/template/spec/containers")?.as_array())
        .flatten()
        .map(|container| {
            let command = container.get("command").and_then(Value::as_array).unwrap();
            let command = command.iter().map(|word| word.as_str().unwrap().to_owned()).collect();
            (container.get("image").and_then(Value::as_str).unwrap().to_owned(), command)
        });
    containers.collect()
}

#[test]
fn another_reader_finds_the_files_and_the_metadata() {
    let layout = small_image();
    let (_folder, image) = unpack(&layout);
    assert_eq!(image.digest, layout.digest);
    assert_eq!(image.reference.as_deref(), Some(IMAGE));
    assert_eq!(image.user, (65532, 65532));
    assert_eq!(image.program(None).unwrap(), Path::new("/usr/local/bin/kubevirt-operator"));
    let program = image.outside(Path::new("/usr/local/bin/virt-operator")).unwrap();
    assert!(fs::read_to_string(program).unwrap().starts_with("virt-operator"));
    let labels = image.configuration.labels_of_config().unwrap();
    assert_eq!(labels.get("org.opencontainers.image.revision").map(String::as_str), Some(REVISION));
    assert_eq!(labels.get("org.opencontainers.image.version").map(String::as_str), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(labels.get("org.opencontainers.image.created").map(String::as_str), Some("2026-01-01T00:00:00Z"));
}

#[test]
fn a_changed_blob_is_noticed() {
    let variants = [small_variant(ImageArchitecture::host().unwrap(), false)];
    let (folder, _) = unpack(&Layout::new(&variants, IMAGE, &source()).unwrap());
    let layout = folder.path().join("unpacked/layout");
    let blobs: Vec<PathBuf> =
        fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|blob| blob.unwrap().path()).collect();
    assert_eq!(blobs.len(), 4, "index, manifest, configuration and layer");
    for blob in blobs {
        let content = fs::read(&blob).unwrap();
        let mut changed = content.clone();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&blob, changed).unwrap();
        let root = tempfile::tempdir().unwrap();
        let error = ContainerImage::from_layout(&layout, root.path()).unwrap_err();
        assert!(error.to_string().contains("has the digest"), "{error:#}");
        fs::write(&blob, content).unwrap();
    }
}

#[test]
fn the_same_programs_give_the_same_bytes() {
    assert_eq!(small_image().archive().unwrap(), small_image().archive().unwrap());
    let later = Source { time: source().time + 1, ..source() };
    let other = Layout::new(&[small_variant(ImageArchitecture::host().unwrap(), true)], IMAGE, &later).unwrap();
    assert_ne!(small_image().digest, other.digest);
}

#[test]
fn everything_in_the_archive_belongs_to_root_and_has_the_time_of_the_commit() {
    let bytes = small_image().archive().unwrap();
    let mut archive = tar::Archive::new(bytes.as_slice());
    let mut paths = Vec::new();
    for entry in archive.entries().unwrap() {
        let entry = entry.unwrap();
        let header = entry.header();
        assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, source().time));
        paths.push(entry.path().unwrap().display().to_string());
    }
    assert!(paths.is_sorted(), "{paths:?}");
    assert!(["oci-layout", "index.json", "manifest.json"].iter().all(|file| paths.contains(&(*file).to_owned())));
}

#[test]
fn an_image_for_two_architectures_has_both_and_their_sboms() {
    let variants = [small_variant(ImageArchitecture::Amd64, true), small_variant(ImageArchitecture::Arm64, true)];
    let (folder, _) = unpack(&Layout::new(&variants, IMAGE, &source()).unwrap());
    let layout = folder.path().join("unpacked/layout");
    let read = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let blob = |descriptor: &Value| {
        let digest = descriptor.get("digest").and_then(Value::as_str).unwrap().strip_prefix("sha256:").unwrap();
        read(&layout.join("blobs/sha256").join(digest))
    };
    let index = blob(read(&layout.join("index.json")).pointer("/manifests/0").unwrap());
    let manifests = index.get("manifests").and_then(Value::as_array).unwrap();
    let text = |value: &Value, path: &str| value.pointer(path).and_then(Value::as_str).map(str::to_owned);
    let architectures: Vec<_> =
        manifests.iter().map(|manifest| text(manifest, "/platform/architecture").unwrap()).collect();
    assert_eq!(architectures, ["amd64", "arm64", "unknown", "unknown"]);
    let digests: BTreeSet<_> = manifests.iter().map(|manifest| text(manifest, "/digest")).collect();
    assert_eq!(digests.len(), 4);
    let [amd64, arm64, first, second] = manifests.as_slice() else { panic!("{manifests:?}") };
    for (image, referrer) in [(amd64, first), (arm64, second)] {
        assert_eq!(text(&blob(referrer), "/subject/digest"), text(image, "/digest"));
        assert_eq!(text(referrer, "/artifactType").as_deref(), Some("application/vnd.cyclonedx+json"));
    }
}

#[test]
fn the_manifests_run_programs_of_the_image() {
    let (_folder, image) = unpack(&small_image());
    for (file, program) in [
        ("config/manager/manager.yaml", "kubevirt-operator"),
        ("config/virt-operator/kubevirt-operator.yaml", "virt-operator"),
    ] {
        let containers = containers(&fs::read_to_string(root().join(file)).unwrap());
        let [(name, command)] = containers.as_slice() else { panic!("{file}: {containers:?}") };
        assert_eq!(name, IMAGE, "{file}");
        let found = image.program(command.first().map(String::as_str)).unwrap();
        assert_eq!(found, Path::new("/").join(PROGRAM_FOLDER).join(program), "{file}");
    }
}

#[test]
fn the_chart_runs_a_program_of_the_image() {
    let read = |file: &str| fs::read_to_string(root().join("charts/kubevirt-operator").join(file)).unwrap();
    let value = |text: &str, key: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": ").map(str::to_owned));
        line.unwrap_or_else(|| panic!("{key} not found"))
    };
    let (repository, tag) = IMAGE.rsplit_once(':').unwrap();
    assert_eq!(value(&read("values.yaml"), "repository"), repository);
    assert_eq!(value(&read("Chart.yaml"), "appVersion").trim_matches('"'), tag);
    let (_folder, image) = unpack(&small_image());
    let command = value(&read("templates/deployment.yaml"), "command");
    image.program(Some(command.trim_matches(['[', ']']))).unwrap();
}

#[test]
fn the_dockerfile_has_the_same_user_programs_and_entry_point() {
    let text = fs::read_to_string(root().join("Dockerfile")).unwrap();
    let (_folder, image) = unpack(&small_image());
    let last = |instruction: &str| text.lines().rev().find_map(|line| line.strip_prefix(instruction)).map(str::trim);
    assert_eq!(last("USER "), Some("65532:65532"));
    let entry_point = format!("[\"{}\"]", image.program(None).unwrap().display());
    assert_eq!(last("ENTRYPOINT "), Some(entry_point.as_str()));
    assert_eq!(last("ENV "), Some("PATH=/usr/local/bin"));
    assert_eq!(last("FROM "), Some("scratch"));
    let toolchain = fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = ")).unwrap().trim_matches('"');
    assert_eq!(last("ARG RUST_VERSION="), Some(channel));
    for program in PROGRAMS {
        assert!(text.contains(&format!("--package {program}")), "{program} is not built");
        assert!(text.contains(&format!("/release/{program}")), "{program} is not copied");
    }
    assert!(text.lines().any(|line| line == "ARG TARGETARCH"), "a default hides the architecture of the builder");
}

#[test]
fn nothing_names_an_image_that_is_not_built() {
    let (repository, _) = IMAGE.rsplit_once(':').unwrap();
    let (owner, _) = repository.rsplit_once('/').unwrap();
    let mut folders = vec![root().join("config"), root().join("charts"), root().join("examples"), root().join("docs")];
    let mut found = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else { continue };
            for (start, _) in text.match_indices(&format!("{owner}/")) {
                let rest = text.get(start..).unwrap();
                let end = rest.find(|letter: char| !(letter.is_alphanumeric() || "./:-".contains(letter)));
                let name = rest.get(..end.unwrap_or(rest.len())).unwrap().trim_end_matches(['.', ':']);
                assert!(name == repository || name == IMAGE, "{}: {name}", path.display());
                found += 1;
            }
        }
    }
    assert!(found >= 3, "only {found} images were found");
}

#[test]
fn krew_installs_the_archives_that_are_built() {
    let text = fs::read_to_string(root().join(".krew.yaml")).unwrap();
    let values = |prefix: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.trim().strip_prefix(prefix)?.to_owned())).collect()
    };
    let folder = format!("{}/releases/download/{{{{ .TagName }}}}", env!("CARGO_PKG_REPOSITORY"));
    let all = ImageArchitecture::value_variants();
    let built = |format: &dyn Fn(ImageArchitecture) -> String| all.iter().copied().map(format).collect::<Vec<_>>();
    let addresses = built(&|architecture| format!("{folder}/{}\" .TagName }}}}", plugin::file_name(architecture)));
    assert_eq!(values("{{addURIAndSha \""), addresses);
    assert_eq!(values("arch: "), built(&|architecture| architecture.name().to_owned()));
    assert_eq!(values("bin: "), built(&|_| PLUGIN.to_owned()));
    let page = fs::read_to_string(root().join("docs/release.md")).unwrap();
    assert!(page.contains("`kubectl-vmachine-linux-<architecture>.tar.gz`"));
}

#[test]
fn the_archive_of_the_plugin_has_program_and_license() {
    let pack = || plugin::pack(b"program".to_vec(), b"license".to_vec(), &source()).unwrap();
    let bytes = pack();
    assert_eq!(bytes, pack());
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(bytes.as_slice()));
    let files = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        let header = entry.header();
        let path = entry.path().unwrap().display().to_string();
        (path, header.mode().unwrap(), header.uid().unwrap(), header.mtime().unwrap())
    });
    let time = source().time;
    let expected = [("LICENSE".to_owned(), 0o644, 0, time), (PLUGIN.to_owned(), 0o755, 0, time)];
    assert_eq!(files.collect::<Vec<_>>(), expected);
}

#[test]
fn the_architecture_of_this_machine_is_first() {
    let host = ImageArchitecture::host().unwrap();
    assert_eq!(architectures(&[]).unwrap(), [host]);
    for given in
        [[ImageArchitecture::Amd64, ImageArchitecture::Arm64], [ImageArchitecture::Arm64, ImageArchitecture::Amd64]]
    {
        let sorted = architectures(&given).unwrap();
        assert_eq!((sorted.len(), sorted.first()), (2, Some(&host)));
    }
}
