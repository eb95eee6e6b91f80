//! The status page of an operator that works: what it shows, what it costs, and how a real browser shows it.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vitivirt_lab::{
    Record,
    browser::{Browser, View},
    harness::{SharedLabs, Suite},
    loopback,
};
use vitivirt_page::testing::parse;

use crate::{
    machine_test::{MachineTest, machine, operator_user},
    poll::poll_until,
    replica::{PATIENCE, start},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; the_status_page_shows_machines_without_a_request);
}

const NAMESPACE: &str = "web-shop";
const HOSTILE: &str = "<script>alert(1)</script><img src=x onerror=alert(2)>";
/// A file for the picture of the overview, for docs/images.
const PICTURE: &str = "STATUS_PAGE_PICTURE";

/// One operator for all parts, because its start takes longer than each of them.
async fn the_status_page_shows_machines_without_a_request(labs: Arc<SharedLabs>) -> Result<()> {
    let test = MachineTest::start(&labs, NAMESPACE).await?;
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    test.create_json(&machine("cache", &json!({"template": "medium", "powerState": "Stopped"}))).await?;
    let lost = json!({"template": "small", "networks": [{"name": "lan", "networkName": "prod"}]});
    test.create_json(&machine("database", &lost)).await?;
    test.wait_until_running("web").await?;
    test.wait_for_reason("database", "NetworkConfigurationNotFound").await?;
    let mut browser = Browser::start_if_installed(&test.lab).await?;
    if let (Some(browser), Some(file)) = (&mut browser, std::env::var_os(PICTURE)) {
        let view = View { width: 1000, height: 560, dark: false };
        std::fs::write(file, browser.visit(&origin(&test), view).await?.picture)?;
    }
    test.create_json(&machine("hostile", &json!({"template": HOSTILE}))).await?;
    test.wait_for_reason("hostile", "TemplateNotFound").await?;
    test.wait_until_idle().await?;

    pages_cost_no_request(&test).await.context("requests")?;
    pages_are_complete(&test).await.context("content")?;
    a_standby_names_the_leader(&test).await.context("standby")?;
    match &mut browser {
        Some(browser) => a_browser_shows_the_pages(&test, browser).await.context("Chromium"),
        None => Ok(()),
    }
}

fn origin(test: &MachineTest) -> String {
    format!("http://{}:8082", loopback(test.operator.address()))
}

const PATHS: [&str; 4] = ["/", "/machines", "/machines?phase=Running", "/machines/web-shop/web"];

/// Every request of the operator but the renewals of its Lease. A watch that the server ends is opened again.
fn requests(test: &MachineTest) -> Result<usize> {
    let user = operator_user(NAMESPACE);
    let counts = |record: &&Record| record.user == user && record.resource != "leases" && record.verb != "watch";
    Ok(test.lab.audit()?.iter().filter(counts).count())
}

async fn pages_cost_no_request(test: &MachineTest) -> Result<()> {
    let before = requests(test)?;
    for _ in 0..10 {
        for path in PATHS {
            let (status, _) = test.operator.get_status_page(path).await?;
            ensure!(status == 200, "{path}: {status}");
        }
    }
    // The audit log has an entry when a request has ended, so a request of the pages would be in it by then.
    test.wait_until_idle().await?;
    let sent = requests(test)? - before;
    ensure!(sent == 0, "{sent} requests");
    Ok(())
}

async fn pages_are_complete(test: &MachineTest) -> Result<()> {
    for path in PATHS {
        let (_, html) = test.operator.get_status_page(path).await?;
        let document = parse(&html);
        ensure!(document.errors.is_empty(), "{path}: {:?}", document.errors);
        ensure!(document.elements.iter().all(|element| element.name != "script" && element.name != "img"), "{path}");
    }
    let overview = parse(&test.operator.get_status_page("/").await?.1);
    for text in ["Not ready (2)", HOSTILE, "NetworkConfigurationNotFound", "this replica is the leader"] {
        ensure!(overview.text.contains(text), "{text:?} is missing in {}", overview.text);
    }
    let tree = parse(&test.operator.get_status_page("/machines/web-shop/web").await?.1);
    for text in ["VirtualMachine web", "VirtualMachineInstance web", "PersistentVolumeClaim web-root", "Bound"] {
        ensure!(tree.text.contains(text), "{text:?} is missing in {}", tree.text);
    }
    let (status, _) = test.operator.get_status_page("/machines/web-shop/none").await?;
    ensure!(status == 404, "{status}");
    Ok(())
}

async fn a_standby_names_the_leader(test: &MachineTest) -> Result<()> {
    let standby = start(&test.lab, NAMESPACE, false).await?;
    let names_leader = || async {
        let page = standby.get_status_page("/").await;
        Ok(page.is_ok_and(|(_, html)| html.contains("on standby: the leader is ")))
    };
    poll_until(PATIENCE, names_leader, || format!("the standby names the leader:\n{}", standby.log_text())).await
}

async fn a_browser_shows_the_pages(test: &MachineTest, browser: &mut Browser) -> Result<()> {
    let paths = ["/", "/machines", "/machines/web-shop/web", "/machines/web-shop/hostile"];
    let visits = browser.check_pages(&origin(test), &paths, "kubevirt-operator").await?;
    let overview = visits.first().context("no page was shown")?;
    ensure!(overview.text.contains(HOSTILE), "the hostile text is not shown as text: {}", overview.text);
    Ok(())
}
