//! The content of files: Machines and the objects that these refer to, as a cluster that contains nothing else.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use k8s_openapi::{
    api::{core::v1::Secret, storage::v1::StorageClass},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::Resource;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use vitivirt_api::{
    ObjectKey,
    machine::{Machine, NetworkConfiguration},
};
use vitivirt_cli::Document;
use vitivirt_machine::{
    Observed, SecretBytes,
    observed::{NetworkView, SourceView, StorageClassView},
    resolve::SecretSource,
};

use super::neighbours::{Neighbour, Neighbours};
use crate::{
    cache::{ClassEntry, entry},
    manifests::to_json,
};

/// The objects of the files, by kind. Other kinds are ignored.
#[derive(Default)]
pub(super) struct Files {
    pub(super) machines: Vec<Machine>,
    networks: BTreeMap<ObjectKey, NetworkConfiguration>,
    secrets: BTreeMap<ObjectKey, Secret>,
    classes: Vec<StorageClass>,
    /// The names of the namespaces in the files.
    pub(super) namespaces: BTreeSet<String>,
    schemas: BTreeMap<String, Value>,
    /// The objects that are ignored.
    pub(super) warnings: Vec<String>,
}

impl Files {
    /// An object without a namespace is in `namespace`.
    pub(super) fn from_documents(documents: &[Document], namespace: &str) -> Result<Self> {
        let mut files = Files { schemas: schemas()?, ..Files::default() };
        for document in documents {
            files.add(document, namespace)?;
        }
        if files.machines.is_empty() {
            let found: Vec<String> = documents.iter().map(ToString::to_string).collect();
            bail!(
                "no Machine found in the files{}",
                if found.is_empty() { String::new() } else { format!("; found: {}", found.join("; ")) }
            );
        }
        Ok(files)
    }

    fn add(&mut self, document: &Document, namespace: &str) -> Result<()> {
        match document.kind() {
            "Machine" => {
                let machine: Machine = self.custom_resource(document, namespace)?;
                let key = ObjectKey::from_metadata(&machine.metadata);
                if self.machines.iter().any(|other| ObjectKey::from_metadata(&other.metadata) == key) {
                    bail!("{document}: duplicate: Machine {key} is already in the files");
                }
                self.machines.push(machine);
            }
            "NetworkConfiguration" => {
                let network: NetworkConfiguration = self.custom_resource(document, namespace)?;
                self.networks.insert(ObjectKey::from_metadata(&network.metadata), network);
            }
            "Secret" => {
                let mut secret: Secret = document.typed_secret()?;
                secret.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
                self.secrets.insert(ObjectKey::from_metadata(&secret.metadata), secret);
            }
            "StorageClass" => {
                let class = StorageClass::deserialize(&document.object);
                self.classes.push(class.with_context(|| format!("{document}: invalid object"))?);
            }
            "Namespace" => {
                let name = document.object.pointer("/metadata/name").and_then(Value::as_str);
                self.namespaces.extend(name.map(str::to_owned));
            }
            _ => self.warnings.push(format!(
                "{document}: ignored: only Machine, NetworkConfiguration, Secret, StorageClass and Namespace are used"
            )),
        }
        Ok(())
    }

    fn custom_resource<K>(&self, document: &Document, namespace: &str) -> Result<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned,
    {
        let schema = self.schemas.get(document.kind()).unwrap_or(&Value::Null);
        let mut object = document.typed::<K>(&K::api_version(&()), schema)?;
        let metadata = object.meta_mut();
        if metadata.name.as_deref().unwrap_or_default().is_empty() {
            bail!("{document}: metadata.name: required value");
        }
        // Empty is absent, as for the API server.
        metadata.uid.take_if(|uid| uid.is_empty());
        metadata.namespace.take_if(|namespace| namespace.is_empty());
        metadata.namespace.get_or_insert_with(|| namespace.to_owned());
        Ok(object)
    }

    /// Adds what the cluster would also contain if the files were applied to it.
    pub(super) fn add_to(&self, observed: &mut Observed) {
        for (name, network) in self.networks(&observed.machine) {
            match observed.networks.get_mut(&name) {
                Some(live) => (live.vlan, live.bridge) = (network.vlan, network.bridge),
                None => drop(observed.networks.insert(name, network)),
            }
        }
        if let SourceView::Read(bytes) = self.source(&observed.machine) {
            observed.source = SourceView::Read(bytes);
        }
    }

