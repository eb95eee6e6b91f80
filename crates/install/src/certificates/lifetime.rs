//! Lifetimes of certificates and how long before expiry they are renewed. The resource has them in Go's duration
//! format.

use std::{fmt, time::Duration};

use vitivirt_api::kubevirt::SelfSigned;

const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Upstream virt-operator prints Go's structure.
const ANNOTATION_PREFIX: &str = "&Duration{Duration:";
const ANNOTATION_SUFFIX: &str = ",}";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    pub duration: Duration,
    pub renew_before: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    pub ca: Lifetime,
    /// The CAs of export and backup: they have the duration of the CA and the `renewBefore` of a leaf certificate.
    pub other_cas: Lifetime,
    pub leaf: Lifetime,
}

impl Default for Lifetimes {
    fn default() -> Self {
        let (ca, leaf) = (Lifetime::renewed_in_last_fifth(WEEK), Lifetime::renewed_in_last_fifth(DAY));
        Self { ca, other_cas: Lifetime { renew_before: leaf.renew_before, ..ca }, leaf }
    }
}

impl Lifetime {
    fn renewed_in_last_fifth(duration: Duration) -> Self {
        Self { duration, renew_before: duration / 5 }
    }

    /// The value of the annotation `kubevirt.io/duration` of a certificate with this lifetime.
    pub fn annotation(self) -> String {
        format!("{ANNOTATION_PREFIX}{}{ANNOTATION_SUFFIX}", go_duration(self.duration))
    }

    /// The lifetime of a stored certificate. The annotation does not contain when it is renewed.
    pub(crate) fn from_annotation(text: &str) -> Option<Self> {
        let duration = text.strip_prefix(ANNOTATION_PREFIX)?.strip_suffix(ANNOTATION_SUFFIX)?;
        parse_duration(duration).map(Self::renewed_in_last_fifth)
    }
}

impl Lifetimes {
    /// The deprecated fields take precedence over the newer ones.
    pub fn new(settings: Option<&SelfSigned>) -> Result<Self, InvalidDuration> {
        let none = SelfSigned::default();
        let settings = settings.unwrap_or(&none);
        let (ca_settings, server) =
            (settings.ca.clone().unwrap_or_default(), settings.server.clone().unwrap_or_default());
        let ca = first_duration("ca.duration", &[&settings.ca_rotate_interval, &ca_settings.duration], || WEEK)?;
        let overlap =
            first_duration("ca.renewBefore", &[&settings.ca_overlap_interval, &ca_settings.renew_before], || ca / 5)?;
        let leaf = first_duration("server.duration", &[&settings.cert_rotate_interval, &server.duration], || DAY)?;
        let renew = first_duration("server.renewBefore", &[&server.renew_before], || leaf / 5)?;
        Ok(Self {
            ca: Lifetime { duration: ca, renew_before: overlap },
            other_cas: Lifetime { duration: ca, renew_before: renew },
            leaf: Lifetime { duration: leaf, renew_before: renew },
        })
    }
}

/// The first value that is set, or the default.
fn first_duration(
    field: &'static str,
    values: &[&Option<String>],
    default: impl FnOnce() -> Duration,
) -> Result<Duration, InvalidDuration> {
    match values.iter().find_map(|text| text.as_deref()) {
        Some(text) => parse_duration(text).ok_or_else(|| InvalidDuration { field, text: text.to_owned() }),
        None => Ok(default()),
    }
}

/// A field of the resource that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidDuration {
    pub field: &'static str,
    pub text: String,
}

impl fmt::Display for InvalidDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "spec.certificateRotateStrategy.selfSigned.{}: invalid value {:?}: must be a duration such as 24h or 90m",
            self.field, self.text
        )
    }
}

impl std::error::Error for InvalidDuration {}

/// A duration in Go's format: a sequence of numbers with units. A negative duration is not valid.
fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|character: char| !character.is_ascii_digit() && character != '.')?;
        let (number, tail) = rest.split_at_checked(digits)?;
        let length = tail.find(|character: char| character.is_ascii_digit() || character == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at_checked(length)?;
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * seconds;
        rest = tail;
    }
    (!text.is_empty()).then_some(())?;
    // Nanoseconds are rounded, because a sum of floating-point fractions is not exact.
    Duration::try_from_secs_f64(total).ok().filter(|duration| duration.as_secs() < u64::from(u32::MAX) * 2)
}

/// A duration as Go prints it, for example `168h0m0s`.
pub(crate) fn go_duration(duration: Duration) -> String {
    let (whole, nanos) = (duration.as_secs(), duration.subsec_nanos());
    if whole == 0 && nanos == 0 {
        return "0s".to_owned();
    }
    if whole == 0 {
        let (unit, value) = match nanos {
            1_000_000.. => ("ms", f64::from(nanos) / 1e6),
            1_000.. => ("µs", f64::from(nanos) / 1e3),
            _ => ("ns", f64::from(nanos)),
        };
        return format!("{value}{unit}");
    }
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    let fraction = match nanos {
        0 => String::new(),
        nanos => format!(".{}", format!("{nanos:09}").trim_end_matches('0')),
    };
    match (hours, minutes) {
        (0, 0) => format!("{seconds}{fraction}s"),
        (0, minutes) => format!("{minutes}m{seconds}{fraction}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}{fraction}s"),
    }
}

#[cfg(test)]
mod tests {
    use vitivirt_api::kubevirt::CertificateLifetime;

    use super::*;

    #[test]
    fn durations_are_parsed_and_printed_as_in_go() {
        for (text, written) in [
            ("168h", "168h0m0s"),
            ("24h", "24h0m0s"),
            ("33h36m", "33h36m0s"),
            ("1.5h", "1h30m0s"),
            ("90s", "1m30s"),
            ("1h0m0.5s", "1h0m0.5s"),
            ("250ms", "250ms"),
            ("0", "0s"),
        ] {
            assert_eq!(parse_duration(text).map(go_duration).as_deref(), Some(written), "{text}");
        }
        for text in ["", "24", "h", "-1h", "1d", "1h2", "1e3h", "1..2h", "99999999999h"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    #[test]
    fn the_defaults_are_a_week_and_a_day_renewed_in_the_last_fifth() {
        let lifetimes = Lifetimes::new(None).unwrap();
        assert_eq!(go_duration(lifetimes.ca.renew_before), "33h36m0s");
        assert_eq!(go_duration(lifetimes.leaf.renew_before), "4h48m0s");
        assert_eq!(lifetimes.other_cas.duration, lifetimes.ca.duration);
        assert_eq!(lifetimes.other_cas.renew_before, lifetimes.leaf.renew_before);
    }

    #[test]
    fn the_deprecated_field_takes_precedence_and_an_invalid_duration_names_its_field() {
        let mut settings = SelfSigned {
            ca_rotate_interval: Some("10h".to_owned()),
            ca: Some(CertificateLifetime { duration: Some("20h".to_owned()), ..CertificateLifetime::default() }),
            ..SelfSigned::default()
        };
        assert_eq!(go_duration(Lifetimes::new(Some(&settings)).unwrap().ca.duration), "10h0m0s");
        settings.ca_rotate_interval = Some("soon".to_owned());
        let error = Lifetimes::new(Some(&settings)).unwrap_err();
        assert!(
            error.to_string().contains("ca.duration: invalid value \"soon\": must be a duration such as 24h or 90m")
        );
    }
}
