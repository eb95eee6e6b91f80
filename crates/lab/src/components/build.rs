//! Builds one group with `go build`. It shows progress, and reports an error in one sentence.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, IsTerminal},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;

use super::{ComponentGroup, ModuleFile, Recipe};

/// Enough for the binaries of the largest group and Go's intermediate files.
const DISK_NEEDED: u64 = 6 << 30;

pub(crate) fn build(group: ComponentGroup) -> Result<()> {
    let recipe = group.recipe();
    let folder = group.folder()?;
    let parent = folder.parent().context("the cache folder has no parent")?;
    fs::create_dir_all(parent).map_err(|error| explain(&recipe, &format!("creating {}: {error}", parent.display())))?;
    check_space(parent)?;

    // If two programs start at the same time, only one of them builds.
    let lock = File::create(parent.join(format!("{}.lock", recipe.name))).context("creating a lock file")?;
    lock.lock().context("waiting for another build of the same components")?;
    if group.is_built()? {
        return Ok(());
    }

    let work = parent.join(format!("{}.build", recipe.name));
    create_empty(&work)?;
    let result = build_in(&work, &recipe, &folder);
    let _ = fs::remove_dir_all(&work);
    result
}

/// Always the same folder, protected by the lock: a killed build leaves at most this folder, and the next build removes
/// it.
fn create_empty(work: &Path) -> Result<()> {
    if work.exists() {
        fs::remove_dir_all(work)
            .with_context(|| format!("removing the files of an interrupted build in {}", work.display()))?;
    }
    fs::create_dir(work).with_context(|| format!("creating the build folder {}", work.display()))
}

fn build_in(work: &Path, recipe: &Recipe, folder: &Path) -> Result<()> {
    fs::write(work.join("go.mod"), recipe.go_mod).context("writing go.mod")?;
    fs::write(work.join("go.sum"), recipe.go_sum).context("writing go.sum")?;
    for (name, text) in recipe.sources {
        fs::write(work.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    let out = work.join("out");
    compile(recipe, work, &out)?;
    for (built, name) in recipe.binaries.iter().filter(|(built, name)| built != name) {
        fs::rename(out.join(built), out.join(name)).with_context(|| format!("renaming {built} to {name}"))?;
    }
    for file in recipe.files {
        copy_from_module(file, recipe, work, &out)?;
    }
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("removing the incomplete {}", folder.display()))?;
    }
    fs::rename(&out, folder).with_context(|| format!("moving the binaries to {}", folder.display()))
}

/// Downloads the module, and copies the file if the module has the expected checksum.
fn copy_from_module(file: &ModuleFile, recipe: &Recipe, work: &Path, out: &Path) -> Result<()> {
    let output =
        go(work).args(["mod", "download", "-json", file.module]).output().context("running `go mod download`")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let module: DownloadedModule = match serde_json::from_str(&text) {
        Ok(module) if output.status.success() => module,
        _ => return Err(explain(recipe, &format!("{text}{}", String::from_utf8_lossy(&output.stderr)))),
    };
    if module.sum != file.sum {
        bail!(
            "{} has the checksum {}, expected {}; run `go clean -modcache` and try again",
            file.module,
            module.sum,
            file.sum
        );
    }
    // Not `fs::copy`, which would also copy that files of the module cache are read-only.
    let content =
        fs::read(module.dir.join(file.path)).with_context(|| format!("reading {} of {}", file.path, file.module))?;
    fs::write(out.join(file.name), content).with_context(|| format!("writing {}", file.name))
}

/// The output of `go mod download -json`, as far as it is used.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DownloadedModule {
    dir: PathBuf,
    sum: String,
}

