//! UIDs and resource versions in compact form, because every object in every cache has both. A value that does not have
//! the usual form of API servers is kept as text.

use std::{fmt, sync::Arc};

/// An object's UID: sixteen bytes if it is a UUID in its usual form.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Uid(Form);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Form {
    Number([u8; 16]),
    Text(Arc<str>),
}

impl From<&str> for Uid {
    fn from(text: &str) -> Self {
        let number = u128::from_str_radix(&text.replace('-', ""), 16).ok().map(Uuid);
        // Only if it is printed in the same form again.
        match number.filter(|number| number.to_string() == text) {
            Some(Uuid(number)) => Self(Form::Number(number.to_be_bytes())),
            None => Self(Form::Text(text.into())),
        }
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Form::Number(bytes) => Uuid(u128::from_be_bytes(*bytes)).fmt(f),
            Form::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

struct Uuid(u128);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = |from_the_right: u32, count: u32| (self.0 >> (4 * from_the_right)) & ((1 << (4 * count)) - 1);
        let parts = (digits(24, 8), digits(20, 4), digits(16, 4), digits(12, 4), digits(0, 12));
        write!(f, "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", parts.0, parts.1, parts.2, parts.3, parts.4)
    }
}

/// A resource version. Kubernetes defines resource versions as increasing decimal integers. For a server that breaks
/// this rule no version counts as older than another. Then the watch wins over the operator's own writes, which is
/// safe.
#[derive(Clone, PartialEq, Eq)]
pub enum ResourceVersion {
    Number(u64),
    Text(Box<str>),
}

impl ResourceVersion {
    pub(crate) fn is_older_than(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Number(this), Self::Number(other)) => this < other,
            _ => false,
        }
    }
}

impl From<&str> for ResourceVersion {
    fn from(text: &str) -> Self {
        match text.parse::<u64>().ok().filter(|number| number.to_string() == text) {
            Some(number) => Self::Number(number),
            None => Self::Text(text.into()),
        }
    }
}

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Debug for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_and_versions_are_printed_as_they_were_parsed() {
        for text in [
            "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1",
            "00000000-0000-0000-0000-000000000000",
            "2F1C1A52-9E0E-4CF5-8F8C-0D3C5BE8C7A1",
            "2f1c1a529e0e4cf58f8c0d3c5be8c7a1",
            "+f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1",
            "u",
            "",
        ] {
            assert_eq!(Uid::from(text).to_string(), text);
        }
        let (upper, lower) = ("2F1C1A52-9E0E-4CF5-8F8C-0D3C5BE8C7A1", "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1");
        assert_ne!(Uid::from(upper), Uid::from(lower));
        for text in ["0", "18446744073709551615", "18446744073709551616", "007", "+7", "-1", "", "a"] {
            assert_eq!(ResourceVersion::from(text).to_string(), text);
        }
    }

    #[test]
    fn only_numeric_versions_are_compared() {
        let older = |a: &str, b: &str| ResourceVersion::from(a).is_older_than(&ResourceVersion::from(b));
        assert!(older("9", "10") && !older("10", "9") && !older("9", "9"));
        assert!(!older("9", "a") && !older("", "9") && !older("9", ""));
    }

    /// A large cluster has fifty thousand of each in the caches.
    #[test]
    fn uids_and_versions_are_small() {
        assert!(
            size_of::<Uid>() <= 24 && size_of::<ResourceVersion>() <= 16,
            "{} {}",
            size_of::<Uid>(),
            size_of::<ResourceVersion>()
        );
    }
}
