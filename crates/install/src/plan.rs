//! The plan: the writes that turn what was observed into the desired state, in order, and the waits between them.
//!
//! Each lane of `order` has its own plan, and each wave of a lane is one step. A step contains no objects that are
//! up to date, so the plan of a complete installation has no writes. Orphans are deleted last, when no other object
//! needs them. The plan of the lane `Certificates` is in `desired_certificates`.
//!
//! `drift` compares one object, `orphans` finds the objects to delete, and the executor of the crate `runtime` sends
//! the writes. `report` reports the result to the user.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use serde_json::{Value, json};
use vitivirt_api::{Body, Failure, ObjectKey, Operation, Plan, Step, Target, Wait, Write, reason};

use crate::{
    api_readiness::{accepts_instancetypes, api_is_ready, blocking_webhooks},
    crd_checks::{is_crd_written, refused_upgrade, without_status},
    desired::{Desired, UpToDate},
    drift::{Drift, drift},
    eligibility::is_eligible,
    finalizer::ensure_finalizer,
    installation::Installation,
    kind::Kind,
    live::{LiveObject, delete},
    managed_metadata::ManagedMetadata,
    names::{VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER, annotation, label},
    object::InstallationObject,
    observed::Observed,
    order::{INSTANCETYPES, Lane, LaneProblem, MONITORING, Stage, WaitFor, Wave, is_newer, waves},
    orphans::{orphaned_objects, recorded_namespaces},
    placement::default_placement_remedy,
    pods::Problems,
    rbac::previous::keep_rules,
    record::{ContentRecord, Recorded},
    repairs::is_delayed,
    rollout::canary::{self, RolloutNodes},
    storage,
    strategy::{dump, job},
    superseded::announcement,
    trust::{StoredTrust, TRUSTING_KINDS, expect_live_trust, keep_live_trust},
    wait,
    webhooks::{self, BLOCKING_PREFIX},
};

/// The step whose failure is reported without affecting the installation, see `report`.
pub(crate) const OPTIONAL_STEP: &str = "orphans and namespace label";

/// Added to the reason why the first updated pod of a DaemonSet fails.
const ROLLOUT_STOPPED: &str = "the rollout stops here and all other nodes keep their pods; it continues when the pod is \
 ready; to undo it, revert the KubeVirt resource or the operator to the previous version";

/// Compares the observed state with the desired state of one lane. A pure function. The plan of a resource that cannot
/// be installed is empty, and its report names the reason.
pub fn plan(observed: &Observed, desired: &Desired, lane: Lane) -> Result<Plan, Failure> {
    let mut plan = Plan::default();
    if !is_eligible(observed) {
        return Ok(plan);
    }
    if let Some(announcement) = announcement(observed) {
        // The change of the status enqueues all lanes.
        plan.steps.extend((lane == Lane::Components).then_some(announcement));
        return Ok(plan);
    }
    // If nothing is created for the resource, there is nothing to clean up, so it gets no finalizer.
    let creates = desired.installation().is_some() || matches!(desired, Desired::StrategyPending { .. });
    if lane == Lane::Components && (creates || observed.objects.contain_installation()) {
        plan.steps.extend(ensure_finalizer(&observed.kubevirt));
    }
    match desired {
        Desired::Installation { installation, up_to_date }
        | Desired::Refused { running: installation, up_to_date, .. } => {
            let trust = Arc::new(StoredTrust::new(observed));
            let is_refused = matches!(desired, Desired::Refused { .. });
            let planner = Planner::new(observed, installation, &trust, up_to_date, is_refused);
            match lane {
                Lane::Components => planner.components(&mut plan)?,
                Lane::Monitoring => plan.steps.extend(planner.monitoring()?),
                Lane::Instancetypes => planner.instancetypes(&mut plan)?,
                // Their plan is in `desired_certificates`.
                Lane::Certificates => {}
            }
        }
        // A removal needs no strategy.
        Desired::StrategyPending { .. } if observed.kubevirt.metadata.deletion_timestamp.is_some() => {}
        Desired::StrategyPending { config, running } => {
            let trust = Arc::new(StoredTrust::new(observed));
            let planner = running
                .as_ref()
                .map(|(installation, up_to_date)| Planner::new(observed, installation, &trust, up_to_date, true));
            // Nothing is created for a resource without the finalizer.
            let planner = planner.filter(|_| plan.steps.is_empty());
            match (lane, &planner) {
                (Lane::Components, planner) => {
                    plan.steps.extend(dump::steps(observed, config)?);
                    if let Some(planner) = planner {
                        plan.steps.extend(planner.repairs()?);
                    }
                }
                (Lane::Monitoring, Some(planner)) => plan.steps.extend(planner.monitoring()?),
                (Lane::Instancetypes, Some(planner)) => planner.instancetypes(&mut plan)?,
                _ => {}
            }
        }
        Desired::Invalid(_) | Desired::Nothing => {}
    }
    Ok(plan)
}

