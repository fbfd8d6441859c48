//! `--memory-budget`: a size or a share, and its text form. Other modules compare it with the limits.

use crate::bytes::{Bytes, BytesError, decimal};
use std::fmt;
use std::str::FromStr;

/// A budget as given on the command line: a number of bytes, or a share of the memory that the machine allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBudget {
    /// A fixed number of bytes.
    Bytes(u64),
    /// Parts per million of the limit that would hold without a budget.
    Share(u32),
}

/// The reason why a budget could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// The text is not a number followed by a known unit.
    #[error(
        "'{0}' is not a size: write a number and a unit, such as 4GiB, 500M, 1.5g or 80% \
         (K, M, G, T and KiB, MiB, GiB, TiB count in 1024; KB, MB, GB, TB in 1000; no unit means bytes)"
    )]
    Syntax(String),
    /// The size is zero, or a share outside of 0 to 100 %.
    #[error("'{0}' is out of range: a budget is at least one byte, and a share is more than 0% and at most 100%")]
    Range(String),
    /// The size needs more than 64 bits.
    #[error("'{0}' is larger than any machine: at most {max} bytes", max = u64::MAX)]
    TooLarge(String),
}

impl MemoryBudget {
    /// Returns the budget in bytes. A share is taken of `of` bytes and rounded down.
    #[must_use]
    pub fn bytes(self, of: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            // At most `of`, since a share is at most a million parts.
            Self::Share(ppm) => (u128::from(of) * u128::from(ppm) / 1_000_000) as u64,
        }
    }
}

impl FromStr for MemoryBudget {
    type Err = BudgetError;

    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let range = || BudgetError::Range(text.to_owned());
        if let Some(share) = text.trim().strip_suffix('%') {
            let (digits, scale) = decimal(share.trim_end()).ok_or_else(|| BudgetError::Syntax(text.to_owned()))?;
            let ppm = digits.checked_mul(10_000).ok_or_else(range)? / scale;
            return match u32::try_from(ppm) {
                Ok(ppm @ 1..=1_000_000) => Ok(Self::Share(ppm)),
                _ => Err(range()),
            };
        }
        match text.parse() {
            Ok(Bytes(0)) => Err(range()),
            Ok(Bytes(bytes)) => Ok(Self::Bytes(bytes)),
            Err(BytesError::Syntax) => Err(BudgetError::Syntax(text.to_owned())),
            Err(BytesError::TooLarge) => Err(BudgetError::TooLarge(text.to_owned())),
        }
    }
}

impl fmt::Display for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => ExactBytes(*bytes).fmt(f),
            Self::Share(ppm) => {
                let text = format!("{}.{:04}", ppm / 10_000, ppm % 10_000);
                write!(f, "{}%", text.trim_end_matches('0').trim_end_matches('.'))
            }
        }
    }
}

/// A number of bytes for messages that ask for action, readable and exact: `3.2 GiB (3489660928 bytes)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExactBytes(pub(crate) u64);

impl fmt::Display for ExactBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..1024 => write!(f, "{bytes} bytes"),
            bytes => write!(f, "{} ({bytes} bytes)", Bytes(bytes)),
        }
    }
}
