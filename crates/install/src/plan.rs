//! What is to be written for a KubeVirt resource, in order, and what is waited for.
//!
//! Each turn of `order` is one step. Objects that are as wanted are not in it, so a plan of a settled installation is
//! empty. What is no longer part of the installation goes last, when nothing can need it any more.

use std::{collections::HashSet, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Namespace;
use serde_json::{Value, json};
use vitivirt_api::{Body, Failure, ObjectKey, Operation, Plan, Step, Target, Wait, Write, kubevirt::KubeVirt};

use crate::{
    config::DeploymentConfig,
    drift::{Drift, drift, marks},
    installation::Installation,
    kind::Kind,
    live::{LiveObject, Rollout},
    managed_metadata::ManagedMetadata,
    names::{FINALIZER, VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER, annotation, label},
    object::Object,
    observed::{Desired, Observed},
    order::{self, OBSOLETE, Stage, WaitFor, Wave},
    report::refusal,
    strategy::job,
    webhooks::{self, BLOCKING_PREFIX},
};

pub mod wait {
    pub const ROLLOUT: &str = "WaitingForPods";
    pub const DELETION: &str = "WaitingForDeletion";
    pub const STRATEGY: &str = "WaitingForInstallStrategy";
}

/// How long a Job that failed stays, so that its log can be read.
const TELLING_RETRY: Duration = Duration::from_secs(30);

/// Annotations that tell which versions of the resource were seen; KubeVirt's own components look for them.
const OBSERVED_VERSIONS: [(&str, &str); 2] =
    [("kubevirt.io/latest-observed-api-version", "v1"), ("kubevirt.io/storage-observed-api-version", "v1")];

/// Pure. A resource that cannot be installed has an empty plan; its report says why. A plan that cannot be made, which
/// is a mistake of ours, fails as its first write would.
pub fn plan(observed: &Observed) -> Plan {
    make(observed).unwrap_or_else(|failure| {
        let target = Target::of::<KubeVirt>(ObjectKey::of(&observed.kubevirt.metadata));
        let step = Step::new("plan").write(Write::lazy(target, "patch", move || Err(failure.clone())));
        Plan { steps: vec![step] }
    })
}

fn make(observed: &Observed) -> Result<Plan, Failure> {
    let mut plan = Plan::default();
    if refusal(observed).is_some() {
        return Ok(plan);
    }
    // A resource that was never installed leaves nothing to clean up: it may go as it came.
    if observed.impossible().is_none() || observed.objects.all().next().is_some() {
        plan.steps.extend(adoption(&observed.kubevirt));
    }
    let installation = match &observed.desired {
        Desired::Installation(installation) => installation,
        Desired::StrategyPending(config) => {
            plan.steps.push(telling(observed, config)?);
            return Ok(plan);
        }
        Desired::Invalid(_) => return Ok(plan),
    };
    let planner = Planner { observed, installation };
    plan.steps.extend(planner.blocking()?);
    let status = observed.kubevirt.status.as_ref();
    let installed = status.map(|status| status.observed_kube_virt_version.as_str()).unwrap_or_default();
    let mut written = Vec::new();
    for (index, wave) in order::order(&installation.config.kube_virt_version, installed).iter().enumerate() {
        let mut step = planner.wave(wave, &mut written)?;
        if index == 0 {
            step.writes.extend(planner.namespace());
        }
        if wave.stages.contains(&Stage::Instancetypes) {
            plan.steps.extend(pilot(&mut step));
        }
        plan.steps.push(step);
        if wave.stages.contains(&Stage::Api) {
            plan.steps.extend(planner.unblocking());
        }
    }
    plan.steps.extend(planner.obsolete());
    Ok(plan)
}

/// Of many objects that the same webhook checks, the first goes alone: while the API server does not know yet that nothing
/// is blocked any more, or does not reach virt-api, one is refused instead of a dozen.
fn pilot(step: &mut Step) -> Option<Step> {
    (step.writes.len() > 1).then(|| Step::new(step.name).write(step.writes.remove(0)))
}

/// The finalizer comes before anything that it would have to clean up.
fn adoption(kubevirt: &KubeVirt) -> Option<Step> {
    let metadata = &kubevirt.metadata;
    let mut operations = Vec::new();
    let finalizers = metadata.finalizers.clone().unwrap_or_default();
    let leaving = metadata.deletion_timestamp.is_some();
    if !leaving && !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        operations.push(match finalizers.is_empty() {
            true => Operation::set("/metadata/finalizers", json!([FINALIZER])).expecting(Value::Null),
            false => Operation::set("/metadata/finalizers/-", json!(FINALIZER)),
        });
    }
    let nothing = Default::default();
    let annotations = metadata.annotations.as_ref().unwrap_or(&nothing);
    let missing =
        OBSERVED_VERSIONS.iter().filter(|(key, value)| annotations.get(*key).is_none_or(|have| have != value));
    let missing: Vec<_> = missing.collect();
    if annotations.is_empty() && !missing.is_empty() {
        let all: serde_json::Map<String, Value> =
            missing.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        operations.push(Operation::set("/metadata/annotations", Value::Object(all)).expecting(Value::Null));
    } else {
        let set = |(key, value): &(&str, &str)| {
            Operation::set(format!("/metadata/annotations/{}", Operation::escape(key)), json!(value))
        };
        operations.extend(missing.into_iter().map(set));
    }
    let uid = metadata.uid.clone()?;
    let target = Target::of::<KubeVirt>(ObjectKey::of(metadata));
    (!operations.is_empty()).then(|| Step::new("resource").write(Write::Patch { target, uid, operations }))
}

