//! Flat JSON lines: `timestamp`, `level`, `message`, then the fields of the event and of every span around it. Inner
//! fields win over outer ones. The JSON format of `tracing-subscriber` nests spans and writes levels in upper case.

use std::io::Write;

use jiff::Timestamp;
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer,
    fmt::MakeWriter,
    layer::Context,
    registry::{LookupSpan, Scope},
};

const MESSAGE: &str = "message";
const RESERVED: [&str; 2] = ["timestamp", "level"];

pub(super) struct JsonLayer<W> {
    writer: W,
    clock: fn() -> Timestamp,
}

impl<W> JsonLayer<W> {
    pub(super) fn new(writer: W, clock: fn() -> Timestamp) -> Self {
        Self { writer, clock }
    }
}

#[derive(Default)]
struct SpanFields(Vec<(&'static str, Value)>);

impl SpanFields {
    fn set(&mut self, name: &'static str, value: Value) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
    }
}

impl Visit for SpanFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), value.into());
    }

    /// As a JSON number if it fits into 64 bits, such as the result of `Duration::as_millis`.
    fn record_u128(&mut self, field: &Field, value: u128) {
        self.set(field.name(), u64::try_from(value).map_or_else(|_| value.to_string().into(), Value::from));
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.set(field.name(), i64::try_from(value).map_or_else(|_| value.to_string().into(), Value::from));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.set(field.name(), format!("{value:?}").into());
    }
}

impl<S, W> Layer<S> for JsonLayer<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = SpanFields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<SpanFields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = SpanFields::default();
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            if let Some(outer) = span.extensions().get::<SpanFields>() {
                outer.0.iter().for_each(|(name, value)| fields.set(name, value.clone()));
            }
        }
        event.record(&mut fields);
        let level = event.metadata().level().as_str().to_ascii_lowercase();
        if let Ok(mut line) = json_line((self.clock)(), &level, &fields) {
            line.push(b'\n');
            // One write per line, so that lines of several threads do not mix. An error cannot be logged.
            let _ = self.writer.make_writer_for(event.metadata()).write_all(&line);
        }
    }
}

fn json_line(now: Timestamp, level: &str, fields: &SpanFields) -> serde_json::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(256);
    let mut serializer = serde_json::Serializer::new(&mut out);
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("timestamp", &now.to_string())?;
    map.serialize_entry("level", level)?;
    let message = fields.0.iter().find(|(name, _)| *name == MESSAGE).map(|(_, value)| value);
    map.serialize_entry(MESSAGE, message.unwrap_or(&Value::Null))?;
    for (name, value) in fields.0.iter().filter(|(name, _)| *name != MESSAGE && !RESERVED.contains(name)) {
        map.serialize_entry(name, value)?;
    }
    map.end()?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(log: impl FnOnce()) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let clock = || Timestamp::from_second(1_704_110_400).unwrap();
        let layer = JsonLayer::new(move || writer.clone(), clock);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        let bytes = buffer.0.lock().clone();
        String::from_utf8(bytes).unwrap().lines().map(ToOwned::to_owned).collect()
    }

    #[test]
    fn a_line_is_a_flat_object_with_the_fields_of_the_span_and_the_event() {
        let lines = logged(|| {
            let span =
                tracing::info_span!("reconcile", controller = "Machine", machine = "test-vm", namespace = "default");
            span.in_scope(|| tracing::info!(phase = "Creating", "Creating VirtualMachine resource"));
        });
        assert_eq!(
            lines,
            [concat!(
                r#"{"timestamp":"2024-01-01T12:00:00Z","level":"info","message":"Creating VirtualMachine resource","#,
                r#""controller":"Machine","machine":"test-vm","namespace":"default","phase":"Creating"}"#
            )]
        );
    }

    #[test]
    fn inner_fields_win_and_types_are_kept() {
        let lines = logged(|| {
            let outer = tracing::info_span!("outer", phase = "Pending", later = tracing::field::Empty);
            let _outer = outer.enter();
            outer.record("later", 7);
            let _inner = tracing::info_span!("inner", phase = "Creating").entered();
            let milliseconds = std::time::Duration::from_secs(2).as_millis();
            tracing::warn!(milliseconds, count = 3, ratio = 0.5, ok = true, phase = "Running", error = ?Some("x"), "say \"{}\"", "hi\n");
        });
        let line: Value = serde_json::from_str(&lines[0]).unwrap();
        let expected = serde_json::json!({
            "timestamp": "2024-01-01T12:00:00Z", "level": "warn", "message": "say \"hi\n\"", "phase": "Running",
            "later": 7, "milliseconds": 2000, "count": 3, "ratio": 0.5, "ok": true, "error": "Some(\"x\")",
        });
        assert_eq!(line, expected);
    }

    #[test]
    fn fields_named_timestamp_and_level_are_ignored() {
        let lines = logged(|| tracing::error!(timestamp = "1999", level = "info", "x"));
        assert_eq!(lines, [r#"{"timestamp":"2024-01-01T12:00:00Z","level":"error","message":"x"}"#]);
    }
}
