//! Media before the model: how large an item becomes, what the worst of them costs, and how many may run at once.
//!
//! The rooms: [`geometry`] (token counts, equal to the Hugging Face processors'), [`encoder`] (what an encoder owes the
//! planner), [`stage`] with [`permits`] and [`outputs`] (running it inside the line), [`staging`] (host bytes), [`image`](mod@image) and [`audio`]
//! (decoding foreign bytes under limits). **Architecture invariant:** this crate knows no engine, device or HTTP. What is
//! larger than its limit is refused before it is decoded, with the limit and the flag that sets it.

pub mod audio;
pub mod encoder;
pub mod error;
pub mod geometry;
pub mod image;
pub mod key;
pub mod outputs;
pub mod permits;
pub mod shape;
pub mod stage;
pub mod staging;

pub use encoder::{Encoder, Job, WorstCase, replica_batch};
pub use error::MediaError;
pub use key::ContentKey;
pub use outputs::{Claim, OutputPool, Pinned, Vacant};
pub use permits::{Grant, Permits};
pub use shape::{Modality, Shape, Size, Worst};
pub use stage::{Batch, Item, Stage};
pub use staging::{Staged, Staging};
