//! The archives with the kubectl plugin, from which krew installs it. Their names are in `.krew.yaml`.

use anyhow::Result;

use super::layout::{ImageFile, archive, compress};
use crate::shipped::{ImageArchitecture, Source};

/// The program in each archive, and its package.
pub(super) const PLUGIN: &str = "kubectl-vmachine";

pub(super) fn file_name(architecture: ImageArchitecture) -> String {
    format!("{PLUGIN}-linux-{}.tar.gz", architecture.name())
}

/// The archive with the program and the license. The same input gives the same bytes.
pub(super) fn pack(program: Vec<u8>, license: Vec<u8>, source: &Source) -> Result<Vec<u8>> {
    let file = |path: &str, mode, content| ImageFile { path: path.to_owned(), mode, content };
    compress(&archive(&[file(PLUGIN, 0o755, program), file("LICENSE", 0o644, license)], source.time)?)
}
