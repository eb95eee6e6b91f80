//! The common instancetypes and preferences: data of the KubeVirt release, one line each.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::Failure;

use crate::compressed::CompressedAsset;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompressedLines(CompressedAsset);

pub(crate) const INSTANCETYPES: CompressedLines =
    CompressedLines(CompressedAsset::new(include_bytes!("../assets/v1.8.4/instancetypes.jsonl.gz")));
pub(crate) const PREFERENCES: CompressedLines =
    CompressedLines(CompressedAsset::new(include_bytes!("../assets/v1.8.4/preferences.jsonl.gz")));

#[derive(Deserialize)]
struct NamedObject {
    metadata: Name,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

impl CompressedLines {
    pub(crate) fn lines(self) -> Result<Arc<[String]>, Failure> {
        self.0.lines().collect()
    }
}

pub(crate) fn name(line: &str) -> Result<String, Failure> {
    let named: NamedObject = serde_json::from_str(line).map_err(|error| unreadable(&error))?;
    Ok(named.metadata.name)
}

/// The object on this line. The first line is 0.
pub(crate) fn object(lines: &[String], line: usize) -> Result<Value, Failure> {
    let text = lines.get(line).map(String::as_str).unwrap_or_default();
    serde_json::from_str(text).map_err(|error| unreadable(&error))
}

fn unreadable(error: &serde_json::Error) -> Failure {
    Failure::bug(vitivirt_api::reason::UNREADABLE_ANSWER, format!("a bundled instancetype cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_is_found_by_its_line() {
        for (asset, count) in [(INSTANCETYPES, 65), (PREFERENCES, 54)] {
            let lines = asset.lines().unwrap();
            assert_eq!(lines.len(), count);
            for line in [0, count / 2, count - 1] {
                let object = object(&lines, line).unwrap();
                assert_eq!(object["metadata"]["name"], name(&lines[line]).unwrap());
            }
            assert!(object(&lines, count).is_err());
        }
    }
}
