//! `list` and `describe`.

use std::{process::ExitCode, time::SystemTime};

use anyhow::Context;
use kube::{Api, api::ListParams};
use serde::Serialize;
use vitivirt_api::{machine::Machine, troubleshooting_url, view::age};
use vitivirt_cli::{CommandResult, print, table_text, to_yaml, tree_text};
use vitivirt_machine::view::MachineRow;

use crate::{
    arguments::{DescribeArguments, Format, ListArguments},
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
        Format::Text if rows.is_empty() && !arguments.all_namespaces => {
            eprintln!("No Machines found in namespace {}.", cluster.namespace);
            return Ok(ExitCode::SUCCESS);
        }
        Format::Text => list_text(&rows, arguments.all_namespaces, now()),
        format => document(&rows, format)?,
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
        Format::Text => tree_text(&description.tree),
        format => document(&description.tree, format)?,
    };
    if arguments.output == Format::Text {
        if !row.ready && !row.reason.is_empty() {
            text.push_str(&format!("\nMore about {}: {}\n", row.reason, troubleshooting_url(&row.reason)));
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

fn document<T: Serialize>(value: &T, format: Format) -> anyhow::Result<String> {
    let value = serde_json::to_value(value).context("writing JSON")?;
    match format {
        Format::Yaml => to_yaml(&[value]),
        Format::Json | Format::Text => Ok(format!("{}\n", serde_json::to_string_pretty(&value)?)),
    }
}

fn list_text(rows: &[MachineRow], with_namespace: bool, now: i64) -> String {
    let titles = ["NAMESPACE", "NAME", "PHASE", "READY", "REASON", "CPU", "MEMORY", "NODE", "ADDRESSES", "AGE"];
    let row = |row: &MachineRow| {
        let restart = if row.restart_required.is_some() { " (restart required)" } else { "" };
        vec![
            row.namespace.clone(),
            row.name.clone(),
            if row.deleting { "Deleting".to_owned() } else { row.phase.to_owned() },
            if row.ready { "True" } else { "False" }.to_owned(),
            format!("{}{restart}", row.reason),
            row.cpu.map(|cpu| cpu.to_string()).unwrap_or_default(),
            row.memory.clone().unwrap_or_default(),
            row.node.clone().unwrap_or_default(),
            row.addresses.join(","),
            age(now - row.created),
        ]
    };
    let skipped = usize::from(!with_namespace);
    let rows: Vec<Vec<String>> = rows.iter().map(|of| row(of).into_iter().skip(skipped).collect()).collect();
    table_text(titles.get(skipped..).unwrap_or_default(), &rows)
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
            "spec": {}, "status": {"phase": "Running"},
        }))
        .unwrap();
        let rows = [MachineRow::new(&machine)];
        let now = 1_767_225_600 + 90;
        assert!(list_text(&rows, false, now).starts_with("NAME   PHASE     READY"), "{}", list_text(&rows, false, now));
        let all = list_text(&rows, true, now);
        assert!(all.starts_with("NAMESPACE   NAME   PHASE") && all.ends_with("1m30s\n"), "{all}");
    }
}
