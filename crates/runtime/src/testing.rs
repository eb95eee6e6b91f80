//! A small API server in memory, reached through the same transport as a real one: resource versions, UIDs,
//! preconditions, paged lists and watches work as Kubernetes defines them, for whatever kind is asked for. Each client
//! has a link of its own, which can be cut and can lose or replace answers.

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
    client::{Bucket, Transport, Verb},
    metrics::Metrics,
};

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    collection: String,
    namespace: String,
    name: String,
}

#[derive(Clone)]
struct News {
    version: u64,
    place: Place,
    event: &'static str,
    object: Value,
    /// What was there before.
    old: Value,
}

struct State {
    version: u64,
    objects: BTreeMap<Place, Value>,
    history: Vec<News>,
    absent: HashSet<String>,
    missing_namespaces: HashSet<String>,
}

/// What a list or a watch asks for.
#[derive(Clone)]
struct Selected {
    place: Place,
    name: Option<String>,
    /// `key=value` only.
    label: Option<(String, String)>,
}

impl Selected {
    fn place(&self, have: &Place) -> bool {
        have.collection == self.place.collection
            && (self.place.namespace.is_empty() || have.namespace == self.place.namespace)
            && self.name.as_ref().is_none_or(|name| *name == have.name)
    }

    fn labels(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.label.as_ref().is_none_or(|(key, value)| labels[key.as_str()] == value.as_str())
    }

    /// What enters the selection is new to who asked for it, and what leaves it is gone.
    fn line(&self, news: &News) -> Option<String> {
        if !self.place(&news.place) {
            return None;
        }
        let (before, after) = (self.labels(&news.old), self.labels(&news.object));
        let event = match (news.event, before && !news.old.is_null(), after) {
            ("MODIFIED", true, false) => "DELETED",
            ("MODIFIED", false, true) => "ADDED",
            (_, _, true) => news.event,
            _ => return None,
        };
        Some(format!("{}\n", json!({ "type": event, "object": news.object })))
    }
}

pub(crate) struct Server {
    state: Mutex<State>,
    news: broadcast::Sender<News>,
}

/// What happens to the next request of a verb.
pub(crate) enum Fault {
    /// It is answered with this status and not carried out.
    Refuse(Verb, u16),
    /// It is carried out, and no answer comes.
    LoseAnswer(Verb),
}

/// The network between one client and the server.
pub(crate) struct Link {
    up: watch::Sender<bool>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    pub(crate) requests: Mutex<Vec<(Verb, String)>>,
}

impl Link {
    /// While it is cut, requests hang and watches are silent. Nothing is refused: that would be noticed.
    pub(crate) fn cut(&self) {
        self.up.send_replace(false);
    }

    pub(crate) fn mend(&self) {
        self.up.send_replace(true);
    }

    pub(crate) fn count(&self, verb: Verb) -> usize {
        self.requests.lock().iter().filter(|(have, _)| *have == verb).count()
    }

    pub(crate) fn writes(&self) -> usize {
        self.requests.lock().iter().filter(|(verb, _)| !matches!(verb, Verb::Get | Verb::List | Verb::Watch)).count()
    }

    async fn reconcile(&self) {
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }

    fn fault(&self, verb: Verb) -> Option<Fault> {
        let mut faults = self.faults.lock();
        let at = faults.iter().position(|fault| match fault {
            Fault::Refuse(of, _) | Fault::LoseAnswer(of) => *of == verb,
        })?;
        faults.remove(at)
    }
}

impl Server {
    pub(crate) fn new() -> Arc<Self> {
        let state = State {
            version: 100,
            objects: BTreeMap::new(),
            history: Vec::new(),
            absent: HashSet::new(),
            missing_namespaces: HashSet::new(),
        };
        Arc::new(Self { state: Mutex::new(state), news: broadcast::channel(10_000).0 })
    }

    pub(crate) fn client(self: &Arc<Self>) -> (Client, Arc<Link>) {
        self.client_at_rate(None)
    }

