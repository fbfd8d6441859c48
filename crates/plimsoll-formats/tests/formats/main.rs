//! Checkpoints of every format: decoded values, configurations and refusals.

#[path = "../common/mod.rs"]
mod common;
mod configs;
mod encoders;
mod families;
mod hybrids;
mod intern;
mod layer_facts;
mod media_encoders;
mod mmproj;
mod mmproj_audio;
mod mutations;
mod packed;
mod qwen4;
mod reference;
mod refusals;
mod scales;
mod stored_rows;
mod whisper;
