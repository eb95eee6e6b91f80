//! The only place that writes. It takes a plan step by step, sends the writes of a step at the same time, and stops
//! where the plan says wait, where a name is taken, or where a request failed.
//!
//! What was written is laid over the caches at once, so that the next pass sees it before the watch does.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use kube::{
    Client, Resource,
    api::{DeleteParams, DynamicObject, GetParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy},
    core::Request,
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use vitivirt_api::{
    ApiResource, Body, Failure, Operation, Outcome, Plan, Propagation, StatusWrite, Stop, Target, Write, reason,
    text::go_json,
};

use super::{
    classify,
    no_op_patches::{Attempt, NoOpPatches},
};
use crate::{lease::Fence, watch::WriteObserver};

/// How many independent writes of one step are under way at once. The client's rate is the real limit.
const WRITES_AT_ONCE: usize = 16;
/// How many of the big ones: each is in memory as a tree, as text and as what the server makes of it.
const LAZY_WRITES_AT_ONCE: usize = 2;
const METADATA_ONLY: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";

pub struct Executor {
    client: Client,
    field_manager: &'static str,
    late: Semaphore,
    write_observers: HashMap<(String, String), Vec<Arc<dyn WriteObserver>>>,
    no_op_patches: Option<NoOpPatches>,
}

/// What the server is asked to answer with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Object,
    /// For objects that are too big to be sent back for nothing.
    Metadata,
}

/// What one write ended with.
enum Written {
    Done,
    /// Not sent: the server has made nothing of the same patch before.
    SkippedNoOp,
    /// The name belongs to an object that is not ours.
    Taken(Value),
}

impl Executor {
    /// One field manager per program: it is what server-side apply knows us by.
    pub fn new(client: Client, field_manager: &'static str) -> Self {
        let late = Semaphore::new(LAZY_WRITES_AT_ONCE);
        Self { client, field_manager, late, write_observers: HashMap::new(), no_op_patches: None }
    }

    /// A patch that the server made nothing of is not sent again for so long, while its object stays as it is.
    #[must_use]
    pub fn skip_no_op_patches(mut self, patience: Duration) -> Self {
        self.no_op_patches = Some(NoOpPatches::new(patience));
        self
    }

    /// Tells `cache` about every write of this kind.
    #[must_use]
    pub fn observe_writes(mut self, resource: &ApiResource, cache: Arc<dyn WriteObserver>) -> Self {
        self.write_observers.entry((resource.group.clone(), resource.kind.clone())).or_default().push(cache);
        self
    }

