//! Provides the commit to `version.rs` as `VITIVIRT_COMMIT`: from the variable of that name, else from git, else
//! `unknown`. A source archive has no git repository, and a build of it must not report the commit of a repository that
//! it happens to be unpacked in.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

const VARIABLE: &str = "VITIVIRT_COMMIT";
const UNKNOWN: &str = "unknown";
const SHORT: &str = "--short=8";

fn main() {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    println!("cargo::rerun-if-changed=build.rs");
    let given = env::var(VARIABLE).ok().filter(|commit| !commit.trim().is_empty());
    let commit = given.or_else(from_git).unwrap_or_else(|| UNKNOWN.to_owned());
    println!("cargo::rustc-env={VARIABLE}={}", commit.trim());
}

fn from_git() -> Option<String> {
    let workspace = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?).join("../..").canonicalize().ok()?;
    let repository = PathBuf::from(git(&workspace, &["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if repository != workspace {
        return None;
    }
    let branch = git(&workspace, &["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref()) {
        let path = git(&workspace, &["rev-parse", "--path-format=absolute", "--git-path", name]);
        // Cargo takes a missing file for a changed one and would run this script in every build.
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&workspace, &["rev-parse", SHORT, "HEAD"])
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
