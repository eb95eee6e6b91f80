//! The command `check`, and the warnings of the admission policy, on a lab.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Output, Stdio},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use kubevirt_operator::{policies, rbac};
use serde_json::{Value, json};
use tokio::process::Command;
use vitivirt_lab::{
    Extension, Lab, Record, components,
    harness::{SharedLabs, Suite},
    manifests,
};

use crate::{
    machine_test::{MachineTest, create_crds, machine},
    poll::poll_until,
    replica::PATIENCE,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_check_names_what_a_cluster_lacks_and_writes_nothing,
        the_policy_warns_about_what_render_warns_about_and_refuses_nothing,
        the_api_server_explains_a_wrong_size_in_one_sentence,
    );
}

async fn run(lab: &Lab, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubevirt-operator"));
    command.args(arguments).env("KUBECONFIG", lab.kubeconfig()).stdin(Stdio::null());
    command.output().await.context("running kubevirt-operator")
}

/// The lines of a report: the status and the message of each check, by name.
struct Lines(BTreeMap<String, (String, String)>);

impl Lines {
    fn status(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |(status, _)| status)
    }

    fn message(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |(_, message)| message)
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The exit status of `check`, and its lines.
async fn check(lab: &Lab, arguments: &[&str]) -> Result<(i32, Lines)> {
    let output = run(lab, &[&["check", "-o", "json"], arguments].concat()).await?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{}", String::from_utf8_lossy(&output.stderr)))?;
    let text = |check: &Value, name: &str| check.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let checks = report.get("checks").and_then(Value::as_array).context("no checks")?.iter();
    let lines = checks.map(|check| (text(check, "name"), (text(check, "status"), text(check, "message"))));
    Ok((output.status.code().unwrap_or(-1), Lines(lines.collect())))
}

async fn a_check_names_what_a_cluster_lacks_and_writes_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let namespace = "check-command";
    let plain = Box::pin(labs.plain()).await?;
    let before = plain.audit()?.len();
    let (exit, lines) = check(&plain, &["--pre", "--namespace", namespace]).await?;
    ensure!(exit == 0, "an administrator can install the operator: {lines:?}");
    for (name, expected) in [
        ("API server", "ok"),
        ("Permissions", "ok"),
        ("StorageClass", "ok"),
        ("Volume expansion", "ok"),
        ("Volume snapshots", "warning"),
        ("KubeVirt", "warning"),
    ] {
        ensure!(lines.status(name) == expected, "{name}: {lines:?}");
    }
    let (exit, lines) = check(&plain, &["--namespace", namespace]).await?;
    ensure!(exit == 1 && lines.status("Permissions") == "failed" && lines.status("Operator") == "failed", "{lines:?}");
    ensure!(lines.message("Permissions").contains(&format!("ServiceAccount {namespace}/")), "{lines:?}");
    let audit: Vec<Record> = plain.audit()?.into_iter().skip(before).collect();
    let writes: Vec<_> = audit.iter().filter(|record| record.is_write() && record.user == "admin").collect();
    let is_review = |record: &&&Record| record.resource.ends_with("subjectaccessreviews");
    ensure!(writes.iter().all(|record| is_review(&record)), "{writes:?}");

    let test = Box::pin(MachineTest::start(&labs, namespace)).await?;
    let (exit, lines) = check(&test.lab, &["--namespace", namespace]).await?;
    ensure!(exit == 0, "{lines:?}");
    for name in ["CRD machines.vitistack.io", "Permissions", "Operator", "Multus", "KubeVirt", "Nodes"] {
        ensure!(lines.status(name) == "ok", "{name}: {lines:?}");
    }
    // The account has its permissions in all namespaces, and no policy names it.
    let (exit, lines) = check(&test.lab, &["--namespace", namespace, "--watch-namespace", namespace]).await?;
    ensure!(exit == 0 && lines.status("Permissions") == "ok", "{lines:?}");
    for name in ["Other namespaces", "Admission policy"] {
        ensure!(lines.status(name) == "warning", "{name}: {lines:?}");
    }
    let (exit, lines) = check(&test.lab, &["--namespace", namespace, "--service-account", "other"]).await?;
    ensure!(
        exit == 1 && lines.message("Permissions").contains(&format!("ServiceAccount {namespace}/other")),
        "{lines:?}"
    );
    // The operator loses one permission.
    let mut fewer = rbac::lease_rules();
    fewer.iter_mut().for_each(|rule| rule.verbs.retain(|verb| verb != "update"));
    test.lab.change_grant(namespace, crate::replica::ACCOUNT, &json!(fewer)).await?;
    let missing = format!("update leases.coordination.k8s.io in namespace {namespace}");
    let is_named = || async {
        let (exit, lines) = check(&test.lab, &["--namespace", namespace]).await?;
        Ok(exit == 1 && lines.message("Permissions").contains(&missing))
    };
    poll_until(PATIENCE, is_named, || format!("the check names {missing}")).await
}

