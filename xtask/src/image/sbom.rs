//! Lists of the crates that are compiled into each program: CycloneDX documents next to the image.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    programs::{self, is_installed},
    shipped::{ImageArchitecture, PROGRAMS, Source, Workspace},
};

/// cargo-cyclonedx writes this file into the folder of every package.
const FILE: &str = "vitivirt-sbom";

/// The tools and their versions. Other versions may give other bytes.
const TOOLS: [(&str, &str); 2] = [("cargo-auditable", "0.7.7"), ("cargo-cyclonedx", "0.5.9")];

/// Fails if a tool is missing, before anything is built.
pub(super) fn check_tools() -> Result<()> {
    let missing: Vec<_> = TOOLS.into_iter().filter(|(tool, _)| !is_installed(tool)).collect();
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(|(tool, _)| *tool).collect();
        bail!(
            "{} not found; run `{}`, or use --no-sbom for an image without SBOMs",
            names.join(" and "),
            install_command(&missing)
        );
    }
    Ok(())
}

fn install_command(tools: &[(&str, &str)]) -> String {
    let tools: Vec<String> = tools.iter().map(|(tool, version)| format!("{tool}@{version}")).collect();
    format!("cargo install --locked {}", tools.join(" "))
}

/// The documents by file name.
pub(super) fn create(
    workspace: &Workspace,
    architecture: ImageArchitecture,
    source: &Source,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut command = programs::cargo();
    command.current_dir(&workspace.root);
    command.args(["cyclonedx", "--quiet", "--format", "json", "--spec-version", "1.5", "--no-build-deps"]);
    command.args(["--target", architecture.target(), "--override-filename", FILE]);
    command.env("SOURCE_DATE_EPOCH", source.time.to_string());
    let status = command.status().context("running cargo cyclonedx")?;
    let created = collect(&workspace.root, architecture);
    remove(&workspace.root)?;
    ensure!(status.success(), "cargo cyclonedx failed; see its output above");
    created
}

fn collect(root: &Path, architecture: ImageArchitecture) -> Result<Vec<(String, Vec<u8>)>> {
    let document = |program: &&str| {
        let file = root.join("crates").join(program).join(format!("{FILE}.json"));
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        // Packages of the workspace are named by their folders.
        let text = text.replace(&root.display().to_string(), "/vitivirt");
        Ok((format!("{program}.{}.cdx.json", architecture.name()), text.into_bytes()))
    };
    PROGRAMS.iter().map(document).collect()
}

/// Removes the documents of all packages.
fn remove(root: &Path) -> Result<()> {
    let packages = fs::read_dir(root.join("crates")).context("reading crates")?.flatten().map(|entry| entry.path());
    for folder in packages.chain([root.join("xtask")]) {
        let file = folder.join(format!("{FILE}.json"));
        if file.exists() {
            fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_about_releases_installs_the_same_tools() {
        let page = fs::read_to_string(programs::root().join("docs/release.md")).unwrap();
        assert!(page.contains(&install_command(&TOOLS)), "{}", install_command(&TOOLS));
    }
}
