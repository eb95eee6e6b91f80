//! What is installed in a lab at one moment of its past.
//!
//! All kinds of objects share one store, so the version of one object dates all others: every kind is listed as it was
//! at that version. Objects that came a moment later are not in it, however long the listing takes.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams, TypeMeta, VersionMatch},
    discovery::{ApiGroup, Discovery, verbs},
};
use serde_json::Value;
use vitivirt_snapshot::{LEFT_OUT, Snapshot};

/// Served by virt-api, not from the store.
const AGGREGATED: [&str; 2] = ["subresources.kubevirt.io", "subresources.template.kubevirt.io"];
const AT_ONCE: usize = 6;

/// At this resource version, or now.
pub(crate) async fn take(client: &Client, at: Option<&str>) -> Result<Snapshot> {
    let discovery = Discovery::new(client.clone()).exclude(&AGGREGATED).run().await.context("discovery")?;
    let resources = discovery.groups().flat_map(ApiGroup::recommended_resources).filter(|(resource, offers)| {
        offers.supports_operation(verbs::LIST) && !LEFT_OUT.contains(&resource.plural.as_str())
    });
    let lists: Vec<Vec<Value>> = stream::iter(resources.map(|(resource, _)| list(client, resource, at)))
        .buffer_unordered(AT_ONCE)
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
    let items = answer(&api, &parameters).await.with_context(|| format!("listing {}", resource.plural))?;
    items
        .into_iter()
        .map(|object| {
            // Items of a list need not say what they are.
            let types = TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() };
            serde_json::to_value(DynamicObject { types: Some(types), ..object }).context("an object that is no JSON")
        })
        .collect()
}

/// A kind whose definition is new may ask for a moment's patience.
async fn answer(api: &Api<DynamicObject>, parameters: &ListParams) -> Result<Vec<DynamicObject>> {
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
