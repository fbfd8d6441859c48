//! Grammars as constraints.

mod deep;
mod guides;
mod shared_automaton;
