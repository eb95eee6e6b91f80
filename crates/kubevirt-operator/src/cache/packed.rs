//! Small things that ten thousand objects have, each in one allocation.

use std::collections::BTreeMap;
use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// JSON that is seldom read, compressed: most Machines are at rest most of the time, and a third of the size of all of
/// them is what decides how much memory the operator needs. The same value has the same bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Squeezed(Box<[u8]>);

impl Squeezed {
    /// Nothing here can fail but a value that is no JSON, and ours came as JSON.
    pub(crate) fn of<T: Serialize>(value: &T) -> Self {
        let json = serde_json::to_vec(value).unwrap_or_default();
        let mut encoder = DeflateEncoder::new(Vec::with_capacity(json.len() / 2), Compression::new(4));
        let written = encoder.write_all(&json).and_then(|()| encoder.finish());
        Self(written.unwrap_or_default().into())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Nothing, if it is bigger than that.
    pub(crate) fn at_most(self, limit: usize) -> Self {
        if self.len() > limit { Self::default() } else { self }
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        let mut json = Vec::with_capacity(self.0.len() * 4);
        let inflated = DeflateDecoder::new(&*self.0).read_to_end(&mut json);
        inflated.map_err(serde_json::Error::io)?;
        serde_json::from_slice(&json)
    }
}

/// Labels as `key=value` lines: neither may hold `=` in its key or a line break anywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels(Box<str>);

impl Labels {
    pub(crate) fn of(metadata: &ObjectMeta) -> Self {
        let lines: Vec<String> =
            metadata.labels.iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
        Self(lines.join("\n").into())
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| line.split_once('='))
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.pairs().find(|(have, _)| *have == key).map(|(_, value)| value)
    }

    pub(crate) fn to_map(&self) -> BTreeMap<String, String> {
        self.pairs().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

/// Of a set of words that is known beforehand, the one that `word` is; anything else is the last of them.
pub(crate) fn known(words: &'static [&'static str], word: &str) -> &'static str {
    words.iter().find(|known| **known == word).or(words.last()).copied().unwrap_or_default()
}

/// At most `limit` bytes of what a guest or a server says, cut between characters.
pub(crate) fn bounded(text: &str, limit: usize) -> Box<str> {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_survive() {
        let labels: BTreeMap<String, String> = [("a/b", "c"), ("empty", ""), ("z", "1-2_3.4")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let packed = Labels::of(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() });
        assert_eq!(packed.to_map(), labels);
        assert_eq!(packed.get("empty"), Some(""));
        assert_eq!(packed.get("a"), None);
        assert!(Labels::of(&ObjectMeta::default()).to_map().is_empty());
    }

    #[test]
    fn squeezed_json_comes_back() {
        let value =
            serde_json::json!({"a": ["lastTransitionTime", "lastTransitionTime", 1, null], "b": "ø".repeat(500)});
        let squeezed = Squeezed::of(&value);
        assert_eq!(squeezed.read::<serde_json::Value>().unwrap(), value);
        assert_eq!(squeezed, Squeezed::of(&value));
        assert!(squeezed.0.len() < 200);
        assert!(Squeezed::default().read::<serde_json::Value>().is_err());
    }

    #[test]
    fn unknown_words_are_the_last() {
        assert_eq!(known(&["Bound", "Pending", ""], "Bound"), "Bound");
        assert_eq!(known(&["Bound", "Pending", ""], "Strange"), "");
        assert_eq!(&*bounded("øøø", 3), "ø");
    }
}
