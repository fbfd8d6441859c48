//! Every family of models against transformers, and the shapes of published configurations.

mod audio;
#[path = "../common/mod.rs"]
mod common;
mod conversions;
mod known;
mod reference;
mod shapes;
mod tables;
mod vision;
