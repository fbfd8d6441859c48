//! `cache_control` marks: the prefixes of a prompt that a client wants to keep in the cache, and for how long.

use arrayvec::ArrayVec;
use plimsoll_engine::Pin;
use plimsoll_engine::cache::PAGE_TOKENS;

use crate::state::model::ModelState;

/// The most bytes at the end of a marked text that are searched for in the prompt.
const END_BYTES: usize = 256;
/// A mark at most this many bytes before the end of the prompt stands for the whole prompt.
const NEAR_BYTES: usize = 1024;

/// A mark on a block.
#[derive(Clone, Debug)]
struct Mark {
    minutes: u32,
    /// The end of the block's text; empty if it has none.
    end: Box<str>,
}

/// The marks that decide which prefixes are kept: the last mark, and the last one with the longest time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    last: Option<Mark>,
    longest: Option<Mark>,
}

impl Marks {
    /// Adds a mark after the earlier ones, if `minutes` is set. `text`: the text of the marked block.
    pub fn add(&mut self, minutes: Option<u32>, text: &str) {
        let Some(minutes) = minutes else { return };
        let from = text.floor_char_boundary(text.len().saturating_sub(END_BYTES));
        let mark = Mark { minutes, end: text[from..].trim().into() };
        if self.longest.as_ref().is_none_or(|longest| longest.minutes <= minutes) {
            self.longest = Some(mark.clone());
        }
        self.last = Some(mark);
    }

    /// Returns whether there is a mark.
    pub fn any(&self) -> bool {
        self.last.is_some()
    }

    /// Returns the prefixes of a prompt to pin. If a template writes a marked text otherwise, or the prompt has media, the whole prompt is
    /// pinned. `text` and `ids`: the prompt.
    pub fn pins(
        &self,
        state: &ModelState,
        (text, ids): (&str, &[u32]),
        media: bool,
        add_special: bool,
    ) -> ArrayVec<Pin, { Pin::MOST }> {
        if !state.served.engine.cache_report().enabled {
            return ArrayVec::new();
        }
        let longer =
            self.longest.iter().filter(|longest| self.last.as_ref().is_some_and(|l| l.minutes < longest.minutes));
        let pin = |mark: &Mark| {
            let found = if mark.end.is_empty() || media { None } else { text.rfind(&*mark.end) };
            let end = found.map(|at| at + mark.end.len()).filter(|end| text.len() - end > NEAR_BYTES);
            let prefix = end.and_then(|end| state.encode("messages", &[&text[..end]], add_special).ok());
            let same = |prefix: &Vec<u32>| prefix.iter().zip(ids).take_while(|(a, b)| a == b).count();
            let tokens = prefix.as_ref().map_or(ids.len(), same) / PAGE_TOKENS * PAGE_TOKENS;
            Pin { tokens, minutes: mark.minutes }
        };
        self.last.iter().chain(longer).map(pin).filter(|pin| pin.tokens > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mark_and_the_last_of_the_longest_time_count() {
        let mut marks = Marks::default();
        marks.add(None, "no mark");
        assert!(!marks.any());
        for (minutes, text) in [(5, "a"), (60, "b"), (60, "c"), (5, "d")] {
            marks.add(Some(minutes), text);
        }
        let of = |mark: &Option<Mark>| mark.as_ref().map(|mark| (mark.minutes, mark.end.to_string())).unwrap();
        assert_eq!((of(&marks.last), of(&marks.longest)), ((5, "d".into()), (60, "c".into())));
        let long = format!("{} end ", "ä".repeat(500));
        marks.add(Some(60), &long);
        assert!(of(&marks.last).1.len() <= END_BYTES && long.trim().ends_with(&of(&marks.last).1));
    }
}
