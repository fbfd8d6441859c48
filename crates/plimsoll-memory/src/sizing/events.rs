//! Progress of sizing, one log line per event. Wording only.

use super::{Fraction, OutOfMemory, Shape, SizingWarning, Target};
use crate::host::ExactBytes;
use std::fmt;

/// Something that happened while sizing.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// The probe is about to be built.
    Probe {
        /// Its shape.
        shape: Shape,
        /// Bytes of its pools.
        bytes: u64,
    },
    /// The probe was tested.
    Measured {
        /// The most bytes held.
        peak_reserved: u64,
    },
    /// The capacity was computed.
    Sized {
        /// The arithmetic of this rank.
        target: &'a Target,
        /// KV bytes per token.
        cell_bytes: u64,
        /// The share that was used.
        fraction: Fraction,
        /// The capacity all ranks agreed on.
        tokens: u64,
        /// The state slots all ranks agreed on.
        state_slots: u64,
    },
    /// A production generation is about to be built and tested.
    Attempt {
        /// Counts from 1.
        attempt: u32,
        /// Its shape.
        shape: Shape,
    },
    /// An attempt ran out of memory, here or, if `failure` is `None`, on another rank.
    OutOfMemory {
        /// Counts from 1.
        attempt: u32,
        /// The refused allocation.
        failure: Option<&'a OutOfMemory>,
    },
    /// The planned generation holds more than its own measurement leaves room for. Sizing starts again with a probe.
    PlanMissed {
        /// The shape that was planned and built.
        shape: Shape,
        /// Tokens that the measurement leaves room for.
        fits: u64,
    },
    /// The self-test passed.
    SelfTestPassed {
        /// The attempt that passed.
        attempt: u32,
        /// Its shape.
        shape: Shape,
        /// The most bytes held.
        peak_reserved: u64,
    },
    /// A number had to be corrected.
    Warning(&'a SizingWarning),
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Probe { shape, bytes } => {
                write!(
                    f,
                    "probe with {} KV tokens and {} state slots, {}",
                    shape.tokens,
                    shape.state_slots,
                    ExactBytes(*bytes)
                )
            }
            Self::Measured { peak_reserved } => {
                write!(f, "memory probe passed, peak {}", ExactBytes(*peak_reserved))
            }
            Self::Sized { target, cell_bytes, fraction, tokens, state_slots } => write!(
                f,
                "{} left for pools after {} of fixed parts, {} of peers and {} of emergency reserve; one KV token is {cell_bytes} \
                 bytes; with the fraction {fraction} capacity is {tokens} tokens and {state_slots} state slots",
                ExactBytes(target.room),
                ExactBytes(target.non_kv),
                ExactBytes(target.peers),
                ExactBytes(target.emergency_reserve)
            ),
            Self::Attempt { attempt, shape } => {
                write!(f, "attempt {attempt}: building for {} tokens, {} state slots", shape.tokens, shape.state_slots)
            }
            Self::OutOfMemory { attempt, failure: Some(failure) } => write!(f, "attempt {attempt}: {failure}"),
            Self::OutOfMemory { attempt, failure: None } => {
                write!(f, "attempt {attempt}: another rank ran out of memory")
            }
            Self::PlanMissed { shape, fits } => {
                write!(f, "{} tokens were planned, measured there is room for {fits}: probing", shape.tokens)
            }
            Self::SelfTestPassed { attempt, shape, peak_reserved } => {
                write!(
                    f,
                    "memory self-test passed: KV cache of {} tokens, attempt {attempt}, peak {}",
                    shape.tokens,
                    ExactBytes(*peak_reserved)
                )
            }
            Self::Warning(warning) => warning.fmt(f),
        }
    }
}