/// The instancetypes and preferences that differ, whether the API server accepts them now or not.
pub(crate) fn differing_instancetypes(observed: &Observed, desired: &Desired) -> Result<Option<Step>, Failure> {
    let Desired::Installation { installation, up_to_date } = desired else { return Ok(None) };
    let trust = Arc::new(StoredTrust::new(observed));
    Planner::new(observed, installation, &trust, up_to_date, false).only_wave(&INSTANCETYPES)
}

/// A webhook checks every object of this step. The first object of all is written alone: as long as the API server still has
/// the blocking webhook or cannot reach virt-api, it rejects one write instead of a dozen.
fn canary_write(step: &mut Step) -> Option<Step> {
    (step.writes.len() > 1).then(|| Step::new(step.name).write(step.writes.remove(0)))
}

struct Planner<'a> {
    observed: &'a Observed,
    installation: &'a Arc<Installation>,
    trust: &'a Arc<StoredTrust>,
    up_to_date: &'a UpToDate,
    /// The resource asks for another release. Its install strategy is not an orphan.
    is_refused: bool,
    /// A pod of another version runs.
    has_other_pods: bool,
}

/// The change that one object needs.
enum ObjectChange {
    None,
    Write(Write),
    /// The object is being deleted. A later reconcile creates it again.
    AwaitDeletion(Target),
    /// The object is deleted now. A later reconcile creates it again.
    Recreate(Write),
    /// The object is created when the certificates that it needs are stored.
    AwaitCertificates,
    /// Another client deletes the object again and again.
    Delayed(Target),
}

impl<'a> Planner<'a> {
    fn new(
        observed: &'a Observed,
        installation: &'a Arc<Installation>,
        trust: &'a Arc<StoredTrust>,
        up_to_date: &'a UpToDate,
        is_refused: bool,
    ) -> Self {
        let has_other_pods = observed.pods.has_other_version(&installation.config.kube_virt_version);
        Self { observed, installation, trust, up_to_date, is_refused, has_other_pods }
    }

    /// The writes that repair a complete installation while another release is prepared. They do not depend on that
    /// release or on each other, and nothing waits for them.
    fn repairs(&self) -> Result<Vec<Step>, Failure> {
        let mut written = Vec::new();
        let version = &self.installation.config.kube_virt_version;
        let steps = waves(version, version).iter().map(|wave| self.wave(wave, &mut written));
        let steps: Vec<Step> = steps.collect::<Result<_, _>>()?;
        let steps = steps.into_iter().filter(|step| !step.writes.is_empty());
        Ok(steps.map(|step| Step { wait: None, ..step }.independent(true)).collect())
    }

    fn components(&self, plan: &mut Plan) -> Result<(), Failure> {
        if let Some(refusal) = refused_upgrade(self.observed, &self.installation.config.kube_virt_version) {
            plan.steps.push(Step::new("stored versions").wait(refusal));
            return Ok(());
        }
        let storage = storage::steps(self.observed);
        if !storage.is_empty() {
            plan.steps.extend(storage);
            return Ok(());
        }
        let blocking = self.install_blocking_webhook()?;
        // New CRDs must not be served without it, and nothing is created for a resource without the finalizer.
        let is_blocked_first = blocking.is_some() || !plan.steps.is_empty();
        plan.steps.extend(blocking);
        let mut written = Vec::new();
        for wave in waves(&self.installation.config.kube_virt_version, self.previous_version()) {
            let step = self.wave(wave, &mut written)?;
            let independent = step.independent && !is_blocked_first;
            plan.steps.push(step.independent(independent));
        }
        plan.steps.extend(self.remove_blocking_webhook());
        plan.steps.extend(self.await_lanes()?);
        // Nothing depends on these, so they come last.
        let optional: Vec<Write> = self.delete_orphans().into_iter().chain(self.label_namespace()).collect();
        plan.steps.extend((!optional.is_empty()).then(|| Step { writes: optional, ..Step::new(OPTIONAL_STEP) }));
        Ok(())
    }

