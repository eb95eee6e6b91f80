//! Quantities as Kubernetes writes them: `500m`, `1.5`, `20Gi`, `1e3`.
//!
//! Kubernetes and KubeVirt rewrite a quantity into its canonical form when they store it. A comparison of text is
//! therefore wrong: two quantities are equal here if their amounts are equal.

use std::{cmp::Ordering, fmt};

/// An amount with a resolution of 1/10⁹, and the kind of suffix that it was written with. Amounts beyond the range of
/// the type saturate, so that they still compare as too large.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    nanos: i128,
    base: SuffixBase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SuffixBase {
    Binary,
    Decimal,
}

const NANOS: i128 = 1_000_000_000;
/// Kubernetes rounds up what is finer.
const DECIMALS: usize = 9;
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// None if the text is not a quantity.
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, unsigned) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let end = unsigned.find(|character: char| !character.is_ascii_digit() && character != '.');
        let (number, suffix) = unsigned.split_at(end.unwrap_or(unsigned.len()));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let (base, unit) = unit_nanos(suffix)?;
        let (exact, finer) = fraction.split_at(fraction.len().min(DECIMALS));
        let digit = |number: i128, digit: u8| number.saturating_mul(10).saturating_add(i128::from(digit - b'0'));
        let mantissa = whole.bytes().chain(exact.bytes()).fold(0, digit);
        let round_up = i128::from(finer.bytes().any(|digit| digit != b'0'));
        let scale = 10_i128.pow(u32::try_from(exact.len()).ok()?);
        let nanos = divide_up(mantissa.saturating_add(round_up).saturating_mul(unit.numerator), scale * unit.divisor);
        Some(Self { nanos: if negative { -nanos } else { nanos }, base })
    }

    /// The amount in whole units, rounded up, as the `Value()` of Kubernetes.
    pub fn value(self) -> i128 {
        divide_up(self.nanos, NANOS)
    }

    /// The amount in units of 1/10⁹.
    pub fn nanos(self) -> i128 {
        self.nanos
    }

    /// The same quantity in whole units, rounded up.
    #[must_use]
    pub fn rounded_up(self) -> Self {
        Self { nanos: self.value().saturating_mul(NANOS), ..self }
    }
}

fn divide_up(number: i128, divisor: i128) -> i128 {
    number.div_euclid(divisor) + i128::from(number.rem_euclid(divisor) != 0)
}

/// One unit of a suffix is `numerator / divisor` nanos.
struct Unit {
    numerator: i128,
    divisor: i128,
}

fn unit_nanos(suffix: &str) -> Option<(SuffixBase, Unit)> {
    let power_in = |names: &[&str]| names.iter().position(|name| *name == suffix).and_then(|at| u32::try_from(at).ok());
    if let Some(power) = power_in(&DECIMAL) {
        return Some((SuffixBase::Decimal, Unit { numerator: 1000_i128.checked_pow(power)?, divisor: 1 }));
    }
    if let Some(power) = power_in(&BINARY) {
        return Some((SuffixBase::Binary, Unit { numerator: 1024_i128.checked_pow(power)? * NANOS, divisor: 1 }));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = 10_i128.saturating_pow(exponent.unsigned_abs());
    let unit = if exponent < 0 {
        Unit { numerator: NANOS, divisor: power.min(i128::MAX / NANOS) }
    } else {
        Unit { numerator: NANOS.saturating_mul(power), divisor: 1 }
    };
    Some((SuffixBase::Decimal, unit))
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

/// The canonical form: the shortest exact text with the same kind of suffix. An amount with decimals has a decimal one.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_binary = self.base == SuffixBase::Binary && self.nanos % NANOS == 0;
        let (mut value, step, names) = if is_binary {
            (self.nanos / NANOS, 1024, BINARY.as_slice())
        } else {
            (self.nanos, 1000, DECIMAL.as_slice())
        };
        if value == 0 {
            return f.write_str("0");
        }
        let mut power = 0;
        while value % step == 0 && power + 1 < names.len() {
            value /= step;
            power += 1;
        }
        write!(f, "{value}{}", names.get(power).copied().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str) -> Quantity {
        Quantity::parse(text).unwrap_or_else(|| panic!("{text} is not a quantity"))
    }

    #[test]
    fn a_quantity_prints_in_its_canonical_form() {
        for (text, canonical) in [
            ("20Gi", "20Gi"),
            ("1024Mi", "1Gi"),
            ("1536Mi", "1536Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("2000M", "2G"),
            ("1073741824", "1073741824"),
            ("1000", "1k"),
            ("0.1", "100m"),
            ("1500m", "1500m"),
            ("2000m", "2"),
            ("1e3", "1k"),
            ("1E-3", "1m"),
            ("-0.5", "-500m"),
            ("0Gi", "0"),
            ("1.1Ki", "1126400m"),
            ("1.0000000001", "1000000001n"),
        ] {
            assert_eq!(quantity(text).to_string(), canonical, "{text}");
        }
        assert_eq!(quantity("1.1Ki").rounded_up().to_string(), "1127");
        assert_eq!(quantity("1.5").rounded_up().to_string(), "2");
    }

    #[test]
    fn equal_amounts_are_equal_whatever_their_suffix() {
        for (a, b) in [("1024Mi", "1Gi"), ("100m", "0.1"), ("1e3", "1k"), ("+5", "5"), ("1000000u", "1")] {
            assert_eq!(quantity(a), quantity(b), "{a} {b}");
        }
        assert!(quantity("1Gi") > quantity("1G"));
        assert!(quantity("-1") < quantity("0"));
    }

    #[test]
    fn text_that_is_not_a_quantity_is_refused() {
        for text in ["", "Gi", "1 Gi", "1gi", "1.2.3Gi", ".", "-", "1e", "1ex", "NaN", "ten", "1ki"] {
            assert_eq!(Quantity::parse(text), None, "{text}");
        }
    }

    #[test]
    fn an_amount_beyond_the_range_compares_as_larger() {
        for text in [format!("{}Ei", "9".repeat(1000)), "99999999999999999999Ei".to_owned(), "1e400".to_owned()] {
            assert!(quantity(&text).value() > quantity("7Ei").value(), "{text}");
        }
        assert_eq!(quantity("1e-400").value(), 1);
    }
}
