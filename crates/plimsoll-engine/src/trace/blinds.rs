//! Hides the content of requests from their trace.

use std::hash::{BuildHasher, RandomState};

use super::{BLOCK_TOKENS, Medium, Prompt};
use crate::media::MediaItem;

/// Numbers for blocks and salts, under a random key that is dropped with this value.
#[derive(Default)]
pub struct Blinds(RandomState);

impl Blinds {
    /// Returns a prompt without its content, or with its ids if `content`.
    pub fn prompt(&self, ids: &[u32], media: &[MediaItem], content: bool) -> Prompt {
        let media: Vec<Medium> = media.iter().map(|item| self.medium(item)).collect();
        let mut before = 0;
        let mut number = |(block, ids): (usize, &[u32])| {
            // Placeholders are equal for all media, so the media's keys are hashed as well.
            let here = media.iter().filter(|medium| (medium.first / BLOCK_TOKENS) as usize == block);
            before = here.fold(self.0.hash_one((before, ids)), |before, medium| self.0.hash_one((before, medium.key)));
            before >> 16
        };
        let blocks = ids.chunks(BLOCK_TOKENS as usize).enumerate().map(&mut number).collect();
        Prompt { tokens: ids.len() as u32, blocks, media, ids: content.then(|| ids.to_vec()) }
    }

    fn medium(&self, item: &MediaItem) -> Medium {
        let tokens = u32::try_from(item.shape.tokens).unwrap_or(u32::MAX);
        let (kind, key) = (item.shape.modality.name().into(), self.0.hash_one(item.key) >> 16);
        Medium { kind, tokens, first: item.first, key }
    }

    /// Returns the number for a salt; 0 for no salt.
    pub fn salt(&self, salt: u64) -> u64 {
        if salt == 0 { 0 } else { self.0.hash_one(salt) >> 16 }
    }
}
