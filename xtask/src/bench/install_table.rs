//! The figures of installations as a table: medians, ratios and targets.

use std::collections::{BTreeMap, BTreeSet};

use super::install::{IdleRequests, InstallRun, MeasuredOperator};
use crate::lab_commands::PaceChoice;

const SECONDS: f64 = 5.0;
const RATIO: f64 = 5.0;
const REMOVAL_SECONDS: f64 = 8.0;
const MEMORY_MB: f64 = 30.0;
const ADDITIONAL_REQUESTS: f64 = 25.0;
/// From the readiness of the last pod until Deployed.
const SECONDS_AFTER_READY: f64 = 2.0;

pub(super) fn name(operator: MeasuredOperator) -> &'static str {
    match operator {
        MeasuredOperator::Ours => "ours",
        MeasuredOperator::Reference => "reference v1.8.4",
    }
}

pub(super) fn pace_name(pace: PaceChoice) -> &'static str {
    match pace {
        PaceChoice::Instant => "instant",
        PaceChoice::Quick => "quick",
        PaceChoice::Real => "real",
    }
}

/// What an installation by our operator must not do at any pace, and one of these did. The table compares the figures that
/// depend on the speed of the machine.
pub(super) fn violations(runs: &[InstallRun]) -> Vec<String> {
    let ours = runs.iter().filter(|run| run.operator == MeasuredOperator::Ours);
    ours.flat_map(|run| {
        let mut found = Vec::new();
        let late = run.seconds_to_deployed - run.seconds_to_ready;
        if late > SECONDS_AFTER_READY {
            found.push(format!("Deployed {late:.1} s after the last ready pod, expected {SECONDS_AFTER_READY} s"));
        }
        if let Some(condition) = &run.degraded {
            found.push(format!("Degraded: {condition}"));
        }
        if run.seconds_to_removed > REMOVAL_SECONDS {
            let seconds = run.seconds_to_removed;
            found.push(format!("removed in {seconds:.1} s, expected {REMOVAL_SECONDS} s"));
        }
        if run.peak_memory_mb > MEMORY_MB {
            found.push(format!("used {:.1} MB of memory, expected {MEMORY_MB} MB", run.peak_memory_mb));
        }
        let idle = run.idle.iter().flat_map(|idle| &idle.others);
        found.extend(idle.map(|(what, count)| format!("idle, but sent {count} × {what}")));
        found.into_iter().map(move |what| format!("installation at pace {}: {what}", pace_name(run.pace)))
    })
    .collect()
}

struct Row {
    what: String,
    ours: Option<f64>,
    reference: Option<f64>,
    target: String,
    /// None if our operator was not measured.
    met: Option<bool>,
}

pub(super) fn table(runs: &[InstallRun]) -> String {
    let mut paces: Vec<PaceChoice> = runs.iter().map(|run| run.pace).collect();
    paces.sort_unstable();
    paces.dedup();
    let of_pace = |pace| {
        let runs: Vec<InstallRun> = runs.iter().filter(|run| run.pace == pace).cloned().collect();
        format!("pace {}\n{}", pace_name(pace), pace_table(&runs, pace))
    };
    paces.into_iter().map(of_pace).collect::<Vec<_>>().join("\n\n")
}

fn pace_table(runs: &[InstallRun], pace: PaceChoice) -> String {
    let mut lines =
        vec![format!("{:<34} {:>10} {:>10} {:>8}  {:<22} {}", "median", "ours", "reference", "ratio", "target", "met")];
    let first_rows = if pace == PaceChoice::Instant { instant_rows(runs) } else { delayed_rows(runs) };
    lines.extend(first_rows.iter().chain(&readiness_rows(runs)).map(format_row));
    for run in runs {
        if let Some(condition) = &run.degraded {
            lines.push(format!("Degraded with {}: {condition}", name(run.operator)));
        }
    }
    lines.push("CPU seconds until Deployed, median:".to_owned());
    lines.extend(cpu_rows(runs).iter().map(format_row));
    for operator in [MeasuredOperator::Ours, MeasuredOperator::Reference] {
        let other_requests = other_requests(runs, operator);
        if !other_requests.is_empty() {
            lines.push(format!("idle requests of {}, in all runs:", name(operator)));
            lines.extend(other_requests.iter().map(|(what, count)| format!("{count:>8} × {what}")));
        }
    }
    lines.join("\n")
}

