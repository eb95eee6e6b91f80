//! The status page: KubeVirt's conditions and components, its certificates, what differs from the desired state, and
//! which other client changed something last. Everything is from the caches and the last reports.

use std::{sync::Arc, time::SystemTime};

use maud::{Markup, html};
use vitivirt_api::{
    kubevirt::{KubeVirt, KubeVirtCondition},
    view::{StepState, TreeStep, age},
};
use vitivirt_install::{
    Kind, RELEASE,
    served::{ServedCertificate, ServedState},
    view::workloads,
};
use vitivirt_page::{
    Page, PageHeader, PageRequest, Pages,
    layout::{REFRESH, Replica},
    parts::{badge, message},
};
use vitivirt_runtime::{program::Context, server::Bind};

use crate::{
    cache::{self, Caches},
    certificates::served::{seconds_until_expiry, stored_leaf},
    desired::timestamp,
    last_reports::{DriftRecord, LaneState, LastReports, Reports},
    probe::CertificateProber,
};

const PROGRAM: PageHeader =
    PageHeader { name: "virt-operator", version: env!("CARGO_PKG_VERSION"), links: &[("/", "Overview")] };
const HOUR: i64 = 3600;

pub(crate) async fn start(
    context: &Context,
    bind: Option<Bind>,
    caches: &Caches,
    prober: &Arc<CertificateProber>,
    reports: &Arc<LastReports>,
) {
    let pages = KubeVirtPages { caches: caches.clone(), prober: prober.clone(), reports: reports.clone() };
    vitivirt_page::start(context, bind, PROGRAM, pages).await;
}

struct KubeVirtPages {
    caches: Caches,
    prober: Arc<CertificateProber>,
    reports: Arc<LastReports>,
}

impl Pages for KubeVirtPages {
    fn page(&self, request: &PageRequest<'_>, replica: &Replica) -> Option<Page> {
        #[expect(clippy::disallowed_methods, reason = "the page shows ages")]
        let now = SystemTime::now();
        request.segments.is_empty().then(|| self.overview(replica, now))
    }
}

/// A certificate in a Secret. Only its name and its end.
struct StoredCertificate {
    secret: String,
    seconds_left: Option<i64>,
}

impl KubeVirtPages {
    fn overview(&self, replica: &Replica, now: SystemTime) -> Page {
        let seconds = timestamp(now).as_second();
        let components = workloads(&self.caches.objects(), &self.caches.pods());
        let body = html! {
            @match self.caches.first_kubevirt() {
                Some(kubevirt) => (resource(&kubevirt)),
                None => p {
                    (badge(StepState::Waiting, "no KubeVirt resource")) " Create one in the namespace of this operator to \
                    install KubeVirt " (RELEASE) "."
                }
            }
            h2 { "Components" } (component_table(&components))
            h2 { "Certificates" }
            (certificate_table(&self.certificates(now), &self.prober.served().certificates))
            @if replica.is_leader() { (lanes(&self.reports.get(), seconds)) }
            @else {
                h2 { "Plan and drift" }
                p { "This replica is on standby. The plan and the last drift are on the page of the leader"
                    @if let Some(leader) = &replica.leader { " " (leader) } "." }
            }
        };
        Page { title: "KubeVirt".to_owned(), refresh: REFRESH, body }
    }

    fn certificates(&self, now: SystemTime) -> Vec<StoredCertificate> {
        let secrets = self.caches.installed_objects().filter(|(kind, _)| *kind == Kind::Secret);
        let certificates = secrets.flat_map(|(_, cache)| cache.entries()).map(|(key, entry)| {
            let leaf = cache::certificate(&entry.value).and_then(|pair| stored_leaf(&pair.certificate));
            let seconds_left = leaf.and_then(|leaf| seconds_until_expiry(&leaf, now));
            StoredCertificate { secret: key.name().to_owned(), seconds_left }
        });
        let mut certificates: Vec<StoredCertificate> = certificates.collect();
        certificates.sort_by(|a, b| (a.seconds_left, &a.secret).cmp(&(b.seconds_left, &b.secret)));
        certificates
    }
}

fn resource(kubevirt: &KubeVirt) -> Markup {
    let status = kubevirt.status.clone().unwrap_or_default();
    let state = match status.phase.as_str() {
        "Deployed" => StepState::Ok,
        _ => StepState::Waiting,
    };
    let deleting = kubevirt.metadata.deletion_timestamp.is_some();
    let phase = if status.phase.is_empty() { "no phase yet" } else { &status.phase };
    let shown = |text: &str| if text.is_empty() { "none".to_owned() } else { text.to_owned() };
    html! {
        dl {
            dt { "phase" } dd { (badge(state, phase)) @if deleting { " is being deleted" } }
            dt { "installed version" } dd { (shown(&status.observed_kube_virt_version)) }
            dt { "target version" } dd { (shown(&status.target_kube_virt_version)) }
            dt { "version of the operator" } dd { (shown(&status.operator_version)) }
            @if status.observed_generation != kubevirt.metadata.generation {
                dt { "spec" } dd { "has a change that is not installed yet" }
            }
        }
        h2 { "Conditions" }
        @if status.conditions.is_empty() { p { "None yet." } }
        @else {
            table {
                thead { tr { th { "condition" } th { "status" } th { "reason" } th { "message" } } }
                tbody { @for condition in &status.conditions { (condition_row(condition)) } }
            }
        }
    }
}

