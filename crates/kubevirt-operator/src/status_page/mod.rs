//! The status page: the overview, the list of Machines, and one Machine as a tree. Everything is from the caches.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use maud::{Markup, html};
use vitivirt_api::{
    ObjectKey,
    machine::{MachinePhase, machine_reason},
    view::{StepState, age},
};
use vitivirt_machine::view::{MachineRow, cpus, machine_tree};
use vitivirt_page::{
    Page, PageHeader, PageRequest, Pages,
    layout::{REFRESH, Replica},
    parts::{badge, cards, message, reason, tree},
};
use vitivirt_runtime::{
    program::Context,
    server::Bind,
    watch::{Entry, SyncState},
};

use crate::{
    cache::{Caches, MachineEntry},
    controller::MachineController,
};

const PROGRAM: PageHeader = PageHeader {
    name: "kubevirt-operator",
    version: env!("CARGO_PKG_VERSION"),
    links: &[("/", "Overview"), ("/machines", "Machines")],
};
/// The rows of the list.
const MOST_ROWS: usize = 500;
/// The rows of each part of the overview.
const OVERVIEW_ROWS: usize = 50;
/// Slower than the other pages, so that a filter can be typed.
const LIST_REFRESH: std::time::Duration = std::time::Duration::from_secs(30);

pub(crate) async fn start(context: &Context, bind: Option<Bind>, machines: &Arc<MachineController>) {
    vitivirt_page::start(context, bind, PROGRAM, MachinePages { machines: machines.clone() }).await;
}

struct MachinePages {
    machines: Arc<MachineController>,
}

impl Pages for MachinePages {
    fn page(&self, request: &PageRequest<'_>, _: &Replica) -> Option<Page> {
        #[expect(clippy::disallowed_methods, reason = "the page shows ages")]
        let now = Timestamp::now().as_second();
        match request.segments.as_slice() {
            [] => Some(self.overview(now)),
            ["machines"] => Some(self.list(&Filter::new(request), now)),
            ["machines", namespace, name] => self.machine(&ObjectKey::namespaced(namespace, name)),
            _ => None,
        }
    }
}

/// Which Machines the list shows.
#[derive(Debug, PartialEq, Eq)]
struct Filter {
    namespace: String,
    phase: String,
    /// A part of the name.
    text: String,
}

impl Filter {
    fn new(request: &PageRequest<'_>) -> Self {
        let parameter = |name: &str| request.parameter(name).to_owned();
        Self { namespace: parameter("namespace"), phase: parameter("phase"), text: parameter("q").to_lowercase() }
    }

    fn matches(&self, key: &ObjectKey, entry: &MachineEntry) -> bool {
        (self.namespace.is_empty() || key.namespace() == Some(&self.namespace))
            && (self.phase.is_empty() || entry.phase.as_str() == self.phase)
            && key.name().contains(&self.text)
    }
}

type Machine = (ObjectKey, Entry<MachineEntry>);

/// The first rows of a list, and how many there are.
struct Rows {
    first: Vec<MachineRow>,
    total: usize,
}

impl MachinePages {
    fn caches(&self) -> &Caches {
        &self.machines.observer.caches
    }

    fn overview(&self, now: i64) -> Page {
        let all = self.caches().machines.entries();
        let select = |matches: &dyn Fn(&MachineEntry) -> bool| {
            let mut selected: Vec<&Machine> = all.iter().filter(|(_, entry)| matches(&entry.value)).collect();
            selected.sort_by_key(|(key, entry)| (entry.value.created, key));
            rows(&selected, OVERVIEW_ROWS)
        };
        let not_ready = select(&|entry| !entry.ready && !entry.deleting);
        let rejected = select(&|entry| entry.changes_rejected && !entry.deleting);
        let restart = select(&|entry| entry.restart_required && !entry.deleting);
        let deleting = select(&|entry| entry.deleting);
        let count = |phase: MachinePhase| all.iter().filter(|(_, entry)| entry.value.phase == phase).count();
        let phases = MachinePhase::ALL.iter().filter(|phase| **phase != MachinePhase::Unknown);
        let phases = phases.map(|phase| {
            let link = format!("/machines?phase={phase}");
            (phase.as_str(), html! { a href=(link) { (count(*phase)) } })
        });
        let total = ("Machines", html! { a href="/machines" { (all.len()) } });
        let body = html! {
            (cards([total].into_iter().chain(phases)))
            h2 { "Not ready (" (not_ready.total) ")" }
            (problems(&not_ready, now, "Every Machine is ready."))
            @if deleting.total > 0 { h2 { "Being deleted (" (deleting.total) ")" } (problems(&deleting, now, "")) }
            @if rejected.total > 0 {
                h2 { "Changes rejected (" (rejected.total) ")" }
                (changes(&rejected, |row| row.changes_rejected.as_deref()))
            }
            @if restart.total > 0 {
                h2 { "Restart required (" (restart.total) ")" }
                (changes(&restart, |row| row.restart_required.as_deref()))
            }
            h2 { "Cluster" }
            (self.cluster())
        };
        Page { title: "Machines of this cluster".to_owned(), refresh: REFRESH, body }
    }

    fn cluster(&self) -> Markup {
        let caches = self.caches();
        let installed = self.machines.observer.installed();
        let component = |is: bool, needed: &str| match is {
            true => badge(StepState::Ok, "found"),
            false => html! { (badge(StepState::Unknown, "not found")) " " span class="soft" { (needed) } },
        };
        let synced = caches.machines.sync_state() != SyncState::Pending;
        html! {
            dl {
                dt { "KubeVirt" } dd { (component(installed.kubevirt, "no Machine can run without it")) }
                dt { "Multus" } dd { (component(installed.multus, "needed by Machines with a NetworkConfiguration")) }
                dt { "CDI" } dd { (component(installed.cdi, "needed by disks with an http or registry source")) }
                dt { "cache of Machines" }
                dd { @if synced { (badge(StepState::Ok, "synced")) } @else { (badge(StepState::Waiting, "is being filled")) } }
            }
        }
    }