/// The file that `apply` writes, with the name of the Machine: other tests use the lab at the same time.
fn file_of(lab: &Lab, machine: &Value) -> Result<PathBuf> {
    let name = machine.pointer("/metadata/name").and_then(Value::as_str).context("a Machine without name")?;
    Ok(lab.folder().join(format!("{name}.json")))
}

/// What `kubectl apply` prints to standard error.
async fn apply(lab: &Lab, machine: &Value) -> Result<String> {
    let file = file_of(lab, machine)?;
    std::fs::write(&file, machine.to_string())?;
    let output = Command::new(components::kubectl_dir()?.join("kubectl"))
        .args(["apply".as_ref(), "--dry-run=server".as_ref(), "-f".as_ref(), file.as_os_str()])
        .env("KUBECONFIG", lab.kubeconfig())
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "the Machine was refused: {text}");
    Ok(text)
}

async fn the_api_server_explains_a_wrong_size_in_one_sentence(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(labs.plain()).await?;
    create_crds(&lab).await?;
    for (size, expected) in [("5GB", "must be a number with an optional unit, such as 20Gi"), ("8Ei", "at most 7Ei")] {
        let spec = json!({"template": "small", "disks": [{"name": "root", "size": size}]});
        let refused = apply(&lab, &machine("sized", &spec)).await.err().map(|error| error.to_string());
        let text = refused.with_context(|| format!("{size} was accepted"))?;
        ensure!(text.contains(expected), "{size}: {text}");
        ensure!(text.matches("spec.disks[0].size").count() == 1 && !text.contains("[0-9]"), "{size}: {text}");
    }
    Ok(())
}

async fn the_policy_warns_about_what_render_warns_about_and_refuses_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(labs.plain()).await?;
    create_crds(&lab).await?;
    lab.install(Extension::Multus).await?;
    let objects = [json!(policies::machine_warnings()), json!(policies::warning_binding(policies::MACHINE_WARNINGS))];
    manifests::create(&lab.client(), &objects).await?;
    let image = json!({"containerDisk": {"image": "quay.io/containerdisks/fedora:42"}});
    let iso =
        json!({"name": "iso", "type": "cdrom", "size": "2Gi", "source": {"http": {"url": "https://x.example/a.iso"}}});
    let resources = json!({"cpu": {"cores": 1}, "memory": {"size": "1Gi"}});
    let unknown = machine("unknown", &json!({"template": "smal", "disks": [{"name": "root", "source": image}]}));
    let is_active = || async { Ok(apply(&lab, &unknown).await?.contains("spec.template: unsupported value \"smal\"")) };
    poll_until(PATIENCE, is_active, || "the policy warns about an unknown template".to_owned()).await?;
    let specs = [
        json!({"template": "small"}),
        json!({"template": "small", "disks": [{"name": "root", "source": image}]}),
        json!({"template": "small", "disks": [{"name": "data", "source": image}]}),
        json!({"template": "small", "bootOrder": ["disk"], "disks": [{"name": "data", "source": image}]}),
        json!({"template": "small", "disks": [iso]}),
        json!({"template": "small", "bootOrder": ["disk", "cdrom"], "disks": [iso]}),
        json!({"template": "small", "bootOrder": ["disk", "network"]}),
        json!({"resources": resources, "disks": [iso]}),
        json!({"resources": resources, "disks": [{"name": "a", "source": image}, {"name": "b", "size": "1Gi"}]}),
        json!({"resources": resources, "disks": [{"name": "a", "size": "1Gi"}, {"name": "b", "source": image}]}),
    ];
    for spec in specs {
        let machine = machine("boots", &spec);
        let by_policy = apply(&lab, &machine).await?.contains("nothing to boot from");
        let rendered = run(&lab, &["render", "-f", &file_of(&lab, &machine)?.display().to_string()]).await?;
        let text = String::from_utf8_lossy(&rendered.stderr).into_owned();
        ensure!(rendered.status.success(), "{spec}: {text}");
        ensure!(by_policy == text.contains("nothing to boot from"), "{spec}: policy {by_policy}, render: {text}");
    }
    Ok(())
}
