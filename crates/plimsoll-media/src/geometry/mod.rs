//! Sizes of items: resized sizes, patches, tokens, sampled frames.
//!
//! Pure arithmetic, equal to the Hugging Face processors' (transformers 5.23) for every legal input: their floating-point
//! steps are repeated in the same order, their rounding is Python's. This module reads no pixel and no sample.

pub mod audio;
pub mod canvases;
pub mod config;
pub mod frames;
pub mod frontier;
pub mod longest;
pub mod patches;
pub mod pieces;
pub mod rule;
pub mod squares;
pub mod tiles;
pub mod video;

pub use audio::{AudioChunks, AudioCut, AudioRule, AudioWindows, FixedClip, Gemma4Frames};
pub use canvases::Canvases;
pub use config::ProcessorFiles;
pub use frames::Sampling;
pub use longest::Longest;
pub use patches::Patches;
pub use pieces::{Cut, Pieces};
pub use rule::{Fit, ImageRule, VideoRule};
pub use squares::{Squares, Steps};
pub use tiles::{TileVideo, Tiles};
pub use video::PatchVideo;

/// Returns Python's `round(n / d)` for whole numbers: to the nearest, ties to the even one.
///
/// Exact also where Python divides in floating point: a quotient within an ulp of a tie would need `n` near 2^52.
pub(crate) fn round_half_even(n: u64, d: u64) -> u64 {
    let (whole, rest) = (n / d, n % d);
    match (2 * rest).cmp(&d) {
        std::cmp::Ordering::Less => whole,
        std::cmp::Ordering::Greater => whole + 1,
        std::cmp::Ordering::Equal => whole + whole % 2,
    }
}

#[cfg(test)]
mod tests {
    use super::round_half_even;

    #[test]
    fn rounds_as_python_does() {
        let rounded: Vec<_> = (0..12).map(|n| round_half_even(n, 4)).collect();
        assert_eq!(rounded, [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]);
        assert_eq!((round_half_even(42, 28), round_half_even(70, 28), round_half_even(13, 28)), (2, 2, 0));
    }
}
