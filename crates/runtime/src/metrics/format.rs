//! The two text formats of metrics: OpenMetrics 1.0.0 and the older text format 0.0.4 of Prometheus. The client chooses
//! with the header `Accept`.
//!
//! `prometheus-client` writes OpenMetrics only. Both formats have the same lines for samples; they differ in the lines
//! that describe a metric.

use std::fmt::Write;

use http::{HeaderMap, header};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricsFormat {
    /// What a client gets that names no format, for example a browser or curl.
    Text,
    OpenMetrics,
}

impl MetricsFormat {
    /// The format that the client prefers. A client that accepts none of the two gets the text format, as from other
    /// Prometheus clients, because an error would not help it.
    pub(crate) fn negotiate(headers: &HeaderMap) -> Self {
        let (mut text, mut open_metrics) = (0.0_f32, 0.0_f32);
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        for range in accepted.flat_map(|value| value.split(',')).map(MediaRange::parse) {
            match range.media_type.as_str() {
                "application/openmetrics-text" if matches!(range.version, None | Some("1.0.0" | "0.0.1")) => {
                    open_metrics = open_metrics.max(range.quality);
                }
                "text/plain" if matches!(range.version, None | Some("0.0.4")) => text = text.max(range.quality),
                "*/*" | "text/*" => text = text.max(range.quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::Text }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// One element of the header `Accept`.
struct MediaRange<'a> {
    /// In lower case.
    media_type: String,
    version: Option<&'a str>,
    /// From 0 (not accepted) to 1.
    quality: f32,
}

impl<'a> MediaRange<'a> {
    fn parse(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let media_type = parts.next().unwrap_or_default().to_ascii_lowercase();
        let mut range = Self { media_type, version: None, quality: 1.0 };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            let value = value.trim().trim_matches('"');
            match name.trim().to_ascii_lowercase().as_str() {
                "version" => range.version = Some(value),
                "q" => range.quality = value.parse().unwrap_or(0.0),
                _ => {}
            }
        }
        range
    }
}

/// OpenMetrics as text format 0.0.4: a counter is described under the name of its samples, an info metric is a gauge,
/// and there are neither units nor an end mark. Help texts are escaped less.
pub(super) fn to_text_format(open_metrics: &str) -> Result<String, std::fmt::Error> {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            // The type, which follows, decides under which name.
            help = described.split_once(' ').map(|(_, help)| help.replace("\\\"", "\""));
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|typed| typed.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "stateset" => ("", "gauge"),
                "unknown" | "gaugehistogram" => ("", "untyped"),
                _ => ("", kind),
            };
            if let Some(help) = help.take() {
                writeln!(text, "# HELP {name}{suffix} {help}")?;
            }
            writeln!(text, "# TYPE {name}{suffix} {kind}")?;
        } else if !line.starts_with('#') {
            writeln!(text, "{line}")?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn negotiated(accept: &[&str]) -> MetricsFormat {
        let mut headers = HeaderMap::new();
        for value in accept {
            headers.append(header::ACCEPT, HeaderValue::from_str(value).unwrap());
        }
        MetricsFormat::negotiate(&headers)
    }

    #[test]
    fn the_client_chooses_the_format() {
        use MetricsFormat::{OpenMetrics, Text};
        for (accept, expected) in [
            ("", Text),
            ("*/*", Text),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Text),
            ("application/json", Text),
            ("text/plain;version=0.0.4", Text),
            ("application/openmetrics-text", OpenMetrics),
            ("Application/OpenMetrics-Text; Version=\"1.0.0\"; charset=utf-8", OpenMetrics),
            ("application/openmetrics-text;version=0.0.1", OpenMetrics),
            ("application/openmetrics-text;version=2.0.0", Text),
            ("application/openmetrics-text;q=0", Text),
            ("application/openmetrics-text;q=high", Text),
            ("application/openmetrics-text;q=0.3, text/plain;version=0.0.4;q=0.7", Text),
            ("text/plain;version=0.0.4;q=0.3, application/openmetrics-text;version=1.0.0;q=0.7", OpenMetrics),
            // Prometheus 2 and 3.
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                 text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                OpenMetrics,
            ),
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,\
                 application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                 text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                OpenMetrics,
            ),
        ] {
            assert_eq!(negotiated(&[accept]), expected, "{accept}");
        }
        assert_eq!(negotiated(&[]), Text);
        assert_eq!(negotiated(&["text/plain;q=0.1", "application/openmetrics-text;q=0.2"]), OpenMetrics);
    }

    #[test]
    fn descriptions_follow_the_text_format() {
        let open_metrics = "# HELP a_bytes Size of \\\"a\\\" \\\\ b.\n# TYPE a_bytes gauge\n# UNIT a_bytes bytes\n\
                            a_bytes 1\n# HELP b Count.\n# TYPE b counter\nb_total{x=\"# HELP\"} 2\n# HELP c V.\n\
                            # TYPE c info\nc_info{version=\"1\"} 1\n# HELP d T.\n# TYPE d histogram\n\
                            d_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let text = "# HELP a_bytes Size of \"a\" \\\\ b.\n# TYPE a_bytes gauge\na_bytes 1\n# HELP b_total Count.\n\
                    # TYPE b_total counter\nb_total{x=\"# HELP\"} 2\n# HELP c_info V.\n# TYPE c_info gauge\n\
                    c_info{version=\"1\"} 1\n# HELP d T.\n# TYPE d histogram\nd_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(to_text_format(open_metrics).unwrap(), text);
    }
}
