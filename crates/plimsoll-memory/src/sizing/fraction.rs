//! `--mem-fraction` as parts per million: exact, ordered, and never zero or above one.
//!
//! A float would round `0.95 × budget` differently on two ranks. Decimal text is read exactly instead.

use std::fmt;
use std::str::FromStr;

/// A share with `0 < f ≤ 1`, in parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Fraction(u32);

/// The reason why a fraction was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a usable fraction: write a decimal above 0 and at most 1 with at most six decimals, such as 0.95"
)]
pub struct FractionError(String);

impl Fraction {
    const MILLION: u32 = 1_000_000;
    /// The whole.
    pub const ONE: Self = Self(Self::MILLION);
    /// The share without a flag: 5 % stay free for fragmentation and for spikes that a self-test does not produce.
    pub const DEFAULT: Self = Self(950_000);

    /// Returns a fraction from parts per million; `None` unless it lies in `1..=1_000_000`.
    #[must_use]
    pub const fn from_ppm(ppm: u32) -> Option<Self> {
        if ppm == 0 || ppm > Self::MILLION { None } else { Some(Self(ppm)) }
    }

    /// Parts per million.
    #[must_use]
    pub const fn ppm(self) -> u32 {
        self.0
    }

    /// This share of `bytes`, rounded down.
    #[must_use]
    pub fn of(self, bytes: u64) -> u64 {
        // At most `bytes`, since the share is at most one.
        (u128::from(bytes) * u128::from(self.0) / u128::from(Self::MILLION)) as u64
    }
}

impl Default for Fraction {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl FromStr for Fraction {
    type Err = FractionError;

    fn from_str(text: &str) -> Result<Self, FractionError> {
        let fail = || FractionError(text.to_owned());
        let (whole, part) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if whole.len() + part.len() == 0 || whole.len() > 6 || part.len() > 6 || !digits(whole) || !digits(part) {
            return Err(fail());
        }
        let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| fail())? };
        let part: u32 = format!("{part:0<6}").parse().map_err(|_| fail())?;
        let ppm = whole.checked_mul(Self::MILLION).and_then(|w| w.checked_add(part)).ok_or_else(fail)?;
        Self::from_ppm(ppm).ok_or_else(fail)
    }
}

impl TryFrom<f64> for Fraction {
    type Error = FractionError;

    /// Converts a number of a configuration file, where numbers are floats. Rounded to the nearest part per million.
    fn try_from(value: f64) -> Result<Self, FractionError> {
        let ok = value > 0.0 && value <= 1.0;
        // In range by the test above, which no NaN passes.
        let ppm = ok.then(|| (value * f64::from(Self::MILLION)).round() as u32);
        ppm.and_then(Self::from_ppm).ok_or_else(|| FractionError(value.to_string()))
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == Self::MILLION {
            return f.write_str("1");
        }
        let digits = format!("{:06}", self.0);
        write!(f, "0.{}", digits.trim_end_matches('0'))
    }
}