/// When pods were really ready, and whether the KubeVirt resource was Degraded.
fn readiness_rows(runs: &[InstallRun]) -> Vec<Row> {
    let degraded = |operator: MeasuredOperator| {
        let runs: Vec<&InstallRun> = runs.iter().filter(|run| run.operator == operator).collect();
        (!runs.is_empty()).then(|| runs.iter().filter(|run| run.degraded.is_some()).count() as f64)
    };
    let (ours, reference) = (degraded(MeasuredOperator::Ours), degraded(MeasuredOperator::Reference));
    vec![
        row(runs, "seconds to the last ready pod", |run| run.seconds_to_ready, String::new(), &|_, _| true),
        row(
            runs,
            "seconds from there to Deployed",
            |run| run.seconds_to_deployed - run.seconds_to_ready,
            format!("≤ {SECONDS_AFTER_READY}"),
            &|ours, _| ours <= SECONDS_AFTER_READY,
        ),
        Row {
            what: "runs with Degraded".to_owned(),
            ours,
            reference,
            target: "none".to_owned(),
            met: ours.map(|ours| ours == 0.0),
        },
    ]
}

fn row(
    runs: &[InstallRun],
    what: &str,
    figure: fn(&InstallRun) -> f64,
    target: String,
    is_met: &dyn Fn(f64, Option<f64>) -> bool,
) -> Row {
    let (ours, reference) = medians(runs, figure);
    Row { what: what.to_owned(), ours, reference, target, met: ours.map(|ours| is_met(ours, reference)) }
}

fn delayed_rows(runs: &[InstallRun]) -> Vec<Row> {
    let row = |what: &str, figure: fn(&InstallRun) -> f64| {
        row(runs, what, figure, "≤ reference".to_owned(), &|ours, reference| {
            reference.is_none_or(|reference| ours <= reference)
        })
    };
    vec![
        row("seconds to Deployed", |run| run.seconds_to_deployed),
        row("seconds to remove it", |run| run.seconds_to_removed),
    ]
}

/// The cost of an installation. Delays would hide it.
fn instant_rows(runs: &[InstallRun]) -> Vec<Row> {
    let row = |what: &str,
               figure: fn(&InstallRun) -> f64,
               target: String,
               is_met: &dyn Fn(f64, Option<f64>) -> bool| { row(runs, what, figure, target, is_met) };
    let objects = median(runs.iter().map(|run| run.objects as f64)).unwrap_or_default();
    let max_requests = objects + ADDITIONAL_REQUESTS;
    let always = |_: f64, _: Option<f64>| true;
    vec![
        row(
            "seconds to Deployed",
            |run| run.seconds_to_deployed,
            "≤ 5 and ≤ 1/5".to_owned(),
            &|ours, reference| ours <= SECONDS && reference.is_none_or(|reference| ours <= reference / RATIO),
        ),
        row("peak memory, MB", |run| run.peak_memory_mb, format!("≤ {MEMORY_MB}"), &|ours, _| ours <= MEMORY_MB),
        row(
            "requests to Deployed",
            |run| run.requests_to_deployed as f64,
            format!("≤ {objects} objects + {ADDITIONAL_REQUESTS}"),
            &|ours, _| ours <= max_requests,
        ),
        row("idle, per minute: lease", |run| run.idle_per_minute(|idle| idle.lease), String::new(), &always),
        row("idle, per minute: watches", |run| run.idle_per_minute(|idle| idle.watches), String::new(), &always),
        row(
            "idle, per minute: others",
            |run| run.idle_per_minute(|idle| idle.others.values().sum()),
            "none".to_owned(),
            &|ours, _| ours == 0.0,
        ),
        row("seconds to remove it", |run| run.seconds_to_removed, format!("≤ {REMOVAL_SECONDS}"), &|ours, _| {
            ours <= REMOVAL_SECONDS
        }),
    ]
}

/// One row per program that used at least 0.1 s of CPU time, and their sum.
fn cpu_rows(runs: &[InstallRun]) -> Vec<Row> {
    let programs: BTreeSet<&String> = runs.iter().flat_map(|run| run.processor_seconds.keys()).collect();
    let row = |what: &str, figure: &dyn Fn(&InstallRun) -> f64| {
        let (ours, reference) = medians(runs, figure);
        Row { what: format!("  {what}"), ours, reference, target: String::new(), met: None }
    };
    let mut rows: Vec<Row> = programs
        .into_iter()
        .map(|program| row(program, &|run| run.processor_seconds.get(program).copied().unwrap_or_default()))
        .filter(|row| [row.ours, row.reference].into_iter().flatten().any(|seconds| seconds >= 0.1))
        .collect();
    rows.push(row("total", &|run| run.processor_seconds.values().sum()));
    rows
}

/// The medians of our operator and of the reference operator, if they were measured.
fn medians(runs: &[InstallRun], figure: impl Fn(&InstallRun) -> f64) -> (Option<f64>, Option<f64>) {
    let median_of =
        |operator: MeasuredOperator| median(runs.iter().filter(|run| run.operator == operator).map(&figure));
    (median_of(MeasuredOperator::Ours), median_of(MeasuredOperator::Reference))
}

impl InstallRun {
    fn idle_per_minute(&self, count: fn(&IdleRequests) -> usize) -> f64 {
        self.idle.as_ref().map_or(0.0, |idle| count(idle) as f64 * 60.0 / idle.seconds as f64)
    }
}

