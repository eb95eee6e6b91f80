//! From a question to a decision. The rules are in `vitivirt_install::validation`; here is only what it takes to ask them.

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
    live::{Cluster, Judgement},
    review::{Decision, Request},
    serving,
};

/// For everything that is asked of the API server; it waits ten seconds for us.
const PATIENCE: Duration = Duration::from_secs(6);

const INVALID: u16 = 422;
const FORBIDDEN: u16 = 403;
const BAD: u16 = 400;
const UNAVAILABLE: u16 = 503;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    Create,
    Update,
    Delete,
}

impl Check {
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/kubevirt-validate-create" => Some(Self::Create),
            "/kubevirt-validate-update" => Some(Self::Update),
            "/kubevirt-validate-delete" => Some(Self::Delete),
            _ => None,
        }
    }

    fn operation(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }

    /// Whether this is what is asked here, or a sentence about what is.
    pub(super) fn suits(self, request: &Request) -> Result<(), String> {
        let (group, resource) = (request.resource.group.as_str(), request.resource.resource.as_str());
        if (group, resource) != (GROUP, PLURAL) {
            return Err(format!("only {PLURAL}.{GROUP} are checked here, and this is {resource}.{group}"));
        }
        match (self.operation(), request.operation.as_str()) {
            (own, asked) if own == asked => Ok(()),
            (own, asked) => Err(format!("operation {own} is checked here, and this is {asked}")),
        }
    }
}

pub(super) async fn admit(cluster: &Cluster, check: Check, request: Request) -> Decision {
    let asked = async {
        match check {
            Check::Create => create(cluster, request).await,
            Check::Update => update(cluster, request).await,
            Check::Delete => delete(cluster, request).await,
        }
    };
    let late = |_| unavailable("the API server did not answer this operator in time");
    timeout(PATIENCE, asked).await.unwrap_or_else(late)
}

async fn create(cluster: &Cluster, request: Request) -> Decision {
    let new = match read("object", request.object) {
        Ok(new) => new,
        Err(decision) => return decision,
    };
    let existing = match cluster.kubevirts(None).await {
        Ok(existing) => existing,
        Err(error) => return unavailable(&format!("whether there is a KubeVirt already cannot be told: {error}")),
    };
    let existing: Vec<ObjectKey> = existing.iter().map(|kubevirt| ObjectKey::of(&kubevirt.metadata)).collect();
    let code = if existing.is_empty() { INVALID } else { FORBIDDEN };
    decide(cluster, &request.namespace, code, validate_create(&new, &existing)).await
}

async fn update(cluster: &Cluster, request: Request) -> Decision {
    let (old, new) = match (read("oldObject", request.old_object), read("object", request.object)) {
        (Ok(old), Ok(new)) => (old, new),
        (_, Err(decision)) => return decision,
        // What is there already cannot be read. Whoever repairs it must be let through, and is: it is judged as new.
        (Err(_), Ok(new)) => (KubeVirt::default(), new),
    };
    let mut verdict = validate_update(&old, &new);
    let (before, after) = (&old.spec.configuration.tls_configuration, &new.spec.configuration.tls_configuration);
    if before != after && verdict.refusals.is_empty() {
        verdict.warnings.extend(after.as_ref().map(serving::shortcomings).unwrap_or_default());
    }
    decide(cluster, &request.namespace, INVALID, verdict).await
}

/// Has the API server judge what only it can. Where it cannot, that is no reason to refuse: should it matter, the
/// components themselves will be refused, and the resource says so in a condition.
async fn decide(cluster: &Cluster, namespace: &str, code: u16, verdict: ValidationResult) -> Decision {
    let ValidationResult { mut refusals, mut warnings, dry_runs } = verdict;
    for dry_run in &dry_runs {
        match cluster.judge(namespace, dry_run).await {
            Judgement::Good => {}
            Judgement::Bad(bad) => refusals.extend(bad),
            Judgement::Unknown(why) => warnings.push(why),
        }
    }
    Decision { code, refusals, warnings }
}

async fn delete(cluster: &Cluster, request: Request) -> Decision {
    let doomed = match doomed(cluster, request).await {
        Ok(doomed) => doomed,
        Err(decision) => return decision,
    };
    let Some(guarded) = doomed.iter().find(|kubevirt| validation::is_guarded(kubevirt)) else {
        return Decision::default();
    };
    match cluster.remaining().await {
        Ok(remaining) => {
            let refusals = validation::delete(guarded, &remaining).into_iter().collect();
            Decision { code: FORBIDDEN, refusals, warnings: Vec::new() }
        }
        Err(error) => unavailable(&format!("whether there are workloads cannot be told: {error}")),
    }
}

/// The server says what it is about to delete; where it does not, it is asked.
async fn doomed(cluster: &Cluster, request: Request) -> Result<Vec<KubeVirt>, Decision> {
    if !request.old_object.is_null() {
        return Ok(vec![read("oldObject", request.old_object)?]);
    }
    let found = match request.name.as_str() {
        "" => {
            let namespace = Some(request.namespace.as_str()).filter(|namespace| !namespace.is_empty());
            cluster.kubevirts(namespace).await
        }
        name => {
            let key = ObjectKey::namespaced(&request.namespace, name);
            cluster.kubevirt(&key).await.map(|found| found.into_iter().collect())
        }
    };
    found.map_err(|error| unavailable(&format!("what is to be deleted cannot be read: {error}")))
}

fn read(field: &str, object: Value) -> Result<KubeVirt, Decision> {
    serde_json::from_value(object).map_err(|error| {
        let message = format!("{field} of the request is not a KubeVirt resource that can be read: {error}");
        Decision { code: BAD, refusals: vec![Refusal::new(Cause::Invalid, "", message)], warnings: Vec::new() }
    })
}

fn unavailable(what: &str) -> Decision {
    let refusal = Refusal::new(Cause::Invalid, "", format!("{what}; nothing was changed, try again"));
    Decision { code: UNAVAILABLE, refusals: vec![refusal], warnings: Vec::new() }
}
