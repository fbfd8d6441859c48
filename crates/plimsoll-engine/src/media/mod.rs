//! Media in requests: the items that a request carries, and the media that this engine's model takes.
//!
//! An image arrives decoded and resized, as pixels. Pixels take an eighth of the patches' bytes, so they are kept until the request ends. A
//! preempted sequence can thus have the image encoded again. An audio clip arrives as its spectrogram, the encoder's input. The prompt
//! already contains the placeholder tokens. Foreign bytes, decoding and HTTP must not be in here.

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
