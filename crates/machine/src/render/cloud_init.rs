//! The cloud-init Secret. What is in it never leaves it: no other object, log line or event holds any of it.

use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use vitivirt_api::machine::{ANNOTATION_CONTENT, CloudInit, Machine};

use super::{labels, owner};

/// Bytes of user data. They have no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretBytes(pub Vec<u8>);

pub fn secret_name(machine: &str) -> String {
    format!("{machine}-cloudinit")
}

/// A digest of what the Secret should hold, salted with the Machine's UID. It tells a changed content from an unchanged
/// one without reading the Secret.
pub fn digest(machine: &Machine, source: Option<&[u8]>) -> String {
    let given = machine.spec.cloud_init.clone().unwrap_or_default();
    let mut hash = Sha256::new().chain_update(machine.metadata.uid.as_deref().unwrap_or_default());
    for part in
        [given.user_data.as_deref().map(str::as_bytes), given.network_data.as_deref().map(str::as_bytes), source]
    {
        // Length before contents, so that no two different sets of parts look alike.
        let (present, bytes) = (part.is_some(), part.unwrap_or_default());
        hash.update([u8::from(present)]);
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// The keys and values of the Secret.
pub fn data(given: &CloudInit, source: Option<&SecretBytes>) -> Value {
    let mut data = Map::new();
    let user_data = match (given.user_data.as_deref(), source) {
        (Some(inline), Some(source)) => multipart(inline.as_bytes(), &source.0),
        (Some(inline), None) => inline.as_bytes().to_vec(),
        (None, Some(source)) => source.0.clone(),
        // KubeVirt wants user data beside network data; a comment changes nothing in the guest.
        (None, None) => b"#cloud-config\n".to_vec(),
    };
    data.insert("userdata".to_owned(), encode(user_data));
    if let Some(network_data) = &given.network_data {
        data.insert("networkdata".to_owned(), encode(network_data.clone().into_bytes()));
    }
    Value::Object(data)
}

fn encode(bytes: Vec<u8>) -> Value {
    serde_json::to_value(ByteString(bytes)).unwrap_or_default()
}

/// The whole object, for its first write.
pub fn render(machine: &Machine, source: Option<&SecretBytes>) -> Value {
    let given = machine.spec.cloud_init.clone().unwrap_or_default();
    json!({
        "metadata": {
            "labels": labels(machine),
            "annotations": {ANNOTATION_CONTENT: digest(machine, source.map(|source| source.0.as_slice()))},
            "ownerReferences": [owner(machine)],
        },
        "type": "Opaque",
        "data": data(&given, source),
    })
}

/// Two parts as one MIME message, which cloud-init takes apart again. The boundary occurs in neither.
fn multipart(first: &[u8], second: &[u8]) -> Vec<u8> {
    let digest: String = Sha256::new()
        .chain_update(first)
        .chain_update(second)
        .finalize()
        .iter()
        .take(12)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let boundary = format!("==={digest}===");
    let mut message =
        format!("Content-Type: multipart/mixed; boundary=\"{boundary}\"\nMIME-Version: 1.0\n").into_bytes();
    for part in [first, second] {
        let head =
            format!("\n--{boundary}\nContent-Type: {}; charset=\"utf-8\"\nMIME-Version: 1.0\n\n", content_type(part));
        message.extend(head.into_bytes());
        message.extend(part);
    }
    message.extend(format!("\n--{boundary}--\n").into_bytes());
    message
}

/// How cloud-init tells parts apart: by their first line.
fn content_type(part: &[u8]) -> &'static str {
    match part {
        part if part.starts_with(b"#cloud-config") => "text/cloud-config",
        part if part.starts_with(b"#!") => "text/x-shellscript",
        part if part.starts_with(b"#include") => "text/x-include-url",
        part if part.starts_with(b"#cloud-boothook") => "text/cloud-boothook",
        part if part.starts_with(b"## template: jinja") => "text/jinja2",
        _ => "text/cloud-config",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(user_data: Option<&str>, network_data: Option<&str>) -> Machine {
        let mut machine = Machine::default();
        machine.metadata.uid = Some("u".to_owned());
        machine.spec.cloud_init = Some(CloudInit {
            user_data: user_data.map(str::to_owned),
            network_data: network_data.map(str::to_owned),
            secret_ref: None,
        });
        machine
    }

    #[test]
    fn the_digest_tells_every_part_apart() {
        let all = [
            digest(&machine(Some("a"), None), None),
            digest(&machine(None, Some("a")), None),
            digest(&machine(None, None), Some(b"a")),
            digest(&machine(Some(""), None), None),
            digest(&machine(Some("a"), Some("")), None),
        ];
        let different: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
    }

    #[test]
    fn both_parts_are_in_order_and_typed() {
        let message = String::from_utf8(multipart(b"#cloud-config\nusers: []\n", b"#!/bin/sh\ntrue\n")).unwrap();
        let config = message.find("text/cloud-config").unwrap();
        let script = message.find("text/x-shellscript").unwrap();
        assert!(config < script && message.contains("users: []") && message.ends_with("===--\n"), "{message}");
    }
}
