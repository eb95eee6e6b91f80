//! `virt-operator check`: whether KubeVirt can be installed, and whether the installed operator has what it needs. It
//! writes nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, Result, anyhow};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Namespace, Node},
        rbac::v1::PolicyRule,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, ListParams},
    core::GroupVersionKind,
};
use serde_json::Value;
use vitivirt_api::{IMAGE, docs_url, kubevirt::KubeVirt};
use vitivirt_cli::{
    Check, CheckArguments, CheckReport, CommandResult, check_lease, check_permissions, check_server_version,
};
use vitivirt_install::manifests::Manifests;
use vitivirt_runtime::{
    access::{Account, Permission, missing_permissions},
    client::{configuration, connect},
    metrics::Metrics,
    preflight::{find_crd, is_established, lease_holder},
    root_cause::root_cause,
};

const DEFAULT_NAMESPACE: &str = "kubevirt";
const LEASE: &str = "virt-operator";
const ACCOUNT: &str = "kubevirt-operator";
const CRD: &str = "kubevirts.kubevirt.io";
const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";
/// The label of the operator's Deployment, upstream's too.
const OPERATOR_LABEL: &str = "kubevirt.io=virt-operator";

pub(crate) fn run(arguments: &CheckArguments) -> CommandResult<ExitCode> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let report = tokio.block_on(check(arguments))?;
    report.print(&arguments.output)?;
    Ok(report.exit_code())
}

