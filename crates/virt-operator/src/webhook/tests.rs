//! The webhook server over real TLS, with an API server that the test simulates.

use std::net::{Ipv4Addr, SocketAddr};

use http::{Request, Response};
use hyper::client::conn::http1::SendRequest;
use kube::client::Body as KubeBody;
use parking_lot::Mutex;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tower::{BoxError, service_fn};
use vitivirt_install::certificates::KeyPair;

use super::{review::AdmissionRequest, *};

const HOST: &str = "kubevirt-operator-webhook.kubevirt.svc";
const SHORT: Duration = Duration::from_millis(300);

/// The response to a request, given as `VERB URI`. With `None` the API server never responds.
type RequestHandler = dyn Fn(&str) -> Option<(u16, Value)> + Send + Sync;

/// A simulated API server that records the requests.
#[derive(Clone)]
struct FakeApiServer {
    requests: Arc<Mutex<Vec<String>>>,
    handler: Arc<RequestHandler>,
}

impl FakeApiServer {
    fn new(handler: impl Fn(&str) -> Option<(u16, Value)> + Send + Sync + 'static) -> Self {
        Self { requests: Arc::default(), handler: Arc::new(handler) }
    }

    /// Serves lists of these objects, by the plural of their kind. Other kinds are not served.
    fn with_lists(lists: Value) -> Self {
        Self::new(move |uri| {
            let plural = uri.split('?').next().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
            Some(match lists.get(plural) {
                Some(items) => (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items})),
                None => (404, status(404, "the server could not find the requested resource", &json!(null))),
            })
        })
    }

    fn client(&self) -> Client {
        let api = self.clone();
        let service = service_fn(move |request: Request<KubeBody>| {
            let api = api.clone();
            async move {
                let request = format!("{} {}", request.method(), request.uri());
                api.requests.lock().push(request.clone());
                let Some((status, body)) = (api.handler)(&request) else { return std::future::pending().await };
                let body = Full::new(Bytes::from(body.to_string()));
                Ok::<_, BoxError>(Response::builder().status(status).body(body).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

fn status(code: u16, message: &str, details: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": message,
           "reason": "Invalid", "details": details})
}

fn certificate() -> (KeyPair, CertificateDer<'static>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new([HOST.to_owned()]).unwrap().self_signed(&key).unwrap();
    let pair = KeyPair { certificate: certificate.pem().into_bytes(), key: key.serialize_pem().into_bytes() };
    let der = CertificateDer::from_pem_slice(&pair.certificate).unwrap();
    (pair, der)
}

struct TestWebhook {
    address: SocketAddr,
    server_tls: ServerTls,
    buffer: Arc<Semaphore>,
    root: CertificateDer<'static>,
}

impl TestWebhook {
    async fn start(api: &FakeApiServer, limits: Limits) -> Self {
        let server_tls = ServerTls::new().unwrap();
        let (pair, root) = certificate();
        server_tls.set(Some(&pair), None);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = WebhookServer::new(api.client(), server_tls.clone());
        let buffer = server.buffer.clone();
        tokio::spawn(server.serve_with_limits(limits, listener, CancellationToken::new()));
        Self { address, server_tls, buffer, root }
    }

    async fn connect(&self) -> Result<TlsStream<TcpStream>, std::io::Error> {
        let mut roots = RootCertStore::empty();
        roots.add(self.root.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(HOST).unwrap(), stream).await
    }

    async fn client<B>(&self) -> SendRequest<B>
    where
        B: Body<Data = Bytes, Error = std::convert::Infallible> + Send + 'static,
    {
        let io = hyper_util::rt::TokioIo::new(self.connect().await.unwrap());
        let (sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    async fn post(&self, path: &str, body: impl Into<Bytes>) -> (u16, String) {
        let request = Request::post(path).header("host", HOST).header("content-type", "application/json");
        self.send(request.body(Full::new(body.into())).unwrap()).await
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> (u16, String) {
        let response = self.client().await.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Sends an AdmissionReview and returns the `response` of the AdmissionReview that the server sends back.
    async fn review(&self, operation: &str, parts: Value) -> Value {
        let path = format!("/kubevirt-validate-{}", operation.to_lowercase());
        let (status, body) = self.post(&path, admission_review(operation, &parts).to_string()).await;
        assert_eq!(status, 200, "{body}");
        let review: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&review["apiVersion"], &review["kind"]),
            (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
        );
        assert_eq!(review["response"]["uid"], "u-1");
        review["response"].clone()
    }
}

fn admission_review(operation: &str, parts: &Value) -> Value {
    let mut request = json!({
        "uid": "u-1", "operation": operation, "name": "kubevirt", "namespace": "kubevirt",
        "kind": {"group": "kubevirt.io", "version": "v1", "kind": "KubeVirt"},
        "resource": {"group": "kubevirt.io", "version": "v1", "resource": "kubevirts"},
        "object": null, "oldObject": null, "dryRun": false, "userInfo": {"username": "admin"},
    });
    for (name, value) in parts.as_object().unwrap() {
        request[name] = value.clone();
    }
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
}

fn kubevirt(spec: &Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
           "metadata": {"name": "kubevirt", "namespace": "kubevirt", "uid": "1"},
           "spec": spec, "status": {"phase": "Deployed"}})
}

fn object(namespace: &str, name: &str) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
           "metadata": {"namespace": namespace, "name": name}})
}

fn message(response: &Value) -> &str {
    response["status"]["message"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn an_update_is_allowed_or_denied_with_its_causes() {
    let api = FakeApiServer::with_lists(json!({}));
    let webhook = TestWebhook::start(&api, LIMITS).await;
    let old = kubevirt(&json!({}));
    let good =
        webhook.review("UPDATE", json!({"oldObject": old, "object": kubevirt(&json!({"imageTag": "v1"}))})).await;
    assert_eq!(good, json!({"uid": "u-1", "allowed": true}));

    let bad = kubevirt(&json!({"infra": {"replicas": 0}, "imageTag": "a b"}));
    let bad = webhook.review("UPDATE", json!({"oldObject": old, "object": bad})).await;
    assert_eq!((&bad["allowed"], &bad["status"]["code"]), (&json!(false), &json!(422)));
    assert_eq!(bad["status"]["reason"], "Invalid");
    assert!(
        message(&bad).contains("spec.infra.replicas: invalid value 0") && message(&bad).contains("; spec.imageTag")
    );
    let causes = &bad["status"]["details"]["causes"];
    assert_eq!(causes[0]["field"], "spec.infra.replicas");
    assert_eq!(causes[0]["reason"], "FieldValueInvalid");
    assert_eq!(api.requests(), [""; 0], "the decision needs no request");
}

#[tokio::test]
async fn a_new_object_that_cannot_be_parsed_is_denied_and_an_old_one_can_be_repaired() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let bad = kubevirt(&json!({"infra": {"replicas": "many"}}));
    let response = webhook.review("UPDATE", json!({"oldObject": kubevirt(&json!({})), "object": bad})).await;
    assert_eq!((&response["allowed"], &response["status"]["code"]), (&json!(false), &json!(400)));
    assert!(message(&response).contains("many"), "{response}");
    let response = webhook.review("UPDATE", json!({"oldObject": bad, "object": kubevirt(&json!({}))})).await;
    assert_eq!(response["allowed"], true, "a user can repair the resource: {response}");
}

#[tokio::test]
async fn the_response_contains_warnings() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let new = kubevirt(&json!({"configuration": {
        "developerConfiguration": {"featureGates": ["LiveMigration"]},
        "tlsConfiguration": {"minTLSVersion": "VersionTLS10", "ciphers": ["TLS_RSA_WITH_AES_128_CBC_SHA"]},
    }}));
    let response = webhook.review("UPDATE", json!({"oldObject": kubevirt(&json!({})), "object": new})).await;
    assert_eq!(
        response,
        json!({"uid": "u-1", "allowed": true, "warnings": [
            "spec.configuration.developerConfiguration.featureGates: LiveMigration is always enabled in this \
             release; remove it from the list",
            "virt-operator's endpoints support only TLS 1.2 and 1.3, although minTLSVersion is VersionTLS10",
            "virt-operator's endpoints do not support TLS_RSA_WITH_AES_128_CBC_SHA",
        ]})
    );
}

#[tokio::test]
async fn fault_21_the_response_warns_of_one_replica_on_several_nodes() {
    let node = |name: &str| json!({"metadata": {"name": name}});
    let one = kubevirt(&json!({"infra": {"replicas": 1}}));
    let change = json!({"oldObject": kubevirt(&json!({})), "object": one});
    for (nodes, expected) in [(vec![node("a"), node("b")], 1), (vec![node("a")], 0)] {
        let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({"nodes": nodes})), LIMITS).await;
        let response = webhook.review("UPDATE", change.clone()).await;
        assert_eq!(response["allowed"], true);
        let warnings = response["warnings"].as_array().cloned().unwrap_or_default();
        assert_eq!(warnings.len(), expected, "{response}");
        assert!(
            warnings.iter().all(|warning| warning.as_str().unwrap().starts_with("spec.infra.replicas: 1 is too few"))
        );
    }
}

