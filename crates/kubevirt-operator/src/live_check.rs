//! The live check before the operator deletes data: it reads from the API server what a cache shows or does not show.
//!
//! If the VM of a deleted Machine does not exist, the next steps delete its PVCs and remove the finalizer. If no VMI
//! uses the user data, they delete its Secret. If a PVC never had a volume or a VMI never ran, an edit replaces it. An object
//! that gets the Machine as its owner is deleted with the Machine, and owner references say how a Machine is deleted whose
//! deletion the operator did not see begin. None of this can be undone. A cache may be stale, or may have lost all objects
//! of a kind to an API server that was just starting, so it is not enough to decide this.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{Api, Client, ResourceExt, api::ListParams, core::DynamicObject};
use vitivirt_api::{
    ApiResource, Failure, ObjectKey, Target,
    machine::{LABEL_MACHINE, LABEL_MACHINE_UID, Machine},
    reason,
    resources::{virtual_machine_instance_resource, virtual_machine_resource},
};
use vitivirt_machine::{
    Observed,
    observed::{PvcView, SecretView, VmiView},
    render::cloud_init::secret_name,
};
use vitivirt_runtime::reconcile::classify;

use crate::cache::{PvcEntry, SecretEntry, VmEntry, VmiEntry, entry};

/// The PVCs of one page of a list. Each may have more than a megabyte.
const PAGE: u32 = 20;
/// More PVCs than a Machine has.
const MAX_PVCS: usize = 500;

pub(crate) struct LiveCheck {
    pub(crate) client: Client,
}

impl LiveCheck {
    /// Reads the VM and the VMI before the PVCs are deleted, and all PVCs of the Machine if neither exists. Reads the Secret
    /// too if owner references decide how the Machine is deleted.
    pub(crate) async fn confirm_vm_gone(
        &self,
        observed: &mut Observed,
        is_kubevirt_removed: bool,
    ) -> Result<(), Failure> {
        let key = observed.id.key();
        // An API server that is starting does not serve the kind yet, although its objects exist.
        let or_removed = |failure: Failure| match failure.reason {
            reason::API_NOT_INSTALLED if is_kubevirt_removed => Ok(None),
            _ => Err(failure),
        };
        let vm = self.get(virtual_machine_resource(), &key).await.or_else(or_removed)?;
        observed.vm = vm.map(|vm| VmEntry::view(&entry(&vm.metadata.clone(), VmEntry::project(vm))));
        if observed.vmi.is_none() {
            observed.vmi = self.get_vmi(observed).await.or_else(|failure| match failure.reason {
                reason::API_NOT_INSTALLED if is_kubevirt_removed => Ok(None),
                _ => Err(failure),
            })?;
        }
        if observed.own_vm().is_none() && observed.vmi.is_none() {
            self.add_pvcs(observed).await?;
        }
        if observed.is_deleted_as_owners_say() {
            observed.secret = self.get_secret(observed).await?;
        }
        Ok(())
    }

    /// Reads the VMI and the Secret before the Secret is deleted: a VMI may use it, or another client may have replaced
    /// it.
    pub(crate) async fn confirm_secret_unused(&self, observed: &mut Observed) -> Result<(), Failure> {
        observed.vmi = self.get_vmi(observed).await?;
        observed.secret = self.get_secret(observed).await?;
        Ok(())
    }

    /// Reads what the plan deletes because of its state: PVCs that never had a volume, and a VMI that never ran.
    pub(crate) async fn confirm_replaced(
        &self,
        observed: &mut Observed,
        pvcs: Vec<String>,
        vmi: bool,
    ) -> Result<(), Failure> {
        for name in pvcs {
            match self.get_pvc(observed, &name).await? {
                Some(view) => _ = observed.pvcs.insert(name, view),
                None => _ = observed.pvcs.remove(&name),
            }
        }
        if vmi {
            observed.vmi = self.get_vmi(observed).await?;
        }
        Ok(())
    }

