//! The controller of the lane `Certificates`. It works in every state of the KubeVirt resource: one that is invalid, whose
//! install strategy is pending, or whose other lanes fail. Issuing needs keys and a clock, so it is done in the observe
//! step. What is issued takes effect only when the plan has written it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target};
use vitivirt_install::{
    CertificateScope, Desired, DesiredCertificates, Environment, Kind, Lane, Observed, certificate_plan,
    certificate_report, certificates::BUNDLE_KEY, is_eligible, is_of_another_release, names::annotation,
    removal::is_being_removed, served::deleted_pod, trusted_bundles,
};
use vitivirt_runtime::reconcile::Controller;

use crate::{
    cache,
    certificates::{CertificateSet, Key, StoredCertificates, StoredSecret, TrustedCa, issue_certificates},
    controller::{LaneContext, log_writes},
    lanes::LanePermit,
    stored_objects::StoredObjectRecorder,
};

pub(crate) struct CertificateController {
    pub(crate) context: Arc<LaneContext>,
    pub(crate) environment: Environment,
    /// What the API server stored for the writes of this lane.
    pub(crate) stored_objects: Arc<StoredObjectRecorder>,
    /// The CA that every bundle contains. A new leader counts from its own first observation.
    pub(crate) trusted_ca: Mutex<Option<TrustedCa>>,
}

pub(crate) struct CertificateInput {
    observed: Observed,
    desired: DesiredCertificates,
    issued: CertificateSet,
    _permit: LanePermit,
}

impl Controller for CertificateController {
    type Observed = CertificateInput;
    type Status = Value;

    const NAME: &'static str = "Certificates";
    const QUEUE: &'static str = "virt-operator-certificates";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<CertificateInput>, Failure> {
        let input = self.plan_input(key).await;
        input.inspect_err(|failure| self.context.publish_failure(Lane::Certificates, failure))
    }

    fn plan(&self, CertificateInput { observed, desired, issued, .. }: &CertificateInput) -> Result<Plan, Failure> {
        certificate_plan(observed, desired, issued)
    }

    fn owns(&self, _: &CertificateInput, target: &Target, live: &Value) -> bool {
        vitivirt_install::owns(target, live)
    }

    fn report(&self, input: &CertificateInput, plan: &Plan, outcome: &Outcome) -> Report {
        log_writes(Lane::Certificates, &input.observed, outcome);
        self.context.last_reports.record(Lane::Certificates, &input.observed, &Desired::Nothing, plan, outcome);
        self.context.publish(Lane::Certificates, outcome);
        let stored = self.stored_objects.take();
        self.context.desired.remember_certificates(&input.observed, &input.issued, plan, &stored);
        let now = SystemTime::from(input.observed.now);
        let until = |at: SystemTime| at.duration_since(now).unwrap_or_default().max(Duration::from_secs(1));
        self.context.observer.prober.remember_deleted(deleted_pod(&input.observed, plan, outcome));
        certificate_report(&input.observed, plan, outcome, input.issued.next.map(until))
    }
}

impl CertificateController {
    async fn plan_input(&self, key: &ObjectKey) -> Result<Option<CertificateInput>, Failure> {
        drop(self.stored_objects.take());
        let Some(mut observed) = self.context.observer.observe(key).await? else { return Ok(None) };
        observed.repairs = self.context.desired.repairs();
        if !is_eligible(&observed) {
            return Ok(None);
        }
        let Some(permit) = self.context.permit(Lane::Certificates, &observed).await else { return Ok(None) };
        let scope = self.scope(&observed).await?;
        let desired = DesiredCertificates::new(&observed, &self.environment, &scope)?;
        let trusted = self.trusted_ca.lock().clone();
        let issued = renew_certificates(&desired, &observed, trusted)?;
        self.trusted_ca.lock().clone_from(&issued.trusted_ca);
        Ok(Some(CertificateInput { observed, desired, issued, _permit: permit }))
    }

    /// An installation that has certificates needs no strategy for them to be renewed. Before the first certificate, only
    /// a resource that can be installed gets any.
    async fn scope(&self, observed: &Observed) -> Result<CertificateScope, Failure> {
        // The newer operator decides which certificates exist, and what their Secrets contain besides.
        if self.context.is_superseded(observed) {
            return Ok(CertificateScope::Existing);
        }
        let exist = observed.objects.of_kind(Kind::Secret).next().is_some();
        if !exist && is_being_removed(observed) {
            return Ok(CertificateScope::Existing);
        }
        if exist && !is_of_another_release(&observed.kubevirt, &self.environment) {
            return Ok(CertificateScope::OwnRelease);
        }
        match self.context.desired.desired(observed).await {
            Ok(Desired::Installation { installation, .. } | Desired::Refused { running: installation, .. }) => {
                Ok(CertificateScope::Installation(installation))
            }
            // There is nothing to renew, and the failure is retried.
            Err(failure) if !exist => Err(failure),
            // The lane `Components` reports the reason.
            Ok(Desired::StrategyPending { .. } | Desired::Invalid(_) | Desired::Nothing) | Err(_) => {
                Ok(CertificateScope::Existing)
            }
        }
    }
}

/// Issues the certificates that are missing or due; the others are kept.
pub(crate) fn renew_certificates(
    desired: &DesiredCertificates,
    observed: &Observed,
    trusted_ca: Option<TrustedCa>,
) -> Result<CertificateSet, Failure> {
    let stored = StoredCertificates { trusted_ca, ..stored_certificates(observed) };
    issue_certificates(&desired.certificates, &stored, SystemTime::from(observed.now), &mut Key::generate)
}

fn stored_certificates(observed: &Observed) -> StoredCertificates {
    let secrets = observed.objects.recognized(Kind::Secret).filter_map(|(key, live)| {
        let pair = cache::certificate(live)?;
        let duration = live.annotations.get(annotation::DURATION).cloned();
        Some((key.name().to_owned(), StoredSecret { certificate: pair.certificate, key: pair.key, duration }))
    });
    let bundles = observed.objects.recognized(Kind::ConfigMap).filter(|(_, live)| !live.is_strategy);
    let bundles: BTreeMap<String, String> =
        bundles.filter_map(|(key, live)| Some((key.name().to_owned(), live.data(BUNDLE_KEY)?))).collect();
    let trusted_bundles = trusted_bundles(observed);
    StoredCertificates { secrets: secrets.collect(), bundles, trusted_bundles, trusted_ca: None }
}
