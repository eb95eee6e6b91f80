//! Which pods of a DaemonSet have its current template.
//!
//! The DaemonSet controller stores each template in a ControllerRevision and labels the pods with the hash of it. An
//! annotation of the pods would not show it: a template keeps the annotations of the deployment that last changed it.
//! The newest pod would not show it either: after a rollback the newest pods are the outdated ones.

use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::Value;
use vitivirt_api::ObjectKey;

use crate::{drift::is_same_content, kind::Kind, live::LiveObject, observed::Observed, pods::REVISION_HASH};

/// The DaemonSets whose current revision decides how their rollout continues, each with a digest that changes with its
/// template.
pub fn unfinished_daemon_sets(observed: &Observed) -> Vec<(ObjectKey, u64)> {
    let daemon_sets = observed.objects.recognized(Kind::DaemonSet);
    let unfinished = daemon_sets.filter(|(_, live)| live.rollout.is_some_and(|rollout| !rollout.is_complete()));
    unfinished
        .filter_map(|(key, live)| {
            let mut hasher = DefaultHasher::new();
            live.uid.hash(&mut hasher);
            live.content()?.pointer("/spec/template")?.to_string().hash(&mut hasher);
            Some((key.clone(), hasher.finish()))
        })
        .collect()
}

/// The hash of the pods that have the current template of a DaemonSet. `None` if the controller has not noticed the
/// template yet.
pub fn current_revision(live: &LiveObject, revisions: &[ControllerRevision]) -> Option<Box<str>> {
    let content = live.content()?;
    let template = content.pointer("/spec/template")?;
    let mut own: Vec<&ControllerRevision> = revisions.iter().filter(|revision| is_owned(live, revision)).collect();
    own.sort_by_key(|revision| revision.revision);
    let is_current = |revision: &&&ControllerRevision| {
        let stored = revision.data.as_ref().and_then(|data| data.0.pointer("/spec/template"));
        stored.is_some_and(|stored| is_same_template(template, stored))
    };
    // A controller that is older than the API server does not store fields that it does not know. When it has noticed
    // the DaemonSet, its newest revision is the current one.
    let noticed = live.rollout.is_some_and(|rollout| rollout.current);
    let newest = || own.last().filter(|_| noticed);
    hash(own.iter().rev().find(is_current).or_else(newest)?)
}

fn is_owned(live: &LiveObject, revision: &ControllerRevision) -> bool {
    revision.metadata.owner_references.iter().flatten().any(|owner| owner.uid == live.uid)
}

fn is_same_template(template: &Value, stored: &Value) -> bool {
    let mut stored = stored.clone();
    // The data of a revision is a patch.
    if let Some(fields) = stored.as_object_mut() {
        fields.remove("$patch");
    }
    is_same_content(template, &stored)
}

fn hash(revision: &ControllerRevision) -> Option<Box<str>> {
    revision.metadata.labels.as_ref()?.get(REVISION_HASH).map(|hash| hash.as_str().into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn daemon_set(image: &str, observed_generation: i64) -> LiveObject {
        let metadata = serde_json::from_value(json!({"uid": "ds", "generation": 2})).unwrap();
        LiveObject::new(
            &metadata,
            json!({
                "spec": {"template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"image": image}]}}},
                "status": {"desiredNumberScheduled": 1, "observedGeneration": observed_generation},
            }),
        )
    }

    fn revision(number: i64, image: &str, owner: &str) -> ControllerRevision {
        let template = json!({"$patch": "replace", "metadata": {"creationTimestamp": null, "labels": {"a": "b"}},
            "spec": {"containers": [{"image": image}]}});
        serde_json::from_value(json!({
            "metadata": {
                "name": format!("virt-handler-{number}"),
                "labels": {"controller-revision-hash": format!("hash-{number}")},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "virt-handler", "uid": owner}],
            },
            "revision": number,
            "data": {"spec": {"template": template}},
        }))
        .unwrap()
    }

    #[test]
    fn the_revision_with_the_template_of_the_daemon_set_is_the_current_one() {
        let revisions = [revision(3, "b", "other"), revision(2, "b", "ds"), revision(1, "a", "ds")];
        assert_eq!(current_revision(&daemon_set("b", 1), &revisions).as_deref(), Some("hash-2"));
        assert_eq!(current_revision(&daemon_set("a", 1), &revisions).as_deref(), Some("hash-1"), "after a rollback");
        assert_eq!(current_revision(&daemon_set("c", 1), &revisions), None, "the controller has not noticed it");
        assert_eq!(current_revision(&daemon_set("c", 2), &revisions).as_deref(), Some("hash-2"));
        assert_eq!(current_revision(&daemon_set("c", 2), &[]), None);
    }
}
