//! docs/metrics.md: every metric of both programs, with type, labels and meaning, as the programs export it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::PAGE_HEADER;

/// A metric as a program describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MetricDescription {
    pub(super) kind: String,
    help: String,
    labels: Vec<String>,
}

/// The metrics of an exposition in OpenMetrics, by the name that queries use. Histograms have the name without suffix.
pub(super) fn descriptions(open_metrics: &str) -> BTreeMap<String, MetricDescription> {
    let mut metrics = BTreeMap::new();
    let mut help = String::new();
    let mut current = String::new();
    for line in open_metrics.lines() {
        if let Some((_, text)) = line.strip_prefix("# HELP ").and_then(|line| line.split_once(' ')) {
            help = text.trim_end_matches('.').to_owned();
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            current = format!("{name}{suffix}");
            let description = MetricDescription { kind: kind.to_owned(), help: help.clone(), labels: Vec::new() };
            metrics.insert(current.clone(), description);
        } else if let (Some(metric), false) = (metrics.get_mut(&current), line.starts_with('#')) {
            metric.labels = label_names(line);
        }
    }
    metrics
}

/// The labels of a sample, without the bound of a bucket. Values of samples contain no commas.
fn label_names(sample: &str) -> Vec<String> {
    let labels = sample.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
    let names = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
    names.filter(|name| name != "le").collect()
}

pub(super) fn of_both_programs() -> Result<[(&'static str, BTreeMap<String, MetricDescription>); 2]> {
    let machine = kubevirt_operator::metric_samples().context("encoding the metrics of kubevirt-operator")?;
    let installation = virt_operator::metric_samples().context("encoding the metrics of virt-operator")?;
    Ok([("kubevirt-operator", descriptions(&machine)), ("virt-operator", descriptions(&installation))])
}

pub(super) fn page() -> Result<String> {
    let mut text = format!(
        "{PAGE_HEADER}# Metrics\n\nWhat both operators export at `/metrics`. A histogram has the series `_bucket`, `_sum` and \
         `_count`. How to scrape them:\n[Monitoring](monitoring.md).\n"
    );
    for (program, metrics) in of_both_programs()? {
        text.push_str(&format!("\n## {program}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"));
        for (name, MetricDescription { kind, help, labels }) in metrics {
            let labels = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            text.push_str(&format!("| `{name}` | {kind} | {labels} | {help} |\n"));
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitoring::{alerts::Alerts, dashboards::Dashboards};

    #[test]
    fn descriptions_have_the_names_types_and_labels_of_the_series() {
        let text = "# HELP a Things.\n# TYPE a counter\na_total{x=\"1\",y=\"2\"} 1\n# HELP b Time.\n# TYPE b histogram\n\
                    b_sum{x=\"\"} 0\nb_bucket{le=\"+Inf\",x=\"\"} 1\n# EOF\n";
        let metric = |kind: &str, help: &str, labels: &[&str]| MetricDescription {
            kind: kind.to_owned(),
            help: help.to_owned(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        };
        let expected = [
            ("a_total".to_owned(), metric("counter", "Things", &["x", "y"])),
            ("b".to_owned(), metric("histogram", "Time", &["x"])),
        ];
        assert_eq!(descriptions(text), expected.into());
    }

    /// The words of an expression that are names of series of our operators.
    fn own_series(expression: &str) -> impl Iterator<Item = &str> {
        let words = expression.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        words.filter(|word| {
            ["kubevirt_operator_", "virt_operator_", "kubevirt_virt_operator_"]
                .iter()
                .any(|prefix| word.starts_with(prefix))
        })
    }

    #[test]
    fn alerts_and_dashboards_query_only_series_that_the_operators_export() {
        let mut exported = Vec::new();
        for (name, metric) in of_both_programs().unwrap().into_iter().flat_map(|(_, metrics)| metrics) {
            match metric.kind.as_str() {
                "histogram" => exported.extend(["bucket", "sum", "count"].map(|suffix| format!("{name}_{suffix}"))),
                _ => exported.push(name),
            }
        }
        let alerts = Alerts::read().unwrap().programs.into_iter().flat_map(|program| program.alerts);
        let dashboards = Dashboards::read().unwrap();
        let expressions = alerts.map(|alert| alert.expr).chain(dashboards.expressions().map(str::to_owned));
        let mut checked = 0;
        for expression in expressions {
            for series in own_series(&expression) {
                assert!(exported.iter().any(|name| name == series), "{series} is not exported: {expression}");
                checked += 1;
            }
        }
        assert!(checked > 40, "only {checked} series were found");
    }
}
