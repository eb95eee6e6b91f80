//! The apply step, and the only code that writes objects. It executes a plan step by step and sends the writes of one
//! step concurrently. It stops where the plan says wait, where a name already exists, or where a request fails, except
//! for the steps that are independent of that. It sends a failed write again only after a delay (`write_backoff`),
//! however often it is planned.
//!
//! The caches learn of each write at once, so that the next reconcile sees it before the watch delivers it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use kube::{
    Client, Resource,
    api::{DeleteParams, DynamicObject, GetParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy},
    core::Request,
};
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::SmallRng};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::{sync::Semaphore, time::Instant};
use vitivirt_api::{
    ApiResource, Body, ErrorClass, Failure, Operation, Outcome, Plan, StatusWrite, Stop, Target, Write, reason,
    text::go_json,
};

use super::{
    Retry,
    breaker::{Breaker, Rejected},
    classify,
    no_op_patches::{Attempt, NoOpPatches},
    status_fields::replaced_status_fields,
    write_backoff::{FailedWrite, WriteBackoff, WriteError},
};
use crate::{lease::WriteFence, watch::WriteObserver};

/// The writes of one step that are sent concurrently. The client's rate limit is the effective limit.
const WRITES_AT_ONCE: usize = 16;
/// The same for lazy writes, whose bodies are large: each is in memory as a tree, as text and as the server's response.
const LAZY_WRITES_AT_ONCE: usize = 2;
/// The delay after a conflict if the step failed for another cause too.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
/// The shortest time between two reconciles because of failed writes.
const MIN_RETRY: Duration = Duration::from_millis(100);
const METADATA_ONLY: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";

pub struct Executor {
    client: Client,
    field_manager: &'static str,
    lazy_writes: Semaphore,
    write_observers: HashMap<(String, String), Vec<Arc<dyn WriteObserver>>>,
    no_op_patches: Option<NoOpPatches>,
    write_backoff: Mutex<(WriteBackoff, SmallRng)>,
    breaker: Breaker,
}

/// The outcome of a plan, and when to retry what failed.
#[derive(Debug, PartialEq)]
pub(super) struct Applied {
    pub(super) outcome: Outcome,
    pub(super) retry: Retry,
}

/// The part of the object that the server is asked to return.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResponseBody {
    Full,
    /// For large objects whose content the caches do not need.
    MetadataOnly,
}

/// The result of one write that did not fail.
enum WriteResult {
    Done,
    /// Not sent: the server accepted the same patch before without changing the object.
    SkippedNoOp,
}

impl From<Failure> for WriteError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Executor {
    /// Server-side apply identifies this program by `field_manager`. Each program uses exactly one.
    pub fn new(client: Client, field_manager: &'static str) -> Self {
        #[expect(clippy::disallowed_methods, reason = "the jitter of retries is random")]
        let jitter = SmallRng::from_os_rng();
        Self {
            client,
            field_manager,
            lazy_writes: Semaphore::new(LAZY_WRITES_AT_ONCE),
            write_observers: HashMap::new(),
            no_op_patches: None,
            write_backoff: Mutex::new((WriteBackoff::default(), jitter)),
            breaker: Breaker::default(),
        }
    }

    /// Sends a write that was refused as invalid again after at most this time.
    #[must_use]
    pub fn retry_invalid_within(self, max: Duration) -> Self {
        self.write_backoff.lock().0.invalid_max = Some(max);
        self
    }

    /// Does not repeat a no-op patch for `ttl`, while its object does not change.
    #[must_use]
    pub fn skip_no_op_patches(mut self, ttl: Duration) -> Self {
        self.no_op_patches = Some(NoOpPatches::new(ttl));
        self
    }

    /// Notifies `observer` of every write of this kind.
    #[must_use]
    pub fn observe_writes(mut self, resource: &ApiResource, observer: Arc<dyn WriteObserver>) -> Self {
        self.write_observers.entry((resource.group.clone(), resource.kind.clone())).or_default().push(observer);
        self
    }