/// Another release's own operator tells what it consists of. One that has ended without telling is tried again.
fn telling(observed: &Observed, config: &DeploymentConfig) -> Result<Step, Failure> {
    let key = job::key(config);
    let step = Step::new("strategy");
    let version = &config.kube_virt_version;
    let image = &config.images.virt_operator_image;
    let waiting = |message: String, requeue_after| Wait { reason: wait::STRATEGY, message, requeue_after };
    let asked = format!("{image} is asked what KubeVirt {version} consists of (Job {key})");
    let Some(live) = observed.objects.get(Kind::Job, &key) else {
        let target = Target::new(Kind::Job.resource(), key);
        let body = job::job(&observed.kubevirt, config)?.into();
        return Ok(step.write(Write::Create { target, body }).wait(waiting(asked, None)));
    };
    let Some(end) = live.end.filter(|_| !live.deleting) else { return Ok(step.wait(waiting(asked, None))) };
    let how = if end.failed { "failed" } else { "ended without telling" };
    let message = format!("{image} was asked what KubeVirt {version} consists of, and {how}: see the log of Job {key}");
    let since = Duration::from_secs(observed.now.duration_since(end.at).as_secs().try_into().unwrap_or_default());
    if since < TELLING_RETRY {
        return Ok(step.wait(waiting(message, Some(TELLING_RETRY - since))));
    }
    Ok(step.write(delete(Kind::Job, &key, live)).wait(waiting(message, None)))
}

struct Planner<'a> {
    observed: &'a Observed,
    installation: &'a Arc<Installation>,
}

/// What is to be done about one object.
enum Need {
    Nothing,
    Write(Write),
    /// It is on its way out and comes again after that.
    Gone(Target),
    /// It has to go first.
    Replace(Write),
}

