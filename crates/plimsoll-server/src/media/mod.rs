//! Images, lists of frames and audio clips in requests, up to the pixels and spectrograms that the engine takes.
//!
//! | file | job |
//! | --- | --- |
//! | `parse` | reads the parts of a body that name media |
//! | `fetch` | gets the bytes |
//! | `external` | has ffmpeg read video files and audio tracks |
//! | `measure` | reads headers, computes tokens and memory |
//! | `prompt` | puts placeholders into prompts |
//! | `decode` | waits for the memory of the pixels, decodes |
//! | `windows` | decodes a long audio clip window by window |
//! | `documents` | reads the text of files |
//!
//! Files count against the byte budget of bodies until they are decoded. Decoding and pixels count against the engine's
//! [`Staging`](plimsoll_media::Staging). Media are refused before their pixels are decoded, and ffmpeg reads its files before that. Not
//! here: patches, encoders, the engine thread.

mod decode;
pub(crate) mod documents;
mod external;
mod fetch;
mod measure;
mod medium;
mod parse;
pub(crate) mod prompt;
mod refused;
mod source;
mod windows;

pub(crate) use decode::prepare;
pub(crate) use fetch::{fetch, fetch_file};
pub(crate) use measure::{Measured, measure_all};
pub(crate) use medium::{Medium, Windowing};
pub(crate) use parse::MediaParser;
pub(crate) use source::{data_url, fetchable, from_base64};
pub(crate) use windows::ClipWindows;
