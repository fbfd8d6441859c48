//! Operations of the CPU device, each against a plain computation, and what holds for any company of rows.

#[path = "../common/mod.rs"]
mod common;
mod experts;
mod forms;
mod geometry;
mod large_pool;
mod long_context;
mod media_encoder;
mod pool;
mod recurrent;
mod rotary;
mod scan;
mod selected;
mod together;
mod types;
mod within;
