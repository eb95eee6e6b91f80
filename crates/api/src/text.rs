//! Text in forms that Kubernetes defines: object names, and JSON with the bytes that Go's encoder produces.

use std::{borrow::Cow, fmt::Write as _};

use serde::Serialize;

/// JSON as Go's encoder writes it: characters that are special in HTML are escaped.
pub fn go_json<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    const ESCAPED: [char; 5] = ['<', '>', '&', '\u{2028}', '\u{2029}'];
    let text = serde_json::to_string(value)?;
    // These characters occur only inside strings, and most texts have none.
    if !text.contains(ESCAPED) {
        return Ok(text);
    }
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if ESCAPED.contains(&character) {
            out.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            out.push(character);
        }
    }
    Ok(out)
}

/// Cuts text from a server, a guest or a user to at most `limit` bytes and marks the cut with an ellipsis.
pub fn truncate(text: &str, limit: usize) -> Cow<'_, str> {
    const ELLIPSIS: char = '…';
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(limit.saturating_sub(ELLIPSIS.len_utf8()));
    let mut short = text.get(..end).unwrap_or_default().to_owned();
    short.push(ELLIPSIS);
    Cow::Owned(short)
}

/// Lower-case hexadecimal digits, two for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Whether this is a DNS label, such as the name of a namespace.
pub fn is_label(name: &str) -> bool {
    name.len() <= 63 && has_label_characters(name)
}

/// Whether this is one or more DNS labels separated by dots, such as the names of most objects.
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(has_label_characters)
}

fn has_label_characters(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_escapes_of_go() {
        let text = "# R&D <ca@example.com> \u{2028} ä \"quoted\" \\ \n";
        let expected = r##""# R\u0026D \u003cca@example.com\u003e \u2028 ä \"quoted\" \\ \n""##;
        assert_eq!(go_json(&text).unwrap(), expected);
        assert_eq!(go_json(&["plain"]).unwrap(), r#"["plain"]"#);
    }

    #[test]
    fn hex_has_two_digits_per_byte() {
        assert_eq!(hex(&[0, 10, 255]), "000aff");
        assert_eq!(hex(&[]), "");
    }

    #[test]
    fn text_is_cut_at_a_character_boundary_and_marked() {
        assert_eq!(truncate("short", 5), "short");
        assert_eq!(truncate("longer than that", 8), "longe…");
        assert_eq!(truncate("øøøøø", 8), "øø…");
    }

    #[test]
    fn names_are_valid_exactly_if_kubernetes_accepts_them() {
        let (label, subdomain) = ("a".repeat(63), format!("{0}.{0}", "a".repeat(126)));
        for name in ["a", "a-b", "0", &label] {
            assert!(is_label(name) && is_subdomain(name), "{name}");
        }
        for name in ["", "-a", "a-", "A", "a_b", "a=b", "a b"] {
            assert!(!is_label(name) && !is_subdomain(name), "{name:?}");
        }
        assert!(is_subdomain("a.b") && !is_label("a.b") && !is_subdomain("a..b") && !is_label(&format!("{label}a")));
        assert!(is_subdomain(&subdomain) && !is_subdomain(&format!("{subdomain}a")));
    }
}
