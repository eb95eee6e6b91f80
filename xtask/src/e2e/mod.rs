//! `cargo xtask e2e`: runs KubeVirt's own end-to-end specs of virt-operator on a lab, with our virt-operator or with the
//! reference operator, and writes docs/compatibility.md from the two reports. The last result of each spec is kept in
//! target/e2e, so that a run of a few specs updates the page.
//!
//! The specs are a package of KubeVirt's module (`crates/lab/go/kubevirt-e2e`). They create VMIs, edit and delete the
//! KubeVirt resource, and change the Deployment of virt-operator.

mod page;
mod report;

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use futures::{StreamExt, TryStreamExt, stream};
use report::{Specs, spec_reports};
use serde_json::json;
use tokio::process::Command;
use vitivirt_api::KUBEVIRT_REGISTRY;
use vitivirt_lab::{
    DelayRange, Extension, GuestBehaviour, Lab, LabOptions, OwnProgram, PodBehaviour, VirtOperator,
    components::{self, ComponentGroup},
    isolate,
};

use crate::programs;

#[derive(Args, Clone)]
pub(crate) struct E2eOptions {
    /// The operator to test. Default: both, one after the other
    #[arg(long, value_enum)]
    operator: Option<TestedOperator>,
    /// Run only specs whose name matches this regular expression
    #[arg(long, value_name = "REGEX")]
    focus: Option<String>,
    /// Run each spec alone, in its own lab
    #[arg(long)]
    each: bool,
    /// With --each: number of labs at the same time
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "each")]
    jobs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TestedOperator {
    /// This project's virt-operator
    Ours,
    /// Upstream virt-operator of the same release
    Upstream,
}

impl TestedOperator {
    const BOTH: [Self; 2] = [Self::Upstream, Self::Ours];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Upstream => "upstream",
        }
    }

    fn operator(self) -> Result<VirtOperator> {
        Ok(match self {
            Self::Upstream => VirtOperator::reference(),
            // The specs derive the images of the components from the image of the operator.
            Self::Ours => VirtOperator {
                image: VirtOperator::reference().image,
                ..VirtOperator::ours(programs::stage("debug", "virt-operator")?)
            },
        })
    }
}

/// Specs that need something that the lab does not have, by a part of their name.
const NOT_ON_THE_LAB: [(&str, &str); 6] = [
    ("test_id:3145", "needs CDI and VMs with disks of real guests"),
    ("test_id:3150", "needs live migrations of real guests"),
    ("test_id:6987", "needs the device plugin of a real virt-handler"),
    ("test_id:2936", "needs Prometheus"),
    ("test_id:2910", "needs OpenShift"),
    ("install Kubevirt policy", "needs the files of a real node"),
];

const COMPONENTS: [ComponentGroup; 4] =
    [ComponentGroup::Etcd, ComponentGroup::Kubernetes, ComponentGroup::KubeVirt, ComponentGroup::KubeVirtE2e];
const NAMESPACE: &str = "kubevirt";
const RELEASE: &str = "v1.8.4";
/// A second tag and a prefix for the images of the same release.
const OTHER_TAG: &str = "v1.8.4-other";
const IMAGE_PREFIX: &str = "other-";
/// The specs poll once a second. An instant lab would complete an update between two of their checks.
const POD_START: DelayRange = DelayRange::millis(1_500, 3_000);
const GUEST_START: DelayRange = DelayRange::millis(2_000, 3_000);

pub(crate) fn run(options: &E2eOptions) -> ExitCode {
    isolate::run(
        || {
            components::ensure(&COMPONENTS)?;
            programs::build(false).map(|_| ())
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(compare(options)).map(|()| ExitCode::SUCCESS)
        },
    )
}

async fn compare(options: &E2eOptions) -> Result<()> {
    let operators = options.operator.map_or(TestedOperator::BOTH.to_vec(), |operator| vec![operator]);
    let folder = programs::target_dir()?.join("e2e");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut failed = Vec::new();
    for operator in operators {
        let specs = if options.each {
            Box::pin(each(operator, options, &folder)).await?
        } else {
            Box::pin(in_lab(operator, options.focus.as_deref(), &folder)).await?
        };
        println!("{}: {specs}", operator.name());
        failed.extend(specs.failed().map(|spec| format!("{}: {}: {}", operator.name(), spec.name, spec.failure)));
        specs.after(Specs::read(&folder, operator)?).write(&folder, operator)?;
    }
    page::write(&folder)?;
    for spec in &failed {
        println!("failed: {spec}");
    }
    ensure!(failed.is_empty(), "{} specs failed; their logs are in {}", failed.len(), folder.display());
    Ok(())
}

/// Each spec in its own lab, so that no spec depends on what another one left.
async fn each(operator: TestedOperator, options: &E2eOptions, folder: &Path) -> Result<Specs> {
    let names = list(options.focus.as_deref(), folder).await?;
    let count = names.len();
    let runs = names.into_iter().zip(1..).map(|(name, number)| async move {
        let own = folder.join(format!("each-{}", operator.name())).join(number.to_string());
        fs::create_dir_all(&own).with_context(|| format!("creating {}", own.display()))?;
        let specs = Box::pin(in_lab(operator, Some(&exactly(&name)), &own)).await?;
        let spec = specs.only().with_context(|| format!("running {name}"))?;
        eprintln!("{number} of {count}: {name}: {}", if spec.has_passed() { "passed" } else { "failed" });
        anyhow::Ok(spec)
    });
    let specs = stream::iter(runs).buffered(options.jobs.max(1)).try_collect().await?;
    Ok(Specs { specs })
}

