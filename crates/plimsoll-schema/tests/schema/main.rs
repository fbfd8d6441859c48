//! JSON schemas: grammars, errors, and walks through both.

mod errors;
mod grammars;
mod walks;
