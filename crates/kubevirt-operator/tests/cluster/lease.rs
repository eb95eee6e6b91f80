//! Two processes and one lease: never two holders, whatever happens to the one that holds it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vitivirt_lab::harness::Suite;
use vitivirt_lab::leadership;
use vitivirt_lab::proxy::{Match, Partition, ProxyFault, ProxyRule, Then, When};
use vitivirt_lab::{Lab, LabOptions};
use vitivirt_runtime::lease::message;

use crate::replica::{PATIENCE, grant, spans, start, start_leader, start_standby};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("the_death_of_the_holder_is_taken_over_within_17_s", |labs| async move {
        let lab = labs.plain().await?;
        let mut first = start_leader(&lab, "lease-death", false).await?;
        let second = start_standby(&lab, "lease-death", false).await?;
        first.signal(Signal::SIGKILL)?;
        let (died, clock) = (Timestamp::now(), Instant::now());
        first.wait(Duration::from_secs(5)).await?;
        second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        ensure!(clock.elapsed() <= Duration::from_secs(17), "it took {:?}", clock.elapsed());
        leadership::never_two([spans("first", &first, Some(died))?, spans("second", &second, None)?].concat())
    });

    suite.test("a_sigterm_hands_the_lease_over_within_3_s", |labs| async move {
        let lab = labs.plain().await?;
        let mut first = start_leader(&lab, "lease-term", false).await?;
        let second = start_standby(&lab, "lease-term", false).await?;
        first.signal(Signal::SIGTERM)?;
        let clock = Instant::now();
        second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
        ensure!(clock.elapsed() <= Duration::from_secs(3), "it took {:?}", clock.elapsed());
        let status = first.wait(Duration::from_secs(5)).await?;
        ensure!(status.code() == Some(0), "a SIGTERM is a clean end: {status}");
        first.wait_for_message(message::RELEASED, Duration::ZERO).await?;
        leadership::never_two([spans("first", &first, None)?, spans("second", &second, None)?].concat())
    });

    suite.test("a_holder_that_is_cut_off_stops_before_its_lease_can_be_taken", |_| async move {
        // A lab of its own: the partition takes everything that goes through the proxy.
        let lab = Lab::start(LabOptions::default()).await?;
        for (namespace, partition) in [("black-hole", Partition::BlackHole), ("refused", Partition::Refuse)] {
            let first = start_leader(&lab, namespace, true).await?;
            let mut second = start_standby(&lab, namespace, false).await?;
            lab.proxy().partition(partition);
            second.wait_for_message(message::ACQUIRED, PATIENCE).await?;
            let stopped = spans("first", &first, None)?;
            ensure!(stopped.iter().all(|span| span.to.is_some()), "the cut off holder still works: {stopped:?}");
            leadership::never_two([stopped, spans("second", &second, None)?].concat())?;

            // The one that was cut off is well again afterwards, and leads when it may.
            lab.proxy().partition(Partition::None);
            second.signal(Signal::SIGTERM)?;
            second.wait(Duration::from_secs(10)).await?;
            let again = async {
                while spans("first", &first, None)?.len() < 2 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                anyhow::Ok(())
            };
            tokio::time::timeout(PATIENCE, again).await.context("the first did not come back")??;
            leadership::never_two([spans("first", &first, None)?, spans("second", &second, None)?].concat())?;
        }
        lab.stop().await
    });

    suite.test("a_standby_does_not_poll", |labs| async move {
        let lab = labs.plain().await?;
        let leader = start_leader(&lab, "lease-quiet", false).await?;
        let standby = start_standby(&lab, "lease-quiet", true).await?;
        let asked = |lab: &Lab| -> usize {
            let of_standby =
                |record: &vitivirt_lab::proxy::RequestRecord| record.caller.info.namespace == "lease-quiet";
            lab.proxy().requests().iter().filter(|record| of_standby(record)).count()
        };
        let before = asked(&lab);
        let renewals = renewals(&lab)?;
        tokio::time::timeout(PATIENCE, async {
            while self::renewals(&lab)? < renewals + 4 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            anyhow::Ok(())
        })
        .await
        .context("the holder does not renew")??;
        ensure!(asked(&lab) == before, "the standby sent {} requests while the holder renewed", asked(&lab) - before);
        drop((leader, standby));
        Ok(())
    });

    suite.test("a_program_is_killed_after_its_nth_write", |labs| async move {
        let lab = labs.plain().await?;
        grant(&lab, NTH_WRITE).await?;
        // The rule counts from the first write on, so it is there before the program is. The third write is seconds away
        // when the program's number is known.
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
        let matcher = Match::writes().namespace(NTH_WRITE).resource("leases");
        let rule = lab.proxy().add(ProxyRule::new(matcher, When::Nth(3), strike));
        let mut program = start(&lab, NTH_WRITE, true).await?;
        target.get_or_init(|| Pid::from_raw(program.pid()));
        let status = program.wait(PATIENCE).await?;
        ensure!(std::os::unix::process::ExitStatusExt::signal(&status) == Some(9), "it ended with {status}");
        ensure!(rule.hits() == 1, "{} hits", rule.hits());
        let writes: Vec<_> = lab
            .audit()?
            .into_iter()
            .filter(|record| record.namespace == NTH_WRITE && record.resource == "leases" && record.is_write())
            .collect();
        ensure!(writes.len() == 3, "the lease was made once and renewed twice, all of it stored: {writes:?}");
        ensure!(writes.iter().all(|write| write.code.is_some_and(|code| code < 300)), "{writes:?}");
        Ok(())
    });
}

const NTH_WRITE: &str = "nth-write";

/// How often the leases of the quiet namespace were renewed.
fn renewals(lab: &Lab) -> Result<usize> {
    let is_renewal = |record: &vitivirt_lab::Record| record.namespace == "lease-quiet" && record.verb == "update";
    Ok(lab.audit()?.iter().filter(|record| is_renewal(record)).count())
}
