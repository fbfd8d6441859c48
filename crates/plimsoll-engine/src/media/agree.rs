//! Checks that a processor's files and an encoder's configuration agree where both give a value.

use plimsoll_formats::{Vision as VisionConfig, VisionKind};
use plimsoll_media::geometry::{Patches, Tiles};
use plimsoll_media::{MediaError, Size};

use crate::api::plan_error::PlanError;

/// Checks that a tile has as many patches as the encoder has positions: it has no others.
pub(super) fn agree_on_tiles(rule: &Tiles, config: &VisionConfig) -> Result<(), PlanError> {
    let (side, tokens) = (config.table_side, (config.table_side / config.merge).pow(2));
    let pixels = (side * config.patch) as u32;
    if rule.tile == Size::new(pixels, pixels) && rule.tile_tokens == tokens as u64 {
        return Ok(());
    }
    let (Size { height, width }, said) = (rule.tile, rule.tile_tokens);
    let why = format!(
        "the processor says tiles of {height} x {width} pixels and {said} tokens, the encoder {pixels} x {pixels} and {tokens}"
    );
    Err(MediaError::BadConfig { key: "size, image_seq_length", why }.into())
}

/// Checks that the processor and the encoder agree on the size of a patch.
pub(super) fn agree(rule: &Patches, config: &VisionConfig) -> Result<(), PlanError> {
    let (said, is) = ([rule.patch, rule.merge, rule.temporal], [config.patch, config.merge, config.temporal]);
    if said.iter().zip(is).all(|(said, is)| *said == is as u64) {
        return Ok(());
    }
    let why = format!("the processor says {said:?}, the encoder {is:?}");
    Err(MediaError::BadConfig { key: "patch_size, merge_size, temporal_patch_size", why }.into())
}

/// Checks that the encoder has a position for every column and every row of a legal image.
pub(super) fn agree_on_positions(rule: &Patches, config: &VisionConfig) -> Result<(), PlanError> {
    let VisionKind::Gemma4(own) = config.encoder else { return Ok(()) };
    let longest = rule.frontier().iter().map(|(_, long)| long * rule.merge).max().unwrap_or(0);
    if longest <= own.positions as u64 {
        return Ok(());
    }
    let why = format!("an image may have {longest} patches on a side, the encoder has {} positions", own.positions);
    Err(MediaError::BadConfig { key: "max_soft_tokens", why }.into())
}
