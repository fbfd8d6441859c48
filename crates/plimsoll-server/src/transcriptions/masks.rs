//! Sets of tokens as bit masks, 32 a word.

/// Returns these tokens as a bit mask.
pub(super) fn mask(vocab: u32, ids: impl IntoIterator<Item = u32>) -> Box<[u32]> {
    let mut words = vec![0; vocab.div_ceil(32) as usize];
    ids.into_iter().filter(|id| *id < vocab).for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
    words.into()
}

/// Returns the mask without these tokens.
pub(super) fn without(mut mask: Box<[u32]>, ids: &[u32]) -> Box<[u32]> {
    for id in ids {
        mask.get_mut(*id as usize / 32).into_iter().for_each(|word| *word &= !(1 << (id % 32)));
    }
    mask
}

/// Returns the text tokens: those before the first special token, and those that end a text, without the suppressed ones.
pub(super) fn text_mask(vocab: u32, start: u32, ends: &[u32], suppressed: &[u32]) -> Box<[u32]> {
    without(mask(vocab, (0..start).chain(ends.iter().copied())), suppressed)
}
