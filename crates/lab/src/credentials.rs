//! Credentials for the API server: address, CA and token. They become a client or a kubeconfig file. Service accounts
//! get their token from a TokenRequest, so that each program has its own identity.

use std::{net::SocketAddr, path::Path};

use anyhow::{Context, Result};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Pod, ServiceAccount},
};
use kube::{Api, Client, Config, ResourceExt};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;

/// Longer than the lifetime of any lab, so that tokens need no renewal.
const TOKEN_SECONDS: i64 = 24 * 3600;

#[derive(Clone)]
pub struct Credentials {
    pub(crate) server: SocketAddr,
    pub(crate) ca_pem: String,
    pub(crate) token: String,
    /// The user name in the kubeconfig.
    pub(crate) name: String,
}

impl Credentials {
    /// The same identity with another server address: that of the fault proxy or of the second API server.
    pub fn through(&self, server: SocketAddr) -> Self {
        Credentials { server, ..self.clone() }
    }

    /// The bearer token of the identity.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Writes a kubeconfig file. JSON is valid YAML.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.kubeconfig_json()).context("writing a kubeconfig")?;
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }

    fn kubeconfig_json(&self) -> serde_json::Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {
                "server": format!("https://{}", self.server),
                "certificate-authority-data": base64(self.ca_pem.as_bytes()),
            }}],
            "users": [{"name": self.name, "user": {"token": self.token}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": self.name}}],
            "current-context": "lab",
        })
    }

    /// A client. Its user agent identifies it in the audit log.
    pub fn client(&self, user_agent: &str) -> Result<Client> {
        let server = format!("https://{}", self.server).parse().context("the server's address is not a URL")?;
        let ca = CertificateDer::from_pem_slice(self.ca_pem.as_bytes()).context("the CA is not PEM")?;
        let mut config = Config::new(server);
        // Tests must see every response of the API server, so the client does not retry.
        config.default_retry = false;
        config.root_cert = Some(vec![ca.to_vec()]);
        config.auth_info.token = Some(self.token.clone().into());
        config.headers.push((
            http::header::USER_AGENT,
            http::HeaderValue::from_str(user_agent).context("the user agent is not a header value")?,
        ));
        Client::try_from(config).context("creating a client")
    }

    /// The files of this identity in a pod's `/var/run/secrets/kubernetes.io/serviceaccount`.
    pub(crate) fn in_cluster_files(&self, namespace: &str) -> [(&'static str, String); 3] {
        [("token", self.token.clone()), ("ca.crt", self.ca_pem.clone()), ("namespace", namespace.to_owned())]
    }
}

/// Credentials of a service account. The token is bound to the pod, if there is one: the node-restriction policy checks
/// that.
pub(crate) async fn service_account_credentials(
    admin: &Credentials,
    client: &Client,
    namespace: &str,
    account: &str,
    bound_to: Option<&Pod>,
) -> Result<Credentials> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: Some(TOKEN_SECONDS),
            bound_object_ref: bound_to.map(|pod| BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: pod.metadata.name.clone(),
                uid: pod.uid(),
            }),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let issued = accounts
        .create_token_request(account, &Default::default(), &request)
        .await
        .with_context(|| format!("requesting a token for {namespace}/{account}"))?;
    let token = issued.status.context("the token request has no status")?.token;
    Ok(Credentials { token, name: format!("system:serviceaccount:{namespace}:{account}"), ..admin.clone() })
}

fn base64(bytes: &[u8]) -> String {
    use k8s_openapi::ByteString;
    // k8s-openapi encodes byte strings in JSON as base64, so no base64 crate is needed.
    serde_json::to_value(ByteString(bytes.to_vec()))
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}
