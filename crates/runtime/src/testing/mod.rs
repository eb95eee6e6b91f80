//! A small API server in memory, behind the same client layer as a real one. Resource versions, UIDs, preconditions,
//! paged lists and watches work as Kubernetes defines them, for every kind. Each client has its own link, which a test
//! can cut, and which can lose or replace responses.

mod patch;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{Method, Request, Response, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::{Client, client::Body};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};
use tower::{BoxError, Layer, service_fn};

use self::patch::patched;
use crate::{
    client::{Bucket, ClientLayer},
    metrics::Metrics,
    verb::Verb,
};

type TestResponse = Response<UnsyncBoxBody<Bytes, BoxError>>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ObjectPath {
    collection: String,
    namespace: String,
    name: String,
}

#[derive(Clone)]
struct StoredEvent {
    version: u64,
    path: ObjectPath,
    event: &'static str,
    object: Value,
    /// The object before the event.
    old: Value,
}

struct TestServerState {
    version: u64,
    objects: BTreeMap<ObjectPath, Value>,
    history: Vec<StoredEvent>,
    /// The collections of kinds that are not served.
    not_served: HashSet<String>,
    missing_namespaces: HashSet<String>,
}

/// What a list or a watch selects.
#[derive(Clone)]
struct ListSelector {
    path: ObjectPath,
    name: Option<String>,
    /// `key=value` only.
    label: Option<(String, String)>,
}

impl ListSelector {
    fn matches_path(&self, path: &ObjectPath) -> bool {
        path.collection == self.path.collection
            && (self.path.namespace.is_empty() || path.namespace == self.path.namespace)
            && self.name.as_ref().is_none_or(|name| *name == path.name)
    }

    fn matches_labels(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.label.as_ref().is_none_or(|(key, value)| labels[key.as_str()] == value.as_str())
    }

    /// The line of a watch. An object that begins to match the labels is added, one that no longer matches is deleted.
    fn watch_line(&self, event: &StoredEvent) -> Option<String> {
        if !self.matches_path(&event.path) {
            return None;
        }
        let (before, after) = (self.matches_labels(&event.old), self.matches_labels(&event.object));
        let kind = match (event.event, before && !event.old.is_null(), after) {
            ("MODIFIED", true, false) => "DELETED",
            ("MODIFIED", false, true) => "ADDED",
            (_, _, true) => event.event,
            _ => return None,
        };
        // The API server sends the type first.
        Some(format!("{{\"type\":\"{kind}\",\"object\":{}}}\n", event.object))
    }
}

pub(crate) struct TestApiServer {
    state: Mutex<TestServerState>,
    events: broadcast::Sender<StoredEvent>,
}

/// A fault of the next request with a verb.
pub(crate) enum LinkFault {
    /// The response has this status, and the request has no effect.
    Reject(Verb, u16),
    /// The response is a 429 that asks for a delay of so many seconds, and the request has no effect.
    RetryAfter(Verb, u32),
    /// The request has its effect, and no response arrives.
    LoseResponse(Verb),
    /// The next watch is accepted, and nothing is sent.
    DeafWatch,
}

/// The network between one client and the server.
pub(crate) struct Link {
    up: watch::Sender<bool>,
    pub(crate) faults: Mutex<VecDeque<LinkFault>>,
    pub(crate) requests: Mutex<Vec<(Verb, String)>>,
}

impl Link {
    /// While it is cut, requests hang and watches are silent. A client would notice a refused connection.
    pub(crate) fn cut(&self) {
        self.up.send_replace(false);
    }

    pub(crate) fn restore(&self) {
        self.up.send_replace(true);
    }

    pub(crate) fn count(&self, verb: Verb) -> usize {
        self.requests.lock().iter().filter(|(have, _)| *have == verb).count()
    }

    pub(crate) fn writes(&self) -> usize {
        self.requests.lock().iter().filter(|(verb, _)| !matches!(verb, Verb::Get | Verb::List | Verb::Watch)).count()
    }

    async fn wait_until_up(&self) {
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }

    fn fault(&self, verb: Verb) -> Option<LinkFault> {
        let mut faults = self.faults.lock();
        let at = faults.iter().position(|fault| match fault {
            LinkFault::Reject(faulty, _) | LinkFault::RetryAfter(faulty, _) | LinkFault::LoseResponse(faulty) => {
                *faulty == verb
            }
            LinkFault::DeafWatch => verb == Verb::Watch,
        })?;
        faults.remove(at)
    }
}

impl TestApiServer {
    pub(crate) fn new() -> Arc<Self> {
        let state = TestServerState {
            version: 100,
            objects: BTreeMap::new(),
            history: Vec::new(),
            not_served: HashSet::new(),
            missing_namespaces: HashSet::new(),
        };
        Arc::new(Self { state: Mutex::new(state), events: broadcast::channel(10_000).0 })
    }

