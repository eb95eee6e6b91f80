//! Leadership of programs, read from their logs. Tests use it to prove that there were never two leaders at the same
//! time.

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::Value;

/// The log messages with which leadership begins and ends.
#[derive(Clone, Copy)]
pub struct Messages {
    pub begins: &'static str,
    pub ends: &'static str,
}

/// A period in which one program was the leader. `to` is None if the log contains no end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeadershipSpan {
    pub program: String,
    pub from: Timestamp,
    pub to: Option<Timestamp>,
}

/// The leadership spans of one program. `died` is the time at which the program was killed: it could not log that end.
pub fn spans(program: &str, log: &[Value], messages: Messages, died: Option<Timestamp>) -> Result<Vec<LeadershipSpan>> {
    let mut spans: Vec<LeadershipSpan> = Vec::new();
    for line in log {
        let message = line.get("message").and_then(Value::as_str).unwrap_or_default();
        let time = || -> Result<Timestamp> {
            let text = line.get("timestamp").and_then(Value::as_str).context("log line without a timestamp")?;
            text.parse().with_context(|| format!("invalid timestamp {text:?}"))
        };
        if message == messages.begins {
            spans.push(LeadershipSpan { program: program.to_owned(), from: time()?, to: None });
        } else if message == messages.ends
            && let Some(span) = spans.last_mut()
        {
            span.to = Some(time()?);
        }
    }
    if let Some(span) = spans.last_mut() {
        span.to = span.to.or(died);
    }
    Ok(spans)
}

/// Fails if two spans overlap. The error names both programs.
pub fn require_one_leader(mut spans: Vec<LeadershipSpan>) -> Result<()> {
    spans.sort_by_key(|span| span.from);
    for (earlier, later) in spans.iter().zip(spans.iter().skip(1)) {
        ensure!(
            earlier.to.is_some_and(|end| end <= later.from),
            "{} led until {:?}, but {} led since {}",
            earlier.program,
            earlier.to,
            later.program,
            later.from
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MESSAGES: Messages = Messages { begins: "begin", ends: "end" };

    fn line(second: i64, message: &str) -> Value {
        json!({"timestamp": Timestamp::from_second(second).unwrap().to_string(), "message": message})
    }

    #[test]
    fn spans_are_read_from_the_log() {
        let log = [line(1, "begin"), line(2, "something"), line(3, "end"), line(5, "begin")];
        let spans: Vec<(i64, Option<i64>)> = spans("a", &log, MESSAGES, Some(Timestamp::from_second(9).unwrap()))
            .unwrap()
            .iter()
            .map(|span| (span.from.as_second(), span.to.map(Timestamp::as_second)))
            .collect();
        assert_eq!(spans, [(1, Some(3)), (5, Some(9))]);
    }

    #[test]
    fn overlapping_spans_are_an_error() {
        let a = spans("a", &[line(1, "begin"), line(4, "end")], MESSAGES, None).unwrap();
        let b = spans("b", &[line(3, "begin")], MESSAGES, None).unwrap();
        let c = spans("c", &[line(4, "begin")], MESSAGES, None).unwrap();
        assert!(require_one_leader([a.clone(), b].concat()).unwrap_err().to_string().contains("b led since"));
        require_one_leader([a, c].concat()).unwrap();
    }
}
