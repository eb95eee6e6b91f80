//! How somebody reaches the API server: an address, the authority to trust, a token. Made into a client or a
//! kubeconfig file; service accounts get theirs by TokenRequest, so that each program acts as itself.

use std::{net::SocketAddr, path::Path};

use anyhow::{Context, Result};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Pod, ServiceAccount},
};
use kube::{Api, Client, Config, ResourceExt};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;

/// Longer than any lab lives, so that no token has to be renewed.
const TOKEN_SECONDS: i64 = 24 * 3600;

#[derive(Clone)]
pub struct Credentials {
    pub(crate) server: SocketAddr,
    pub(crate) authority_pem: String,
    pub(crate) token: String,
    /// How the kubeconfig calls its user.
    pub(crate) name: String,
}

impl Credentials {
    /// The same identity, reached by another way (the fault proxy).
    pub fn through(&self, server: SocketAddr) -> Self {
        Credentials { server, ..self.clone() }
    }

    /// A kubeconfig file; JSON is YAML.
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
                "certificate-authority-data": base64(self.authority_pem.as_bytes()),
            }}],
            "users": [{"name": self.name, "user": {"token": self.token}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": self.name}}],
            "current-context": "lab",
        })
    }

    /// A client that says who it is in the audit log.
    pub fn client(&self, user_agent: &str) -> Result<Client> {
        let server = format!("https://{}", self.server).parse().context("the server's address is not a URL")?;
        let authority =
            CertificateDer::from_pem_slice(self.authority_pem.as_bytes()).context("the authority is not PEM")?;
        let mut config = Config::new(server);
        // Whoever uses a lab wants to see what the server answers.
        config.default_retry = false;
        config.root_cert = Some(vec![authority.to_vec()]);
        config.auth_info.token = Some(self.token.clone().into());
        config.headers.push((
            http::header::USER_AGENT,
            http::HeaderValue::from_str(user_agent).context("the user agent is not a header value")?,
        ));
        Client::try_from(config).context("making a client")
    }

    /// What a pod sees of this identity in `/var/run/secrets/kubernetes.io/serviceaccount`.
    pub(crate) fn in_cluster_files(&self, namespace: &str) -> [(&'static str, String); 3] {
        [("token", self.token.clone()), ("ca.crt", self.authority_pem.clone()), ("namespace", namespace.to_owned())]
    }
}

/// A token for a service account, bound to a pod if there is one (the node-restriction policy looks at that).
pub(crate) async fn of_service_account(
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
    // k8s-openapi already encodes byte strings for JSON; one more base64 crate would do the same.
    serde_json::to_value(ByteString(bytes.to_vec()))
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}
