//! `virt-operator render`: every object of the installation that a KubeVirt resource asks for, without a cluster.
//!
//! They are the objects that the operator applies, in its order; only certificates, which are made at run time, are
//! missing.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use vitivirt_api::kubevirt::{GROUP, KIND, KubeVirt};
use vitivirt_cli::{Document, warn, write_yaml, written};
use vitivirt_install::certificates::NoCertificates;
use vitivirt_install::{Cluster, DeploymentConfig, Environment, Installation, RELEASE};

const USUAL_NAMESPACE: &str = "kubevirt";
const VERSION: &str = "kubevirt.io/v1";
const OLDER_VERSION: &str = "kubevirt.io/v1alpha3";

#[derive(Debug, Clone, Args)]
pub(crate) struct RenderArguments {
    /// File with the KubeVirt resource; - for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    file: PathBuf,
    /// How the objects are written
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// What the cluster offers besides plain Kubernetes
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    with: Vec<Offer>,
    /// How many nodes can run virtual machines
    #[arg(long, value_name = "NUMBER", default_value = "2")]
    nodes: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Yaml,
    /// One object per line
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Offer {
    /// The Prometheus operator, with the service account that the resource names
    Monitoring,
    /// OpenShift's security context constraints and routes
    Openshift,
}

pub(crate) fn run(arguments: &RenderArguments) -> Result<ExitCode> {
    let kubevirt = read(&arguments.file)?;
    let environment = environment(std::env::vars())?;
    if vitivirt_install::is_of_another_release(&kubevirt, &environment) {
        let asked = &kubevirt.spec.image_tag;
        bail!(
            "the resource asks for {asked}, and the objects known here are those of {RELEASE}: take spec.imageTag \
             away, or look with that release's own operator"
        );
    }
    let installation = render(&kubevirt, &environment, &arguments.with, arguments.nodes)?;
    warn(&vitivirt_install::warnings(&kubevirt, Some(&installation)));
    written(print(&installation, arguments.output, &mut io::stdout().lock()))?;
    Ok(ExitCode::SUCCESS)
}

/// The one KubeVirt resource of a file; what a cluster would drop of it is told on standard error.
pub(super) fn read(file: &Path) -> Result<KubeVirt> {
    let (kubevirt, unknown) = find(&vitivirt_cli::read(&[file.to_owned()])?)?;
    warn(&unknown);
    Ok(kubevirt)
}

fn find(documents: &[Document]) -> Result<(KubeVirt, Vec<String>)> {
    let is_kubevirt =
        |document: &Document| document.kind() == KIND && document.api_version().split('/').next() == Some(GROUP);
    let mut found = documents.iter().filter(|document| is_kubevirt(document));
    let Some(document) = found.next() else { bail!("there is no {GROUP} {KIND} in the file") };
    if let Some(second) = found.next() {
        bail!("{second} is one more {KIND}, and a cluster can have one only");
    }
    let definition = vitivirt_install::crds::KUBEVIRT.object()?;
    // Its versions have one schema.
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema").cloned().unwrap_or_default();
    let version = [VERSION, OLDER_VERSION].into_iter().find(|version| document.api_version() == *version);
    let (mut kubevirt, unknown): (KubeVirt, _) = document.typed(version.unwrap_or(VERSION), &schema)?;
    kubevirt.metadata.namespace.get_or_insert_with(|| USUAL_NAMESPACE.to_owned());
    Ok((kubevirt, unknown))
}

/// As in the operator's Deployment, unless this shell says otherwise.
pub(super) fn environment(variables: impl Iterator<Item = (String, String)>) -> Result<Environment> {
    let mut environment = Environment::from_variables(variables);
    if environment.operator_image.is_empty() {
        environment.operator_image = format!("quay.io/kubevirt/virt-operator:{RELEASE}");
    }
    if environment.kubevirt_version.is_empty() {
        environment.kubevirt_version = RELEASE.to_owned();
    }
    match environment.problem() {
        Some(problem) => bail!("{problem}"),
        None => Ok(environment),
    }
}

fn render(kubevirt: &KubeVirt, environment: &Environment, with: &[Offer], nodes: usize) -> Result<Installation> {
    let (monitoring, openshift) = (with.contains(&Offer::Monitoring), with.contains(&Offer::Openshift));
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

fn print(installation: &Installation, format: Format, out: &mut impl Write) -> Result<()> {
    for object in &installation.objects {
        let object = object.body(&NoCertificates)?.into_json();
        match format {
            Format::Yaml => write_yaml(out, &object)?,
            Format::Json => writeln!(out, "{object}").context("writing to standard output")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const PLAIN: &str = "{apiVersion: kubevirt.io/v1, kind: KubeVirt, metadata: {name: kubevirt}, spec: {}}";

    fn parse(text: &str) -> Result<KubeVirt> {
        find(&vitivirt_cli::parse("file", text)?).map(|(kubevirt, _)| kubevirt)
    }

    fn rendered(text: &str, with: &[Offer], format: Format) -> String {
        let environment = environment(std::iter::empty()).unwrap();
        let installation = render(&parse(text).unwrap(), &environment, with, 2).unwrap();
        let mut out = Vec::new();
        print(&installation, format, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn kinds(text: &str) -> Vec<String> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
        documents.iter().map(|document| document["kind"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_object_is_a_document_in_the_namespace_of_the_resource() {
        let kinds = kinds(&rendered(PLAIN, &[], Format::Yaml));
        assert_eq!(kinds.len(), 205);
        assert_eq!(kinds.iter().filter(|kind| *kind == "Deployment").count(), 2);
        let text =
            rendered(&PLAIN.replace("name: kubevirt", "name: kubevirt, namespace: elsewhere"), &[], Format::Json);
        assert_eq!(text.lines().count(), 205);
        assert!(text.contains(r#""namespace":"elsewhere""#) && !text.contains(r#""namespace":"kubevirt""#));
    }

    #[test]
    fn what_the_cluster_offers_brings_objects_with_it() {
        let count = |with: &[Offer], kind: &str| {
            kinds(&rendered(PLAIN, with, Format::Yaml)).iter().filter(|found| *found == kind).count()
        };
        assert_eq!(count(&[Offer::Monitoring], "PrometheusRule"), 1);
        assert_eq!(count(&[Offer::Openshift], "SecurityContextConstraints"), 2);
        assert_eq!(count(&[Offer::Openshift], "PrometheusRule"), 0);
    }

    #[test]
    fn a_bad_file_is_told_in_one_sentence() {
        for (text, expected) in [
            ("{", "not YAML"),
            ("{kind: Pod}", "there is no kubevirt.io KubeVirt in the file"),
            (&format!("{PLAIN}\n---\n{PLAIN}"), "(file, document 2) is one more KubeVirt"),
            (&PLAIN.replace("/v1", "/v99"), "kubevirt.io/v1 is understood"),
            (
                &PLAIN.replace("spec: {}", "spec: {infra: {replicas: many}}"),
                "spec.infra.replicas must be a whole number, and it is the text \"many\"",
            ),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let misspelt = PLAIN.replace("spec: {}", "spec: {infrra: {replicas: 1}, infra: {}}");
        let (_, unknown) = find(&vitivirt_cli::parse("file", &misspelt).unwrap()).unwrap();
        assert!(unknown.len() == 1 && unknown[0].contains("there is no field spec.infrra"), "{unknown:?}");
        let patch = PLAIN.replace(
            "spec: {}",
            "spec: {customizeComponents: {patches: [{resourceType: '*', resourceName: '*', type: odd, patch: '{}'}]}}",
        );
        let error =
            render(&parse(&patch).unwrap(), &environment(std::iter::empty()).unwrap(), &[], 2).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("patches[0]: type: unsupported value \"odd\""), "{error}");
    }
}
