//! Digests of the content of objects.

use std::fmt;

use serde_json::Value;
use sha1::{Digest as _, Sha1};

use crate::{
    live::NON_CONTENT,
    names::{IDENTITY, annotation},
};

/// Fields that contain a certificate. Certificates are renewed without an edit of the resource, so a record does not
/// cover them.
pub(crate) const CERTIFICATES: [&str; 2] = ["caBundle", "destinationCACertificate"];

/// Users restart pods, which is not a new desired state.
pub(crate) fn is_not_recorded(key: &str) -> bool {
    CERTIFICATES.contains(&key) || key == annotation::RESTARTED_AT
}

/// Short, because every virt-handler watches the KubeVirt resource. It is the same in every process and every version
/// of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Digest {
    const BITS: u32 = 40;

    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let mut sha1 = Sha1::new();
        sha1.update(bytes);
        Self::finish(sha1)
    }

    /// The digest of the content of a desired object, or of its pod template.
    pub(crate) fn of_object(object: &Value) -> Self {
        Self::of_content(object, &|key| is_not_recorded(key) || IDENTITY.contains(&key))
    }

    pub(crate) fn of_content(object: &Value, is_skipped: &dyn Fn(&str) -> bool) -> Self {
        let mut sha1 = Sha1::new();
        let fields = object.as_object().into_iter().flatten();
        hash_fields(&mut sha1, fields.filter(|(key, _)| !NON_CONTENT.contains(&key.as_str())).collect(), is_skipped);
        Self::finish(sha1)
    }

    fn finish(sha1: Sha1) -> Self {
        let folded = sha1.finalize().iter().take(8).fold(0, |folded, byte| folded << 8 | u64::from(*byte));
        Self(folded >> (u64::BITS - Self::BITS))
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        u64::from_str_radix(text, 16).ok().map(Self)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:010x}", self.0)
    }
}

fn hash_value(sha1: &mut Sha1, value: &Value, is_skipped: &dyn Fn(&str) -> bool) {
    match value {
        Value::Object(fields) => hash_fields(sha1, fields.iter().collect(), is_skipped),
        Value::Array(elements) => {
            sha1.update([b'[']);
            for element in elements {
                hash_value(sha1, element, is_skipped);
                sha1.update([b',']);
            }
            sha1.update([b']']);
        }
        scalar => sha1.update(scalar.to_string()),
    }
}

/// In the order of the keys, which a map may not keep.
fn hash_fields(sha1: &mut Sha1, mut fields: Vec<(&String, &Value)>, is_skipped: &dyn Fn(&str) -> bool) {
    fields.sort_unstable_by_key(|(key, _)| *key);
    sha1.update([b'{']);
    for (key, value) in fields.into_iter().filter(|(key, _)| !is_skipped(key)) {
        sha1.update(Value::from(key.as_str()).to_string());
        sha1.update([b':']);
        hash_value(sha1, value, is_skipped);
        sha1.update([b',']);
    }
    sha1.update([b'}']);
}