/// A regular expression for one name.
fn exactly(name: &str) -> String {
    let quoted: String = name
        .chars()
        .flat_map(|character| {
            let quote = !character.is_alphanumeric() && character.is_ascii() && character != ' ';
            quote.then_some('\\').into_iter().chain([character])
        })
        .collect();
    format!("{quoted}$")
}

/// The names of all specs that can run.
async fn list(focus: Option<&str>, folder: &Path) -> Result<Vec<String>> {
    let report = folder.join("list.json");
    let mut command = specs(focus, &report)?;
    command.arg("--ginkgo.dry-run");
    let output = command.output().await.context("listing the specs")?;
    ensure!(output.status.success(), "the specs cannot be listed: {}", String::from_utf8_lossy(&output.stderr));
    let specs = spec_reports(&report)?.specs;
    Ok(specs.into_iter().filter(|spec| !spec.is_skipped()).map(|spec| spec.name).collect())
}

fn specs(focus: Option<&str>, report: &Path) -> Result<Command> {
    let mut command = Command::new(components::kubevirt_specs()?);
    command.args(["--ginkgo.no-color", "--ginkgo.succinct", "--ginkgo.timeout=4h"]);
    command.arg(format!("--ginkgo.json-report={}", report.display()));
    command.args(NOT_ON_THE_LAB.map(|(name, _)| format!("--ginkgo.skip={name}")));
    command.args(focus.map(|focus| format!("--ginkgo.focus={focus}")));
    command.kill_on_drop(true);
    Ok(command)
}

async fn in_lab(operator: TestedOperator, focus: Option<&str>, folder: &Path) -> Result<Specs> {
    let lab = Lab::start(LabOptions {
        extensions: vec![Extension::Multus, Extension::Monitoring],
        pods: PodBehaviour { ready_after: POD_START, ..PodBehaviour::default() },
        guests: GuestBehaviour { boots_after: GUEST_START, ..GuestBehaviour::default() },
        ..LabOptions::default()
    })
    .await?;
    let name = format!("e2e-{}", operator.name());
    let specs = lab.keeping_logs(&name, play(&lab, operator, focus, folder)).await?;
    if specs.failed().next().is_some() {
        lab.copy_logs(&folder.join(format!("{}-lab", operator.name())))?;
    }
    lab.stop().await?;
    Ok(specs)
}

async fn play(lab: &Lab, operator: TestedOperator, focus: Option<&str>, folder: &Path) -> Result<Specs> {
    prepare(lab, operator).await?;
    let report = folder.join(format!("{}-ginkgo.json", operator.name()));
    let config = folder.join("config.json");
    fs::write(&config, "{}").context("writing the configuration of the specs")?;
    let log = folder.join(format!("{}.log", operator.name()));
    let output = fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    let mut command = specs(focus, &report)?;
    command.arg("--apply-default-e2e-configuration");
    for (option, value) in [
        ("kubeconfig", lab.kubeconfig().display().to_string()),
        ("installed-namespace", NAMESPACE.to_owned()),
        ("container-prefix", KUBEVIRT_REGISTRY.to_owned()),
        ("container-tag", RELEASE.to_owned()),
        ("container-tag-alt", OTHER_TAG.to_owned()),
        ("image-prefix-alt", IMAGE_PREFIX.to_owned()),
        ("config", config.display().to_string()),
        ("artifacts", folder.display().to_string()),
    ] {
        command.arg(format!("--{option}={value}"));
    }
    command.stdout(output.try_clone()?).stderr(output);
    let status = command.status().await.context("running the specs")?;
    // A spec that fails is part of the report. Without a report, the program itself failed.
    spec_reports(&report).with_context(|| format!("the specs ended with {status}; see {}", log.display()))
}

/// What the suite expects of a cluster in which it runs.
async fn prepare(lab: &Lab, tested: TestedOperator) -> Result<()> {
    let operator = tested.operator()?;
    if let Some(file) = operator.program.clone() {
        lab.add_program(OwnProgram { image: format!("kubevirt/{IMAGE_PREFIX}virt-operator"), file });
    }
    let labels = json!({"kubevirt.io": "disks-images-provider"});
    for object in [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}}),
        json!({
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "prometheus-k8s", "namespace": "monitoring"},
        }),
    ] {
        lab.create(&object.to_string()).await?;
    }
    lab.create_virt_operator(&operator).await?;
    lab.deploy_kubevirt(None).await?;
    let image = format!("{KUBEVIRT_REGISTRY}/disks-images-provider");
    let images = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "disks-images-provider", "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "target", "image": image}]},
            },
        },
    });
    lab.create(&images.to_string()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_spec_is_quoted() {
        assert_eq!(exactly("[a:1] b's c."), r"\[a\:1\] b\'s c\.$");
    }
}
