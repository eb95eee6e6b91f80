//! The server over real TLS, before an API server that the test plays.

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

use super::{review::Request as Asked, *};

const HOST: &str = "kubevirt-operator-webhook.kubevirt.svc";
const MOMENT: Duration = Duration::from_millis(300);

/// By verb and address. `None`: no answer ever comes.
type StoredObjectRecorder = dyn Fn(&str) -> Option<(u16, Value)> + Send + Sync;

/// What the API server was asked, and what it answers.
#[derive(Clone)]
struct Api {
    asked: Arc<Mutex<Vec<String>>>,
    answer: Arc<StoredObjectRecorder>,
}

impl Api {
    fn new(answer: impl Fn(&str) -> Option<(u16, Value)> + Send + Sync + 'static) -> Self {
        Self { asked: Arc::default(), answer: Arc::new(answer) }
    }

    /// Lists with these objects by the last part of the path; kinds that are not named are not served.
    fn with(lists: Value) -> Self {
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
                let asked = format!("{} {}", request.method(), request.uri());
                api.asked.lock().push(asked.clone());
                let Some((status, body)) = (api.answer)(&asked) else { return std::future::pending().await };
                let body = Full::new(Bytes::from(body.to_string()));
                Ok::<_, BoxError>(Response::builder().status(status).body(body).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
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

struct Webhook {
    address: SocketAddr,
    serving: Serving,
    root: CertificateDer<'static>,
}

impl Webhook {
    async fn start(api: &Api, limits: Limits) -> Self {
        let serving = Serving::new().unwrap();
        let (pair, root) = certificate();
        serving.set(Some(&pair), None);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::new(api.client(), serving.clone());
        tokio::spawn(server.serve_within(limits, listener, CancellationToken::new()));
        Self { address, serving, root }
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

    /// The response to a review, as the API server would read it.
    async fn ask(&self, operation: &str, parts: Value) -> Value {
        let path = format!("/kubevirt-validate-{}", operation.to_lowercase());
        let (status, body) = self.post(&path, review(operation, &parts).to_string()).await;
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&answer["apiVersion"], &answer["kind"]),
            (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
        );
        assert_eq!(answer["response"]["uid"], "u-1");
        answer["response"].clone()
    }
}

fn review(operation: &str, parts: &Value) -> Value {
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
async fn a_change_is_allowed_or_refused_with_its_causes() {
    let api = Api::with(json!({}));
    let webhook = Webhook::start(&api, LIMITS).await;
    let old = kubevirt(&json!({}));
    let good = webhook.ask("UPDATE", json!({"oldObject": old, "object": kubevirt(&json!({"imageTag": "v1"}))})).await;
    assert_eq!(good, json!({"uid": "u-1", "allowed": true}));

    let bad = kubevirt(&json!({"infra": {"replicas": 0}, "imageTag": "a b"}));
    let bad = webhook.ask("UPDATE", json!({"oldObject": old, "object": bad})).await;
    assert_eq!((&bad["allowed"], &bad["status"]["code"]), (&json!(false), &json!(422)));
    assert_eq!(bad["status"]["reason"], "Invalid");
    assert!(
        message(&bad).contains("spec.infra.replicas: invalid value 0") && message(&bad).contains("; spec.imageTag")
    );
    let causes = &bad["status"]["details"]["causes"];
    assert_eq!(causes[0]["field"], "spec.infra.replicas");
    assert_eq!(causes[0]["reason"], "FieldValueInvalid");
    assert_eq!(api.asked(), [""; 0], "nothing has to be asked for that");
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_in_words() {
    let webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    let bad = kubevirt(&json!({"infra": {"replicas": "many"}}));
    let response = webhook.ask("UPDATE", json!({"oldObject": kubevirt(&json!({})), "object": bad})).await;
    assert_eq!((&response["allowed"], &response["status"]["code"]), (&json!(false), &json!(400)));
    assert!(message(&response).contains("many"), "{response}");
    let response = webhook.ask("UPDATE", json!({"oldObject": bad, "object": kubevirt(&json!({}))})).await;
    assert_eq!(response["allowed"], true, "whoever repairs it is let through: {response}");
}

#[tokio::test]
async fn warnings_come_with_the_answer() {
    let webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    let new = kubevirt(&json!({"configuration": {
        "developerConfiguration": {"featureGates": ["LiveMigration"]},
        "tlsConfiguration": {"minTLSVersion": "VersionTLS10", "ciphers": ["TLS_RSA_WITH_AES_128_CBC_SHA"]},
    }}));
    let response = webhook.ask("UPDATE", json!({"oldObject": kubevirt(&json!({})), "object": new})).await;
    assert_eq!(
        response,
        json!({"uid": "u-1", "allowed": true, "warnings": [
            "feature gate LiveMigration is always enabled in this release; remove it from the list",
            "virt-operator's own endpoints speak TLS 1.2 and 1.3 only, although VersionTLS10 is allowed",
            "virt-operator's own endpoints do not offer TLS_RSA_WITH_AES_128_CBC_SHA",
        ]})
    );
}

#[tokio::test]
async fn placement_is_judged_by_the_api_server() {
    let new = kubevirt(&json!({"infra": {"nodePlacement": {"tolerations": [{"operator": "Sometimes"}]}}}));
    let change = json!({"oldObject": kubevirt(&json!({})), "object": new});
    let causes = json!({"causes": [{"reason": "FieldValueInvalid", "field": "spec.template.spec.tolerations[0].operator",
                                    "message": "Invalid value: \"Sometimes\""}]});
    let api = Api::new(move |_| Some((422, status(422, "Deployment is invalid", &causes))));
    let webhook = Webhook::start(&api, LIMITS).await;
    let response = webhook.ask("UPDATE", change.clone()).await;
    assert_eq!(
        message(&response),
        "spec.infra.nodePlacement.tolerations[0].operator: invalid placement: Invalid value: \"Sometimes\""
    );
    assert_eq!(api.asked(), ["POST /apis/apps/v1/namespaces/kubevirt/deployments?&dryRun=All"]);

    let api = Api::new(|_| Some((403, status(403, "quota exceeded", &json!(null)))));
    let webhook = Webhook::start(&api, LIMITS).await;
    let response = webhook.ask("UPDATE", change).await;
    assert_eq!(response["allowed"], true);
    let warning = response["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with("spec.infra.nodePlacement was not checked: ") && warning.contains("quota"),
        "{warning}"
    );
}

#[tokio::test]
async fn there_is_one_installation() {
    let new = json!({"object": kubevirt(&json!({}))});
    let api = Api::with(json!({"kubevirts": []}));
    let webhook = Webhook::start(&api, LIMITS).await;
    assert_eq!(webhook.ask("CREATE", new.clone()).await["allowed"], true);
    assert_eq!(api.asked(), ["GET /apis/kubevirt.io/v1/kubevirts?&limit=2"]);

    let webhook = Webhook::start(&Api::with(json!({"kubevirts": [kubevirt(&json!({}))]})), LIMITS).await;
    let response = webhook.ask("CREATE", new.clone()).await;
    assert_eq!(response["status"]["code"], 403);
    assert!(
        message(&response).starts_with("KubeVirt is already created: kubevirt/kubevirt already exists"),
        "{response}"
    );

    let api = Api::new(|_| Some((500, status(500, "etcd is away", &json!(null)))));
    let webhook = Webhook::start(&api, LIMITS).await;
    let response = webhook.ask("CREATE", new).await;
    assert_eq!(response["status"]["code"], 503);
    assert!(message(&response).contains("etcd is away") && message(&response).ends_with("try again"), "{response}");
}

fn guarded() -> Value {
    kubevirt(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}))
}

#[tokio::test]
async fn removal_waits_for_workloads_if_it_is_asked_to() {
    let lists = json!({
        "virtualmachineinstances": [object("shop", "a")], "virtualmachines": [],
        "virtualmachineinstancereplicasets": [object("shop", "r"), object("shop", "s")],
    });
    let api = Api::with(lists);
    let webhook = Webhook::start(&api, LIMITS).await;
    let response = webhook.ask("DELETE", json!({"oldObject": kubevirt(&json!({}))})).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(api.asked(), [""; 0]);

    let response = webhook.ask("DELETE", json!({"oldObject": guarded()})).await;
    assert_eq!((&response["allowed"], &response["status"]["code"]), (&json!(false), &json!(403)));
    let expected = "there are still Virtual Machine Instances present (shop/a) and Virtual Machine Instance Replica Sets \
                    present (shop/r, shop/s), and";
    assert!(message(&response).contains(expected), "{response}");
    let asked = api.asked();
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|uri| uri.ends_with("limit=2")), "{asked:?}");
}

#[tokio::test]
async fn kinds_that_are_not_served_have_no_objects() {
    let webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    assert_eq!(webhook.ask("DELETE", json!({"oldObject": guarded()})).await["allowed"], true);
}

#[tokio::test]
async fn what_the_server_does_not_say_is_looked_up() {
    let one = Api::new(|uri| {
        Some(match uri {
            "GET /apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt" => (200, guarded()),
            uri if uri.contains("/virtualmachines?") => {
                (200, json!({"metadata": {"continue": "x"}, "items": [object("a", "b"), object("a", "c")]}))
            }
            _ => (404, status(404, "not found", &json!(null))),
        })
    });
    let webhook = Webhook::start(&one, LIMITS).await;
    let response = webhook.ask("DELETE", json!({})).await;
    assert!(message(&response).contains("Virtual Machines present (a/b, a/c and others)"), "{response}");
    assert_eq!(webhook.ask("DELETE", json!({"name": "gone"})).await["allowed"], true);

    let several = Api::with(json!({"kubevirts": [guarded()], "virtualmachines": [object("a", "b")]}));
    let webhook = Webhook::start(&several, LIMITS).await;
    assert_eq!(webhook.ask("DELETE", json!({"name": ""})).await["allowed"], false);
    assert_eq!(several.asked()[0], "GET /apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts?&limit=2");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_hangs_is_not_waited_for() {
    let cluster = Cluster::new(Api::new(|_| None).client());
    let request: Asked =
        review::read(review("DELETE", &json!({"oldObject": guarded()})).to_string().as_bytes()).unwrap();
    let begin = tokio::time::Instant::now();
    let decision = admit(&cluster, Check::Delete, request).await;
    assert!(begin.elapsed() < LIMITS.request);
    assert_eq!(decision.code, 503);
    assert_eq!(
        decision.refusals[0].to_string(),
        "the API server did not answer this operator in time; nothing was changed, try again"
    );
}

#[tokio::test]
async fn what_is_no_question_is_told_why() {
    let webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    let update = "/kubevirt-validate-update";
    let good = review("UPDATE", &json!({}));
    let other_version = {
        let mut review = good.clone();
        review["apiVersion"] = json!("admission.k8s.io/v1beta1");
        review
    };
    let pods = review("UPDATE", &json!({"resource": {"group": "", "version": "v1", "resource": "pods"}}));
    for (path, body, status, sentence) in [
        ("/", "{}".to_owned(), 404, "nothing is answered here"),
        (update, String::new(), 400, "the body is not an AdmissionReview in JSON: EOF"),
        (update, "{}".to_owned(), 400, "the body must be an AdmissionReview of admission.k8s.io/v1, and it is \"\""),
        (update, other_version.to_string(), 400, "of \"admission.k8s.io/v1beta1\""),
        (update, pods.to_string(), 400, "only kubevirts.kubevirt.io are checked here, and this is pods."),
        ("/kubevirt-validate-create", good.to_string(), 400, "operation CREATE is checked here, and this is UPDATE"),
        (
            update,
            json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}).to_string(),
            400,
            "the AdmissionReview has no request",
        ),
    ] {
        let (have, text) = webhook.post(path, body).await;
        assert!(have == status && text.contains(sentence), "{have} {text}");
    }
    let get = Request::get(update).header("host", HOST).body(Full::default()).unwrap();
    assert_eq!(webhook.send(get).await, (405, "an AdmissionReview is sent with POST\n".to_owned()));
    let yaml = Request::post(update).header("host", HOST).header("content-type", "application/yaml");
    let (have, text) = webhook.send(yaml.body(Full::default()).unwrap()).await;
    assert!(have == 400 && text.contains("must be application/json, and it is \"application/yaml\""), "{text}");
}

