//! Forms of text that others have fixed: Kubernetes' names, and JSON byte by byte as its server writes it.

use std::borrow::Cow;

use serde::Serialize;

/// JSON as Go writes it: safe to paste into HTML.
pub fn go_json<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    const ESCAPED: [char; 5] = ['<', '>', '&', '\u{2028}', '\u{2029}'];
    let text = serde_json::to_string(value)?;
    // In JSON they occur in strings only, and in most texts not at all.
    if !text.contains(ESCAPED) {
        return Ok(text);
    }
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match ESCAPED.contains(&character) {
            true => out.push_str(&format!("\\u{:04x}", u32::from(character))),
            false => out.push(character),
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

/// A DNS label, as the names of namespaces are.
pub fn is_label(name: &str) -> bool {
    name.len() <= 63 && is_part(name)
}

/// DNS labels with dots between them, as the names of most objects are.
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_part)
}

fn is_part(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_written_as_go_does() {
        let text = "# R&D <ca@example.com> \u{2028} ä \"quoted\" \\ \n";
        let expected = r##""# R\u0026D \u003cca@example.com\u003e \u2028 ä \"quoted\" \\ \n""##;
        assert_eq!(go_json(&text).unwrap(), expected);
        assert_eq!(go_json(&["plain"]).unwrap(), r#"["plain"]"#);
    }

    #[test]
    fn text_is_cut_at_a_character_boundary_and_marked() {
        assert_eq!(truncate("short", 5), "short");
        assert_eq!(truncate("longer than that", 8), "longe…");
        assert_eq!(truncate("øøøøø", 8), "øø…");
    }

    #[test]
    fn names_are_those_that_kubernetes_takes() {
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