    pub(crate) fn client_at_rate(self: &Arc<Self>, requests: Option<Bucket>) -> (Client, Arc<Link>) {
        let link =
            Arc::new(Link { up: watch::Sender::new(true), faults: Mutex::default(), requests: Mutex::default() });
        let (server, of) = (self.clone(), link.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (server, link) = (server.clone(), of.clone());
            async move { Ok::<_, BoxError>(server.serve(request, link).await) }
        });
        let transport = Transport {
            deadline: Duration::from_secs(15),
            requests: requests.map(Arc::new),
            watches: Arc::new(Bucket::new(1000.0, 1000)),
            metrics: Arc::new(Metrics::new("test")),
        };
        (Client::new(transport.layer(service), "default"), link)
    }

    /// Lets the kind come or go, with all its objects, as a CRD does.
    pub(crate) fn serve_kind(&self, collection: &str, served: bool) {
        let mut state = self.state.lock();
        if served {
            state.absent.remove(collection);
            return;
        }
        state.absent.insert(collection.to_owned());
        let gone: Vec<Place> = state.objects.keys().filter(|place| place.collection == collection).cloned().collect();
        for place in gone {
            let object = state.objects.remove(&place).unwrap();
            self.publish(&mut state, &place, "DELETED", object);
        }
    }

    /// Takes a namespace away, with all its objects. Nothing can be made in it any more.
    pub(crate) fn remove_namespace(&self, namespace: &str) {
        let mut state = self.state.lock();
        state.missing_namespaces.insert(namespace.to_owned());
        let gone: Vec<Place> = state.objects.keys().filter(|place| place.namespace == namespace).cloned().collect();
        for place in gone {
            let object = state.objects.remove(&place).unwrap();
            self.publish(&mut state, &place, "DELETED", object);
        }
    }

    /// Changes an object and tells the watches of it in a way that they cannot read.
    pub(crate) fn put_unreadably(&self, collection: &str, object: Value, nonsense: Value) {
        let mut state = self.state.lock();
        let field = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
        let place = Place { collection: collection.to_owned(), namespace: field("namespace"), name: field("name") };
        let uid = state.objects[&place]["metadata"]["uid"].clone();
        let stored = self.store(&mut state, &place, "MODIFIED", nonsense, Some(uid));
        let live = state.objects.get_mut(&place).unwrap();
        *live = object;
        live["metadata"]["uid"] = stored["metadata"]["uid"].clone();
        live["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"].clone();
    }

    pub(crate) fn get(&self, collection: &str, namespace: &str, name: &str) -> Option<Value> {
        let place = Place { collection: collection.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        self.state.lock().objects.get(&place).cloned()
    }

    pub(crate) fn put(&self, collection: &str, object: Value) -> Value {
        let mut state = self.state.lock();
        let field = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
        let place = Place { collection: collection.to_owned(), namespace: field("namespace"), name: field("name") };
        let uid = state.objects.get(&place).map(|old| old["metadata"]["uid"].clone());
        let kind = if uid.is_some() { "MODIFIED" } else { "ADDED" };
        self.store(&mut state, &place, kind, object, uid)
    }

    pub(crate) fn remove(&self, collection: &str, namespace: &str, name: &str) {
        let place = Place { collection: collection.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        let mut state = self.state.lock();
        let object = state.objects.remove(&place).unwrap();
        self.publish(&mut state, &place, "DELETED", object);
    }

    async fn serve(&self, request: Request<Body>, link: Arc<Link>) -> Answer {
        let verb = Verb::of(request.method(), request.uri());
        link.requests.lock().push((verb, request.uri().to_string()));
        link.reconcile().await;
        let fault = link.fault(verb);
        if let Some(Fault::Refuse(_, code)) = fault {
            return status(code, "", "refused by the test");
        }
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        let answer = self.answer(verb, &parts, &body, &link).unwrap_or_else(|refused| refused);
        if matches!(fault, Some(Fault::LoseAnswer(_))) {
            std::future::pending::<()>().await;
        }
        link.reconcile().await;
        answer
    }

    #[expect(clippy::result_large_err, reason = "a refusal is an answer too, and this is a test")]
    fn answer(&self, verb: Verb, parts: &Parts, body: &Bytes, link: &Arc<Link>) -> Result<Answer, Answer> {
        let (place, sub) = locate(parts.uri.path());
        let query: BTreeMap<String, String> = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.replace("%3D", "=")))
            .collect();
        let mut state = self.state.lock();
        if state.absent.contains(&place.collection) {
            let missing = Full::new(Bytes::from_static(b"404 page not found\n"));
            return Err(Response::builder().status(404).body(missing.map_err(Into::into).boxed_unsync()).unwrap());
        }
        let selected = Selected {
            place: place.clone(),
            name: query.get("fieldSelector").map(|selector| selector.replace("metadata.name=", "")),
            label: query.get("labelSelector").and_then(|text| text.split_once('=')).map(|(k, v)| (k.into(), v.into())),
        };
        let live = state.objects.get(&place).cloned();
        let sent: Value = serde_json::from_slice(body).unwrap_or_default();
        Ok(match (verb, live) {
            (Verb::List, _) => {
                let limit: usize = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
                let from: usize = query.get("continue").map_or(0, |token| token.parse().unwrap());
                let all = state.objects.iter().filter(|(have, object)| selected.place(have) && selected.labels(object));
                let all: Vec<&Value> = all.map(|(_, object)| object).collect();
                let items: Vec<&Value> = all.iter().skip(from).take(limit).copied().collect();
                let next = from + items.len();
                let more = if next < all.len() { next.to_string() } else { String::new() };
                let metadata = json!({ "resourceVersion": state.version.to_string(), "continue": more });
                ok(&json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items }))
            }
            (Verb::Watch, _) => {
                let from: u64 = query["resourceVersion"].parse().unwrap();
                let past: Vec<News> = state.history.iter().filter(|news| news.version > from).cloned().collect();
                let (receiver, link) = (self.news.subscribe(), link.clone());
                let live = stream::unfold(receiver, |mut receiver| async {
                    receiver.recv().await.ok().map(|news| (news, receiver))
                });
                let lines =
                    stream::iter(past).chain(live).filter_map(move |news| std::future::ready(selected.line(&news)));
                let frames = lines.then(move |line| {
                    let link = link.clone();
                    async move {
                        link.reconcile().await;
                        Ok(Frame::data(Bytes::from(line)))
                    }
                });
                Response::new(StreamBody::new(frames).boxed_unsync())
            }
            (Verb::Get, Some(live)) => ok(&live),
            (Verb::Create, _) => {
                let mut place = place;
                if state.missing_namespaces.contains(&place.namespace) {
                    return Err(refusal(404, "NotFound", json!({ "name": place.namespace, "kind": "namespaces" })));
                }
                place.name = sent["metadata"]["name"].as_str().unwrap().to_owned();
                if state.objects.contains_key(&place) {
                    return Err(status(409, "AlreadyExists", "already exists"));
                }
                ok(&self.store(&mut state, &place, "ADDED", sent, None))
            }
            (Verb::Update, Some(live)) => {
                let precondition = &sent["metadata"]["resourceVersion"];
                if !precondition.is_null() && *precondition != live["metadata"]["resourceVersion"] {
                    return Err(status(409, "Conflict", "the object has been modified"));
                }
                let uid = live["metadata"]["uid"].clone();
                ok(&self.store(&mut state, &place, "MODIFIED", sent, Some(uid)))
            }
            (Verb::Patch, live) => {
                let kind = parts.headers[http::header::CONTENT_TYPE].to_str().unwrap();
                let merged = patched(live.as_ref(), kind, &sent, sub.as_deref() == Some("status"))?;
                match live {
                    Some(live) if live == merged => ok(&live),
                    Some(live) => {
                        let uid = live["metadata"]["uid"].clone();
                        ok(&self.store(&mut state, &place, "MODIFIED", merged, Some(uid)))
                    }
                    None => ok(&self.store(&mut state, &place, "ADDED", merged, None)),
                }
            }
            (Verb::Delete, Some(mut live)) => {
                let wanted = &sent["preconditions"]["uid"];
                if !wanted.is_null() && *wanted != live["metadata"]["uid"] {
                    return Err(status(409, "Conflict", "the UID in the precondition does not match"));
                }
                if live["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty()) {
                    live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
                    let uid = live["metadata"]["uid"].clone();
                    return Ok(ok(&self.store(&mut state, &place, "MODIFIED", live, Some(uid))));
                }
                state.objects.remove(&place);
                self.publish(&mut state, &place, "DELETED", live);
                ok(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
            }
            (_, None) => status(404, "NotFound", "not found"),
            (Verb::Other, _) => status(405, "MethodNotAllowed", "no such verb"),
        })
    }

    fn store(
        &self,
        state: &mut State,
        place: &Place,
        event: &'static str,
        mut object: Value,
        uid: Option<Value>,
    ) -> Value {
        object["metadata"]["uid"] = uid.unwrap_or_else(|| format!("uid-{}", state.version + 1).into());
        if !place.namespace.is_empty() {
            object["metadata"]["namespace"] = place.namespace.clone().into();
        }
        self.publish(state, place, event, object)
    }

    fn publish(&self, state: &mut State, place: &Place, event: &'static str, mut object: Value) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let old = state.objects.get(place).cloned().unwrap_or_default();
        if event != "DELETED" {
            state.objects.insert(place.clone(), object.clone());
        }
        let news = News { version: state.version, place: place.clone(), event, object: object.clone(), old };
        state.history.push(news.clone());
        let _ = self.news.send(news);
        object
    }
}

