//! The cloud-init Secret. Its data is in no other object, log line or event.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::json;
use sha2::{Digest, Sha256};
use vitivirt_api::{
    machine::{ANNOTATION_CONTENT, CloudInit, MachineId},
    text::hex,
};

use super::{object_labels, owner_reference};
pub use crate::secret::secret_name;
use crate::{resolve::Resolved, secret::SecretBytes};

/// A digest of the data that the Secret should have, salted with the Machine's identity. It shows a change without a read of
/// the Secret.
pub fn digest(machine: &MachineId, given: &CloudInit, source: Option<&SecretBytes>) -> String {
    let mut hash = Sha256::new().chain_update(machine.identity());
    let parts = [
        given.user_data.as_deref().map(str::as_bytes),
        given.network_data.as_deref().map(str::as_bytes),
        source.map(|source| source.0.as_slice()),
    ];
    for part in parts {
        // Every part is hashed with its presence and its length, so that different parts cannot give the same bytes.
        let (present, bytes) = (part.is_some(), part.unwrap_or_default());
        hash.update([u8::from(present)]);
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    }
    hex(hash.finalize().get(..16).unwrap_or_default())
}

/// The data of the Secret.
pub fn data(given: &CloudInit, source: Option<&SecretBytes>) -> BTreeMap<String, ByteString> {
    let user_data = match (given.user_data.as_deref(), source) {
        (Some(inline), Some(source)) => multipart(inline.as_bytes(), &source.0),
        (Some(inline), None) => inline.as_bytes().to_vec(),
        (None, Some(source)) => source.0.clone(),
        // KubeVirt requires user data with network data. An empty document changes nothing in the guest.
        (None, None) => b"#cloud-config\n".to_vec(),
    };
    let network_data = given.network_data.clone().map(String::into_bytes);
    let values = [("userdata", Some(user_data)), ("networkdata", network_data)];
    values.into_iter().filter_map(|(key, bytes)| Some((key.to_owned(), ByteString(bytes?)))).collect()
}

/// The whole object, for its first write.
pub fn render(resolved: &Resolved, given: &CloudInit, source: Option<&SecretBytes>) -> Secret {
    Secret {
        metadata: ObjectMeta {
            labels: Some(object_labels(resolved)),
            annotations: Some([(ANNOTATION_CONTENT.to_owned(), digest(&resolved.id, given, source))].into()),
            owner_references: Some(vec![owner_reference(&resolved.id)]),
            ..ObjectMeta::default()
        },
        type_: Some("Opaque".to_owned()),
        data: Some(data(given, source)),
        ..Secret::default()
    }
}

/// Two parts as one MIME message, which cloud-init splits. The boundary is a digest, so neither part contains it.
fn multipart(first: &[u8], second: &[u8]) -> Vec<u8> {
    let digest = Sha256::new().chain_update(first).chain_update(second).finalize();
    let digest = hex(digest.get(..12).unwrap_or_default());
    let boundary = format!("==={digest}===");
    let mut message =
        format!("Content-Type: multipart/mixed; boundary=\"{boundary}\"\nMIME-Version: 1.0\n").into_bytes();
    for part in [first, second] {
        message.extend(format!("\n--{boundary}\n").into_bytes());
        message.extend(mime_part(part));
    }
    message.extend(format!("\n--{boundary}--\n").into_bytes());
    message
}

/// A part with its headers. A part that is a MIME message has its own. Bytes that are not text are encoded.
fn mime_part(part: &[u8]) -> Vec<u8> {
    if is_mime(part) {
        return part.to_vec();
    }
    let head = |encoding: &str| {
        format!("Content-Type: {}; charset=\"utf-8\"\nMIME-Version: 1.0\n{encoding}\n", content_type(part)).into_bytes()
    };
    match std::str::from_utf8(part) {
        Ok(_) => [head("").as_slice(), part].concat(),
        Err(_) => {
            let encoded = json!(ByteString(part.to_vec()));
            let encoded = encoded.as_str().unwrap_or_default().as_bytes();
            // Lines of MIME have at most 76 characters.
            let lines: Vec<&[u8]> = encoded.chunks(76).collect();
            [head("Content-Transfer-Encoding: base64\n"), lines.join(&b'\n')].concat()
        }
    }
}

