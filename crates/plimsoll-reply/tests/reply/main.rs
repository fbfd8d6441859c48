//! Reasoning and tool calls in what models write, in every format.

mod formats;
mod written;
