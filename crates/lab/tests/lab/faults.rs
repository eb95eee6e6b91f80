//! The effect of each fault, on the real API server.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
};
use serde_json::json;
use vitivirt_lab::{
    Lab, LabOptions,
    harness::{SharedLabs, Suite},
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb, RuleHandle, When},
    tests,
};

/// How long a test waits before it concludes that no response or event arrives.
const NO_EVENT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a test waits for an expected response or event.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        objects_survive_a_restart_of_the_api_server,
        objects_survive_a_restart_of_etcd,
        a_delayed_request_takes_at_least_the_delay,
        a_dropped_request_is_neither_answered_nor_stored,
        the_proxy_answers_with_the_status_of_the_rule,
        a_cut_before_the_commit_stores_nothing,
        a_cut_after_the_commit_stores_the_object,
        only_the_nth_request_fails,
        a_stalled_watch_delivers_no_events_and_stays_open,
        a_cut_watch_ends,
        the_audit_log_records_user_verb_and_result,
    );
}

async fn objects_survive_a_restart_of_the_api_server(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    create(&default_maps(&lab), "before").await?;
    lab.stop_api_server().await?;
    ensure!(lab.client().apiserver_version().await.is_err(), "a stopped API server must not answer");
    lab.start_api_server().await?;
    ensure!(default_maps(&lab).get_opt("before").await?.is_some(), "the object must still exist");
    lab.stop().await
}

async fn objects_survive_a_restart_of_etcd(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    create(&default_maps(&lab), "before").await?;
    lab.stop_etcd().await?;
    let stuck = tokio::time::timeout(NO_EVENT_TIMEOUT, create(&default_maps(&lab), "during")).await;
    ensure!(!matches!(stuck, Ok(Ok(()))), "a write must fail without etcd");
    lab.start_etcd().await?;
    let restarted = Instant::now();
    while create(&default_maps(&lab), "after").await.is_err() {
        ensure!(restarted.elapsed() < 2 * TIMEOUT, "the API server did not reconnect to etcd");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ensure!(default_maps(&lab).get_opt("before").await?.is_some(), "the object must still exist");
    lab.stop().await
}

async fn a_delayed_request_takes_at_least_the_delay(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "delay")?;
    let delay = Duration::from_millis(700);
    let rule = tester.add(RequestVerb::Create, When::Always, ProxyFault::Delay(delay));
    let started = Instant::now();
    tester.create("late").await?;
    ensure!(started.elapsed() >= delay, "the request took only {:?}", started.elapsed());
    ensure!(rule.hits() == 1, "the rule took effect {} times", rule.hits());
    Ok(())
}

async fn a_dropped_request_is_neither_answered_nor_stored(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "drop")?;
    let _rule = tester.add(RequestVerb::Create, When::Always, ProxyFault::Drop);
    let unanswered = tokio::time::timeout(NO_EVENT_TIMEOUT, tester.create("dropped")).await;
    ensure!(unanswered.is_err(), "the request was answered: {unanswered:?}");
    ensure!(!tester.exists("dropped").await?, "the request must not reach the API server");
    Ok(())
}

async fn the_proxy_answers_with_the_status_of_the_rule(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "answer")?;
    for status in [409, 429, 500, 503, 504] {
        let name = format!("answer-{status}");
        let rule = tester.add(RequestVerb::Create, When::Always, ProxyFault::Answer { status, retry_after: None });
        match tester.create(&name).await {
            Err(kube::Error::Api(answer)) => {
                ensure!(answer.code == status, "expected {status}, got {answer:?}");
            }
            other => bail!("expected {status}, got {other:?}"),
        }
        ensure!(!tester.exists(&name).await?, "the request must not reach the API server");
        rule.remove();
        tester.create(&name).await?;
    }
    Ok(())
}

async fn a_cut_before_the_commit_stores_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "cut-before")?;
    let _rule = tester.add(RequestVerb::Create, When::Always, ProxyFault::Cut);
    ensure!(tester.create("cut-before").await.is_err(), "the connection must be closed");
    ensure!(!tester.exists("cut-before").await?, "the object must not be stored");
    Ok(())
}

async fn a_cut_after_the_commit_stores_the_object(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "cut-after")?;
    let _rule = tester.add(RequestVerb::Create, When::Always, ProxyFault::CutAfter);
    ensure!(tester.create("cut-after").await.is_err(), "the client must not get the response");
    ensure!(tester.exists("cut-after").await?, "the object must be stored");
    Ok(())
}

async fn only_the_nth_request_fails(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "nth")?;
    let rule = tester.add(RequestVerb::Create, When::Nth(2), ProxyFault::Answer { status: 500, retry_after: None });
    let mut outcomes = Vec::new();
    for name in ["nth-1", "nth-2", "nth-3"] {
        outcomes.push(tester.create(name).await.is_ok());
    }
    ensure!(outcomes == [true, false, true], "{outcomes:?}");
    ensure!(rule.hits() == 1, "{} hits", rule.hits());
    Ok(())
}