#[tokio::test]
async fn placement_is_validated_by_the_api_server_with_a_dry_run() {
    let new = kubevirt(&json!({"infra": {"nodePlacement": {"tolerations": [{"operator": "Sometimes"}]}}}));
    let change = json!({"oldObject": kubevirt(&json!({})), "object": new});
    let causes = json!({"causes": [{"reason": "FieldValueInvalid", "field": "spec.template.spec.tolerations[0].operator",
                                    "message": "Invalid value: \"Sometimes\""}]});
    let api = FakeApiServer::new(move |_| Some((422, status(422, "Deployment is invalid", &causes))));
    let webhook = TestWebhook::start(&api, LIMITS).await;
    let response = webhook.review("UPDATE", change.clone()).await;
    assert_eq!(
        message(&response),
        "spec.infra.nodePlacement.tolerations[0].operator: spec.infra.nodePlacement.tolerations.operator in body should \
         be one of the supported values: Invalid value: \"Sometimes\""
    );
    assert_eq!(api.requests(), ["POST /apis/apps/v1/namespaces/kubevirt/deployments?&dryRun=All"]);

    let api = FakeApiServer::new(|_| Some((403, status(403, "quota exceeded", &json!(null)))));
    let webhook = TestWebhook::start(&api, LIMITS).await;
    let response = webhook.review("UPDATE", change).await;
    assert_eq!(response["allowed"], true);
    let warning = response["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with("spec.infra.nodePlacement was not checked: ") && warning.contains("quota"),
        "{warning}"
    );
}

