//! `virt-operator --dump-install-strategy`: leaves the text of what this release consists of in a ConfigMap, where an
//! operator of another release looks for it. It is run by that operator's Job, and told in the environment what for.

use std::{env, path::Path, process::ExitCode};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::PostParams};
use vitivirt_install::{DeploymentConfig, Environment, InstallStrategy, Kind, config_map, variable};
use vitivirt_runtime::program::{SERVICE_ACCOUNT_NAMESPACE, own_namespace};

use super::cluster::Reader;
use crate::arguments::RunArguments;

pub(crate) fn run(arguments: &RunArguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    runtime.block_on(dump(arguments))?;
    Ok(ExitCode::SUCCESS)
}

async fn dump(arguments: &RunArguments) -> Result<()> {
    let namespace = own_namespace(arguments.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), "kubevirt");
    let environment = Environment::from_variables(env::vars());
    let config = config(env::var(variable::CONFIG).ok().as_deref(), namespace, &environment)?;
    let reader = Reader::connect(arguments.kubeconfig.as_deref()).await?;
    let monitoring = reader.has(Kind::ServiceMonitor).await?;
    let monitor = if monitoring { reader.monitor_namespace(&config).await? } else { None };
    let strategy = InstallStrategy::generate(&config, monitor.as_deref(), environment.runbook_url_template.as_deref())?;
    let mut map = config_map(&config, &strategy)?;
    map.metadata.name = Some(config.strategy_key().name().to_owned());
    let api: Api<ConfigMap> = Api::namespaced(reader.client(), &config.namespace);
    match api.create(&PostParams::default(), &map).await {
        Ok(_) => Ok(()),
        // Its name follows from its content: somebody has told before us.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error).context("leaving the install strategy in a ConfigMap"),
    }
}

/// What is to be installed is the asking operator's decision; by itself it is what this program's environment says.
fn config(told: Option<&str>, namespace: String, environment: &Environment) -> Result<DeploymentConfig> {
    match told.filter(|told| !told.is_empty()) {
        Some(told) => serde_json::from_str(told)
            .with_context(|| format!("{} is not a deployment configuration", variable::CONFIG)),
        None => {
            let mut kubevirt = vitivirt_api::kubevirt::KubeVirt::default();
            kubevirt.metadata.namespace = Some(env::var(variable::NAMESPACE).unwrap_or(namespace));
            kubevirt.spec.image_pull_policy = env::var(variable::PULL_POLICY).unwrap_or_default();
            Ok(DeploymentConfig::new(&kubevirt, environment))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_operator_asks_for_counts() {
        let environment = Environment { operator_image: "r/virt-operator:t".to_owned(), ..Environment::default() };
        let told = r#"{"id":"abc","namespace":"elsewhere","registry":"q","kubeVirtVersion":"v1"}"#;
        let config = config(Some(told), "own".to_owned(), &environment).unwrap();
        assert_eq!(
            (config.id.as_str(), config.namespace.as_str(), config.registry.as_str()),
            ("abc", "elsewhere", "q")
        );
        let config = super::config(None, "own".to_owned(), &environment).unwrap();
        assert_eq!((config.namespace.as_str(), config.registry.as_str()), ("own", "r"));
        let error = super::config(Some("{"), "own".to_owned(), &environment).unwrap_err();
        assert!(error.to_string().contains("TARGET_DEPLOYMENT_CONFIG"), "{error}");
    }
}