async fn check(arguments: &CheckArguments) -> Result<CheckReport> {
    let cluster = &arguments.cluster;
    let config = configuration(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await?;
    let agent = concat!("virt-operator/", env!("CARGO_PKG_VERSION"));
    let client = connect(&config, agent, None, &Arc::new(Metrics::new("check")))?.rate_limited;
    let version = client.apiserver_version().await;
    let version = version
        .map_err(|error| anyhow!("cannot reach the API server {}: {}", config.cluster_url, root_cause(&error)))?;
    let reader = Reader {
        client,
        pre: arguments.pre,
        namespace: arguments.namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
    };
    let mut checks = vec![check_server_version(&version.major, &version.minor, &version.git_version)];
    let crd = find_crd(&reader.client, CRD).await;
    checks.push(found("CRD", crd, |crd| crd_result(crd.as_ref(), reader.pre)));
    checks.push(reader.permissions().await?);
    checks.push(reader.operators().await);
    if !reader.pre {
        checks.push(reader.lease().await);
    }
    checks.push(reader.pod_security().await);
    checks.push(reader.kubevirts().await);
    checks.push(reader.nodes().await);
    Ok(CheckReport { checks })
}

struct Reader {
    client: Client,
    pre: bool,
    namespace: String,
}

/// The result of a check, or a warning that the cluster did not answer.
fn found<T>(name: &str, answer: Result<T, kube::Error>, check: impl FnOnce(T) -> Check) -> Check {
    match answer {
        Ok(answer) => check(answer),
        Err(error) => Check::unknown(name, &root_cause(&error)),
    }
}

impl Reader {
    /// Before the installation: of the user, who must have every permission that the roles grant. Afterwards: of the
    /// operator's account, which is the own account in its pod.
    async fn permissions(&self) -> Result<Check> {
        let manifests =
            Manifests { namespace: self.namespace.clone(), image: IMAGE.to_owned(), image_pull_secrets: Vec::new() };
        let objects = manifests.objects()?;
        let mut needed = granted_permissions(&objects, &self.namespace)?;
        let (account, who, remedy) = if self.pre {
            needed.extend(kinds(&objects).iter().map(Permission::to_create));
            (Account::Own, "your account".to_owned(), "use an account of a cluster administrator")
        } else {
            let account = Account::of_operator(&self.namespace, ACCOUNT);
            let who = account.to_string();
            (account, who, "apply the output of `virt-operator manifests` again")
        };
        let missing = missing_permissions(&self.client, &account, needed).await;
        Ok(found("Permissions", missing, |missing| {
            let texts: Vec<String> = missing.iter().map(ToString::to_string).collect();
            check_permissions(&who, &texts, remedy)
        }))
    }

    async fn operators(&self) -> Check {
        let api: Api<Deployment> = Api::all(self.client.clone());
        let found_operators = api.list(&ListParams::default().labels(OPERATOR_LABEL)).await;
        found("Other operators", found_operators, |list| {
            let operators = list.items.iter().map(|deployment| {
                let image = deployment
                    .spec
                    .as_ref()
                    .and_then(|spec| spec.template.spec.as_ref()?.containers.first()?.image.clone());
                (deployment.namespace().unwrap_or_default(), image.unwrap_or_default())
            });
            operators_result(&self.namespace, &operators.collect::<Vec<_>>(), self.pre)
        })
    }

    async fn lease(&self) -> Check {
        #[expect(clippy::disallowed_methods, reason = "the age of a Lease depends on the time")]
        let now = Timestamp::now();
        let lease = lease_holder(&self.client, &self.namespace, LEASE, now).await;
        found("Operator", lease, |lease| {
            let lease = lease.as_ref().map(|(holder, age)| (holder.as_str(), *age));
            check_lease(&self.namespace, LEASE, lease)
        })
    }

    async fn pod_security(&self) -> Check {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = namespaces.get_metadata_opt(&self.namespace).await;
        found("Pod security", namespace, |namespace| {
            pod_security_result(&self.namespace, namespace.as_ref().map(ResourceExt::labels), self.pre)
        })
    }

    async fn kubevirts(&self) -> Check {
        let api: Api<KubeVirt> = Api::all(self.client.clone());
        let kubevirts = match api.list(&ListParams::default()).await {
            Ok(list) => list.items,
            Err(kube::Error::Api(status)) if status.code == 404 => Vec::new(),
            Err(error) => return Check::unknown("KubeVirt", &root_cause(&error)),
        };
        kubevirt_result(&self.namespace, &kubevirts, self.pre)
    }

    async fn nodes(&self) -> Check {
        let api: Api<Node> = Api::all(self.client.clone());
        let nodes = api.list(&ListParams::default()).await;
        found("Nodes", nodes, |nodes| nodes_result(&nodes.items))
    }
}

/// What the roles of the manifests grant to the operator: the table that the operator runs with.
fn granted_permissions(objects: &[Value], namespace: &str) -> Result<BTreeSet<Permission>> {
    let mut permissions = BTreeSet::new();
    for object in objects {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let namespace = match (text("/kind"), text("/metadata/name")) {
            ("ClusterRole", ACCOUNT) => None,
            ("Role", ACCOUNT) => Some(namespace),
            _ => continue,
        };
        let rules: Vec<PolicyRule> = serde_json::from_value(object.get("rules").cloned().unwrap_or_default())?;
        permissions.extend(Permission::of_rules(&rules, namespace));
    }
    Ok(permissions)
}

fn kinds(objects: &[Value]) -> Vec<ApiResource> {
    let mut kinds: Vec<ApiResource> = Vec::new();
    for object in objects {
        let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default();
        let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, text("kind")));
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

fn crd_result(crd: Option<&CustomResourceDefinition>, pre: bool) -> Check {
    let name = format!("CRD {CRD}");
    match crd {
        None if pre => Check::ok(&name, "does not exist yet"),
        None => Check::failed(&name, "not found", "apply the output of `virt-operator manifests`"),
        Some(crd) if !is_established(crd) => {
            Check::failed(&name, "not established", format!("see `kubectl describe crd {CRD}`"))
        }
        Some(_) => Check::ok(&name, if pre { "already exists" } else { "established" }),
    }
}

/// The Deployments of virt-operator, with their namespace and image.
fn operators_result(namespace: &str, operators: &[(String, String)], pre: bool) -> Check {
    let name = "Other operators";
    if let Some((other, image)) = operators.iter().find(|(other, _)| other != namespace) {
        let message = format!("Deployment virt-operator in namespace {other} ({image}) manages KubeVirt too");
        let remedy = format!("remove one of them, or set --namespace {other} to check that one");
        return Check::failed(name, message, remedy);
    }
    match operators.first() {
        Some((_, image)) if pre => Check::warning(
            name,
            format!("virt-operator ({image}) is installed, and this one would replace it"),
            format!("read {} first", docs_url("takeover.md")),
        ),
        _ => Check::ok(name, "none"),
    }
}

/// virt-handler is privileged.
fn pod_security_result(namespace: &str, labels: Option<&BTreeMap<String, String>>, pre: bool) -> Check {
    let name = "Pod security";
    let remedy = format!("kubectl label namespace {namespace} {POD_SECURITY}=privileged --overwrite");
    match labels.map(|labels| labels.get(POD_SECURITY).map(String::as_str)) {
        None if pre => Check::ok(name, format!("Namespace {namespace} does not exist yet")),
        None => Check::failed(name, format!("Namespace {namespace} not found"), "install the operator"),
        Some(Some("privileged")) => Check::ok(name, format!("Namespace {namespace} has the level privileged")),
        Some(Some(level)) => Check::failed(
            name,
            format!("Namespace {namespace} has the level {level}, which does not allow virt-handler"),
            remedy,
        ),
        Some(None) => {
            let message = format!("Namespace {namespace} has no level, so the default level of the cluster applies");
            Check::warning(name, message, remedy)
        }
    }
}

fn kubevirt_result(namespace: &str, kubevirts: &[KubeVirt], pre: bool) -> Check {
    let name = "KubeVirt";
    let identity =
        |kubevirt: &KubeVirt| format!("{}/{}", kubevirt.namespace().unwrap_or_default(), kubevirt.name_any());
    if kubevirts.len() > 1 {
        let names: Vec<String> = kubevirts.iter().map(identity).collect();
        let message = format!("{} KubeVirt resources: {}", kubevirts.len(), names.join(", "));
        return Check::failed(name, message, "delete all but one; a cluster can have only one");
    }
    let Some(kubevirt) = kubevirts.first() else {
        let remedy = "create one: kubectl apply -f config/virt-operator/kubevirt-cr.yaml";
        return match pre {
            true => Check::ok(name, "no KubeVirt resource yet"),
            false => Check::warning(name, "no KubeVirt resource", remedy),
        };
    };
    let which = identity(kubevirt);
    if kubevirt.namespace().as_deref() != Some(namespace) {
        let message = format!("KubeVirt {which} is not in the namespace of the operator ({namespace})");
        return Check::failed(name, message, "delete it and create it in that namespace");
    }
    let status = kubevirt.status.clone().unwrap_or_default();
    if status.phase == "Deployed" {
        return Check::ok(name, format!("{which} {} is deployed", status.observed_kube_virt_version));
    }
    if pre {
        return Check::warning(name, format!("KubeVirt {which} exists"), "the operator continues with it");
    }
    let cause = status.conditions.iter().find(|condition| {
        (condition.condition_type == "Synchronized" && condition.status == "False")
            || (condition.condition_type == "Degraded" && condition.status == "True")
    });
    let phase = if status.phase.is_empty() { "not set" } else { &status.phase };
    let cause = cause.map(|condition| format!(": {}", condition.message)).unwrap_or_default();
    let remedy = format!("see `kubectl describe -n {namespace} kubevirt {}`", kubevirt.name_any());
    Check::failed(name, format!("phase of {which} is {phase}{cause}"), remedy)
}

/// Nodes on which virt-handler can run.
fn nodes_result(nodes: &[Node]) -> Check {
    let name = "Nodes";
    let is_usable = |node: &&Node| {
        let label = |name: &str| node.labels().get(name).map(String::as_str);
        let architecture = label("kubernetes.io/arch").is_none_or(|arch| ["amd64", "arm64", "s390x"].contains(&arch));
        let linux = label("kubernetes.io/os").is_none_or(|os| os == "linux");
        let conditions = node.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
        let ready = conditions.into_iter().any(|have| have.type_ == "Ready" && have.status == "True");
        architecture && linux && ready
    };
    match nodes.iter().filter(is_usable).count() {
        0 => Check::failed(
            name,
            format!("none of {} nodes is ready and runs Linux on amd64, arm64 or s390x", nodes.len()),
            "add or repair nodes",
        ),
        count => Check::ok(name, format!("{count} of {} are ready and can run KubeVirt", nodes.len())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vitivirt_cli::CheckStatus::{Failed, Ok, Warning};

    use super::*;

    fn kubevirt(namespace: &str, phase: &str) -> KubeVirt {
        let conditions = json!([{"type": "Synchronized", "status": "False", "message": "an image cannot be pulled"}]);
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": namespace},
            "spec": {}, "status": {"phase": phase, "conditions": conditions},
        }))
        .unwrap()
    }

    #[test]
    fn one_kubevirt_resource_next_to_the_operator_must_be_deployed() {
        let status = |all: &[KubeVirt], pre| kubevirt_result("kubevirt", all, pre).status;
        let (deployed, other) = (kubevirt("kubevirt", "Deployed"), kubevirt("elsewhere", "Deployed"));
        assert_eq!(status(&[], true), Ok);
        assert_eq!(status(&[], false), Warning);
        assert_eq!(status(std::slice::from_ref(&deployed), false), Ok);
        assert_eq!(status(std::slice::from_ref(&other), false), Failed);
        assert_eq!(status(&[deployed, other], true), Failed);
        let deploying = kubevirt_result("kubevirt", &[kubevirt("kubevirt", "Deploying")], false);
        assert_eq!(deploying.message, "phase of kubevirt/kubevirt is Deploying: an image cannot be pulled");
    }

    #[test]
    fn virt_handler_needs_a_privileged_namespace() {
        let labels = |level: &str| BTreeMap::from([(POD_SECURITY.to_owned(), level.to_owned())]);
        let status =
            |labels: Option<&BTreeMap<String, String>>, pre| pod_security_result("kubevirt", labels, pre).status;
        assert_eq!(status(Some(&labels("privileged")), false), Ok);
        assert_eq!(status(Some(&labels("baseline")), false), Failed);
        assert_eq!(status(Some(&BTreeMap::new()), false), Warning);
        assert_eq!((status(None, true), status(None, false)), (Ok, Failed));
    }

    #[test]
    fn an_operator_in_another_namespace_fails_and_one_in_the_same_is_replaced() {
        let at = |namespace: &str| vec![(namespace.to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned())];
        assert_eq!(operators_result("kubevirt", &at("elsewhere"), true).status, Failed);
        assert_eq!(operators_result("kubevirt", &at("kubevirt"), true).status, Warning);
        assert_eq!(operators_result("kubevirt", &at("kubevirt"), false).status, Ok);
        assert_eq!(operators_result("kubevirt", &[], true).status, Ok);
    }

    #[test]
    fn windows_nodes_and_nodes_that_are_not_ready_do_not_count() {
        let node = |os: &str, ready: &str| -> Node {
            serde_json::from_value(json!({
                "metadata": {"labels": {"kubernetes.io/os": os, "kubernetes.io/arch": "amd64"}},
                "status": {"conditions": [{"type": "Ready", "status": ready}]},
            }))
            .unwrap()
        };
        assert_eq!(nodes_result(&[node("windows", "True"), node("linux", "False")]).status, Failed);
        let message = nodes_result(&[node("windows", "True"), node("linux", "True")]).message;
        assert_eq!(message, "1 of 2 are ready and can run KubeVirt");
    }

    #[test]
    fn the_permissions_are_those_of_the_manifests() {
        let manifests =
            Manifests { namespace: "kubevirt".to_owned(), image: IMAGE.to_owned(), image_pull_secrets: Vec::new() };
        let objects = manifests.objects().unwrap();
        let texts: Vec<String> =
            granted_permissions(&objects, "kubevirt").unwrap().iter().map(ToString::to_string).collect();
        for expected in ["patch kubevirts.kubevirt.io", "update leases.coordination.k8s.io in namespace kubevirt"] {
            assert!(texts.iter().any(|text| text == expected), "{expected} is not in {texts:?}");
        }
        let plurals: Vec<String> = kinds(&objects).into_iter().map(|kind| kind.plural).collect();
        assert!(plurals.iter().any(|plural| plural == "priorityclasses"), "{plurals:?}");
    }
}