impl Planner<'_> {
    /// `written` is what this plan writes, in this turn and before.
    fn wave(&self, wave: &Wave, written: &mut Vec<(Kind, ObjectKey)>) -> Result<Step, Failure> {
        let mut step = Step::new(name(wave));
        let mut leaving = None;
        let objects = self.installation.objects.iter().enumerate();
        for (index, object) in objects.filter(|(_, object)| wave.stages.contains(&object.stage)) {
            match self.need(index, object)? {
                Need::Nothing => {}
                Need::Write(write) => {
                    written.push((object.kind, object.key.clone()));
                    step.writes.push(write);
                }
                Need::Gone(target) => leaving = Some(target),
                Need::Replace(write) => {
                    leaving = Some(write.target().clone());
                    step.writes.push(write);
                }
            }
        }
        step.wait = match leaving {
            Some(target) => {
                let message = format!("{target} is being deleted and is made again after that");
                Some(Wait { reason: wait::DELETION, message, requeue_after: None })
            }
            None => self.rollout(wave, written),
        };
        Ok(step)
    }

    fn need(&self, index: usize, object: &Object) -> Result<Need, Failure> {
        if object.is_named_by_the_server() {
            return Ok(self.strategy(index));
        }
        let target = object.target();
        let Some(live) = self.observed.objects.get(object.kind, &object.key) else {
            return Ok(Need::Write(self.create(index, object)?));
        };
        if live.deleting {
            return Ok(Need::Gone(target));
        }
        let key = (object.kind, object.key.clone());
        if self.observed.up_to_date.get(&key) == Some(&live.digest) {
            return Ok(Need::Nothing);
        }
        if object.kind == Kind::CustomResourceDefinition {
            return Ok(self.crd(index, object, live));
        }
        let body = object.body(&*self.observed.issued)?;
        Ok(match drift(object.kind, body.json(), live)? {
            Drift::None => Need::Nothing,
            Drift::Patch(operations) => Need::Write(Write::Patch { target, uid: live.uid.clone(), operations }),
            Drift::Replace => Need::Replace(delete(object.kind, &object.key, live)),
        })
    }

    fn create(&self, index: usize, object: &Object) -> Result<Write, Failure> {
        let target = object.target();
        if !object.is_big() {
            return Ok(Write::Create { target, body: object.body(&*self.observed.issued)? });
        }
        Ok(self.create_lazy(index, target))
    }

    /// The same for a body that is made when it is sent.
    fn create_lazy(&self, index: usize, target: Target) -> Write {
        let (installation, issued) = (Arc::clone(self.installation), Arc::clone(&self.observed.issued));
        Write::lazy(target.clone(), "create", move || {
            let body = match installation.objects.get(index) {
                Some(object) => object.body(&*issued)?,
                None => Body::from(Value::Null),
            };
            Ok(Write::Create { target: target.clone(), body })
        })
    }

    /// Only metadata is known of a live definition. Its content is what we wrote for as long as its generation is the
    /// one that was noted then; after that it is written again, which changes nothing if nothing differs.
    fn crd(&self, index: usize, object: &Object, live: &LiveObject) -> Need {
        let noted = self.observed.noted_generation(object.kind, &object.key);
        let wanted = Value::from_iter([("metadata", object.marks())]);
        if marks(&wanted, live).is_empty() && noted == Some(live.generation) {
            return Need::Nothing;
        }
        let (installation, issued) = (Arc::clone(self.installation), Arc::clone(&self.observed.issued));
        let (target, live) = (object.target(), live.clone());
        Need::Write(Write::lazy(target.clone(), "patch", move || {
            let Some(object) = installation.objects.get(index) else {
                return Err(Failure::bug(
                    vitivirt_api::reason::BAD_REQUEST,
                    format!("{target} is not in its installation"),
                ));
            };
            let mut body = object.body(&*issued)?.into_json();
            let mut operations = match drift(object.kind, &body, &live)? {
                Drift::Patch(operations) => operations,
                Drift::None | Drift::Replace => Vec::new(),
            };
            let spec = body.get_mut("spec").map(Value::take).unwrap_or_default();
            operations.push(Operation::set("/spec", spec));
            Ok(Write::Patch { target: target.clone(), uid: live.uid.clone(), operations })
        }))
    }

    /// The text of what is installed. Another of an earlier deployment goes with what is obsolete.
    fn strategy(&self, index: usize) -> Need {
        let config = &self.installation.config;
        if self.observed.objects.strategy(&config.id).is_some() {
            return Need::Nothing;
        }
        // It may have lost the marks that it is found by.
        if let Some(live) = self.observed.objects.get(Kind::ConfigMap, &config.strategy_key()) {
            let target = Target::new(Kind::ConfigMap.resource(), config.strategy_key());
            return match live.deleting {
                true => Need::Gone(target),
                // Its text is made from the same as its name, so another one is as good.
                false => Need::Replace(delete(Kind::ConfigMap, &config.strategy_key(), live)),
            };
        }
        let target = Target::new(Kind::ConfigMap.resource(), config.strategy_key());
        Need::Write(self.create_lazy(index, target))
    }

    /// Before resources come into being for which there is nobody yet who checks them.
    fn blocking(&self) -> Result<Option<Step>, Failure> {
        let crds = self.installation.objects.iter().filter(|object| object.stage == Stage::Crds);
        let new = crds.filter(|object| self.observed.objects.get(object.kind, &object.key).is_none());
        let new: Vec<(&str, &str)> = new.filter_map(|object| object.key.name().split_once('.')).collect();
        let blocked = self.blocking_objects().next().is_some();
        if new.is_empty() || blocked || self.api_is_ready() {
            return Ok(None);
        }
        let new: Vec<(&str, &str)> = new.into_iter().map(|(plural, group)| (group, plural)).collect();
        let config = &self.installation.config;
        let mut object = Body::of(&webhooks::blocking(&config.namespace, &new))?.into_json();
        ManagedMetadata::new(&self.observed.kubevirt, config).object(&mut object);
        let key = ObjectKey::cluster(&format!("{BLOCKING_PREFIX}-{}", config.short_id()));
        let target = Target::new(Kind::ValidatingWebhookConfiguration.resource(), key);
        Ok(Some(Step::new("blocking").write(Write::Create { target, body: object.into() })))
    }

    fn unblocking(&self) -> Option<Step> {
        let mut step = Step::new("unblocking");
        step.writes
            .extend(self.blocking_objects().map(|(key, live)| delete(Kind::ValidatingWebhookConfiguration, key, live)));
        (!step.writes.is_empty()).then_some(step)
    }

    fn blocking_objects(&self) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        let all = self.observed.objects.of(Kind::ValidatingWebhookConfiguration);
        all.filter(|(key, live)| key.name().starts_with(BLOCKING_PREFIX) && !live.deleting)
    }

    fn api_is_ready(&self) -> bool {
        let key = ObjectKey::namespaced(&self.installation.config.namespace, VIRT_API);
        let version = &self.installation.config.kube_virt_version;
        let live = self.observed.objects.get(Kind::Deployment, &key);
        let live = live.filter(|live| live.annotation(annotation::VERSION) == version);
        live.and_then(|live| live.rollout).is_some_and(Rollout::is_over)
    }

    /// The one thing that is written to somebody else's object.
    fn namespace(&self) -> Option<Write> {
        let live = self.observed.namespace.as_ref().filter(|live| !live.deleting)?;
        let (key, value) = label::OF_NAMESPACE;
        if live.labels.get(key).is_some_and(|have| have == value) {
            return None;
        }
        let operation = match live.labels.is_empty() {
            true => Operation::set("/metadata/labels", json!({ key: value })),
            false => Operation::set(format!("/metadata/labels/{}", Operation::escape(key)), json!(value)),
        };
        let target = Target::of::<Namespace>(ObjectKey::cluster(&self.installation.config.namespace));
        Some(Write::Patch { target, uid: live.uid.clone(), operations: vec![operation] })
    }

    fn rollout(&self, wave: &Wave, written: &[(Kind, ObjectKey)]) -> Option<Wait> {
        let is_awaited = |object: &&Object| {
            let workload = matches!(object.kind, Kind::Deployment | Kind::DaemonSet);
            workload
                && match wave.wait_for {
                    WaitFor::Written | WaitFor::Served => false,
                    WaitFor::ApiRolledOver => object.key.name() == VIRT_API,
                    WaitFor::ControllerRolledOver => object.key.name() == VIRT_CONTROLLER,
                    WaitFor::HandlerRolledOver => object.key.name() == VIRT_HANDLER,
                    WaitFor::EverythingRolledOver => true,
                }
        };
        let missing: Vec<String> = self
            .installation
            .objects
            .iter()
            .filter(is_awaited)
            .filter_map(|object| {
                let live = self.observed.objects.get(object.kind, &object.key);
                let rollout = live.and_then(|live| live.rollout).unwrap_or_default();
                let is_written = written.iter().any(|(kind, key)| (*kind, key) == (object.kind, &object.key));
                if is_written || live.is_none() {
                    return Some(format!("{}: its pods are being started", object.key.name()));
                }
                (!rollout.is_over()).then(|| format!("{}: {}", object.key.name(), rollout.missing()))
            })
            .collect();
        let message = missing.join("; ");
        (!missing.is_empty()).then_some(Wait { reason: wait::ROLLOUT, message, requeue_after: None })
    }

    /// Only from a complete view: an object that another replica has just made for a newer resource must not look
    /// superfluous. A definition of which there are objects stays, and they with it.
    fn obsolete(&self) -> Option<Step> {
        if !self.observed.complete {
            return None;
        }
        let mut step = Step::new("obsolete");
        let told = self.observed.objects.of(Kind::Job).filter(|(_, live)| live.end.is_some() && !live.deleting);
        step.writes.extend(told.map(|(key, live)| delete(Kind::Job, key, live)));
        let superfluous = superfluous(self.observed, self.installation).into_iter();
        let unused = superfluous
            .filter(|(kind, key, _)| *kind != Kind::CustomResourceDefinition || !self.observed.in_use.contains(*key));
        step.writes.extend(unused.map(|(kind, key, live)| delete(kind, key, live)));
        (!step.writes.is_empty()).then_some(step)
    }
}