/// Sends the head and then chunks for as long as the other side takes them, and returns the answer.
async fn trickle(webhook: &Webhook, head: &str, chunk: &[u8], pause: Duration) -> String {
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
    let mut answer = Vec::new();
    let mut buffer = [0; 1024];
    while !answer.ends_with(b"\n") {
        match tokio::time::timeout(Duration::from_secs(20), reading.read(&mut buffer)).await.expect("no answer") {
            Ok(read) if read > 0 => answer.extend_from_slice(&buffer[..read]),
            _ => break,
        }
    }
    sending.abort();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_body_that_is_too_large_is_not_read() {
    let webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    let answer = trickle(&webhook, &format!("Content-Length: {}\r\n", LARGEST + 1), b"", Duration::ZERO).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("the body has more than"), "{answer}");
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let answer = trickle(&webhook, "Transfer-Encoding: chunked\r\n", chunk.as_bytes(), Duration::ZERO).await;
    assert!(answer.starts_with("HTTP/1.1 413") || answer.is_empty(), "{answer}");
    assert!(webhook.ask("DELETE", json!({"oldObject": kubevirt(&json!({}))})).await["allowed"] == true);
}

#[tokio::test]
async fn a_client_that_is_slow_is_given_up() {
    let webhook = Webhook::start(&Api::with(json!({})), Limits { request: MOMENT, ..LIMITS }).await;
    let answer = trickle(&webhook, "Content-Length: 1000\r\n", b" ", MOMENT / 10).await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("took too long"), "{answer}");
}

