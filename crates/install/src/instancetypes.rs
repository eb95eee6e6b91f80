//! The common instancetypes and preferences: data of the release, one line each.

use api::Failure;
use serde::Deserialize;
use serde_json::Value;

use crate::packed::Packed;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bundle(Packed);

pub(crate) const INSTANCETYPES: Bundle = Bundle(Packed::new(include_bytes!("../assets/v1.8.4/instancetypes.jsonl.gz")));
pub(crate) const PREFERENCES: Bundle = Bundle(Packed::new(include_bytes!("../assets/v1.8.4/preferences.jsonl.gz")));

#[derive(Deserialize)]
struct Named {
    metadata: Name,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

impl Bundle {
    pub(crate) fn names(self) -> Result<Vec<String>, Failure> {
        self.0
            .lines()
            .map(|line| {
                let line = line?;
                let named: Named = serde_json::from_str(&line).map_err(|error| unreadable(&error))?;
                Ok(named.metadata.name)
            })
            .collect()
    }

    /// The object on this line, counted from nought. The lines before it are unpacked and thrown away.
    pub(crate) fn object(self, line: usize) -> Result<Value, Failure> {
        let text = self.0.lines().nth(line).unwrap_or_else(|| Ok(String::new()))?;
        serde_json::from_str(&text).map_err(|error| unreadable(&error))
    }
}

fn unreadable(error: &serde_json::Error) -> Failure {
    Failure::bug(api::reason::UNREADABLE_ANSWER, format!("a bundled instancetype cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_found_by_its_line() {
        for (bundle, count) in [(INSTANCETYPES, 65), (PREFERENCES, 54)] {
            let names = bundle.names().unwrap();
            assert_eq!(names.len(), count);
            for line in [0, count / 2, count - 1] {
                assert_eq!(bundle.object(line).unwrap()["metadata"]["name"], names[line].as_str());
            }
            assert!(bundle.object(count).is_err());
        }
    }
}
