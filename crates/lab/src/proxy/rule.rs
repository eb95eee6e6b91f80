//! Which requests a rule matches, which of those it affects, and with which fault. This module is pure: counting and
//! effects are in [`super::table`] and [`super::forward`], so that rules can be tested without a server.

use std::{fmt, sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::request::{RequestInfo, RequestVerb};

/// The user agent and the content of a request: everything that a [`Match`] checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub user_agent: String,
    pub info: RequestInfo,
}

/// The verbs that a [`Match`] accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verbs {
    #[default]
    Any,
    Only(RequestVerb),
    /// Every verb that can change an object.
    Writes,
}

/// Which requests a rule matches. `None` accepts everything; `Some("")` accepts only an empty field: the core group, no
/// subresource, no namespace, no name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The beginning of the `User-Agent`, such as `virt-operator/`.
    pub user_agent: Option<String>,
    pub verbs: Verbs,
    pub group: Option<String>,
    pub resource: Option<String>,
    pub subresource: Option<String>,
    pub namespace: Option<String>,
    /// The name in the path. A create request has none, so only the empty name matches it.
    pub name: Option<String>,
    /// Excluded resources. Without `leases` and `events`, "the third write" is the same request in every run.
    pub except: Vec<String>,
}

impl Match {
    pub fn any() -> Self {
        Self::default()
    }

    pub fn verb(verb: RequestVerb) -> Self {
        Self { verbs: Verbs::Only(verb), ..Self::default() }
    }

    pub fn writes() -> Self {
        Self { verbs: Verbs::Writes, ..Self::default() }
    }

    pub fn user_agent(self, prefix: impl Into<String>) -> Self {
        Self { user_agent: Some(prefix.into()), ..self }
    }

    pub fn group(self, group: impl Into<String>) -> Self {
        Self { group: Some(group.into()), ..self }
    }

    pub fn resource(self, resource: impl Into<String>) -> Self {
        Self { resource: Some(resource.into()), ..self }
    }

    pub fn subresource(self, subresource: impl Into<String>) -> Self {
        Self { subresource: Some(subresource.into()), ..self }
    }

    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: Some(namespace.into()), ..self }
    }

    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    pub fn except<R: Into<String>>(self, resources: impl IntoIterator<Item = R>) -> Self {
        Self { except: resources.into_iter().map(Into::into).collect(), ..self }
    }

    pub(crate) fn accepts(&self, caller: &Caller) -> bool {
        let info = &caller.info;
        let equal =
            |expected: &Option<String>, actual: &str| expected.as_deref().is_none_or(|expected| expected == actual);
        let verb = match self.verbs {
            Verbs::Any => true,
            Verbs::Only(verb) => verb == info.verb,
            Verbs::Writes => info.verb.is_write(),
        };
        verb && self.user_agent.as_deref().is_none_or(|prefix| caller.user_agent.starts_with(prefix))
            && equal(&self.group, &info.group)
            && equal(&self.resource, &info.resource)
            && equal(&self.subresource, &info.subresource)
            && equal(&self.namespace, &info.namespace)
            && equal(&self.name, &info.name)
            && !self.except.contains(&info.resource)
    }
}

/// Which of the matching requests a rule affects, counted from 1 since the rule was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Always,
    /// Only the n-th.
    Nth(u64),
    /// The n-th and all after it.
    From(u64),
    /// The first n.
    First(u64),
    /// The n-th, the 2n-th, the 3n-th, …
    EveryNth(u64),
}

impl When {
    pub(crate) fn applies_to(self, count: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Nth(n) => count == n,
            Self::From(n) => count >= n,
            Self::First(n) => count <= n,
            Self::EveryNth(n) => count.is_multiple_of(n),
        }
    }
}

/// What happens to the response after a [`ProxyFault::AfterCommit`] callback has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Deliver,
    Cut,
}

/// The fault that a rule injects into a request.
#[derive(Clone)]
pub enum ProxyFault {
    /// Forwarded only after this time, or as soon as the rule is removed.
    Delay(Duration),
    /// Neither forwarded nor answered. Held until the client disconnects, and cut when the rule is removed.
    Drop,
    /// Not forwarded. The connection is closed.
    Cut,
    /// Forwarded and completed by the API server. The connection is closed before the client gets the response.
    /// It does not apply to watches, because they do not complete.
    CutAfter,
    /// Not forwarded. The proxy answers with a Kubernetes `Status` with this code.
    Answer { status: u16, retry_after: Option<u64> },
    /// Forwards this many watch events, then nothing, not even the end of the watch, until the rule is removed. It
    /// applies only to watches. For a watch that is already open, events count from the time at which the rule is
    /// added.
    StallWatch { after_events: usize },
    /// Like `StallWatch`, but the connection is closed.
    CutWatch { after_events: usize },
    /// Forwarded and completed by the API server. Then the callback runs, and decides whether the client gets the
    /// response. The callback runs on a thread of the proxy, so it must not block. It does not apply to watches.
    AfterCommit(Arc<dyn Fn() -> Then + Send + Sync>),
}

impl ProxyFault {
    /// Kills a process (SIGKILL) after the API server has completed its request and before it gets the response. The
    /// caller must not have reaped the process, because the kernel reuses PIDs.
    pub fn kill(pid: u32) -> anyhow::Result<Self> {
        // 0 and negative numbers are process groups, and 1 is init.
        ensure!(pid > 1, "invalid PID {pid}: must be greater than 1");
        let pid = Pid::from_raw(i32::try_from(pid).with_context(|| format!("invalid PID {pid}"))?);
        Ok(Self::AfterCommit(Arc::new(move || {
            if let Err(error) = kill(pid, Signal::SIGKILL) {
                tracing::warn!(%pid, %error, "cannot kill the process after its write");
            }
            Then::Cut
        })))
    }