/// What carries our marks and is not part of the installation, in the order in which it goes. Marks can be copied:
/// elsewhere than where this installation has objects, or the one before it had, nothing is ours.
fn superfluous<'a>(
    observed: &'a Observed,
    installation: &Installation,
) -> Vec<(Kind, &'a ObjectKey, &'a Arc<LiveObject>)> {
    let config = &installation.config;
    let wanted: HashSet<(Kind, &ObjectKey)> =
        installation.objects.iter().map(|object| (object.kind, &object.key)).collect();
    let current = observed.objects.strategy(&config.id).map(|(key, _)| key);
    let status = observed.kubevirt.status.as_ref();
    let noted = status.map(|status| [&status.observed_deployment_config, &status.target_deployment_config]);
    let before: Vec<DeploymentConfig> =
        noted.into_iter().flatten().filter_map(|text| serde_json::from_str(text).ok()).collect();
    let monitoring = before
        .iter()
        .chain([config])
        .flat_map(|config| config.monitor_namespaces().into_iter().chain(config.service_monitor_namespace()));
    let places: HashSet<&str> = monitoring.chain(["kube-system", config.namespace.as_str()]).collect();
    let is_superfluous = |kind: Kind, key: &ObjectKey, live: &LiveObject| {
        let kept = wanted.contains(&(kind, key))
            || key.name().starts_with(BLOCKING_PREFIX)
            || live.is_strategy && (Some(key) == current || current.is_none());
        !kept && !live.deleting && key.namespace().is_none_or(|namespace| places.contains(namespace))
    };
    let kinds = OBSOLETE.into_iter().chain([Kind::PodDisruptionBudget, Kind::Route]);
    kinds
        .flat_map(|kind| observed.objects.of(kind).map(move |(key, live)| (kind, key, live)))
        .filter(|(kind, key, live)| is_superfluous(*kind, key, live))
        .collect()
}

