//! `cargo xtask image --check`: the image as others see it. Everything runs in a network namespace without a route.
//!
//! - umoci, the tool of another project, unpacks the layout;
//! - crane, the registry client of a third project, pushes the layout to a registry and pulls it again;
//! - both programs of the pulled image run as the image's user on a read-only root without any other file;
//! - the kubectl plugin runs after it is unpacked from its archive;
//! - a lab installs both operators from `config/`, and another one from the charts. Their pods run the image, and the
//!   examples reach the phase Running.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tokio::{net::TcpStream, process::Command, time::Instant};
use vitivirt_api::IMAGE;
use vitivirt_lab::{ContainerImage, Extension, Helm, Lab, LabOptions, components, isolate::scratch_folder, manifests};

use super::{layout::USER, plugin::PLUGIN};
use crate::{programs, shipped::PROGRAMS, terminal::step};

const REGISTRY: &str = "127.0.0.1:5000";
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest name of a process that the kernel keeps.
const COMMAND_NAME: usize = 15;

pub(super) async fn run(archive: &Path, plugin: &Path) -> Result<()> {
    let image = step("check every digest of the archive", async { ContainerImage::load(archive) }).await?;
    ensure!(image.reference.as_deref() == Some(IMAGE), "the archive has the image {:?}, not {IMAGE}", image.reference);
    step("unpack it with umoci", unpack_with_umoci(archive, &image)).await?;
    let pulled = step("push it to a registry and pull it", through_registry(archive, &image)).await?;
    step("run both programs of the pulled image", async { run_programs(&pulled) }).await?;
    step("unpack and run the kubectl plugin", run_plugin(plugin)).await?;
    step("install both operators from config/ on a lab", install(image.clone(), Package::Config)).await?;
    step("install both operators with Helm on a lab", install(image, Package::Charts)).await
}

/// Compares every file that umoci unpacks with the files that our own reader unpacked.
async fn unpack_with_umoci(archive: &Path, image: &ContainerImage) -> Result<()> {
    let folder = scratch_folder("umoci")?;
    let layout = unpack_layout(archive, &folder)?;
    let (_, tag) = IMAGE.rsplit_once(':').context("the image has no tag")?;
    let bundle = folder.join("bundle");
    let source = format!("{}:{tag}", layout.display());
    let bundle_path = bundle.display().to_string();
    tool(&components::umoci()?, &["unpack", "--image", &source, &bundle_path]).await?;
    let (found, expected) = (files(&bundle.join("rootfs"))?, files(&image.root)?);
    let names = |files: &BTreeMap<PathBuf, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    ensure!(!expected.is_empty(), "the image has no files");
    ensure!(names(&found) == names(&expected), "umoci unpacks {:?}, we {:?}", names(&found), names(&expected));
    let different: Vec<&PathBuf> = found.keys().filter(|path| found.get(*path) != expected.get(*path)).collect();
    ensure!(different.is_empty(), "umoci unpacks other contents of {different:?}");
    Ok(())
}

/// The contents of all files in a folder and its folders, by path.
fn files(root: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let content = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
            files.insert(path.strip_prefix(root)?.to_owned(), content);
        }
    }
    Ok(files)
}

fn unpack_layout(archive: &Path, folder: &Path) -> Result<PathBuf> {
    let layout = folder.join("layout");
    let file = fs::File::open(archive).with_context(|| format!("opening {}", archive.display()))?;
    tar::Archive::new(file).unpack(&layout).context("unpacking the archive")?;
    Ok(layout)
}

