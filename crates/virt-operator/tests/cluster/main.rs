//! virt-operator on the lab, as its own service account.

#![expect(clippy::indexing_slicing, reason = "a test may stop where something is not as it should be")]

mod commands;
mod install;
mod life;
mod manifests;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Lab, OperatorProcess, OperatorProcessOptions};
use vitivirt_runtime::lease::message;

const ACCOUNT: &str = "kubevirt-operator";
const IMAGE: &str = "quay.io/kubevirt/virt-operator:v1.8.4";
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&vitivirt_lab::components::STANDARD, add)
}

fn add(suite: &mut Suite) {
    manifests::add(suite);
    commands::add(suite);
    install::add(suite);
    life::add(suite);
    suite.test("an_image_that_is_none_ends_it_at_once", |_| async move {
        for (variable, image) in [("VIRT_OPERATOR_IMAGE", ""), ("VIRT_OPERATOR_IMAGE", "junk"), ("GS_IMAGE", " ")] {
            let mut program = tokio::process::Command::new(env!("CARGO_BIN_EXE_virt-operator"));
            program.env("VIRT_OPERATOR_IMAGE", IMAGE).env(variable, image).kill_on_drop(true);
            let output = tokio::time::timeout(PATIENCE, program.output()).await??;
            let told = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(1), "{variable}={image:?} ended with {}", output.status);
            ensure!(told.starts_with(&format!("error: {variable} must be")) && told.lines().count() == 1, "{told}");
        }
        Ok(())
    });
    suite.test("it_leads_serves_and_stops", |labs| async move {
        let lab = labs.plain().await?;
        let mut program = start(&lab, "kubevirt").await?;
        program.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        let ready = async {
            while !program.get_over_tls(8186, "/readyz").await.is_ok_and(|(status, _)| status == 200) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ready).await?;
        for (path, expected) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/else", 404)] {
            let (status, body) = program.get_over_tls(8186, path).await?;
            ensure!(status == expected, "{path} answered {status}: {body}");
        }
        program.signal(Signal::SIGTERM)?;
        let status = program.wait(Duration::from_secs(5)).await?;
        ensure!(status.code() == Some(0), "a SIGTERM is a clean end: {status}");
        program.wait_for_message(message::RELEASED, Duration::ZERO).await?;

        let own: Vec<_> =
            lab.audit()?.into_iter().filter(|record| record.user.ends_with(":kubevirt:kubevirt-operator")).collect();
        ensure!(!own.is_empty(), "it acted as its own service account");
        let agent = concat!("virt-operator/", env!("CARGO_PKG_VERSION"));
        ensure!(own.iter().all(|record| record.user_agent == agent), "every request carries {agent:?}: {own:?}");
        ensure!(own.iter().any(|record| record.name == "virt-operator" && record.resource == "leases"), "{own:?}");
        Ok(())
    });
}

async fn start(lab: &Lab, namespace: &str) -> Result<OperatorProcess> {
    let leases = json!([{
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "list", "watch", "create", "update"],
    }]);
    lab.grant(namespace, ACCOUNT, &leases).await?;
    lab.create(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: reads-everything}}
rules: [{{apiGroups: ['*'], resources: ['*'], verbs: [get, list, watch]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: reads-everything}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reads-everything}}
subjects: [{{kind: ServiceAccount, name: {ACCOUNT}, namespace: {namespace}}}]
"
    ))
    .await?;
    lab.run(OperatorProcessOptions {
        file: PathBuf::from(env!("CARGO_BIN_EXE_virt-operator")),
        namespace: namespace.to_owned(),
        service_account: ACCOUNT.to_owned(),
        arguments: ["--listen", "{address}"].map(str::to_owned).to_vec(),
        environment: vec![("VIRT_OPERATOR_IMAGE".to_owned(), IMAGE.to_owned())],
        through_proxy: false,
    })
    .await
}
