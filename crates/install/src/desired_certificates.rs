//! Which certificates an installation has in the present state of its KubeVirt resource, and the plan that stores them.
//!
//! This is the lane `Certificates`. It needs neither a valid resource nor an install strategy: without them it renews
//! the certificates that exist. So an installation whose resource cannot be installed keeps answering, and the edit that
//! corrects the resource passes the operator's webhook.
//!
//! Each step starts from what is stored: a bundle contains only a stored CA, and only a stored CA signs certificates. So
//! no step depends on another one of the same plan, and the steps follow each other over several reconciles.

use std::sync::Arc;

use serde_json::{Value, json};
use vitivirt_api::{Body, Failure, ObjectKey, Operation, Plan, Step, Target, Wait, Write};

use crate::{
    certificates::{
        BUNDLE_KEY, BUNDLES, CA, Certificate, EXTERNAL_CA, IssuedCertificates, Lifetime, Lifetimes, MIN_LIFETIME,
        VIRT_OPERATOR, all_certificates, annotate_lifetime,
        bundle::{MAX_BYTES, MAX_CERTIFICATES},
        bundles, certificates, is_ca, secret,
    },
    config::DeploymentConfig,
    customize::Customizer,
    drift::{Drift, drift},
    eligibility::is_eligible,
    environment::Environment,
    installation::Installation,
    kind::Kind,
    live::LiveObject,
    managed_metadata::ManagedMetadata,
    names::annotation,
    object::InstallationObject,
    observed::Observed,
    order::Stage,
    record::Recorded,
    repairs::is_certificate_delayed,
    served,
    trust::trust_patches,
    validation::check_installable,
    wait,
};

/// Where the certificates of an installation are known from.
#[derive(Clone)]
pub enum CertificateScope {
    /// The release of this operator.
    OwnRelease,
    Installation(Arc<Installation>),
    /// The release that is installed is not known: only the certificates that exist are renewed.
    Existing,
}

pub struct DesiredCertificates {
    pub certificates: Vec<Certificate>,
    /// The Secrets and ConfigMaps that are created if they are missing, without their data.
    objects: Vec<InstallationObject>,
    /// Whether the metadata of existing ones is updated too, or only their data.
    is_valid: bool,
}

impl DesiredCertificates {
    pub fn new(observed: &Observed, environment: &Environment, scope: &CertificateScope) -> Result<Self, Failure> {
        let config = DeploymentConfig::new(&observed.kubevirt, environment);
        let lifetimes = valid_lifetimes(observed);
        let existing = |certificate: &Certificate| stored_secret(observed, &certificate.secret).is_some();
        let default = Lifetimes::default();
        let given = lifetimes.as_ref().unwrap_or(&default);
        let mut certificates = match scope {
            CertificateScope::OwnRelease => certificates(&config, given),
            CertificateScope::Installation(installation) => installation.certificates.clone(),
            CertificateScope::Existing => {
                let all: Vec<Certificate> = all_certificates(&config.namespace, given).collect();
                let has_leaves = all.iter().any(|certificate| certificate.signer.is_some() && existing(certificate));
                // A lost CA is replaced, because the certificates that exist need one.
                let is_needed =
                    |certificate: &Certificate| existing(certificate) || has_leaves && certificate.secret == CA;
                all.into_iter().filter(is_needed).collect()
            }
        };
        if lifetimes.is_none() {
            for certificate in &mut certificates {
                let stored = stored_secret(observed, &certificate.secret);
                let stored = stored.and_then(|live| Lifetime::from_annotation(live.annotation(annotation::DURATION)));
                certificate.lifetime = stored.unwrap_or(certificate.lifetime);
            }
        }
        if matches!(scope, CertificateScope::Existing) {
            let mut objects = certificate_objects(observed, &config, &certificates, None)?;
            objects.retain(|object| object.stage == Stage::CaSecrets);
            return Ok(Self { certificates, objects, is_valid: false });
        }
        let customizer = Customizer::new(&observed.kubevirt.spec.customize_components)
            .and_then(|customizer| check_installable(&observed.kubevirt).map(|()| customizer));
        let customized =
            customizer.and_then(|customizer| certificate_objects(observed, &config, &certificates, Some(&customizer)));
        let is_valid = customized.is_ok();
        let mut objects = match customized {
            Ok(objects) => objects,
            // The lane `Components` reports why the resource is invalid.
            Err(_) => certificate_objects(observed, &config, &certificates, None)?,
        };
        if let CertificateScope::Installation(installation) = scope {
            // Another release may not have each of the bundles.
            objects.retain(|object| {
                installation.objects.iter().any(|other| (other.kind, &other.key) == (object.kind, &object.key))
            });
        }
        Ok(Self { certificates, objects, is_valid })
    }
}

