//! Many objects at once: none of them stops the others.

use super::*;

/// All writes of a kind hang, as with a webhook of the cluster that drops its packets.
#[tokio::test(start_paused = true)]
async fn writes_that_hang_in_many_namespaces_do_not_stop_reconciles_without_such_a_write() {
    let slow_after = Some(Duration::from_millis(500));
    let test = runner_test(RunnerOptions { slow_after, ..RunnerOptions::default() });
    *test.controller.stubborn.lock() = true;
    test.link.faults.lock().extend((0..10_000).map(|_| LinkFault::LoseResponse(Verb::Create)));
    for namespace in 0..6 {
        for n in 0..20 {
            test.queue.add(ObjectKey::namespaced(&format!("ns-{namespace}"), &format!("m-{namespace}-{n}")));
        }
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    for second in 0..60 {
        let before = test.reconciles("gone").len();
        test.queue.add(ObjectKey::namespaced("other", "gone"));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(test.reconciles("gone").len(), before + 1, "no reconcile within a second, after {second} s");
    }
    // The server responds again: all writes succeed.
    test.link.faults.lock().clear();
    tokio::time::sleep(Duration::from_secs(120)).await;
    let created = |namespace: usize, n: usize| {
        test.server.get(MAPS, &format!("ns-{namespace}"), &format!("m-{namespace}-{n}")).is_some()
    };
    assert!((0..6).all(|namespace| (0..20).all(|n| created(namespace, n))));
}

/// After a start all objects are reconciled at about the same time.
#[tokio::test(start_paused = true)]
async fn the_first_resyncs_are_spread_over_the_whole_interval() {
    let test = runner_test(RunnerOptions { resync: Some(Duration::from_secs(600)), ..RunnerOptions::default() });
    let begin = Instant::now();
    let names: Vec<String> = (0..200).map(|n| format!("m-{n}")).collect();
    names.iter().for_each(|name| test.add(name));
    tokio::time::sleep(Duration::from_secs(610)).await;
    let mut in_quarter = [0; 4];
    for name in &names {
        let second = test.reconciles(name)[1] - begin;
        in_quarter[usize::try_from(second.as_secs() / 151).unwrap().min(3)] += 1;
    }
    assert!(in_quarter.iter().all(|count| *count >= 20), "{in_quarter:?}");
    // Later ones keep their distance.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let reconciles = test.reconciles(&names[0]);
    let pauses = reconciles[2..].windows(2).map(|pair| pair[1] - pair[0]);
    assert!(pauses.into_iter().all(|pause| pause >= Duration::from_secs(480)), "{reconciles:?}");
}
