//! Texts of the kubelet, the container runtime and containers, without the parts that differ each time: a status that
//! contains them is written only when something has changed.

use serde_json::Value;
use vitivirt_api::text::truncate;

const LIMIT: usize = 256;
/// Identifiers of containers and sandboxes are hexadecimal and at least this long.
const IDENTIFIER: usize = 12;

/// A message in the status of a pod.
pub(crate) fn status(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().map(stable_word).filter(|word| !word.is_empty()).collect();
    truncate(&words.join(" "), LIMIT).into_owned()
}

/// The message of a container that ended: the line of its log that explains most.
pub(crate) fn log(text: &str) -> String {
    let lines: Vec<String> = text.lines().filter_map(log_message).collect();
    let is_cause = |line: &&String| line.starts_with("panic:") || line.starts_with("fatal error:");
    let line = lines.iter().find(is_cause).or_else(|| lines.iter().rfind(|line| !is_stack(line)));
    status(line.map(String::as_str).unwrap_or_default())
}

/// KubeVirt's components log JSON, client libraries log in klog's format: `E0102 15:04:05.678901 1 file.go:12] text`.
fn log_message(line: &str) -> Option<String> {
    let line = line.trim();
    let field = |entry: &Value, name: &str| entry.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let text = match serde_json::from_str::<Value>(line) {
        Ok(entry @ Value::Object(_)) => {
            let (message, reason) = (field(&entry, "msg"), field(&entry, "reason"));
            if reason.is_empty() { message } else { format!("{message}: {reason}") }
        }
        _ => match line.split_once("] ") {
            Some((header, message)) if header.starts_with(['I', 'W', 'E', 'F']) && header.contains(".go:") => {
                message.to_owned()
            }
            _ => line.to_owned(),
        },
    };
    (!text.is_empty()).then_some(text)
}

/// The stack of a Go panic follows its message.
fn is_stack(line: &str) -> bool {
    line.starts_with("goroutine ") || line.contains(".go:") || line.ends_with(')') && line.contains("(0x")
}

fn stable_word(word: &str) -> &str {
    let mut run = 0;
    let is_identifier = word.chars().any(|character| {
        run = if character.is_ascii_hexdigit() { run + 1 } else { 0 };
        run >= IDENTIFIER
    });
    let is_time = contains_shape(word, b"00:00:00") || contains_shape(word, b"0000-00-00");
    // A connection names the local port, which is random.
    let is_connection = word.contains("->");
    match word {
        // A digest is a stable identifier.
        _ if word.contains("@sha256:") || word.starts_with("sha256:") => word,
        _ if is_connection || is_time => "",
        _ if is_identifier => "…",
        _ => word,
    }
}

/// Whether a part of the word has a digit wherever the shape has one, and is equal elsewhere.
fn contains_shape(word: &str, shape: &[u8]) -> bool {
    let fits = |(byte, shape): (&u8, &u8)| if *shape == b'0' { byte.is_ascii_digit() } else { byte == shape };
    word.as_bytes().windows(shape.len()).any(|part| part.iter().zip(shape).all(fits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_differ_each_time_are_left_out() {
        for (text, expected) in [
            ("secret \"kubevirt-virt-api-certs\" not found", "secret \"kubevirt-virt-api-certs\" not found"),
            (
                "lookup registry.example on 10.96.0.10:53: read udp 10.0.0.5:43211->10.96.0.10:53: i/o timeout",
                "lookup registry.example on 10.96.0.10:53: read udp i/o timeout",
            ),
            ("sandbox \"0123456789abcdef0123\" is gone", "sandbox … is gone"),
            (
                "image example.org/a@sha256:0123456789abcdef not found",
                "image example.org/a@sha256:0123456789abcdef not found",
            ),
            ("at 2026-11-16T05:22:01Z it failed", "at it failed"),
            ("15:04:05.123 https://10.96.1.2:443/a: no", "https://10.96.1.2:443/a: no"),
            ("image example.org:5000/a-b-c:v1.2.345678", "image example.org:5000/a-b-c:v1.2.345678"),
        ] {
            assert_eq!(status(text), expected);
        }
        assert!(status(&"word ".repeat(200)).len() <= LIMIT);
    }

    #[test]
    fn the_line_of_a_log_that_explains_most_is_kept() {
        let json = "{\"level\":\"info\",\"msg\":\"starting\",\"timestamp\":\"2026-11-16T05:22:01Z\"}\n\
                    {\"level\":\"fatal\",\"msg\":\"cannot watch\",\"reason\":\"no such host\",\"pos\":\"a.go:1\"}\n";
        assert_eq!(log(json), "cannot watch: no such host");
        assert_eq!(log("E1116 05:22:01.123456       1 leader.go:12] lost the lease\n"), "lost the lease");
        let panic = "starting\npanic: no devices\n\ngoroutine 1 [running]:\nmain.main()\n\t/a/main.go:12 +0x1d\n";
        assert_eq!(log(panic), "panic: no devices");
        assert_eq!(log(""), "");
    }
}
