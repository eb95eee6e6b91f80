//! The last look before something is deleted that nothing brings back: what a cache shows, or does not show, is asked of the
//! server.
//!
//! When the VM seems to be gone, the next steps delete the disks and drop the finalizer; when no guest seems to need its
//! user data, they delete that. A cache may lag, or have lost a whole kind to an API server that was just starting; so its
//! word is not enough.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::api::ListParams;
use kube::core::DynamicObject;
use kube::{Api, Client, ResourceExt};
use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MACHINE_UID};
use vitivirt_api::resources::{virtual_machine_instance_resource, virtual_machine_resource};
use vitivirt_api::{ApiResource, Failure, ObjectKey, Target};
use vitivirt_machine::Observed;
use vitivirt_machine::observed::VmiView;
use vitivirt_machine::render::cloud_init::secret_name;
use vitivirt_runtime::reconcile::classify;

use crate::cache::{PvcEntry, SecretEntry, VmEntry, VmiEntry, entry};

pub(crate) struct LiveCheck {
    pub(crate) client: Client,
}

impl LiveCheck {
    pub(crate) async fn complete(&self, observed: &mut Observed) -> Result<(), Failure> {
        let key = observed.id.key();
        let vm = self.read(virtual_machine_resource(), &key).await?;
        observed.vm = vm.map(|vm| VmEntry::view(&entry(&vm.metadata.clone(), VmEntry::project(vm))));
        if observed.vmi.is_none() {
            observed.vmi = self.guest(&key).await?;
        }
        if observed.vm.is_none() && observed.vmi.is_none() {
            self.pvcs(observed).await?;
        }
        Ok(())
    }

    /// Before user data is discarded: the guest that runs, and whether the Secret is still ours.
    pub(crate) async fn user_data(&self, observed: &mut Observed) -> Result<(), Failure> {
        observed.vmi = self.guest(&observed.id.key()).await?;
        let name = secret_name(observed.name());
        let api: Api<Secret> = Api::namespaced(self.client.clone(), observed.namespace());
        let secret = api
            .get_metadata_opt(&name)
            .await
            .map_err(|error| classify(&error, "get", &Target::of::<Secret>(observed.id.sibling(&name))))?;
        observed.secret =
            secret.map(|secret| SecretEntry::view(&entry(&secret.metadata.clone(), SecretEntry::project(secret))));
        Ok(())
    }

    /// Somebody's own instance of the same name is none of ours, and must not hold up anything.
    async fn guest(&self, key: &ObjectKey) -> Result<Option<VmiView>, Failure> {
        let vmi = self.read(virtual_machine_instance_resource(), key).await?.filter(|vmi| is_of(vmi, key.name()));
        Ok(vmi.map(|vmi| VmiEntry::view(&entry(&vmi.metadata.clone(), VmiEntry::project(vmi)))))
    }

    /// None: there is no such object, or no such kind.
    async fn read(&self, resource: ApiResource, key: &ObjectKey) -> Result<Option<DynamicObject>, Failure> {
        let namespace = key.namespace().unwrap_or_default();
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        let found = api.get_opt(key.name()).await;
        found.map_err(|error| classify(&error, "get", &Target::new(resource, key.clone())))
    }

    async fn pvcs(&self, observed: &mut Observed) -> Result<(), Failure> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), observed.namespace());
        let carried = ListParams::default().labels(&format!("{LABEL_MACHINE_UID}={}", observed.uid()));
        let found = api.list(&carried).await.map_err(|error| {
            let target = Target::of::<PersistentVolumeClaim>(observed.id.sibling(""));
            classify(&error, "list", &target)
        })?;
        for pvc in found.items {
            let (name, metadata) = (pvc.name_any(), pvc.metadata.clone());
            observed.pvcs.insert(name, PvcEntry::view(&entry(&metadata, PvcEntry::project(pvc))));
        }
        Ok(())
    }
}

/// KubeVirt gives an instance the labels of its VM's template, and ours name the Machine.
fn is_of(vmi: &DynamicObject, machine: &str) -> bool {
    vmi.labels().get(LABEL_MACHINE).map(String::as_str) == Some(machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_instance_is_not_waited_for() {
        let mut vmi = DynamicObject::new("web", &virtual_machine_instance_resource());
        assert!(!is_of(&vmi, "web"));
        vmi.labels_mut().insert(LABEL_MACHINE.to_owned(), "other".to_owned());
        assert!(!is_of(&vmi, "web"));
        vmi.labels_mut().insert(LABEL_MACHINE.to_owned(), "web".to_owned());
        assert!(is_of(&vmi, "web"));
    }
}
