//! The plugin on the lab, as a user with the role machine-edit in one namespace. No operator runs: the plugin reads and
//! writes Machines only.

use std::{
    path::{Path, PathBuf},
    process::{ExitCode, Output},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use kube::{Api, config::Kubeconfig};
use kubevirt_operator::rbac;
use serde_json::{Value, json};
use vitivirt_api::machine::{
    ANNOTATION_ADOPT, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY, Machine, crds,
};
use vitivirt_lab::{Lab, harness::SharedLabs, manifests};

const NAMESPACE: &str = "plugin";
const TENANT: &str = "tenant";
const EARLIER: &str = "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11";
const USER_DATA: &str = "password: hunter2";

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&vitivirt_lab::components::STANDARD, |suite| {
        vitivirt_lab::tests!(suite; a_user_of_a_namespace_works_with_machines);
    })
}

struct User {
    kubeconfig: PathBuf,
    folder: PathBuf,
}

impl User {
    fn new(lab: &Lab, name: &str) -> Result<Self> {
        let mut kubeconfig = Kubeconfig::read_from(lab.kubeconfig())?;
        for user in &mut kubeconfig.auth_infos {
            if let Some(user) = &mut user.auth_info {
                user.impersonate = Some(name.to_owned());
            }
        }
        let file = lab.folder().join(format!("{name}.kubeconfig"));
        std::fs::write(&file, serde_json::to_vec(&kubeconfig)?)?;
        Ok(Self { kubeconfig: file, folder: lab.folder().to_owned() })
    }

    async fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubectl-vmachine"));
        command.args(arguments).env_clear().env("KUBECONFIG", &self.kubeconfig).current_dir(&self.folder);
        command.output().await.context("running the plugin")
    }

    /// The output of a command that succeeds.
    async fn output(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments).await?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The error of a command that fails.
    async fn error(&self, status: i32, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments).await?;
        let error = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(status), "{arguments:?}: {}: {error}", output.status);
        Ok(error)
    }
}

fn machine(name: &str) -> Value {
    json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"template": "small", "cloudInit": {"userData": USER_DATA}},
    })
}

async fn set_up(lab: &Lab) -> Result<()> {
    let group = "rbac.authorization.k8s.io";
    let mut objects: Vec<Value> = crds().iter().map(|crd| json!(crd)).collect();
    objects.extend(rbac::user_roles().iter().map(|role| json!(role)));
    let labels = json!({LABEL_MANAGED_BY: MANAGED_BY, LABEL_MACHINE: "web", LABEL_MACHINE_UID: EARLIER});
    objects.extend([
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
            "metadata": {"name": TENANT, "namespace": NAMESPACE},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "machine-edit"},
            "subjects": [{"kind": "User", "apiGroup": group, "name": TENANT}],
        }),
        machine("web"),
        machine("database"),
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "web-root", "namespace": NAMESPACE, "labels": labels},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
        }),
    ]);
    manifests::create(&lab.client(), &objects).await
}

async fn a_user_of_a_namespace_works_with_machines(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    set_up(&lab).await?;
    let tenant = User::new(&lab, TENANT)?;
    lists_and_describes(&tenant).await.context("list and describe")?;
    starts_and_stops(&lab, &tenant).await.context("start and stop")?;
    adopts(&lab, &tenant).await.context("adopt")?;
    collects(&tenant, &lab.folder().join("tenant.tar.gz")).await.context("debug info")?;
    Ok(())
}

async fn lists_and_describes(tenant: &User) -> Result<()> {
    let list = tenant.output(&["list", "-n", NAMESPACE]).await?;
    ensure!(list.starts_with("NAME ") && list.contains("\nweb ") && list.contains("\ndatabase "), "{list}");
    let json: Value = serde_json::from_str(&tenant.output(&["list", "-n", NAMESPACE, "-o", "json"]).await?)?;
    ensure!(json.as_array().is_some_and(|rows| rows.len() == 2), "{json}");
    ensure!(!json.to_string().contains("hunter2"), "user data in {json}");
    let error = tenant.error(2, &["list", "-A"]).await?;
    ensure!(error.contains("you are not allowed to list"), "{error}");
    let empty = tenant.error(2, &["list", "-n", "default"]).await?;
    ensure!(empty.contains("you are not allowed to list"), "{empty}");

    let tree = tenant.output(&["describe", "web", "-n", NAMESPACE]).await?;
    for text in ["Machine web: Pending", "VirtualMachine web", "PersistentVolumeClaim web-root: you are not allowed"] {
        ensure!(tree.contains(text), "{text:?} is missing in\n{tree}");
    }
    ensure!(!tree.contains("hunter2"), "{tree}");
    let yaml = tenant.output(&["describe", "web", "-n", NAMESPACE, "-o", "yaml"]).await?;
    ensure!(yaml.contains("\nkind: Machine\n"), "{yaml}");
    for (arguments, expected) in [
        (&["__complete", "describe", "-n", NAMESPACE, "w"][..], "web\n:4\n"),
        (&["__complete", "stop", "-n", NAMESPACE, ""], "database\nweb\n:4\n"),
        (&["__complete", "stop", "-n", "default", ""], ":4\n"),
    ] {
        let completions = tenant.output(arguments).await?;
        ensure!(completions == expected, "{arguments:?}: {completions}");
    }
    let error = tenant.error(1, &["describe", "none", "-n", NAMESPACE]).await?;
    ensure!(error == "error: Machine plugin/none not found\n", "{error}");
    Ok(())
}

