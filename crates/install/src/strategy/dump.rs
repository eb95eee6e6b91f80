//! How the install strategy of another release gets into the cluster: a Job runs the operator of that release once, with
//! the few permissions that this needs. The ServiceAccount and the roles of the Job have its name. When the strategy is
//! installed they are orphans, and the operator deletes them like any other orphan.

use std::time::Duration;

use k8s_openapi::api::{
    core::v1::ServiceAccount,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use vitivirt_api::{Body, Failure, ObjectKey, Step, Target, Wait, Write};

use super::job;
use crate::{
    config::DeploymentConfig,
    kind::Kind,
    live::{LiveObject, delete},
    managed_metadata::ManagedMetadata,
    metadata::{cluster_scoped, namespaced},
    names::label,
    observed::Observed,
    placement::default_placement_remedy,
    rbac::{self, APP_LABEL, role_ref, rule, with_names},
    wait,
};

/// How long a finished Job is kept, so that a user can read its log.
const JOB_RETRY: Duration = Duration::from_secs(30);

/// Runs the operator of another release, which dumps its install strategy.
pub(crate) fn steps(observed: &Observed, config: &DeploymentConfig) -> Result<Vec<Step>, Failure> {
    let mut permissions = Step::new("strategy permissions");
    for (kind, key, body) in self::permissions(observed, config)? {
        if observed.objects.get(kind, &key).is_none_or(|live| live.deleting) {
            permissions.writes.push(Write::Create { target: Target::new(kind.resource(), key), body });
        }
    }
    let permissions = (!permissions.writes.is_empty()).then_some(permissions);
    Ok(permissions.into_iter().chain([job_step(observed, config)?]).collect())
}

/// What the operator of a KubeVirt release needs to dump its strategy: it looks for the ServiceAccount of the monitoring
/// stack, and creates a ConfigMap.
fn permissions(observed: &Observed, config: &DeploymentConfig) -> Result<Vec<(Kind, ObjectKey, Body)>, Failure> {
    let (namespace, job) = (config.namespace.as_str(), job::key(config));
    let name = job.name();
    let managed = ManagedMetadata::new(&observed.kubevirt, config);
    let of_namespace = || {
        let mut metadata = namespaced(namespace, name, &APP_LABEL);
        managed.add_to_metadata(&mut metadata);
        metadata
    };
    let of_cluster = || {
        let mut metadata = cluster_scoped(name, &APP_LABEL);
        managed.add_to_metadata(&mut metadata);
        metadata
    };
    let subjects = || Some(vec![rbac::service_account(namespace, name)]);
    let accounts = rule(&[""], &["serviceaccounts"], &["get"]);
    let reads = vec![
        with_names(rule(&[""], &["namespaces"], &["get"]), &config.monitor_namespaces()),
        // Upstream virt-operator also looks for a name that cannot exist.
        match config.monitor_account() {
            Some(account) => with_names(accounts, &[account]),
            None => accounts,
        },
    ];
    let account = ServiceAccount { metadata: of_namespace(), ..ServiceAccount::default() };
    let role = Role { metadata: of_namespace(), rules: Some(vec![rule(&[""], &["configmaps"], &["create"])]) };
    let binding = RoleBinding { metadata: of_namespace(), role_ref: role_ref("Role", name), subjects: subjects() };
    let cluster_role = ClusterRole { metadata: of_cluster(), rules: Some(reads), ..ClusterRole::default() };
    let cluster_binding =
        ClusterRoleBinding { metadata: of_cluster(), role_ref: role_ref("ClusterRole", name), subjects: subjects() };
    let cluster_key = || ObjectKey::cluster(name);
    Ok(vec![
        (Kind::ServiceAccount, job.clone(), Body::from_object(&account)?),
        (Kind::Role, job.clone(), Body::from_object(&role)?),
        (Kind::ClusterRole, cluster_key(), Body::from_object(&cluster_role)?),
        (Kind::RoleBinding, job.clone(), Body::from_object(&binding)?),
        (Kind::ClusterRoleBinding, cluster_key(), Body::from_object(&cluster_binding)?),
    ])
}

/// A Job that ended without a result is deleted after a while and created again. Jobs of other strategies are deleted:
/// they may never end.
fn job_step(observed: &Observed, config: &DeploymentConfig) -> Result<Step, Failure> {
    let key = job::key(config);
    let mut step = Step::new("strategy");
    step.writes.extend(strategy_jobs(observed, |other, _| *other != key));
    let version = &config.kube_virt_version;
    let image = &config.images.virt_operator_image;
    let waiting = |message: String, requeue_after| Wait { reason: wait::STRATEGY, message, requeue_after };
    let (namespace, name) = (key.namespace().unwrap_or_default(), key.name());
    let running = format!(
        "Waiting for Job {key}, which extracts the install strategy of KubeVirt {version} from {image}; if it does not \
         end, the image may not exist: see `kubectl -n {namespace} describe pods -l job-name={name}`, and correct \
         spec.imageTag or spec.imageRegistry"
    );
    let Some(live) = observed.objects.get(Kind::Job, &key) else {
        let target = Target::new(Kind::Job.resource(), key);
        let body = job::job(&observed.kubevirt, config)?;
        return Ok(step.write(Write::Create { target, body }).wait(waiting(running, None)));
    };
    let Some(result) = live.job_result.filter(|_| !live.deleting) else {
        let problems = observed.pods.problems(Kind::Job, key.name());
        let placement = default_placement_remedy(&observed.kubevirt.spec, &problems);
        let text: Vec<String> = [problems.text()].into_iter().chain(placement).collect();
        let message = if problems.is_empty() { running } else { format!("{running}: {}", text.join("; ")) };
        let reason = if problems.certain { wait::FAILING_PODS } else { wait::STRATEGY };
        return Ok(step.wait(Wait { reason, message, requeue_after: None }));
    };
    let how = if result.failed { "failed" } else { "ended without a result" };
    let message = format!(
        "Job {key}, which extracts the install strategy of KubeVirt {version} from {image}, {how}; see its log; the \
         operator retries automatically"
    );
    let since = Duration::from_secs(observed.now.duration_since(result.at).as_secs().try_into().unwrap_or_default());
    if since < JOB_RETRY {
        return Ok(step.wait(waiting(message, Some(JOB_RETRY - since))));
    }
    Ok(step.write(delete(Kind::Job, &key, live)).wait(waiting(message, None)))
}

/// The deletions of the matching Jobs that dump a strategy. Any client can copy labels and annotations to another
/// namespace.
pub(crate) fn strategy_jobs<'a>(
    observed: &'a Observed,
    matches: impl Fn(&ObjectKey, &LiveObject) -> bool + 'a,
) -> impl Iterator<Item = Write> + 'a {
    let jobs = observed.objects.of_kind(Kind::Job).filter(move |(key, live)| {
        let dumps_strategy = key.namespace() == Some(observed.operator_namespace.as_str())
            && live.labels.contains_key(label::INSTALL_STRATEGY);
        dumps_strategy && !live.deleting && matches(key, live)
    });
    jobs.map(|(key, live)| delete(Kind::Job, key, live))
}
