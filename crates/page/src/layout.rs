//! The frame of every page: title, the state of this replica, links, and the style, which is part of the page.

use std::{sync::LazyLock, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest, Sha256};

use crate::parts::badge;
use vitivirt_api::view::StepState;

const STYLE: &str = include_str!("style.css");

/// Nothing is loaded, and only the style of this crate is applied. A form may be sent to this server.
pub(crate) static CONTENT_SECURITY_POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = STANDARD.encode(Sha256::digest(STYLE));
    format!(
        "default-src 'none'; style-src 'sha256-{hash}'; img-src 'self'; form-action 'self'; base-uri 'none'; \
         frame-ancestors 'none'"
    )
});

/// How often a page loads itself again.
pub const REFRESH: Duration = Duration::from_secs(5);

/// The program that a page is about.
#[derive(Clone, Copy, Debug)]
pub struct PageHeader {
    pub name: &'static str,
    pub version: &'static str,
    /// The pages that the frame links to: path and name.
    pub links: &'static [(&'static str, &'static str)],
}

/// The content of a page.
pub struct Page {
    pub title: String,
    /// How often the page loads itself again.
    pub refresh: Duration,
    pub body: Markup,
}

/// The replica that serves the page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replica {
    pub identity: String,
    /// The identity of the leader, if it is known.
    pub leader: Option<String>,
    /// Why this replica is not healthy or not ready.
    pub problem: Option<String>,
}

impl Replica {
    pub fn is_leader(&self) -> bool {
        self.leader.as_deref() == Some(&self.identity)
    }
}

pub(crate) fn render(program: &PageHeader, replica: &Replica, page: &Page) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="refresh" content=(page.refresh.as_secs());
                title { (page.title) " · " (program.name) }
                link rel="icon" href="/icon.svg";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (page.title) }
                    p { (program.name) " " (program.version) " · " (replica_state(replica)) }
                    nav { @for (path, name) in program.links { a href=(path) { (name) } } }
                }
                main { (page.body) }
            }
        }
    };
    markup.into_string()
}

fn replica_state(replica: &Replica) -> Markup {
    html! {
        "replica " (replica.identity) " · "
        @match &replica.leader {
            Some(_) if replica.is_leader() => "this replica is the leader",
            Some(leader) => { "on standby: the leader is " (leader) },
            None => (badge(StepState::Waiting, "no replica is the leader")),
        }
        @if let Some(problem) = &replica.problem { " · " (badge(StepState::Failed, problem)) }
    }
}
