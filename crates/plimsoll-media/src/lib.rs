//! Media before the model: the sizes of items, the cost of the largest ones, and the number that may run at once.
//!
//! | modules | task |
//! | --- | --- |
//! | [`geometry`] | token counts, equal to the Hugging Face processors', and the largest legal items |
//! | [`permits`] | limits of encoder work at once |
//! | [`outputs`] | the pool of encoder outputs |
//! | [`staging`] | host bytes |
//! | [`image`](mod@image), [`audio`] | decoding of foreign bytes under limits |
//! | [`ffmpeg`] | decoding by an external program |
//!
//! **Architecture invariant:** this crate is independent of engine, device and HTTP. An item over a limit
//! is refused before it is decoded, with the limit and the flag that sets it.

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
