//! Reasoning and tool calls in models' replies, in every format.

mod formats;
mod written;
