//! Container images in a lab. A pod whose image is one of them runs the program of the image as a container runtime does:
//! in the root file system of the image, without files of the machine, as the user of the image or of the pod, and on a
//! read-only root if the pod asks for one.
//!
//! An image comes from an OCI layout, as a folder or as a tar archive. Every digest and size in it is checked.

use std::{
    fs::{self, File},
    io::Read,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use oci_spec::image::{
    Arch, Descriptor, Digest as OciDigest, ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout,
};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::{
    isolate,
    launch::{ContainerRoot, Launch},
    paths,
};

/// The annotation of a layout's index with registry, repository and tag of an image.
pub const REFERENCE_ANNOTATION: &str = "io.containerd.image.name";

/// An unpacked image.
#[derive(Clone, Debug)]
pub struct ContainerImage {
    /// Registry, repository and tag, if the layout names them.
    pub reference: Option<String>,
    /// The digest under which a registry has the image.
    pub digest: String,
    pub configuration: ImageConfiguration,
    /// Its files.
    pub root: PathBuf,
    /// Numeric user and group of its configuration.
    pub user: (u32, u32),
}

impl ContainerImage {
    /// Unpacks an archive into the lab's own files, for [`crate::LabOptions::images`].
    pub fn load(archive: &Path) -> Result<Self> {
        isolate::require_inside()?;
        let folder = paths::run_dir()?.join("images");
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let folder = tempfile::tempdir_in(&folder).context("creating a folder for the image")?.keep();
        Self::unpack(archive, &folder)
    }

    /// Unpacks an archive into an empty folder.
    pub fn unpack(archive: &Path, folder: &Path) -> Result<Self> {
        let layout = folder.join("layout");
        let file = File::open(archive).with_context(|| format!("opening {}", archive.display()))?;
        tar::Archive::new(file).unpack(&layout).with_context(|| format!("unpacking {}", archive.display()))?;
        Self::from_layout(&layout, &folder.join("root"))
    }

    /// Unpacks the image of a layout for this machine's architecture into the folder `root`.
    pub fn from_layout(layout: &Path, root: &Path) -> Result<Self> {
        let text = fs::read(layout.join("oci-layout")).context("reading oci-layout")?;
        let header: OciLayout = serde_json::from_slice(&text).context("parsing oci-layout")?;
        ensure!(header.image_layout_version() == "1.0.0", "unknown version of the layout: {header:?}");
        let index = fs::read(layout.join("index.json")).context("reading index.json")?;
        let index: ImageIndex = serde_json::from_slice(&index).context("parsing index.json")?;
        let [entry] = index.manifests().as_slice() else {
            bail!("index.json must have one entry and has {}", index.manifests().len())
        };
        let blobs = Blobs(layout.join("blobs/sha256"));
        let manifest: ImageManifest = match entry.media_type() {
            MediaType::ImageManifest => blobs.json(entry)?,
            MediaType::ImageIndex => blobs.json(own_platform(&blobs.json(entry)?)?)?,
            other => bail!("index.json has an entry of the unknown type {other}"),
        };
        let configuration: ImageConfiguration = blobs.json(manifest.config())?;
        fs::create_dir_all(root).with_context(|| format!("creating {}", root.display()))?;
        let differences = configuration.rootfs().diff_ids();
        ensure!(differences.len() == manifest.layers().len(), "rootfs.diff_ids and the layers differ in number");
        for (layer, difference) in manifest.layers().iter().zip(differences) {
            blobs.unpack(layer, difference, root)?;
        }
        Ok(ContainerImage {
            reference: entry.annotations().as_ref().and_then(|all| all.get(REFERENCE_ANNOTATION)).cloned(),
            digest: entry.digest().to_string(),
            user: numeric_user(&configuration)?,
            configuration,
            root: root.to_owned(),
        })
    }

    /// The program that a command names, as a path inside of the image: absolute, or found in the `PATH` of the image.
    /// Without a command, the entry point.
    pub fn program(&self, command: Option<&str>) -> Result<PathBuf> {
        let entry_point = || self.configuration.config().as_ref()?.entrypoint().as_ref()?.first().map(String::as_str);
        let command = command.or_else(entry_point).context("the image has no entry point")?;
        let folders = match command.contains('/') {
            true => vec![""],
            false => self.variable("PATH").unwrap_or_default().split(':').collect(),
        };
        let inside = folders.iter().map(|folder| Path::new(folder).join(command));
        let found = inside.into_iter().find(|path| self.outside(path).is_ok_and(|file| file.is_file()));
        found.with_context(|| format!("the image {} has no program {command:?}", self.name()))
    }

    /// Where a file of the image is on this machine.
    pub fn outside(&self, inside: &Path) -> Result<PathBuf> {
        let relative = inside.strip_prefix("/").unwrap_or(inside);
        let is_plain = relative.components().all(|component| matches!(component, Component::Normal(_)));
        ensure!(is_plain, "{} is not a plain path", inside.display());
        Ok(self.root.join(relative))
    }

    /// The environment of its programs.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&str, &str)> {
        let variables = self.configuration.config().as_ref().and_then(|config| config.env().as_ref());
        variables.into_iter().flatten().filter_map(|variable| variable.split_once('='))
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.environment().find_map(|(have, value)| (have == name).then_some(value))
    }

    fn name(&self) -> &str {
        self.reference.as_deref().unwrap_or(&self.digest)
    }

    /// Whether an image reference in a pod names this image.
    pub(crate) fn is_named_by(&self, reference: &str) -> bool {
        match reference.split_once('@') {
            Some((_, digest)) => self.is_of_repository(reference) && digest == self.digest,
            None => self.reference.as_deref() == Some(reference),
        }
    }

    pub(crate) fn is_of_repository(&self, reference: &str) -> bool {
        let repository = |reference| crate::kubelet::split_image(reference).0;
        self.reference.as_deref().is_some_and(|own| repository(own) == repository(reference))
    }

    /// Runs a command of the image as its user on a read-only root, and returns the output.
    pub fn run(&self, command: &str, arguments: &[&str]) -> Result<std::process::Output> {
        isolate::require_inside()?;
        let root = tempfile::tempdir_in(paths::run_dir()?).context("creating a root folder")?;
        let (user, group) = self.user;
        let launch = Launch {
            hostname: "image".to_owned(),
            root: root.path().to_owned(),
            program: self.program(Some(command))?,
            name: command.to_owned(),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
            environment: self.environment().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            container: Some(ContainerRoot { files: self.root.clone(), user, group, read_only: true }),
        };
        let (program, environment) = launch.command()?;
        let mut command = std::process::Command::new(program);
        command.env_clear().envs(environment).output().context("running a program of the image")
    }
}

