//! The pages of caches that a test has filled. No cluster.

use http::{HeaderMap, Method, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use vitivirt_api::machine::{LABEL_MANAGED_BY, MANAGED_BY};
use vitivirt_page::testing::{HtmlDocument, document};
use vitivirt_runtime::{health::Health, metrics::Metrics, watch::Watches};

use super::*;
use crate::{metrics::MachineMetrics, observe::Observer, source_secrets::SourceSecrets};

const HOSTILE: &str = "<script>alert(1)</script><img src=x onerror=alert(2)>";
const USER_DATA: &str = "password: hunter2";

fn pages(objects: &[Value]) -> MachinePages {
    let client = kube::Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
    let mut watches = Watches::new(client.clone(), Arc::new(Health::default()), CancellationToken::new());
    let caches = Caches::new(&mut watches, None);
    for object in objects {
        let kind = object["kind"].as_str().unwrap();
        let mut observers = caches.kinds.write_observers();
        observers.find(|(resource, _)| resource.kind == kind).unwrap().1.on_written(object);
    }
    let sources = SourceSecrets::new(client.clone(), client.clone(), Arc::default(), CancellationToken::new());
    let machines = MachineController {
        observer: Observer::new(client, caches, sources, Arc::default()),
        metrics: MachineMetrics::register(&Metrics::new("t")),
        waiting_status: Mutex::default(),
        repairs: Arc::default(),
    };
    MachinePages { machines: Arc::new(machines) }
}

fn get(pages: &MachinePages, uri: &str) -> (u16, HtmlDocument) {
    let replica = Replica { identity: "a".to_owned(), leader: Some("a".to_owned()), problem: None };
    let headers = HeaderMap::from_iter([(header::HOST, "localhost:8082".parse().unwrap())]);
    let uri = uri.parse().unwrap();
    let response = vitivirt_page::server::respond(&PROGRAM, &replica, pages, &Method::GET, &uri, &headers);
    let status = response.status().as_u16();
    (status, document(response))
}

fn page(pages: &MachinePages, uri: &str) -> HtmlDocument {
    let (status, document) = get(pages, uri);
    assert_eq!((status, &document.errors), (200, &Vec::new()), "{uri}");
    assert!(document.elements.iter().all(|element| element.name != "script" && element.name != "img"));
    assert!(!document.text.contains(USER_DATA));
    document
}

fn machine(name: &str, created: &str, phase: &str, ready: Option<&str>, edit: impl FnOnce(&mut Value)) -> Value {
    let (status, reason) = ready.map_or(("True", phase), |reason| ("False", reason));
    let condition = |type_: &str, status: &str, reason: &str, message: &str| {
        json!({"type": type_, "status": status, "reason": reason, "message": message,
               "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let mut object = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
        "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}"), "resourceVersion": "1",
                     "generation": 1, "creationTimestamp": created, "finalizers": ["machine.vitistack.io/cleanup"]},
        "spec": {"template": "small", "cloudInit": {"userData": USER_DATA}},
        "status": {"phase": phase, "conditions": [condition("Ready", status, reason, "m")]},
    });
    if ready.is_some() {
        object["status"]["diagnosis"] = json!(format!("diagnosis of {name}"));
    }
    if name == "stale" {
        let restart = condition("RestartRequired", "True", "PendingRestart", "Restart required to apply spec.x");
        object["status"]["conditions"].as_array_mut().unwrap().push(restart);
    }
    edit(&mut object);
    object
}

