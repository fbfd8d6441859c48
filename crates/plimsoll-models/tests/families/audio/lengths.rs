//! Tokens of audio clips by their length.

use super::{CHUNKS, MODEL, rule};
use crate::common::reference;

/// Every length gives as many tokens as the processor counts and the encoder computes.
#[test]
fn lengths_are_the_processors() {
    let rule = rule(MODEL);
    for pair in reference(MODEL)["lengths"].as_array().unwrap() {
        assert_eq!(rule.shape(pair[0].as_u64().unwrap()).unwrap().tokens, pair[1].as_u64().unwrap(), "{pair}");
    }
    // transformers' `_get_feat_extract_output_lengths`, with Python's floors.
    let formula = |frames: i64| {
        let halves = (frames % 100 - 1).div_euclid(2) + 1;
        ((halves - 1).div_euclid(2) + 1 - 1).div_euclid(2) + 1 + frames / 100 * 13
    };
    for frames in 2..6_000_u64 {
        for more in [0, 1, 159] {
            let found = rule.shape(frames * 160 + more).unwrap();
            assert_eq!((found.tokens as i64, found.rows), (formula(frames as i64), found.tokens), "{frames} frames");
        }
    }
}

/// A frame counts if it begins before the clip's end; two rows of two frames are a token.
#[test]
fn lengths_of_chunks_are_the_processors() {
    let rule = rule(CHUNKS);
    for pair in reference(CHUNKS)["lengths"].as_array().unwrap() {
        let (samples, tokens) = (pair[0].as_u64().unwrap(), pair[1].as_u64().unwrap());
        match rule.shape(samples) {
            Ok(shape) => assert_eq!(shape.tokens, tokens, "{pair}"),
            Err(error) => assert!(tokens == 0 && error.to_string().contains("too few to transform"), "{pair}: {error}"),
        }
    }
    for frames in 3..6_000_u64 {
        for less in [0, 1, 159] {
            let found = rule.shape(frames * 160 - less).unwrap();
            let rows = (frames - 1) / 2 + 1;
            assert_eq!((found.tokens, found.rows, found.longest), ((rows - 2) / 2 + 1, rows, rows.min(25)), "{frames}");
        }
    }
}
