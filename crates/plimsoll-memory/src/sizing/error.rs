//! Errors of sizing. Every message carries the numbers that decided.

use super::diagnose::Diagnosis;
use super::joint::JointError;
use crate::host::ExactBytes;
use std::error::Error;

/// The reason why sizing ended without a running generation.
#[derive(Debug, thiserror::Error)]
pub enum SizingError {
    /// A size that must be positive is zero.
    #[error("{what} must not be zero")]
    Zero {
        /// The name of the size.
        what: &'static str,
    },
    /// The pinned capacity needs more bytes than are free.
    #[error(
        "--max-total-token-num {tokens} needs {need}, but only {free} are free: {short} are missing; at most \
         {fits} tokens fit",
        need = ExactBytes(*need), free = ExactBytes(*available), short = ExactBytes(need.saturating_sub(*available))
    )]
    PinnedTooLarge {
        /// The pinned tokens.
        tokens: u64,
        /// Bytes of the pools.
        need: u64,
        /// Bytes free.
        available: u64,
        /// Tokens that the free bytes would hold, before anything else is built.
        fits: u64,
    },
    /// The probe's own pools do not fit, before anything was tried.
    #[error(
        "the probe of {tokens} KV tokens and {state_slots} state slots needs {need}, but only {free} are free: \
         {short} are missing; lower --batch-max-tokens or --graph-max-batch-size, or free memory",
        need = ExactBytes(*need), free = ExactBytes(*available), short = ExactBytes(need.saturating_sub(*available))
    )]
    ProbeDoesNotFit {
        /// Tokens of the probe.
        tokens: u64,
        /// State slots of the probe.
        state_slots: u64,
        /// Bytes of its pools.
        need: u64,
        /// Bytes free.
        available: u64,
    },
    /// Nothing is left for the pools.
    #[error(
        "no KV page fits: of {total}, fixed parts take {non_kv}, others {peers} and the emergency reserve {emergency_reserve}; {short} are \
         missing for a single page of {page_tokens} tokens",
        total = ExactBytes(*total), non_kv = ExactBytes(*non_kv), peers = ExactBytes(*peers), emergency_reserve = ExactBytes(*emergency_reserve),
        short = ExactBytes(*short)
    )]
    NothingFits {
        /// The capacity of the device.
        total: u64,
        /// Fixed parts of this process.
        non_kv: u64,
        /// Bytes that other processes use.
        peers: u64,
        /// Bytes of the emergency reserve.
        emergency_reserve: u64,
        /// Tokens of a page.
        page_tokens: u64,
        /// Bytes missing for one page.
        short: u64,
    },
    /// KV and recurrent state do not fit together.
    #[error("KV and recurrent state: {0}")]
    Joint(#[from] JointError),
    /// The capacity does not hold the largest prefill step.
    #[error(
        "only {tokens} KV tokens fit, fewer than the {batch_max_tokens} of one prefill step: lower --batch-max-tokens \
         to at most {tokens}"
    )]
    BatchExceedsCapacity {
        /// The capacity.
        tokens: u64,
        /// The prefill step.
        batch_max_tokens: u64,
    },
    /// The capacity does not hold the longest request.
    #[error(
        "the maximum sequence length of {max_seq_len} tokens does not fit into the {tokens} KV tokens there is room \
         for: set --max-req-total-len to at most {tokens}"
    )]
    ContextDoesNotFit {
        /// The capacity, which is also the longest context that would fit.
        tokens: u64,
        /// The longest request asked for.
        max_seq_len: u64,
    },
    /// Teardown did not release as much as the pools held: another owner still holds memory.
    #[error(
        "generation {generation} was torn down, but only {got} of at least {due} came back; still held by: {survivors}",
        got = ExactBytes(*released), due = ExactBytes(*expected)
    )]
    LeakedGeneration {
        /// The number of the generation.
        generation: u32,
        /// Bytes that were released.
        released: u64,
        /// Bytes that its pools held.
        expected: u64,
        /// The surviving owners with their bytes, as the ledger names them.
        survivors: String,
    },
    /// The self-test ended without returning all items of a pool.
    #[error("after the self-test only {free} of {total} items of '{pool}' are free")]
    SelfTestLeak {
        /// The pool.
        pool: String,
        /// Free items.
        free: u64,
        /// All items.
        total: u64,
    },
    /// Memory ran out, and a smaller capacity did not help or cannot help.
    #[error(transparent)]
    OutOfMemory(Box<Diagnosis>),
    /// Another rank failed; its own log says why.
    #[error("another rank of this server could not be sized; its log names the reason")]
    AnotherRank,
    /// An error that is unrelated to memory, unchanged.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}
