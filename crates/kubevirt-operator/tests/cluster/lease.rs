//! Two replicas and one Lease: there are never two leaders, whatever happens to the present one.

use std::{
    os::unix::process::ExitStatusExt,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use jiff::Timestamp;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vitivirt_lab::{
    Lab, LabOptions, Record,
    harness::{SharedLabs, Suite},
    leadership,
    proxy::{Match, Partition, ProxyFault, ProxyRule, RequestRecord, Then, When},
};
use vitivirt_runtime::lease::message;

use crate::{
    poll::poll_until,
    replica::{PATIENCE, grant_permissions, leadership_spans, start, start_leader, start_standby},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_standby_takes_over_within_17_s_of_the_leader_being_killed,
        a_standby_takes_over_within_3_s_of_a_sigterm_to_the_leader,
        a_leader_without_the_api_server_stops_before_a_standby_takes_over,
        a_standby_sends_no_requests_while_the_leader_renews,
        the_proxy_kills_a_program_after_its_third_write,
    );
}

async fn a_standby_takes_over_within_17_s_of_the_leader_being_killed(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let mut first = start_leader(&lab, "lease-death", false).await?;
    let second = start_standby(&lab, "lease-death", false).await?;
    first.signal(Signal::SIGKILL)?;
    let (died, clock) = (Timestamp::now(), Instant::now());
    first.wait(Duration::from_secs(5)).await?;
    second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    ensure!(clock.elapsed() <= Duration::from_secs(17), "it took {:?}", clock.elapsed());
    leadership::require_one_leader(
        [leadership_spans("first", &first, Some(died))?, leadership_spans("second", &second, None)?].concat(),
    )
}

async fn a_standby_takes_over_within_3_s_of_a_sigterm_to_the_leader(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let mut first = start_leader(&lab, "lease-term", false).await?;
    let second = start_standby(&lab, "lease-term", false).await?;
    first.signal(Signal::SIGTERM)?;
    let clock = Instant::now();
    second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    ensure!(clock.elapsed() <= Duration::from_secs(3), "it took {:?}", clock.elapsed());
    let status = first.wait(Duration::from_secs(5)).await?;
    ensure!(status.code() == Some(0), "the exit code after SIGTERM is not 0: {status}");
    first.wait_for_message(message::RELEASED, Duration::ZERO).await?;
    leadership::require_one_leader(
        [leadership_spans("first", &first, None)?, leadership_spans("second", &second, None)?].concat(),
    )
}

async fn a_leader_without_the_api_server_stops_before_a_standby_takes_over(_: Arc<SharedLabs>) -> Result<()> {
    // The test starts its own lab, because the partition affects every client of the proxy.
    let lab = Lab::start(LabOptions::default()).await?;
    for (namespace, partition) in [("black-hole", Partition::BlackHole), ("refused", Partition::Refuse)] {
        let first = start_leader(&lab, namespace, true).await?;
        let mut second = start_standby(&lab, namespace, false).await?;
        lab.proxy().partition(partition);
        second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        let stopped = leadership_spans("first", &first, None)?;
        ensure!(stopped.iter().all(|span| span.to.is_some()), "the partitioned leader still works: {stopped:?}");
        leadership::require_one_leader([stopped, leadership_spans("second", &second, None)?].concat())?;

        // The partitioned replica recovers, and leads again once the other one has ended.
        lab.proxy().partition(Partition::None);
        second.signal(Signal::SIGTERM)?;
        second.wait(Duration::from_secs(10)).await?;
        let leads_again = || async { Ok(leadership_spans("first", &first, None)?.len() >= 2) };
        poll_until(PATIENCE, leads_again, || "the first replica leads again".to_owned()).await?;
        leadership::require_one_leader(
            [leadership_spans("first", &first, None)?, leadership_spans("second", &second, None)?].concat(),
        )?;
    }
    lab.stop().await
}

async fn a_standby_sends_no_requests_while_the_leader_renews(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let leader = start_leader(&lab, QUIET_STANDBY, false).await?;
    // Only the standby's requests go through the proxy.
    let standby = start_standby(&lab, QUIET_STANDBY, true).await?;
    let standby_requests = || {
        let is_of_standby = |record: &&RequestRecord| record.caller.info.namespace == QUIET_STANDBY;
        lab.proxy().requests().iter().filter(is_of_standby).count()
    };
    let before = standby_requests();
    let renewals = count_renewals(&lab)?;
    let are_enough = || async { Ok(count_renewals(&lab)? >= renewals + 4) };
    poll_until(PATIENCE, are_enough, || "the leader renews four times".to_owned()).await?;
    let sent = standby_requests() - before;
    ensure!(sent == 0, "the standby sent {sent} requests while the leader renewed");
    drop((leader, standby));
    Ok(())
}

/// A test of the lab: other tests rely on this kind of rule.
async fn the_proxy_kills_a_program_after_its_third_write(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    grant_permissions(&lab, THIRD_WRITE).await?;
    // The rule counts from the first write, so it is added before the program starts. The PID is known seconds before
    // the third write.
    let target = Arc::new(OnceLock::new());
    let strike = ProxyFault::AfterCommit(Arc::new({
        let target = target.clone();
        move || {
            if let Some(pid) = target.get() {
                let _ = kill(*pid, Signal::SIGKILL);
            }
            Then::Cut
        }
    }));
    let matcher = Match::writes().namespace(THIRD_WRITE).resource("leases");
    let rule = lab.proxy().add(ProxyRule::new(matcher, When::Nth(3), strike));
    let mut program = start(&lab, THIRD_WRITE, true).await?;
    target.get_or_init(|| Pid::from_raw(program.pid()));
    let status = program.wait(PATIENCE).await?;
    ensure!(status.signal() == Some(9), "the program ended with {status}");
    ensure!(rule.hits() == 1, "{} hits", rule.hits());
    let writes: Vec<_> = lab
        .audit()?
        .into_iter()
        .filter(|record| record.namespace == THIRD_WRITE && record.resource == "leases" && record.is_write())
        .collect();
    ensure!(writes.len() == 3, "the API server stored one create and two renewals of the Lease: {writes:?}");
    ensure!(writes.iter().all(|write| write.code.is_some_and(|code| code < 300)), "{writes:?}");
    Ok(())
}

const QUIET_STANDBY: &str = "lease-quiet";
const THIRD_WRITE: &str = "nth-write";

/// How often the leader of the quiet standby has renewed its Lease.
fn count_renewals(lab: &Lab) -> Result<usize> {
    let is_renewal = |record: &Record| record.namespace == QUIET_STANDBY && record.verb == "update";
    Ok(lab.audit()?.iter().filter(|record| is_renewal(record)).count())
}