    /// Fails with a conflict if the Machine does not exist or is being deleted.
    pub(crate) async fn confirm_machine(&self, observed: &mut Observed) -> Result<(), Failure> {
        let api: Api<Machine> = Api::namespaced(self.client.clone(), observed.namespace());
        let target = Target::of_kind::<Machine>(observed.id.key());
        let live = api.get_metadata_opt(observed.name()).await.map_err(|error| classify(&error, "get", &target))?;
        observed.machine_confirmed = live.is_some_and(|live| {
            live.metadata.uid.as_deref() == Some(observed.uid()) && live.metadata.deletion_timestamp.is_none()
        });
        if observed.machine_confirmed { Ok(()) } else { Err(changed(&target)) }
    }

    /// The Machine in the generation that was observed.
    pub(crate) async fn get_machine(&self, observed: &Observed) -> Result<Machine, Failure> {
        let api: Api<Machine> = Api::namespaced(self.client.clone(), observed.namespace());
        let target = Target::of_kind::<Machine>(observed.id.key());
        let live = api.get_opt(observed.name()).await.map_err(|error| classify(&error, "get", &target))?;
        let own = &observed.machine.metadata;
        live.filter(|live| (&live.metadata.uid, live.metadata.generation) == (&own.uid, own.generation))
            .ok_or_else(|| changed(&target))
    }

    /// The metadata of the cloud-init Secret.
    async fn get_secret(&self, observed: &Observed) -> Result<Option<SecretView>, Failure> {
        let name = secret_name(observed.name());
        let api: Api<Secret> = Api::namespaced(self.client.clone(), observed.namespace());
        let secret = api
            .get_metadata_opt(&name)
            .await
            .map_err(|error| classify(&error, "get", &Target::of_kind::<Secret>(observed.id.sibling(&name))))?;
        Ok(secret.map(|secret| SecretEntry::view(&entry(&secret.metadata.clone(), SecretEntry::project(secret)))))
    }

