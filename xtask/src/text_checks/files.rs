//! The files that the checks read.

use std::path::{Path, PathBuf};

use super::rust_source::RustSource;
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

/// charts/*/README.md.
pub(super) fn chart_pages() -> Vec<SourceFile> {
    paths_below("charts", "md").iter().map(|path| SourceFile::read(path)).collect()
}

/// The manifests that a user reads or applies, and the templates and values of the charts.
pub(super) fn manifests() -> Vec<SourceFile> {
    let config = paths_below("config", "yaml").into_iter().chain(paths_below("examples", "yaml"));
    let charts = ["yaml", "txt", "tpl"].into_iter().flat_map(|extension| paths_below("charts", extension));
    // The CRD of KubeVirt has the text of the KubeVirt project.
    let is_upstream = |path: &PathBuf| {
        path.ends_with("virt-operator/kubevirt-operator.yaml") || path.ends_with("crds/kubevirts.yaml")
    };
    config.chain(charts).filter(|path| !is_upstream(path)).map(|path| SourceFile::read(&path)).collect()
}

/// Every Rust file of a folder, with those in its subfolders.
pub(super) fn rust_files(folder: &str) -> Vec<SourceFile> {
    paths_below(folder, "rs").iter().map(|path| SourceFile::read(path)).collect()
}

/// The Rust files of a folder without the files that only tests include, each with its content.
pub(super) fn production_files(folder: &str) -> Vec<(SourceFile, RustSource)> {
    let mut files: Vec<(SourceFile, RustSource)> = rust_files(folder)
        .into_iter()
        .map(|file| {
            let source = RustSource::parse(&file.text);
            (file, source)
        })
        .collect();
    let tests = test_modules(&files);
    files.retain(|(file, _)| !tests.iter().any(|test| file.path.starts_with(test)));
    files
}

/// The folders of the workspace's crates, xtask included.
pub(super) fn crate_folders() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("crates")).unwrap();
    let crates = entries.map(|entry| format!("crates/{}", entry.unwrap().file_name().display()));
    let mut folders: Vec<String> = crates.chain(["xtask".to_owned()]).collect();
    folders.sort();
    folders
}

/// The files that `#[cfg(test)] mod name;` in a file of `files` includes, as beginnings of paths.
fn test_modules(files: &[(SourceFile, RustSource)]) -> Vec<String> {
    let modules = files.iter().flat_map(|(file, source)| {
        let (folder, name) = file.path.rsplit_once('/').unwrap_or_default();
        let module_folder = match name {
            "mod.rs" | "lib.rs" | "main.rs" => folder.to_owned(),
            other => format!("{folder}/{}", other.trim_end_matches(".rs")),
        };
        source.test_modules.iter().flat_map(move |module| {
            if module.ends_with(".rs") {
                vec![format!("{folder}/{module}")]
            } else {
                vec![format!("{module_folder}/{module}.rs"), format!("{module_folder}/{module}/")]
            }
        })
    });
    modules.collect()
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

mod tests {
    use super::*;

    #[test]
    fn modules_for_tests_are_found_next_to_the_file_that_declares_them() {
        let source = |path: &str, text: &str| {
            (SourceFile { path: path.to_owned(), text: String::new() }, RustSource::parse(text))
        };
        let files = [
            source("a/src/lib.rs", "#[cfg(test)] mod testing;"),
            source("a/src/b/mod.rs", "#[cfg(test)] mod tests;"),
            source("a/src/c.rs", "#[cfg(test)] #[path = \"c_tests.rs\"] mod tests; #[cfg(test)] mod more;"),
        ];
        assert_eq!(
            test_modules(&files),
            [
                "a/src/testing.rs",
                "a/src/testing/",
                "a/src/b/tests.rs",
                "a/src/b/tests/",
                "a/src/c_tests.rs",
                "a/src/c/more.rs",
                "a/src/c/more/",
            ]
        );
    }
}
