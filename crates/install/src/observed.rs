//! Everything that a pass over a KubeVirt resource decides on, the time included.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use vitivirt_api::{Failure, ObjectKey, Plan, Target, Write, kubevirt::KubeVirt};

use crate::{
    certificates::Issued,
    config::DeploymentConfig,
    drift::{Drift, drift},
    installation::Installation,
    kind::Kind,
    live::LiveObject,
    names::annotation,
    object::Object,
    report::refusal,
    validation, warnings,
};

pub struct Observed {
    pub kubevirt: KubeVirt,
    /// The KubeVirt resource that was there first, if this is not it: a cluster has one installation.
    pub earlier: Option<ObjectKey>,
    /// Where the operator itself is. An installation is in the same namespace.
    pub operator_namespace: String,
    /// As Kubernetes names it: `amd64`.
    pub architecture: &'static str,
    pub now: Timestamp,
    pub desired: Desired,
    pub issued: Arc<dyn Issued + Send + Sync>,
    /// Something is due to be issued at this time.
    pub renewal: Option<Timestamp>,
    /// Everything that an operator of KubeVirt manages, its own namespace included.
    pub objects: Objects,
    pub namespace: Option<Arc<LiveObject>>,
    /// Where other clusters reach virt-synchronization-controller.
    pub synchronization: Vec<String>,
    /// Digests of objects that were found to be as wanted, or that the server has made of what we want: they are not
    /// compared again until they change or something else is wanted.
    pub up_to_date: Arc<UpToDate>,
    /// Whether absence from `objects` is absence from the cluster, and the resource is the newest there is.
    pub complete: bool,
    /// Definitions that are no longer wanted, but of which there are objects.
    pub in_use: BTreeSet<ObjectKey>,
}

pub type UpToDate = HashMap<(Kind, ObjectKey), u64>;

impl Observed {
    /// Why nothing can be installed for this resource.
    pub(crate) fn impossible(&self) -> Option<&Failure> {
        match &self.desired {
            Desired::Invalid(failure) => Some(failure),
            Desired::Installation(_) | Desired::StrategyPending(_) => None,
        }
    }

    pub(crate) fn installation(&self) -> Option<&Installation> {
        match &self.desired {
            Desired::Installation(installation) => Some(installation),
            Desired::StrategyPending(_) | Desired::Invalid(_) => None,
        }
    }

    /// What whoever wrote the resource should know, one sentence for each.
    pub fn warnings(&self) -> Vec<String> {
        warnings::messages(warnings::all(&self.kubevirt, self.installation()))
    }

    /// What need not be compared again after a pass: what it found to be as wanted, and what the server answered to
    /// its writes. Where the server writes a value in words of its own, that answer is as wanted too; without it such
    /// an object would be patched again and again.
    pub fn up_to_date_after(&self, plan: &Plan, stored_objects: &StoredObjects) -> UpToDate {
        let mut up_to_date = UpToDate::clone(&self.up_to_date);
        let Desired::Installation(installation) = &self.desired else { return up_to_date };
        if refusal(self).is_some() {
            return up_to_date;
        }
        let writes = plan.steps.iter().flat_map(|step| &step.writes);
        let writes: HashMap<&Target, &Write> = writes.map(|write| (write.target(), write)).collect();
        for object in &installation.objects {
            let key = (object.kind, object.key.clone());
            let digest = match writes.get(&object.target()) {
                Some(write) => stored_objects.get(&key).and_then(|answer| self.stored_matches(object, write, answer)),
                None => self.objects.get(object.kind, &object.key).map(|live| live.digest),
            };
            match digest {
                Some(digest) => up_to_date.insert(key, digest),
                None => up_to_date.remove(&key),
            };
        }
        up_to_date
    }

    /// The digest of an answer, if it is what we want: as far as the server lets it, and without what somebody else
    /// wrote at the same time.
    fn stored_matches(&self, object: &Object, write: &Write, answer: &LiveObject) -> Option<u64> {
        let Write::Patch { operations, .. } = write else { return Some(answer.digest) };
        let wanted = object.body(&*self.issued).ok()?;
        let right = match drift(object.kind, wanted.json(), answer).ok()? {
            Drift::None => true,
            Drift::Patch(left) => {
                left.iter().all(|left| operations.iter().any(|operation| operation.path == left.path))
            }
            Drift::Replace => false,
        };
        right.then_some(answer.digest)
    }
}

/// What the server answered to writes.
pub type StoredObjects = HashMap<(Kind, ObjectKey), LiveObject>;

/// What the resource asks for.
#[derive(Clone)]
pub enum Desired {
    Installation(Arc<Installation>),
    /// Another release, whose own operator has not yet told what it consists of.
    StrategyPending(Arc<DeploymentConfig>),
    /// The resource cannot be understood.
    Invalid(Failure),
}

impl Desired {
    /// Another release is asked what it consists of only for a resource that can be installed.
    pub fn strategy(kubevirt: &KubeVirt, config: DeploymentConfig) -> Result<Self, Failure> {
        validation::sound(kubevirt)?;
        Ok(Self::StrategyPending(Arc::new(config)))
    }
}

/// LiveObject objects by kind and place.
#[derive(Clone, Default)]
pub struct Objects(BTreeMap<(Kind, ObjectKey), Arc<LiveObject>>);

impl Objects {
    pub fn insert(&mut self, kind: Kind, key: ObjectKey, live: Arc<LiveObject>) {
        self.0.insert((kind, key), live);
    }

    /// One that an operator of KubeVirt made. Another of the name is found out when it is to be created.
    pub fn get(&self, kind: Kind, key: &ObjectKey) -> Option<&Arc<LiveObject>> {
        self.0.get(&(kind, key.clone())).filter(|live| live.is_ours())
    }

    pub fn of(&self, kind: Kind) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        self.0.iter().filter(move |((of, _), live)| *of == kind && live.is_ours()).map(|((_, key), live)| (key, live))
    }

    pub fn all(&self) -> impl Iterator<Item = (Kind, &ObjectKey, &Arc<LiveObject>)> {
        self.0.iter().filter(|(_, live)| live.is_ours()).map(|((kind, key), live)| (*kind, key, live))
    }

    /// The newest text of the strategy of a deployment.
    pub fn strategy(&self, identifier: &str) -> Option<(&ObjectKey, &Arc<LiveObject>)> {
        let of_it = |(_, live): &(&ObjectKey, &Arc<LiveObject>)| {
            live.is_strategy && !live.deleting && live.annotation(annotation::IDENTIFIER) == identifier
        };
        self.of(Kind::ConfigMap).filter(of_it).max_by_key(|(_, live)| live.created)
    }
}
