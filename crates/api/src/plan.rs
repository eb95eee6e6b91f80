//! The steps of a reconcile as data: the writes (`Plan`), their result (`Outcome`), and the status and events
//! (`Report`).
//!
//! Only the executor of `vitivirt-runtime` turns these into requests. Bodies may contain user data and keys, so nothing
//! here prints a body: `Debug` of a write shows its verb and its target.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use kube_core::{ApiResource, Resource};
use serde::Serialize;
use serde_json::Value;

use crate::{Failure, ObjectKey, reason};

/// The object that a write is for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Target {
    pub resource: ApiResource,
    pub key: ObjectKey,
}

impl Target {
    pub fn new(resource: ApiResource, key: ObjectKey) -> Self {
        Self { resource, key }
    }

    /// An object of a kind that has a Rust type.
    pub fn of_kind<K: Resource<DynamicType = ()>>(key: ObjectKey) -> Self {
        Self { resource: ApiResource::erase::<K>(&()), key }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.resource.kind, self.key)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The JSON of an object. It has no `Debug`, because the object may be a Secret.
#[derive(Clone, PartialEq, Hash)]
pub struct Body(Value);

impl Body {
    pub fn from_object<T: Serialize>(object: &T) -> Result<Self, Failure> {
        serde_json::to_value(object)
            .map(Self)
            .map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("object cannot be serialized: {error}")))
    }

    pub fn json(&self) -> &Value {
        &self.0
    }

    pub fn into_json(self) -> Value {
        self.0
    }
}

impl From<Value> for Body {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

/// One request that changes an object.
#[derive(Clone, PartialEq)]
pub enum Write {
    /// The first write of an object, a POST. If the name already exists, the executor reads the live object and asks
    /// the controller whether it owns it.
    Create { target: Target, body: Body },
    /// Server-side apply with the UID, so that it fails on a re-created object. Use it for fields that were always
    /// applied: a new finalizer, or a part of another client's object. It never removes a field that a `Create` wrote:
    /// the server records a POST in a separate entry of `managedFields` (operation `Update`), and a field that is no
    /// longer applied stays while another entry contains it.
    Apply { target: Target, uid: String, body: Body },
    /// A JSON patch that first tests the UID. Use it for objects that a `Create` wrote, and for fields that must be
    /// exact: a replaced field loses what other clients added to it, while server-side apply would keep that.
    Patch { target: Target, uid: String, operations: Vec<Operation> },
    /// A DELETE with the UID as a precondition. An object that does not exist counts as deleted. The garbage collector
    /// deletes its dependents in the background. With a resource version it fails if the object has changed since: use
    /// that when the state of the object is the reason for the deletion.
    Delete { target: Target, uid: String, resource_version: Option<String> },
    /// One of the above with a large body, which the executor builds just before it sends it and drops afterwards. It
    /// has the same verb and target.
    Lazy { target: Target, verb: &'static str, make: LazyWrite },
    /// Server-side apply of the status subresource, with the UID and the newest known resource version. The version is
    /// needed because the server overwrites the UID of a custom resource before it compares it.
    Status { target: Target, uid: String, body: Body },
}

impl Write {
    pub fn target(&self) -> &Target {
        match self {
            Self::Create { target, .. }
            | Self::Apply { target, .. }
            | Self::Patch { target, .. }
            | Self::Delete { target, .. }
            | Self::Lazy { target, .. }
            | Self::Status { target, .. } => target,
        }
    }

    /// The verb as RBAC names it.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Apply { .. } | Self::Patch { .. } | Self::Status { .. } => "patch",
            Self::Delete { .. } => "delete",
            Self::Lazy { verb, .. } => verb,
        }
    }

    /// A digest of what the write changes, to recognize a write that is planned again. The body of a lazy write is not
    /// part of it.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match self {
            Self::Create { body, .. } => body.hash(&mut hasher),
            Self::Apply { uid, body, .. } | Self::Status { uid, body, .. } => (uid, body).hash(&mut hasher),
            Self::Patch { uid, operations, .. } => (uid, operations).hash(&mut hasher),
            Self::Delete { uid, resource_version, .. } => (uid, resource_version).hash(&mut hasher),
            Self::Lazy { verb, .. } => verb.hash(&mut hasher),
        }
        hasher.finish()
    }

    /// A write that `make` builds. `make` must return a write with the same verb and target.
    pub fn lazy(
        target: Target,
        verb: &'static str,
        make: impl Fn() -> Result<Self, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self::Lazy { target, verb, make: LazyWrite(Arc::new(make)) }
    }
}

/// Builds a write. Two are equal only if one is a clone of the other.
#[derive(Clone)]
pub struct LazyWrite(Arc<dyn Fn() -> Result<Write, Failure> + Send + Sync>);

impl LazyWrite {
    pub fn make(&self) -> Result<Write, Failure> {
        (self.0)()
    }
}

impl PartialEq for LazyWrite {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Create { .. } => "Create",
            Self::Apply { .. } => "Apply",
            Self::Patch { .. } => "Patch",
            Self::Delete { .. } => "Delete",
            Self::Lazy { .. } => "LazyWrite",
            Self::Status { .. } => "Status",
        };
        write!(f, "{name}({})", self.target())
    }
}

/// One operation of a JSON patch. Its values may be user data, so it has no `Debug`.
#[derive(Clone, PartialEq, Hash)]
pub struct Operation {
    /// A JSON pointer.
    pub path: String,
    /// None removes the field.
    pub value: Option<Value>,
    /// The value that the server must have, or it rejects the whole patch; null if the field must be absent.
    pub expecting: Option<Value>,
}

