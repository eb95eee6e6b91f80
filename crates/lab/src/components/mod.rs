//! The Go programs that a lab runs, built from pinned modules and cached by version.
//!
//! Each group is a `go.mod` with a `tool` block and a `go.sum`: the checksums determine what is built. Only the group
//! `KubeVirtE2e` has Go code of this project. The files are embedded, so that every program that links the lab can build
//! them.

mod build;
mod toolchain;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use crate::{hex::hex, paths};

/// A set of programs that are built from one Go module graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComponentGroup {
    Etcd,
    Kubernetes,
    /// KubeVirt v1.8.4, the release that virt-operator installs.
    KubeVirt,
    /// KubeVirt v1.7.0, the release that upgrade tests start from.
    KubeVirtPrevious,
    /// KubeVirt's own end-to-end specs of virt-operator, of the same release as [`ComponentGroup::KubeVirt`].
    KubeVirtE2e,
    /// Helm v3.22.0.
    Helm3,
    /// Helm v4.3.1.
    Helm4,
    /// Prometheus 3.15 with promtool, and the CRDs of the Prometheus operator.
    Monitoring,
    /// Tools of other projects that read the image: crane, a client of registries which also has a registry, and umoci,
    /// which unpacks OCI layouts.
    Packaging,
}

/// The groups for tests of the Helm charts.
pub const HELM: [ComponentGroup; 2] = [ComponentGroup::Helm3, ComponentGroup::Helm4];

/// The groups for a lab with the reference operator.
pub const STANDARD: [ComponentGroup; 3] = [ComponentGroup::Etcd, ComponentGroup::Kubernetes, ComponentGroup::KubeVirt];

/// The groups for a lab in which the previous release is upgraded.
pub const WITH_PREVIOUS: [ComponentGroup; 4] =
    [ComponentGroup::Etcd, ComponentGroup::Kubernetes, ComponentGroup::KubeVirt, ComponentGroup::KubeVirtPrevious];

/// The groups for a lab with Prometheus.
pub const WITH_MONITORING: [ComponentGroup; 4] =
    [ComponentGroup::Etcd, ComponentGroup::Kubernetes, ComponentGroup::KubeVirt, ComponentGroup::Monitoring];

struct Recipe {
    name: &'static str,
    go_mod: &'static str,
    go_sum: &'static str,
    /// Go files of this project, by name.
    sources: &'static [(&'static str, &'static str)],
    /// The name that `go build` gives the binary, and the name in the lab.
    binaries: &'static [(&'static str, &'static str)],
    /// Variables that the linker sets, so that the programs report their version.
    linker_variables: &'static [(&'static str, &'static str)],
    /// Build tags.
    tags: &'static str,
    /// Files of modules that no program is built from.
    files: &'static [ModuleFile],
}

/// A file of a Go module that the group contains as it is.
struct ModuleFile {
    /// With the version.
    module: &'static str,
    /// The checksum of the module, as in a `go.sum`.
    sum: &'static str,
    path: &'static str,
    name: &'static str,
}

const PROMETHEUS_OPERATOR: &str = "github.com/prometheus-operator/prometheus-operator@v0.85.0";
const PROMETHEUS_OPERATOR_SUM: &str = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=";
const MONITORING_CRDS: &[ModuleFile] = &[
    ModuleFile {
        module: PROMETHEUS_OPERATOR,
        sum: PROMETHEUS_OPERATOR_SUM,
        path: "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        name: "prometheusrules.yaml",
    },
    ModuleFile {
        module: PROMETHEUS_OPERATOR,
        sum: PROMETHEUS_OPERATOR_SUM,
        path: "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        name: "servicemonitors.yaml",
    },
];

macro_rules! module {
    ($folder:literal) => {
        (include_str!(concat!("../../go/", $folder, "/go.mod")), include_str!(concat!("../../go/", $folder, "/go.sum")))
    };
}

