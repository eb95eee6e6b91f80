//! Decides on an admission request. The rules are in `vitivirt_install::validation`; this module reads from the cluster
//! what the rules need.

use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;
use vitivirt_api::{
    ObjectKey,
    kubevirt::{GROUP, KubeVirt, PLURAL},
};
use vitivirt_install::{
    admission::{ValidationResult, validate_create, validate_update},
    validation::{self, Cause, Refusal},
};

use super::{
    client::{AdmissionClient, DryRunResult},
    review::{AdmissionDecision, AdmissionRequest},
    server_tls,
};

/// The limit for all requests to the API server together. The API server waits ten seconds for a decision.
const API_TIMEOUT: Duration = Duration::from_secs(6);

const INVALID: u16 = 422;
const FORBIDDEN: u16 = 403;
const BAD_REQUEST: u16 = 400;
const UNAVAILABLE: u16 = 503;

/// The webhook endpoints, one for each operation on a KubeVirt resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WebhookEndpoint {
    Create,
    Update,
    Delete,
}

impl WebhookEndpoint {
    pub(super) fn from_path(path: &str) -> Option<Self> {
        match path {
            "/kubevirt-validate-create" => Some(Self::Create),
            "/kubevirt-validate-update" => Some(Self::Update),
            "/kubevirt-validate-delete" => Some(Self::Delete),
            _ => None,
        }
    }

    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }

    /// Checks that the request has the resource and the operation of this endpoint. The error is a message for the
    /// client.
    pub(super) fn validate_request(self, request: &AdmissionRequest) -> Result<(), String> {
        let (group, resource) = (request.resource.group.as_str(), request.resource.resource.as_str());
        if (group, resource) != (GROUP, PLURAL) {
            let found = format!("{resource}.{group}");
            return Err(format!("unsupported resource {found:?}; supported values: {PLURAL}.{GROUP}"));
        }
        if request.operation != self.operation() {
            let (operation, expected) = (&request.operation, self.operation());
            return Err(format!("unsupported operation {operation:?}; supported values: {expected}"));
        }
        Ok(())
    }
}

pub(super) async fn admit(
    client: &AdmissionClient,
    endpoint: WebhookEndpoint,
    request: AdmissionRequest,
) -> AdmissionDecision {
    let decision = async {
        match endpoint {
            WebhookEndpoint::Create => admit_create(client, request).await,
            WebhookEndpoint::Update => admit_update(client, request).await,
            WebhookEndpoint::Delete => admit_delete(client, request).await,
        }
    };
    let timed_out = |_| unavailable("API server did not respond to virt-operator in time");
    timeout(API_TIMEOUT, decision).await.unwrap_or_else(timed_out)
}

async fn admit_create(client: &AdmissionClient, request: AdmissionRequest) -> AdmissionDecision {
    let new = match parse_kubevirt("object", request.object) {
        Ok(new) => new,
        Err(decision) => return decision,
    };
    let existing = match client.kubevirts(None).await {
        Ok(existing) => existing,
        Err(error) => return unavailable(&format!("existing KubeVirt resources could not be listed: {error}")),
    };
    let existing: Vec<ObjectKey> =
        existing.iter().map(|kubevirt| ObjectKey::from_metadata(&kubevirt.metadata)).collect();
    let code = if existing.is_empty() { INVALID } else { FORBIDDEN };
    let mut result = validate_create(&new, &existing);
    result.warnings.extend(single_replica(client, &new, &result).await);
    decide(client, &request.namespace, code, result).await
}

async fn admit_update(client: &AdmissionClient, request: AdmissionRequest) -> AdmissionDecision {
    let (old, new) = match (parse_kubevirt("oldObject", request.old_object), parse_kubevirt("object", request.object)) {
        (Ok(old), Ok(new)) => (old, new),
        (_, Err(decision)) => return decision,
        // The stored resource cannot be parsed. A user must be able to repair it, so the new one is validated alone.
        (Err(_), Ok(new)) => (KubeVirt::default(), new),
    };
    let mut result = validate_update(&old, &new);
    let (before, after) = (&old.spec.configuration.tls_configuration, &new.spec.configuration.tls_configuration);
    if before != after && result.refusals.is_empty() {
        result.warnings.extend(after.as_ref().map(server_tls::unsupported_tls_settings).unwrap_or_default());
    }
    if old.spec.infra != new.spec.infra {
        result.warnings.extend(single_replica(client, &new, &result).await);
    }
    decide(client, &request.namespace, INVALID, result).await
}

