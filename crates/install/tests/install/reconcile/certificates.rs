//! What the lane `Certificates` writes.

use std::sync::Arc;

use serde_json::{Value, json};
use vitivirt_api::{Failure, Stop, reason};
use vitivirt_install::{
    CertificateScope, DesiredCertificates, LaneProblem, certificate_plan,
    certificates::{IssuedCertificates, KeyPair},
    lane_problem,
};

use super::{
    test_cluster::{Reconcile, TestCluster},
    variant,
};
use crate::TestCertificates;

const DURATION: &str = "kubevirt.io/duration";

fn lifetimes(ca: &str, leaf: &str) -> Value {
    json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": ca}, "server": {"duration": leaf}}}})
}

/// An installation in which every certificate and every CA bundle must be renewed.
fn with_old_certificates(spec: &Value) -> TestCluster {
    let mut cluster = TestCluster::new(spec);
    cluster.cluster.routes = true;
    cluster.settle();
    for ((kind, _), object) in &mut cluster.objects {
        let object = Arc::make_mut(object);
        match kind.as_str() {
            "Secret" => object["data"]["tls.crt"] = json!("b2xk"),
            "ConfigMap" if object["data"].get("ca-bundle").is_some() => object["data"]["ca-bundle"] = json!("old"),
            "APIService" => object["spec"]["caBundle"] = json!("b2xk"),
            "Route" => object["spec"]["tls"]["destinationCACertificate"] = json!("old"),
            "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration" => {
                for webhook in object["webhooks"].as_array_mut().unwrap() {
                    webhook["clientConfig"]["caBundle"] = json!("b2xk");
                }
            }
            _ => {}
        }
    }
    cluster
}

/// The resource was changed before the webhook existed, or while it was unavailable.
#[test]
fn with_invalid_lifetimes_certificates_are_renewed_with_those_they_have() {
    let mut of_another_release = lifetimes("60h", "a week");
    of_another_release["imageTag"] = json!("v1.9.0");
    for invalid in [lifetimes("60h", "a week"), lifetimes("a week", "6h"), lifetimes("60h", "5s"), of_another_release] {
        let mut cluster = with_old_certificates(&lifetimes("48h", "12h"));
        cluster.edit(&invalid);
        let observed = cluster.observed();
        for scope in [CertificateScope::OwnRelease, CertificateScope::Existing] {
            let desired = DesiredCertificates::new(&observed, &cluster.environment, &scope).unwrap();
            assert_eq!(desired.certificates.len(), 13);
            for certificate in desired.certificates {
                let hours = if certificate.signer.is_none() { 48 } else { 12 };
                let lifetime = certificate.lifetime;
                assert_eq!(lifetime.duration.as_secs(), hours * 3600, "{}: {invalid}", certificate.secret);
                assert_eq!(lifetime.renew_before, lifetime.duration / 5, "{}: {invalid}", certificate.secret);
            }
        }
        let renewed = cluster.reconcile().writes().iter().filter(|write| write.starts_with("Patch(Secret ")).count();
        assert_eq!(renewed, 13, "{invalid}");
        for (secret, duration) in [("kubevirt-ca", "48h0m0s"), ("kubevirt-virt-api-certs", "12h0m0s")] {
            let annotation = &cluster.object("Secret", secret)["metadata"]["annotations"][DURATION];
            assert_eq!(*annotation, format!("&Duration{{Duration:{duration},}}"), "{secret}: {invalid}");
        }
        cluster.edit(&lifetimes("60h", "6h"));
        cluster.settle();
        let annotation = &cluster.object("Secret", "kubevirt-virt-api-certs")["metadata"]["annotations"][DURATION];
        assert_eq!(*annotation, "&Duration{Duration:6h0m0s,}");
    }
}

/// What a write is about.
fn part(write: &str) -> &'static str {
    let (_, target) = write.trim_end_matches(')').split_once('(').unwrap();
    match target.split_once(' ').unwrap() {
        ("Secret", "kubevirt/kubevirt-operator-certs") => "operator certificate",
        ("Secret", "kubevirt/kubevirt-ca" | "kubevirt/kubevirt-export-ca" | "kubevirt/kubevirt-backup-ca") => "CAs",
        ("Secret", _) => "certificates",
        ("ConfigMap", _) => "CA bundles",
        ("Route" | "APIService" | "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration", _) => "trust",
        _ => "another lane",
    }
}

fn parts(reconcile: &Reconcile) -> Vec<&'static str> {
    let mut parts: Vec<&str> = reconcile.writes().iter().map(|write| part(write)).collect();
    parts.dedup();
    parts
}

/// The webhook of the operator must answer for anything else to be corrected.
#[test]
fn the_certificate_of_the_operator_is_written_first_and_leaves_last() {
    let mut cluster = with_old_certificates(&variant("gates"));
    let all = ["operator certificate", "CAs", "CA bundles", "trust", "certificates"];
    assert_eq!(parts(&cluster.reconcile()), all);
    // Nothing trusts a CA before the components are installed.
    let first = parts(&TestCluster::new(&json!({})).reconcile());
    assert!(first.starts_with(&["operator certificate", "CAs", "CA bundles", "certificates"]), "{first:?}");
}

#[test]
fn a_ca_bundle_that_cannot_be_written_does_not_keep_certificates_from_being_renewed() {
    let mut cluster = with_old_certificates(&variant("gates"));
    cluster.fails = Some(("ConfigMap", Failure::forbidden(reason::PERMISSION_MISSING, "cannot patch a ConfigMap")));
    assert_eq!(parts(&cluster.reconcile()), ["operator certificate", "CAs", "trust", "certificates"]);
    let message = cluster.status()["conditions"].to_string();
    assert!(message.contains("certificates: cannot patch a ConfigMap"), "{message}");
}

/// Certificates, and CAs of users that do not fit into their bundle.
struct LeftOut(usize);

impl IssuedCertificates for LeftOut {
    fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        TestCertificates.key_pair(secret)
    }

    fn bundle(&self, config_map: &str) -> Option<String> {
        TestCertificates.bundle(config_map)
    }

    fn left_out(&self) -> usize {
        self.0
    }
}

#[test]
fn cas_that_do_not_fit_are_a_problem_of_the_lane_and_delay_nothing() {
    let cluster = with_old_certificates(&json!({}));
    let observed = cluster.observed();
    let certificates =
        DesiredCertificates::new(&observed, &cluster.environment, &CertificateScope::OwnRelease).unwrap();
    let plan = |left_out| certificate_plan(&observed, &certificates, &LeftOut(left_out)).unwrap();
    assert!(plan(0).steps.iter().all(|step| step.wait.is_none()));
    let with_problem = plan(2);
    assert_eq!(with_problem.write_count(), plan(0).write_count());
    assert!(with_problem.steps.iter().all(|step| step.independent));
    let (step, wait) = with_problem.steps.last().map(|step| (step.name, step.wait.clone().unwrap())).unwrap();
    let Some(Some(LaneProblem::Lasting(message))) = lane_problem(&Stop::Waiting { step, wait }) else {
        panic!("it is not a problem")
    };
    for part in ["ConfigMap kubevirt-external-ca", "ConfigMap kubevirt-ca", "50 CAs and 30 KiB", "remove CAs"] {
        assert!(message.contains(part), "{message}");
    }
}