    /// Whether the fault can be applied to a request. Other requests are forwarded and not counted.
    pub(crate) fn supports(&self, verb: RequestVerb) -> bool {
        match self {
            Self::StallWatch { .. } | Self::CutWatch { .. } => verb == RequestVerb::Watch,
            Self::CutAfter | Self::AfterCommit(_) => verb != RequestVerb::Watch,
            Self::Delay(_) | Self::Drop | Self::Cut | Self::Answer { .. } => true,
        }
    }

    /// The number of events that pass before the fault affects a watch. `None` for faults that affect the request
    /// itself.
    pub(crate) fn watch_events(&self) -> Option<usize> {
        match self {
            Self::StallWatch { after_events } | Self::CutWatch { after_events } => Some(*after_events),
            _ => None,
        }
    }

    /// The name of the fault in request records and debug output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Delay(_) => "Delay",
            Self::Drop => "Drop",
            Self::Cut => "Cut",
            Self::CutAfter => "CutAfter",
            Self::Answer { .. } => "Answer",
            Self::StallWatch { .. } => "StallWatch",
            Self::CutWatch { .. } => "CutWatch",
            Self::AfterCommit(_) => "AfterCommit",
        }
    }
}

impl fmt::Debug for ProxyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Delay(time) => write!(f, "({time:?})"),
            Self::Answer { status, retry_after } => write!(f, "({status}, retry after {retry_after:?})"),
            Self::StallWatch { after_events } | Self::CutWatch { after_events } => write!(f, "({after_events})"),
            Self::Drop | Self::Cut | Self::CutAfter | Self::AfterCommit(_) => Ok(()),
        }
    }
}

/// A fault, and the requests that it affects.
#[derive(Clone, Debug)]
pub struct ProxyRule {
    pub(crate) matcher: Match,
    pub(crate) when: When,
    pub(crate) fault: ProxyFault,
}

impl ProxyRule {
    pub fn new(matcher: Match, when: When, fault: ProxyFault) -> Self {
        Self { matcher, when, fault }
    }

    pub fn always(matcher: Match, fault: ProxyFault) -> Self {
        Self::new(matcher, When::Always, fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(user_agent: &str, method: &str, uri: &str) -> Caller {
        let info = RequestInfo::parse(&method.parse().unwrap(), &uri.parse().unwrap());
        Caller { user_agent: user_agent.to_owned(), info }
    }

    #[test]
    fn a_match_accepts_only_requests_that_satisfy_all_its_fields() {
        let status = caller("op/1.0", "PATCH", "/apis/vitistack.io/v1alpha1/namespaces/ns/machines/m/status");
        let accepted = [
            Match::any(),
            Match::writes(),
            Match::verb(RequestVerb::Patch),
            Match::any().user_agent("op/"),
            Match::any().group("vitistack.io").resource("machines"),
            Match::any().subresource("status").namespace("ns").name("m"),
            Match::writes().except(["leases", "events"]),
        ];
        for matcher in accepted {
            assert!(matcher.accepts(&status), "{matcher:?}");
        }
        let rejected = [
            Match::verb(RequestVerb::Update),
            Match::verb(RequestVerb::Get),
            Match::any().user_agent("operator"),
            Match::any().user_agent("op/1.0.1"),
            Match::any().group(""),
            Match::any().resource("virtualmachines"),
            Match::any().subresource(""),
            Match::any().namespace(""),
            Match::any().name("other"),
            Match::writes().except(["machines"]),
        ];
        for matcher in rejected {
            assert!(!matcher.accepts(&status), "{matcher:?}");
        }
    }

    #[test]
    fn an_empty_string_matches_only_an_empty_field() {
        let node = caller("", "GET", "/api/v1/nodes");
        assert!(Match::any().group("").namespace("").subresource("").name("").accepts(&node));
        assert!(!Match::writes().accepts(&node));
        let health = caller("", "GET", "/healthz");
        assert!(Match::any().resource("").accepts(&health));
    }

    #[test]
    fn requests_are_counted_from_one() {
        let affected = |when: When| (1..=7).filter(|count| when.applies_to(*count)).collect::<Vec<u64>>();
        assert_eq!(affected(When::Always), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(affected(When::Nth(3)), [3]);
        assert_eq!(affected(When::From(6)), [6, 7]);
        assert_eq!(affected(When::First(2)), [1, 2]);
        assert_eq!(affected(When::EveryNth(3)), [3, 6]);
        assert_eq!(affected(When::EveryNth(0)), Vec::<u64>::new());
        assert_eq!(affected(When::Nth(0)), Vec::<u64>::new());
    }

    #[test]
    fn a_fault_applies_only_to_the_verbs_it_supports() {
        assert!(!ProxyFault::CutAfter.supports(RequestVerb::Watch));
        assert!(ProxyFault::CutAfter.supports(RequestVerb::Create));
        assert!(ProxyFault::CutWatch { after_events: 0 }.supports(RequestVerb::Watch));
        assert!(!ProxyFault::StallWatch { after_events: 0 }.supports(RequestVerb::List));
        assert!(ProxyFault::Drop.supports(RequestVerb::Watch));
    }

    #[test]
    fn a_process_group_or_init_cannot_be_killed() {
        for pid in [0, 1, u32::MAX] {
            assert!(ProxyFault::kill(pid).is_err(), "{pid}");
        }
    }
}