    /// Notifies each of these caches of the writes of its kind.
    #[must_use]
    pub fn notify<'a>(self, caches: impl Iterator<Item = (&'a ApiResource, Arc<dyn WriteObserver>)>) -> Self {
        caches.fold(self, |executor, (resource, cache)| executor.observe_writes(resource, cache))
    }

    /// `owns` decides about a live object whose name we wanted: is it one that we made?
    pub async fn apply<F>(&self, plan: &Plan, fence: &Fence, owns: F) -> Outcome
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let mut written = 0;
        for step in &plan.steps {
            // Writes of one step do not depend on each other: a failing one does not hold up the rest, and none is
            // dropped half way, when nobody would know whether it arrived.
            let calls: Vec<_> = step.writes.iter().map(|write| self.write(write, fence, &owns)).collect();
            let results: Vec<_> = stream::iter(calls).buffered(WRITES_AT_ONCE).collect().await;
            let mut stop = None;
            for (target, result) in step.writes.iter().map(Write::target).zip(results) {
                match result {
                    Ok(Written::Done) => written += 1,
                    Ok(Written::SkippedNoOp) => {}
                    Ok(Written::Taken(live)) => {
                        let taken =
                            Stop::NameConflict { step: step.name, target: target.clone(), live: Body::from(live) };
                        stop.get_or_insert(taken);
                    }
                    Err(failure) => {
                        stop.get_or_insert(Stop::Failed { step: step.name, failure });
                    }
                }
            }
            if let Some(stop) = stop {
                return Outcome { stop, written };
            }
            if let Some(wait) = &step.wait {
                return Outcome { stop: Stop::Waiting { step: step.name, wait: wait.clone() }, written };
            }
        }
        Outcome { stop: Stop::Done, written }
    }

    /// Writes a status that differs from the observed one. Tells whether it did.
    pub async fn report<S>(&self, status: &StatusWrite<S>, fence: &Fence) -> Result<bool, Failure>
    where
        S: Serialize + PartialEq,
    {
        if !status.differs() {
            return Ok(false);
        }
        let mut body = Map::new();
        body.insert("status".to_owned(), Body::of(&status.desired)?.into_json());
        let write = Write::Status {
            target: status.target.clone(),
            uid: status.uid.clone(),
            body: Body::from(Value::Object(body)),
        };
        self.write(&write, fence, &|_, _| false).await.map(|_| true)
    }

    /// The object as the server has it now, for decisions that a cache is not good enough for.
    pub async fn read(&self, target: &Target) -> Result<Option<Value>, Failure> {
        let request = request(target).get(target.key.name(), &GetParams::default());
        match self.send("get", target, request, Answer::Object, None).await {
            Ok(live) => Ok(Some(live)),
            Err(failure) if failure.reason == reason::OBJECT_GONE => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    async fn write<F>(&self, write: &Write, fence: &Fence, owns: &F) -> Result<Written, Failure>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        // The transport asks again when the request's turn has come; this saves the turn.
        if !fence.may_write() {
            let message = format!("{} {} was not sent: this replica does not lead", write.verb(), write.target());
            return Err(Failure::transient(reason::NOT_LEADING, message));
        }
        if let Write::Lazy { make, .. } = write {
            // Closed never.
            let _turn = self.late.acquire().await;
            return self.send_write(&make.make()?, Answer::Metadata, fence, owns).await;
        }
        self.send_write(write, Answer::Object, fence, owns).await
    }

    async fn send_write<F>(&self, write: &Write, answer: Answer, fence: &Fence, owns: &F) -> Result<Written, Failure>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let target = write.target();
        let (uid, result) = match write {
            Write::Lazy { .. } => {
                return Err(Failure::bug(reason::BAD_REQUEST, format!("{target}: a late write made another")));
            }
            Write::Create { target, body } => return self.create(target, body, answer, fence, owns).await,
            Write::Delete { uid, propagation, .. } => return self.delete(target, uid, *propagation, fence).await,
            Write::Apply { uid, body, .. } => {
                let patch = Patch::Apply(identified(target, Some(uid), body));
                let request = request(target).patch(target.key.name(), &self.patch_parameters(), &patch);
                (uid, self.send("patch", target, request, answer, Some(fence)).await)
            }
            Write::Status { uid, body, .. } => (uid, self.status(target, uid, body, fence).await),
            Write::Patch { uid, operations, .. } => {
                let patch = json_patch(uid, operations).map_err(|error| unwritable(&error, "patch", target))?;
                let known = self.known_version(target, uid);
                let attempt = self
                    .no_op_patches
                    .as_ref()
                    .map(|no_op_patches| (no_op_patches, Attempt::new(known.clone(), &patch)));
                if attempt.as_ref().is_some_and(|(no_op_patches, attempt)| no_op_patches.has(target, attempt)) {
                    return Ok(Written::SkippedNoOp);
                }
                let result = self.patch(target, uid, known.as_deref(), patch, answer, fence).await;
                if let (Some((no_op_patches, attempt)), Ok(object)) = (attempt, &result) {
                    no_op_patches.note(target, attempt, metadata(object, "resourceVersion"));
                }
                (uid, result)
            }
        };
        match &result {
            Ok(object) => self.tell_written(target, object),
            // A UID does not come back: whoever still shows the object is late.
            Err(failure) if failure.reason == reason::OBJECT_GONE => self.tell_deleted(target, uid),
            Err(_) => {}
        }
        result.map(|_| Written::Done)
    }

    async fn create<F>(
        &self,
        target: &Target,
        body: &Body,
        answer: Answer,
        fence: &Fence,
        owns: &F,
    ) -> Result<Written, Failure>
    where
        F: Fn(&Target, &Value) -> bool,
    {
        let bytes = bytes(&identified(target, None, body), "create", target)?;
        let parameters = PostParams { field_manager: Some(self.field_manager.to_owned()), ..PostParams::default() };
        let request = request(target).create(&parameters, bytes);
        let failure = match self.send("create", target, request, answer, Some(fence)).await {
            Ok(object) => {
                self.tell_written(target, &object);
                return Ok(Written::Done);
            }
            Err(failure) if failure.reason == reason::OBJECT_CHANGED => failure,
            Err(failure) => return Err(failure),
        };
        match self.read(target).await? {
            // An earlier create of ours whose answer was lost, or an object of ours that lost the labels by which the
            // caches find it. They learn of it; the next pass goes on from it.
            Some(live) if owns(target, &live) => {
                self.write_observers_of(target).for_each(|cache| cache.on_found(&live));
                Err(failure)
            }
            Some(live) => Ok(Written::Taken(live)),
            // Gone between the two requests.
            None => Err(failure),
        }
    }

    /// For a custom resource the server puts the stored metadata in the place of what was sent before it validates, so
    /// a wrong UID goes unnoticed. The resource version is compared before that, and no two objects share one.
    async fn status(&self, target: &Target, uid: &str, body: &Body, fence: &Fence) -> Result<Value, Failure> {
        let version = match self.known_version(target, uid) {
            Some(version) => version,
            None => self.live_version(target, uid).await?,
        };
        let mut object = identified(target, Some(uid), body);
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("resourceVersion".to_owned(), version.into());
        }
        let (name, parameters) = (target.key.name(), self.patch_parameters());
        let request = request(target).patch_subresource("status", name, &parameters, &Patch::Apply(object));
        self.send("patch", target, request, Answer::Object, Some(fence)).await
    }

    /// The newest one: what our last write was answered with, or what was seen since.
    fn known_version(&self, target: &Target, uid: &str) -> Option<String> {
        let known = self.write_observers_of(target).filter_map(|cache| cache.version(&target.key, uid));
        known.reduce(|a, b| if a.is_older_than(&b) { b } else { a }).map(|version| version.to_string())
    }

    async fn live_version(&self, target: &Target, uid: &str) -> Result<String, Failure> {
        let Some(live) = self.read(target).await? else {
            return Err(Failure::conflict(reason::OBJECT_GONE, format!("{target} is gone")));
        };
        if metadata(&live, "uid") != uid {
            return Err(replaced(target));
        }
        Ok(metadata(&live, "resourceVersion").to_owned())
    }

    async fn patch(
        &self,
        target: &Target,
        uid: &str,
        known: Option<&str>,
        bytes: Vec<u8>,
        answer: Answer,
        fence: &Fence,
    ) -> Result<Value, Failure> {
        let url = DynamicObject::url_path(&target.resource, target.key.namespace());
        let request = http::Request::patch(format!("{url}/{}?fieldManager={}", target.key.name(), self.field_manager))
            .header(http::header::CONTENT_TYPE, "application/json-patch+json")
            .body(bytes)
            .map_err(kube::core::request::Error::BuildRequest);
        let failure = match self.send("patch", target, request, answer, Some(fence)).await {
            Err(failure) if failure.reason == reason::INVALID_OBJECT => failure,
            result => return result,
        };
        // A test that fails is a 422 like a refusal of the content; only the live object tells them apart.
        match self.read(target).await? {
            Some(live) if metadata(&live, "uid") != uid => Err(replaced(target)),
            // A patch that was made for an older state, and may test or remove what is gone, does not fit for that reason
            // alone.
            Some(live) if known.is_some_and(|known| known != metadata(&live, "resourceVersion")) => {
                Err(Failure::conflict(reason::OBJECT_CHANGED, failure.message))
            }
            Some(_) => Err(failure),
            None => Err(Failure::conflict(reason::OBJECT_GONE, format!("{target} is gone"))),
        }
    }

    async fn delete(
        &self,
        target: &Target,
        uid: &str,
        propagation: Propagation,
        fence: &Fence,
    ) -> Result<Written, Failure> {
        let parameters = DeleteParams {
            propagation_policy: Some(match propagation {
                Propagation::Background => PropagationPolicy::Background,
                Propagation::Foreground => PropagationPolicy::Foreground,
                Propagation::Orphan => PropagationPolicy::Orphan,
            }),
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteParams::default()
        };
        let request = request(target).delete(target.key.name(), &parameters);
        match self.send("delete", target, request, Answer::Object, Some(fence)).await {
            // Finalizers keep it: it is still there, marked.
            Ok(answer) if answer.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null()) => {
                self.tell_written(target, &answer);
            }
            Ok(_) => self.tell_deleted(target, uid),
            Err(failure) if failure.reason == reason::OBJECT_GONE => self.tell_deleted(target, uid),
            // Gone with its whole kind, if who watches the kind says so too: a server that is starting, or a proxy
            // before it, gives the same answer.
            Err(failure) if failure.reason == reason::API_NOT_INSTALLED && self.is_absent(target) => {
                self.tell_deleted(target, uid);
            }
            Err(failure) => return Err(failure),
        }
        Ok(Written::Done)
    }

    /// A write carries the fence to where it is sent.
    async fn send(
        &self,
        verb: &str,
        target: &Target,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
        answer: Answer,
        fence: Option<&Fence>,
    ) -> Result<Value, Failure> {
        let mut request = request.map_err(|error| classify(&kube::Error::BuildRequest(error), verb, target))?;
        if answer == Answer::Metadata {
            request.headers_mut().insert(http::header::ACCEPT, http::HeaderValue::from_static(METADATA_ONLY));
        }
        if let Some(fence) = fence {
            request.extensions_mut().insert(fence.clone());
        }
        let text = self.client.request_text(request).await.map_err(|error| classify(&error, verb, target))?;
        serde_json::from_str(&text).map_err(|error| classify(&kube::Error::SerdeError(error), verb, target))
    }

    /// What we manage is exact, whoever wrote it before: conflicts of field managers are decided for us.
    fn patch_parameters(&self) -> PatchParams {
        PatchParams::apply(self.field_manager).force()
    }

    fn write_observers_of(&self, target: &Target) -> impl Iterator<Item = &Arc<dyn WriteObserver>> {
        let kind = (target.resource.group.clone(), target.resource.kind.clone());
        self.write_observers.get(&kind).into_iter().flatten()
    }

    fn tell_written(&self, target: &Target, object: &Value) {
        self.write_observers_of(target).for_each(|cache| cache.on_written(object));
    }

    fn tell_deleted(&self, target: &Target, uid: &str) {
        self.write_observers_of(target).for_each(|cache| cache.on_deleted(&target.key, uid));
    }

    fn is_absent(&self, target: &Target) -> bool {
        let mut caches = self.write_observers_of(target).peekable();
        caches.peek().is_some() && caches.all(|cache| cache.is_absent())
    }
}

