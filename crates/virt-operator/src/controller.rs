//! The controllers of the lanes `Components`, `Monitoring` and `Instancetypes`: the four steps of a reconcile. `observe`
//! and `desired` supply the input, and the crate `vitivirt-install` decides. Each lane has a queue, so that a write which
//! hangs in one lane does not hold up another. Only the lane `Components` writes the status.

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kube::Api;
use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::{
    ErrorClass, Failure, ObjectKey, Outcome, Plan, Report, Step, Stop, Target, Wait, kubevirt::KubeVirt,
};
use vitivirt_install::{
    Desired, LANE_WAIT, Lane, LaneProblem, NewerOperator, Observed, RESOURCE_STEP, lane_problem, newer_operator,
    removal::{guarded_report, has_finalizer, removal_plan, removal_report},
};
use vitivirt_runtime::reconcile::{Controller, classify};

use crate::{
    desired::DesiredStateBuilder,
    lanes::{LaneGates, LanePermit, LaneProblems},
    last_reports::LastReports,
    observe::Observer,
    removal::Removal,
    router::EventRouter,
    stored_objects::StoredObjectRecorder,
};

/// A lane as a type, because the name of a controller is a constant.
pub(crate) trait LaneType: Send + Sync + 'static {
    const LANE: Lane;
    const NAME: &'static str;
    const QUEUE: &'static str;
}

pub(crate) struct Components;
pub(crate) struct Monitoring;
pub(crate) struct Instancetypes;

impl LaneType for Components {
    const LANE: Lane = Lane::Components;
    const NAME: &'static str = "KubeVirt";
    const QUEUE: &'static str = "virt-operator";
}

impl LaneType for Monitoring {
    const LANE: Lane = Lane::Monitoring;
    const NAME: &'static str = "Monitoring";
    const QUEUE: &'static str = "virt-operator-monitoring";
}

impl LaneType for Instancetypes {
    const LANE: Lane = Lane::Instancetypes;
    const NAME: &'static str = "Instancetypes";
    const QUEUE: &'static str = "virt-operator-instancetypes";
}

/// What the controllers of all lanes share.
pub(crate) struct LaneContext {
    pub(crate) observer: Observer,
    pub(crate) desired: DesiredStateBuilder,
    pub(crate) problems: Arc<LaneProblems>,
    pub(crate) gates: LaneGates,
    /// The UID of the resource whose finalizer this operator has set and not confirmed yet, see `confirm`.
    pub(crate) unconfirmed: Mutex<Option<String>>,
    pub(crate) router: Arc<EventRouter>,
    /// The pod of this process, if it runs in one.
    pub(crate) own_pod: Option<ObjectKey>,
    /// Whether the last reconcile found a newer operator.
    pub(crate) superseded: AtomicBool,
    /// For the status page.
    pub(crate) last_reports: Arc<LastReports>,
}

pub(crate) struct LaneController<L> {
    pub(crate) context: Arc<LaneContext>,
    /// What the API server stored for the writes of this lane.
    pub(crate) stored_objects: Arc<StoredObjectRecorder>,
    pub(crate) lane: PhantomData<L>,
}

/// What a plan is computed from.
pub(crate) struct PlanInput {
    observed: Observed,
    desired: Desired,
    removal: Removal,
    /// Of every lane except `Components`, which closes the others.
    _permit: Option<LanePermit>,
}

impl<L: LaneType> Controller for LaneController<L> {
    type Observed = PlanInput;
    type Status = Value;

    const NAME: &'static str = L::NAME;
    const QUEUE: &'static str = L::QUEUE;

    async fn observe(&self, key: &ObjectKey) -> Result<Option<PlanInput>, Failure> {
        let input = self.plan_input(key).await;
        input.inspect_err(|failure| self.context.publish_failure(L::LANE, failure))
    }

