//! Sizes as Kubernetes writes them. KubeVirt rewrites every quantity that passes its webhook into its canonical form, so
//! a comparison with what was stored needs the same form.

use std::fmt;

use vitivirt_api::machine::limits::SIZE_DECIMALS;

/// A number of bytes and how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity {
    bytes: u128,
    base: Base,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    Binary,
    Decimal,
}

const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// Rounded up to whole bytes, as Kubernetes does it. None for what is no number above zero; whether anybody can count
    /// that far is not asked.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
        let (number, suffix) = (text.get(..digits)?, text.get(digits..)?);
        let (base, unit) = unit(suffix)?;
        let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, rest)| (whole, Some(rest)));
        let is_padded = whole.starts_with('0') && whole != "0";
        let is_fraction = |digits: &str| (1..=SIZE_DECIMALS).contains(&digits.len()) && !digits.contains('.');
        if whole.is_empty() || is_padded || !fraction.is_none_or(is_fraction) {
            return None;
        }
        let fraction = fraction.unwrap_or_default();
        let scale = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let digit = |number: u128, digit: u8| number.saturating_mul(10).saturating_add(u128::from(digit - b'0'));
        let number = whole.bytes().chain(fraction.bytes()).fold(0, digit);
        let bytes = number.saturating_mul(unit).div_ceil(scale);
        (bytes > 0).then_some(Quantity { bytes, base })
    }

    pub fn bytes(self) -> u128 {
        self.bytes
    }
}

fn unit(suffix: &str) -> Option<(Base, u128)> {
    let power = |names: &[&str; 7]| names.iter().position(|name| *name == suffix).and_then(|at| u32::try_from(at).ok());
    match (suffix.ends_with('i'), power(&BINARY), power(&DECIMAL)) {
        (true, Some(power), _) => Some((Base::Binary, 1024u128.checked_pow(power)?)),
        (false, _, Some(power)) => Some((Base::Decimal, 1000u128.checked_pow(power)?)),
        _ => None,
    }
}

/// The shortest exact form with the same kind of suffix.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, names) = match self.base {
            Base::Binary => (1024, BINARY),
            Base::Decimal => (1000, DECIMAL),
        };
        let (mut value, mut power) = (self.bytes, 0);
        while value.is_multiple_of(unit) && power + 1 < names.len() {
            value /= unit;
            power += 1;
        }
        write!(f, "{value}{}", names.get(power).copied().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_take_their_canonical_form() {
        for (text, canonical) in [
            ("20Gi", "20Gi"),
            ("1024Mi", "1Gi"),
            ("1536Mi", "1536Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("1.1Ki", "1127"),
            ("1.5", "2"),
            ("2000M", "2G"),
            ("1073741824", "1073741824"),
            ("1000", "1k"),
        ] {
            assert_eq!(Quantity::parse(text).unwrap().to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "0", "0Gi", "-1Gi", "1.0000000001", "Gi", "1 Gi", "1gi", "1.2.3Gi", "01Gi", "1.", ".5", "0.0"]
        {
            assert_eq!(Quantity::parse(text), None, "{text}");
        }
    }

    #[test]
    fn no_number_is_too_big_to_be_compared() {
        let huge = Quantity::parse(&format!("{}Ei", "9".repeat(1000))).unwrap();
        assert!(huge.bytes() > Quantity::parse("7Ei").unwrap().bytes());
    }

    #[test]
    fn sizes_compare_whatever_their_suffix() {
        let bytes = |text| Quantity::parse(text).unwrap().bytes();
        assert!(bytes("1Gi") > bytes("1G"));
        assert_eq!(bytes("1024Mi"), bytes("1Gi"));
    }
}