fn format_row(row: &Row) -> String {
    let number = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.1}"));
    let ratio = match (row.ours, row.reference) {
        (Some(ours), Some(reference)) if ours > 0.0 => format!("1/{:.1}", reference / ours),
        _ => "–".to_owned(),
    };
    let met = match row.met {
        _ if row.target.is_empty() => "",
        Some(true) => "yes",
        Some(false) => "NO",
        None => "–",
    };
    let (ours, reference) = (number(row.ours), number(row.reference));
    format!("{:<34} {ours:>10} {reference:>10} {ratio:>8}  {:<22} {met}", row.what, row.target)
}

fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    let upper = *figures.get(middle)?;
    if figures.len().is_multiple_of(2) {
        figures.get(middle - 1).map(|lower| f64::midpoint(*lower, upper))
    } else {
        Some(upper)
    }
}

/// The requests of the idle operator that are neither leases nor watches, by verb and resource.
fn other_requests(runs: &[InstallRun], operator: MeasuredOperator) -> BTreeMap<&str, usize> {
    let mut sums = BTreeMap::new();
    let idle = runs.iter().filter(|run| run.operator == operator).filter_map(|run| run.idle.as_ref());
    for (what, count) in idle.flat_map(|idle| &idle.others) {
        *sums.entry(what.as_str()).or_default() += count;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(
        operator: MeasuredOperator,
        seconds: f64,
        memory: f64,
        requests: usize,
        other_requests: usize,
    ) -> InstallRun {
        let other_requests = (other_requests > 0).then(|| ("patch services".to_owned(), other_requests));
        InstallRun {
            operator,
            pace: PaceChoice::Instant,
            seconds_to_deployed: seconds,
            seconds_to_ready: seconds - 1.0,
            degraded: None,
            peak_memory_mb: memory,
            requests_to_deployed: requests,
            objects: 205,
            seconds_to_removed: seconds,
            processor_seconds: [("kube-apiserver".to_owned(), seconds), ("idler".to_owned(), 0.01)].into(),
            idle: Some(IdleRequests {
                seconds: 30,
                lease: 15,
                watches: 0,
                others: other_requests.into_iter().collect(),
            }),
        }
    }

    #[test]
    fn medians_are_compared_with_the_targets() {
        let runs = [
            run(MeasuredOperator::Ours, 4.0, 20.0, 230, 0),
            run(MeasuredOperator::Ours, 9.0, 40.0, 231, 0),
            run(MeasuredOperator::Ours, 4.5, 21.0, 229, 1),
            run(MeasuredOperator::Reference, 26.0, 250.0, 400, 70),
        ];
        let rows = instant_rows(&runs);
        let met: Vec<_> = rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(true); 7]);
        assert_eq!(rows.first().and_then(|row| row.ours), Some(4.5));
        assert_eq!(rows.get(3).and_then(|row| row.reference), Some(30.0));
        let text = table(&runs);
        assert!(text.contains("1/5.8") && text.contains("70 × patch services"), "{text}");
        assert!(text.contains("  kube-apiserver") && !text.contains("idler"), "{text}");
    }

    #[test]
    fn each_pace_has_its_own_table() {
        let instant = run(MeasuredOperator::Ours, 4.0, 20.0, 230, 0);
        let slow = InstallRun {
            pace: PaceChoice::Real,
            seconds_to_ready: 30.0,
            degraded: Some("DeploymentFailed: connection refused".to_owned()),
            idle: None,
            ..run(MeasuredOperator::Ours, 40.0, 20.0, 230, 0)
        };
        let met: Vec<_> = readiness_rows(std::slice::from_ref(&slow)).iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(true), Some(false), Some(false)], "10 s after the last pod, and Degraded");
        let found = violations(&[slow.clone(), instant.clone()]);
        assert_eq!(found.len(), 3, "late, Degraded and a slow removal: {found:?}");
        assert!(found.iter().all(|line| line.starts_with("installation at pace real: ")), "{found:?}");
        let text = table(&[slow, instant]);
        let (first, second) = text.split_once("pace real").unwrap();
        assert!(first.contains("pace instant") && first.contains("idle") && !first.contains("refused"), "{text}");
        assert!(second.contains("connection refused") && !second.contains("idle"), "{text}");
    }

    #[test]
    fn missed_targets_are_marked() {
        let runs =
            [run(MeasuredOperator::Ours, 6.0, 31.0, 231, 2), run(MeasuredOperator::Reference, 26.0, 250.0, 400, 0)];
        let missed = instant_rows(&runs).iter().filter(|row| row.met == Some(false)).count();
        assert_eq!(missed, 4);
        let found = violations(&runs);
        assert_eq!(found.len(), 2, "memory, and requests when idle: {found:?}");
        assert_eq!(median([1.0, 2.0].into_iter()), Some(1.5));
        assert_eq!(median(std::iter::empty()), None);
    }
}
