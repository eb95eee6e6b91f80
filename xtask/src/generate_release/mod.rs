//! `cargo xtask generate --release-data`: writes the data of the KubeVirt release that `crates/install` embeds, and the
//! expected results for its parity tests.
//!
//! It has its own option, because it needs Go and KubeVirt's module, and because a release never changes. It uses the
//! lab's module and checksums: the embedded data comes from the same sources as the reference operator.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

use crate::programs;

const PROGRAM: &str = include_str!("main.go");
const FIXTURES: &str = include_str!("fixtures.go");
const MODULE: &str = include_str!("../../../crates/lab/go/kubevirt/go.mod");
const CHECKSUMS: &str = include_str!("../../../crates/lab/go/kubevirt/go.sum");
const RELEASE: &str = "v1.8.4";

pub(crate) fn run() -> Result<()> {
    if !MODULE.contains(&format!("kubevirt.io/kubevirt {RELEASE}")) {
        bail!("the lab does not pin KubeVirt {RELEASE}");
    }
    let work = std::env::temp_dir().join(format!("generate-release-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| format!("creating {}", work.display()))?;
    let result = generate(&work);
    let cleaned = fs::remove_dir_all(&work).with_context(|| format!("removing {}", work.display()));
    result.and(cleaned)
}

fn generate(work: &std::path::Path) -> Result<()> {
    for (name, text) in [("main.go", PROGRAM), ("fixtures.go", FIXTURES), ("go.mod", MODULE), ("go.sum", CHECKSUMS)] {
        fs::write(work.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    let install = programs::root().join("crates/install");
    let status = Command::new("go")
        .current_dir(work)
        .args(["run", "."])
        .arg(install.join("assets").join(RELEASE))
        .arg(install.join("tests/reference"))
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .env("GOTOOLCHAIN", "local")
        .env("GOFLAGS", "-mod=readonly -trimpath -buildvcs=false")
        .env_remove("RUNBOOK_URL_TEMPLATE")
        .status()
        .context("running `go run`")?;
    if !status.success() {
        bail!("cannot generate the data of the release; see the output of Go above");
    }
    eprintln!("wrote crates/install/assets/{RELEASE} and crates/install/tests/reference");
    Ok(())
}
