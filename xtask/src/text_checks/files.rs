//! The files that the checks read.

use std::path::{Path, PathBuf};

use crate::programs::root;

/// A text file of the repository, with its path relative to the repository's root.
pub(super) struct SourceFile {
    pub(super) path: String,
    pub(super) text: String,
}

impl SourceFile {
    pub(super) fn read(path: &Path) -> Self {
        let relative = path.strip_prefix(root()).unwrap_or(path).display().to_string();
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{relative}: {error}"));
        Self { path: relative, text }
    }
}

/// README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md, docs/*.md and the pages of the charts.
pub(super) fn documents() -> Vec<SourceFile> {
    let pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(|name| root().join(name));
    pages
        .into_iter()
        .chain(paths_below("docs", "md"))
        .chain(paths_below("charts", "md"))
        .map(|path| SourceFile::read(&path))
        .collect()
}

/// The manifests that a user reads or applies.
pub(super) fn manifests() -> Vec<SourceFile> {
    let folders = ["config/crd", "config/prometheus", "config/rbac", "examples"];
    folders.into_iter().flat_map(|folder| paths_below(folder, "yaml")).map(|path| SourceFile::read(&path)).collect()
}

/// Every Rust file of a folder, with those in its subfolders.
pub(super) fn rust_files(folder: &str) -> Vec<SourceFile> {
    paths_below(folder, "rs").iter().map(|path| SourceFile::read(path)).collect()
}

fn paths_below(folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|actual| actual == extension) {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths
}
