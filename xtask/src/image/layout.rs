//! The image as an OCI layout. It is a function of the programs and the commit: the same input gives the same bytes.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write,
};

use anyhow::{Context, Result};
use flate2::{Compression, write::GzEncoder};
use jiff::Timestamp;
use oci_spec::image::{
    ANNOTATION_CREATED, ANNOTATION_DESCRIPTION, ANNOTATION_DOCUMENTATION, ANNOTATION_LICENSES, ANNOTATION_REF_NAME,
    ANNOTATION_REVISION, ANNOTATION_SOURCE, ANNOTATION_TITLE, ANNOTATION_VERSION, Arch, ConfigBuilder, Descriptor,
    HistoryBuilder, ImageConfigurationBuilder, ImageIndexBuilder, ImageManifestBuilder, MediaType, OciLayoutBuilder,
    Os, PlatformBuilder, RootFsBuilder, Sha256Digest,
};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use vitivirt_lab::REFERENCE_ANNOTATION;

use crate::shipped::{ImageArchitecture, Source};

/// The folder of the programs. The Deployments name only the programs, so it is the `PATH` of the image.
pub(super) const PROGRAM_FOLDER: &str = "usr/local/bin";
/// The image is named after this program. A container without a command runs it.
const ENTRY_POINT: &str = "kubevirt-operator";
/// Numeric, because Kubernetes cannot check `runAsNonRoot` for a name. The Dockerfile has the same.
pub(super) const USER: &str = "65532:65532";
/// At this level, the compressed bytes do not depend on the instructions that the processor supports.
const COMPRESSION: u32 = 9;
const CYCLONE_DX: &str = "application/vnd.cyclonedx+json";

/// A file of the image.
pub(super) struct ImageFile {
    pub(super) path: String,
    pub(super) mode: u32,
    pub(super) content: Vec<u8>,
}

/// The image for one architecture.
pub(super) struct Variant {
    pub(super) architecture: ImageArchitecture,
    pub(super) files: Vec<ImageFile>,
    /// Lists of the dependencies, by file name.
    pub(super) sboms: Vec<(String, Vec<u8>)>,
}

/// The files of an OCI layout.
pub(super) struct Layout {
    /// The digest under which a registry will have the image.
    pub(super) digest: String,
    files: BTreeMap<String, Vec<u8>>,
    time: u64,
}

impl Layout {
    /// `reference` is registry, repository and tag.
    pub(super) fn new(variants: &[Variant], reference: &str, source: &Source) -> Result<Self> {
        let mut layout = Layout { digest: String::new(), files: BTreeMap::new(), time: source.time };
        let labels = labels(reference, source)?;
        let mut images = Vec::new();
        let mut referrers = Vec::new();
        for variant in variants {
            let image = layout.add_variant(variant, reference, &labels, source)?;
            if !variant.sboms.is_empty() {
                referrers.push(layout.add_sboms(&variant.sboms, &image)?);
            }
            images.push(image);
        }
        let manifests: Vec<Descriptor> = images.iter().chain(&referrers).cloned().collect();
        let index = ImageIndexBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageIndex)
            .manifests(manifests)
            .annotations(labels)
            .build()?;
        let mut entry = layout.add_json(MediaType::ImageIndex, &index)?;
        layout.digest = entry.digest().to_string();
        let tag = reference.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        entry.set_annotations(Some(HashMap::from([
            (ANNOTATION_REF_NAME.to_owned(), tag.to_owned()),
            (REFERENCE_ANNOTATION.to_owned(), reference.to_owned()),
        ])));
        let index = ImageIndexBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageIndex)
            .manifests([entry])
            .build()?;
        layout.files.insert("index.json".to_owned(), stable_json(&index)?);
        let header = OciLayoutBuilder::default().image_layout_version("1.0.0").build()?;
        layout.files.insert("oci-layout".to_owned(), stable_json(&header)?);
        Ok(layout)
    }

    fn add_variant(
        &mut self,
        variant: &Variant,
        reference: &str,
        labels: &HashMap<String, String>,
        source: &Source,
    ) -> Result<Descriptor> {
        let architecture = Arch::from(variant.architecture.name());
        let layer = archive(&variant.files, source.time)?;
        let difference = format!("sha256:{}", sha256(&layer));
        let layer = self.add(MediaType::ImageLayerGzip, compress(&layer)?)?;
        let configuration = ImageConfigurationBuilder::default()
            .created(rfc3339(source)?)
            .architecture(architecture.clone())
            .os(Os::Linux)
            .config(
                ConfigBuilder::default()
                    .user(USER)
                    .env([format!("PATH=/{PROGRAM_FOLDER}")])
                    .entrypoint([format!("/{PROGRAM_FOLDER}/{ENTRY_POINT}")])
                    .working_dir("/")
                    .labels(labels.clone())
                    .build()?,
            )
            .rootfs(RootFsBuilder::default().diff_ids([difference]).build()?)
            .history([HistoryBuilder::default().created(rfc3339(source)?).created_by("cargo xtask image").build()?])
            .build()?;
        let configuration = self.add_json(MediaType::ImageConfig, &configuration)?;
        // For `docker load` of engines that cannot load OCI layouts. The first variant is that of this machine.
        self.files.entry("manifest.json".to_owned()).or_insert(stable_json(&json!([{
            "Config": blob(&configuration),
            "Layers": [blob(&layer)],
            "RepoTags": [reference],
        }]))?);
        let manifest = ImageManifestBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageManifest)
            .config(configuration)
            .layers([layer])
            .annotations(labels.clone())
            .build()?;
        let mut manifest = self.add_json(MediaType::ImageManifest, &manifest)?;
        let platform = PlatformBuilder::default().architecture(architecture).os(Os::Linux).build()?;
        manifest.set_platform(Some(platform));
        Ok(manifest)
    }

    /// A manifest that refers to the image. It is part of the index, so that every client copies it with the image, and
    /// its platform keeps a container runtime from running it.
    fn add_sboms(&mut self, sboms: &[(String, Vec<u8>)], image: &Descriptor) -> Result<Descriptor> {
        let artifact_type = MediaType::Other(CYCLONE_DX.to_owned());
        let mut layers = Vec::new();
        for (name, content) in sboms {
            let mut layer = self.add(artifact_type.clone(), content.clone())?;
            layer.set_annotations(Some(HashMap::from([(ANNOTATION_TITLE.to_owned(), name.clone())])));
            layers.push(layer);
        }
        let manifest = ImageManifestBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageManifest)
            .artifact_type(artifact_type.clone())
            .config(self.add(MediaType::EmptyJSON, b"{}".to_vec())?)
            .layers(layers)
            .subject(Descriptor::new(image.media_type().clone(), image.size(), image.digest().clone()))
            .build()?;
        let mut manifest = self.add_json(MediaType::ImageManifest, &manifest)?;
        manifest.set_artifact_type(Some(artifact_type));
        let unknown = PlatformBuilder::default().architecture(Arch::from("unknown")).os(Os::from("unknown")).build()?;
        manifest.set_platform(Some(unknown));
        Ok(manifest)
    }

    fn add_json(&mut self, media_type: MediaType, value: &impl Serialize) -> Result<Descriptor> {
        self.add(media_type, stable_json(value)?)
    }

    fn add(&mut self, media_type: MediaType, content: Vec<u8>) -> Result<Descriptor> {
        let digest: Sha256Digest = sha256(&content).parse()?;
        let descriptor = Descriptor::new(media_type, content.len() as u64, digest);
        self.files.insert(blob(&descriptor), content);
        Ok(descriptor)
    }

    /// The layout as a tar archive.
    pub(super) fn archive(&self) -> Result<Vec<u8>> {
        let file = |(path, content): (&String, &Vec<u8>)| ImageFile {
            path: path.clone(),
            mode: 0o644,
            content: content.clone(),
        };
        archive(&self.files.iter().map(file).collect::<Vec<_>>(), self.time)
    }
}