/// The nodes are read only if the resource asks for one replica. A failed request gives no warning.
async fn single_replica(client: &AdmissionClient, new: &KubeVirt, result: &ValidationResult) -> Option<String> {
    let may_be_too_few = vitivirt_install::single_replica(new, usize::MAX).is_some() && result.refusals.is_empty();
    let nodes = if may_be_too_few { client.schedulable_nodes().await } else { 0 };
    vitivirt_install::single_replica(new, nodes)
}

/// Adds the API server's validation of pod settings, through dry runs.
///
/// A dry run that gives no result does not deny the request: if the settings are wrong, the API server rejects the
/// components themselves, and a condition of the KubeVirt resource reports that.
async fn decide(client: &AdmissionClient, namespace: &str, code: u16, result: ValidationResult) -> AdmissionDecision {
    let ValidationResult { mut refusals, mut warnings, dry_runs } = result;
    for dry_run in &dry_runs {
        match client.dry_run(namespace, dry_run).await {
            DryRunResult::Accepted => {}
            DryRunResult::Rejected(rejected) => refusals.extend(rejected),
            DryRunResult::Unknown(warning) => warnings.push(warning),
        }
    }
    AdmissionDecision { code, refusals, warnings }
}

async fn admit_delete(client: &AdmissionClient, request: AdmissionRequest) -> AdmissionDecision {
    let resources_to_delete = match resources_to_delete(client, request).await {
        Ok(resources_to_delete) => resources_to_delete,
        Err(decision) => return decision,
    };
    let Some(guarded) = resources_to_delete.iter().find(|kubevirt| validation::is_guarded(kubevirt)) else {
        return AdmissionDecision::default();
    };
    match client.remaining_workloads().await {
        Ok(remaining) => {
            let refusals = validation::delete(guarded, &remaining).into_iter().collect();
            AdmissionDecision { code: FORBIDDEN, refusals, warnings: Vec::new() }
        }
        Err(error) => unavailable(&format!("remaining workloads could not be listed: {error}")),
    }
}

/// The resources that the request deletes. If the request does not contain them, they are read from the API server.
async fn resources_to_delete(
    client: &AdmissionClient,
    request: AdmissionRequest,
) -> Result<Vec<KubeVirt>, AdmissionDecision> {
    if !request.old_object.is_null() {
        return Ok(vec![parse_kubevirt("oldObject", request.old_object)?]);
    }
    let found = match request.name.as_str() {
        "" => {
            let namespace = Some(request.namespace.as_str()).filter(|namespace| !namespace.is_empty());
            client.kubevirts(namespace).await
        }
        name => {
            let key = ObjectKey::namespaced(&request.namespace, name);
            client.kubevirt(&key).await.map(|found| found.into_iter().collect())
        }
    };
    found.map_err(|error| unavailable(&format!("KubeVirt resource to delete could not be read: {error}")))
}

fn parse_kubevirt(field: &str, object: Value) -> Result<KubeVirt, AdmissionDecision> {
    serde_json::from_value(object).map_err(|error| {
        let message = format!("{field} of the request is not a valid KubeVirt resource: {error}");
        let refusals = vec![Refusal::new(Cause::Invalid, "", message)];
        AdmissionDecision { code: BAD_REQUEST, refusals, warnings: Vec::new() }
    })
}

fn unavailable(problem: &str) -> AdmissionDecision {
    let refusal = Refusal::new(Cause::Invalid, "", format!("{problem}; nothing was changed, try again"));
    AdmissionDecision { code: UNAVAILABLE, refusals: vec![refusal], warnings: Vec::new() }
}
