//! Videos with audio tracks: the tokens of both are interleaved.

use plimsoll_models::{EncoderKind, PlaceRule, PlacedItem};
use serde_json::Value;

use super::Item;

/// Returns the images and videos among the items, with the tokens of their tracks.
pub fn placed(items: &[Item]) -> Vec<PlacedItem> {
    let track = |item: usize| items.get(item + 1).filter(|next| next.of_video).map_or(0, |next| next.tokens);
    let placed = |(at, item): (usize, &Item)| {
        let seen = PlacedItem { grid: item.grid, seconds: item.seconds, track: track(at) };
        (item.sense == EncoderKind::Vision).then_some(seen)
    };
    items.iter().enumerate().filter_map(placed).collect()
}

/// Returns the rows of all items at their placeholders in a prompt. `planes` are the tokens of images and videos.
pub fn taking_turns(
    prompt: &[u32],
    items: &[Item],
    rows: Vec<Vec<f32>>,
    (planes, audio): (&[u32], u32),
) -> Vec<(usize, Vec<f32>)> {
    let (mut seen, mut heard) = (Vec::new(), Vec::new());
    let mut rows = rows.into_iter();
    for item in items {
        let own = if item.sense == EncoderKind::Vision { &mut seen } else { &mut heard };
        own.extend(rows.by_ref().take(item.tokens));
    }
    let (mut seen, mut heard) = (seen.into_iter(), heard.into_iter());
    let row = |(at, token): (usize, &u32)| {
        let own = if planes.contains(token) { &mut seen } else { &mut heard };
        (planes.contains(token) || *token == audio).then(|| (at, own.next().expect("a row")))
    };
    prompt.iter().enumerate().filter_map(row).collect()
}

/// Asserts that the tokens of a video and its audio track are in the processor's order.
pub fn interleaved(value: &Value, prompt: &[u32], items: &[Item], (rule, video): (&PlaceRule, u32)) {
    let mut from = 0;
    for pair in items.windows(2).filter(|pair| pair[1].of_video) {
        let (seen, heard) = (&pair[0], &pair[1]);
        let shape = (seen.grid.frames, seen.tokens / seen.grid.frames);
        let seconds = value["seconds"].as_f64().unwrap();
        let stretches = rule.interleave().unwrap().stretches(shape, seconds, heard.tokens);
        let first = prompt[from..].iter().position(|token| *token == video).unwrap() + from;
        let expected = stretches.iter().flat_map(|(kind, tokens)| std::iter::repeat_n(*kind, *tokens));
        from = first + seen.tokens + heard.tokens;
        let found = prompt[first..from].iter().map(|token| match *token == video {
            true => EncoderKind::Vision,
            false => EncoderKind::Audio,
        });
        assert!(found.eq(expected), "{}: {stretches:?}", value["name"]);
    }
}