    /// The PVC, also if the cache does not have it.
    pub(crate) async fn get_pvc(&self, observed: &Observed, name: &str) -> Result<Option<PvcView>, Failure> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), observed.namespace());
        let found = api.get_opt(name).await.map_err(|error| {
            classify(&error, "get", &Target::of_kind::<PersistentVolumeClaim>(observed.id.sibling(name)))
        })?;
        Ok(found.map(|pvc| PvcEntry::live_view(&entry(&pvc.metadata.clone(), PvcEntry::project(pvc)))))
    }

    /// The Machine's VMI. A VMI of the same name that the operator's VM did not create is ignored, so that it does not
    /// block the deletion.
    async fn get_vmi(&self, observed: &Observed) -> Result<Option<VmiView>, Failure> {
        let vmi = self.get(virtual_machine_instance_resource(), &observed.id.key()).await?;
        let vmi = vmi.filter(|vmi| belongs_to_machine(vmi, observed.name()));
        let vmi = vmi.map(|vmi| entry(&vmi.metadata.clone(), VmiEntry::project(vmi)));
        Ok(vmi.filter(|entry| entry.value.belongs_to(observed)).as_ref().map(VmiEntry::live_view))
    }

    /// None if the object does not exist. It is an error if the API server does not serve the kind.
    async fn get(&self, resource: ApiResource, key: &ObjectKey) -> Result<Option<DynamicObject>, Failure> {
        let namespace = key.namespace().unwrap_or_default();
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        let found = api.get(key.name()).await;
        match found.map_err(|error| classify(&error, "get", &Target::new(resource, key.clone()))) {
            Ok(object) => Ok(Some(object)),
            Err(failure) if failure.reason == reason::OBJECT_GONE => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Adds every PVC with the Machine's UID as its label. Any client can set the label, so the pages are small, and the
    /// number of PVCs is limited. Without all of them nothing is deleted.
    async fn add_pvcs(&self, observed: &mut Observed) -> Result<(), Failure> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), observed.namespace());
        let label = format!("{LABEL_MACHINE_UID}={}", observed.uid());
        let mut page = ListParams::default().labels(&label).limit(PAGE);
        let mut found = 0;
        loop {
            let list = api.list(&page).await.map_err(|error| {
                let target = Target::of_kind::<PersistentVolumeClaim>(observed.id.sibling(""));
                classify(&error, "list", &target)
            })?;
            found += list.items.len();
            if found > MAX_PVCS {
                let message = format!(
                    "more than {MAX_PVCS} PersistentVolumeClaims have the label {label}; remove it from those that do not \
                     have a disk of the Machine"
                );
                return Err(Failure::transient(reason::TOO_MANY_OBJECTS, message));
            }
            for pvc in list.items {
                let (name, metadata) = (pvc.name_any(), pvc.metadata.clone());
                observed.pvcs.insert(name, PvcEntry::live_view(&entry(&metadata, PvcEntry::project(pvc))));
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

fn changed(machine: &Target) -> Failure {
    let message = format!("{machine} has changed, but its watch event has not arrived yet");
    Failure::conflict(reason::OBJECT_CHANGED, message)
}

/// KubeVirt copies the labels of a VM's template to the VMI, and the operator's template names the Machine.
fn belongs_to_machine(vmi: &DynamicObject, machine: &str) -> bool {
    vmi.labels().get(LABEL_MACHINE).map(String::as_str) == Some(machine)
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_server;

    /// A server with this number of PVCs in pages, each of which contains the position of the next one as its token. Returns
    /// the result, the number of PVCs that were found, and the number of requests.
    async fn add_pvcs(pvcs: usize) -> (Result<(), Failure>, usize, usize) {
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        let respond = move |path: &str| {
            counted.fetch_add(1, Relaxed);
            let parameter = |name: &str| {
                let value = path.split(['?', '&']).find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
                value.and_then(|value| value.parse::<usize>().ok())
            };
            let start = parameter("continue").unwrap_or_default();
            let end = parameter("limit").map_or(pvcs, |limit| pvcs.min(start + limit));
            let pvc = |number: usize| json!({"metadata": {"name": format!("web-{number}"), "namespace": "shop"}});
            let items: Vec<Value> = (start..end).map(pvc).collect();
            let token = (end < pvcs).then(|| end.to_string());
            (200, json!({"kind": "PersistentVolumeClaimList", "metadata": {"continue": token}, "items": items}))
        };
        let machine = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"}, "spec": {},
        });
        let mut observed = Observed::new(serde_json::from_value(machine).unwrap(), Timestamp::UNIX_EPOCH).unwrap();
        let check = LiveCheck { client: test_server::client(respond).await };
        let result = check.add_pvcs(&mut observed).await;
        (result, observed.pvcs.len(), requests.load(Relaxed))
    }

    #[tokio::test]
    async fn the_pvcs_of_a_machine_are_read_in_pages_and_limited() {
        for (pvcs, pages) in [(0, 1), (20, 1), (45, 3), (MAX_PVCS, 25)] {
            assert_eq!(add_pvcs(pvcs).await, (Ok(()), pvcs, pages));
        }
        let (result, _, pages) = add_pvcs(100_000).await;
        let failure = result.unwrap_err();
        assert_eq!((failure.reason, pages), (reason::TOO_MANY_OBJECTS, 26));
        assert!(failure.message.contains("vitistack.io/machine-uid=u"), "{failure}");
    }

    #[test]
    fn a_vmi_without_the_machines_label_does_not_belong_to_it() {
        let mut vmi = DynamicObject::new("web", &virtual_machine_instance_resource());
        assert!(!belongs_to_machine(&vmi, "web"));
        vmi.labels_mut().insert(LABEL_MACHINE.to_owned(), "other".to_owned());
        assert!(!belongs_to_machine(&vmi, "web"));
        vmi.labels_mut().insert(LABEL_MACHINE.to_owned(), "web".to_owned());
        assert!(belongs_to_machine(&vmi, "web"));
    }
}