fn bytes(body: &Value, verb: &str, target: &Target) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(body).map_err(|error| unwritable(&error, verb, target))
}

fn unwritable(error: &serde_json::Error, verb: &str, target: &Target) -> Failure {
    Failure::bug(reason::BAD_REQUEST, format!("{verb} {target}: {error}"))
}

fn metadata<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get("metadata").and_then(|metadata| metadata.get(field)).and_then(Value::as_str).unwrap_or_default()
}

fn replaced(target: &Target) -> Failure {
    Failure::conflict(reason::OBJECT_CHANGED, format!("{target} is another object now"))
}

/// The first operation tests the UID: on another object of the name the whole patch is refused. It is written as the
/// server writes it, which compares a tested value with its own text, byte by byte.
fn json_patch(uid: &str, operations: &[Operation]) -> Result<Vec<u8>, serde_json::Error> {
    let test = json!({"op": "test", "path": "/metadata/uid", "value": uid});
    let changes = operations.iter().flat_map(|Operation { path, value, expecting }| {
        let test = expecting.as_ref().map(|seen| json!({"op": "test", "path": path, "value": seen}));
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

/// The body with what makes it an object of its kind and place, and with the UID that it must have.
fn identified(target: &Target, uid: Option<&str>, body: &Body) -> Value {
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
