//! Where a request's media lie in its prompt: runs of placeholder tokens.

use std::collections::TryReserveError;

use plimsoll_media::Modality;

use super::spec::{MediaItem, MediaSpec};

/// Placeholders without a gap: a whole image, groups of frames, or a part of an audio track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index of the item in the request.
    pub item: u32,
    /// Position of the first placeholder.
    pub start: u32,
    /// Number of placeholders.
    pub len: u32,
    /// The row of the item's outputs that belongs to the first placeholder.
    pub row: u32,
}

/// Calls `each` with the runs of `items` in `prompt`, one by one. The error names the first disagreement.
fn walk(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem], mut each: impl FnMut(Run)) -> Result<(), String> {
    let (mut at, mut index) = (0, 0);
    while let Some(item) = items.get(index) {
        let first = next(spec, prompt, at);
        if first != Some(item.first as usize) {
            return Err(elsewhere(index, item, first));
        }
        let tracked = items.get(index + 1).is_some_and(|next| next.of_video);
        let together = &items[index..=index + usize::from(tracked)];
        at = turns(spec, prompt, (index, together), at, &mut each)?;
        index += together.len();
    }
    match next(spec, prompt, at) {
        Some(at) => Err(format!("the placeholder at token {at} of the prompt stands for no medium")),
        None => Ok(()),
    }
}

/// The runs of one item, or of a video and its audio track, from the token `at` on; returns the token after the last.
fn turns(
    spec: &MediaSpec,
    prompt: &[u32],
    (index, items): (usize, &[MediaItem]),
    mut at: usize,
    each: &mut impl FnMut(Run),
) -> Result<usize, String> {
    let kinds = [items[0].shape.modality, items[items.len() - 1].shape.modality];
    let takes_turns =
        kinds == [Modality::Video, Modality::Audio] && spec.places.is_some_and(|rule| rule.interleave().is_some());
    if items[0].of_video || (items.len() > 1 && !takes_turns) {
        return Err(format!(
            "medium {index} or the one after it is said to be the audio track of a video, which it is not"
        ));
    }
    let placeholder =
        |item: &MediaItem| spec.kind(item.shape.modality).map_or(u32::MAX, |(placeholder, _)| placeholder);
    let mut rows = [0_u32; 2];
    while let Some(start) = next(spec, prompt, at) {
        let left = |nth: usize| items[nth].shape.tokens - u64::from(rows[nth]);
        let turn = (0..items.len()).find(|nth| prompt[start] == placeholder(&items[*nth]) && left(*nth) > 0);
        let Some(nth) = turn else { break };
        let (item, row) = (&items[nth], rows[nth]);
        // No text stands between the tokens of a video and of its track.
        if (row == 0 && start != item.first as usize) || (items.len() > 1 && rows != [0; 2] && start != at) {
            return Err(elsewhere(index + nth, item, Some(start)));
        }
        let same = prompt[start..].iter().take(left(nth) as usize).take_while(|token| **token == prompt[start]);
        let len = same.count() as u32;
        each(Run { item: (index + nth) as u32, start: start as u32, len, row });
        (rows[nth], at) = (row + len, start + len as usize);
    }
    match items.iter().zip(rows).position(|(item, row)| u64::from(row) != item.shape.tokens) {
        Some(nth) => {
            let (what, tokens, row) = (items[nth].shape.modality.name(), items[nth].shape.tokens, rows[nth]);
            Err(format!("{what} {} has {tokens} tokens; the prompt has {row} placeholders for it", index + nth))
        }
        None => Ok(at),
    }
}

fn elsewhere(index: usize, item: &MediaItem, found: Option<usize>) -> String {
    let (what, says) = (item.shape.modality.name(), item.first);
    format!("{what} {index} is said to begin at token {says}; its placeholder is at {found:?}")
}

/// The next placeholder from `at` on.
fn next(spec: &MediaSpec, prompt: &[u32], at: usize) -> Option<usize> {
    prompt[at..].iter().position(|token| spec.is_placeholder(*token)).map(|more| at + more)
}

/// Checks that placeholders and items agree.
pub(super) fn check(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem]) -> Result<(), String> {
    walk(spec, prompt, items, |_| {})
}

/// The runs of a checked request.
pub(super) fn runs(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem]) -> Result<Vec<Run>, TryReserveError> {
    let mut count = 0;
    // `check` has passed, so `walk` succeeds.
    let _ = walk(spec, prompt, items, |_| count += 1);
    let mut runs = Vec::new();
    runs.try_reserve_exact(count)?;
    let _ = walk(spec, prompt, items, |run| runs.push(run));
    Ok(runs)
}