#[tokio::test]
async fn machines_that_are_not_ready_are_first_with_reason_and_link() {
    let pages = pages(&[
        machine("new", "2026-01-02T00:00:00Z", "Failed", Some("TemplateNotFound"), |object| {
            object["status"]["diagnosis"] = json!(HOSTILE);
        }),
        machine("old", "2026-01-01T00:00:00Z", "Creating", Some("PVCPending"), |_| {}),
        machine("fine", "2025-01-01T00:00:00Z", "Running", None, |_| {}),
        machine("stale", "2025-01-01T00:00:00Z", "Running", None, |_| {}),
        machine("leaving", "2025-01-01T00:00:00Z", "Running", Some("Deleting"), |object| {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }),
    ]);
    let overview = page(&pages, "/");
    let links = overview.links();
    let position = |target: &str| links.iter().position(|link| *link == target);
    assert!(position("/machines/shop/old").unwrap() < position("/machines/shop/new").unwrap(), "oldest first");
    assert_eq!(position("/machines/shop/fine"), None);
    assert!(links.iter().any(|link| link.ends_with("/docs/troubleshooting.md#templatenotfound")), "{links:?}");
    assert!(overview.text.contains(HOSTILE) && overview.text.contains("diagnosis of old"));
    for heading in ["Not ready (2)", "Being deleted (1)", "Restart required (1)"] {
        assert!(overview.text.contains(heading), "{}", overview.text);
    }
    assert!(overview.text.contains("Restart required to apply spec.x"));
    assert!(overview.text.contains("this replica is the leader"));
}

#[tokio::test]
async fn the_list_is_filtered_and_bounded() {
    let many = (0..600).map(|n| machine(&format!("vm-{n:03}"), "2026-01-01T00:00:00Z", "Running", None, |_| {}));
    let mut objects: Vec<Value> = many.collect();
    objects.push(machine("web", "2026-01-01T00:00:00Z", "Stopped", None, |object| {
        object["metadata"]["namespace"] = json!("other");
    }));
    let pages = pages(&objects);
    let machines = |uri: &str| {
        let document = page(&pages, uri);
        document.links().iter().filter(|link| link.starts_with("/machines/")).map(|link| (*link).to_owned()).collect()
    };
    let count = |uri: &str| -> usize { Vec::<String>::len(&machines(uri)) };
    assert_eq!(count("/machines"), MOST_ROWS);
    assert!(page(&pages, "/machines").text.contains("The first 500 of 601 Machines"));
    assert_eq!(machines("/machines?namespace=other"), ["/machines/other/web"]);
    assert_eq!(machines("/machines?phase=Stopped&q=WEB"), ["/machines/other/web"]);
    assert_eq!(count("/machines?q=vm-00"), 10);
    assert_eq!(count("/machines?phase=Failed"), 0);
    let hostile = page(&pages, "/machines?q=%22%3E%3Cscript%3E");
    let inputs = hostile.elements.iter().filter(|element| element.name == "input").flat_map(|input| &input.attributes);
    assert!(inputs.clone().any(|(name, value)| name == "value" && value == "\"><script>"));
}

#[tokio::test]
async fn one_machine_is_a_tree_of_its_objects() {
    let ours =
        json!({LABEL_MANAGED_BY: MANAGED_BY, "vitistack.io/machine": "web", "vitistack.io/machine-uid": "uid-web"});
    let owner = json!([{"apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "name": "web", "uid": "uid-web",
                        "controller": true}]);
    let metadata = |name: &str| {
        json!({"name": name, "namespace": "shop", "uid": name, "resourceVersion": "2",
                                       "labels": ours, "ownerReferences": owner})
    };
    let pages = pages(&[
        machine("web", "2026-01-01T00:00:00Z", "Creating", Some("VMCreated"), |_| {}),
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata("web"),
               "status": {"printableStatus": "Starting"}}),
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": metadata("web"),
               "status": {"phase": "Scheduling", "conditions": [{"type": "PodScheduled", "status": "False",
                          "reason": "Unschedulable", "message": HOSTILE}]}}),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata("web-root"),
               "spec": {"resources": {"requests": {"storage": "20Gi"}}}, "status": {"phase": "Bound"}}),
    ]);
    let document = page(&pages, "/machines/shop/web");
    for part in [
        "Machine web",
        "VirtualMachine web",
        "VirtualMachineInstance web",
        "Pod",
        "PersistentVolumeClaim web-root",
        "Network pod",
        "Secret",
        "20Gi",
    ] {
        assert!(document.text.contains(part), "{part} is missing in {}", document.text);
    }
    assert!(document.text.contains(&format!("cannot be scheduled: {HOSTILE}")));
    for missing in ["/machines/shop/none", "/machines/shop", "/machines/shop/web/more", "/other"] {
        assert_eq!(get(&pages, missing).0, 404, "{missing}");
    }
}
