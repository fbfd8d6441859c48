//! Grammars as constraints.

mod company;
mod deep;
mod guides;
