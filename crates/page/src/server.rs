//! The rules for requests: GET only, from this machine only, and headers that allow nothing but to show the page.

use std::{borrow::Cow, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use http_body_util::Full;
use tokio_util::sync::CancellationToken;
use vitivirt_runtime::{
    program::Context,
    server::{self, Bind, BindError, HttpResponse, Limits, text_response},
};

use crate::layout::{CONTENT_SECURITY_POLICY, Page, PageHeader, Replica, render};

/// A person, and the few connections of a browser.
const LIMITS: Limits = Limits {
    connections: 16,
    first_request_timeout: Duration::from_secs(10),
    idle_timeout: Duration::from_secs(30),
    request_timeout: Duration::from_secs(10),
    max_age: Duration::from_secs(600),
};
const ICON: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 16 16\"><rect width=\"16\" height=\"16\" \
                    rx=\"3\" fill=\"#17713a\"/><path d=\"M4 5l4 7 4-7\" fill=\"none\" stroke=\"#fff\" \
                    stroke-width=\"2\"/></svg>";

/// The pages of a program.
pub trait Pages: Send + Sync + 'static {
    /// `None`: there is no page at this path. Must not send requests or block.
    fn page(&self, request: &PageRequest<'_>, replica: &Replica) -> Option<Page>;
}

/// The path and the query of a request.
pub struct PageRequest<'a> {
    pub segments: Vec<&'a str>,
    query: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> PageRequest<'a> {
    pub fn new(uri: &'a Uri) -> Self {
        let segments = uri.path().split('/').filter(|segment| !segment.is_empty()).collect();
        Self { segments, query: form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).collect() }
    }

    /// The value of a parameter without spaces at its ends. Empty if there is none.
    pub fn parameter(&self, name: &str) -> &str {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.trim()).unwrap_or_default()
    }
}

/// Completes the error of an invalid address.
pub const ADDRESS_EXPECTED: &str = "must be a loopback address and a port such as 127.0.0.1:8082, or 0";

/// The address of a status page: loopback and a port, or `0` for no page.
pub fn loopback_address(text: &str) -> Result<Option<Bind>, BindError> {
    if text == "0" {
        return Ok(None);
    }
    let bind: Bind = text.parse()?;
    match bind.address {
        Some(address) if address.is_loopback() => Ok(Some(bind)),
        _ => Err(BindError::Malformed(text.to_owned())),
    }
}

/// Serves the pages until the process ends. A page that cannot listen does not stop the program.
pub async fn start(context: &Context, bind: Option<Bind>, program: PageHeader, pages: impl Pages) {
    let Some(bind) = bind else { return };
    let listener = match bind.listen("the status page").await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(error = %error, "status page not served");
            return;
        }
    };
    let (pages, state) = (Arc::new(pages), context.clone());
    let handler = move |request: http::Request<_>| {
        let replica = replica(&state);
        let response = respond(&program, &replica, &*pages, request.method(), request.uri(), request.headers());
        async move { response }
    };
    context.spawn("the status page", server::serve(listener, None, LIMITS, handler, CancellationToken::new()));
}

fn replica(context: &Context) -> Replica {
    Replica {
        identity: context.identity.to_string(),
        leader: context.leader.get(),
        problem: context.health.liveness_error().or_else(|| context.health.readiness_error()),
    }
}