    /// Notifies each of these caches of the writes of its kind.
    #[must_use]
    pub fn notify<'a>(self, caches: impl Iterator<Item = (&'a ApiResource, Arc<dyn WriteObserver>)>) -> Self {
        caches.fold(self, |executor, (resource, cache)| executor.observe_writes(resource, cache))
    }

    /// Applies a plan without a lease, for a command that runs once.
    pub async fn apply_once(&self, plan: &Plan) -> Outcome {
        self.apply(plan, &WriteFence::open(), |_, _| false).await.outcome
    }

    /// `owns` decides whether a live object that has the name of a planned one was created for the reconciled object.
    pub(super) async fn apply<F>(&self, plan: &Plan, fence: &WriteFence, owns: F) -> Applied
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let mut written = 0;
        let (mut failed, mut waits) = (Vec::new(), None);
        for step in &plan.steps {
            let is_stopped = !failed.is_empty() || waits.is_some();
            if is_stopped && !step.independent {
                continue;
            }
            // The writes of one step do not depend on each other. A failed write does not stop the others, and none is
            // dropped while its request is in flight, when its effect would be unknown.
            let calls: Vec<_> = step.writes.iter().map(|write| self.write_when_due(write, fence, &owns)).collect();
            let results: Vec<_> = stream::iter(calls).buffered(WRITES_AT_ONCE).collect().await;
            for (target, result) in step.writes.iter().map(Write::target).zip(results) {
                match result {
                    Ok(WriteResult::Done) => written += 1,
                    Ok(WriteResult::SkippedNoOp) => {}
                    Err(error) => failed.push((step.name, target, error)),
                }
            }
            if let Some(wait) = &step.wait {
                waits.get_or_insert_with(|| Stop::Waiting { step: step.name, wait: wait.clone() });
            }
        }
        let (stop, retry) = stop_of(failed).unwrap_or((waits.unwrap_or(Stop::Done), Retry::Backoff));
        Applied { outcome: Outcome { stop, written }, retry }
    }

    /// Writes the status if it differs from the observed one. Returns whether it did.
    pub(crate) async fn report<S>(&self, status: &StatusWrite<S>, fence: &WriteFence) -> Result<bool, Failure>
    where
        S: Serialize + PartialEq,
    {
        if !status.differs() {
            return Ok(false);
        }
        let mut body = Map::new();
        body.insert("status".to_owned(), Body::from_object(&status.desired)?.into_json());
        let write = Write::Status {
            target: status.target.clone(),
            uid: status.uid.clone(),
            body: Body::from(Value::Object(body)),
        };
        match self.write(&write, fence, &|_, _| false).await {
            Ok(_) => Ok(true),
            Err(WriteError::Failed(failure)) => Err(failure),
            Err(WriteError::NameConflict(_)) => Ok(false),
        }
    }

    /// Reads the object from the API server, for decisions that must not rely on a cache.
    pub async fn read(&self, target: &Target) -> Result<Option<Value>, Failure> {
        let request = request(target).get(target.key.name(), &GetParams::default());
        match self.send("get", target, request, ResponseBody::Full, None).await {
            Ok(live) => Ok(Some(live)),
            Err(failure) if failure.reason == reason::OBJECT_GONE => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A failed write is sent again only when its delay has passed, whatever started the reconcile.
    async fn write_when_due<F>(&self, write: &Write, fence: &WriteFence, owns: &F) -> Result<WriteResult, FailedWrite>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        if let Some(held) = self.write_backoff.lock().0.held(write, Instant::now()) {
            return Err(held);
        }
        let permit = self.breaker.permit(write, Instant::now()).map_err(|Rejected { failure, retry_after }| {
            FailedWrite { error: failure.into(), retry_after: Some(retry_after), sent: false }
        })?;
        let result = self.write(write, fence, owns).await;
        let failure = match &result {
            Err(WriteError::Failed(failure)) => Some(failure),
            _ => None,
        };
        permit.finish(failure, Instant::now());
        let (backoff, jitter) = &mut *self.write_backoff.lock();
        match result {
            Ok(done) => {
                backoff.succeeded(write);
                Ok(done)
            }
            Err(error) => Err(backoff.failed(write, error, Instant::now(), jitter)),
        }
    }

    async fn write<F>(&self, write: &Write, fence: &WriteFence, owns: &F) -> Result<WriteResult, WriteError>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        // The client checks the fence again before it sends the request. This check saves the wait for the rate limit.
        if !fence.may_write() {
            let message = format!("cannot {} {}: this replica is not the leader", write.verb(), write.target());
            return Err(Failure::transient(reason::NOT_LEADING, message).into());
        }
        if let Write::Lazy { make, .. } = write {
            // The semaphore is never closed.
            let _permit = self.lazy_writes.acquire().await;
            return self.send_write(&make.make()?, ResponseBody::MetadataOnly, fence, owns).await;
        }
        self.send_write(write, ResponseBody::Full, fence, owns).await
    }

    async fn send_write<F>(
        &self,
        write: &Write,
        response_body: ResponseBody,
        fence: &WriteFence,
        owns: &F,
    ) -> Result<WriteResult, WriteError>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let target = write.target();
        let (uid, result) = match write {
            Write::Lazy { .. } => {
                let message = format!("{target}: a lazy write built another lazy write");
                return Err(Failure::bug(reason::BAD_REQUEST, message).into());
            }
            Write::Create { target, body } => return self.create(target, body, response_body, fence, owns).await,
            Write::Delete { uid, resource_version, .. } => {
                let preconditions =
                    Preconditions { uid: Some(uid.clone()), resource_version: resource_version.clone() };
                return Ok(self.delete(target, uid, preconditions, response_body, fence).await?);
            }
            Write::Apply { uid, body, .. } => {
                let patch = Patch::Apply(with_identity(target, Some(uid), body));
                let request = request(target).patch(target.key.name(), &self.patch_parameters(), &patch);
                (uid, self.send("patch", target, request, response_body, Some(fence)).await)
            }
            Write::Status { uid, body, .. } => (uid, self.apply_status(target, uid, body, fence).await),
            Write::Patch { uid, operations, .. } => {
                let json = json_patch(uid, operations).map_err(|error| not_serializable(&error, "patch", target))?;
                let known = self.known_version(target, uid);
                let attempt = self
                    .no_op_patches
                    .as_ref()
                    .map(|no_op_patches| (no_op_patches, Attempt::new(known.clone(), &json)));
                if attempt.as_ref().is_some_and(|(no_op_patches, attempt)| no_op_patches.contains(target, attempt)) {
                    return Ok(WriteResult::SkippedNoOp);
                }
                let patch = JsonPatch { json, operations, known: known.as_deref() };
                let result = self.patch(target, uid, patch, response_body, fence).await;
                // Such a patch only stores the object again. Another client has done so, or has deleted the object.
                if operations.is_empty() && result.as_ref().is_err_and(|failure| failure.class == ErrorClass::Conflict)
                {
                    return Ok(WriteResult::Done);
                }
                if let (Some((no_op_patches, attempt)), Ok(object)) = (attempt, &result) {
                    no_op_patches.record(target, attempt, metadata(object, "resourceVersion"));
                }
                (uid, result)
            }
        };
        match &result {
            // The server has removed the object with its last finalizer. Its version in the response is not newer.
            Ok(object) if is_deleted(object) => self.notify_deleted(target, uid),
            Ok(object) => self.notify_written(target, object),
            // A UID is never used again: a cache that still has the object is outdated.
            Err(failure) if failure.reason == reason::OBJECT_GONE => self.notify_deleted(target, uid),
            Err(_) => {}
        }
        Ok(result.map(|_| WriteResult::Done)?)
    }

    async fn create<F>(
        &self,
        target: &Target,
        body: &Body,
        response_body: ResponseBody,
        fence: &WriteFence,
        owns: &F,
    ) -> Result<WriteResult, WriteError>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let bytes = to_bytes(&with_identity(target, None, body), "create", target)?;
        let parameters = PostParams { field_manager: Some(self.field_manager.to_owned()), ..PostParams::default() };
        let request = request(target).create(&parameters, bytes);
        let failure = match self.send("create", target, request, response_body, Some(fence)).await {
            Ok(object) => {
                self.notify_written(target, &object);
                return Ok(WriteResult::Done);
            }
            Err(failure) if failure.reason == reason::OBJECT_CHANGED => failure,
            Err(failure) => return Err(failure.into()),
        };
        match self.read(target).await? {
            // Either the response to an earlier create was lost, or the object lost the labels that the caches select.
            // The caches learn of it here, and the next reconcile continues from it.
            Some(live) if owns(target, &live) => {
                self.write_observers_of(target).for_each(|observer| observer.on_live_read(&live));
                Err(failure.into())
            }
            Some(live) => Err(WriteError::NameConflict(live)),
            // It was deleted between the two requests.
            None => Err(failure.into()),
        }
    }

    /// For a custom resource the server replaces the sent metadata with the stored one before it validates, so it does
    /// not notice a wrong UID. It compares the resource version before that, and no two objects share one.
    async fn apply_status(
        &self,
        target: &Target,
        uid: &str,
        body: &Body,
        fence: &WriteFence,
    ) -> Result<Value, Failure> {
        let version = match self.known_version(target, uid) {
            Some(version) => version,
            None => self.live_version(target, uid).await?,
        };
        let mut object = with_identity(target, Some(uid), body);
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("resourceVersion".to_owned(), version.into());
        }
        let (name, parameters) = (target.key.name(), self.patch_parameters());
        let request = request(target).patch_subresource("status", name, &parameters, &Patch::Apply(object));
        let written = self.send("patch", target, request, ResponseBody::Full, Some(fence)).await?;
        self.remove_replaced_status(target, uid, body, written, fence).await
    }

    /// Removes the fields of the status that an operator with the same field manager set by an update, and that this
    /// one does not apply. An apply keeps them, because the update is a separate entry of `managedFields`.
    async fn remove_replaced_status(
        &self,
        target: &Target,
        uid: &str,
        body: &Body,
        written: Value,
        fence: &WriteFence,
    ) -> Result<Value, Failure> {
        let replaced = replaced_status_fields(&written, self.field_manager, body.json());
        if replaced.is_empty() {
            return Ok(written);
        }
        let removals: Vec<Operation> =
            replaced.iter().map(|field| Operation::remove(format!("/status/{}", Operation::escape(field)))).collect();
        let patch = json_patch(uid, &removals).map_err(|error| not_serializable(&error, "patch", target))?;
        self.send("patch", target, self.json_patch_request(target, "/status", patch), ResponseBody::Full, Some(fence))
            .await
    }

    fn json_patch_request(
        &self,
        target: &Target,
        subresource: &str,
        patch: Vec<u8>,
    ) -> Result<http::Request<Vec<u8>>, kube::core::request::Error> {
        let url = DynamicObject::url_path(&target.resource, target.key.namespace());
        let url = format!("{url}/{}{subresource}?fieldManager={}", target.key.name(), self.field_manager);
        http::Request::patch(url)
            .header(http::header::CONTENT_TYPE, "application/json-patch+json")
            .body(patch)
            .map_err(kube::core::request::Error::BuildRequest)
    }

    /// The newest resource version that any cache knows, from the response to the last write or from the watch.
    fn known_version(&self, target: &Target, uid: &str) -> Option<String> {
        let known = self.write_observers_of(target).filter_map(|observer| observer.version(&target.key, uid));
        known.reduce(|a, b| if a.is_older_than(&b) { b } else { a }).map(|version| version.to_string())
    }

    async fn live_version(&self, target: &Target, uid: &str) -> Result<String, Failure> {
        let Some(live) = self.read(target).await? else {
            return Err(not_found_error(target));
        };
        if metadata(&live, "uid") != uid {
            return Err(recreated_error(target));
        }
        Ok(metadata(&live, "resourceVersion").to_owned())
    }

    async fn patch(
        &self,
        target: &Target,
        uid: &str,
        JsonPatch { json, operations, known }: JsonPatch<'_>,
        response_body: ResponseBody,
        fence: &WriteFence,
    ) -> Result<Value, Failure> {
        let request = self.json_patch_request(target, "", json);
        let failure = match self.send("patch", target, request, response_body, Some(fence)).await {
            Err(failure) if failure.reason == reason::INVALID_OBJECT => failure,
            result => return result,
        };
        // A failed `test` operation is a 422, like invalid content. Only the live object shows which of the two it was.
        match self.read(target).await? {
            Some(live) if metadata(&live, "uid") != uid => Err(recreated_error(target)),
            // The patch was built for an older version. It may test or remove something that no longer exists, so the
            // error says nothing about its content.
            Some(live)
                if known.is_some_and(|known| known != metadata(&live, "resourceVersion"))
                    || operations.iter().any(|operation| is_outdated(operation, &live)) =>
            {
                Err(Failure::conflict(reason::OBJECT_CHANGED, failure.message))
            }
            Some(_) => Err(failure),
            None => Err(not_found_error(target)),
        }
    }

    async fn delete(
        &self,
        target: &Target,
        uid: &str,
        preconditions: Preconditions,
        response_body: ResponseBody,
        fence: &WriteFence,
    ) -> Result<WriteResult, Failure> {
        let parameters = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        let request = request(target).delete(target.key.name(), &parameters);
        match self.send("delete", target, request, response_body, Some(fence)).await {
            // Finalizers keep the object: it still exists, and is being deleted.
            Ok(object) if object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null()) => {
                self.notify_written(target, &object);
            }
            Ok(_) => self.notify_deleted(target, uid),
            Err(failure) if failure.reason == reason::OBJECT_GONE => self.notify_deleted(target, uid),
            // The object was deleted with its CRD, if the caches agree. An API server that is starting, or a proxy in
            // front of it, responds in the same way.
            Err(failure) if failure.reason == reason::API_NOT_INSTALLED && self.kind_is_absent(target) => {
                self.notify_deleted(target, uid);
            }
            Err(failure) => return Err(failure),
        }
        Ok(WriteResult::Done)
    }

    /// A write carries the fence in its extensions, for the check that the client makes before it sends.
    async fn send(
        &self,
        verb: &str,
        target: &Target,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
        response_body: ResponseBody,
        fence: Option<&WriteFence>,
    ) -> Result<Value, Failure> {
        let mut request = request.map_err(|error| classify(&kube::Error::BuildRequest(error), verb, target))?;
        if response_body == ResponseBody::MetadataOnly {
            request.headers_mut().insert(http::header::ACCEPT, http::HeaderValue::from_static(METADATA_ONLY));
        }
        if let Some(fence) = fence {
            request.extensions_mut().insert(fence.clone());
        }
        let text = self.client.request_text(request).await.map_err(|error| classify(&error, verb, target))?;
        serde_json::from_str(&text).map_err(|error| classify(&kube::Error::SerdeError(error), verb, target))
    }

    /// Forced: this operator takes over the fields that it manages from other field managers.
    fn patch_parameters(&self) -> PatchParams {
        PatchParams::apply(self.field_manager).force()
    }

    fn write_observers_of(&self, target: &Target) -> impl Iterator<Item = &Arc<dyn WriteObserver>> {
        let kind = (target.resource.group.clone(), target.resource.kind.clone());
        self.write_observers.get(&kind).into_iter().flatten()
    }

    fn notify_written(&self, target: &Target, object: &Value) {
        self.write_observers_of(target).for_each(|observer| observer.on_written(object));
    }

    fn notify_deleted(&self, target: &Target, uid: &str) {
        self.write_observers_of(target).for_each(|observer| observer.on_deleted(&target.key, uid));
    }

    fn kind_is_absent(&self, target: &Target) -> bool {
        let mut observers = self.write_observers_of(target).peekable();
        observers.peek().is_some() && observers.all(|observer| observer.is_absent())
    }
}

