//! Creates the objects of YAML documents, like `kubectl create`, or replaces them, like `kubectl replace`.

use anyhow::{Context, Result};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, PostParams},
    core::GroupVersionKind,
    discovery::{Scope, oneshot},
};
use serde_json::Value;

/// The documents of a YAML text, without empty ones.
pub fn parse(yaml: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).map_err(|error| anyhow::anyhow!("invalid YAML: {error}"))?;
    Ok(documents.into_iter().filter(Value::is_object).collect())
}

/// Creates the objects in this order, also those of a kind whose CRD stands before them. An object that already exists is
/// not changed.
pub async fn create(client: &Client, documents: &[Value]) -> Result<()> {
    for (position, document) in documents.iter().enumerate() {
        wait_until_kind_is_served(client, document, documents.get(..position).unwrap_or_default()).await?;
        let (api, object) = parse_object(client, document).await?;
        match api.create(&PostParams::default(), &object).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(error).with_context(|| format!("creating {}", object.name_any())),
        }
    }
    wait_until_all_are_served(client, documents).await
}

async fn wait_until_all_are_served(client: &Client, documents: &[Value]) -> Result<()> {
    for crd in documents.iter().filter(|document| is_crd(document)) {
        wait_until_served(client, crd).await?;
    }
    Ok(())
}

/// Waits until the API server serves the kind of a document, if one of the documents before is its CRD.
async fn wait_until_kind_is_served(client: &Client, document: &Value, before: &[Value]) -> Result<()> {
    let group = document.get("apiVersion").and_then(Value::as_str).and_then(|version| version.split('/').next());
    let defines = |crd: &Value| {
        crd.pointer("/spec/names/kind") == document.get("kind")
            && crd.pointer("/spec/group").and_then(Value::as_str) == group
    };
    for crd in before.iter().filter(|earlier| is_crd(earlier) && defines(earlier)) {
        wait_until_served(client, crd).await?;
    }
    Ok(())
}

fn is_crd(document: &Value) -> bool {
    document.get("kind").is_some_and(|kind| kind == CRD)
}

/// Creates the objects, and replaces those that already exist.
pub async fn replace(client: &Client, documents: &[Value]) -> Result<()> {
    for (position, document) in documents.iter().enumerate() {
        wait_until_kind_is_served(client, document, documents.get(..position).unwrap_or_default()).await?;
        let (api, mut object) = parse_object(client, document).await?;
        let name = object.name_any();
        let what = || format!("replacing {name}");
        match api.get_opt(&name).await.with_context(what)? {
            Some(live) => {
                object.metadata.resource_version = live.resource_version();
                api.replace(&name, &PostParams::default(), &object).await.with_context(what)?;
            }
            None => drop(api.create(&PostParams::default(), &object).await.with_context(what)?),
        }
    }
    wait_until_all_are_served(client, documents).await
}

const CRD: &str = "CustomResourceDefinition";

/// The API server serves a new kind shortly after it has accepted the CRD.
async fn wait_until_served(client: &Client, crd: &Value) -> Result<()> {
    let text = |pointer: &str| crd.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let versions = crd.pointer("/spec/versions").and_then(Value::as_array).into_iter().flatten();
    for version in versions.filter_map(|version| version.get("name").and_then(Value::as_str)) {
        // No `limit` parameter: the API server then answers from its cache, which becomes ready last.
        let path = format!("/apis/{}/{version}/{}", text("/spec/group"), text("/spec/names/plural"));
        let served = async {
            while client.request_text(http::Request::get(&path).body(Vec::new())?).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(TIMEOUT, served)
            .await
            .with_context(|| format!("{path} was not served within {TIMEOUT:?}"))??;
    }
    Ok(())
}

const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// The object of a document, and the API for its kind and namespace.
async fn parse_object(client: &Client, document: &Value) -> Result<(Api<DynamicObject>, DynamicObject)> {
    let object: DynamicObject =
        serde_json::from_value(document.clone()).context("the document is not a Kubernetes object")?;
    let types = object.types.clone().context("the document has no kind")?;
    let kind = GroupVersionKind::try_from(&types).context("the document has an invalid apiVersion")?;
    let (resource, capabilities) = oneshot::pinned_kind(client, &kind)
        .await
        .with_context(|| format!("the API server does not serve kind {}", types.kind))?;
    let api: Api<DynamicObject> = match (capabilities.scope, object.namespace()) {
        (Scope::Namespaced, namespace) => {
            Api::namespaced_with(client.clone(), namespace.as_deref().unwrap_or("default"), &resource)
        }
        (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
    };
    Ok((api, object))
}
