//! What is installed in a lab at one moment.
//!
//! All kinds share one etcd, so a resource version of any object identifies a moment for all kinds: each kind is listed
//! at that version. Objects that were created later are not in the snapshot, however long the listing takes.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams, TypeMeta, VersionMatch},
    discovery::{ApiGroup, Discovery, verbs},
};
use serde_json::Value;
use vitivirt_snapshot::{EXCLUDED_RESOURCES, Snapshot};

/// Served by virt-api, not from etcd.
const AGGREGATED: [&str; 2] = ["subresources.kubevirt.io", "subresources.template.kubevirt.io"];
const CONCURRENT_LISTS: usize = 6;

/// Takes a snapshot at this resource version, or now.
pub(crate) async fn take(client: &Client, at: Option<&str>) -> Result<Snapshot> {
    let discovery =
        Discovery::new(client.clone()).exclude(&AGGREGATED).run().await.context("discovering the served kinds")?;
    let resources = discovery.groups().flat_map(ApiGroup::recommended_resources).filter(|(resource, capabilities)| {
        capabilities.supports_operation(verbs::LIST) && !EXCLUDED_RESOURCES.contains(&resource.plural.as_str())
    });
    let lists: Vec<Vec<Value>> = stream::iter(resources.map(|(resource, _)| list(client, resource, at)))
        .buffer_unordered(CONCURRENT_LISTS)
        .try_collect()
        .await?;
    Ok(vitivirt_snapshot::take(lists.into_iter().flatten()))
}

async fn list(client: &Client, resource: ApiResource, at: Option<&str>) -> Result<Vec<Value>> {
    let parameters = match at {
        Some(version) => ListParams::default().at(version).matching(VersionMatch::Exact),
        None => ListParams::default(),
    };
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let items = list_with_retry(&api, &parameters).await.with_context(|| format!("listing {}", resource.plural))?;
    items
        .into_iter()
        .map(|object| {
            // Items of a list may have no apiVersion and kind.
            let types = TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() };
            serde_json::to_value(DynamicObject { types: Some(types), ..object }).context("converting an object to JSON")
        })
        .collect()
}

/// The API server may answer 429 or 503 for a kind whose CRD is new.
async fn list_with_retry(api: &Api<DynamicObject>, parameters: &ListParams) -> Result<Vec<DynamicObject>> {
    let mut attempts = 0;
    loop {
        match api.list(parameters).await {
            Ok(list) => return Ok(list.items),
            Err(kube::Error::Api(status)) if matches!(status.code, 429 | 503) && attempts < 20 => {
                attempts += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}