pub(crate) fn is_mime(part: &[u8]) -> bool {
    let begins = |name: &[u8]| part.get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name));
    begins(b"content-type:") || begins(b"mime-version:")
}

/// The type of a part. The operator sends YAML without a first line as configuration.
fn content_type(part: &[u8]) -> &'static str {
    known_content_type(part).unwrap_or("text/cloud-config")
}

/// The type by which cloud-init recognizes a part: from the first line, or from the first bytes of a gzip file.
pub(crate) fn known_content_type(part: &[u8]) -> Option<&'static str> {
    let known = match part.trim_ascii_start() {
        part if part.starts_with(b"#cloud-config-archive") => "text/cloud-config-archive",
        part if part.starts_with(b"#part-handler") => "text/part-handler",
        part if part.starts_with(b"#include-once") => "text/x-include-once-url",
        part if part.starts_with(b"#cloud-config") => "text/cloud-config",
        part if part.starts_with(b"#!") => "text/x-shellscript",
        part if part.starts_with(b"#include") => "text/x-include-url",
        part if part.starts_with(b"#cloud-boothook") => "text/cloud-boothook",
        part if part.starts_with(b"## template: jinja") => "text/jinja2",
        [0x1f, 0x8b, ..] => "application/gzip",
        _ => return None,
    };
    Some(known)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_digest_depends_on_every_part() {
        let metadata = ObjectMeta {
            namespace: Some("shop".to_owned()),
            name: Some("web".to_owned()),
            uid: Some("u".to_owned()),
            ..ObjectMeta::default()
        };
        let id = MachineId::from_metadata(&metadata).unwrap();
        let digest = |user_data: Option<&str>, network_data: Option<&str>, source: Option<&[u8]>| {
            let given = CloudInit {
                user_data: user_data.map(str::to_owned),
                network_data: network_data.map(str::to_owned),
                secret_ref: None,
            };
            digest(&id, &given, source.map(|bytes| SecretBytes(bytes.to_vec())).as_ref())
        };
        let digests = [
            digest(Some("a"), None, None),
            digest(None, Some("a"), None),
            digest(None, None, Some(b"a")),
            digest(Some(""), None, None),
            digest(Some("a"), Some(""), None),
        ];
        assert_eq!(digests.iter().collect::<BTreeSet<_>>().len(), digests.len());
    }

    #[test]
    fn the_first_line_decides_the_type_of_a_part() {
        for (line, expected) in [
            ("#cloud-config", "text/cloud-config"),
            ("#cloud-config-archive", "text/cloud-config-archive"),
            ("#include", "text/x-include-url"),
            ("#include-once", "text/x-include-once-url"),
            ("#part-handler", "text/part-handler"),
            ("\n#!/bin/sh", "text/x-shellscript"),
            ("users: []", "text/cloud-config"),
        ] {
            assert_eq!(content_type(line.as_bytes()), expected);
        }
    }

    /// Review B21.
    #[test]
    fn a_part_that_is_mime_or_binary_stays_readable() {
        let nested = b"Content-Type: multipart/mixed; boundary=\"x\"\nMIME-Version: 1.0\n\n--x\n\n--x--\n";
        let message = String::from_utf8(multipart(nested, &[0x1f, 0x8b, 0x08, 0xff])).unwrap();
        assert!(message.contains("===\nContent-Type: multipart/mixed; boundary=\"x\"\n"), "{message}");
        assert!(!message.contains("text/cloud-config"), "{message}");
        let gzip = "Content-Type: application/gzip; charset=\"utf-8\"\nMIME-Version: 1.0\nContent-Transfer-Encoding: base64\n\nH4sI/w==\n";
        assert!(message.contains(gzip), "{message}");
        let long = mime_part(&[0xff; 200]);
        let text = String::from_utf8(long).unwrap();
        assert!(text.contains("base64") && text.lines().all(|line| line.len() <= 76), "{text}");
    }

    #[test]
    fn a_multipart_message_has_both_parts_in_order_with_their_types() {
        let message = String::from_utf8(multipart(b"#cloud-config\nusers: []\n", b"#!/bin/sh\ntrue\n")).unwrap();
        let config = message.find("text/cloud-config").unwrap();
        let script = message.find("text/x-shellscript").unwrap();
        assert!(config < script && message.contains("users: []") && message.ends_with("===--\n"), "{message}");
    }
}
