//! Media in requests: what a request carries, and what this engine's model takes.
//!
//! An image arrives decoded and resized, as pixels: an eighth of its patches, so it can be kept until its request has ended, and a
//! preempted sequence can have it encoded again. An audio clip arrives as its spectrogram, which is what it is encoded from. The prompt
//! already contains its placeholder tokens. What must not be in here: foreign bytes, decoding, HTTP.

mod agree;
mod audio;
mod check;
mod mmproj;
mod pieces;
mod placed;
mod plan;
mod rules;
mod seq;
mod spec;
mod spelling;

pub use plan::MediaPlan;
pub(crate) use plan::OUTPUT_PAGE_ROWS;
pub use rules::MediaRules;
pub use seq::SeqMedia;
pub use spec::{AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, TRANSCRIBES_ONLY, Transcript, VideoSpec};
pub(crate) use spec::{sense, widen};
