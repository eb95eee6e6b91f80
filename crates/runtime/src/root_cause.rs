//! The innermost error, without the layers of HTTP and TLS libraries around it.

/// "connection refused" instead of the four errors that wrap it.
pub fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