impl ComponentGroup {
    fn recipe(self) -> Recipe {
        const VIRT: &[(&str, &str)] = &[
            ("virt-api", "virt-api"),
            ("virt-controller", "virt-controller"),
            ("virt-operator", "virt-operator"),
            ("resource-generator", "resource-generator"),
        ];
        let (name, (go_mod, go_sum), binaries, linker_variables): (_, _, &[_], &[_]) = match self {
            ComponentGroup::Etcd => ("etcd", module!("etcd"), &[("server", "etcd")], &[]),
            ComponentGroup::Kubernetes => (
                "kubernetes",
                module!("kubernetes"),
                &[
                    ("kube-apiserver", "kube-apiserver"),
                    ("kube-controller-manager", "kube-controller-manager"),
                    ("kube-scheduler", "kube-scheduler"),
                    ("kubectl", "kubectl"),
                ],
                &[
                    ("k8s.io/component-base/version.gitVersion", "v1.36.3"),
                    ("k8s.io/component-base/version.gitMajor", "1"),
                    ("k8s.io/component-base/version.gitMinor", "36"),
                    ("k8s.io/client-go/pkg/version.gitVersion", "v1.36.3"),
                ],
            ),
            ComponentGroup::KubeVirt => {
                ("kubevirt", module!("kubevirt"), VIRT, &[("kubevirt.io/client-go/version.gitVersion", "v1.8.4")])
            }
            ComponentGroup::KubeVirtPrevious => (
                "kubevirt-previous",
                module!("kubevirt-previous"),
                VIRT,
                &[("kubevirt.io/client-go/version.gitVersion", "v1.7.0")],
            ),
            ComponentGroup::KubeVirtE2e => (
                "kubevirt-e2e",
                module!("kubevirt-e2e"),
                &[("kubevirt-e2e", "kubevirt-e2e")],
                &[("kubevirt.io/client-go/version.gitVersion", "v1.8.4")],
            ),
            ComponentGroup::Helm3 => (
                "helm3",
                module!("helm3"),
                &[("helm", "helm")],
                &[
                    ("helm.sh/helm/v3/internal/version.version", "v3.22.0"),
                    // The Kubernetes version that `helm template` and `helm lint` assume without a cluster.
                    ("helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor", "36"),
                    ("helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor", "36"),
                ],
            ),
            ComponentGroup::Helm4 => (
                "helm4",
                module!("helm4"),
                &[("helm", "helm")],
                &[("helm.sh/helm/v4/internal/version.version", "v4.3.1")],
            ),
            ComponentGroup::Monitoring => (
                "monitoring",
                module!("monitoring"),
                &[("prometheus", "prometheus"), ("promtool", "promtool")],
                &[("github.com/prometheus/common/version.Version", "3.15.0")],
            ),
            ComponentGroup::Packaging => {
                ("packaging", module!("packaging"), &[("crane", "crane"), ("umoci", "umoci")], &[])
            }
        };
        // Without the clients of all clouds in which Prometheus can discover targets.
        let (tags, files): (_, &[_]) = match self {
            ComponentGroup::Monitoring => ("remove_all_sd", MONITORING_CRDS),
            _ => ("", &[]),
        };
        let sources: &[_] = match self {
            ComponentGroup::KubeVirtE2e => &[
                ("main.go", include_str!("../../go/kubevirt-e2e/main.go")),
                ("kubelet.go", include_str!("../../go/kubevirt-e2e/kubelet.go")),
            ],
            _ => &[],
        };
        Recipe { name, go_mod, go_sum, sources, binaries, linker_variables, tags, files }
    }

    /// The folder of the built binaries. Its name contains a hash of everything that influences them.
    fn folder(self) -> Result<PathBuf> {
        let recipe = self.recipe();
        let mut hash = Sha256::new();
        for text in [recipe.go_mod, recipe.go_sum] {
            hash.update(text);
        }
        for (variable, value) in recipe.linker_variables.iter().chain(recipe.sources) {
            hash.update(variable);
            hash.update(value);
        }
        for file in recipe.files {
            hash.update(file.module);
            hash.update(file.path);
        }
        hash.update(recipe.tags);
        let digest = hex(&hash.finalize());
        Ok(paths::components_dir()?.join(format!("{}-{digest:.12}", recipe.name)))
    }