/// The lifetimes of the resource, or `None` if they are invalid.
fn valid_lifetimes(observed: &Observed) -> Option<Lifetimes> {
    let lifetimes = Lifetimes::new(observed.kubevirt.spec.self_signed()).ok()?;
    (lifetimes.ca.duration >= MIN_LIFETIME && lifetimes.leaf.duration >= MIN_LIFETIME).then_some(lifetimes)
}

fn stored_secret<'a>(observed: &'a Observed, name: &str) -> Option<&'a Arc<LiveObject>> {
    observed.objects.get(Kind::Secret, &ObjectKey::namespaced(&observed.operator_namespace, name))
}

/// The Secrets of these certificates and the ConfigMaps of bundles, as they are created. Users may patch Secrets.
fn certificate_objects(
    observed: &Observed,
    config: &DeploymentConfig,
    certificates: &[Certificate],
    customizer: Option<&Customizer>,
) -> Result<Vec<InstallationObject>, Failure> {
    let metadata = ManagedMetadata::new(&observed.kubevirt, config);
    let mut objects = Vec::new();
    for certificate in certificates {
        let mut object = Body::from_object(&secret(&config.namespace, &certificate.secret))?.into_json();
        if let Some(customizer) = customizer {
            customizer.apply(Kind::Secret, &certificate.secret, &mut object)?;
        }
        metadata.add_to_object(&mut object);
        annotate_lifetime(&mut object, certificate.lifetime);
        let stage = if is_ca(&certificate.secret) { Stage::CaSecrets } else { Stage::Certificates };
        let key = ObjectKey::namespaced(&config.namespace, &certificate.secret);
        objects.push(InstallationObject::from_value(stage, Kind::Secret, key, object));
    }
    for bundle in bundles(config) {
        let key = ObjectKey::from_metadata(&bundle.metadata);
        let mut object = Body::from_object(&bundle)?.into_json();
        metadata.add_to_object(&mut object);
        objects.push(InstallationObject::from_value(Stage::CaConfigMaps, Kind::ConfigMap, key, object));
    }
    Ok(objects)
}

/// The writes that store the issued certificates and bundles, and that replace a pod which does not load them. Pure.
pub fn certificate_plan(
    observed: &Observed,
    desired: &DesiredCertificates,
    issued: &dyn IssuedCertificates,
) -> Result<Plan, Failure> {
    if !is_eligible(observed) {
        return Ok(Plan::default());
    }
    let planner = CertificatePlanner { observed, desired, issued };
    let is_operators = |name: &str| name == VIRT_OPERATOR;
    let trust = match issued.bundle(CA).filter(|bundle| !bundle.is_empty()) {
        Some(bundle) => trust_patches(observed, &bundle)?,
        None => Vec::new(),
    };
    let steps = [
        // The webhook of the operator must answer for anything else to be corrected.
        ("operator certificate", planner.secrets(is_operators)?),
        ("CAs", planner.secrets(is_ca)?),
        ("CA bundles", planner.bundles()?),
        ("trust", trust),
        ("certificates", planner.secrets(|name| !is_ca(name) && !is_operators(name))?),
    ];
    let steps = steps.map(|(name, mut writes)| {
        writes.retain(|write| !is_certificate_delayed(observed, write.target(), issued));
        (name, writes)
    });
    let steps = steps.into_iter().filter(|(_, writes)| !writes.is_empty());
    let steps = steps.map(|(name, writes)| Step { writes, ..Step::new(name).independent(true) });
    Ok(Plan { steps: steps.chain(served::delete_pod(observed)).chain(left_out(issued.left_out())).collect() })
}

