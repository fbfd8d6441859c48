//! Speculative decoding: the decision to draft, and prompt lookup.

pub(crate) mod pace;
pub(crate) mod prompt_lookup;
