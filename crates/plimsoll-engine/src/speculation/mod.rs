//! Speculation: when to draft, and drafts that are looked up in the text.

pub(crate) mod pace;
pub(crate) mod prompt_lookup;