#[tokio::test]
async fn a_second_kubevirt_resource_is_denied() {
    let new = json!({"object": kubevirt(&json!({}))});
    let api = FakeApiServer::with_lists(json!({"kubevirts": []}));
    let webhook = TestWebhook::start(&api, LIMITS).await;
    assert_eq!(webhook.review("CREATE", new.clone()).await["allowed"], true);
    assert_eq!(api.requests(), ["GET /apis/kubevirt.io/v1/kubevirts?&limit=2"]);

    let webhook =
        TestWebhook::start(&FakeApiServer::with_lists(json!({"kubevirts": [kubevirt(&json!({}))]})), LIMITS).await;
    let response = webhook.review("CREATE", new.clone()).await;
    assert_eq!(response["status"]["code"], 403);
    assert!(
        message(&response).starts_with("Kubevirt is already created: KubeVirt kubevirt/kubevirt already exists"),
        "{response}"
    );

    let api = FakeApiServer::new(|_| Some((500, status(500, "etcd is down", &json!(null)))));
    let webhook = TestWebhook::start(&api, LIMITS).await;
    let response = webhook.review("CREATE", new).await;
    assert_eq!(response["status"]["code"], 503);
    assert!(message(&response).contains("etcd is down") && message(&response).ends_with("try again"), "{response}");
}

fn kubevirt_with_workload_protection() -> Value {
    kubevirt(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}))
}

