//! What a Machine costs on clusters whose storage, pods and guests need time: the writes of its creation and of its
//! deletion, counted in the audit log, and the requests of an operator that is at rest.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use futures::FutureExt;
use serde_json::json;
use vitivirt_api::machine::Machine;
use vitivirt_lab::{
    KubeVirtInstaller, Lab, LabOptions, Pace, Record,
    harness::{SharedLabs, Suite},
};

use crate::machine_test::{MachineTest, machine, operator_user, phase, run_concurrently};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_machine_is_cheap_at_a_quick_pace,
        a_machine_is_cheap_at_the_real_pace,
        kinds_that_are_not_installed_cost_no_requests,
        a_blocked_machine_does_not_read_its_user_data,
    );
}

const MACHINES: [&str; 6] = ["first", "second", "third", "fourth", "fifth", "sixth"];
/// For a guest that boots and stops at the real pace, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(150);

async fn a_machine_is_cheap_at_a_quick_pace(_: Arc<SharedLabs>) -> Result<()> {
    Box::pin(check_cost(Pace::Quick, "cost-quick")).await
}

async fn a_machine_is_cheap_at_the_real_pace(_: Arc<SharedLabs>) -> Result<()> {
    Box::pin(check_cost(Pace::Real, "cost-real")).await
}

async fn check_cost(pace: Pace, namespace: &'static str) -> Result<()> {
    let kubevirt = KubeVirtInstaller::Reference { custom_resource: None };
    // KubeVirt itself starts without delays: only the life of Machines is measured.
    let slow = LabOptions::at(pace);
    let lab =
        Lab::start(LabOptions { kubevirt, pvcs_bind_after: slow.pvcs_bind_after, ..LabOptions::default() }).await?;
    lab.set_guests(|guests| *guests = slow.guests);
    lab.set_pods(|pods| *pods = slow.pods);
    let test = MachineTest::start_on(Arc::new(lab), namespace).await?;
    test.wait_until_idle().await?;

    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    for name in MACHINES {
        test.create_json(&machine(name, &spec)).await?;
    }
    let is_complete = |machine: &Machine| {
        let has_address = machine.status.as_ref().is_some_and(|status| !status.ip_addresses.is_empty());
        phase(machine) == Some("Running") && has_address
    };
    let what = "running with an address";
    let running = MACHINES.map(|name| test.wait_for_within(PATIENCE, name, what, is_complete).boxed());
    run_concurrently(running.into_iter().collect()).await?;
    test.wait_until_idle().await?;
    let created = requests(&test)?;
    for name in MACHINES {
        let cost = Cost::of(&created, name);
        ensure!(
            cost.status <= 3 && cost.events <= 2 && cost.writes <= 9 && cost.reads == 0,
            "creation of {name}: {cost:?}\n{}",
            show(&created, name)
        );
    }

    let deletions = MACHINES.map(|name| test.delete_machine(name).boxed());
    run_concurrently(deletions.into_iter().collect()).await?;
    test.wait_until_idle().await?;
    let deleted = requests(&test)?.split_off(created.len());
    for name in MACHINES {
        let cost = Cost::of(&deleted, name);
        ensure!(
            cost.writes - cost.events <= 4 && cost.after_the_finalizer == 0,
            "deletion of {name}: {cost:?}\n{}",
            show(&deleted, name)
        );
    }
    Ok(())
}

/// The requests about one Machine and its objects.
#[derive(Debug)]
struct Cost {
    writes: usize,
    status: usize,
    events: usize,
    reads: usize,
    /// Requests after the write that removed the Machine, if there is one.
    after_the_finalizer: usize,
}

