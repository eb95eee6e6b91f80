//! `virt-operator --dump-install-strategy`: writes the install strategy of this release to a ConfigMap, from which the
//! operator of another release reads it. A Job of that operator runs it, and its environment contains the
//! configuration.

use std::{env, path::Path, process::ExitCode};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::PostParams};
use vitivirt_cli::ClusterArguments;
use vitivirt_install::{DeploymentConfig, Environment, InstallStrategy, Kind, config_map, variable};
use vitivirt_runtime::program::{SERVICE_ACCOUNT_NAMESPACE, own_namespace};

use super::cluster::InstallationReader;
use crate::arguments::RunArguments;

pub(crate) fn run(arguments: RunArguments) -> Result<ExitCode> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    tokio.block_on(dump(arguments))?;
    Ok(ExitCode::SUCCESS)
}

async fn dump(arguments: RunArguments) -> Result<()> {
    let given = arguments.namespace.get()?;
    let namespace = own_namespace(given.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), "kubevirt");
    let environment = Environment::from_variables(env::vars());
    let config = config(env::var(variable::CONFIG).ok().as_deref(), namespace, &environment)?;
    let reader =
        InstallationReader::connect(&ClusterArguments { kubeconfig: arguments.kubeconfig, context: None }).await?;
    let monitoring = reader.serves_kind(Kind::ServiceMonitor).await?;
    let monitor = if monitoring { reader.monitor_namespace(&config).await? } else { None };
    let strategy = InstallStrategy::generate(&config, monitor.as_deref(), environment.runbook_url_template.as_deref())?;
    let mut map = config_map(&config, &strategy)?;
    map.metadata.name = Some(config.strategy_key().name().to_owned());
    let api: Api<ConfigMap> = Api::namespaced(reader.client(), &config.namespace);
    match api.create(&PostParams::default(), &map).await {
        Ok(_) => Ok(()),
        // The name follows from the content, so another dump has written the same.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error).context("cannot write the install strategy to a ConfigMap"),
    }
}

/// The configuration from the operator that runs the Job, otherwise the one of this program's environment.
fn config(given: Option<&str>, namespace: String, environment: &Environment) -> Result<DeploymentConfig> {
    match given.filter(|given| !given.is_empty()) {
        Some(given) => serde_json::from_str(given)
            .with_context(|| format!("{}: invalid deployment configuration", variable::CONFIG)),
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
    fn the_configuration_of_the_other_operator_overrides_the_environment() {
        let environment = Environment { operator_image: "r/virt-operator:t".to_owned(), ..Environment::default() };
        let given = r#"{"id":"abc","namespace":"elsewhere","registry":"q","kubeVirtVersion":"v1"}"#;
        let config = config(Some(given), "own".to_owned(), &environment).unwrap();
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