/// Whether nothing keeps an object that is being deleted: no finalizer, and no grace period, which pods have.
fn is_deleted(object: &Value) -> bool {
    let field = |name: &str| object.pointer(&format!("/metadata/{name}"));
    let is_deleting = field("deletionTimestamp").is_some_and(|time| !time.is_null());
    let has_finalizers = field("finalizers").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    let has_grace_period = field("deletionGracePeriodSeconds").and_then(Value::as_u64).is_some_and(|time| time > 0);
    is_deleting && !has_finalizers && !has_grace_period
}

/// What a plan with failed writes stops with, and when the first of them is sent again. An error that needs a user goes
/// before one that may end without a change. Each write comes with the name of its step.
fn stop_of(failed: Vec<(&'static str, &Target, FailedWrite)>) -> Option<(Stop, Retry)> {
    let rank = |error: &WriteError| match error {
        WriteError::Failed(failure) if failure.class == ErrorClass::Conflict => 2,
        WriteError::Failed(failure) if failure.may_end_soon() => 1,
        _ => 0,
    };
    let after = failed.iter().map(|(.., write)| write.retry_after.unwrap_or(CONFLICT_RETRY)).min();
    // Writes that are due shortly after each other are sent together.
    let after = after.map(|after| after.max(MIN_RETRY));
    let sent = failed.iter().any(|(.., write)| write.sent);
    let (step, target, FailedWrite { error, retry_after, .. }) =
        failed.into_iter().min_by_key(|(.., write)| rank(&write.error))?;
    let retry = match (retry_after, after) {
        (Some(_), Some(after)) => Retry::Write { after, sent },
        _ => Retry::Backoff,
    };
    let stop = match error {
        WriteError::Failed(failure) => Stop::Failed { step, failure },
        WriteError::NameConflict(live) => Stop::NameConflict { step, target: target.clone(), live: live.into() },
    };
    Some((stop, retry))
}

fn to_bytes(body: &Value, verb: &str, target: &Target) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(body).map_err(|error| not_serializable(&error, verb, target))
}

