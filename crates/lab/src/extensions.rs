//! CRDs of other projects that a cluster may have. Their schemas accept any object: the operators only detect whether
//! the kinds are served, and read and write objects of them.

use anyhow::{Context, Result};
use kube::Client;
use serde_json::{Value, json};

use crate::{manifests, snapshots};

/// A project whose CRDs a cluster may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// NetworkAttachmentDefinition
    Multus,
    /// ServiceMonitor and PrometheusRule
    Monitoring,
    /// DataVolume, DataSource, VolumeImportSource and CDI's own kinds
    Cdi,
    /// SecurityContextConstraints and Route
    OpenShift,
    /// VolumeSnapshot, VolumeSnapshotContent, and a VolumeSnapshotClass of the lab's storage, which takes snapshots
    Snapshots,
}

struct ExtensionKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    namespaced: bool,
}

const fn kind(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    namespaced: bool,
) -> ExtensionKind {
    ExtensionKind { group, version, kind, plural, namespaced }
}

impl Extension {
    fn kinds(self) -> &'static [ExtensionKind] {
        const MULTUS: &[ExtensionKind] =
            &[kind("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions", true)];
        const MONITORING: &[ExtensionKind] = &[
            kind("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors", true),
            kind("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules", true),
        ];
        const CDI: &[ExtensionKind] = &[
            kind("cdi.kubevirt.io", "v1beta1", "CDI", "cdis", false),
            kind("cdi.kubevirt.io", "v1beta1", "CDIConfig", "cdiconfigs", false),
            kind("cdi.kubevirt.io", "v1beta1", "DataVolume", "datavolumes", true),
            kind("cdi.kubevirt.io", "v1beta1", "DataSource", "datasources", true),
            kind("cdi.kubevirt.io", "v1beta1", "DataImportCron", "dataimportcrons", true),
            kind("cdi.kubevirt.io", "v1beta1", "StorageProfile", "storageprofiles", false),
            kind("cdi.kubevirt.io", "v1beta1", "VolumeImportSource", "volumeimportsources", true),
            kind("cdi.kubevirt.io", "v1beta1", "VolumeCloneSource", "volumeclonesources", true),
        ];
        const OPENSHIFT: &[ExtensionKind] = &[
            kind("security.openshift.io", "v1", "SecurityContextConstraints", "securitycontextconstraints", false),
            kind("route.openshift.io", "v1", "Route", "routes", true),
        ];
        const SNAPSHOTS: &[ExtensionKind] = &[
            kind(snapshots::GROUP, "v1", "VolumeSnapshotClass", "volumesnapshotclasses", false),
            kind(snapshots::GROUP, "v1", "VolumeSnapshotContent", "volumesnapshotcontents", false),
            kind(snapshots::GROUP, "v1", "VolumeSnapshot", "volumesnapshots", true),
        ];
        match self {
            Extension::Multus => MULTUS,
            Extension::Monitoring => MONITORING,
            Extension::Cdi => CDI,
            Extension::OpenShift => OPENSHIFT,
            Extension::Snapshots => SNAPSHOTS,
        }
    }
}

pub(crate) async fn install(client: &Client, extension: Extension) -> Result<()> {
    let mut documents: Vec<Value> = extension.kinds().iter().map(crd).collect();
    if extension == Extension::Snapshots {
        documents.push(snapshots::class());
    }
    manifests::create(client, &documents).await.with_context(|| format!("installing {extension:?}"))
}

fn crd(kind: &ExtensionKind) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        // Kubernetes asks for the annotation in its own groups.
        "metadata": {
            "name": format!("{}.{}", kind.plural, kind.group),
            "annotations": {"api-approved.kubernetes.io": "unapproved, simulated by the lab"},
        },
        "spec": {
            "group": kind.group,
            "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.to_lowercase(), "listKind": format!("{}List", kind.kind)},
            "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
            "versions": [{
                "name": kind.version,
                "served": true,
                "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    })
}
