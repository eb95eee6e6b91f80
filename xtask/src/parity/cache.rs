//! What KubeVirt's own operator installed, kept from one run to the next: for the same resource and the same programs
//! it is the same. The place is in the lab's cache, named by a hash of all that it depends on.

use std::{
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use vitivirt_lab::components;

use super::case::ParityCase;

/// Raised whenever what is kept changes its form: with `vitivirt_snapshot::normalise`, or with what a lab prepares.
const FORM: u32 = 1;

pub(super) fn path(case: &ParityCase) -> Result<PathBuf> {
    let case_text = serde_json::to_string(case).context("writing a case")?;
    let all = format!("{FORM} {} {:?} {case_text}", components::versions(&components::STANDARD)?, case.extensions);
    let hash: String = Sha256::digest(all).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Ok(vitivirt_lab::paths::cache_dir()?.join("parity").join(format!("{hash}.json.gz")))
}

/// Nothing if there is none, or none that can be read.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).ok()?).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Half a file is never seen under its name.
pub(super) fn write(path: &Path, what: &impl Serialize) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let text = serde_json::to_vec(what).context("writing a snapshot")?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&text).context("compressing a snapshot")?;
    let bytes = encoder.finish().context("compressing a snapshot")?;
    let fresh = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&fresh, bytes).with_context(|| format!("writing {}", fresh.display()))?;
    std::fs::rename(&fresh, path).with_context(|| format!("writing {}", path.display()))
}