async fn a_stalled_watch_delivers_no_events_and_stays_open(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "stall")?;
    let mut events = tester.watch("stalled").await?;
    tester.create("stalled").await?;
    expect_event(&mut events).await.context("an open watch must deliver events")?;
    let rule = tester.add(RequestVerb::Watch, When::Always, ProxyFault::StallWatch { after_events: 0 });
    tester.touch("stalled").await?;
    expect_silence(&mut events).await.context("a stalled watch must neither deliver events nor end")?;
    rule.remove();
    expect_event(&mut events).await.context("the watch must continue after the rule is removed")?;
    Ok(())
}

async fn a_cut_watch_ends(labs: Arc<SharedLabs>) -> Result<()> {
    let tester = Tester::new(labs.plain().await?, "cut-watch")?;
    let mut events = tester.watch("cut-watch").await?;
    tester.create("cut-watch").await?;
    expect_event(&mut events).await.context("an open watch must deliver events")?;
    let _rule = tester.add(RequestVerb::Watch, When::Always, ProxyFault::CutWatch { after_events: 0 });
    match tokio::time::timeout(TIMEOUT, events.try_next()).await {
        Ok(Ok(Some(event))) => bail!("the watch continued: {event:?}"),
        Ok(_) => Ok(()),
        Err(_) => bail!("the watch neither delivered an event nor ended"),
    }
}

async fn the_audit_log_records_user_verb_and_result(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let credentials = lab.credentials("default", "auditee").await?;
    let api: Api<ConfigMap> = Api::namespaced(credentials.client("auditee/2")?, "default");
    let rejected = api.list(&ListParams::default()).await;
    ensure!(
        matches!(rejected, Err(kube::Error::Api(ref status)) if status.code == 403),
        "RBAC must reject the request: {rejected:?}"
    );
    let records = lab.audit()?;
    let record = records
        .iter()
        .find(|record| record.user_agent == "auditee/2")
        .context("the audit log does not contain the request")?;
    ensure!(record.user == "system:serviceaccount:default:auditee", "{record:?}");
    ensure!(
        (record.verb.as_str(), record.resource.as_str(), record.code) == ("list", "configmaps", Some(403)),
        "{record:?}"
    );
    Ok(())
}

/// A client with its own user agent, because tests share a lab and rules match the user agent.
struct Tester {
    lab: Arc<Lab>,
    name: &'static str,
    maps: Api<ConfigMap>,
}

impl Tester {
    fn new(lab: Arc<Lab>, name: &'static str) -> Result<Self> {
        let client = lab.admin().through(lab.proxy().addr()).client(name)?;
        Ok(Tester { maps: Api::namespaced(client, "default"), lab, name })
    }

    fn add(&self, verb: RequestVerb, when: When, fault: ProxyFault) -> RuleHandle {
        let matcher = Match::verb(verb).resource("configmaps").user_agent(self.name);
        self.lab.proxy().add(ProxyRule::new(matcher, when, fault))
    }

    async fn create(&self, name: &str) -> kube::Result<()> {
        create(&self.maps, name).await
    }

    /// Reads directly from the API server, not through the proxy.
    async fn exists(&self, name: &str) -> Result<bool> {
        let api: Api<ConfigMap> = Api::namespaced(self.lab.client(), "default");
        Ok(api.get_opt(name).await?.is_some())
    }

    async fn touch(&self, name: &str) -> Result<()> {
        let api: Api<ConfigMap> = Api::namespaced(self.lab.client(), "default");
        api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"data": {"touched": "yes"}}))).await?;
        Ok(())
    }

    /// A watch of one object, through the proxy.
    async fn watch(&self, name: &str) -> Result<WatchEvents> {
        // No bookmarks, so that each event is a change.
        let only = WatchParams::default().disable_bookmarks().fields(&format!("metadata.name={name}"));
        Ok(Box::pin(self.maps.watch(&only, "0").await?))
    }
}

type WatchEvents = std::pin::Pin<Box<dyn futures::Stream<Item = kube::Result<WatchEvent<ConfigMap>>> + Send>>;

async fn expect_event(events: &mut WatchEvents) -> Result<()> {
    match tokio::time::timeout(TIMEOUT, events.try_next()).await {
        Ok(Ok(Some(_))) => Ok(()),
        Ok(Ok(None)) => bail!("the watch ended"),
        Ok(Err(error)) => Err(error).context("the watch failed"),
        Err(_) => bail!("no event within {TIMEOUT:?}"),
    }
}

async fn expect_silence(events: &mut WatchEvents) -> Result<()> {
    match tokio::time::timeout(NO_EVENT_TIMEOUT, events.try_next()).await {
        Err(_) => Ok(()),
        Ok(end) => bail!("unexpected event or end: {end:?}"),
    }
}

async fn create(maps: &Api<ConfigMap>, name: &str) -> kube::Result<()> {
    let mut map = ConfigMap::default();
    map.metadata.name = Some(name.to_owned());
    maps.create(&PostParams::default(), &map).await.map(|_| ())
}

fn default_maps(lab: &Lab) -> Api<ConfigMap> {
    Api::namespaced(lab.client(), "default")
}