/// Returns the image as a client pulls it.
async fn through_registry(archive: &Path, image: &ContainerImage) -> Result<ContainerImage> {
    let folder = scratch_folder("registry")?;
    let (layout, pulled) = (unpack_layout(archive, &folder)?, folder.join("pulled"));

    let log = fs::File::create(folder.join("registry.log")).context("creating the registry's log")?;
    let _registry = Command::new(components::crane()?)
        .args(["registry", "serve", "--address", REGISTRY])
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("sharing the log file")?)
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("starting the registry")?;
    let started = Instant::now();
    while TcpStream::connect(REGISTRY).await.is_err() {
        ensure!(started.elapsed() < TIMEOUT, "the registry does not listen after {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    let (_, path) = IMAGE.split_once('/').context("the image has no registry")?;
    let reference = format!("{REGISTRY}/{path}");
    let text = |path: &Path| path.display().to_string();
    crane(&["push", &text(&layout), &reference]).await?;
    let digest = crane(&["digest", &reference]).await?;
    ensure!(digest.trim() == image.digest, "the registry has the digest {digest}, the archive {}", image.digest);
    crane(&["validate", "--remote", &reference]).await?;
    crane(&["pull", "--format", "oci", &reference, &text(&pulled)]).await?;
    let pulled = ContainerImage::from_layout(&pulled, &folder.join("root"))?;
    ensure!(pulled.digest == image.digest, "pulled {}, pushed {}", pulled.digest, image.digest);
    Ok(pulled)
}

async fn crane(arguments: &[&str]) -> Result<String> {
    tool(&components::crane()?, arguments).await
}

async fn tool(program: &Path, arguments: &[&str]) -> Result<String> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let output = Command::new(program)
        .args(arguments)
        // Without a configuration of the user: a credential helper is another program.
        .env_clear()
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("running {name}"))?;
    if !output.status.success() {
        bail!("{name} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn run_programs(image: &ContainerImage) -> Result<()> {
    for program in PROGRAMS {
        let output = image.run(program, &["--version"])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let expected = format!("{program} {} (VitiVirt commit ", env!("CARGO_PKG_VERSION"));
        ensure!(
            output.status.success() && text.starts_with(&expected),
            "{program} --version: {}: {text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        eprintln!("  {}", text.trim());
    }
    Ok(())
}

async fn run_plugin(archive: &Path) -> Result<()> {
    let folder = scratch_folder("plugin")?;
    let file = fs::File::open(archive).with_context(|| format!("opening {}", archive.display()))?;
    tar::Archive::new(flate2::read::GzDecoder::new(file)).unpack(&folder).context("unpacking the plugin")?;
    ensure!(folder.join("LICENSE").is_file(), "the archive of the plugin has no license");
    let text = tool(&folder.join(PLUGIN), &["--version"]).await?;
    ensure!(text.contains(&format!(" {} (VitiVirt commit ", env!("CARGO_PKG_VERSION"))), "{PLUGIN} --version: {text}");
    eprintln!("  {}", text.trim());
    Ok(())
}

/// What the operators are installed from.
#[derive(Clone, Copy)]
enum Package {
    Config,
    Charts,
}

async fn install(image: ContainerImage, package: Package) -> Result<()> {
    let extensions = vec![Extension::Multus];
    let lab = Lab::start(LabOptions { images: vec![image], extensions, ..LabOptions::default() }).await?;
    let work = async {
        match package {
            Package::Config => install_config(&lab).await?,
            Package::Charts => install_charts(&lab).await?,
        }
        run_examples(&lab).await?;
        check_processes()
    };
    let result = lab.keeping_logs("image-check", work).await;
    lab.stop().await?;
    result
}

fn file(name: &str) -> String {
    programs::root().join(name).display().to_string()
}

async fn wait_for_rollout(lab: &Lab, deployment: &str, namespace: &str) -> Result<()> {
    lab.kubectl(&["rollout", "status", deployment, "--namespace", namespace, "--timeout=120s"]).await.map(drop)
}

async fn wait_for_kubevirt(lab: &Lab) -> Result<()> {
    let deployed = "--for=jsonpath={.status.phase}=Deployed";
    lab.kubectl(&["wait", "kubevirts/kubevirt", "--namespace", "kubevirt", deployed, "--timeout=240s"]).await.map(drop)
}

/// The commands of the README.
async fn install_config(lab: &Lab) -> Result<()> {
    lab.kubectl(&["apply", "-f", &file("config/virt-operator/kubevirt-operator.yaml")]).await?;
    wait_for_rollout(lab, "deployment/virt-operator", "kubevirt").await?;
    lab.kubectl(&["apply", "-f", &file("config/virt-operator/kubevirt-cr.yaml")]).await?;
    wait_for_kubevirt(lab).await?;
    let (crd, rbac, manager) = (file("config/crd"), file("config/rbac"), file("config/manager"));
    lab.kubectl(&["apply", "-f", &crd, "-f", &rbac, "-f", &manager]).await?;
    wait_for_rollout(lab, "deployment/kubevirt-operator-controller-manager", "kubevirt-operator-system").await
}

/// The three charts, with their default values.
async fn install_charts(lab: &Lab) -> Result<()> {
    let operators = "kubevirt-operator-system";
    for (name, namespace) in [("virt-operator", "kubevirt"), ("kubevirt", "kubevirt"), ("kubevirt-operator", operators)]
    {
        let chart = file(&format!("charts/{name}"));
        lab.helm(Helm::V4, &["install", name, &chart, "--namespace", namespace, "--create-namespace"]).await?;
    }
    wait_for_kubevirt(lab).await?;
    wait_for_rollout(lab, "deployment/kubevirt-operator-controller-manager", operators).await
}

/// Four examples with empty disks, and one that boots an image.
async fn run_examples(lab: &Lab) -> Result<()> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast-ssd"},
        "provisioner": "lab.vitistack.io/binding", "allowVolumeExpansion": true,
    });
    manifests::create(&lab.client(), &[class]).await?;
    let names = ["networks", "container-disk-vm", "basic-vm", "custom-vm", "networked-vm", "cloud-init-vm"];
    let examples = names.map(|name| file(&format!("examples/{name}.yaml")));
    let files: Vec<&str> = examples.iter().flat_map(|file| ["-f", file.as_str()]).collect();
    lab.kubectl(&[&["apply"], files.as_slice()].concat()).await?;
    let running = "--for=jsonpath={.status.phase}=Running";
    lab.kubectl(&["wait", "machines.vitistack.io", "--all", running, "--timeout=120s"]).await.map(drop)
}

