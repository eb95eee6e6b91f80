//! The dashboards of `dashboards.yaml` as JSON that Grafana imports.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{parse, yaml_file};

/// The version of Grafana's dashboard schema that the JSON follows: Grafana 10 and newer.
const SCHEMA_VERSION: u32 = 39;
const COLUMNS: u32 = 24;
const CONFIG: &str = "config/prometheus/dashboards";

#[derive(Deserialize)]
pub(super) struct Dashboards {
    dashboards: Vec<Dashboard>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dashboard {
    file: String,
    uid: String,
    title: String,
    description: String,
    panels: Vec<Panel>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Panel {
    title: String,
    #[serde(default)]
    description: String,
    kind: PanelKind,
    width: u32,
    #[serde(default)]
    unit: Option<String>,
    /// Red above this value.
    #[serde(default)]
    alarm_above: Option<f64>,
    #[serde(default)]
    stack: bool,
    queries: Vec<Query>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PanelKind {
    Stat,
    Timeseries,
}

impl PanelKind {
    fn name(self) -> &'static str {
        match self {
            Self::Stat => "stat",
            Self::Timeseries => "timeseries",
        }
    }

    fn height(self) -> u32 {
        match self {
            Self::Stat => 4,
            Self::Timeseries => 8,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    expr: String,
    #[serde(default)]
    legend: String,
}

impl Dashboards {
    pub(super) fn read() -> Result<Self> {
        parse("dashboards.yaml", include_str!("dashboards.yaml"))
    }

    #[cfg(test)]
    pub(super) fn expressions(&self) -> impl Iterator<Item = &str> {
        let panels = self.dashboards.iter().flat_map(|dashboard| &dashboard.panels);
        panels.flat_map(|panel| &panel.queries).map(|query| query.expr.as_str())
    }
}

/// Grafana replaces it by the data source that the user chooses on the dashboard.
fn data_source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

impl Dashboard {
    fn json(&self) -> Value {
        let (mut x, mut y, mut row_height) = (0, 0, 0);
        let mut panels = Vec::new();
        for (panel, id) in self.panels.iter().zip(1_u32..) {
            if x + panel.width > COLUMNS {
                (x, y, row_height) = (0, y + row_height, 0);
            }
            let height = panel.kind.height();
            panels.push(panel.json(id, &json!({"x": x, "y": y, "w": panel.width, "h": height})));
            x += panel.width;
            row_height = row_height.max(height);
        }
        json!({
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["kubevirt", "vitivirt"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": true,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [{
                "name": "datasource",
                "label": "Data source",
                "type": "datasource",
                "query": "prometheus",
                "hide": 0,
                "refresh": 1,
            }]},
            "panels": panels,
        })
    }
}

impl Panel {
    fn json(&self, id: u32, place: &Value) -> Value {
        let mut steps = vec![json!({"color": "green", "value": null})];
        steps.extend(self.alarm_above.map(|value| json!({"color": "red", "value": value + f64::EPSILON})));
        let mut defaults = Map::new();
        defaults.insert("unit".to_owned(), json!(self.unit.as_deref().unwrap_or("short")));
        defaults.insert("thresholds".to_owned(), json!({"mode": "absolute", "steps": steps}));
        let targets = self.queries.iter().zip('A'..='Z').map(|(query, letter)| {
            json!({"refId": letter, "expr": query.expr, "legendFormat": query.legend, "datasource": data_source()})
        });
        let targets: Vec<Value> = targets.collect();
        let options = match self.kind {
            PanelKind::Stat => {
                json!({"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"], "values": false}})
            }
            PanelKind::Timeseries => {
                let mode = if self.stack { "normal" } else { "none" };
                let fill = if self.stack { 30 } else { 0 };
                let lines = json!({"fillOpacity": fill, "stacking": {"mode": mode, "group": "A"}});
                defaults.insert("custom".to_owned(), lines);
                defaults.insert("min".to_owned(), json!(0));
                json!({"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}})
            }
        };
        json!({
            "id": id,
            "title": self.title,
            "description": self.description,
            "type": self.kind.name(),
            "gridPos": place,
            "datasource": data_source(),
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": options,
        })
    }
}

/// Each dashboard for `config/` and for the chart, and a kustomization that packs them into a ConfigMap with the label
/// that Grafana's sidecar searches for.
pub(super) fn files() -> Result<Vec<(String, String)>> {
    let Dashboards { dashboards } = Dashboards::read()?;
    let names: Vec<String> = dashboards.iter().map(|dashboard| format!("{}.json", dashboard.file)).collect();
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "configMapGenerator": [{
            "name": "vitivirt-dashboards",
            "files": names,
            "options": {"disableNameSuffixHash": true, "labels": {"grafana_dashboard": "1"}},
        }],
    });
    let mut files = vec![(format!("{CONFIG}/Kustomization"), yaml_file(kustomization)?)];
    for (dashboard, name) in dashboards.iter().zip(&names) {
        let text = serde_json::to_string_pretty(&dashboard.json()).context("writing a dashboard")? + "\n";
        files.push((format!("charts/kubevirt-operator/files/dashboards/{name}"), text.clone()));
        files.push((format!("{CONFIG}/{name}"), text));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_do_not_overlap_and_every_query_has_its_letter() {
        for dashboard in Dashboards::read().unwrap().dashboards {
            let json = dashboard.json();
            let mut cells = std::collections::BTreeSet::new();
            for panel in json["panels"].as_array().unwrap() {
                let number = |name: &str| panel["gridPos"][name].as_u64().unwrap();
                assert!(number("x") + number("w") <= u64::from(COLUMNS), "{panel}");
                for x in number("x")..number("x") + number("w") {
                    for y in number("y")..number("y") + number("h") {
                        assert!(cells.insert((x, y)), "{} overlaps another panel", panel["title"]);
                    }
                }
                let letters: Vec<&str> = panel["targets"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|target| target["refId"].as_str().unwrap())
                    .collect();
                assert!(!letters.is_empty() && letters.is_sorted() && letters[0] == "A", "{panel}");
            }
        }
    }
}