#[tokio::test]
async fn a_certificate_is_replaced_without_a_restart() {
    let mut webhook = Webhook::start(&Api::with(json!({})), LIMITS).await;
    let question = || {
        let body = review("DELETE", &json!({"oldObject": kubevirt(&json!({}))})).to_string();
        let request = Request::post("/kubevirt-validate-delete").header("host", HOST);
        request.header("content-type", "application/json").body(Full::new(Bytes::from(body))).unwrap()
    };
    let mut open = webhook.client().await;
    assert_eq!(open.send_request(question()).await.unwrap().status(), 200);

    let (pair, root) = certificate();
    webhook.serving.set(Some(&pair), None);
    assert!(webhook.connect().await.is_err(), "what was trusted before is no longer shown");
    webhook.root = root;
    assert_eq!(webhook.send(question()).await.0, 200);
    open.ready().await.unwrap();
    assert_eq!(open.send_request(question()).await.unwrap().status(), 200, "an open connection goes on");
}

#[test]
fn the_terms_of_the_resource() {
    use vitivirt_runtime::tls::Version;
    let terms = |tls: Value| serving::terms(Some(&serde_json::from_value(tls).unwrap()));
    assert_eq!(serving::terms(None), Default::default());
    assert_eq!(terms(json!({"minTLSVersion": "VersionTLS13"})).minimum, Version::Tls13);
    assert_eq!(terms(json!({"minTLSVersion": "VersionTLS11"})).minimum, Version::Tls12);
    assert_eq!(terms(json!({"minTLSVersion": "VersionTLS12", "ciphers": ["A"]})).suites, ["A"]);
}
