//! Values of the operator's settings, which come from flags or from the environment.
//!
//! Every command of a program sees the environment of its Deployment. An invalid variable that only `run` uses must not
//! stop a command that prints, so clap keeps an invalid value as a [`Setting`], and `run` reports it.

use std::{ffi::OsStr, time::Duration};

use anyhow::{Result, bail};
use clap::{
    Arg, Command,
    builder::{PossibleValue, TypedValueParser},
    error::ErrorKind,
};
use vitivirt_api::text::is_label;

/// A value, or the error that names its flag and its variable.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting<T> {
    Valid(T),
    Invalid(String),
}

impl<T> Setting<T> {
    pub fn get(self) -> Result<T> {
        match self {
            Self::Valid(value) => Ok(value),
            Self::Invalid(error) => bail!(error),
        }
    }
}

/// Parses with another parser and keeps its error as a [`Setting`].
#[derive(Clone, Debug)]
pub struct SettingParser<P> {
    parser: P,
    expected: &'static str,
}

/// `expected` completes the error of an invalid value: "must be a number from 1 to 10".
pub fn setting<P: TypedValueParser>(parser: P, expected: &'static str) -> SettingParser<P> {
    SettingParser { parser, expected }
}

impl<P: TypedValueParser> TypedValueParser for SettingParser<P> {
    type Value = Setting<P::Value>;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Self::Value, clap::Error> {
        let parsed = self.parser.parse_ref(command, arg, value);
        Ok(parsed.map_or_else(|_| Setting::Invalid(self.error(arg, value)), Setting::Valid))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.parser.possible_values()
    }
}

impl<P: TypedValueParser> SettingParser<P> {
    fn error(&self, arg: Option<&Arg>, value: &OsStr) -> String {
        let name = arg.map(name).unwrap_or_default();
        let value = value.to_string_lossy();
        let Some(supported) = self.parser.possible_values() else {
            return format!("{name}: invalid value {value:?}: {}", self.expected);
        };
        let supported = supported.filter(|value| !value.is_hide_set()).map(|value| value.get_name().to_owned());
        let supported: Vec<String> = supported.collect();
        format!("{name}: unsupported value {value:?}; supported values: {}", supported.join(", "))
    }
}

/// `VARIABLE (--flag)`, or the flag alone.
fn name(arg: &Arg) -> String {
    let flag = match (arg.get_long(), arg.get_short()) {
        (_, Some(short)) => format!("-{short}"),
        (Some(long), None) => format!("--{long}"),
        (None, None) => arg.get_id().to_string(),
    };
    match arg.get_env() {
        Some(variable) => format!("{} ({flag})", variable.to_string_lossy()),
        None => flag,
    }
}

/// Durations in units, such as `30s` or `1h30m`, within bounds.
#[derive(Clone, Copy, Debug)]
pub struct DurationParser {
    pub least: Duration,
    pub most: Duration,
}

impl TypedValueParser for DurationParser {
    type Value = Duration;

    fn parse_ref(&self, command: &Command, _: Option<&Arg>, value: &OsStr) -> Result<Duration, clap::Error> {
        let parsed = value.to_str().and_then(|text| text.parse::<jiff::SignedDuration>().ok());
        let parsed = parsed.and_then(|parsed| Duration::try_from(parsed).ok());
        parsed
            .filter(|parsed| (self.least..=self.most).contains(parsed))
            .ok_or_else(|| clap::Error::new(ErrorKind::ValueValidation).with_cmd(command))
    }
}

/// The name of a namespace.
pub fn namespace_name(text: &str) -> Result<String, String> {
    if is_label(text) {
        Ok(text.to_owned())
    } else {
        Err("must consist of lower-case letters, digits and hyphens".to_owned())
    }
}

/// The name of a namespace, or none when the text is empty, as a variable of a Deployment can be.
pub fn optional_namespace(text: &str) -> Result<Option<String>, String> {
    if text.is_empty() { Ok(None) } else { namespace_name(text).map(Some) }
}

#[cfg(test)]
mod tests {
    use clap::{Parser, builder::BoolishValueParser, value_parser};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[derive(Debug, Parser)]
    struct Program {
        #[arg(
            long,
            env = "VITIVIRT_TEST_INTERVAL",
            default_value = "30s",
            value_parser = setting(DurationParser { least: Duration::from_secs(1), most: DAY }, "must be a duration from 1s to 24h")
        )]
        interval: Setting<Duration>,
        #[arg(long, default_value = "true", value_parser = setting(BoolishValueParser::new(), "must be true or false"))]
        enabled: Setting<bool>,
        #[arg(short, default_value = "5", value_parser = setting(value_parser!(u16).range(1..=10), "must be a number from 1 to 10"))]
        workers: Setting<u16>,
        #[arg(long, default_value = "", value_parser = setting(optional_namespace, "must be the name of a namespace"))]
        namespace: Setting<Option<String>>,
    }

    fn parse(words: &[&str]) -> Program {
        Program::try_parse_from([&["program"], words].concat()).unwrap()
    }

    #[test]
    fn defaults_and_valid_values_are_parsed() {
        let defaults = parse(&[]);
        assert_eq!(defaults.interval, Setting::Valid(Duration::from_secs(30)));
        assert_eq!(defaults.namespace, Setting::Valid(None));
        let given = parse(&["--interval=1m30s", "--enabled=0", "-w10", "--namespace=a-b"]);
        assert_eq!(given.interval, Setting::Valid(Duration::from_secs(90)));
        assert_eq!(given.enabled, Setting::Valid(false));
        assert_eq!(given.workers, Setting::Valid(10));
        assert_eq!(given.namespace, Setting::Valid(Some("a-b".to_owned())));
    }

    #[test]
    fn an_invalid_value_is_kept_as_one_sentence_with_flag_and_variable() {
        let error = |setting: Setting<Duration>| setting.get().unwrap_err().to_string();
        for text in ["soon", "-5s", "30", "25h", "500ms"] {
            let expected = format!(
                "VITIVIRT_TEST_INTERVAL (--interval): invalid value {text:?}: must be a duration from 1s to 24h"
            );
            assert_eq!(error(parse(&[&format!("--interval={text}")]).interval), expected);
        }
        let enabled = parse(&["--enabled=maybe"]).enabled.get().unwrap_err().to_string();
        assert_eq!(enabled, "--enabled: unsupported value \"maybe\"; supported values: true, false");
        let workers = parse(&["-w", "11"]).workers.get().unwrap_err().to_string();
        assert_eq!(workers, "-w: invalid value \"11\": must be a number from 1 to 10");
    }

    #[test]
    fn a_namespace_is_a_label_or_empty() {
        assert_eq!(optional_namespace("kube-virt").unwrap().as_deref(), Some("kube-virt"));
        assert_eq!(optional_namespace("").unwrap(), None);
        for invalid in ["A_B", "-a", "a-", "a.b", "a,b", " a", &"x".repeat(64)] {
            assert!(optional_namespace(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn help_shows_the_possible_values() {
        use clap::CommandFactory;
        let help = Program::command().render_long_help().to_string();
        assert!(help.contains("[possible values: true, false]"), "{help}");
    }
}