#[tokio::test]
async fn deletion_is_denied_while_workloads_exist_if_the_uninstall_strategy_says_so() {
    let lists = json!({
        "virtualmachineinstances": [object("shop", "a")], "virtualmachines": [],
        "virtualmachineinstancereplicasets": [object("shop", "r"), object("shop", "s")],
    });
    let api = FakeApiServer::with_lists(lists);
    let webhook = TestWebhook::start(&api, LIMITS).await;
    let response = webhook.review("DELETE", json!({"oldObject": kubevirt(&json!({}))})).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(api.requests(), [""; 0]);

    let response = webhook.review("DELETE", json!({"oldObject": kubevirt_with_workload_protection()})).await;
    assert_eq!((&response["allowed"], &response["status"]["code"]), (&json!(false), &json!(403)));
    let expected = "there are still Virtual Machine Instances present (shop/a) and Virtual Machine Instance Replica Sets \
                    present (shop/r, shop/s), and";
    assert!(message(&response).contains(expected), "{response}");
    let requests = api.requests();
    assert_eq!(requests.len(), 3);
    assert!(requests.iter().all(|uri| uri.ends_with("limit=2")), "{requests:?}");
}

#[tokio::test]
async fn kinds_that_are_not_served_have_no_objects() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    assert_eq!(
        webhook.review("DELETE", json!({"oldObject": kubevirt_with_workload_protection()})).await["allowed"],
        true
    );
}

#[tokio::test]
async fn objects_that_a_delete_request_does_not_contain_are_read_from_the_api_server() {
    let one = FakeApiServer::new(|uri| {
        Some(match uri {
            "GET /apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt" => {
                (200, kubevirt_with_workload_protection())
            }
            uri if uri.contains("/virtualmachines?") => {
                (200, json!({"metadata": {"continue": "x"}, "items": [object("a", "b"), object("a", "c")]}))
            }
            _ => (404, status(404, "not found", &json!(null))),
        })
    });
    let webhook = TestWebhook::start(&one, LIMITS).await;
    let response = webhook.review("DELETE", json!({})).await;
    assert!(message(&response).contains("Virtual Machines present (a/b, a/c and others)"), "{response}");
    assert_eq!(webhook.review("DELETE", json!({"name": "gone"})).await["allowed"], true);

    let several = FakeApiServer::with_lists(
        json!({"kubevirts": [kubevirt_with_workload_protection()], "virtualmachines": [object("a", "b")]}),
    );
    let webhook = TestWebhook::start(&several, LIMITS).await;
    assert_eq!(webhook.review("DELETE", json!({"name": ""})).await["allowed"], false);
    assert_eq!(several.requests()[0], "GET /apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts?&limit=2");
}

#[tokio::test(start_paused = true)]
async fn a_hanging_api_server_ends_the_request_with_503_in_time() {
    let client = AdmissionClient::new(FakeApiServer::new(|_| None).client());
    let request: AdmissionRequest = review::parse_review(
        admission_review("DELETE", &json!({"oldObject": kubevirt_with_workload_protection()})).to_string().as_bytes(),
    )
    .unwrap();
    let begin = tokio::time::Instant::now();
    let decision = admit(&client, WebhookEndpoint::Delete, request).await;
    assert!(begin.elapsed() < LIMITS.request_timeout);
    assert_eq!(decision.code, 503);
    assert_eq!(
        decision.refusals[0].to_string(),
        "API server did not respond to virt-operator in time; nothing was changed, try again"
    );
}

