//! `adopt`: the consent of a user to take over existing objects. An object that no Machine had before needs consent of
//! its own, which the operator cannot give: an annotation that names the Machine.

use std::process::ExitCode;

use anyhow::anyhow;
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{PersistentVolumeClaim, Secret},
};
use kube::{
    Api, Resource,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use vitivirt_api::machine::{ANNOTATION_ADOPT, ANNOTATION_ADOPT_BY, Adoption};
use vitivirt_cli::{CommandError, CommandResult, print};
use vitivirt_runtime::root_cause::root_cause;

use crate::{arguments::AdoptArguments, cluster::NamespaceClient};

pub(crate) async fn run(arguments: &AdoptArguments) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    let name = &arguments.name;
    let mut machine = cluster.machine(name).await?;
    let items = if arguments.items.is_empty() {
        let description = kubevirt_operator::plugin::describe(cluster.client.clone(), machine.clone()).await?;
        if description.adoptable.is_empty() {
            let message = format!("Machine {}/{name} has nothing to take over", cluster.namespace);
            return Err(CommandError::Invalid(anyhow!(
                "{message}; name a UID, pvc/NAME or secret/NAME to add it anyway"
            )));
        }
        description.adoptable
    } else {
        arguments.items.clone()
    };
    let value = Adoption::from_metadata(&machine.metadata).with(items.iter().map(String::as_str));
    machine.metadata.annotations.get_or_insert_default().insert(ANNOTATION_ADOPT.to_owned(), value.clone());
    let adoption = Adoption::from_metadata(&machine.metadata);
    if let Some(item) = adoption.invalid_item() {
        let expected = "must be the UID of an earlier Machine, pvc/NAME or secret/NAME";
        return Err(CommandError::Invalid(anyhow!("invalid value {item:?}: {expected}")));
    }
    // Items that the user does not name may be of objects that do not exist any more.
    let pvcs: Vec<&str> = adoption.pvcs().filter(|pvc| items.contains(&Adoption::pvc_item(pvc))).collect();
    let secrets: Vec<&str> = adoption.secrets().filter(|name| items.contains(&Adoption::secret_item(name))).collect();
    if !arguments.dry_run {
        for pvc in &pvcs {
            consent::<PersistentVolumeClaim>(&cluster, pvc, name).await?;
        }
        for secret in &secrets {
            consent::<Secret>(&cluster, secret, name).await?;
        }
        // The resource version makes sure that a consent of another user in the meantime is not lost.
        let patch = json!({"metadata": {
            "resourceVersion": machine.metadata.resource_version, "annotations": {ANNOTATION_ADOPT: value},
        }});
        let patched = cluster.machines().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.map_err(|error| cluster.error(&error, "change", name))?;
    }
    let written = if arguments.dry_run { " (dry run)" } else { "" };
    let namespace = &cluster.namespace;
    let objects = pvcs.iter().map(|pvc| ("PersistentVolumeClaim", pvc));
    for (kind, object) in objects.chain(secrets.iter().map(|secret| ("Secret", secret))) {
        print(&format!("{kind} {namespace}/{object}: {ANNOTATION_ADOPT_BY}={name}{written}\n"))?;
    }
    print(&format!("Machine {namespace}/{name}: {ANNOTATION_ADOPT}={value}{written}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Lets the Machine take over this object.
async fn consent<K>(cluster: &NamespaceClient, object: &str, machine: &str) -> CommandResult<()>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let api: Api<K> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let patch = json!({"metadata": {"annotations": {ANNOTATION_ADOPT_BY: machine}}});
    match api.patch_metadata(object, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(error) => Err(CommandError::Failed(anyhow!(
            "cannot annotate {} {}/{object}: {}; nothing was changed in the Machine",
            K::kind(&()),
            cluster.namespace,
            root_cause(&error)
        ))),
    }
}
