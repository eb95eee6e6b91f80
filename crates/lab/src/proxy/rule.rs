//! Which requests a rule means, which of those it strikes, and with what. Pure: counting and effects are elsewhere
//! ([`super::table`] and [`super::forward`]), so what a rule says can be read, and tested, without a server.

use std::{fmt, sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::request::{RequestInfo, RequestVerb};

/// Who sent a request, and what it asks for: all that a [`Match`] can look at.
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
    /// Every verb that can change what is stored.
    Writes,
}

/// Which requests a rule means. `None` accepts everything; `Some("")` accepts only an absent part: the core group,
/// no subresource, no namespace, no name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The beginning of the `User-Agent`, such as `virt-operator/`.
    pub user_agent: Option<String>,
    pub verbs: Verbs,
    pub group: Option<String>,
    pub resource: Option<String>,
    pub subresource: Option<String>,
    pub namespace: Option<String>,
    /// The name in the path. A create has none there, so it is not meant by any name but the empty one.
    pub name: Option<String>,
    /// Resources never meant. "The third write" is only the same request in every run without `leases` and `events`.
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
        let equal = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
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

/// Which of the requests that a rule means it strikes, counted from 1 since the rule was added.
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
    pub(crate) fn strikes(self, count: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Nth(n) => count == n,
            Self::From(n) => count >= n,
            Self::First(n) => count <= n,
            Self::EveryNth(n) => count.is_multiple_of(n),
        }
    }
}

/// What becomes of the answer after an [`ProxyFault::AfterCommit`] callback has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Deliver,
    Cut,
}

/// What happens to a request that a rule strikes.
#[derive(Clone)]
pub enum ProxyFault {
    /// Forwarded only after this time, or as soon as the rule is removed.
    Delay(Duration),
    /// A black hole: not forwarded, not answered. Held until the client gives up; cut when the rule is removed.
    Drop,
    /// Not forwarded; the connection breaks.
    Cut,
    /// Forwarded and completed by the API server; the connection breaks before the client learns of it.
    /// Never strikes a watch, which does not complete.
    CutAfter,
    /// Not forwarded; answered with a Kubernetes `Status` of this code.
    Answer { status: u16, retry_after: Option<u64> },
    /// Forwards this many watch events, then nothing more, not even the end. Continues when the rule is removed.
    /// Strikes watches only; those already open are struck when the rule is added, and count from then on.
    StallWatch { after_events: usize },
    /// Like `StallWatch`, but the connection breaks.
    CutWatch { after_events: usize },
    /// Forwarded and completed by the API server; then this is called, and only then does the client get the answer,
    /// if at all. The callback runs on the proxy's thread, so it must not block. Never strikes a watch.
    AfterCommit(Arc<dyn Fn() -> Then + Send + Sync>),
}

impl ProxyFault {
    /// Kills a process (SIGKILL) once the API server has completed its request and before it can know. The caller must
    /// not have reaped the process: its number could be another's by then.
    pub fn kill(pid: u32) -> anyhow::Result<Self> {
        // 0 and negative numbers are process groups, 1 is init: never what a test means.
        ensure!(pid > 1, "process {pid} cannot be the target of a kill fault");
        let pid = Pid::from_raw(i32::try_from(pid).with_context(|| format!("{pid} is no process id"))?);
        Ok(Self::AfterCommit(Arc::new(move || {
            if let Err(error) = kill(pid, Signal::SIGKILL) {
                tracing::warn!(%pid, %error, "the process to kill after its write was not killed");
            }
            Then::Cut
        })))
    }

    /// A fault that cannot be done to a request leaves it alone, and does not count it.
    pub(crate) fn fits(&self, verb: RequestVerb) -> bool {
        match self {
            Self::StallWatch { .. } | Self::CutWatch { .. } => verb == RequestVerb::Watch,
            Self::CutAfter | Self::AfterCommit(_) => verb != RequestVerb::Watch,
            Self::Delay(_) | Self::Drop | Self::Cut | Self::Answer { .. } => true,
        }
    }

    /// The events that may pass before a watch is struck; `None` for faults that strike the request itself.
    pub(crate) fn watch_events(&self) -> Option<usize> {
        match self {
            Self::StallWatch { after_events } | Self::CutWatch { after_events } => Some(*after_events),
            _ => None,
        }
    }

    /// The fault as request records and debug output name it.
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

/// One fault, and the requests that it strikes.
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
    fn a_match_is_the_conjunction_of_its_parts() {
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
        let refused = [
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
        for matcher in refused {
            assert!(!matcher.accepts(&status), "{matcher:?}");
        }
    }

    #[test]
    fn an_empty_part_means_its_absence() {
        let node = caller("", "GET", "/api/v1/nodes");
        assert!(Match::any().group("").namespace("").subresource("").name("").accepts(&node));
        assert!(!Match::writes().accepts(&node));
        let health = caller("", "GET", "/healthz");
        assert!(Match::any().resource("").accepts(&health));
    }

    #[test]
    fn when_counts_from_one() {
        let struck = |when: When| (1..=7).filter(|count| when.strikes(*count)).collect::<Vec<u64>>();
        assert_eq!(struck(When::Always), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(struck(When::Nth(3)), [3]);
        assert_eq!(struck(When::From(6)), [6, 7]);
        assert_eq!(struck(When::First(2)), [1, 2]);
        assert_eq!(struck(When::EveryNth(3)), [3, 6]);
        assert_eq!(struck(When::EveryNth(0)), Vec::<u64>::new());
        assert_eq!(struck(When::Nth(0)), Vec::<u64>::new());
    }

    #[test]
    fn faults_leave_alone_what_they_cannot_be_done_to() {
        assert!(!ProxyFault::CutAfter.fits(RequestVerb::Watch));
        assert!(ProxyFault::CutAfter.fits(RequestVerb::Create));
        assert!(ProxyFault::CutWatch { after_events: 0 }.fits(RequestVerb::Watch));
        assert!(!ProxyFault::StallWatch { after_events: 0 }.fits(RequestVerb::List));
        assert!(ProxyFault::Drop.fits(RequestVerb::Watch));
    }

    #[test]
    fn a_kill_never_aims_at_a_process_group_or_init() {
        for pid in [0, 1, u32::MAX] {
            assert!(ProxyFault::kill(pid).is_err(), "{pid}");
        }
    }
}