#[tokio::test]
async fn an_invalid_request_gets_a_response_that_names_the_problem() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let update = "/kubevirt-validate-update";
    let good = admission_review("UPDATE", &json!({}));
    let other_version = {
        let mut review = good.clone();
        review["apiVersion"] = json!("admission.k8s.io/v1beta1");
        review
    };
    let pods = admission_review("UPDATE", &json!({"resource": {"group": "", "version": "v1", "resource": "pods"}}));
    for (path, body, status, message) in [
        ("/", "{}".to_owned(), 404, "no webhook has this path"),
        (update, String::new(), 400, "request body is not an AdmissionReview in JSON: EOF"),
        (
            update,
            "{}".to_owned(),
            400,
            "request body must be an AdmissionReview of admission.k8s.io/v1: found kind \"\"",
        ),
        (update, other_version.to_string(), 400, "of \"admission.k8s.io/v1beta1\""),
        (update, pods.to_string(), 400, "unsupported resource \"pods.\"; supported values: kubevirts.kubevirt.io"),
        (
            "/kubevirt-validate-create",
            good.to_string(),
            400,
            "unsupported operation \"UPDATE\"; supported values: CREATE",
        ),
        (
            update,
            json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}).to_string(),
            400,
            "AdmissionReview has no request",
        ),
    ] {
        let (have, text) = webhook.post(path, body).await;
        assert!(have == status && text.contains(message), "{have} {text}");
    }
    let get = Request::get(update).header("host", HOST).body(Full::default()).unwrap();
    assert_eq!(webhook.send(get).await, (405, "unsupported method; supported values: POST\n".to_owned()));
    let yaml = Request::post(update).header("host", HOST).header("content-type", "application/yaml");
    let (have, text) = webhook.send(yaml.body(Full::default()).unwrap()).await;
    assert!(
        have == 400
            && text.contains("unsupported content type \"application/yaml\"; supported values: application/json"),
        "{text}"
    );
}

/// Sends the head, then sends chunks until the server stops to accept them, and returns the response.
async fn send_chunks(webhook: &TestWebhook, head: &str, chunk: &[u8], pause: Duration) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let stream = webhook.connect().await.unwrap();
    let (mut reading, mut writing) = tokio::io::split(stream);
    let head =
        format!("POST /kubevirt-validate-update HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{head}\r\n");
    let chunk = chunk.to_vec();
    let sending = tokio::spawn(async move {
        writing.write_all(head.as_bytes()).await.unwrap();
        while !chunk.is_empty() && writing.write_all(&chunk).await.is_ok() && writing.flush().await.is_ok() {
            tokio::time::sleep(pause).await;
        }
        writing
    });
    let mut response = Vec::new();
    let mut buffer = [0; 1024];
    while !response.ends_with(b"\n") {
        match timeout(Duration::from_secs(20), reading.read(&mut buffer)).await.expect("no response") {
            Ok(read) if read > 0 => response.extend_from_slice(&buffer[..read]),
            _ => break,
        }
    }
    sending.abort();
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test]
async fn a_body_that_is_too_large_is_not_read() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let response =
        send_chunks(&webhook, &format!("Content-Length: {}\r\n", MAX_BODY_BYTES + 1), b"", Duration::ZERO).await;
    assert!(response.starts_with("HTTP/1.1 413") && response.contains("request body is larger than"), "{response}");
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let response = send_chunks(&webhook, "Transfer-Encoding: chunked\r\n", chunk.as_bytes(), Duration::ZERO).await;
    assert!(response.starts_with("HTTP/1.1 411") || response.is_empty(), "{response}");
    assert!(webhook.review("DELETE", json!({"oldObject": kubevirt(&json!({}))})).await["allowed"] == true);
}

/// A request to review the deletion of an object of about this size.
fn deletion(bytes: usize) -> String {
    let mut object = kubevirt(&json!({}));
    object["metadata"]["annotations"] = json!({"padding": "x".repeat(bytes)});
    admission_review("DELETE", &json!({"oldObject": object})).to_string()
}

