//! Log lines on standard error: one flat JSON object per line, or text.

mod json;

use std::{
    fmt,
    io::{self, IsTerminal},
    sync::OnceLock,
};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer, Registry, filter::Targets, layer::SubscriberExt, reload, util::SubscriberInitExt};

use json::JsonLayer;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    #[default]
    Json,
    /// Human-readable text.
    Text,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        })
    }
}

/// The operator's own lines at `level`. Libraries log at most warnings, and `kube`'s client nothing: when it cannot
/// parse a response it logs all of it, which may be a Secret. Our own client layer logs requests.
fn level_filter(level: LogLevel) -> Targets {
    let ours = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let theirs = ours.min(LevelFilter::WARN);
    Targets::new()
        .with_default(ours)
        .with_targets(["kube_client", "kube_runtime", "kube_core"].map(|name| (name, LevelFilter::OFF)))
        .with_targets(["h2", "hyper", "hyper_util", "rustls", "tower"].map(|name| (name, theirs)))
}

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Changes the log level of a running program.
pub fn set_level(level: LogLevel) {
    if let Some(handle) = FILTER.get() {
        let _ = handle.modify(|current| *current = level_filter(level));
    }
}

/// Call this once per process, before anything is logged.
#[expect(clippy::disallowed_methods, reason = "the clock of log lines")]
pub(crate) fn init(format: LogFormat, level: LogLevel) {
    let layer = match format {
        LogFormat::Json => JsonLayer::new(io::stderr, jiff::Timestamp::now).boxed(),
        LogFormat::Text => {
            let ansi = io::stderr().is_terminal();
            tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false).with_ansi(ansi).boxed()
        }
    };
    // Only tests call this twice. The settings of the first call stay.
    let (filter, handle) = reload::Layer::new(level_filter(level));
    let _ = Registry::default().with(layer.with_filter(filter)).try_init();
    let _ = FILTER.set(handle);
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.payload().downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.payload().downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
        let location = panic.location().map(ToString::to_string);
        tracing::error!(panic = text, location, "panic");
    }));
}