    /// Adds the Machines and networks of the files, which replace those of the same names.
    pub(super) fn add_to_neighbours(&self, neighbours: &mut Neighbours) {
        for (position, machine) in self.machines.iter().enumerate() {
            neighbours.add_machine(ObjectKey::from_metadata(&machine.metadata), Neighbour::new(machine, position));
        }
        for (key, network) in &self.networks {
            neighbours.add_network(key.clone(), (network.spec.bridge.clone(), network.spec.vlan));
        }
    }

    /// A cluster that has every API and contains only what is in the files. `neighbours` is what they contain too.
    pub(super) fn observed(&self, machine: Machine, neighbours: &Neighbours) -> Result<Observed> {
        let parsed = Observed::new(machine, Timestamp::UNIX_EPOCH)?;
        let machine = &parsed.machine;
        Ok(Observed {
            networks: self.networks(machine),
            storage_classes: self.classes(machine),
            source: self.source(machine),
            macs_in_use: neighbours.macs_in_use(&parsed),
            ..parsed
        })
    }

    /// The networks that the Machine names.
    fn networks(&self, machine: &Machine) -> BTreeMap<String, NetworkView> {
        let named = machine.spec.networks.iter().map(|network| &network.network_name);
        named
            .filter_map(|name| {
                Some((
                    name.clone(),
                    network_view(self.networks.get(&ObjectKey::from_metadata(&machine.metadata).sibling(name))?),
                ))
            })
            .collect()
    }

    /// Without a StorageClass in the files, every one that the Machine names exists, and a default one without a name.
    fn classes(&self, machine: &Machine) -> Vec<StorageClassView> {
        if self.classes.is_empty() {
            let view = |name: &str, is_default: bool| StorageClassView {
                name: name.to_owned(),
                is_default,
                waits_for_consumer: false,
                allows_expansion: true,
            };
            let named = machine.spec.disks.iter().filter_map(|disk| disk.storage_class.as_deref());
            let named = named.filter(|name| *name != "default").map(|name| view(name, false));
            return named.chain([view("", true)]).collect();
        }
        let all = self.classes.iter().map(|class| {
            let name = class.metadata.name.as_deref().unwrap_or_default();
            (ObjectKey::cluster(name), entry(&class.metadata, ClassEntry::project(class.clone())))
        });
        ClassEntry::views(all.collect())
    }

    fn source(&self, machine: &Machine) -> SourceView {
        let reference = machine.spec.cloud_init.as_ref().and_then(|given| given.secret_ref.as_ref());
        let Some(source) = reference.map(SecretSource::from) else { return SourceView::NotNeeded };
        let Some(secret) = self.secrets.get(&ObjectKey::from_metadata(&machine.metadata).sibling(&source.name)) else {
            return SourceView::SecretMissing;
        };
        let text =
            secret.string_data.as_ref().and_then(|data| data.get(&source.key)).map(|text| text.clone().into_bytes());
        let bytes = secret.data.as_ref().and_then(|data| data.get(&source.key)).map(|bytes| bytes.0.clone());
        text.or(bytes).map_or(SourceView::KeyMissing, |bytes| SourceView::Read(SecretBytes(bytes)))
    }
}

/// The schemas of the CRDs of this operator, by kind.
fn schemas() -> Result<BTreeMap<String, Value>> {
    let schema_of = |crd: CustomResourceDefinition| {
        let version = crd.spec.versions.into_iter().next();
        let schema = version.and_then(|version| version.schema?.open_api_v3_schema).unwrap_or_default();
        Ok((crd.spec.names.kind, to_json(&schema)?))
    };
    vitivirt_api::machine::crds().into_iter().map(schema_of).collect()
}

/// Stands for the UID that a cluster assigns. Machines have different ones, because MAC addresses are derived from it.
pub(super) fn placeholder_uid(number: usize) -> String {
    format!("00000000-0000-0000-0000-{number:012x}")
}

fn network_view(network: &NetworkConfiguration) -> NetworkView {
    NetworkView {
        uid: network.metadata.uid.clone().unwrap_or_else(|| placeholder_uid(0)),
        vlan: network.spec.vlan,
        bridge: network.spec.bridge.clone(),
        finalizer_index: Some(0),
        deleting: false,
        other_users: false,
    }
}