fn condition_row(condition: &KubeVirtCondition) -> Markup {
    // For these, True is the bad state.
    let is_negative = ["Degraded", "Progressing"].contains(&condition.condition_type.as_str());
    let state = match (condition.status == "True", is_negative) {
        (true, false) | (false, true) => StepState::Ok,
        (true, true) | (false, false) => StepState::Waiting,
    };
    html! {
        tr {
            td data-label="condition" { (condition.condition_type) }
            td data-label="status" { (badge(state, &condition.status)) }
            td data-label="reason" { (condition.reason) }
            td data-label="message" { (message(&condition.message)) }
        }
    }
}

fn component_table(components: &[TreeStep]) -> Markup {
    html! {
        @if components.is_empty() { p { "None yet." } }
        @else {
            table {
                thead { tr { th { "component" } th { "kind" } th { "state" } th { "pods" } } }
                tbody {
                    @for component in components {
                        tr {
                            td data-label="component" { (component.name) }
                            td data-label="kind" { (component.kind) }
                            td data-label="state" { (badge(component.state, &component.summary)) }
                            td data-label="pods" {
                                @for fact in &component.facts { span { (fact.value) " " (fact.label) " " } }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn certificate_table(certificates: &[StoredCertificate], outdated: &[ServedCertificate]) -> Markup {
    let left = |seconds: i64| match seconds {
        ..0 => badge(StepState::Failed, "has expired"),
        _ => {
            let state = if seconds < HOUR { StepState::Waiting } else { StepState::Ok };
            badge(state, &age(seconds))
        }
    };
    html! {
        @if certificates.is_empty() { p { "None yet." } }
        @else {
            table {
                thead { tr { th { "Secret" } th { "valid for" } } }
                tbody {
                    @for certificate in certificates {
                        tr {
                            td data-label="Secret" { (certificate.secret) }
                            td data-label="valid for" {
                                @match certificate.seconds_left {
                                    Some(seconds) => (left(seconds)),
                                    None => (badge(StepState::Unknown, "no certificate that can be read")),
                                }
                            }
                        }
                    }
                }
            }
        }
        @for served in outdated {
            p { (badge(StepState::Failed, served_text(served.state)))
                " pod " (served.pod.to_string()) " (Secret " (served.endpoint.secret) ")" }
        }
    }
}

fn served_text(state: ServedState) -> &'static str {
    match state {
        ServedState::Good => "served",
        ServedState::NotReloaded => "the pod does not serve the stored certificate",
        ServedState::Expired => "the pod serves an expired certificate",
        ServedState::Untrusted => "the pod serves a certificate that no CA of the bundle signed",
        ServedState::Unreachable => "the pod presents no certificate",
    }
}

fn lanes(reports: &Reports, now: i64) -> Markup {
    let differs = reports.lanes.iter().filter(|(_, report)| report.state != LaneState::Done);
    let differs: Vec<_> = differs.collect();
    html! {
        h2 { "Plan" }
        @if reports.lanes.is_empty() { p { "This replica has not reconciled the KubeVirt resource yet." } }
        @else if differs.is_empty() { p { (badge(StepState::Ok, "nothing differs from the desired state")) } }
        @for (lane, report) in differs {
            p {
                @match &report.state {
                    LaneState::Done => "",
                    LaneState::Waiting(message) => {
                        (badge(StepState::Waiting, &lane.to_string())) " " (message)
                    },
                    LaneState::Failed(message) => { (badge(StepState::Failed, &lane.to_string())) " " (message) },
                }
                " " span class="soft" { "(" (age(now - report.at.as_second())) " ago)" }
            }
            ul {
                @for write in &report.open {
                    li { (write.action) " " (write.object)
                        @if !write.fields.is_empty() { span class="soft" { ": " (write.fields.join(", ")) } } }
                }
            }
            @if report.open_count > report.open.len() {
                p class="soft" { "and " (report.open_count - report.open.len()) " more" }
            }
        }
        h2 { "Last drift" }
        @if reports.drifts.is_empty() { p { "No other client has changed an object since this replica became the leader." } }
        @else { ul { @for drift in &reports.drifts { li { (drift_text(drift, now)) } } } }
    }
}

fn drift_text(drift: &DriftRecord, now: i64) -> Markup {
    html! {
        (drift.object) " was " @if drift.deleted { "deleted" } @else { "changed" } " by "
        @match drift.managers.as_slice() {
            [] => "another client",
            managers => b { (managers.join(", ")) },
        }
        @if !drift.fields.is_empty() { ": " (drift.fields.join(", ")) }
        span class="soft" { " (" (age(now - drift.at.as_second())) " ago; repaired by the operator)" }
    }
}
