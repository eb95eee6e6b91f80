//! `cargo xtask demo`: from an empty cluster to running Machines and back, with output for every step.
//!
//! The steps need only a kubeconfig, so they are the same on a lab of this process, on a lab that stays (`--keep`) and on
//! a real cluster (`--kubeconfig`).

use std::{
    collections::BTreeMap,
    io::{BufRead, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DynamicObject, ListParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use vitivirt_lab::{Extension, KubeVirtRelease, Lab, LabOptions, VirtOperator, components, isolate, kubevirt_resource};

use crate::{kubevirt_operator, lab_commands, lab_page, programs, terminal::step};

/// Enough to pull images on a real cluster.
const TIMEOUT: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(200);
const KEPT_LAB: &str = "demo";

/// On the StorageClass that the demo creates, so that it deletes no other.
const DEMO_LABEL: &str = "vitistack.io/demo";

/// The Machine that boots an image, and the others.
const EXAMPLES: [&str; 5] = ["container-disk-vm", "basic-vm", "custom-vm", "networked-vm", "cloud-init-vm"];

#[derive(Args)]
pub(crate) struct DemoOptions {
    /// Remove nothing at the end, and keep the lab running under the name demo
    #[arg(long, conflicts_with_all = ["kubeconfig", "upgrade"])]
    keep: bool,
    /// Start with KubeVirt v1.7.0 of upstream virt-operator, and upgrade it
    #[arg(long, conflicts_with = "kubeconfig")]
    upgrade: bool,
    /// Use a real cluster instead of a lab; asks first
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Do not ask before a real cluster is used
    #[arg(long, short, requires = "kubeconfig")]
    yes: bool,
    /// Remove nothing at the end of the steps.
    #[arg(long, hide = true, requires = "kubeconfig")]
    no_removal: bool,
}

pub(crate) fn run(options: &DemoOptions) -> ExitCode {
    match &options.kubeconfig {
        Some(kubeconfig) => crate::finish(run_on_cluster(kubeconfig, options)),
        None if options.keep => run_on_kept_lab().unwrap_or_else(|error| crate::fail(&error)),
        None => {
            let groups: &[_] = if options.upgrade { &components::WITH_PREVIOUS } else { &components::STANDARD };
            isolate::run(
                || {
                    components::ensure(groups)?;
                    programs::build(false).map(|_| ())
                },
                || runtime()?.block_on(run_on_lab(options.upgrade)).map(|()| ExitCode::SUCCESS),
            )
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Runtime::new().context("starting tokio")
}

async fn run_on_lab(upgrade: bool) -> Result<()> {
    let options = LabOptions {
        extensions: vec![Extension::Multus],
        own_programs: kubevirt_operator::own_programs()?,
        ..LabOptions::default()
    };
    let lab = step("start an empty Kubernetes v1.36.3", Lab::start(options)).await?;
    if upgrade {
        step("install KubeVirt v1.7.0 with upstream virt-operator", async {
            lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
            lab.wait_for_virt_operator(TIMEOUT).await?;
            lab.deploy_kubevirt(None).await
        })
        .await?;
    }
    let demo = Demo::new(lab.kubeconfig()).await?;
    demo.run(upgrade, true).await?;
    eprintln!();
    eprintln!("The only CRD that is left is that of Multus. It belongs to the lab.");
    eprintln!("This was a real control plane with simulated nodes. The demo has stopped it.");
    eprintln!("To keep the lab and the Machines: cargo xtask demo --keep");
    lab.stop().await
}

/// Starts a background lab, and runs the steps in its network.
fn run_on_kept_lab() -> Result<ExitCode> {
    lab_commands::start_for_demo(KEPT_LAB)?;
    let program = std::env::current_exe().context("finding the path of this program")?;
    let steps = r#"exec "$0" demo --kubeconfig "$KUBECONFIG" --yes --no-removal"#;
    let command = ["sh", "-c", steps, &program.display().to_string()].map(str::to_owned);
    let code = vitivirt_lab::daemon::exec(KEPT_LAB, &command)?;
    eprintln!("\nThe lab keeps running.");
    eprintln!("Command:  cargo xtask lab exec --name {KEPT_LAB} -- kubectl get machines.vitistack.io");
    eprintln!("Page:     cargo xtask lab page --name {KEPT_LAB}    # then open http://localhost:{}", lab_page::PORT);
    eprintln!("Stop:     cargo xtask lab down --name {KEPT_LAB}");
    Ok(code)
}

fn run_on_cluster(kubeconfig: &Path, options: &DemoOptions) -> Result<()> {
    runtime()?.block_on(async {
        let demo = Demo::new(kubeconfig).await?;
        demo.refuse_existing_kubevirt().await?;
        if !options.yes {
            eprintln!(
                "The demo installs KubeVirt and both operators in the cluster {}, creates Machines in the",
                demo.server
            );
            eprintln!("namespace default, and removes all of it at the end.");
            eprint!("Continue? [y/N] ");
            std::io::stderr().flush()?;
            let mut answer = String::new();
            std::io::stdin().lock().read_line(&mut answer)?;
            if !answer.trim().eq_ignore_ascii_case("y") {
                bail!("stopped; nothing was changed");
            }
        }
        demo.run(false, !options.no_removal).await
    })
}

struct Demo {
    kubeconfig: PathBuf,
    server: String,
    client: Client,
}

impl Demo {
    async fn new(kubeconfig: &Path) -> Result<Self> {
        let file = Kubeconfig::read_from(kubeconfig).with_context(|| format!("reading {}", kubeconfig.display()))?;
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        let server = config.cluster_url.to_string();
        Ok(Self { kubeconfig: kubeconfig.to_owned(), server, client: Client::try_from(config)? })
    }

    /// The demo removes KubeVirt at the end, so it must have installed it.
    async fn refuse_existing_kubevirt(&self) -> Result<()> {
        match self.kubevirts().list(&ListParams::default()).await {
            Ok(list) if !list.items.is_empty() => {
                bail!("the cluster already has a KubeVirt resource, which the demo would remove; use another cluster")
            }
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error).with_context(|| format!("reading the cluster {}", self.server)),
        }
    }

    fn kubevirts(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &kubevirt_resource("KubeVirt"))
    }

    async fn run(&self, upgrade: bool, remove: bool) -> Result<()> {
        if !upgrade {
            step("install virt-operator and KubeVirt v1.8.4", async {
                self.kubectl(&["apply", "-f", "config/virt-operator/kubevirt-operator.yaml"])?;
                self.kubectl(&["apply", "-f", "config/virt-operator/kubevirt-cr.yaml"])?;
                self.wait_for_release("v1.8.4").await
            })
            .await?;
        }
        step("install kubevirt-operator", async {
            self.kubectl(&["apply", "-f", "config/crd/", "-f", "config/rbac/", "-f", "config/manager/"])?;
            let deployment = "deployment/kubevirt-operator-controller-manager";
            self.kubectl(&["rollout", "status", deployment, "-n", "kubevirt-operator-system", "--timeout=10m"])
        })
        .await?;
        step("create five Machines; container-disk-vm boots an image, the others have empty disks", async {
            self.prepare_examples().await?;
            for name in EXAMPLES {
                self.kubectl(&["apply", "-f", &format!("examples/{name}.yaml")])?;
            }
            let running: Vec<(&str, &str)> = EXAMPLES.iter().map(|name| (*name, "Running")).collect();
            self.wait_for_machines(&running).await
        })
        .await?;
        self.kubectl(&["get", "machines.vitistack.io,virtualmachines,virtualmachineinstances,persistentvolumeclaims"])?;
        if upgrade {
            step("replace upstream virt-operator by ours, which upgrades KubeVirt; guests keep running", async {
                let file = "config/virt-operator/kubevirt-operator.yaml";
                self.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", file])?;
                self.wait_for_release("v1.8.4").await
            })
            .await?;
            self.kubectl(&["get", "machines.vitistack.io"])?;
        }
        step("edit a Machine: four cores instead of two, when the guest restarts", async {
            let patch = r#"{"spec":{"resources":{"cpu":{"cores":4}}}}"#;
            self.kubectl(&["patch", "machines.vitistack.io", "basic-vm", "--type=merge", "-p", patch])?;
            self.wait_for_machine("basic-vm", |machine| {
                let status = machine.map(status_of).unwrap_or_default();
                let restart = condition(&status, "RestartRequired").and_then(|condition| condition.get("status"));
                status.pointer("/resources/cpu") == Some(&json!(4)) && restart.is_some_and(|status| status == "True")
            })
            .await
        })
        .await?;
        step("stop a Machine", async {
            let patch = r#"{"spec":{"powerState":"Stopped"}}"#;
            self.kubectl(&["patch", "machines.vitistack.io", "custom-vm", "--type=merge", "-p", patch])?;
            self.wait_for_machines(&[("custom-vm", "Stopped")]).await
        })
        .await?;
        step("delete a Machine, with its guest and its disk", async {
            self.kubectl(&["delete", "machines.vitistack.io", "cloud-init-vm", "--timeout=10m"])
        })
        .await?;
        self.kubectl(&["get", "persistentvolumeclaims"])?;
        self.kubectl(&["get", "machines.vitistack.io", "-o", "wide"])?;
        if !remove {
            return Ok(());
        }
        step("remove all Machines, kubevirt-operator, KubeVirt and virt-operator", async {
            let examples = EXAMPLES.map(|name| format!("examples/{name}.yaml"));
            let mut files: Vec<&str> = examples.iter().flat_map(|file| ["-f", file.as_str()]).collect();
            files.extend(["-f", "examples/networks.yaml"]);
            self.kubectl(&[&["delete", "--ignore-not-found", "--timeout=10m"], &files[..]].concat())?;
            self.kubectl(&["delete", "storageclass", "--ignore-not-found", "-l", DEMO_LABEL])?;
            self.kubectl(&["delete", "-f", "config/manager/", "-f", "config/rbac/"])?;
            self.kubectl(&["delete", "-f", "config/crd/"])?;
            self.kubectl(&["delete", "kubevirt", "kubevirt", "-n", "kubevirt", "--timeout=10m"])?;
            self.kubectl(&["delete", "--ignore-not-found", "-f", "config/virt-operator/kubevirt-operator.yaml"])
        })
        .await?;
        self.kubectl(&["get", "customresourcedefinitions"])
    }

    /// What the examples refer to: networks, if the cluster has Multus, and the StorageClass fast-ssd.
    async fn prepare_examples(&self) -> Result<()> {
        self.kubectl(&["apply", "-f", "examples/networks.yaml"])?;
        let classes: Api<k8s_openapi::api::storage::v1::StorageClass> = Api::all(self.client.clone());
        if classes.get_opt("fast-ssd").await?.is_some() {
            return Ok(());
        }
        let all = classes.list(&ListParams::default()).await?;
        let default = "storageclass.kubernetes.io/is-default-class";
        let found = all.items.into_iter().find(|class| class.annotations().get(default).is_some_and(|is| is == "true"));
        let mut class = found.context("the cluster has no default StorageClass; mark one as default")?;
        let labels = Some([(DEMO_LABEL.to_owned(), "true".to_owned())].into());
        class.metadata = kube::api::ObjectMeta { name: Some("fast-ssd".to_owned()), labels, ..Default::default() };
        classes.create(&Default::default(), &class).await.context("creating StorageClass fast-ssd")?;
        Ok(())
    }

    /// Prints each new condition of the KubeVirt resource until the release is deployed.
    async fn wait_for_release(&self, release: &str) -> Result<()> {
        let mut shown = String::new();
        let started = Instant::now();
        loop {
            let kubevirt = self.kubevirts().list(&ListParams::default()).await?.items.into_iter().next();
            let status = kubevirt.map(|kubevirt| status_of(&kubevirt)).unwrap_or_default();
            let text = |name: &str| status.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            let progressing =
                condition(&status, "Progressing").and_then(|condition| condition.get("message")?.as_str());
            let line = format!("{}: {}", text("phase"), progressing.unwrap_or_default());
            if line != shown && !text("phase").is_empty() {
                eprintln!("    {:>5.1} s  KubeVirt {line}", started.elapsed().as_secs_f64());
                shown = line;
            }
            let is_available = condition(&status, "Available")
                .is_some_and(|condition| condition.get("status") == Some(&"True".into()));
            if text("phase") == "Deployed" && text("observedKubeVirtVersion") == release && is_available {
                return Ok(());
            }
            if started.elapsed() > TIMEOUT {
                bail!("KubeVirt {release} is not deployed after {TIMEOUT:?}: {status}");
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn machines(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), "default", &kubevirt_operator::machine_resource())
    }

    /// Prints each new phase and reason until every Machine has its phase.
    async fn wait_for_machines(&self, expected: &[(&str, &str)]) -> Result<()> {
        let mut shown: BTreeMap<String, String> = BTreeMap::new();
        let started = Instant::now();
        loop {
            let mut reached = 0;
            for machine in self.machines().list(&ListParams::default()).await?.items {
                let Some((name, phase)) = expected.iter().find(|(name, _)| *name == machine.name_any()) else {
                    continue;
                };
                let status = status_of(&machine);
                let current = status.get("phase").and_then(Value::as_str).unwrap_or_default();
                let ready = condition(&status, "Ready");
                let part = |key: &str| ready.and_then(|ready| ready.get(key)?.as_str()).unwrap_or_default();
                let line = format!("{current:<9} {}", part("reason"));
                if shown.get(*name) != Some(&line) && ready.is_some() {
                    eprintln!("    {:>5.1} s  {name:<18} {line}", started.elapsed().as_secs_f64());
                    shown.insert((*name).to_owned(), line);
                }
                reached += usize::from(current == *phase && part("status") == "True");
            }
            if reached == expected.len() {
                return Ok(());
            }
            if started.elapsed() > TIMEOUT {
                let _ = self.kubectl(&["get", "machines.vitistack.io", "-o", "wide"]);
                bail!("the Machines did not reach their phase after {TIMEOUT:?}");
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn wait_for_machine(&self, name: &str, is_reached: impl Fn(Option<&DynamicObject>) -> bool) -> Result<()> {
        let started = Instant::now();
        while !is_reached(self.machines().get_opt(name).await?.as_ref()) {
            if started.elapsed() > TIMEOUT {
                bail!("Machine {name} did not change after {TIMEOUT:?}");
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Runs kubectl in the folder of the repository, and shows the command.
    fn kubectl(&self, arguments: &[&str]) -> Result<()> {
        let quoted =
            |argument: &&str| if argument.contains('{') { format!("'{argument}'") } else { (*argument).to_owned() };
        eprintln!("  $ kubectl {}", arguments.iter().map(quoted).collect::<Vec<_>>().join(" "));
        let status = Command::new(components::kubectl_dir()?.join("kubectl"))
            .args(arguments)
            .current_dir(programs::root())
            .env("KUBECONFIG", &self.kubeconfig)
            .status()
            .context("running kubectl")?;
        if !status.success() {
            bail!("kubectl {} failed", arguments.join(" "));
        }
        Ok(())
    }
}

fn status_of(object: &DynamicObject) -> Value {
    object.data.get("status").cloned().unwrap_or_default()
}

fn condition<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = status.get("conditions")?.as_array()?;
    conditions.iter().find(|condition| condition.get("type").is_some_and(|have| have == kind))
}