    fn is_built(self) -> Result<bool> {
        let folder = self.folder()?;
        let recipe = self.recipe();
        let binaries = recipe.binaries.iter().map(|(_, binary)| *binary);
        let mut files = binaries.chain(recipe.files.iter().map(|file| file.name));
        Ok(files.all(|file| folder.join(file).is_file()))
    }
}

/// Builds the groups that are not built yet. It needs the network, so it runs before the lab creates its namespaces.
pub fn ensure(groups: &[ComponentGroup]) -> Result<()> {
    let missing: Vec<ComponentGroup> = groups
        .iter()
        .copied()
        .filter_map(|group| Some(group).filter(|group| !matches!(group.is_built(), Ok(true))))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    toolchain::check()?;
    for group in missing {
        build::build(group)?;
    }
    Ok(())
}

/// A text that changes when the sources of one of these groups change.
pub fn versions(groups: &[ComponentGroup]) -> Result<String> {
    let names = groups.iter().map(|group| {
        let folder = group.folder()?;
        Ok(folder.file_name().unwrap_or_default().to_string_lossy().into_owned())
    });
    Ok(names.collect::<Result<Vec<_>>>()?.join(" "))
}

/// The path of a program. `KUBEBUILDER_ASSETS` may provide etcd and kube-apiserver.
pub(crate) fn binary(group: ComponentGroup, name: &str) -> Result<PathBuf> {
    if matches!(name, "etcd" | "kube-apiserver")
        && let Some(assets) = std::env::var_os("KUBEBUILDER_ASSETS")
        && let path = Path::new(&assets).join(name)
        && path.is_file()
    {
        return Ok(path);
    }
    let path = group.folder()?.join(name);
    if !path.is_file() {
        bail!("{name} has not been built; run `cargo xtask lab build` with network access");
    }
    Ok(path)
}

/// The program with KubeVirt's end-to-end specs of virt-operator.
pub fn kubevirt_specs() -> Result<PathBuf> {
    binary(ComponentGroup::KubeVirtE2e, "kubevirt-e2e")
}

/// The real Prometheus.
pub fn prometheus() -> Result<PathBuf> {
    binary(ComponentGroup::Monitoring, "prometheus")
}

/// The tool of Prometheus that checks and tests rules.
pub fn promtool() -> Result<PathBuf> {
    binary(ComponentGroup::Monitoring, "promtool")
}

/// The CRDs of ServiceMonitor and PrometheusRule, as the Prometheus operator installs them.
pub fn monitoring_crds() -> Result<Vec<PathBuf>> {
    MONITORING_CRDS.iter().map(|file| binary(ComponentGroup::Monitoring, file.name)).collect()
}

/// crane: a client of registries, and a registry.
pub fn crane() -> Result<PathBuf> {
    binary(ComponentGroup::Packaging, "crane")
}

/// umoci: unpacks OCI layouts.
pub fn umoci() -> Result<PathBuf> {
    binary(ComponentGroup::Packaging, "umoci")
}

/// The folder with kubectl, for a user's PATH.
pub fn kubectl_dir() -> Result<PathBuf> {
    ComponentGroup::Kubernetes.folder()
}

/// The folder with Helm 4, for a user's PATH.
pub fn helm_dir() -> Result<PathBuf> {
    ComponentGroup::Helm4.folder()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_checksums_and_lists_its_binaries_as_tools() {
        for group in [
            ComponentGroup::Etcd,
            ComponentGroup::Kubernetes,
            ComponentGroup::KubeVirt,
            ComponentGroup::KubeVirtPrevious,
            ComponentGroup::KubeVirtE2e,
            ComponentGroup::Helm3,
            ComponentGroup::Helm4,
            ComponentGroup::Monitoring,
            ComponentGroup::Packaging,
        ] {
            let recipe = group.recipe();
            assert!(!recipe.go_sum.is_empty(), "{} has no checksums", recipe.name);
            for (built, _) in recipe.binaries.iter().filter(|(built, _)| *built != "server") {
                assert!(recipe.go_mod.contains(&format!("/{built}\n")), "{built} is not a tool of {}", recipe.name);
            }
        }
    }
}