    /// The version that was complete last. Empty at the first installation.
    fn installed_version(&self) -> &str {
        let status = self.observed.kubevirt.status.as_ref();
        status.map(|status| status.observed_kube_virt_version.as_str()).unwrap_or_default()
    }

    /// The version that the components change from: the one that was complete last. If an unfinished upgrade or downgrade
    /// is undone, it is the version of the workloads that are not written back yet.
    fn previous_version(&self) -> &str {
        let (installed, target) = (self.installed_version(), &self.installation.config.kube_virt_version);
        if installed != target {
            return installed;
        }
        let workloads = self.installation.objects.iter().filter(|object| is_workload(object.kind));
        let live = workloads.filter_map(|object| self.observed.objects.get(object.kind, &object.key));
        let versions = live.map(|live| live.annotation(annotation::VERSION));
        let others = versions.filter(|version| !version.is_empty() && version != target);
        others.reduce(|newest, other| if is_newer(other, newest) { other } else { newest }).unwrap_or(installed)
    }

    fn changes_version(&self) -> bool {
        let installed = self.installed_version();
        !installed.is_empty() && installed != self.installation.config.kube_virt_version
    }

    /// Whether pods of another version may still run. An upgrade that was taken back leaves such pods too.
    fn has_previous_pods(&self) -> bool {
        if !self.changes_version() {
            return self.has_other_pods;
        }
        let target = &self.installation.config.kube_virt_version;
        let mut workloads = self.installation.objects.iter().filter(|object| is_workload(object.kind));
        workloads.any(|object| {
            let live = self.observed.objects.get(object.kind, &object.key);
            let is_replaced = live.is_some_and(|live| {
                let rollout = live.rollout.unwrap_or_default();
                live.annotation(annotation::VERSION) == target
                    && self.observed.pods.incomplete_rollout(object.kind, object.key.name(), rollout).is_none()
            });
            !is_replaced
        })
    }

    fn instancetypes(&self, plan: &mut Plan) -> Result<(), Failure> {
        if !accepts_instancetypes(self.observed, self.installation) {
            return Ok(());
        }
        if let Some(mut step) = self.only_wave(&INSTANCETYPES)? {
            let kinds = [Kind::Instancetype, Kind::Preference];
            if kinds.iter().all(|kind| self.observed.objects.of_kind(*kind).next().is_none()) {
                plan.steps.extend(canary_write(&mut step));
            }
            plan.steps.push(step);
        }
        Ok(())
    }

    /// The step of a lane with one wave, or `None` if all of its objects are up to date.
    fn only_wave(&self, wave: &Wave) -> Result<Option<Step>, Failure> {
        let step = self.wave(wave, &mut Vec::new())?;
        Ok((!step.writes.is_empty() || step.wait.is_some()).then_some(step))
    }

    /// `orphans` finds objects in other namespaces by the namespaces that the status records. An edit may replace the
    /// resource at any time, so this lane writes into a namespace only after the lane `Components` has recorded it.
    fn monitoring(&self) -> Result<Option<Step>, Failure> {
        let Some(mut step) = self.only_wave(&MONITORING)? else { return Ok(None) };
        let recorded = recorded_namespaces(&self.observed.kubevirt);
        let own = self.installation.config.namespace.as_str();
        step.writes.retain(|write| {
            let namespace = write.target().key.namespace();
            namespace.is_none_or(|namespace| namespace == own || recorded.contains(namespace))
        });
        Ok((!step.writes.is_empty() || step.wait.is_some()).then_some(step))
    }

