//! The four steps of a pass as data: what it wants to write (`Plan`), what came of it (`Outcome`), what to tell
//! (`Report`).
//!
//! Only `runtime`'s executor turns these into requests. Bodies may hold user data and keys, therefore nothing here
//! prints a body: `Debug` of a write names its verb and its target.

use std::{fmt, sync::Arc, time::Duration};

use kube_core::{ApiResource, Resource};
use serde::Serialize;
use serde_json::Value;

use crate::{Failure, ObjectKey, reason};

/// Where a write goes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Target {
    pub resource: ApiResource,
    pub key: ObjectKey,
}

impl Target {
    pub fn new(resource: ApiResource, key: ObjectKey) -> Self {
        Self { resource, key }
    }

    pub fn of<K: Resource<DynamicType = ()>>(key: ObjectKey) -> Self {
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

/// The JSON of an object. It has no `Debug`, because it may be a Secret.
#[derive(Clone, PartialEq)]
pub struct Body(Value);

impl Body {
    pub fn of<T: Serialize>(object: &T) -> Result<Self, Failure> {
        serde_json::to_value(object)
            .map(Self)
            .map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("an object could not be serialized: {error}")))
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

/// One request that changes something.
#[derive(Clone, PartialEq)]
pub enum Write {
    /// The first write of an object, a POST. If the name is taken, the live object is read and its ownership decided.
    Create { target: Target, body: Body },
    /// Server-side apply that carries the UID, so that it fails on a re-created object. It is for what was applied from
    /// the beginning: a new finalizer, a part of somebody else's object. It never removes what a `Create` wrote: the server
    /// keeps a POST under another entry of `managedFields` (operation `Update`) than an apply, and a field that leaves
    /// the applied body stays for as long as the other entry names it.
    Apply { target: Target, uid: String, body: Body },
    /// A JSON patch that first tests the UID. It is for objects that were made by `Create`, and for what must be exact:
    /// a replaced field loses what others added to it, which server-side apply would leave alone.
    Patch { target: Target, uid: String, operations: Vec<Operation> },
    /// Carries the UID as a precondition. An object that does not exist counts as deleted. The garbage collector deletes
    /// its dependents in the background.
    Delete { target: Target, uid: String },
    /// One of the above whose body is big, so that it is made when its turn has come and forgotten when it was sent. It
    /// has the same verb and target.
    Lazy { target: Target, verb: &'static str, make: LazyWrite },
    /// Server-side apply of the status subresource, carrying the UID and the newest version that is known of the object:
    /// for a custom resource the server overwrites the UID before it would compare it.
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

    /// A write whose body is made by `make`, which must give a write of the same verb and target.
    pub fn lazy(
        target: Target,
        verb: &'static str,
        make: impl Fn() -> Result<Self, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self::Lazy { target, verb, make: LazyWrite(Arc::new(make)) }
    }
}

/// Makes a write. Two are the same only if one is a clone of the other.
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

/// One operation of a JSON patch. Its values may be user data: no `Debug`.
#[derive(Clone, PartialEq)]
pub struct Operation {
    /// A JSON pointer.
    pub path: String,
    /// None removes what is there.
    pub value: Option<Value>,
    /// What must be there, or the whole patch is refused; null for nothing.
    pub expecting: Option<Value>,
}

impl Operation {
    /// Puts a value in the place of whatever is there or not there. The parent must exist.
    pub fn set(path: impl Into<String>, value: Value) -> Self {
        Self { path: path.into(), value: Some(value), expecting: None }
    }

    pub fn remove(path: impl Into<String>) -> Self {
        Self { path: path.into(), value: None, expecting: None }
    }

    /// Only if the server still has what was seen there: for a place that others write to as well.
    #[must_use]
    pub fn expecting(self, seen: Value) -> Self {
        Self { expecting: Some(seen), ..self }
    }

    /// A key as a part of a JSON pointer.
    pub fn escape(key: &str) -> String {
        key.replace('~', "~0").replace('/', "~1")
    }
}

/// Takes a finalizer away, whoever put it there. An apply without it would leave one that somebody else applied too,
/// and the object would stay for ever.
pub fn remove_finalizer(target: Target, uid: &str, finalizer: &str, index: usize) -> Write {
    let removal = Operation::remove(format!("/metadata/finalizers/{index}")).expecting(finalizer.into());
    Write::Patch { target, uid: uid.to_owned(), operations: vec![removal] }
}

/// What a step waits for before the next one may begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub reason: &'static str,
    pub message: String,
    /// A watch wakes the pass; this is for the waits that only a clock ends.
    pub requeue_after: Option<Duration>,
}

/// Writes that do not depend on each other, and what must be seen before the next step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub name: &'static str,
    pub writes: Vec<Write>,
    pub wait: Option<Wait>,
}

impl Step {
    pub fn new(name: &'static str) -> Self {
        Self { name, writes: Vec::new(), wait: None }
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

/// Every write that a pass wants, in order. An empty plan is a settled object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub steps: Vec<Step>,
}

impl Plan {
    /// Whether nothing is to be written and nothing is waited for.
    pub fn is_settled(&self) -> bool {
        self.steps.iter().all(|step| step.writes.is_empty() && step.wait.is_none())
    }

    pub fn write_count(&self) -> usize {
        self.steps.iter().map(|step| step.writes.len()).sum()
    }
}

/// Where the executor stopped.
#[derive(Clone, PartialEq)]
pub enum Stop {
    /// Every step was done.
    Done,
    /// A step must wait; the later ones were not begun.
    Waiting { step: &'static str, wait: Wait },
    /// A name that we need belongs to another object. Nothing was done to it; here it is.
    NameConflict { step: &'static str, target: Target, live: Body },
    /// A request failed; the later steps were not begun.
    Failed { step: &'static str, failure: Failure },
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

/// What came of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub stop: Stop,
    /// How many writes the server accepted.
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

/// Something worth telling about an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventRecord {
    pub about: EventSubject,
    pub kind: EventKind,
    pub reason: &'static str,
    /// What the controller was doing, in a word, as `events.k8s.io` wants it.
    pub action: &'static str,
    pub message: String,
}

/// The result of a reconcile for users: status, events, the error that it counts as, and when to requeue the object.
#[derive(Clone, PartialEq)]
pub struct Report<S = Value> {
    pub status: Option<StatusWrite<S>>,
    pub events: Vec<EventRecord>,
    pub requeue_after: Option<Duration>,
    /// What is wrong, as the conditions name it: the pass counts as an error of this type, whether a request failed or
    /// not. None: if one failed, it is counted by the failure's own reason.
    pub error: Option<&'static str>,
}

impl<S> Default for Report<S> {
    fn default() -> Self {
        Self { status: None, events: Vec::new(), requeue_after: None, error: None }
    }
}
