//! Vision towers: pictures cut into patches become embeddings that stand among a text's.

mod places;

pub use places::{PlaceRule, PlacedItem};