impl Operation {
    /// Sets a field, whether it exists or not. The parent must exist.
    pub fn set(path: impl Into<String>, value: Value) -> Self {
        Self { path: path.into(), value: Some(value), expecting: None }
    }

    pub fn remove(path: impl Into<String>) -> Self {
        Self { path: path.into(), value: None, expecting: None }
    }

    /// Apply the patch only if the server still has the observed value: for fields that other clients write too.
    #[must_use]
    pub fn expecting(self, observed: Value) -> Self {
        Self { expecting: Some(observed), ..self }
    }

    /// A key, escaped as one part of a JSON pointer.
    pub fn escape(key: &str) -> String {
        key.replace('~', "~0").replace('/', "~1")
    }
}

/// Removes a finalizer, whichever client set it. An apply without the finalizer would keep it if another client had
/// applied it too, and the object would never be deleted.
pub fn remove_finalizer(target: Target, uid: &str, finalizer: &str, index: usize) -> Write {
    let removal = Operation::remove(format!("/metadata/finalizers/{index}")).expecting(finalizer.into());
    Write::Patch { target, uid: uid.to_owned(), operations: vec![removal] }
}

/// What a step waits for before the next step starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub reason: &'static str,
    pub message: String,
    /// Usually a watch event requeues the object. This is for waits that only time ends.
    pub requeue_after: Option<Duration>,
}

/// Writes that do not depend on each other, and what must be observed before the next step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub name: &'static str,
    pub writes: Vec<Write>,
    pub wait: Option<Wait>,
    /// Whether the step is executed although an earlier step failed or waits. Other steps are executed only when
    /// everything before them is done.
    pub independent: bool,
}

impl Step {
    pub fn new(name: &'static str) -> Self {
        Self { name, writes: Vec::new(), wait: None, independent: false }
    }

    #[must_use]
    pub fn independent(mut self, independent: bool) -> Self {
        self.independent = independent;
        self
    }

    #[must_use]
    pub fn write(mut self, write: Write) -> Self {
        self.writes.push(write);
        self
    }

    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = Some(wait);
        self
    }
}

/// Every write of a reconcile, in order. The plan of an object that is up to date is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub steps: Vec<Step>,
}

impl Plan {
    /// Whether the plan has no write and no wait.
    pub fn is_empty(&self) -> bool {
        self.steps.iter().all(|step| step.writes.is_empty() && step.wait.is_none())
    }

    pub fn write_count(&self) -> usize {
        self.steps.iter().map(|step| step.writes.len()).sum()
    }
}

/// Where the executor stopped. Later steps were executed only if they are independent.
#[derive(Clone, PartialEq)]
pub enum Stop {
    /// Every step is done.
    Done,
    /// A step waits, and no step failed.
    Waiting { step: &'static str, wait: Wait },
    /// A name that is needed belongs to another object, which was not changed. `live` is that object.
    NameConflict { step: &'static str, target: Target, live: Body },
    /// A request failed.
    Failed { step: &'static str, failure: Failure },
}

impl Stop {
    /// The stop of a plan after one more step: the first failure counts, and then the first wait.
    #[must_use]
    pub fn or_worse(self, later: Self) -> Self {
        match (&self, &later) {
            (Self::Done, _) | (Self::Waiting { .. }, Self::NameConflict { .. } | Self::Failed { .. }) => later,
            _ => self,
        }
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("Done"),
            Self::Waiting { step, wait } => write!(f, "Waiting({step}: {})", wait.reason),
            Self::NameConflict { step, target, .. } => write!(f, "NameConflict({step}: {target})"),
            Self::Failed { step, failure } => write!(f, "Failed({step}: {failure})"),
        }
    }
}

/// The result of applying a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub stop: Stop,
    /// The number of writes that the server accepted.
    pub written: usize,
}

/// The observed and the desired status of one object, typed until the executor sends it. The executor writes it only
/// if the two differ.
#[derive(Clone, PartialEq)]
pub struct StatusWrite<S = Value> {
    pub target: Target,
    pub uid: String,
    pub observed: S,
    pub desired: S,
}

impl<S: PartialEq> StatusWrite<S> {
    pub fn differs(&self) -> bool {
        self.observed != self.desired
    }
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventSubject {
    pub api_version: String,
    pub kind: String,
    pub key: ObjectKey,
    pub uid: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    Normal,
    Warning,
}

impl EventKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// An event about an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventRecord {
    pub about: EventSubject,
    pub kind: EventKind,
    pub reason: &'static str,
    /// What the controller did, in one word, as `events.k8s.io` requires.
    pub action: &'static str,
    pub message: String,
}

/// The result of a reconcile for users: status, events, the error that it counts as, and when to requeue the object.
#[derive(Clone, PartialEq)]
pub struct Report<S = Value> {
    pub status: Option<StatusWrite<S>>,
    pub events: Vec<EventRecord>,
    pub requeue_after: Option<Duration>,
    /// The reason of the condition if it is an error. The reconcile counts as an error of this type, whether a request
    /// failed or not. None: a failed request counts with the reason of its failure.
    pub error: Option<&'static str>,
}

impl<S> Default for Report<S> {
    fn default() -> Self {
        Self { status: None, events: Vec::new(), requeue_after: None, error: None }
    }
}