    fn list(&self, filter: &Filter, now: i64) -> Page {
        let all = self.caches().machines.entries();
        let mut matching: Vec<&Machine> = all.iter().filter(|(key, entry)| filter.matches(key, &entry.value)).collect();
        matching.sort_by_key(|(key, _)| key);
        let rows = rows(&matching, MOST_ROWS);
        let body = html! {
            (filter_form(filter))
            p class="soft" {
                @if rows.total > rows.first.len() {
                    "The first " (rows.first.len()) " of " (rows.total) " Machines. Use the filter to see others."
                } @else { (rows.total) " Machines" }
            }
            (list_table(&rows.first, now))
        };
        Page { title: "Machines".to_owned(), refresh: LIST_REFRESH, body }
    }

    fn machine(&self, key: &ObjectKey) -> Option<Page> {
        let observed = self.machines.observer.cached(key).ok()??;
        let row = MachineRow::new(&observed.machine);
        let body = html! {
            p { (state(&row)) @if !row.ready && !row.reason.is_empty() { " " (reason(&row.reason)) } }
            @if let Some(diagnosis) = &row.diagnosis { p { (message(diagnosis)) } }
            (tree(&machine_tree(&observed, None)))
        };
        Some(Page { title: format!("Machine {}/{}", row.namespace, row.name), refresh: REFRESH, body })
    }
}

/// Only the rows that are shown are decompressed.
fn rows(machines: &[&Machine], most: usize) -> Rows {
    let total = machines.len();
    let machines = machines.iter().take(most);
    let machines = machines.filter_map(|(_, entry)| entry.value.machine(&entry.resource_version).ok());
    Rows { first: machines.map(|machine| MachineRow::new(&machine)).collect(), total }
}

fn link(row: &MachineRow) -> Markup {
    html! { a href={ "/machines/" (row.namespace) "/" (row.name) } { (row.namespace) "/" (row.name) } }
}

fn state(row: &MachineRow) -> Markup {
    let state = match row.ready {
        true => StepState::Ok,
        false if machine_reason::ERRORS.contains(&row.reason.as_str()) => StepState::Failed,
        false => StepState::Waiting,
    };
    badge(state, row.phase)
}

/// The Machines that need attention.
fn problems(rows: &Rows, now: i64, none: &str) -> Markup {
    if rows.total == 0 {
        return html! { p { (none) } };
    }
    html! {
        table {
            thead { tr { th { "Machine" } th { "phase" } th { "reason" } th { "diagnosis" } th { "age" } } }
            tbody {
                @for row in &rows.first {
                    tr {
                        td data-label="Machine" { (link(row)) }
                        td data-label="phase" { (state(row)) }
                        td data-label="reason" { @if !row.reason.is_empty() { (reason(&row.reason)) } }
                        td data-label="diagnosis" { (message(row.diagnosis.as_deref().unwrap_or_default())) }
                        td data-label="age" { (age(now - row.created)) }
                    }
                }
            }
        }
        (more(rows))
    }
}

fn changes(rows: &Rows, of: impl Fn(&MachineRow) -> Option<&str>) -> Markup {
    html! {
        table {
            thead { tr { th { "Machine" } th { "change" } } }
            tbody {
                @for row in &rows.first {
                    tr {
                        td data-label="Machine" { (link(row)) }
                        td data-label="change" { (of(row).unwrap_or_default()) }
                    }
                }
            }
        }
        (more(rows))
    }
}

fn more(rows: &Rows) -> Markup {
    let hidden = rows.total.saturating_sub(rows.first.len());
    html! { @if hidden > 0 { p class="soft" { "and " (hidden) " more" } } }
}

fn filter_form(filter: &Filter) -> Markup {
    html! {
        form method="get" action="/machines" {
            label { "namespace" input name="namespace" value=(filter.namespace); }
            label {
                "phase"
                select name="phase" {
                    option value="" { "all" }
                    @for phase in MachinePhase::ALL.iter().filter(|phase| **phase != MachinePhase::Unknown) {
                        option value=(phase.as_str()) selected[filter.phase == phase.as_str()] { (phase.as_str()) }
                    }
                }
            }
            label { "name contains" input name="q" value=(filter.text); }
            button { "Filter" }
        }
    }
}

fn list_table(rows: &[MachineRow], now: i64) -> Markup {
    let resources = |row: &MachineRow| {
        let resources = row.cpu.zip(row.memory.as_ref());
        resources.map(|(cpu, memory)| format!("{}, {memory}", cpus(cpu))).unwrap_or_default()
    };
    html! {
        table {
            thead {
                tr {
                    th { "Machine" } th { "phase" } th { "reason" } th { "resources" } th { "node" } th { "addresses" }
                    th { "age" }
                }
            }
            tbody {
                @for row in rows {
                    tr {
                        td data-label="Machine" { (link(row)) }
                        td data-label="phase" { (state(row)) @if row.deleting { " is being deleted" } }
                        td data-label="reason" { @if row.ready { (row.reason) } @else { (reason(&row.reason)) } }
                        td data-label="resources" { (resources(row)) }
                        td data-label="node" { (row.node.as_deref().unwrap_or_default()) }
                        td data-label="addresses" { (row.addresses.join(", ")) }
                        td data-label="age" { (age(now - row.created)) }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
