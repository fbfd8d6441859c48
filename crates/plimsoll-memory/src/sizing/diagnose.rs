//! From a failure to advice: the component that ran out, the largest one, the missing bytes, and a value to try for each flag.
//!
//! All arithmetic is on non-negative numbers, and every suggested value is one that the flag accepts. If nothing can fit, the advice has
//! the missing bytes in place of a value.

use super::{Component, Fraction, OutOfMemory, ProfileConfig, ScalesWith};
use crate::host::ExactBytes;
use std::fmt;

/// The point of start-up at which memory ran out for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Stage {
    /// In the probe.
    Probe,
    /// At the pinned capacity.
    Pinned,
    /// In an attempt, by more than all later attempts could free.
    BeyondKv,
    /// In the last attempt.
    Exhausted,
}

/// A failure, explained.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Diagnosis {
    /// The point at which it happened.
    pub stage: Stage,
    /// Attempts at production size that were made.
    pub attempts: u32,
    /// KV tokens of the generation that failed.
    pub tokens: u64,
    /// The refused allocation; `None` if it happened on another rank.
    pub failure: Option<OutOfMemory>,
    /// The largest component at that time.
    pub largest: Option<Component>,
    /// One suggestion per flag.
    pub advice: Vec<Advice>,
}

/// A suggestion for one flag.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Advice {
    /// The flag.
    pub flag: &'static str,
    /// The flag's present value; a computed capacity for `--max-total-token-num`.
    pub current: Value,
    /// A value to try.
    pub suggested: Suggestion,
}

/// The value of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum Value {
    /// A count.
    Count(u64),
    /// A share.
    Share(Fraction),
}

/// A suggested change of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Suggestion {
    /// Lower the flag to this value.
    Lower(Value),
    /// Keep the flag: it is as low as it can be.
    Keep,
    /// No value helps: this many bytes would still be missing.
    NoValueHelps {
        /// Bytes missing with no capacity at all.
        missing: u64,
    },
}

/// Explains a failure. `tokens` is the capacity that failed, and `components` is the ledger at that moment.
#[must_use]
pub fn diagnose(
    stage: Stage,
    attempts: u32,
    tokens: u64,
    failure: Option<OutOfMemory>,
    components: &[Component],
    cfg: &ProfileConfig,
) -> Diagnosis {
    let shortfall = failure.as_ref().map_or(0, |f| f.shortfall);
    let scaling = |with: ScalesWith| {
        components.iter().filter(|c| c.scales_with == with).map(|c| c.bytes).fold(0, u64::saturating_add)
    };
    let count = |flag, current: u64, with, unit| Advice {
        flag,
        current: Value::Count(current),
        suggested: lower_count(current, scaling(with), shortfall, unit),
    };
    let capacity = lower_capacity(tokens, shortfall, cfg);
    let advice = vec![
        count("--batch-max-tokens", cfg.batch_max_tokens, ScalesWith::PrefillTokens, cfg.page_tokens),
        count("--graph-max-batch-size", cfg.graph_max_batch_size, ScalesWith::DecodeBatch, 1),
        count("--visual-infer-batch-size", cfg.visual_infer_batch_size, ScalesWith::VisualBatch, 1),
        Advice { flag: "--max-total-token-num", current: Value::Count(tokens), suggested: capacity },
        Advice {
            flag: "--mem-fraction",
            current: Value::Share(cfg.fraction),
            suggested: lower_fraction(cfg.fraction, tokens, capacity),
        },
    ];
    let largest = components.iter().max_by_key(|c| c.bytes).cloned();
    Diagnosis { stage, attempts, tokens, failure, largest, advice }
}

/// Suggests a value in proportion to the bytes that must be freed, where these are known and enough; else half. Whole units where possible.
fn lower_count(current: u64, scaling_bytes: u64, shortfall: u64, unit: u64) -> Suggestion {
    if current <= 1 {
        return Suggestion::Keep;
    }
    let kept = scaling_bytes.saturating_sub(shortfall);
    let lower = if shortfall > 0 && kept > 0 {
        // At most `current`, since `kept` is at most `scaling_bytes`.
        (u128::from(current) * u128::from(kept) / u128::from(scaling_bytes)) as u64
    } else {
        current / 2
    };
    let lower = lower.clamp(1, current - 1);
    let whole = lower - lower % unit.max(1);
    Suggestion::Lower(Value::Count(if whole == 0 { lower } else { whole }))
}

/// Suggests the capacity that frees the shortfall, and at least a twentieth less.
fn lower_capacity(tokens: u64, shortfall: u64, cfg: &ProfileConfig) -> Suggestion {
    let cell = cfg.cell_bytes.max(1);
    let less = shortfall.div_ceil(cell).max(tokens / 20).max(1);
    match cfg.whole_pages(tokens.saturating_sub(less)) {
        0 => Suggestion::NoValueHelps { missing: shortfall.saturating_sub(cfg.kv_bytes(tokens)).max(1) },
        lower => Suggestion::Lower(Value::Count(lower)),
    }
}

/// Suggests the fraction that leads to the suggested capacity, in whole hundredths.
fn lower_fraction(fraction: Fraction, tokens: u64, capacity: Suggestion) -> Suggestion {
    let lower = match capacity {
        Suggestion::Lower(Value::Count(lower)) => lower,
        other => return other,
    };
    let ppm = u128::from(fraction.ppm()) * u128::from(lower) / u128::from(tokens.max(1));
    let hundredths = (ppm as u32 / 10_000) * 10_000;
    match Fraction::from_ppm(hundredths).filter(|&f| f < fraction) {
        Some(lower) => Suggestion::Lower(Value::Share(lower)),
        None => Suggestion::Keep,
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::Share(share) => share.fmt(f),
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { flag, current, suggested } = self;
        match suggested {
            Suggestion::Lower(value) => write!(f, "{flag} {value} (now {current})"),
            Suggestion::Keep => write!(f, "{flag} {current} (already as low as it goes)"),
            Suggestion::NoValueHelps { missing } => {
                write!(f, "{flag} (no value helps: {} would still be missing)", ExactBytes(*missing))
            }
        }
    }
}

impl std::error::Error for Diagnosis {}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.attempts == 1 { "" } else { "s" };
        match self.stage {
            Stage::Probe => write!(f, "The probe of {} KV tokens ran out of memory", self.tokens)?,
            Stage::Pinned => write!(f, "The self-test at --max-total-token-num {} ran out of memory", self.tokens)?,
            Stage::BeyondKv => write!(
                f,
                "Auto-profile failed after {} attempt{plural}: less KV cannot free enough, at {} tokens",
                self.attempts, self.tokens
            )?,
            Stage::Exhausted => {
                write!(f, "Auto-profile failed after {} attempt{plural}, at {} tokens", self.attempts, self.tokens)?;
            }
        }
        match &self.failure {
            Some(failure) => write!(f, ": {failure}.")?,
            None => write!(f, ": another rank ran out of memory.")?,
        }
        if let Some(largest) = &self.largest {
            write!(f, " The largest component is '{}' with {}.", largest.name, ExactBytes(largest.bytes))?;
        }
        write!(f, " Try one of:")?;
        for advice in &self.advice {
            write!(f, "\n  {advice}")?;
        }
        Ok(())
    }
}