impl Cost {
    fn of(records: &[Record], name: &str) -> Self {
        let of_machine: Vec<&Record> = records.iter().filter(|record| is_about(record, name)).collect();
        let count = |matches: &dyn Fn(&Record) -> bool| of_machine.iter().filter(|record| matches(record)).count();
        let is_patch = |record: &Record| {
            (record.verb.as_str(), record.resource.as_str(), record.subresource.as_str()) == ("patch", "machines", "")
        };
        let last_patch = of_machine.iter().position(|record| is_patch(record));
        let after = last_patch.map_or(&[][..], |index| of_machine.get(index + 1..).unwrap_or_default());
        Cost {
            writes: count(&Record::is_write),
            status: count(&|record| record.is_write() && record.subresource == "status"),
            events: count(&|record| record.resource == "events"),
            reads: count(&|record| !record.is_write()),
            after_the_finalizer: after.iter().filter(|record| record.resource != "events").count(),
        }
    }
}

/// Events are named after their object, with a suffix after a dot. Secrets and PVCs have the Machine's name and a dash.
fn is_about(record: &Record, name: &str) -> bool {
    record.name.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-']))
}

/// Every request of the operator about an object. Watches and lists are about kinds.
fn requests(test: &MachineTest) -> Result<Vec<Record>> {
    let user = operator_user(test.namespace);
    let is_counted = |record: &Record| record.user == user && record.resource != "leases" && !record.name.is_empty();
    Ok(test.lab.audit()?.into_iter().filter(is_counted).collect())
}

fn show(records: &[Record], name: &str) -> String {
    let line = |record: &Record| {
        let what = [record.resource.as_str(), record.subresource.as_str(), record.name.as_str()].join("/");
        format!("{} {} {what} {:?}\n", record.time, record.verb, record.code)
    };
    records.iter().filter(|record| is_about(record, name)).map(line).collect()
}

/// A cluster without KubeVirt, Multus and CDI. The operator notices their CRDs by its watch of CRDs.
async fn kinds_that_are_not_installed_cost_no_requests(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let test = MachineTest::start_on(lab, "absent-kinds").await?;
    test.wait_until_ready().await?;
    let user = operator_user(test.namespace);
    let lists = || -> Result<usize> {
        let is_list = |record: &Record| record.user == user && record.verb == "list" && record.code == Some(404);
        Ok(test.lab.audit()?.iter().filter(|record| is_list(record)).count())
    };
    // The first attempts may come before the list of CRDs.
    let mut at_start = 0;
    while at_start != lists()? || at_start == 0 {
        at_start = lists()?;
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
    // The assertion is that nothing is listed for longer than any pause between two of the first five attempts.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let later = lists()?;
    ensure!(later == at_start, "{} lists of kinds that are not served", later - at_start);
    Ok(())
}

/// Thousands of Machines may be blocked, and each of them is reconciled again and again.
async fn a_blocked_machine_does_not_read_its_user_data(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "blocked-source")).await?;
    test.create_secret("source", "userdata", "#cloud-config\n").await?;
    let networks = json!([{"name": "a", "networkName": "later"}]);
    let long = format!("#cloud-config\n#{}\n", "x".repeat(4096));
    let sources = [("source", json!({"secretRef": {"name": "source"}})), ("inline", json!({"userData": long}))];
    for (name, cloud_init) in &sources {
        let spec = json!({"template": "small", "networks": networks, "cloudInit": cloud_init});
        test.create_json(&machine(name, &spec)).await?;
        test.wait_for_reason(name, "NetworkConfigurationNotFound").await?;
        test.edit_spec(name, &json!({"powerState": "Stopped"})).await?;
        test.wait_until_observed(name).await?;
    }
    let requests = test.operator_requests()?;
    let reads = requests
        .iter()
        .filter(|request| request.verb == "get" && ["secrets", "machines"].contains(&request.resource.as_str()));
    ensure!(reads.count() == 0, "{requests:?}");
    test.create_networks(&["later"]).await?;
    for (name, _) in &sources {
        test.edit_spec(name, &json!({"powerState": "Running"})).await?;
        test.wait_until_running(name).await?;
    }
    test.wait_for_user_data("source-cloudinit", "#cloud-config\n").await?;
    test.wait_for_user_data("inline-cloudinit", &long).await.map(|_| ())
}