    /// The phase `Deployed` means that the objects of the other lanes exist too. A lane with a problem reports it, and is
    /// not waited for.
    fn await_lanes(&self) -> Result<Option<Step>, Failure> {
        for (lane, wave) in [(Lane::Monitoring, MONITORING), (Lane::Instancetypes, INSTANCETYPES)] {
            let problem = self.observed.lane_problems.get(&lane);
            if matches!(problem, Some(LaneProblem::Lasting(_))) || self.only_wave(&wave)?.is_none() {
                continue;
            }
            let (reason, message) = match problem {
                Some(LaneProblem::Starting(cause)) => (wait::UNREACHABLE, cause.clone()),
                _ => (wait::LANE, format!("the objects of {lane} are being written")),
            };
            return Ok(Some(Step::new("lanes").wait(Wait { reason, message, requeue_after: None })));
        }
        Ok(None)
    }

    /// `written` lists the objects that this plan writes, in this wave and before.
    fn wave(&self, wave: &Wave, written: &mut Vec<(Kind, ObjectKey)>) -> Result<Step, Failure> {
        let mut step = Step::new(wave_name(wave)).independent(wave.independent);
        let mut deleted = None;
        let mut uncertified = false;
        let mut delayed = None;
        let objects = self.installation.objects.iter().enumerate();
        for (index, object) in objects.filter(|(_, object)| wave.stages.contains(&object.stage)) {
            match self.change(index, object)? {
                ObjectChange::None => {}
                ObjectChange::Write(write) => {
                    written.push((object.kind, object.key.clone()));
                    step.writes.push(write);
                }
                ObjectChange::AwaitDeletion(target) => deleted = Some(target),
                ObjectChange::AwaitCertificates => uncertified = true,
                ObjectChange::Delayed(target) => delayed = Some(target),
                ObjectChange::Recreate(write) => {
                    deleted = Some(write.target().clone());
                    step.writes.push(write);
                }
            }
        }
        step.wait = match (deleted, delayed) {
            (None, Some(target)) => {
                let message =
                    format!("another client deletes {target} each time; the operator creates it once a minute");
                Some(Wait { reason: wait::DELETION, message, requeue_after: None })
            }
            (Some(target), _) => {
                let message = format!("{target} is being deleted; the operator creates it again when it is gone");
                Some(Wait { reason: wait::DELETION, message, requeue_after: None })
            }
            (None, None) if uncertified => {
                let message = "the certificates of the components are being issued".to_owned();
                Some(Wait { reason: wait::CERTIFICATES, message, requeue_after: None })
            }
            (None, None) => self.await_rollout(wave, written),
        };
        Ok(step)
    }

    fn change(&self, index: usize, object: &InstallationObject) -> Result<ObjectChange, Failure> {
        if object.uses_generate_name() {
            return Ok(self.strategy_config_map(index));
        }
        let target = object.target();
        if is_delayed(self.observed, object)? {
            let exists = self.observed.objects.get(object.kind, &object.key).is_some();
            return Ok(if exists { ObjectChange::None } else { ObjectChange::Delayed(target) });
        }
        let Some(live) = self.observed.objects.get(object.kind, &object.key) else {
            if self.awaits_certificates(object) {
                return Ok(ObjectChange::AwaitCertificates);
            }
            return Ok(ObjectChange::Write(self.create(index, object)?));
        };
        if live.deleting {
            return Ok(ObjectChange::AwaitDeletion(target));
        }
        let key = (object.kind, object.key.clone());
        let is_known = self.up_to_date.get(&key).is_some_and(|matching| matching.digest == live.digest);
        let is_role = matches!(object.kind, Kind::Role | Kind::ClusterRole);
        // What these must contain depends on how far a rollout is.
        let is_final = match object.kind {
            Kind::DaemonSet => false,
            Kind::Role | Kind::ClusterRole => !self.changes_version() && !self.has_other_pods,
            Kind::CustomResourceDefinition => self.new_status(object).is_empty() || self.has_previous_pods(),
            _ => true,
        };
        if is_known && is_final {
            return Ok(ObjectChange::None);
        }
        if object.kind == Kind::CustomResourceDefinition {
            return self.crd(index, object, live);
        }
        let recorded = self.observed.recorded_generation(object.kind, &object.key);
        let recorded = recorded.and_then(|recorded| ContentRecord::parse(&recorded.hash));
        let mut recorded = ContentRecord::new(object, live)?.map_or(Recorded::Never, |record| record.compare(recorded));
        let mut body = object.body(&**self.trust)?.into_json();
        if TRUSTING_KINDS.contains(&object.kind)
            && let Some(fields) = live.fields()?
        {
            keep_live_trust(object.kind, &mut body, &fields.content);
        }
        if is_role
            && self.has_previous_pods()
            && let Some(fields) = live.fields()?
        {
            keep_rules(object.kind, &mut body, &fields.content);
        }
        if object.kind == Kind::DaemonSet {
            let is_template_live = is_known || recorded == Recorded::Same;
            let limit = canary::limit(self.observed, object.key.name(), live, is_template_live);
            let is_limit_live = limit.as_ref().is_none_or(|limit| limit.is_live);
            if is_known && is_limit_live {
                return Ok(ObjectChange::None);
            }
            if let Some(limit) = &limit {
                canary::set_limit(&mut body, limit);
            }
            if is_template_live && !is_limit_live {
                recorded = Recorded::Never;
            }
        }
        Ok(match drift(object.kind, &body, live, recorded)? {
            Drift::None => ObjectChange::None,
            Drift::Patch(mut operations) => {
                // The lane `Certificates` may have renewed the bundle after this object was observed.
                operations.splice(0..0, expect_live_trust(object.kind, live, &self.observed.operator_namespace)?);
                ObjectChange::Write(Write::Patch { target, uid: live.uid.clone(), operations })
            }
            Drift::Recreate => ObjectChange::Recreate(delete(object.kind, &object.key, live)),
        })
    }