/// Every process of the two operators runs as the user of the image on a read-only root.
fn check_processes() -> Result<()> {
    let expected: u32 = USER.split(':').next().and_then(|user| user.parse().ok()).context("the user is not numeric")?;
    for program in PROGRAMS {
        let name: String = program.chars().take(COMMAND_NAME).collect();
        let processes = processes_named(&name);
        ensure!(!processes.is_empty(), "no process of {program} runs in the lab");
        for process in processes {
            let user = user_in_container(&process)?;
            ensure!(user == expected, "{program} runs as user {user}, not {expected}");
            let mounts = fs::read_to_string(process.join("mountinfo")).context("reading the mounts of a process")?;
            ensure!(is_read_only(&mounts), "{program} does not run on a read-only root:\n{mounts}");
        }
    }
    Ok(())
}

/// The folders in `/proc` of the processes with this name.
fn processes_named(name: &str) -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    let has_name =
        |process: &PathBuf| fs::read_to_string(process.join("comm")).is_ok_and(|command| command.trim() == name);
    processes.filter(has_name).collect()
}

/// The user of a process as the process itself sees it: its user namespace may give this process's user another number.
fn user_in_container(process: &Path) -> Result<u32> {
    let status = fs::read_to_string(process.join("status")).context("reading the status of a process")?;
    let numbers = |text: &str| text.split_whitespace().map_while(|word| word.parse().ok()).collect::<Vec<u32>>();
    let user = status.lines().find_map(|line| numbers(line.strip_prefix("Uid:")?).first().copied());
    let user = user.context("the status of a process has no user")?;
    let namespace = |process: &Path| fs::read_link(process.join("ns/user"));
    if namespace(process).ok() == namespace(Path::new("/proc/self")).ok() {
        return Ok(user);
    }
    let map = fs::read_to_string(process.join("uid_map")).context("reading the users of a process")?;
    let mapped = map.lines().find_map(|line| match numbers(line).as_slice() {
        [inside, outside, count] if (*outside..outside.saturating_add(*count)).contains(&user) => {
            Some(inside + (user - outside))
        }
        _ => None,
    });
    mapped.context("the user of a process is not mapped")
}

/// Whether the last mount on `/` is read-only.
fn is_read_only(mounts: &str) -> bool {
    let options = |line: &str| {
        let mut fields = line.split_whitespace().skip(4);
        (fields.next() == Some("/")).then(|| fields.next().unwrap_or_default().split(',').any(|option| option == "ro"))
    };
    mounts.lines().filter_map(options).next_back().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_the_root_mount_decide() {
        let root =
            |options: &str| format!("40 30 0:30 /pods/a / {options} - tmpfs lab rw\n41 40 0:5 / /dev ro - x x rw\n");
        assert!(is_read_only(&root("ro,relatime")));
        assert!(!is_read_only(&root("rw,relatime")));
        assert!(!is_read_only(""));
    }

    #[test]
    fn this_process_has_its_own_user() {
        assert_eq!(user_in_container(Path::new("/proc/self")).unwrap(), nix::unistd::Uid::current().as_raw());
    }
}