fn not_serializable(error: &serde_json::Error, verb: &str, target: &Target) -> Failure {
    Failure::bug(reason::BAD_REQUEST, format!("cannot {verb} {target}: {error}"))
}

fn metadata<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get("metadata").and_then(|metadata| metadata.get(field)).and_then(Value::as_str).unwrap_or_default()
}

struct JsonPatch<'a> {
    json: Vec<u8>,
    operations: &'a [Operation],
    /// The newest version of the object in the caches when the patch is sent. It may have been planned before.
    known: Option<&'a str>,
}

/// Whether the operation tests or removes something that the object does not have.
fn is_outdated(operation: &Operation, live: &Value) -> bool {
    let found = live.pointer(&operation.path).filter(|value| !value.is_null());
    let expected = operation.expecting.as_ref();
    let differs = expected.is_some_and(|expected| found != Some(expected).filter(|value| !value.is_null()));
    differs || operation.value.is_none() && found.is_none()
}

fn not_found_error(target: &Target) -> Failure {
    Failure::conflict(reason::OBJECT_GONE, format!("{target} not found"))
}

fn recreated_error(target: &Target) -> Failure {
    Failure::conflict(reason::OBJECT_CHANGED, format!("{target} was deleted and created again"))
}

/// The first operation tests the UID, so that the server rejects the whole patch for another object with the same name.
/// The JSON is encoded as Go encodes it, because the server compares a tested value with its own text, byte by byte.
fn json_patch(uid: &str, operations: &[Operation]) -> Result<Vec<u8>, serde_json::Error> {
    let test = json!({"op": "test", "path": "/metadata/uid", "value": uid});
    let changes = operations.iter().flat_map(|Operation { path, value, expecting }| {
        let test = expecting.as_ref().map(|value| json!({"op": "test", "path": path, "value": value}));
        let change = match value {
            Some(value) => json!({"op": "add", "path": path, "value": value}),
            None => json!({"op": "remove", "path": path}),
        };
        test.into_iter().chain([change])
    });
    go_json(&Value::Array(std::iter::once(test).chain(changes).collect())).map(String::into_bytes)
}

fn request(target: &Target) -> Request {
    Request::new(DynamicObject::url_path(&target.resource, target.key.namespace()))
}

/// The body with its API version, kind, name and namespace, and with the UID that the object must have.
fn with_identity(target: &Target, uid: Option<&str>, body: &Body) -> Value {
    let mut object = match body.json() {
        Value::Object(fields) => fields.clone(),
        _ => Map::new(),
    };
    object.insert("apiVersion".to_owned(), target.resource.api_version.clone().into());
    object.insert("kind".to_owned(), target.resource.kind.clone().into());
    let metadata = object.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(metadata) = metadata {
        metadata.insert("name".to_owned(), target.key.name().into());
        if let Some(namespace) = target.key.namespace() {
            metadata.insert("namespace".to_owned(), namespace.into());
        }
        if let Some(uid) = uid {
            metadata.insert("uid".to_owned(), uid.into());
        }
    }
    Value::Object(object)
}
