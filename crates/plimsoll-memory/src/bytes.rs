//! Sizes in bytes: one way to print them, and one way to read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. It prints in B, KiB, MiB, GiB or TiB with one decimal, and is read with a unit or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// The reason why a number of bytes could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// The text is not a number followed by a known unit.
    #[error(
        "write a number and a unit, such as 4GiB, 500M or 1.5g \
         (K, M, G, T and KiB, MiB, GiB, TiB count in 1024; KB, MB, GB, TB in 1000; no unit means bytes)"
    )]
    Syntax,
    /// The size needs more than 64 bits.
    #[error("at most {max} bytes can be counted", max = u64::MAX)]
    TooLarge,
}

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Bytes {
    /// Returns the number as the value of a flag: in the largest unit of which it is a multiple, such as `32MiB`, otherwise in bytes.
    pub fn flag(self) -> String {
        let unit = UNITS.into_iter().find(|(_, size)| self.0 > 0 && self.0.is_multiple_of(*size));
        unit.map_or_else(|| self.0.to_string(), |(unit, size)| format!("{}{unit}", self.0 / size))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in UNITS {
            if self.0 >= size {
                return write!(f, "{:.1} {unit}", self.0 as f64 / size as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Integer arithmetic only, so that a size never rounds up.
impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(text: &str) -> Result<Self, BytesError> {
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let (digits, scale) = decimal(number).ok_or(BytesError::Syntax)?;
        let factor = unit_bytes(unit.trim()).ok_or(BytesError::Syntax)?;
        let bytes = digits.checked_mul(factor).ok_or(BytesError::TooLarge)? / scale;
        u64::try_from(bytes).map(Self).map_err(|_| BytesError::TooLarge)
    }
}

/// `12.5` as the digits 125 and the scale 10; at most nine decimals, so that products stay far below 128 bits.
pub(crate) fn decimal(number: &str) -> Option<(u128, u128)> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && part.is_empty() || part.len() > 9 || whole.len() > 20 {
        return None;
    }
    let digits = format!("{whole}{part}");
    let digits = digits.parse().ok().filter(|_| digits.bytes().all(|digit| digit.is_ascii_digit()))?;
    Some((digits, 10u128.pow(part.len() as u32)))
}

/// A bare letter counts in 1024, as it does for containers and service managers; `GB` is the decimal unit.
fn unit_bytes(unit: &str) -> Option<u128> {
    let lower = unit.to_ascii_lowercase();
    let base: u128 = if lower.len() == 2 { 1000 } else { 1024 };
    let power = match lower.as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return None,
    };
    Some(base.pow(power))
}

#[cfg(test)]
mod tests {
    use super::{Bytes, BytesError};

    #[test]
    fn a_flag_has_the_exact_number() {
        assert_eq!(
            [0, 1000, 1536, 32 << 20, 5 << 40].map(|bytes| Bytes(bytes).flag()),
            ["0", "1000", "1536", "32MiB", "5TiB"]
        );
    }

    #[test]
    fn what_a_flag_has_is_read_again() {
        for bytes in [0, 1, 1000, 1536, 32 << 20, 5 << 40, u64::MAX] {
            assert_eq!(Bytes(bytes).flag().parse(), Ok(Bytes(bytes)));
        }
        assert_eq!("0MiB".parse(), Ok(Bytes(0)));
        for bad in ["", "-1", "+1", "64XB", "50%", "1.2.3", "MiB"] {
            assert_eq!(bad.parse::<Bytes>(), Err(BytesError::Syntax), "{bad}");
        }
        assert_eq!("99999999999T".parse::<Bytes>(), Err(BytesError::TooLarge));
    }

    #[test]
    fn prints_the_largest_unit_that_fits() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(98_362_432).to_string(), "93.8 MiB");
        assert_eq!(Bytes(4 << 30).to_string(), "4.0 GiB");
    }
}
