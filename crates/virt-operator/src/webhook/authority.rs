//! Whom the API server presents itself as: the authority of the front proxy, and the names that it signs, as the cluster
//! publishes them in a ConfigMap.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use vitivirt_runtime::{
    tls::ClientCa,
    watch::{WatchConfig, watch},
};

use super::Serving;

const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";
const BUNDLE: &str = "requestheader-client-ca-file";
const NAMES: &str = "requestheader-allowed-names";

/// Keeps `serving` in step until `stop`. Where the ConfigMap is gone the last authority stays, and where there never was
/// one clients are not asked who they are: who does not say is let in anyway.
pub(super) async fn keep(client: Client, serving: Serving, stop: CancellationToken) {
    let selection = WatchConfig { fields: Some(format!("metadata.name={NAME}")), ..WatchConfig::default() };
    let api = Api::<ConfigMap>::namespaced(client, NAMESPACE);
    let (cache, following) = watch(api, selection, &[], authority, stop);
    cache.subscribe(move |change| {
        if let Some(Some(authority)) = change.new.as_deref() {
            serving.set_authority(Some(authority.clone()));
        }
    });
    following.await;
}

fn authority(config_map: ConfigMap) -> Option<ClientCa> {
    let mut data = config_map.data?;
    let names = data.remove(NAMES).filter(|names| !names.is_empty());
    // Names that cannot be read must not become "any name".
    let names = names.map_or(Some(Vec::new()), |names| serde_json::from_str(&names).ok())?;
    Some(ClientCa { bundle: data.remove(BUNDLE)?, names })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(data: &serde_json::Value) -> Option<ClientCa> {
        authority(serde_json::from_value(json!({"metadata": {"name": NAME}, "data": data})).unwrap())
    }

    #[test]
    fn names_are_a_list_in_json() {
        let expected = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Some(ClientCa { bundle: "pem".to_owned(), names })
        };
        assert_eq!(of(&json!({BUNDLE: "pem", NAMES: r#"["front-proxy-client"]"#})), expected(&["front-proxy-client"]));
        assert_eq!(of(&json!({BUNDLE: "pem", NAMES: "[]"})), expected(&[]));
        assert_eq!(of(&json!({BUNDLE: "pem"})), expected(&[]));
        assert_eq!(of(&json!({BUNDLE: "pem", NAMES: "front-proxy-client"})), None);
        assert_eq!(of(&json!({NAMES: "[]"})), None);
        assert_eq!(of(&json!(null)), None);
    }
}
