//! `virt-operator render`: every object of the installation that a KubeVirt resource asks for, without a cluster.
//!
//! They are the objects that the operator applies, in its order; only certificates, which are made at run time, are
//! missing.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use api::kubevirt::{GROUP, KIND, KubeVirt};
use clap::{Args, ValueEnum};
use install::certificates::NothingIssued;
use install::{Cluster, DeploymentConfig, Environment, Installation, RELEASE};
use serde_json::Value;

use super::{document, finish};

const USUAL_NAMESPACE: &str = "kubevirt";

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
    let kubevirt = parse(&read(&arguments.file)?).with_context(|| format!("reading {}", arguments.file.display()))?;
    let environment = environment(std::env::vars());
    let installation = render(&kubevirt, &environment, &arguments.with, arguments.nodes)?;
    for warning in install::warnings(&kubevirt) {
        eprintln!("warning: {warning}");
    }
    finish(print(&installation, arguments.output, &mut io::stdout().lock()))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn read(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        return io::read_to_string(io::stdin()).context("reading standard input");
    }
    std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

pub(super) fn parse(text: &str) -> Result<KubeVirt> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).map_err(|error| anyhow::anyhow!("not YAML: {error}"))?;
    let is_kubevirt = |document: &Value| {
        let version = document.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
        document.get("kind") == Some(&KIND.into()) && version.split('/').next() == Some(GROUP)
    };
    let mut found = documents.into_iter().filter(is_kubevirt);
    let Some(document) = found.next() else { bail!("there is no {GROUP} {KIND} in it") };
    if found.next().is_some() {
        bail!("there is more than one {KIND} in it, and a cluster can have one only");
    }
    let mut kubevirt: KubeVirt = serde_json::from_value(document).with_context(|| format!("a {KIND} that is none"))?;
    kubevirt.metadata.namespace.get_or_insert_with(|| USUAL_NAMESPACE.to_owned());
    Ok(kubevirt)
}

/// As in the operator's Deployment, unless this shell says otherwise.
pub(super) fn environment(variables: impl Iterator<Item = (String, String)>) -> Environment {
    let mut environment = Environment::from_variables(variables);
    if environment.operator_image.is_empty() {
        environment.operator_image = format!("quay.io/kubevirt/virt-operator:{RELEASE}");
    }
    if environment.kubevirt_version.is_empty() {
        environment.kubevirt_version = RELEASE.to_owned();
    }
    environment
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
        let object = object.body(&NothingIssued)?.into_json();
        match format {
            Format::Yaml => document(out, &object)?,
            Format::Json => writeln!(out, "{object}").context("writing to standard output")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "{apiVersion: kubevirt.io/v1, kind: KubeVirt, metadata: {name: kubevirt}, spec: {}}";

    fn rendered(text: &str, with: &[Offer], format: Format) -> String {
        let environment = environment(std::iter::empty());
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
            ("{kind: Pod}", "there is no kubevirt.io KubeVirt in it"),
            (&format!("{PLAIN}\n---\n{PLAIN}"), "more than one KubeVirt"),
            (
                "{apiVersion: kubevirt.io/v1, kind: KubeVirt, spec: {infra: {replicas: many}}}",
                "a KubeVirt that is none",
            ),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let patch = PLAIN.replace(
            "spec: {}",
            "spec: {customizeComponents: {patches: [{resourceType: '*', resourceName: '*', type: odd, patch: '{}'}]}}",
        );
        let error = render(&parse(&patch).unwrap(), &environment(std::iter::empty()), &[], 2).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("patches[0] has the type \"odd\""), "{error}");
    }
}