    pub(crate) fn client(self: &Arc<Self>) -> (Client, Arc<Link>) {
        self.client_at_rate(None)
    }

    pub(crate) fn client_at_rate(self: &Arc<Self>, requests: Option<Bucket>) -> (Client, Arc<Link>) {
        let link =
            Arc::new(Link { up: watch::Sender::new(true), faults: Mutex::default(), requests: Mutex::default() });
        let (server, server_link) = (self.clone(), link.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (server, link) = (server.clone(), server_link.clone());
            async move { Ok::<_, BoxError>(server.serve(request, link).await) }
        });
        let layer = ClientLayer {
            deadline: Duration::from_secs(15),
            requests: requests.map(Arc::new),
            watches: Arc::new(Bucket::new(1000.0, 1000)),
            pages: Arc::default(),
            metrics: Arc::new(Metrics::new("test")),
            host: "test".into(),
        };
        (Client::new(layer.layer(service), "default"), link)
    }

    /// Begins or ceases to serve a kind. When it ceases, all objects of the kind are deleted, as with a CRD.
    pub(crate) fn serve_kind(&self, collection: &str, served: bool) {
        let mut state = self.state.lock();
        if served {
            state.not_served.remove(collection);
            return;
        }
        state.not_served.insert(collection.to_owned());
        let deleted: Vec<ObjectPath> =
            state.objects.keys().filter(|path| path.collection == collection).cloned().collect();
        for path in deleted {
            let object = state.objects.remove(&path).unwrap();
            self.publish(&mut state, &path, "DELETED", object);
        }
    }

    /// Deletes a namespace with all its objects. From then on nothing can be created in it.
    pub(crate) fn remove_namespace(&self, namespace: &str) {
        let mut state = self.state.lock();
        state.missing_namespaces.insert(namespace.to_owned());
        let deleted: Vec<ObjectPath> =
            state.objects.keys().filter(|path| path.namespace == namespace).cloned().collect();
        for path in deleted {
            let object = state.objects.remove(&path).unwrap();
            self.publish(&mut state, &path, "DELETED", object);
        }
    }

    /// Changes an object, and sends `nonsense` to the watches instead of the object.
    pub(crate) fn put_unreadably(&self, collection: &str, object: Value, nonsense: Value) {
        let mut state = self.state.lock();
        let field = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
        let path = ObjectPath { collection: collection.to_owned(), namespace: field("namespace"), name: field("name") };
        let uid = state.objects[&path]["metadata"]["uid"].clone();
        let stored = self.store(&mut state, &path, "MODIFIED", nonsense, Some(uid));
        let live = state.objects.get_mut(&path).unwrap();
        *live = object;
        live["metadata"]["uid"] = stored["metadata"]["uid"].clone();
        live["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"].clone();
    }

    pub(crate) fn get(&self, collection: &str, namespace: &str, name: &str) -> Option<Value> {
        let path =
            ObjectPath { collection: collection.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        self.state.lock().objects.get(&path).cloned()
    }

    pub(crate) fn put(&self, collection: &str, object: Value) -> Value {
        let mut state = self.state.lock();
        let field = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
        let path = ObjectPath { collection: collection.to_owned(), namespace: field("namespace"), name: field("name") };
        let uid = state.objects.get(&path).map(|old| old["metadata"]["uid"].clone());
        let kind = if uid.is_some() { "MODIFIED" } else { "ADDED" };
        self.store(&mut state, &path, kind, object, uid)
    }

    pub(crate) fn remove(&self, collection: &str, namespace: &str, name: &str) {
        let path =
            ObjectPath { collection: collection.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        let mut state = self.state.lock();
        let object = state.objects.remove(&path).unwrap();
        self.publish(&mut state, &path, "DELETED", object);
    }

    /// The API server sends one about every minute.
    fn bookmarks(self: &Arc<Self>) -> impl futures::Stream<Item = String> + Send + use<> {
        stream::unfold(self.clone(), |server| async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            let version = server.state.lock().version;
            let object =
                json!({ "apiVersion": "v1", "kind": "X", "metadata": { "resourceVersion": version.to_string() } });
            Some((format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n"), server))
        })
    }

    async fn serve(self: &Arc<Self>, request: Request<Body>, link: Arc<Link>) -> TestResponse {
        let verb = Verb::from_request(request.method(), request.uri());
        link.requests.lock().push((verb, request.uri().to_string()));
        link.wait_until_up().await;
        let fault = link.fault(verb);
        if let Some(LinkFault::Reject(_, code)) = fault {
            return status_response(code, "", "rejected by the test");
        }
        if let Some(LinkFault::RetryAfter(_, seconds)) = fault {
            return rejection(429, "TooManyRequests", json!({ "retryAfterSeconds": seconds }));
        }
        if matches!(fault, Some(LinkFault::DeafWatch)) {
            return Response::new(StreamBody::new(stream::pending::<Result<_, BoxError>>()).boxed_unsync());
        }
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        let response = self.respond(verb, &parts, &body, &link).unwrap_or_else(|rejection| rejection);
        if matches!(fault, Some(LinkFault::LoseResponse(_))) {
            std::future::pending::<()>().await;
        }
        link.wait_until_up().await;
        response
    }

    #[expect(clippy::result_large_err, reason = "a rejection is a response too, and this is a test")]
    fn respond(
        self: &Arc<Self>,
        verb: Verb,
        parts: &Parts,
        body: &Bytes,
        link: &Arc<Link>,
    ) -> Result<TestResponse, TestResponse> {
        let (path, sub) = parse_path(parts.uri.path());
        let query: BTreeMap<String, String> = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.replace("%3D", "=")))
            .collect();
        let mut state = self.state.lock();
        if state.not_served.contains(&path.collection) {
            let missing = Full::new(Bytes::from_static(b"404 page not found\n"));
            return Err(Response::builder().status(404).body(missing.map_err(Into::into).boxed_unsync()).unwrap());
        }
        let selector = ListSelector {
            path: path.clone(),
            name: query.get("fieldSelector").map(|selector| selector.replace("metadata.name=", "")),
            label: query.get("labelSelector").and_then(|text| text.split_once('=')).map(|(k, v)| (k.into(), v.into())),
        };
        let live = state.objects.get(&path).cloned();
        let sent: Value = serde_json::from_slice(body).unwrap_or_default();
        Ok(match (verb, live) {
            (Verb::List, _) => {
                let limit: usize = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
                let from: usize = query.get("continue").map_or(0, |token| token.parse().unwrap());
                let all = state
                    .objects
                    .iter()
                    .filter(|(path, object)| selector.matches_path(path) && selector.matches_labels(object));
                let all: Vec<&Value> = all.map(|(_, object)| object).collect();
                let items: Vec<&Value> = all.iter().skip(from).take(limit).copied().collect();
                let next = from + items.len();
                let more = if next < all.len() { next.to_string() } else { String::new() };
                let metadata = json!({ "resourceVersion": state.version.to_string(), "continue": more });
                ok_response(&json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items }))
            }
            (Verb::Watch, _) => {
                let from: u64 = query["resourceVersion"].parse().unwrap();
                let past: Vec<_> = state.history.iter().filter(|event| event.version > from).cloned().collect();
                let (receiver, link) = (self.events.subscribe(), link.clone());
                let live = stream::unfold(receiver, |mut receiver| async {
                    receiver.recv().await.ok().map(|event| (event, receiver))
                });
                let lines = stream::iter(past)
                    .chain(live)
                    .filter_map(move |event| std::future::ready(selector.watch_line(&event)));
                let lines = stream::select(lines, self.bookmarks());
                let seconds = query.get("timeoutSeconds").map_or(u64::MAX, |seconds| seconds.parse().unwrap());
                let closing = link.clone();
                let close = async move {
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    closing.wait_until_up().await;
                };
                let frames = lines.take_until(Box::pin(close)).then(move |line| {
                    let link = link.clone();
                    async move {
                        link.wait_until_up().await;
                        Ok(Frame::data(Bytes::from(line)))
                    }
                });
                Response::new(StreamBody::new(frames).boxed_unsync())
            }
            (Verb::Get, Some(live)) => ok_response(&live),
            (Verb::Create, _) => {
                let mut path = path;
                if state.missing_namespaces.contains(&path.namespace) {
                    return Err(rejection(404, "NotFound", json!({ "name": path.namespace, "kind": "namespaces" })));
                }
                path.name = sent["metadata"]["name"].as_str().unwrap().to_owned();
                if state.objects.contains_key(&path) {
                    return Err(status_response(409, "AlreadyExists", "already exists"));
                }
                ok_response(&self.store(&mut state, &path, "ADDED", sent, None))
            }
            (Verb::Update, Some(live)) => {
                let precondition = &sent["metadata"]["resourceVersion"];
                if !precondition.is_null() && *precondition != live["metadata"]["resourceVersion"] {
                    return Err(status_response(409, "Conflict", "the object has been modified"));
                }
                let uid = live["metadata"]["uid"].clone();
                ok_response(&self.store(&mut state, &path, "MODIFIED", sent, Some(uid)))
            }
            (Verb::Patch, live) => {
                let kind = parts.headers[http::header::CONTENT_TYPE].to_str().unwrap();
                let merged = patched(live.as_ref(), kind, &sent, sub.as_deref() == Some("status"))?;
                match live {
                    Some(live) if live == merged => ok_response(&live),
                    // The last finalizer is gone: the response has the version from before.
                    Some(_) if is_deleted_without_finalizers(&merged) => {
                        state.objects.remove(&path);
                        self.publish(&mut state, &path, "DELETED", merged.clone());
                        ok_response(&merged)
                    }
                    Some(live) => {
                        let uid = live["metadata"]["uid"].clone();
                        ok_response(&self.store(&mut state, &path, "MODIFIED", merged, Some(uid)))
                    }
                    None => ok_response(&self.store(&mut state, &path, "ADDED", merged, None)),
                }
            }
            (Verb::Delete, Some(mut live)) => {
                for field in ["uid", "resourceVersion"] {
                    let expected = &sent["preconditions"][field];
                    if !expected.is_null() && *expected != live["metadata"][field] {
                        let message = format!("the {field} in the precondition does not match");
                        return Err(status_response(409, "Conflict", &message));
                    }
                }
                if live["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty()) {
                    live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
                    let uid = live["metadata"]["uid"].clone();
                    return Ok(ok_response(&self.store(&mut state, &path, "MODIFIED", live, Some(uid))));
                }
                state.objects.remove(&path);
                self.publish(&mut state, &path, "DELETED", live);
                ok_response(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
            }
            (_, None) => status_response(404, "NotFound", "not found"),
            (Verb::Other, _) => status_response(405, "MethodNotAllowed", "no such verb"),
        })
    }

    fn store(
        &self,
        state: &mut TestServerState,
        path: &ObjectPath,
        event: &'static str,
        mut object: Value,
        uid: Option<Value>,
    ) -> Value {
        object["metadata"]["uid"] = uid.unwrap_or_else(|| format!("uid-{}", state.version + 1).into());
        if !path.namespace.is_empty() {
            object["metadata"]["namespace"] = path.namespace.clone().into();
        }
        self.publish(state, path, event, object)
    }

    fn publish(&self, state: &mut TestServerState, path: &ObjectPath, event: &'static str, mut object: Value) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let old = state.objects.get(path).cloned().unwrap_or_default();
        if event != "DELETED" {
            state.objects.insert(path.clone(), object.clone());
        }
        let event = StoredEvent { version: state.version, path: path.clone(), event, object: object.clone(), old };
        state.history.push(event.clone());
        let _ = self.events.send(event);
        object
    }
}