fn blob(descriptor: &Descriptor) -> String {
    format!("blobs/sha256/{}", descriptor.digest().digest())
}

pub(super) fn sha256(content: &[u8]) -> String {
    format!("{:x}", Sha256::digest(content))
}

/// JSON with sorted keys: maps of `oci_spec` have a random order.
fn stable_json(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut value = serde_json::to_value(value).context("serializing a part of the layout")?;
    value.sort_all_objects();
    serde_json::to_vec(&value).context("serializing a part of the layout")
}

/// The same metadata on the image, its manifest and its index, because clients read different ones.
fn labels(reference: &str, source: &Source) -> Result<HashMap<String, String>> {
    let repository = env!("CARGO_PKG_REPOSITORY");
    let tag = reference.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let labels = [
        (ANNOTATION_TITLE, "VitiVirt".to_owned()),
        (ANNOTATION_DESCRIPTION, "virt-operator and kubevirt-operator: virtual machines on KubeVirt".to_owned()),
        (ANNOTATION_VERSION, tag.to_owned()),
        (ANNOTATION_REVISION, source.revision.clone()),
        (ANNOTATION_SOURCE, repository.to_owned()),
        (ANNOTATION_DOCUMENTATION, format!("{repository}#readme")),
        (ANNOTATION_LICENSES, env!("CARGO_PKG_LICENSE").to_owned()),
        (ANNOTATION_CREATED, rfc3339(source)?),
    ];
    Ok(labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

fn rfc3339(source: &Source) -> Result<String> {
    let seconds = i64::try_from(source.time).context("SOURCE_DATE_EPOCH: must be a time")?;
    Ok(Timestamp::from_second(seconds).context("SOURCE_DATE_EPOCH: must be a time")?.to_string())
}

/// A gzip file without a time and a name.
pub(super) fn compress(content: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(COMPRESSION));
    encoder.write_all(content).context("compressing an archive")?;
    encoder.finish().context("compressing an archive")
}

/// A tar archive in which everything belongs to root and has the same time. It has an entry for each folder.
pub(super) fn archive(files: &[ImageFile], time: u64) -> Result<Vec<u8>> {
    let mut entries: BTreeMap<String, Option<&ImageFile>> = BTreeMap::new();
    for file in files {
        let folders = file.path.match_indices('/').filter_map(|(end, _)| file.path.get(..=end));
        entries.extend(folders.map(|folder| (folder.to_owned(), None)));
        entries.insert(file.path.clone(), Some(file));
    }
    let mut builder = tar::Builder::new(Vec::new());
    for (path, file) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_path(&path).with_context(|| format!("adding {path}"))?;
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(time);
        let content = file.map(|file| file.content.as_slice()).unwrap_or_default();
        header.set_size(content.len() as u64);
        header.set_mode(file.map_or(0o755, |file| file.mode));
        header.set_entry_type(if file.is_some() { tar::EntryType::Regular } else { tar::EntryType::Directory });
        header.set_cksum();
        builder.append(&header, content).with_context(|| format!("adding {path}"))?;
    }
    builder.into_inner().context("writing an archive")
}
