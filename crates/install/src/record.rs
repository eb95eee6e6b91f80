//! What the status of the KubeVirt resource records of an object: digests of the desired content that the operator
//! wrote, and of the content that the API server stored for it.
//!
//! The API server adds defaults to an object, so a live object alone does not show whether a field that is not desired
//! is a default or the rest of an earlier desired state. Both digests together show it: if neither has changed since
//! the record was written, the object is exactly up to date. Otherwise `drift` replaces the content once, which is a
//! no-op if nothing is stale, and the next report records it.
//!
//! The record is written when an installation is complete. The digest of the live content is what makes that safe: a
//! state that the operator wrote in between, and a crash before the record was written, change the live content.

use std::fmt;

use vitivirt_api::Failure;

use crate::{
    digest::{Digest, is_not_recorded},
    kind::Kind,
    live::LiveObject,
    object::InstallationObject,
};

/// Whether the API server adds defaults to the content of this kind, so that it needs a record. Kinds without defaults
/// are compared exactly, and the content of ServiceAccounts belongs to other clients.
pub(crate) fn is_recorded(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::ServiceAccount
            | Kind::ClusterRole
            | Kind::ClusterRoleBinding
            | Kind::Role
            | Kind::RoleBinding
            | Kind::Secret
            | Kind::ConfigMap
            | Kind::Instancetype
            | Kind::Preference
            | Kind::Job
    )
}

/// The record of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentRecord {
    desired: Digest,
    /// `None` for a kind of which only the metadata is watched. The generation of the object is recorded next to it.
    live: Option<Digest>,
    /// Of the desired pod template, without the identity of the deployment. `None` for an object without pods.
    template: Option<Digest>,
}

/// What a record says about the content of a live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Neither the desired nor the live content has changed.
    Same,
    /// The live content is the recorded one, but another content is desired.
    Outdated,
    /// As `Outdated`, and other pods are desired.
    OutdatedPods,
    /// There is no record, or the live content is not the recorded one.
    Unknown,
    /// The kind has no records.
    Never,
}

impl ContentRecord {
    /// The record of an object whose live content is up to date, or `None` if its kind has no records.
    pub(crate) fn new(object: &InstallationObject, live: &LiveObject) -> Result<Option<Self>, Failure> {
        if !is_recorded(object.kind) {
            return Ok(None);
        }
        let live = live.fields()?.map(|fields| Digest::of_content(&fields.content, &is_not_recorded));
        Ok(Some(Self { desired: object.digest(), live, template: object.template_digest() }))
    }

    /// `None` if another operator has written the text, or none.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut digests = text.split('-').map(Digest::parse);
        let desired = digests.next()??;
        let [live, template] = [digests.next().flatten(), digests.next().flatten()];
        let record = Self { desired, live, template };
        (record.to_string() == text).then_some(record)
    }

    /// What `recorded` says about an object of which this is the present record.
    pub(crate) fn compare(self, recorded: Option<Self>) -> Recorded {
        match recorded {
            // Earlier versions of this program recorded no template.
            Some(recorded) if (recorded.desired, recorded.live) == (self.desired, self.live) => Recorded::Same,
            Some(recorded) if recorded.live == self.live => match recorded.template {
                Some(template) if self.template != Some(template) => Recorded::OutdatedPods,
                _ => Recorded::Outdated,
            },
            _ => Recorded::Unknown,
        }
    }
}

impl fmt::Display for ContentRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.desired)?;
        [self.live, self.template].into_iter().flatten().try_for_each(|digest| write!(f, "-{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::names::annotation;

    fn live_digest(content: &Value) -> Digest {
        Digest::of_content(content, &is_not_recorded)
    }

    /// The values are in the status of users' resources. Another digest costs them a write per object.
    #[test]
    fn digests_are_stable() {
        let content = json!({"spec": {"b": [1, "x", null], "a": {"c": true}}, "metadata": {"name": "n"}, "status": {}});
        assert_eq!(Digest::of_object(&content).to_string(), "12b03d378b");
        assert_eq!(Digest::of_bytes(b"crd").to_string(), "d89d0a6c6c");
    }

    #[test]
    fn certificates_and_identities_do_not_change_the_desired_digest() {
        let webhook = |bundle: &str| json!({"webhooks": [{"clientConfig": {"caBundle": bundle, "service": {}}}]});
        assert_eq!(live_digest(&webhook("a")), live_digest(&webhook("b")));
        let workload = |key: &str, value: &str| json!({"spec": {"template": {"metadata": {"annotations": {key: value, "other": "1"}}}}});
        let (one, two) = (workload(annotation::IDENTIFIER, "1"), workload(annotation::IDENTIFIER, "2"));
        assert_eq!(Digest::of_object(&one), Digest::of_object(&two));
        assert_ne!(live_digest(&one), live_digest(&two), "another client changed the live identity");
        let restarted = workload(annotation::RESTARTED_AT, "now");
        assert_eq!(live_digest(&restarted), live_digest(&workload(annotation::RESTARTED_AT, "then")));
        assert_ne!(Digest::of_object(&one), Digest::of_object(&workload("more", "1")));
    }

    #[test]
    fn a_record_survives_its_text() {
        let (a, b) = (Digest::of_bytes(b"a"), Digest::of_bytes(b"b"));
        for (live, template) in [(Some(b), None), (None, None), (Some(b), Some(a))] {
            let record = ContentRecord { desired: a, live, template };
            assert_eq!(ContentRecord::parse(&record.to_string()), Some(record));
        }
        for text in ["", "-", "x", "0123456789-", "0123456789-abcdef0123-1", "0123456789-abcdef0123-0123456789-", "123"]
        {
            assert_eq!(ContentRecord::parse(text), None, "{text}");
        }
    }

    #[test]
    fn only_both_digests_together_prove_that_an_object_is_up_to_date() {
        let record = |desired: &str, live: &str| ContentRecord {
            desired: Digest::of_bytes(desired.as_bytes()),
            live: Some(Digest::of_bytes(live.as_bytes())),
            template: None,
        };
        let now = record("d", "l");
        assert_eq!(now.compare(Some(record("d", "l"))), Recorded::Same);
        assert_eq!(now.compare(Some(record("e", "l"))), Recorded::Outdated);
        assert_eq!(now.compare(Some(record("d", "m"))), Recorded::Unknown);
        assert_eq!(now.compare(None), Recorded::Unknown);
    }

    #[test]
    fn a_record_shows_whether_other_pods_are_desired() {
        let digest = |text: &str| Digest::of_bytes(text.as_bytes());
        let record = |desired: &str, template: Option<&str>| ContentRecord {
            desired: digest(desired),
            live: Some(digest("live")),
            template: template.map(digest),
        };
        let now = record("new", Some("pods"));
        assert_eq!(now.compare(Some(record("old", Some("pods")))), Recorded::Outdated);
        assert_eq!(now.compare(Some(record("old", Some("other pods")))), Recorded::OutdatedPods);
        assert_eq!(now.compare(Some(record("old", None))), Recorded::Outdated);
        assert_eq!(now.compare(Some(record("new", None))), Recorded::Same);
    }
}