/// The files of a layout, by digest.
struct Blobs(PathBuf);

impl Blobs {
    fn read(&self, descriptor: &Descriptor) -> Result<Vec<u8>> {
        let digest = descriptor.digest();
        let file = self.0.join(digest.digest());
        let content = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        ensure!(
            content.len() as u64 == descriptor.size(),
            "{digest} has {} bytes, not {}",
            content.len(),
            descriptor.size()
        );
        ensure!(sha256(&content) == digest.as_ref(), "the content of {digest} has the digest {}", sha256(&content));
        Ok(content)
    }

    fn json<T: DeserializeOwned>(&self, descriptor: &Descriptor) -> Result<T> {
        serde_json::from_slice(&self.read(descriptor)?).with_context(|| format!("parsing {}", descriptor.digest()))
    }

    fn unpack(&self, layer: &Descriptor, difference: &str, root: &Path) -> Result<()> {
        let compressed = self.read(layer)?;
        let mut content = Vec::new();
        match layer.media_type() {
            MediaType::ImageLayerGzip => GzDecoder::new(compressed.as_slice()).read_to_end(&mut content).map(drop),
            MediaType::ImageLayer => {
                content = compressed;
                Ok(())
            }
            other => bail!("layer {} has the unknown type {other}", layer.digest()),
        }
        .with_context(|| format!("decompressing layer {}", layer.digest()))?;
        let difference: OciDigest = difference.parse().context("parsing a digest of rootfs.diff_ids")?;
        ensure!(
            sha256(&content) == difference.as_ref(),
            "layer {} does not have the diff ID {difference}",
            layer.digest()
        );
        let mut archive = tar::Archive::new(content.as_slice());
        for entry in archive.entries().context("reading a layer")? {
            let mut entry = entry.context("reading a file of a layer")?;
            let path = entry.path().context("reading the path of a file")?.into_owned();
            let is_whiteout = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".wh."));
            ensure!(!is_whiteout, "the lab does not support images that delete files ({})", path.display());
            entry.set_preserve_permissions(true);
            let unpacked = entry.unpack_in(root).with_context(|| format!("unpacking {}", path.display()))?;
            ensure!(unpacked, "{} would be outside of the image", path.display());
        }
        Ok(())
    }
}

fn sha256(content: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(content))
}

/// The manifest for this machine.
fn own_platform(index: &ImageIndex) -> Result<&Descriptor> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => Arch::Amd64,
        "aarch64" => Arch::ARM64,
        other => Arch::Other(other.to_owned()),
    };
    let is_own = |entry: &&Descriptor| {
        entry.platform().as_ref().is_some_and(|platform| *platform.architecture() == architecture)
    };
    index.manifests().iter().find(is_own).with_context(|| format!("the image has no variant for {architecture}"))
}

/// Kubernetes can check `runAsNonRoot` only for a numeric user.
fn numeric_user(configuration: &ImageConfiguration) -> Result<(u32, u32)> {
    let user = configuration.config().as_ref().and_then(|config| config.user().as_deref()).unwrap_or("0:0");
    let (user_id, group_id) = user.split_once(':').unwrap_or((user, "0"));
    match (user_id.parse(), group_id.parse()) {
        (Ok(user), Ok(group)) => Ok((user, group)),
        _ => bail!("the user {user:?} of the image is not numeric"),
    }
}