    fn plan(&self, PlanInput { observed, desired, removal, .. }: &PlanInput) -> Result<Plan, Failure> {
        match removal {
            Removal::InProgress(input) => Ok(removal_plan(input)),
            Removal::Guarded(_) | Removal::No => {
                let mut plan = vitivirt_install::plan(observed, desired, L::LANE)?;
                if sets_finalizer(observed, &plan) {
                    self.context.unconfirmed.lock().clone_from(&observed.kubevirt.metadata.uid);
                    plan.steps.truncate(1);
                    plan.steps.push(Step::new("finalizer").wait(finalizer_wait()));
                }
                Ok(plan)
            }
        }
    }

    fn owns(&self, _: &PlanInput, target: &Target, live: &Value) -> bool {
        vitivirt_install::owns(target, live)
    }

    fn report(&self, input: &PlanInput, plan: &Plan, outcome: &Outcome) -> Report {
        let PlanInput { observed, desired, removal, .. } = input;
        self.context.last_reports.record(L::LANE, observed, desired, plan, outcome);
        if let Removal::InProgress(input) = removal {
            log_writes(L::LANE, observed, outcome);
            let report = removal_report(observed, input, plan, outcome);
            log_phase(&report);
            return report;
        }
        let stored_objects = self.stored_objects.take();
        if L::LANE == Lane::Components {
            self.context.observer.storage_pages.advance(outcome);
        }
        if !sets_finalizer(observed, plan) {
            self.context.desired.remember(observed, desired, plan, outcome, &stored_objects, L::LANE);
        }
        log_writes(L::LANE, observed, outcome);
        if L::LANE != Lane::Components {
            self.context.publish(L::LANE, outcome);
            return vitivirt_install::lane_report(observed, plan, L::LANE);
        }
        if matches!(&outcome.stop, Stop::Waiting { wait, .. } if wait.reason == LANE_WAIT) {
            for lane in [Lane::Monitoring, Lane::Instancetypes] {
                self.context.router.enqueue_lane(lane);
            }
        }
        let mut report = vitivirt_install::report(observed, desired, plan, outcome);
        if let Removal::Guarded(refusal) = removal {
            report = guarded_report(observed, report, refusal);
        }
        log_phase(&report);
        report
    }
}

impl<L: LaneType> LaneController<L> {
    async fn plan_input(&self, key: &ObjectKey) -> Result<Option<PlanInput>, Failure> {
        // A cancelled reconcile may have left stored objects of an earlier desired state.
        drop(self.stored_objects.take());
        let Some(mut observed) = self.context.observer.observe(key).await? else { return Ok(None) };
        let is_finalized = has_finalizer(&observed.kubevirt);
        if L::LANE == Lane::Components && is_finalized && !self.context.confirm(&observed).await? {
            return Ok(None);
        }
        let removal =
            if L::LANE == Lane::Components { self.context.removal(&mut observed).await? } else { Removal::No };
        if matches!(removal, Removal::InProgress(_)) {
            return Ok(Some(PlanInput { observed, desired: Desired::Nothing, removal, _permit: None }));
        }
        if self.context.is_superseded(&observed) {
            return Ok(None);
        }
        let mut permit = None;
        if L::LANE != Lane::Components {
            permit = self.context.permit(L::LANE, &observed).await;
            if permit.is_none() {
                return Ok(None);
            }
        }
        observed.repairs = self.context.desired.repairs();
        let desired = self.context.desired.desired(&observed).await?;
        if L::LANE == Lane::Components {
            self.context.observer.check_rollouts(&mut observed).await;
            self.context.observer.check_crds(&mut observed, &desired).await?;
            self.context.observer.check_orphans(&mut observed, &desired).await?;
        }
        Ok(Some(PlanInput { observed, desired, removal, _permit: permit }))
    }
}

impl LaneContext {
    /// Whether a lane may create objects: they are removed with the resource, and the removal has not reached them.
    pub(crate) async fn permit(&self, lane: Lane, observed: &Observed) -> Option<LanePermit> {
        let uid = observed.kubevirt.metadata.uid.as_deref().unwrap_or_default();
        if !has_finalizer(&observed.kubevirt) || self.unconfirmed.lock().as_deref() == Some(uid) {
            return None;
        }
        self.gates.enter(lane, uid).await
    }

