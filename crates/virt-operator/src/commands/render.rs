//! `virt-operator render`: every object that is installed for a KubeVirt resource, without a cluster.
//!
//! They are the objects that the operator applies, in its order, without certificates, which it creates when it runs.

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use serde_json::Value;
use vitivirt_api::{
    KUBEVIRT_REGISTRY,
    kubevirt::{GROUP, KIND, KubeVirt},
};
use vitivirt_cli::{
    CommandError, CommandResult, Document, FileArguments, OrInvalid, RenderOutput, print_objects, print_warnings,
};
use vitivirt_install::{Cluster, DeploymentConfig, Environment, Installation, RELEASE, certificates::NoCertificates};

const DEFAULT_NAMESPACE: &str = "kubevirt";
const DEFAULT_NODES: usize = 2;
const VERSION: &str = "kubevirt.io/v1";
const OLDER_VERSION: &str = "kubevirt.io/v1alpha3";

#[derive(Debug, Clone, Args)]
pub(crate) struct RenderArguments {
    #[command(flatten)]
    input: FileArguments,
    #[command(flatten)]
    output: RenderOutput,
    /// APIs that the cluster serves in addition to those of Kubernetes
    #[arg(long, value_enum, value_delimiter = ',', value_name = "API")]
    with: Vec<ClusterApi>,
    /// Number of nodes that can run virtual machines
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_NODES)]
    nodes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ClusterApi {
    /// Prometheus operator, with the ServiceAccount of spec.monitorAccount
    Monitoring,
    /// OpenShift: SecurityContextConstraints and Routes
    Openshift,
}

pub(crate) fn run(arguments: &RenderArguments) -> CommandResult<ExitCode> {
    let (kubevirt, environment) = read_input(&arguments.input)?;
    let installation = render(&kubevirt, &environment, &arguments.with, arguments.nodes).or_invalid()?;
    print_warnings(&vitivirt_install::warnings(&kubevirt, Some(&installation)));
    print_objects(objects(&installation), arguments.output.output)?;
    Ok(ExitCode::SUCCESS)
}

/// The KubeVirt resource of the files, and the environment of the operator. Another release is refused, because this
/// program has the objects of one.
pub(super) fn read_input(input: &FileArguments) -> CommandResult<(KubeVirt, Environment)> {
    let kubevirt = read_kubevirt(input)?;
    let environment = environment(std::env::vars()).or_invalid()?;
    if vitivirt_install::is_of_another_release(&kubevirt, &environment) {
        let requested = &kubevirt.spec.image_tag;
        return Err(CommandError::Invalid(anyhow!(
            "spec.imageTag: unsupported value {requested:?}: this program has the objects of {RELEASE}; remove \
             spec.imageTag, or use the virt-operator of that release"
        )));
    }
    Ok((kubevirt, environment))
}

/// Every object that is installed on a cluster with these APIs.
pub(super) fn all_objects(
    kubevirt: &KubeVirt,
    environment: &Environment,
    with: &[ClusterApi],
) -> CommandResult<Vec<Value>> {
    let installation = render(kubevirt, environment, with, DEFAULT_NODES).or_invalid()?;
    Ok(objects(&installation).collect::<Result<_>>()?)
}

/// The one KubeVirt resource of the files.
pub(super) fn read_kubevirt(input: &FileArguments) -> CommandResult<KubeVirt> {
    let namespace = input.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    find_kubevirt(&vitivirt_cli::read_manifests(&input.files)?, namespace).or_invalid()
}

fn find_kubevirt(documents: &[Document], namespace: &str) -> Result<KubeVirt> {
    let is_kubevirt =
        |document: &Document| document.kind() == KIND && document.api_version().split('/').next() == Some(GROUP);
    let mut found = documents.iter().filter(|document| is_kubevirt(document));
    let Some(document) = found.next() else {
        let names: Vec<String> = documents.iter().map(ToString::to_string).collect();
        bail!(
            "no {KIND} resource ({GROUP}) found in the files{}",
            if names.is_empty() { String::new() } else { format!("; found: {}", names.join("; ")) }
        );
    };
    if let Some(second) = found.next() {
        bail!("{second}: duplicate: a cluster can have only one {KIND} resource");
    }
    let crd = vitivirt_install::crds::KUBEVIRT.object()?;
    // All versions have the same schema.
    let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema").cloned().unwrap_or_default();
    let version = [VERSION, OLDER_VERSION].into_iter().find(|version| document.api_version() == *version);
    let mut kubevirt: KubeVirt = document.typed(version.unwrap_or(VERSION), &schema)?;
    kubevirt.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
    Ok(kubevirt)
}

/// The environment of the operator's Deployment, with the variables that are set for this command.
pub(super) fn environment(variables: impl Iterator<Item = (String, String)>) -> Result<Environment> {
    let mut environment = Environment::from_variables(variables);
    if environment.operator_image.is_empty() {
        environment.operator_image = format!("{KUBEVIRT_REGISTRY}/virt-operator:{RELEASE}");
    }
    if environment.kubevirt_version.is_empty() {
        environment.kubevirt_version = RELEASE.to_owned();
    }
    match environment.problem() {
        Some(problem) => bail!("{problem}"),
        None => Ok(environment),
    }
}