/// `<prefix>/[namespaces/<namespace>/]<plural>[/<name>[/<sub>]]`; the collection is prefix and plural.
fn locate(path: &str) -> (Place, Option<String>) {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let split = if parts[0] == "api" { 2 } else { 3 };
    let (prefix, rest) = parts.split_at(split);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let part = |n: usize| rest.get(n).map(|part| (*part).to_owned());
    let place = Place {
        collection: format!("/{}/{}", prefix.join("/"), rest[0]),
        namespace: namespace.to_owned(),
        name: part(1).unwrap_or_default(),
    };
    (place, part(2))
}

fn ok(object: &Value) -> Answer {
    Response::new(Full::new(Bytes::from(object.to_string())).map_err(Into::into).boxed_unsync())
}

fn status(code: u16, reason: &str, message: &str) -> Answer {
    let details = if code == 404 { json!({ "name": "x", "kind": "things" }) } else { Value::Null };
    told(code, reason, message, &details)
}

#[expect(clippy::needless_pass_by_value, reason = "details are made where they are given")]
fn refusal(code: u16, reason: &str, details: Value) -> Answer {
    told(code, reason, "refused", &details)
}

fn told(code: u16, reason: &str, message: &str, details: &Value) -> Answer {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": message, "details": details,
    });
    let mut answer = ok(&body);
    *answer.status_mut() = http::StatusCode::from_u16(code).unwrap();
    answer
}

#[test]
fn paths_are_understood() {
    let (place, sub) = locate("/apis/coordination.k8s.io/v1/namespaces/a/leases/b/status");
    assert_eq!(place.collection, "/apis/coordination.k8s.io/v1/leases");
    assert_eq!((place.namespace.as_str(), place.name.as_str(), sub.as_deref()), ("a", "b", Some("status")));
    assert_eq!(locate("/api/v1/namespaces/a").0.collection, "/api/v1/namespaces");
    assert_eq!(Verb::of(&Method::GET, &http::Uri::from_static("/api/v1/namespaces/a")), Verb::Get);
}
