//! The figures of installations as a table: medians, ratios and targets.

use std::collections::{BTreeMap, BTreeSet};

use super::install::{InstallRun, MeasuredOperator};

const SECONDS: f64 = 5.0;
const RATIO: f64 = 5.0;
const MEMORY_MB: f64 = 30.0;
const ADDITIONAL_REQUESTS: f64 = 25.0;

pub(super) fn name(operator: MeasuredOperator) -> &'static str {
    match operator {
        MeasuredOperator::Ours => "ours",
        MeasuredOperator::Reference => "reference v1.8.4",
    }
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
    let mut lines =
        vec![format!("{:<34} {:>10} {:>10} {:>8}  {:<22} {}", "median", "ours", "reference", "ratio", "target", "met")];
    lines.extend(rows(runs).iter().map(format_row));
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

fn rows(runs: &[InstallRun]) -> Vec<Row> {
    let row =
        |what: &str, figure: fn(&InstallRun) -> f64, target: String, is_met: &dyn Fn(f64, Option<f64>) -> bool| {
            let (ours, reference) = medians(runs, figure);
            Row { what: what.to_owned(), ours, reference, target, met: ours.map(|ours| is_met(ours, reference)) }
        };
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
        row("idle, per minute: lease", |run| run.per_minute(run.idle.lease), String::new(), &always),
        row("idle, per minute: watches", |run| run.per_minute(run.idle.watches), String::new(), &always),
        row(
            "idle, per minute: others",
            |run| run.per_minute(run.idle.others.values().sum()),
            "none".to_owned(),
            &|ours, _| ours == 0.0,
        ),
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
    fn per_minute(&self, count: usize) -> f64 {
        count as f64 * 60.0 / self.idle.seconds as f64
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
    for (what, count) in runs.iter().filter(|run| run.operator == operator).flat_map(|run| &run.idle.others) {
        *sums.entry(what.as_str()).or_default() += count;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::{super::install::IdleRequests, *};

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
            seconds_to_deployed: seconds,
            peak_memory_mb: memory,
            requests_to_deployed: requests,
            objects: 205,
            processor_seconds: [("kube-apiserver".to_owned(), seconds), ("idler".to_owned(), 0.01)].into(),
            idle: IdleRequests { seconds: 30, lease: 15, watches: 0, others: other_requests.into_iter().collect() },
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
        let rows = rows(&runs);
        let met: Vec<_> = rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(true), Some(true), Some(true), Some(true), Some(true), Some(true)]);
        assert_eq!(rows.first().and_then(|row| row.ours), Some(4.5));
        assert_eq!(rows.get(3).and_then(|row| row.reference), Some(30.0));
        let text = table(&runs);
        assert!(text.contains("1/5.8") && text.contains("70 × patch services"), "{text}");
        assert!(text.contains("  kube-apiserver") && !text.contains("idler"), "{text}");
    }

    #[test]
    fn missed_targets_are_marked() {
        let runs =
            [run(MeasuredOperator::Ours, 6.0, 31.0, 231, 2), run(MeasuredOperator::Reference, 26.0, 250.0, 400, 0)];
        let missed = rows(&runs).iter().filter(|row| row.met == Some(false)).count();
        assert_eq!(missed, 4);
        assert_eq!(median([1.0, 2.0].into_iter()), Some(1.5));
        assert_eq!(median(std::iter::empty()), None);
    }
}
