//! The API server's audit log as typed records: user, verb, object, time and result of every request.
//!
//! Tests count requests with it. It contains the requests that the API server received. The log of the fault proxy
//! ([`crate::proxy`]) also contains those that never arrived.

use std::{collections::BTreeSet, path::Path};

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde::Deserialize;

pub(crate) const LOG: &str = "audit.log";
pub(crate) const SECOND_LOG: &str = "second-audit.log";
/// The logs of both API servers, in the lab's folder.
pub(crate) const LOGS: [&str; 2] = [LOG, SECOND_LOG];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The ID of the request. A watch has two audit events (start and end) with the same ID.
    pub id: String,
    pub user: String,
    pub user_agent: String,
    pub verb: String,
    pub group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    /// The HTTP status. None if the request was never answered.
    pub code: Option<u16>,
    pub time: Timestamp,
    pub dry_run: bool,
}

impl Record {
    /// Whether the request may change an object.
    pub fn is_write(&self) -> bool {
        !self.dry_run && matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }
}

/// What a request needs a permission for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsedPermission {
    pub verb: String,
    pub group: String,
    pub resource: String,
    pub subresource: String,
}

/// The permissions that a log shows in use by accounts of this name, in any namespace.
pub(crate) fn used_permissions(log: &Path, account: &str) -> Result<BTreeSet<UsedPermission>> {
    let text = std::fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    let of_account = format!(":{account}\"");
    let lines = text.split_inclusive('\n').filter(|line| line.contains(&of_account));
    let records = parse(&lines.collect::<String>())?;
    let is_of_account = |record: &Record| {
        let user = record.user.strip_prefix("system:serviceaccount:").and_then(|user| user.split_once(':'));
        user.is_some_and(|(_, name)| name == account)
    };
    // A conflict and a missing object show that the API server permitted the request.
    let is_permitted = |record: &Record| matches!(record.code, Some(200..300 | 404 | 409));
    let permitted = records.into_iter().filter(|record| is_of_account(record) && is_permitted(record));
    Ok(permitted
        .map(|Record { verb, group, resource, subresource, .. }| UsedPermission { verb, group, resource, subresource })
        .collect())
}

/// The records of the log so far, one per request (the last event of each ID), in order of arrival.
pub(crate) fn read(log: &Path) -> Result<Vec<Record>> {
    let text = std::fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Vec<Record>> {
    let mut records: Vec<Record> = Vec::new();
    let mut position = std::collections::HashMap::new();
    // The API server may still be writing the last line.
    let complete = text.rfind('\n').map_or("", |end| text.get(..end).unwrap_or_default());
    for line in complete.lines() {
        let event: AuditEvent = serde_json::from_str(line).with_context(|| format!("invalid audit event: {line}"))?;
        let record = Record::from(event);
        match position.get(&record.id).and_then(|index: &usize| records.get_mut(*index)) {
            Some(earlier) => *earlier = Record { time: earlier.time, ..record },
            None => {
                position.insert(record.id.clone(), records.len());
                records.push(record);
            }
        }
    }
    records.sort_by_key(|record| record.time);
    Ok(records)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AuditEvent {
    #[serde(rename = "auditID")]
    audit_id: String,
    verb: String,
    #[serde(rename = "requestURI")]
    request_uri: String,
    user: User,
    #[serde(default)]
    user_agent: String,
    object_ref: Option<ObjectRef>,
    response_status: Option<ResponseStatus>,
    request_received_timestamp: Timestamp,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    code: Option<u16>,
}

impl From<AuditEvent> for Record {
    fn from(event: AuditEvent) -> Self {
        let object = event.object_ref.unwrap_or_default();
        let query = event.request_uri.split_once('?').map_or("", |(_, query)| query);
        Record {
            id: event.audit_id,
            user: event.user.username,
            user_agent: event.user_agent,
            verb: event.verb,
            group: object.api_group,
            resource: object.resource,
            subresource: object.subresource,
            namespace: object.namespace,
            name: object.name,
            code: event.response_status.and_then(|status| status.code),
            time: event.request_received_timestamp,
            dry_run: query.split('&').any(|pair| pair.starts_with("dryRun=")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"a1","stage":"ResponseComplete","requestURI":"/apis/kubevirt.io/v1/namespaces/default/virtualmachines?dryRun=All","verb":"create","user":{"username":"lab-admin","groups":["system:masters"]},"sourceIPs":["10.1.0.1"],"userAgent":"kubectl/v1.36.3","objectRef":{"resource":"virtualmachines","namespace":"default","name":"vm","apiGroup":"kubevirt.io","apiVersion":"v1"},"responseStatus":{"metadata":{},"code":201},"requestReceivedTimestamp":"2026-11-15T10:00:00.123456Z","stageTimestamp":"2026-11-15T10:00:00.2Z"}"#;

    #[test]
    fn a_record_contains_user_verb_and_object() {
        let records = parse(&format!("{LINE}\n")).unwrap();
        let [record] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!((record.user.as_str(), record.verb.as_str(), record.code), ("lab-admin", "create", Some(201)));
        assert_eq!((record.resource.as_str(), record.name.as_str()), ("virtualmachines", "vm"));
        assert!(record.dry_run && !record.is_write(), "a dry run is not a write");
    }

    #[test]
    fn one_request_is_one_record_with_its_last_result() {
        let started = LINE.replace("201", "200");
        let records = parse(&format!("{started}\n{LINE}\n")).unwrap();
        assert_eq!(records.iter().map(|record| record.code).collect::<Vec<_>>(), [Some(201)]);
    }

    #[test]
    fn a_permitted_request_uses_a_permission() {
        let log = std::env::temp_dir().join(format!("audit-{}.log", std::process::id()));
        let of = |user: &str, verb: &str, code: &str| {
            let line = LINE.replace("lab-admin", user).replace("create", verb).replace("\"code\":201", code);
            format!("{}\n", line.replace("a1", &format!("{user}{verb}")))
        };
        let operator = "system:serviceaccount:here:operator";
        let lines = [
            of(operator, "patch", "\"code\":200"),
            of(operator, "delete", "\"code\":403"),
            of("system:serviceaccount:here:another-operator", "get", "\"code\":200"),
            of("system:serviceaccount:operator:another", "list", "\"code\":200"),
        ];
        std::fs::write(&log, lines.concat()).unwrap();
        let used = used_permissions(&log, "operator").unwrap();
        std::fs::remove_file(&log).unwrap();
        let verbs: Vec<&str> = used.iter().map(|used| used.verb.as_str()).collect();
        assert_eq!(verbs, ["patch"]);
    }

    #[test]
    fn an_incomplete_last_line_is_ignored() {
        assert_eq!(parse(&format!("{LINE}\n{}", LINE.get(..40).unwrap())).unwrap().len(), 1);
    }
}