    /// Without a CA bundle the API server cannot call a webhook, and a pod that starts without its certificate waits for
    /// the kubelet to mount it, which takes more than a minute.
    fn awaits_certificates(&self, object: &InstallationObject) -> bool {
        if TRUSTING_KINDS.contains(&object.kind) {
            return self.trust.is_missing();
        }
        let mut secrets = self.installation.objects.iter().filter(|object| object.kind == Kind::Secret);
        is_workload(object.kind) && secrets.any(|secret| self.observed.objects.get(Kind::Secret, &secret.key).is_none())
    }

    fn create(&self, index: usize, object: &InstallationObject) -> Result<Write, Failure> {
        let target = object.target();
        if !object.is_large() {
            return Ok(Write::Create { target, body: object.body(&**self.trust)? });
        }
        Ok(self.create_lazy(index, target))
    }

    /// A large body is built when it is sent.
    fn create_lazy(&self, index: usize, target: Target) -> Write {
        let (installation, trust) = (Arc::clone(self.installation), Arc::clone(self.trust));
        Write::lazy(target.clone(), "create", move || {
            let body = match installation.objects.get(index) {
                Some(object) => object.body(&*trust)?,
                None => Body::from(Value::Null),
            };
            Ok(Write::Create { target: target.clone(), body })
        })
    }

    /// The cache holds only the metadata of a CRD. Its content is what the operator wrote as long as its generation is
    /// the one that the status recorded then. After that the CRD is written again, which is a no-op if nothing differs.
    /// Upstream virt-operator records generations without digests: its CRDs are those of the version that they name.
    fn crd(&self, index: usize, object: &InstallationObject, live: &LiveObject) -> Result<ObjectChange, Failure> {
        let new_status = self.new_status(object).to_vec();
        if new_status.is_empty() && !is_crd_written(self.observed, object, live)? {
            return Ok(ObjectChange::None);
        }
        let withheld = if self.has_previous_pods() { new_status } else { Vec::new() };
        let (installation, trust) = (Arc::clone(self.installation), Arc::clone(self.trust));
        let (target, live) = (object.target(), live.clone());
        Ok(ObjectChange::Write(Write::lazy(target.clone(), "patch", move || {
            let Some(object) = installation.objects.get(index) else {
                let message = format!("{target} is not in its installation");
                return Err(Failure::bug(reason::BAD_REQUEST, message));
            };
            let mut body = object.body(&*trust)?.into_json();
            without_status(&mut body, &withheld);
            let mut operations = match drift(object.kind, &body, &live, Recorded::Never)? {
                Drift::Patch(operations) => operations,
                Drift::None | Drift::Recreate => Vec::new(),
            };
            let spec = body.get_mut("spec").map(Value::take).unwrap_or_default();
            operations.push(Operation::set("/spec", spec));
            Ok(Write::Patch { target: target.clone(), uid: live.uid.clone(), operations })
        })))
    }