#[tokio::test]
async fn small_bodies_without_a_length_are_read() {
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let body = deletion(0);
    let request = Request::post("/kubevirt-validate-delete").header("content-type", "application/json");
    let chunks =
        futures::stream::iter([Ok::<_, std::convert::Infallible>(hyper::body::Frame::data(Bytes::from(body)))]);
    let request = request.header("host", HOST).body(http_body_util::StreamBody::new(chunks)).unwrap();
    let response = webhook.client().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn clients_that_stop_in_the_middle_of_large_bodies_do_not_stop_the_others() {
    use tokio::io::AsyncWriteExt;
    let webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let arrived = vec![b' '; MAX_BODY_BYTES / 64 * 63];
    let head = format!(
        "POST /kubevirt-validate-delete HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        arrived.len() + 1
    );
    let mut stalled = Vec::new();
    for _ in 0..3 {
        let (mut stream, head, arrived) = (webhook.connect().await.unwrap(), head.clone(), arrived.clone());
        stalled.push(tokio::spawn(async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            // Without buffer space the server closes the connection.
            let _ = stream.write_all(&arrived).await;
            let _ = stream.flush().await;
            std::future::pending::<()>().await;
        }));
    }
    let wait_for_space = async |is_expected: &dyn Fn(usize) -> bool| {
        let wait = async {
            while !is_expected(webhook.buffer.available_permits()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LIMITS.request_timeout, wait).await.expect("the space in the buffer is not as expected");
    };
    wait_for_space(&|free| free < MAX_BODY_BYTES / 16).await;

    let in_time = Duration::from_secs(4);
    let (status, body) = timeout(in_time, webhook.post("/kubevirt-validate-delete", deletion(0))).await.unwrap();
    assert!(status == 200 && body.contains("\"allowed\":true"), "{status} {body}");

    let large = deletion(8 * SMALL_BODY_BYTES);
    let request = || {
        let request = Request::post("/kubevirt-validate-delete").header("host", HOST);
        request.header("content-type", "application/json").body(Full::new(Bytes::from(large.clone()))).unwrap()
    };
    let response = webhook.client().await.send_request(request());
    let response = timeout(in_time, response).await.unwrap().unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &HeaderValue::from_static("1")));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let refusal: kube::core::Status = serde_json::from_slice(&body).unwrap();
    assert!(refusal.message.ends_with("try again") && refusal.details.unwrap().retry_after_seconds == 1);

    for stalled in stalled {
        stalled.abort();
    }
    wait_for_space(&|free| free == MAX_BUFFERED_BYTES).await;
    let (status, body) = webhook.send(request()).await;
    assert!(status == 200 && body.contains("\"allowed\":true"), "{status} {body}");
}

#[tokio::test]
async fn a_slow_client_gets_503() {
    let webhook =
        TestWebhook::start(&FakeApiServer::with_lists(json!({})), Limits { request_timeout: SHORT, ..LIMITS }).await;
    let response = send_chunks(&webhook, "Content-Length: 1000\r\n", b" ", SHORT / 10).await;
    assert!(response.starts_with("HTTP/1.1 503") && response.contains("took too long"), "{response}");
}

#[tokio::test]
async fn a_certificate_is_replaced_without_a_restart() {
    let mut webhook = TestWebhook::start(&FakeApiServer::with_lists(json!({})), LIMITS).await;
    let request = || {
        let body = admission_review("DELETE", &json!({"oldObject": kubevirt(&json!({}))})).to_string();
        let builder = Request::post("/kubevirt-validate-delete").header("host", HOST);
        builder.header("content-type", "application/json").body(Full::new(Bytes::from(body))).unwrap()
    };
    let mut open = webhook.client().await;
    assert_eq!(open.send_request(request()).await.unwrap().status(), 200);

    let (pair, root) = certificate();
    webhook.server_tls.set(Some(&pair), None);
    assert!(webhook.connect().await.is_err(), "the server no longer presents the old certificate");
    webhook.root = root;
    assert_eq!(webhook.send(request()).await.0, 200);
    open.ready().await.unwrap();
    assert_eq!(open.send_request(request()).await.unwrap().status(), 200, "an open connection stays usable");
}

#[test]
fn tls_settings_of_the_resource_become_the_tls_policy() {
    use vitivirt_runtime::tls::TlsVersion;
    let policy = |tls: Value| server_tls::tls_policy(Some(&serde_json::from_value(tls).unwrap()));
    assert_eq!(server_tls::tls_policy(None), Default::default());
    assert_eq!(policy(json!({"minTLSVersion": "VersionTLS13"})).min_version, TlsVersion::Tls13);
    assert_eq!(policy(json!({"minTLSVersion": "VersionTLS11"})).min_version, TlsVersion::Tls12);
    assert_eq!(policy(json!({"minTLSVersion": "VersionTLS12", "ciphers": ["A"]})).suites, ["A"]);
}
