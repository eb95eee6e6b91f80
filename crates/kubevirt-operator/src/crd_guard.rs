//! Refuses to work with CRDs of another product. Viti Stack has its own `machines.vitistack.io` with another schema: its
//! objects would look like Machines without a template, and the operator's writes would remove their fields.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::{Api, Client, ResourceExt, api::ListParams};

/// A field of the spec that only the operator's CRD has.
pub(crate) const OWN_FIELDS: [(&str, &str); 2] =
    [("machines.vitistack.io", "powerState"), ("networkconfigurations.vitistack.io", "bridge")];
const VERSION: &str = "v1alpha1";
/// How often a CRD of another product is checked again.
const RETRY: Duration = Duration::from_secs(5);

/// Returns when none of the operator's CRDs belongs to another product. Logs each new problem once.
pub(crate) async fn wait(client: &Client) {
    let mut logged = None;
    while let Err(problem) = check(client).await {
        if logged.as_ref() != Some(&problem) {
            tracing::error!(problem, "waiting for CRDs of this operator");
            logged = Some(problem);
        }
        tokio::time::sleep(RETRY).await;
    }
    if logged.is_some() {
        tracing::info!("{}", CONTINUES);
    }
}

/// Logged when the CRD of another product is gone.
const CONTINUES: &str = "CRDs belong to this operator now";

/// Fails if one of the operator's CRDs belongs to another product. A CRD that does not exist or cannot be read is not an
/// error: the operator waits for it.
async fn check(client: &Client) -> Result<(), String> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (name, field) in OWN_FIELDS {
        let one = ListParams::default().fields(&format!("metadata.name={name}"));
        match crds.list(&one).await {
            Ok(found) => found.items.iter().try_for_each(|crd| check_crd(crd, field))?,
            Err(error) => tracing::warn!(%error, crd = name, "CRD could not be checked"),
        }
    }
    Ok(())
}

pub(crate) fn check_crd(crd: &CustomResourceDefinition, field: &str) -> Result<(), String> {
    let version = crd.spec.versions.iter().find(|version| version.name == VERSION);
    let schema = version.and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref());
    let property = |schema: &JSONSchemaProps, name: &str| schema.properties.as_ref()?.get(name).cloned();
    let spec = schema.and_then(|schema| property(schema, "spec"));
    if spec.is_some_and(|spec| property(&spec, field).is_some()) {
        return Ok(());
    }
    Err(format!(
        "CustomResourceDefinition {} belongs to another product: version {VERSION} has no field spec.{field}; this operator \
         cannot work next to it; remove that product, or apply the output of `kubevirt-operator crds` if the CRD is \
         yours and outdated (this removes the fields of other products from their objects)",
        crd.name_any()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_own_crds_are_accepted_and_others_are_not() {
        for (crd, (name, field)) in vitivirt_api::machine::crds().into_iter().zip(OWN_FIELDS) {
            assert_eq!(crd.name_any(), name);
            assert_eq!(check_crd(&crd, field), Ok(()));
            let mut other = crd.clone();
            let schema = other.spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema.as_mut().unwrap();
            schema.properties.as_mut().unwrap().get_mut("spec").unwrap().properties.as_mut().unwrap().remove(field);
            assert!(check_crd(&other, field).unwrap_err().contains(name));
            let mut later = crd;
            later.spec.versions[0].name = "v1".to_owned();
            assert!(check_crd(&later, field).is_err());
        }
    }
}