    /// The versions of a CRD that get the status subresource.
    fn new_status(&self, object: &InstallationObject) -> &[String] {
        self.observed.crd_checks.get(&object.key).map(|check| check.new_status.as_slice()).unwrap_or_default()
    }

    /// The ConfigMap with the install strategy. That of an earlier deployment is an orphan.
    fn strategy_config_map(&self, index: usize) -> ObjectChange {
        let config = &self.installation.config;
        if self.observed.objects.strategy(&config.id).is_some() {
            return ObjectChange::None;
        }
        // Another client may have removed the label or the annotation by which the operator finds it.
        if let Some(live) = self.observed.objects.get(Kind::ConfigMap, &config.strategy_key()) {
            let target = Target::new(Kind::ConfigMap.resource(), config.strategy_key());
            return if live.deleting {
                ObjectChange::AwaitDeletion(target)
            } else {
                // Its name and its content follow from the same configuration, so the new ConfigMap is equal.
                ObjectChange::Recreate(delete(Kind::ConfigMap, &config.strategy_key(), live))
            };
        }
        let target = Target::new(Kind::ConfigMap.resource(), config.strategy_key());
        ObjectChange::Write(self.create_lazy(index, target))
    }

    /// Rejects objects of new CRDs until virt-api, which validates them, is ready.
    fn install_blocking_webhook(&self) -> Result<Option<Step>, Failure> {
        let crds = self.installation.objects.iter().filter(|object| object.stage == Stage::Crds);
        let new = crds.filter(|object| self.observed.objects.get(object.kind, &object.key).is_none());
        let new: Vec<(&str, &str)> = new.filter_map(|object| object.key.name().split_once('.')).collect();
        let blocked = blocking_webhooks(self.observed).next().is_some();
        if new.is_empty() || blocked || api_is_ready(self.observed, self.installation) {
            return Ok(None);
        }
        let new: Vec<(&str, &str)> = new.into_iter().map(|(plural, group)| (group, plural)).collect();
        let config = &self.installation.config;
        let mut object = Body::from_object(&webhooks::blocking_webhook(&config.namespace, &new))?.into_json();
        ManagedMetadata::new(&self.observed.kubevirt, config).add_to_object(&mut object);
        let key = ObjectKey::cluster(&format!("{BLOCKING_PREFIX}-{}", config.short_id()));
        let target = Target::new(Kind::ValidatingWebhookConfiguration.resource(), key);
        Ok(Some(Step::new("install blocking webhook").write(Write::Create { target, body: object.into() })))
    }

    fn remove_blocking_webhook(&self) -> Option<Step> {
        if !api_is_ready(self.observed, self.installation) {
            return None;
        }
        let mut step = Step::new("remove blocking webhook").independent(true);
        step.writes.extend(
            blocking_webhooks(self.observed).map(|(key, live)| delete(Kind::ValidatingWebhookConfiguration, key, live)),
        );
        (!step.writes.is_empty()).then_some(step)
    }

    /// The only write to an object that the operator does not manage.
    fn label_namespace(&self) -> Option<Write> {
        let live = self.observed.namespace.as_ref().filter(|live| !live.deleting)?;
        let (key, value) = label::OF_NAMESPACE;
        if live.labels.get(key).is_some_and(|have| have == value) {
            return None;
        }
        let operation = if live.labels.is_empty() {
            Operation::set("/metadata/labels", json!({ key: value }))
        } else {
            Operation::set(format!("/metadata/labels/{}", Operation::escape(key)), json!(value))
        };
        let target = Target::of_kind::<Namespace>(ObjectKey::cluster(&self.installation.config.namespace));
        Some(Write::Patch { target, uid: live.uid.clone(), operations: vec![operation] })
    }