/// What would be deleted because it is no longer part of the installation. Whoever observes looks at the resource, and
/// at what these define, once more before that.
pub fn obsolete(observed: &Observed) -> Vec<(Kind, ObjectKey)> {
    let Desired::Installation(installation) = &observed.desired else { return Vec::new() };
    superfluous(observed, installation).into_iter().map(|(kind, key, _)| (kind, key.clone())).collect()
}

fn delete(kind: Kind, key: &ObjectKey, live: &LiveObject) -> Write {
    let target = Target::new(kind.resource(), key.clone());
    Write::Delete { target, uid: live.uid.clone() }
}

/// A turn by what it is mostly about.
fn name(wave: &Wave) -> &'static str {
    match wave.stages.first() {
        Some(Stage::CaSecrets) => "authorities and bindings",
        Some(Stage::CaConfigMaps) => "bundles",
        Some(Stage::Webhooks) => "webhooks",
        Some(Stage::Certificates) => "certificates",
        Some(Stage::Api) => "virt-api",
        Some(Stage::Handler) => "virt-handler",
        Some(Stage::Controller | Stage::ExportProxy) => "components",
        Some(Stage::Instancetypes) => "instancetypes",
        _ => "foundation",
    }
}

/// Whether a live object whose name we want is one that an operator of KubeVirt made.
pub fn owns(live: &Value) -> bool {
    let metadata = live.get("metadata").cloned().unwrap_or_default();
    serde_json::from_value(metadata).is_ok_and(|metadata| LiveObject::of_metadata(&metadata).is_ours())
}

impl Observed {
    fn noted_generation(&self, kind: Kind, key: &ObjectKey) -> Option<i64> {
        let resource = kind.resource();
        let status = self.kubevirt.status.as_ref()?;
        let noted = status.generations.iter().find(|noted| {
            noted.resource == resource.plural
                && noted.name == key.name()
                && noted.namespace == key.namespace().unwrap_or_default()
        })?;
        Some(noted.last_generation)
    }
}
