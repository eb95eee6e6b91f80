//! The CA that signs the API server's client certificate, and the names that the certificate may have. The cluster
//! publishes both in the ConfigMap of its front proxy.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use vitivirt_runtime::{
    tls::ClientCa,
    watch::{WatchConfig, watch},
};

use super::ServerTls;

const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";
const BUNDLE_KEY: &str = "requestheader-client-ca-file";
const NAMES_KEY: &str = "requestheader-allowed-names";

/// Copies the CA from the ConfigMap to `server_tls` until `stop`.
///
/// If the ConfigMap is deleted, the last CA stays in use. As long as it never existed, the server does not ask for
/// client certificates. Clients without a certificate are accepted in any case.
pub(super) async fn watch_client_ca(client: Client, server_tls: ServerTls, stop: CancellationToken) {
    let config = WatchConfig { fields: Some(format!("metadata.name={NAME}")), ..WatchConfig::default() };
    let api = Api::<ConfigMap>::namespaced(client, NAMESPACE);
    let (cache, watching) = watch(api, config, &[], parse_client_ca, stop);
    cache.subscribe(move |change| {
        if let Some(Some(client_ca)) = change.new.as_deref() {
            server_tls.set_client_ca(client_ca.clone());
        }
    });
    watching.await;
}

fn parse_client_ca(config_map: ConfigMap) -> Option<ClientCa> {
    let mut data = config_map.data?;
    let names = data.remove(NAMES_KEY).filter(|names| !names.is_empty());
    // An empty list allows every name, so names that cannot be parsed must not become an empty list.
    let names = names.map_or(Some(Vec::new()), |names| serde_json::from_str(&names).ok())?;
    Some(ClientCa { bundle: data.remove(BUNDLE_KEY)?, names })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn from_data(data: &serde_json::Value) -> Option<ClientCa> {
        parse_client_ca(serde_json::from_value(json!({"metadata": {"name": NAME}, "data": data})).unwrap())
    }

    #[test]
    fn allowed_names_are_a_json_list_and_invalid_ones_are_ignored() {
        let expected = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Some(ClientCa { bundle: "pem".to_owned(), names })
        };
        assert_eq!(
            from_data(&json!({BUNDLE_KEY: "pem", NAMES_KEY: r#"["front-proxy-client"]"#})),
            expected(&["front-proxy-client"])
        );
        assert_eq!(from_data(&json!({BUNDLE_KEY: "pem", NAMES_KEY: "[]"})), expected(&[]));
        assert_eq!(from_data(&json!({BUNDLE_KEY: "pem"})), expected(&[]));
        assert_eq!(from_data(&json!({BUNDLE_KEY: "pem", NAMES_KEY: "front-proxy-client"})), None);
        assert_eq!(from_data(&json!({NAMES_KEY: "[]"})), None);
        assert_eq!(from_data(&json!(null)), None);
    }
}
