//! `list` and `describe`.

use std::{process::ExitCode, time::SystemTime};

use anyhow::Context;
use kube::{Api, api::ListParams};
use serde::Serialize;
use vitivirt_api::{machine::Machine, troubleshooting_url, view::age};
use vitivirt_cli::{CommandResult, PlanFormat, print, table_text, to_yaml, tree_text};
use vitivirt_machine::view::MachineRow;

use crate::{
    arguments::{DescribeArguments, ListArguments, ListFormat},
    cluster::NamespaceClient,
};

const PAGE: u32 = 500;

pub(crate) async fn list(arguments: &ListArguments) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    let api: Api<Machine> = match arguments.all_namespaces {
        true => Api::all(cluster.client.clone()),
        false => cluster.machines(),
    };
    let mut rows = Vec::new();
    let mut parameters = ListParams::default().limit(PAGE);
    loop {
        let list = api.list(&parameters).await.map_err(|error| cluster.error(&error, "list", "*"))?;
        rows.extend(list.items.iter().map(MachineRow::new));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => break,
        }
    }
    let text = match arguments.output {
        ListFormat::Text | ListFormat::Wide if rows.is_empty() && !arguments.all_namespaces => {
            eprintln!("No Machines found in namespace {}.", cluster.namespace);
            return Ok(ExitCode::SUCCESS);
        }
        format @ (ListFormat::Text | ListFormat::Wide) => {
            list_text(&rows, arguments.all_namespaces, format == ListFormat::Wide, now())
        }
        ListFormat::Json => document(&rows, PlanFormat::Json)?,
        ListFormat::Yaml => document(&rows, PlanFormat::Yaml)?,
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn describe(arguments: &DescribeArguments) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    let machine = cluster.machine(&arguments.name).await?;
    let row = MachineRow::new(&machine);
    let description = kubevirt_operator::plugin::describe(cluster.client, machine).await?;
    let mut text = match arguments.output {
        PlanFormat::Text => tree_text(&description.tree),
        format => document(&description.tree, format)?,
    };
    if arguments.output == PlanFormat::Text {
        let url = troubleshooting_url(&row.reason);
        // The diagnosis of an error contains it.
        if !row.ready && !row.reason.is_empty() && !text.contains(&url) {
            text.push_str(&format!("\nMore about {}: {url}\n", row.reason));
        }
        if !description.adoptable.is_empty() {
            let (namespace, name) = (&row.namespace, &row.name);
            text.push_str(&format!(
                "\nTo adopt the objects that block it: kubectl vmachine adopt {name} -n {namespace}\n"
            ));
        }
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn document<T: Serialize>(value: &T, format: PlanFormat) -> anyhow::Result<String> {
    let value = serde_json::to_value(value).context("writing JSON")?;
    match format {
        PlanFormat::Yaml => to_yaml(&[value]),
        PlanFormat::Json | PlanFormat::Text => Ok(format!("{}\n", serde_json::to_string_pretty(&value)?)),
    }
}

fn list_text(rows: &[MachineRow], with_namespace: bool, is_wide: bool, now: i64) -> String {
    let titles =
        ["NAMESPACE", "NAME", "PHASE", "READY", "REASON", "CPU", "MEMORY", "NODE", "ADDRESSES", "AGE", "DIAGNOSIS"];
    let (first, last) = (usize::from(!with_namespace), titles.len() - usize::from(!is_wide));
    let row = |row: &MachineRow| -> Vec<String> {
        let notes = [
            row.changes_rejected.as_ref().map(|_| " (changes rejected)"),
            row.restart_required.as_ref().map(|_| " (restart required)"),
        ];
        let notes: String = notes.into_iter().flatten().collect();
        let cells = [
            row.namespace.clone(),
            row.name.clone(),
            if row.deleting { "Deleting".to_owned() } else { row.phase.to_owned() },
            if row.ready { "True" } else { "False" }.to_owned(),
            format!("{}{notes}", row.reason),
            row.cpu.map(|cpu| cpu.to_string()).unwrap_or_default(),
            row.memory.clone().unwrap_or_default(),
            row.node.clone().unwrap_or_default(),
            row.addresses.join(","),
            age(now - row.created),
            row.diagnosis.clone().unwrap_or_default(),
        ];
        cells.into_iter().skip(first).take(last - first).collect()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(row).collect();
    table_text(titles.get(first..last).unwrap_or_default(), &rows)
}

#[expect(clippy::disallowed_methods, reason = "the list shows ages")]
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_is_a_column_only_for_all_namespaces() {
        let machine: Machine = serde_json::from_value(serde_json::json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {}, "status": {"phase": "Running", "diagnosis": "the image cannot be pulled"},
        }))
        .unwrap();
        let rows = [MachineRow::new(&machine)];
        let now = 1_767_225_600 + 90;
        let one = list_text(&rows, false, false, now);
        assert!(one.starts_with("NAME   PHASE     READY"), "{one}");
        let all = list_text(&rows, true, false, now);
        assert!(all.starts_with("NAMESPACE   NAME   PHASE") && all.ends_with("1m30s\n"), "{all}");
        let wide = list_text(&rows, true, true, now);
        assert!(wide.contains("DIAGNOSIS\n") && wide.ends_with("1m30s   the image cannot be pulled\n"), "{wide}");
        let json = document(&rows, PlanFormat::Json).unwrap();
        assert!(json.contains(r#""created": "2026-01-01T00:00:00Z""#), "{json}");
    }
}
