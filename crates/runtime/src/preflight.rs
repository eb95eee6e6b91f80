//! Reads of a cluster for commands that check it.

use k8s_openapi::{
    api::coordination::v1::Lease, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{Api, Client, api::ListParams};

/// A CRD, by list, because the operator's account has no permission to get one.
pub async fn find_crd(client: &Client, name: &str) -> Result<Option<CustomResourceDefinition>, kube::Error> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    Ok(crds.list(&one).await?.items.into_iter().next())
}

/// Whether the API server serves the objects of the CRD.
pub fn is_established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|have| have.type_ == "Established" && have.status == "True")
}

/// The holder of a Lease, and the seconds since it was renewed.
pub async fn lease_holder(
    client: &Client,
    namespace: &str,
    name: &str,
    now: Timestamp,
) -> Result<Option<(String, i64)>, kube::Error> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let Some(lease) = leases.get_opt(name).await? else { return Ok(None) };
    let spec = lease.spec.unwrap_or_default();
    let age = spec.renew_time.map_or(i64::MAX, |renewed| now.as_second() - renewed.0.as_second());
    Ok(Some((spec.holder_identity.unwrap_or_default(), age)))
}