/// The wait for a user who has added more CAs than fit into a bundle. Nothing else waits for it.
fn left_out(count: usize) -> Option<Step> {
    let (cas, them) = if count == 1 { ("1 CA that does", "it") } else { ("CAs that do", "them") };
    let message = format!(
        "ConfigMap {EXTERNAL_CA} has {cas} not fit into ConfigMap {CA}, so KubeVirt does not trust {them}: a bundle has at \
         most {MAX_CERTIFICATES} CAs and {} KiB, and a part of that is reserved for CAs of the operator; remove CAs that \
         are not needed from both ConfigMaps; the operator retries automatically",
        MAX_BYTES / 1024
    );
    let wait = Wait { reason: wait::LEFT_OUT, message, requeue_after: None };
    (count > 0).then(|| Step::new("CAs that do not fit").independent(true).wait(wait))
}

struct CertificatePlanner<'a> {
    observed: &'a Observed,
    desired: &'a DesiredCertificates,
    issued: &'a dyn IssuedCertificates,
}

impl CertificatePlanner<'_> {
    fn secrets(&self, includes: impl Fn(&str) -> bool) -> Result<Vec<Write>, Failure> {
        let included = self.desired.certificates.iter().filter(|certificate| includes(&certificate.secret));
        // A certificate that cannot be issued yet has no pair.
        let issued = included.filter_map(|certificate| Some((certificate, self.issued.key_pair(&certificate.secret)?)));
        let mut writes = Vec::new();
        for (certificate, pair) in issued {
            let data = crate::object::key_pair_data(&pair);
            let annotation = (annotation::DURATION, certificate.lifetime.annotation());
            writes.extend(self.write(Kind::Secret, &certificate.secret, &data, Some(annotation))?);
        }
        Ok(writes)
    }

    fn bundles(&self) -> Result<Vec<Write>, Failure> {
        let mut writes = Vec::new();
        for name in BUNDLES {
            if let Some(bundle) = self.issued.bundle(name) {
                writes.extend(self.write(Kind::ConfigMap, name, &json!({ BUNDLE_KEY: bundle }), None)?);
            }
        }
        Ok(writes)
    }

    /// The write that one object needs. An object that is being deleted is also created again when it is gone.
    fn write(
        &self,
        kind: Kind,
        name: &str,
        data: &Value,
        annotation: Option<(&str, String)>,
    ) -> Result<Option<Write>, Failure> {
        let key = ObjectKey::namespaced(&self.observed.operator_namespace, name);
        let target = Target::new(kind.resource(), key.clone());
        let object = self.desired.objects.iter().find(|object| object.kind == kind && object.key == key);
        let live = self.observed.objects.get(kind, &key);
        let operations = match (object, live) {
            // It may stay for long, so it must stay valid. Its metadata does not matter any more.
            (_, Some(live)) if live.deleting => data_patch(kind, live, data, annotation)?,
            (Some(object), None) => return Ok(Some(Write::Create { target, body: object.body(self.issued)? })),
            (None, None) => return Ok(None),
            (Some(object), Some(live)) if self.desired.is_valid => {
                match drift(kind, object.body(self.issued)?.json(), live, Recorded::Never)? {
                    Drift::Patch(operations) => operations,
                    Drift::None | Drift::Recreate => Vec::new(),
                }
            }
            (_, Some(live)) => data_patch(kind, live, data, annotation)?,
        };
        let uid = live.map(|live| live.uid.clone()).unwrap_or_default();
        Ok((!operations.is_empty()).then_some(Write::Patch { target, uid, operations }))
    }
}

/// Changes the data of an object, and nothing else, except for the annotation that belongs to the data.
fn data_patch(
    kind: Kind,
    live: &LiveObject,
    data: &Value,
    annotation: Option<(&str, String)>,
) -> Result<Vec<Operation>, Failure> {
    let actual = live.fields()?.and_then(|fields| fields.content.get("data").cloned()).unwrap_or_default();
    if actual == *data {
        return Ok(Vec::new());
    }
    let operation = Operation::set("/data", data.clone());
    // Users add CA certificates to ConfigMaps of the installation. The precondition keeps a recent addition.
    let operation = if kind == Kind::ConfigMap { operation.expecting(actual) } else { operation };
    let annotation = annotation.filter(|(key, value)| live.annotation(key) != value);
    let annotation = annotation.map(|(key, value)| {
        if live.annotations.is_empty() {
            return Operation::set("/metadata/annotations", json!({ key: value }));
        }
        let path = format!("/metadata/annotations/{}", Operation::escape(key));
        Operation::set(path, Value::String(value))
    });
    Ok([operation].into_iter().chain(annotation).collect())
}
