//! Media in requests: what a request carries, and what this engine's model takes.
//!
//! A picture arrives decoded and resized, as pixels: an eighth of its patches, so it can be kept until its request has ended, and a
//! preempted sequence can have it encoded again. A sound arrives as its spectrogram, which is what it is encoded from. The prompt
//! already contains its placeholder tokens. What must not be in here: foreign bytes, decoding, HTTP.

mod check;
mod placed;
mod plan;
mod rules;
mod seq;
mod spec;

pub use plan::MediaPlan;
pub use rules::MediaRules;
pub use seq::SeqMedia;
pub use spec::{AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, VideoSpec};
pub(crate) use spec::{sense, widen};