    /// Whether a resource with a new finalizer exists. The API server deletes a resource that gets its first finalizer
    /// during a deletion, although it accepts the finalizer. What is created for it would stay forever.
    async fn confirm(&self, observed: &Observed) -> Result<bool, Failure> {
        let own = &observed.kubevirt.metadata;
        if *self.unconfirmed.lock() != own.uid {
            return Ok(true);
        }
        let key = ObjectKey::from_metadata(own);
        let api: Api<KubeVirt> = Api::namespaced(self.observer.client.clone(), key.namespace().unwrap_or_default());
        let live = api.get_metadata_opt(key.name()).await;
        let live = live.map_err(|error| classify(&error, "get", &Target::of_kind::<KubeVirt>(key.clone())))?;
        let exists = live.is_some_and(|live| live.metadata.uid == own.uid);
        if exists {
            *self.unconfirmed.lock() = None;
            for lane in [Lane::Certificates, Lane::Monitoring, Lane::Instancetypes] {
                self.router.enqueue_lane(lane);
            }
        }
        Ok(exists)
    }

    /// Whether a newer virt-operator manages the installation. Then this one only renews certificates: it must not revert
    /// what the newer one has written. An event of the newer operator's pods ends this.
    pub(crate) fn is_superseded(&self, observed: &Observed) -> bool {
        let newer = self.own_pod.as_ref().and_then(|own| newer_operator(observed, own));
        let changed = self.superseded.swap(newer.is_some(), Ordering::Relaxed) != newer.is_some();
        match &newer {
            Some(NewerOperator { version, pod }) if changed => tracing::warn!(
                version,
                %pod,
                "a newer virt-operator manages KubeVirt; this replica renews certificates, continues a removal and \
                 changes nothing else until that pod is deleted"
            ),
            None if changed => tracing::info!("no newer virt-operator is left; this replica manages KubeVirt"),
            _ => {}
        }
        newer.is_some()
    }

    /// Reports to the lane `Components` what is wrong in another lane, and that its objects are written.
    pub(crate) fn publish(&self, lane: Lane, outcome: &Outcome) {
        let changed = lane_problem(&outcome.stop).is_some_and(|problem| self.problems.set(lane, problem));
        if changed || outcome.written > 0 {
            self.router.enqueue_lane(Lane::Components);
        }
    }

    /// A lane that cannot observe has a problem too. The lane `Components` reports its own failures.
    pub(crate) fn publish_failure(&self, lane: Lane, failure: &Failure) {
        let is_problem = lane != Lane::Components && failure.class != ErrorClass::Conflict;
        if is_problem && self.problems.set(lane, Some(LaneProblem::Lasting(failure.message.clone()))) {
            self.router.enqueue_lane(Lane::Components);
        }
    }
}

/// Whether the plan sets the finalizer. Nothing else is written before the next reconcile has confirmed it.
fn sets_finalizer(observed: &Observed, plan: &Plan) -> bool {
    let is_first = plan.steps.first().is_some_and(|step| step.name == RESOURCE_STEP);
    is_first && !has_finalizer(&observed.kubevirt)
}

fn finalizer_wait() -> Wait {
    let message = "the finalizer of the resource is being set".to_owned();
    Wait { reason: "WaitingForFinalizer", message, requeue_after: Some(Duration::from_secs(5)) }
}

fn log_phase(report: &Report) {
    let phase = |status: &Value| status.get("phase").and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(status) = &report.status {
        let (old, new) = (phase(&status.observed), phase(&status.desired));
        if old != new {
            let conditions = status.desired.get("conditions").and_then(Value::as_array).into_iter().flatten();
            let available = conditions.into_iter().find(|condition| condition.get("type") == Some(&"Available".into()));
            let reason = available.and_then(|condition| condition.get("reason")?.as_str()).unwrap_or_default();
            tracing::info!(old, new, reason, "phase changed");
        }
    }
}

pub(crate) fn log_writes(lane: Lane, observed: &Observed, outcome: &Outcome) {
    if outcome.written > 0 {
        let generation = observed.kubevirt.metadata.generation;
        tracing::info!(%lane, written = outcome.written, generation, stop = ?outcome.stop, "installation changed");
    }
}