async fn starts_and_stops(lab: &Lab, tenant: &User) -> Result<()> {
    let machines: Api<Machine> = Api::namespaced(lab.client(), NAMESPACE);
    for (command, expected) in [("stop", "Stopped"), ("start", "Running")] {
        let output = tenant.output(&[command, "web", "database", "-n", NAMESPACE]).await?;
        ensure!(output.lines().count() == 2, "{output}");
        for name in ["web", "database"] {
            let spec = json!(machines.get(name).await?.spec);
            ensure!(spec.get("powerState").is_some_and(|state| state == expected), "{name}: {spec}");
        }
    }
    let error = tenant.error(1, &["stop", "none", "-n", NAMESPACE]).await?;
    ensure!(error.contains("Machine plugin/none not found"), "{error}");
    // No operator runs, so the Machine never gets a guest.
    let error = tenant.error(1, &["restart", "web", "-n", NAMESPACE]).await?;
    ensure!(error.contains("it has no guest"), "{error}");
    tenant.output(&["stop", "web", "-n", NAMESPACE]).await?;
    let error = tenant.error(1, &["restart", "web", "-n", NAMESPACE]).await?;
    ensure!(error.contains("is not running") && error.contains("kubectl vmachine start web"), "{error}");
    Ok(())
}

async fn adopts(lab: &Lab, tenant: &User) -> Result<()> {
    let machines: Api<Machine> = Api::namespaced(lab.client(), NAMESPACE);
    let annotation = async |name: &str| -> Result<Option<String>> {
        Ok(machines.get(name).await?.metadata.annotations.and_then(|mut all| all.remove(ANNOTATION_ADOPT)))
    };
    let error = tenant.error(1, &["adopt", "database", "-n", NAMESPACE]).await?;
    ensure!(error.contains("has nothing to take over"), "{error}");
    let error = tenant.error(1, &["adopt", "web", "everything", "-n", NAMESPACE]).await?;
    ensure!(error.contains("invalid value \"everything\": must be the UID"), "{error}");
    tenant.output(&["adopt", "web", EARLIER, "-n", NAMESPACE, "--dry-run"]).await?;
    ensure!(annotation("web").await?.is_none(), "a dry run wrote the annotation");
    tenant.output(&["adopt", "web", EARLIER, "-n", NAMESPACE]).await?;
    ensure!(annotation("web").await?.as_deref() == Some(EARLIER), "{:?}", annotation("web").await?);
    // An administrator may read the PVC, so the plugin finds out what can be adopted.
    let administrator = User { kubeconfig: lab.kubeconfig().to_owned(), folder: lab.folder().to_owned() };
    let remove = json!({"metadata": {"annotations": {ANNOTATION_ADOPT: null}}});
    machines.patch("web", &kube::api::PatchParams::default(), &kube::api::Patch::Merge(remove)).await?;
    let tree = administrator.output(&["describe", "web", "-n", NAMESPACE]).await?;
    ensure!(tree.contains("kubectl vmachine adopt web -n plugin"), "{tree}");
    administrator.output(&["adopt", "web", "-n", NAMESPACE]).await?;
    ensure!(annotation("web").await?.as_deref() == Some(EARLIER), "{:?}", annotation("web").await?);
    Ok(())
}

async fn collects(tenant: &User, file: &Path) -> Result<()> {
    let path = file.to_str().context("path")?;
    let output = tenant.output(&["collect-debug-info", "-n", NAMESPACE, "-f", path]).await?;
    ensure!(output.contains("could not be read, see errors.txt"), "{output}");
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(std::fs::File::open(file)?));
    let mut files = std::collections::BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut entry, &mut text)?;
        ensure!(!text.contains("hunter2"), "user data in {name}");
        files.insert(name, text);
    }
    let find = |name: &str| files.get(&format!("vmachine-debug-info/{name}")).map(String::as_str).unwrap_or_default();
    ensure!(find("machines.yaml").contains("name: web"), "{files:?}");
    ensure!(find("errors.txt").contains("persistentvolumeclaims: "), "{files:?}");
    ensure!(!files.keys().any(|name| name.contains("secret")), "{:?}", files.keys());
    Ok(())
}
