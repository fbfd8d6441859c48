//! Media before the model: how large an item becomes, what the worst of them costs, and how many may run at once.
//!
//! The rooms: [`geometry`] (token counts, equal to the Hugging Face processors', and the largest legal items), [`permits`] (how much
//! encoder work may exist at once), [`outputs`] (what encoders have made), [`staging`] (host bytes), [`image`](mod@image) and [`audio`]
//! (decoding foreign bytes under limits), [`ffmpeg`] (the same by an external program). **Architecture invariant:** this crate knows no engine, device or HTTP. What is
//! larger than its limit is refused before it is decoded, with the limit and the flag that sets it.

#![forbid(unsafe_code)]

pub mod audio;
pub mod error;
pub mod ffmpeg;
pub mod geometry;
pub mod image;
pub mod key;
pub mod outputs;
pub mod permits;
pub mod shape;
pub mod staging;

pub use error::MediaError;
pub use key::ContentKey;
pub use outputs::{Claim, OutputPool, Pinned, Vacant};
pub use permits::{Grant, Permits};
pub use shape::{Modality, Shape, Size};
pub use staging::{Staged, Staging};
