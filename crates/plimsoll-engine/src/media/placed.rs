//! Where a request's media lie in its prompt: runs of placeholder tokens.

use std::collections::TryReserveError;

use super::spec::{MediaItem, MediaSpec};

/// Placeholders without a gap: a whole image, or one group of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Which of the request's items.
    pub item: u32,
    /// Position of the first.
    pub start: u32,
    /// How many.
    pub len: u32,
    /// The row of the item's outputs that the first takes.
    pub row: u32,
}

/// The runs of `items` in `prompt`, told one by one; or what does not agree.
fn walk(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem], mut each: impl FnMut(Run)) -> Result<(), String> {
    let mut at = 0;
    for (index, item) in (0..).zip(items) {
        let kind = item.shape.modality;
        let placeholder = spec.kind(kind).map_or(u32::MAX, |(placeholder, _)| placeholder);
        let first = next(spec, prompt, at);
        if first != Some(item.first as usize) {
            let (what, says) = (kind.name(), item.first);
            return Err(format!("{what} {index} is said to begin at token {says}; its placeholder is at {first:?}"));
        }
        let mut row = 0;
        while u64::from(row) < item.shape.tokens {
            let Some(start) = next(spec, prompt, at) else { break };
            let most = (item.shape.tokens - u64::from(row)) as usize;
            let len = prompt[start..].iter().take(most).take_while(|token| **token == placeholder).count();
            if len == 0 {
                break;
            }
            each(Run { item: index, start: start as u32, len: len as u32, row });
            (row, at) = (row + len as u32, start + len);
        }
        if u64::from(row) != item.shape.tokens {
            let (what, tokens) = (kind.name(), item.shape.tokens);
            return Err(format!("{what} {index} has {tokens} tokens; the prompt has {row} placeholders for it"));
        }
    }
    match next(spec, prompt, at) {
        Some(at) => Err(format!("the placeholder at token {at} of the prompt stands for no medium")),
        None => Ok(()),
    }
}

/// The next placeholder from `at` on.
fn next(spec: &MediaSpec, prompt: &[u32], at: usize) -> Option<usize> {
    prompt[at..].iter().position(|token| spec.is_placeholder(*token)).map(|more| at + more)
}

/// Whether placeholders and items agree.
pub(super) fn check(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem]) -> Result<(), String> {
    walk(spec, prompt, items, |_| {})
}

/// The runs of a request that was checked.
pub(super) fn runs(spec: &MediaSpec, prompt: &[u32], items: &[MediaItem]) -> Result<Vec<Run>, TryReserveError> {
    let mut count = 0;
    // Checked before: it agrees.
    let _ = walk(spec, prompt, items, |_| count += 1);
    let mut runs = Vec::new();
    runs.try_reserve_exact(count)?;
    let _ = walk(spec, prompt, items, |run| runs.push(run));
    Ok(runs)
}