fn check_space(folder: &Path) -> Result<()> {
    let stat = nix::sys::statvfs::statvfs(folder)
        .with_context(|| format!("reading the free space of {}", folder.display()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < DISK_NEEDED {
        bail!(
            "{} has {} MiB free, but building the lab's components needs {} MiB; free some space or set XDG_CACHE_HOME to another disk",
            folder.display(),
            free >> 20,
            DISK_NEEDED >> 20
        );
    }
    Ok(())
}

fn go(directory: &Path) -> Command {
    let mut command = Command::new("go");
    command
        .current_dir(directory)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .env("GOTOOLCHAIN", "local")
        .env("GOFLAGS", "-mod=readonly -buildvcs=false")
        .stdin(Stdio::null());
    command
}

fn compile(recipe: &Recipe, directory: &Path, out: &Path) -> Result<()> {
    let progress = BuildProgress::new(recipe.name);
    progress.print("downloading modules");
    let listed =
        go(directory).args(["list", "-tags", recipe.tags, "-deps", "tool"]).output().context("running `go list`")?;
    if !listed.status.success() {
        return Err(explain(recipe, &String::from_utf8_lossy(&listed.stderr)));
    }
    let packages = listed.stdout.iter().filter(|byte| **byte == b'\n').count();
    progress.set_total(packages as u64);

    let variables: Vec<String> =
        recipe.linker_variables.iter().map(|(variable, value)| format!("-X {variable}={value}")).collect();
    let mut child = go(directory)
        .args([
            "build",
            "-v",
            "-tags",
            recipe.tags,
            "-trimpath",
            "-ldflags",
            &format!("-s -w {}", variables.join(" ")),
            "-o",
        ])
        .arg(format!("{}/", out.display()))
        .arg("tool")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("running `go build`")?;
    let stderr = child.stderr.take().context("go build has no standard error")?;
    let mut errors = Vec::new();
    for line in BufReader::new(stderr).lines() {
        let line = line.context("reading the output of `go build`")?;
        // With -v, Go prints one line with the import path for each compiled package. Any other line is an error.
        if line.contains(' ') { errors.push(line) } else { progress.compiled(&line) }
    }
    let status = child.wait().context("waiting for `go build`")?;
    if !status.success() {
        return Err(explain(recipe, &errors.join("\n")));
    }
    progress.done();
    Ok(())
}

/// One sentence: the cause and the remedy.
fn explain(recipe: &Recipe, output: &str) -> anyhow::Error {
    let name = recipe.name;
    let mut lines = output.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = lines
        .clone()
        .find(|line| !line.starts_with("go: downloading") && !line.starts_with("go: finding"))
        .or_else(|| lines.next())
        .unwrap_or("no output");
    let lower = output.to_lowercase();
    if lower.contains("no space left on device") {
        anyhow!(
            "the disk is full while building {name}; free some space, set XDG_CACHE_HOME, GOCACHE or GOMODCACHE to another \
             disk, or run `go clean -cache`"
        )
    } else if [
        "dial tcp",
        "no such host",
        "connection refused",
        "i/o timeout",
        "not found",
        "forbidden",
        "bad gateway",
        "disabled by goproxy",
    ]
    .iter()
    .any(|sign| lower.contains(sign))
    {
        anyhow!(
            "cannot download a Go module of {name} ({first}); check the network and `go env GOPROXY`, then run the same command again"
        )
    } else {
        anyhow!(
            "building {name} with Go failed ({first}); run the same command again, and if it fails again, `go clean -modcache` to remove a damaged download"
        )
    }
}

/// A progress bar on a terminal. Otherwise a line from time to time, so that a long build does not look stuck.
struct BuildProgress {
    name: &'static str,
    bar: Option<ProgressBar>,
    started: Instant,
    state: parking_lot::Mutex<ProgressState>,
}

struct ProgressState {
    last: Instant,
    compiled: u64,
    expected: u64,
}

impl BuildProgress {
    const EVERY: Duration = Duration::from_secs(20);

    fn new(name: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("  building {prefix:<18} [{bar:30}] {pos}/{len} {msg:.dim}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(0).with_style(style).with_prefix(name)
        });
        let now = Instant::now();
        BuildProgress {
            name,
            bar,
            started: now,
            state: parking_lot::Mutex::new(ProgressState { last: now, compiled: 0, expected: 0 }),
        }
    }

    fn print(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(what.to_owned()),
            None => eprintln!("  building {}: {what}", self.name),
        }
    }

    fn set_total(&self, packages: u64) {
        self.state.lock().expected = packages;
        if let Some(bar) = &self.bar {
            bar.set_length(packages);
        }
    }

    fn compiled(&self, package: &str) {
        let mut state = self.state.lock();
        state.compiled += 1;
        match &self.bar {
            Some(bar) => {
                bar.inc(1);
                bar.set_message(package.to_owned());
            }
            None if state.last.elapsed() >= Self::EVERY => {
                state.last = Instant::now();
                eprintln!("  building {}: {} of at most {} packages", self.name, state.compiled, state.expected);
            }
            None => {}
        }
    }

    fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("  built {} in {:.0?}", self.name, self.started.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_killed_build_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let work = parent.path().join("etcd.build");
        for _ in 0..2 {
            create_empty(&work).unwrap();
            assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
            fs::create_dir(work.join("out")).unwrap();
            fs::write(work.join("out/half"), "of a binary").unwrap();
        }
    }

    #[test]
    fn a_full_disk_is_reported() {
        let error = explain(&ComponentGroup::Etcd.recipe(), "# foo\nopen /x/y: no space left on device");
        assert!(error.to_string().starts_with("the disk is full while building etcd"));
    }

    #[test]
    fn an_unavailable_module_is_reported_with_the_first_error_line() {
        let error = explain(
            &ComponentGroup::Kubernetes.recipe(),
            "go: downloading k8s.io/api v0.36.3\ngo: k8s.io/api@v0.36.3: Get \"https://proxy/…\": dial tcp: lookup proxy: no such host",
        );
        let text = error.to_string();
        assert!(
            text.contains("cannot download a Go module of kubernetes (go: k8s.io/api@v0.36.3")
                && text.contains("GOPROXY"),
            "{text}"
        );
    }

    #[test]
    fn any_other_error_is_reported_with_its_first_line() {
        let error = explain(&ComponentGroup::Etcd.recipe(), "# go.etcd.io/etcd\nmain.go:3: undefined: x");
        assert!(error.to_string().contains("main.go:3: undefined: x"));
    }
}
