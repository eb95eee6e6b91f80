//! KubeVirt's resource definitions without an installation.
//!
//! The only built program that knows them is the reference virt-operator, and it only tells a cluster: it leaves a
//! ConfigMap with everything it would install. The lab runs it once against its own API server, takes the definitions
//! out and keeps them beside the built parts.

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

/// Every CRD that KubeVirt installs besides its own.
pub(crate) async fn resource_definitions(client: &Client, kubeconfig: &Path) -> Result<Vec<Value>> {
    let operator = components::binary(ComponentGroup::KubeVirt, "virt-operator")?;
    let cache = operator.with_file_name("crds.json");
    if let Ok(text) = std::fs::read(&cache)
        && let Ok(definitions) = serde_json::from_slice(&text)
    {
        return Ok(definitions);
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
    let map = dumped.items.first().context("virt-operator left no install strategy")?;
    let definitions = definitions(map)?;
    maps.delete(&map.name_any(), &Default::default()).await.context("removing the install strategy")?;
    // Beside the part and moved into place, so that two labs at once never see half of it.
    let fresh = tempfile::NamedTempFile::new_in(cache.parent().unwrap_or(Path::new(".")))?;
    serde_json::to_writer(&fresh, &definitions).context("keeping the definitions")?;
    fresh.persist(&cache).context("keeping the definitions")?;
    Ok(definitions)
}

fn definitions(map: &ConfigMap) -> Result<Vec<Value>> {
    let encoded = map.data.as_ref().and_then(|data| data.get("manifests")).context("the install strategy is empty")?;
    let compressed: ByteString =
        serde_json::from_value(Value::String(encoded.trim().to_owned())).context("not base64")?;
    let mut yaml = String::new();
    flate2::read::GzDecoder::new(compressed.0.as_slice()).read_to_string(&mut yaml).context("not gzip")?;
    // Only the definitions are parsed: the rest is long.
    let wanted = yaml.split("\n---\n").filter(|document| document.contains("kind: CustomResourceDefinition"));
    let mut definitions = Vec::new();
    for document in wanted {
        definitions.extend(manifests::parse(document)?);
    }
    if definitions.is_empty() {
        bail!("the install strategy holds no resource definitions");
    }
    Ok(definitions)
}
