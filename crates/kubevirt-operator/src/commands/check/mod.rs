//! `kubevirt-operator check`: whether a cluster has what the operator and its Machines need. It writes nothing.
//!
//! This file reads the cluster; `results` decides what each answer means.

mod results;

use std::{process::ExitCode, sync::Arc};

use anyhow::{Context, anyhow};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingAdmissionPolicy,
        core::v1::{Namespace, Node},
        storage::v1::StorageClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
    core::GroupVersionKind,
};
use vitivirt_api::{
    kubevirt::KubeVirt,
    resources::{import_source_resource, network_attachment_resource},
};
use vitivirt_cli::{Check, CheckReport, CommandResult, check_lease, check_permissions, check_server_version};
use vitivirt_runtime::{
    access::{Account, Permission, missing_permissions},
    client::{configuration, connect},
    metrics::Metrics,
    preflight::{find_crd, lease_holder},
    root_cause::root_cause,
};

use crate::{arguments::OperatorCheckArguments, crd_guard::OWN_FIELDS, manifests, rbac};

const LEASE: &str = "kubevirt-operator";

pub(crate) fn run(arguments: &OperatorCheckArguments) -> CommandResult<ExitCode> {
    let watched = arguments.watch_namespace.clone().get()?;
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let report = tokio.block_on(check(arguments, watched))?;
    report.print(&arguments.common.output)?;
    Ok(report.exit_code())
}

async fn check(arguments: &OperatorCheckArguments, watched: Option<String>) -> anyhow::Result<CheckReport> {
    let common = &arguments.common;
    let cluster = &common.cluster;
    let config = configuration(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await?;
    let agent = concat!("kubevirt-operator/", env!("CARGO_PKG_VERSION"));
    let client = connect(&config, agent, None, &Arc::new(Metrics::new("check")))?.rate_limited;
    let version = client.apiserver_version().await;
    let version = version
        .map_err(|error| anyhow!("cannot reach the API server {}: {}", config.cluster_url, root_cause(&error)))?;
    let namespace = common.namespace.clone().unwrap_or_else(|| rbac::NAMESPACE.to_owned());
    let account = match &arguments.service_account {
        Some(name) => Account::ServiceAccount { namespace: namespace.clone(), name: name.clone() },
        None => Account::of_operator(&namespace, rbac::ACCOUNT),
    };
    let reader = Reader { client, pre: common.pre, namespace, watched, account };
    let mut checks = vec![check_server_version(&version.major, &version.minor, &version.git_version)];
    for (name, field) in OWN_FIELDS {
        let crd = find_crd(&reader.client, name).await;
        checks.push(found("CRD", crd, |crd| results::own_crd(name, field, crd.as_ref(), reader.pre)));
    }
    checks.push(reader.permissions().await);
    if !reader.pre {
        checks.extend(reader.other_namespaces().await);
        checks.push(reader.admission_policy(arguments.account()).await);
        checks.push(reader.operator().await);
    }
    checks.push(reader.pod_security().await);
    checks.extend(reader.storage().await);
    checks.push(reader.api(&network_attachment_resource(), results::multus).await);
    checks.push(reader.api(&import_source_resource(), results::cdi).await);
    checks.extend(reader.kubevirt().await);
    Ok(CheckReport { checks })
}

struct Reader {
    client: Client,
    pre: bool,
    /// The namespace of the operator.
    namespace: String,
    /// The namespace of the Machines. `None`: all namespaces.
    watched: Option<String>,
    /// The account of the operator.
    account: Account,
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
    async fn permissions(&self) -> Check {
        let watched = self.watched.as_deref();
        let mut needed = results::needed_permissions(&self.namespace, watched);
        let (account, who, remedy) = if self.pre {
            match manifests::installed_kinds() {
                Ok(kinds) => needed.extend(kinds.iter().map(Permission::to_create)),
                Err(error) => return Check::unknown("Permissions", &format!("{error:#}")),
            }
            (Account::Own, "your account".to_owned(), "use an account of a cluster administrator".to_owned())
        } else {
            (self.account.clone(), self.account.to_string(), results::permissions_remedy(watched))
        };
        let missing = missing_permissions(&self.client, &account, needed).await;
        found("Permissions", missing, |missing| {
            let texts: Vec<String> = missing.iter().map(ToString::to_string).collect();
            check_permissions(&who, &texts, &remedy)
        })
    }

    /// Of an operator for one namespace: whether its account has permissions in the other ones too.
    async fn other_namespaces(&self) -> Option<Check> {
        let watched = self.watched.as_deref()?;
        let everywhere = results::permission_of_all_namespaces();
        let missing = missing_permissions(&self.client, &self.account, [everywhere]).await;
        Some(found("Other namespaces", missing, |missing| {
            results::other_namespaces(&self.account.to_string(), watched, missing.is_empty())
        }))
    }

    async fn admission_policy(&self, account: &str) -> Check {
        let api: Api<ValidatingAdmissionPolicy> = Api::all(self.client.clone());
        let policies = api.list(&ListParams::default()).await;
        found("Admission policy", policies, |list| results::admission_policy(&list.items, &self.namespace, account))
    }

    async fn operator(&self) -> Check {
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
            results::pod_security(&self.namespace, namespace.as_ref().map(ResourceExt::labels), self.pre)
        })
    }

    async fn storage(&self) -> Vec<Check> {
        let classes: Api<StorageClass> = Api::all(self.client.clone());
        let classes = match classes.list(&ListParams::default()).await {
            Ok(classes) => classes.items,
            Err(error) => return vec![Check::unknown("StorageClass", &root_cause(&error))],
        };
        let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass");
        let api: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::from_gvk_with_plural(&kind, "volumesnapshotclasses"));
        let drivers = match api.list(&ListParams::default()).await {
            Ok(list) => {
                list.items.iter().filter_map(|class| class.data.get("driver")?.as_str().map(str::to_owned)).collect()
            }
            Err(_) => Vec::new(),
        };
        results::storage(&classes, &drivers)
    }

    /// Whether the cluster serves a kind.
    async fn api(&self, resource: &ApiResource, check: impl FnOnce(bool) -> Check) -> Check {
        let name = format!("{}.{}", resource.plural, resource.group);
        found(&resource.kind, find_crd(&self.client, &name).await, |crd| check(crd.is_some()))
    }

    async fn kubevirt(&self) -> Vec<Check> {
        let api: Api<KubeVirt> = Api::all(self.client.clone());
        let kubevirts = match api.list(&ListParams::default()).await {
            Ok(list) => list.items,
            Err(kube::Error::Api(status)) if status.code == 404 => Vec::new(),
            Err(error) => return vec![Check::unknown("KubeVirt", &root_cause(&error))],
        };
        let check = results::kubevirt(&kubevirts, self.pre);
        if kubevirts.is_empty() {
            return vec![check];
        }
        let nodes: Api<Node> = Api::all(self.client.clone());
        let nodes = nodes.list(&ListParams::default()).await;
        vec![check, found("Nodes", nodes, |nodes| results::nodes(&nodes.items, kubevirts.first()))]
    }
}