/// `<prefix>/[namespaces/<namespace>/]<plural>[/<name>[/<subresource>]]`; the collection is prefix and plural.
fn parse_path(path: &str) -> (ObjectPath, Option<String>) {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let split = if parts[0] == "api" { 2 } else { 3 };
    let (prefix, rest) = parts.split_at(split);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let part = |n: usize| rest.get(n).map(|part| (*part).to_owned());
    let path = ObjectPath {
        collection: format!("/{}/{}", prefix.join("/"), rest[0]),
        namespace: namespace.to_owned(),
        name: part(1).unwrap_or_default(),
    };
    (path, part(2))
}

fn ok_response(object: &Value) -> TestResponse {
    Response::new(Full::new(Bytes::from(object.to_string())).map_err(Into::into).boxed_unsync())
}

fn status_response(code: u16, reason: &str, message: &str) -> TestResponse {
    let details = if code == 404 { json!({ "name": "x", "kind": "things" }) } else { Value::Null };
    failure_response(code, reason, message, &details)
}

#[expect(clippy::needless_pass_by_value, reason = "every caller builds the details for this call")]
fn rejection(code: u16, reason: &str, details: Value) -> TestResponse {
    failure_response(code, reason, "rejected", &details)
}

fn failure_response(code: u16, reason: &str, message: &str, details: &Value) -> TestResponse {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": message, "details": details,
    });
    let mut response = ok_response(&body);
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
    response
}

#[test]
fn a_path_is_split_into_collection_namespace_name_and_subresource() {
    let (path, sub) = parse_path("/apis/coordination.k8s.io/v1/namespaces/a/leases/b/status");
    assert_eq!(path.collection, "/apis/coordination.k8s.io/v1/leases");
    assert_eq!((path.namespace.as_str(), path.name.as_str(), sub.as_deref()), ("a", "b", Some("status")));
    assert_eq!(parse_path("/api/v1/namespaces/a").0.collection, "/api/v1/namespaces");
    assert_eq!(Verb::from_request(&Method::GET, &http::Uri::from_static("/api/v1/namespaces/a")), Verb::Get);
}

fn is_deleted_without_finalizers(object: &Value) -> bool {
    let has_finalizers = object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
    !object["metadata"]["deletionTimestamp"].is_null() && !has_finalizers
}
