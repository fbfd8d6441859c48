//! Vision towers: pictures cut into patches become embeddings that stand among a text's.

mod order;
mod parts;
mod places;
mod tower;

pub use places::{PlaceRule, PlacedItem};
pub use tower::VisionTower;
