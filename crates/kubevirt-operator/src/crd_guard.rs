//! Refuses to work with CRDs of another product. Viti Stack has its own `machines.vitistack.io` with another schema: its
//! objects would look like Machines without a template, and the operator's writes would remove their fields.

use std::{
    fmt::{self, Display},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::{Api, Client, ResourceExt, api::ListParams};
use tokio::sync::Notify;
use vitivirt_api::{ErrorClass, ObjectKey, Target};
use vitivirt_runtime::{program::Context, reconcile::classify, watch::Cache};

use crate::cache::CrdVersion;

/// A field of the spec that only the operator's CRD has.
pub(crate) const OWN_FIELDS: [(&str, &str); 2] =
    [("machines.vitistack.io", "powerState"), ("networkconfigurations.vitistack.io", "bridge")];
const VERSION: &str = "v1alpha1";
/// How often a CRD of another product, or one that could not be read, is checked again.
const RETRY: Duration = Duration::from_secs(2);

/// Why the operator must not work.
#[derive(Debug, PartialEq)]
enum CrdProblem {
    /// A CRD belongs to another product.
    Foreign(String),
    /// Whether it does is unknown.
    Unreadable(String),
}

impl Display for CrdProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Foreign(text) | Self::Unreadable(text)) = self;
        f.write_str(text)
    }
}

/// Returns when none of the operator's CRDs belongs to another product. Logs each new problem once.
pub(crate) async fn wait(client: &Client) {
    let mut logged = None;
    while let Err(problem) = check(client).await {
        if logged.as_ref() != Some(&problem) {
            tracing::error!(%problem, "waiting for CRDs of this operator");
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

/// Logged when a CRD of another product appears. The program ends.
const REPLACED: &str = "CRD was replaced by that of another product";

/// Ends the program when a CRD of another product replaces one of the operator's. The program that is started in its place
/// waits for the CRD.
pub(crate) fn watch(context: &Context, crds: &Cache<CrdVersion>) {
    let changed = Arc::new(Notify::new());
    let notify = changed.clone();
    crds.subscribe(move |change| {
        if change.new.is_some() && OWN_FIELDS.iter().any(|(name, _)| change.key.name() == *name) {
            notify.notify_one();
        }
    });
    let (client, shutdown) = (context.clients.rate_limited.clone(), context.shutdown.clone());
    let check_changes = async move {
        loop {
            changed.notified().await;
            if let Some(problem) = find_foreign(&client).await {
                tracing::error!(problem, "{}", REPLACED);
                shutdown.cancel();
                return;
            }
        }
    };
    let shutdown = context.shutdown.clone();
    context.spawn("the check of CRDs", async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = check_changes => {}
        }
    });
}

/// A CRD of another product. Retries until the CRDs can be read.
async fn find_foreign(client: &Client) -> Option<String> {
    loop {
        match check(client).await {
            Ok(()) => return None,
            Err(CrdProblem::Foreign(problem)) => return Some(problem),
            Err(CrdProblem::Unreadable(problem)) => tracing::warn!(problem, "changed CRDs could not be checked"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Fails if one of the operator's CRDs belongs to another product, or if that is unknown. A CRD that does not exist is not
/// an error: the operator waits for it. An operator without the permission to read CRDs cannot check them.
async fn check(client: &Client) -> Result<(), CrdProblem> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (name, field) in OWN_FIELDS {
        let one = ListParams::default().fields(&format!("metadata.name={name}"));
        match crds.list(&one).await {
            Ok(found) => found.items.iter().try_for_each(|crd| check_crd(crd, field)).map_err(CrdProblem::Foreign)?,
            Err(error) => {
                let target = Target::of_kind::<CustomResourceDefinition>(ObjectKey::cluster(name));
                let failure = classify(&error, "list", &target);
                if failure.class != ErrorClass::Forbidden {
                    return Err(CrdProblem::Unreadable(failure.message));
                }
                tracing::warn!(error = %failure, crd = name, "CRD could not be checked");
            }
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
    use serde_json::{Value, json};

    use super::*;
    use crate::test_server;

    /// The API server may be starting when the operator starts.
    #[tokio::test]
    async fn only_a_missing_permission_skips_the_check() {
        let own: fn(&str) -> (u16, Value) = |path| {
            let crd = vitivirt_api::machine::crds().into_iter().find(|crd| path.contains(&crd.name_any()));
            (200, json!({"kind": "CustomResourceDefinitionList", "metadata": {}, "items": [crd.unwrap()]}))
        };
        let none: fn(&str) -> (u16, Value) =
            |_| (200, json!({"kind": "CustomResourceDefinitionList", "metadata": {}, "items": []}));
        for respond in [own, none] {
            assert_eq!(check(&test_server::client(respond).await).await, Ok(()));
        }
        let forbidden = "customresourcedefinitions.apiextensions.k8s.io is forbidden: User \"x\" cannot list resource \
                         \"customresourcedefinitions\" in API group \"apiextensions.k8s.io\" at the cluster scope";
        for (code, message, is_skipped) in
            [(403, forbidden, true), (500, "etcd", false), (503, "starting", false), (429, "later", false)]
        {
            let client = test_server::client(move |_| test_server::failure(code, message)).await;
            let result = check(&client).await;
            assert_eq!(result.is_ok(), is_skipped, "{code}");
            assert!(is_skipped || matches!(result, Err(CrdProblem::Unreadable(_))), "{code}");
        }
        assert!(matches!(check(&test_server::client_of("http://127.0.0.1:1")).await, Err(CrdProblem::Unreadable(_))));
    }

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