fn render(kubevirt: &KubeVirt, environment: &Environment, with: &[ClusterApi], nodes: usize) -> Result<Installation> {
    let (monitoring, openshift) = (with.contains(&ClusterApi::Monitoring), with.contains(&ClusterApi::Openshift));
    let config = DeploymentConfig::new(kubevirt, environment);
    let monitor_namespace = config.monitor_namespaces().first().map(|namespace| (*namespace).to_owned());
    let cluster = Cluster {
        service_monitors: monitoring,
        prometheus_rules: monitoring,
        admission_policies: true,
        security_context_constraints: openshift,
        routes: openshift,
        monitor_namespace: monitor_namespace.filter(|_| monitoring),
        schedulable_nodes: nodes,
    };
    Ok(Installation::new(kubevirt, environment, &cluster)?)
}

/// Built one at a time: together the objects need much memory.
fn objects(installation: &Installation) -> impl Iterator<Item = Result<Value>> {
    installation.objects.iter().map(|object| Ok(object.body(&NoCertificates)?.into_json()))
}

#[cfg(test)]
mod tests {
    use vitivirt_cli::{ObjectFormat, write_objects};

    use super::*;

    const PLAIN: &str = "{apiVersion: kubevirt.io/v1, kind: KubeVirt, metadata: {name: kubevirt}, spec: {}}";

    fn parse(text: &str) -> Result<KubeVirt> {
        find_kubevirt(&vitivirt_cli::parse_manifests("file", text)?, DEFAULT_NAMESPACE)
    }

    fn rendered(text: &str, with: &[ClusterApi], format: ObjectFormat) -> String {
        let environment = environment(std::iter::empty()).unwrap();
        let installation = render(&parse(text).unwrap(), &environment, with, 2).unwrap();
        let mut out = Vec::new();
        write_objects(&mut out, objects(&installation), format).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn kinds(text: &str) -> Vec<String> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
        documents.iter().map(|document| document["kind"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_object_is_in_the_namespace_of_the_resource() {
        let kinds = kinds(&rendered(PLAIN, &[], ObjectFormat::Yaml));
        assert_eq!(kinds.len(), 205);
        assert_eq!(kinds.iter().filter(|kind| *kind == "Deployment").count(), 2);
        let text =
            rendered(&PLAIN.replace("name: kubevirt", "name: kubevirt, namespace: elsewhere"), &[], ObjectFormat::Json);
        let list: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&list["apiVersion"], &list["kind"]), (&"v1".into(), &"List".into()));
        assert_eq!(list["items"].as_array().unwrap().len(), 205);
        assert!(text.contains(r#""namespace": "elsewhere""#) && !text.contains(r#""namespace": "kubevirt""#));
    }

    #[test]
    fn apis_of_the_cluster_add_objects() {
        let count = |with: &[ClusterApi], kind: &str| {
            kinds(&rendered(PLAIN, with, ObjectFormat::Yaml)).iter().filter(|found| *found == kind).count()
        };
        assert_eq!(count(&[ClusterApi::Monitoring], "PrometheusRule"), 1);
        assert_eq!(count(&[ClusterApi::Openshift], "SecurityContextConstraints"), 2);
        assert_eq!(count(&[ClusterApi::Openshift], "PrometheusRule"), 0);
    }

    #[test]
    fn an_error_names_file_object_and_field() {
        for (text, expected) in [
            ("{", "file: invalid YAML"),
            ("{kind: Pod}", "no KubeVirt resource (kubevirt.io) found in the files; found: file: Pod"),
            (
                &format!("{PLAIN}\n---\n{PLAIN}"),
                "file, document 2: KubeVirt kubevirt: duplicate: a cluster can have only one KubeVirt resource",
            ),
            (
                &PLAIN.replace("/v1", "/v99"),
                "file: KubeVirt kubevirt: apiVersion: unsupported value \"kubevirt.io/v99\"; supported values: kubevirt.io/v1",
            ),
            (
                &PLAIN.replace("spec: {}", "spec: {infra: {replicas: many}}"),
                "file: KubeVirt kubevirt: spec.infra.replicas: invalid value \"many\": must be an integer",
            ),
            (
                &PLAIN.replace("spec: {}", "spec: {infrra: {replicas: 1}, infra: {}}"),
                "file: KubeVirt kubevirt: spec.infrra: unknown field; did you mean infra?",
            ),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let patch = PLAIN.replace(
            "spec: {}",
            "spec: {customizeComponents: {patches: [{resourceType: '*', resourceName: '*', type: odd, patch: '{}'}]}}",
        );
        let error =
            render(&parse(&patch).unwrap(), &environment(std::iter::empty()).unwrap(), &[], 2).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("patches[0]: type: unsupported value \"odd\""), "{error}");
    }
}
