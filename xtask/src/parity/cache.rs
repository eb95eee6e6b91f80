//! Caches the installations of the reference operator between runs: the same KubeVirt resource and the same programs
//! give the same installation. The files are in the lab's cache folder, named by a hash of everything that they depend
//! on.

use std::{
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use vitivirt_api::text::hex;
use vitivirt_lab::components;

use super::case::ParityCase;

/// Increase it when the format changes: with `vitivirt_snapshot::normalise`, or with the prerequisites in a lab.
const FORMAT: u32 = 1;

pub(super) fn path(case: &ParityCase) -> Result<PathBuf> {
    let case_text = serde_json::to_string(case).context("serializing a case")?;
    let input = format!("{FORMAT} {} {:?} {case_text}", components::versions(&components::STANDARD)?, case.extensions);
    let hash = hex(&Sha256::digest(input));
    Ok(vitivirt_lab::paths::cache_dir()?.join("parity").join(format!("{hash:.16}.json.gz")))
}

/// None if the file does not exist or cannot be read.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).ok()?).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Writes to a temporary file and renames it, so that an incomplete file never has this name.
pub(super) fn write(path: &Path, content: &impl Serialize) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let text = serde_json::to_vec(content).context("serializing a snapshot")?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&text).context("compressing a snapshot")?;
    let bytes = encoder.finish().context("compressing a snapshot")?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, bytes).with_context(|| format!("writing {}", temporary.display()))?;
    std::fs::rename(&temporary, path).with_context(|| format!("writing {}", path.display()))
}
