//! KubeVirt's CRDs without an installation.
//!
//! The reference operator is the only built program that contains them, and it writes them only to a cluster: into
//! a ConfigMap with its install strategy. The lab runs it once against its own API server, extracts the CRDs and caches
//! them next to the built components.

use std::{io::Read, path::Path, process::Stdio};

use anyhow::{Context, Result, bail};
use k8s_openapi::{ByteString, api::core::v1::ConfigMap};
use kube::{Api, Client, ResourceExt, api::ListParams};
use serde_json::Value;

use super::{
    NAMESPACE,
    operator::{REFERENCE_IMAGE, namespace},
};
use crate::{
    components::{self, ComponentGroup},
    manifests,
};

/// Every CRD that virt-operator installs. The KubeVirt CRD itself is not among them.
pub(crate) async fn crds(client: &Client, kubeconfig: &Path) -> Result<Vec<Value>> {
    let operator = components::binary(ComponentGroup::KubeVirt, "virt-operator")?;
    let cache = operator.with_file_name("crds.json");
    if let Ok(text) = std::fs::read(&cache)
        && let Ok(crds) = serde_json::from_slice(&text)
    {
        return Ok(crds);
    }
    manifests::create(client, &[namespace()]).await?;
    let output = tokio::process::Command::new(&operator)
        .arg("--dump-install-strategy")
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .env_clear()
        .env("VIRT_OPERATOR_IMAGE", REFERENCE_IMAGE)
        .env(
            "TARGET_DEPLOYMENT_CONFIG",
            format!(r#"{{"namespace":"{NAMESPACE}","registry":"quay.io/kubevirt","kubeVirtVersion":"v1.8.4"}}"#),
        )
        .stdin(Stdio::null())
        .output()
        .await
        .context("running virt-operator --dump-install-strategy")?;
    if !output.status.success() {
        bail!("virt-operator --dump-install-strategy failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let dumped = maps.list(&ListParams::default().labels("kubevirt.io/install-strategy")).await?;
    let map = dumped.items.first().context("virt-operator did not write an install strategy")?;
    let crds = crds_of(map)?;
    maps.delete(&map.name_any(), &Default::default()).await.context("deleting the install strategy")?;
    // Written to a temporary file and renamed, so that another lab never reads an incomplete file.
    let file = tempfile::NamedTempFile::new_in(cache.parent().unwrap_or(Path::new(".")))?;
    serde_json::to_writer(&file, &crds).context("caching the CRDs")?;
    file.persist(&cache).context("caching the CRDs")?;
    Ok(crds)
}

fn crds_of(map: &ConfigMap) -> Result<Vec<Value>> {
    let encoded =
        map.data.as_ref().and_then(|data| data.get("manifests")).context("the install strategy has no manifests")?;
    let compressed: ByteString =
        serde_json::from_value(Value::String(encoded.trim().to_owned())).context("not base64")?;
    let mut yaml = String::new();
    flate2::read::GzDecoder::new(compressed.0.as_slice()).read_to_string(&mut yaml).context("not gzip")?;
    // Only the CRDs are parsed: the rest is long.
    let documents = yaml.split("\n---\n").filter(|document| document.contains("kind: CustomResourceDefinition"));
    let mut crds = Vec::new();
    for document in documents {
        crds.extend(manifests::parse(document)?);
    }
    if crds.is_empty() {
        bail!("the install strategy contains no CRDs");
    }
    Ok(crds)
}
