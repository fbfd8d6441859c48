//! Pictures, lists of frames and sounds in requests, from what a body says of them to pixels and spectrograms that the engine takes.
//!
//! The rooms: `parse` reads what a body names, `fetch` gets the bytes, `measure` reads headers and says what each will take,
//! `prompt` puts placeholders into prompts, `decode_memory` has requests wait for what `decode` makes pixels in. Files from strangers are held under the byte budget of
//! bodies until they are decoded; decoding and pixels under the engine's [`Staging`](plimsoll_media::Staging). Refused is refused
//! before anything is decoded. What must not be in here: patches, encoders, anything that waits for the engine thread.

pub(crate) mod config;
mod decode;
mod decode_memory;
mod fetch;
mod fetch_queue;
mod measure;
mod medium;
mod parse;
pub(crate) mod pipeline;
pub(crate) mod prompt;
mod refused;
mod source;

pub(crate) use decode::prepare;
pub(crate) use fetch::fetch;
pub(crate) use measure::{Measured, measure_all};
pub(crate) use medium::Medium;
pub(crate) use parse::MediaParser;