/// The response to one request.
pub fn respond(
    program: &PageHeader,
    replica: &Replica,
    pages: &dyn Pages,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> HttpResponse {
    let mut response = content(program, replica, pages, method, uri, headers);
    let policy =
        HeaderValue::from_str(&CONTENT_SECURITY_POLICY).unwrap_or(HeaderValue::from_static("default-src 'none'"));
    let fixed = |text| HeaderValue::from_static(text);
    response.headers_mut().extend([
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
        (header::X_FRAME_OPTIONS, fixed("DENY")),
        (header::REFERRER_POLICY, fixed("no-referrer")),
        (header::CACHE_CONTROL, fixed("no-store")),
        (header::HeaderName::from_static("cross-origin-resource-policy"), fixed("same-origin")),
    ]);
    response
}

fn content(
    program: &PageHeader,
    replica: &Replica,
    pages: &dyn Pages,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> HttpResponse {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let is_local = host.is_some_and(is_loopback) && uri.host().is_none_or(is_loopback);
    if !is_local {
        let message = "this page is served to loopback only; open it as http://localhost with the forwarded port\n";
        return text_response(StatusCode::MISDIRECTED_REQUEST, message.to_owned());
    }
    if *method != Method::GET {
        let mut response =
            text_response(StatusCode::METHOD_NOT_ALLOWED, "unsupported method; supported values: GET\n".to_owned());
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return response;
    }
    if uri.path() == "/icon.svg" {
        return typed("image/svg+xml", ICON.to_owned());
    }
    match pages.page(&PageRequest::new(uri), replica) {
        Some(page) => typed("text/html; charset=utf-8", render(program, replica, &page)),
        None => text_response(StatusCode::NOT_FOUND, "not found\n".to_owned()),
    }
}

fn typed(content_type: &'static str, body: String) -> HttpResponse {
    let mut response = http::Response::new(Full::new(Bytes::from(body)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Whether a `Host` header, with or without a port, is this machine. The name of a website that resolves to loopback is
/// not.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use maud::html;

    use super::*;
    use crate::{layout::REFRESH, testing};

    struct Hostile;

    const TEXT: &str = "</style><script>alert(1)</script>\"><img src=x onerror=alert(2)>";

    impl Pages for Hostile {
        fn page(&self, request: &PageRequest<'_>, _: &Replica) -> Option<Page> {
            let body = html! { p title=(TEXT) { (TEXT) } };
            request.segments.is_empty().then(|| Page { title: TEXT.to_owned(), refresh: REFRESH, body })
        }
    }

    const PROGRAM: PageHeader = PageHeader { name: "tester", version: "1", links: &[("/", "Overview")] };

    fn request(method: &Method, uri: &str, host: Option<&str>) -> HttpResponse {
        let replica = Replica { identity: TEXT.to_owned(), leader: Some("other".to_owned()), problem: None };
        let mut headers = HeaderMap::new();
        if let Some(host) = host {
            headers.insert(header::HOST, host.parse().unwrap());
        }
        respond(&PROGRAM, &replica, &Hostile, method, &uri.parse().unwrap(), &headers)
    }

    #[test]
    fn only_loopback_is_served() {
        for host in ["localhost:8082", "LOCALHOST", "127.0.0.1:8082", "127.1.2.3", "[::1]:8082", "[::1]"] {
            assert_eq!(request(&Method::GET, "/", Some(host)).status(), 200, "{host}");
        }
        for host in
            ["example.com", "localhost.example.com:8082", "192.0.2.1:8082", "127.0.0.1.example.com", "", "[::2]"]
        {
            assert_eq!(request(&Method::GET, "/", Some(host)).status(), 421, "{host}");
        }
        assert_eq!(request(&Method::GET, "/", None).status(), 421);
        assert_eq!(request(&Method::GET, "http://example.com/", Some("localhost")).status(), 421);
    }

    #[test]
    fn only_get_is_served() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS, Method::HEAD] {
            let response = request(&method, "/", Some("localhost"));
            assert_eq!(
                (response.status(), &response.headers()[header::ALLOW]),
                (StatusCode::METHOD_NOT_ALLOWED, &"GET".parse().unwrap())
            );
        }
        assert_eq!(request(&Method::GET, "/other", Some("localhost")).status(), 404);
        assert_eq!(
            request(&Method::GET, "/icon.svg", Some("localhost")).headers()[header::CONTENT_TYPE],
            "image/svg+xml"
        );
    }

    #[test]
    fn every_response_forbids_scripts_embedding_and_caching() {
        for (uri, host) in [("/", "localhost"), ("/other", "localhost"), ("/", "example.com")] {
            let response = request(&Method::GET, uri, Some(host));
            let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
            assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"), "{policy}");
            assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
            assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
            assert_eq!(response.headers()["cross-origin-resource-policy"], "same-origin");
        }
    }

    #[test]
    fn hostile_text_stays_text() {
        let document = testing::document(request(&Method::GET, "/", Some("localhost")));
        assert_eq!(document.errors, Vec::<String>::new());
        assert!(document.elements.iter().all(|element| element.name != "script" && element.name != "img"));
        assert!(
            document.elements.iter().flat_map(|element| &element.attributes).all(|(name, _)| !name.starts_with("on"))
        );
        assert_eq!(document.elements.iter().filter(|element| element.name == "style").count(), 1);
        let paragraph = document.elements.iter().find(|element| element.name == "p" && !element.attributes.is_empty());
        assert_eq!(paragraph.unwrap().attributes, [("title".to_owned(), TEXT.to_owned())]);
        assert!(document.text.contains("on standby: the leader is other") && document.text.contains(TEXT));
    }

    /// The browser computes the same hash over the text between the tags.
    #[test]
    fn the_style_on_the_page_is_the_one_that_the_policy_allows() {
        use base64::{Engine, engine::general_purpose::STANDARD};
        use sha2::{Digest, Sha256};
        let response = request(&Method::GET, "/", Some("localhost"));
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
        let html = testing::text(response);
        let style = html.split_once("<style>").unwrap().1.split_once("</style>").unwrap().0;
        assert!(policy.contains(&format!("'sha256-{}'", STANDARD.encode(Sha256::digest(style)))), "{policy}");
    }

    #[test]
    fn parameters_are_decoded_and_trimmed() {
        let uri: Uri = "/machines/a/b?q=%20a%26b%20&namespace=x+y".parse().unwrap();
        let request = PageRequest::new(&uri);
        assert_eq!(request.segments, ["machines", "a", "b"]);
        assert_eq!(
            (request.parameter("q"), request.parameter("namespace"), request.parameter("none")),
            ("a&b", "x y", "")
        );
    }

    #[test]
    fn an_address_must_be_loopback() {
        assert_eq!(loopback_address("0").unwrap(), None);
        assert_eq!(loopback_address("127.0.0.1:8082").unwrap().unwrap().to_string(), "127.0.0.1:8082");
        assert_eq!(loopback_address("[::1]:8082").unwrap().unwrap().port, 8082);
        for text in ["", ":8082", "0.0.0.0:8082", "[::]:8082", "192.0.2.1:8082", "localhost:8082", "1"] {
            assert!(loopback_address(text).is_err(), "{text}");
        }
    }
}