    fn await_rollout(&self, wave: &Wave, written: &[(Kind, ObjectKey)]) -> Option<Wait> {
        let is_awaited = |object: &&InstallationObject| {
            is_workload(object.kind)
                && match wave.wait_for {
                    WaitFor::Written => false,
                    WaitFor::ApiRolledOver => object.key.name() == VIRT_API,
                    WaitFor::ControllerRolledOver => object.key.name() == VIRT_CONTROLLER,
                    WaitFor::HandlerRolledOver => object.key.name() == VIRT_HANDLER,
                    WaitFor::EverythingRolledOver => true,
                }
        };
        let mut is_stopped = false;
        let mut missing: Vec<(&str, Problems)> = self
            .installation
            .objects
            .iter()
            .filter(is_awaited)
            .filter_map(|object| {
                let live = self.observed.objects.get(object.kind, &object.key);
                let rollout = live.and_then(|live| live.rollout).unwrap_or_default();
                let is_written = written.iter().any(|(kind, key)| (*kind, key) == (object.kind, &object.key));
                let name = object.key.name();
                if is_written || live.is_none() {
                    return Some((name, Problems::of_start("its pods are starting")));
                }
                let Observed { pods, now, .. } = self.observed;
                let mut problems = pods.incomplete_rollout(object.kind, name, rollout)?;
                if object.kind == Kind::DaemonSet
                    && problems.certain
                    && RolloutNodes::observe(pods, name, rollout, *now).is_some_and(RolloutNodes::is_stopped)
                {
                    is_stopped = true;
                    problems.sentences.push(ROLLOUT_STOPPED.to_owned());
                }
                Some((name, problems))
            })
            .collect();
        // What only starts explains nothing if something else fails, and it changes while the failure does not.
        let failing = missing.iter().any(|(_, problems)| problems.certain);
        missing.retain(|(_, problems)| problems.certain == failing);
        let mut text: Vec<String> =
            missing.iter().map(|(name, problems)| format!("{name}: {}", problems.text())).collect();
        // virt-handler runs on every node.
        let infrastructure = missing.iter().filter(|(name, _)| *name != VIRT_HANDLER);
        let mut placements =
            infrastructure.filter_map(|(_, problems)| default_placement_remedy(&self.observed.kubevirt.spec, problems));
        text.extend(placements.next());
        let reason = match (is_stopped, failing) {
            (true, _) => wait::FAILING_CANARY,
            (false, true) => wait::FAILING_PODS,
            (false, false) => wait::ROLLOUT,
        };
        (!text.is_empty()).then(|| Wait { reason, message: text.join("; "), requeue_after: None })
    }

    /// Only with complete caches: otherwise an object that another replica has just created for a newer resource could
    /// be taken for an orphan. A CRD that still has objects is kept, together with them.
    fn delete_orphans(&self) -> Vec<Write> {
        if self.is_refused || !self.observed.caches_complete || self.observed.unchecked_orphans.is_some() {
            return Vec::new();
        }
        // A Job of another strategy may never end, for example because its image does not exist.
        let current = job::key(&self.installation.config);
        let jobs = dump::strategy_jobs(self.observed, |key, live| live.job_result.is_some() || *key != current);
        let unused = orphaned_objects(self.observed, self.installation).into_iter().filter(|(kind, key, _)| {
            *kind != Kind::CustomResourceDefinition || !self.observed.crds_with_objects.contains(*key)
        });
        jobs.into_iter().chain(unused.map(|(kind, key, live)| delete(kind, key, live))).collect()
    }
}

fn is_workload(kind: Kind) -> bool {
    matches!(kind, Kind::Deployment | Kind::DaemonSet)
}

/// The name of a step, after the main stage of its wave.
fn wave_name(wave: &Wave) -> &'static str {
    match wave.stages {
        [Stage::Bindings, ..] => "bindings",
        [Stage::Webhooks, ..] => "webhooks",
        [Stage::Api] => "virt-api",
        [Stage::Handler] => "virt-handler",
        [Stage::Api | Stage::Controller | Stage::ExportProxy, ..] => "components",
        [Stage::Monitoring] => "monitoring",
        [Stage::Instancetypes] => "instancetypes",
        _ => "foundation",
    }
}

/// Whether a live object is the object of the installation whose name it has. The executor calls it when the name of a
/// new object is in use.
pub fn owns(target: &Target, live: &Value) -> bool {
    let Some(kind) = Kind::from_name(&target.resource.kind) else { return false };
    let metadata = live.get("metadata").cloned().unwrap_or_default();
    serde_json::from_value(metadata).is_ok_and(|metadata| LiveObject::from_metadata(&metadata).is_recognized(kind))
}
