//! Cutting text into words: the regular expressions that run before BPE.
//!
//! The published patterns use one look-ahead, `\s+(?!\S)`: a run of white space leaves its last character to the next word. This is a rule
//! about the end of a match and needs no backtracking engine. So it is implemented by hand, and the patterns run on a finite automaton: in
//! linear time for any text, without a step limit. The patterns of each model are in `pattern_names`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use regex_automata::Input;
use regex_automata::meta::{Builder, Cache, Config, Regex};

use crate::error::TextError;

/// One pattern. Every match becomes a piece, and so does every gap between matches.
struct Rule {
    regex: Regex,
    /// Whether a match that ends in white space before a word excludes its last character.
    gives_back: bool,
    /// Whether a separate alternative matches runs with a line break, and excludes nothing.
    breaks_lines: bool,
}

/// Patterns that are applied one after the other, each to the pieces of the previous one.
pub(crate) struct Cutter {
    rules: Vec<Rule>,
    /// Caches of each pattern's automaton: one for each thread that cuts at the same time.
    ///
    /// The patterns' pool assigns caches to threads. As threads start and end, it makes up to nine caches where two would do.
    idle: Mutex<Vec<Vec<Cache>>>,
}

/// Most patterns. Known tokenizers have five. Each is applied within the pieces of the previous one.
const PATTERNS_MAX: usize = 16;

/// Most bytes of one compiled pattern.
const PATTERN_BYTES_MAX: usize = 4 << 20;

/// Most bytes that the automata of all patterns together cache while one text is cut. The cache is kept for the next text. States beyond
/// the limit are dropped and computed again. A pattern whose share is too small runs without an automaton, more slowly; no named pattern
/// does.
pub const CUTTING_BYTES_MAX: usize = 4 << 20;

/// The part of [`CUTTING_BYTES_MAX`] that automata divide; a pattern has one for each direction. The rest is the fixed size of each
/// automaton.
const AUTOMATON_BYTES_MAX: usize = CUTTING_BYTES_MAX * 3 / 4;

/// Returns the bytes that the automaton of one of `patterns` patterns may cache, in each direction.
pub(crate) fn share(patterns: usize) -> usize {
    AUTOMATON_BYTES_MAX / (2 * patterns.max(1))
}

/// The endings of patterns, from the look-ahead on.
const TAILS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)"];

/// Returns a pattern in a form that an automaton supports, and whether its look-ahead was removed.
pub(crate) fn plain(pattern: &str) -> (String, bool) {
    match TAILS.iter().find_map(|tail| pattern.strip_suffix(tail)) {
        Some(head) => (format!(r"{head}|\s+"), true),
        None => (pattern.to_owned(), false),
    }
}

impl Cutter {
    /// Compiles `patterns`. A pattern with other look-around is [`TextError::Unsupported`].
    pub(crate) fn new<'p>(patterns: impl IntoIterator<Item = &'p str>) -> Result<Self, TextError> {
        let patterns: Vec<&str> = patterns.into_iter().take(PATTERNS_MAX + 1).collect();
        if patterns.len() > PATTERNS_MAX {
            return Err(TextError::BadTokenizer(format!("more than {PATTERNS_MAX} patterns cut its text")));
        }
        let share = share(patterns.len());
        let rules = patterns.into_iter().map(|pattern| Rule::new(pattern, share)).collect::<Result<_, _>>()?;
        Ok(Self { rules, idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Vec<Cache>>> {
        // A panic cannot leave the list in a broken state.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes the pieces of `text` to `each` in order. Together they are the whole text; none is empty.
    pub(crate) fn cut<'t>(&self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        let idle = self.idle().pop();
        let mut caches = idle.unwrap_or_else(|| self.rules.iter().map(|rule| rule.regex.create_cache()).collect());
        cut(&self.rules, &mut caches, text, each);
        self.idle().push(caches);
    }
}

impl Rule {
    /// Compiles a pattern. `share`: see [`share`].
    fn new(pattern: &str, share: usize) -> Result<Self, TextError> {
        let (plain, gives_back) = plain(pattern);
        let sizes = Config::new().nfa_size_limit(Some(PATTERN_BYTES_MAX)).hybrid_cache_capacity(share);
        let regex = Builder::new().configure(sizes).build(&plain);
        let regex = regex.map_err(|error| TextError::Unsupported(format!("pattern {pattern:?}: {error}")))?;
        Ok(Self { regex, gives_back, breaks_lines: plain.contains(r"\s*[\r\n]") })
    }

    /// The next match in `text` at or after `from`, as its start and end.
    fn find(&self, cache: &mut Cache, text: &str, from: usize) -> Option<(usize, usize)> {
        let mut from = from;
        loop {
            let found = self.regex.search_with(cache, &Input::new(text).range(from..))?;
            if !found.is_empty() {
                return Some((found.start(), self.end(text, found.start(), found.end())));
            }
            from = found.end() + text[found.end()..].chars().next()?.len_utf8();
        }
    }

    /// The end of a match after the look-ahead's rule is applied.
    fn end(&self, text: &str, start: usize, end: usize) -> usize {
        if !self.gives_back || end == text.len() {
            return end;
        }
        let Some(last) = text[start..end].chars().next_back() else {
            return end;
        };
        let keeps = !last.is_whitespace() || self.breaks_lines && matches!(last, '\r' | '\n');
        let shorter = end - last.len_utf8();
        if keeps || shorter == start { end } else { shorter }
    }
}

/// Cuts `text` by all rules in order. `caches` has one cache for each rule.
fn cut<'t>(rules: &[Rule], caches: &mut [Cache], text: &'t str, each: &mut dyn FnMut(&'t str)) {
    let (Some((rule, others)), Some((cache, caches))) = (rules.split_first(), caches.split_first_mut()) else {
        if !text.is_empty() {
            each(text);
        }
        return;
    };
    let mut done = 0;
    while let Some((start, end)) = rule.find(cache, text, done) {
        if start > done {
            cut(others, caches, &text[done..start], each);
        }
        cut(others, caches, &text[start..end], each);
        done = end;
    }
    if done < text.len() {
        cut(others, caches, &text[done..], each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern_names;
    use proptest::prelude::*;

    fn pieces<'t>(patterns: &[&str], text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        Cutter::new(patterns.iter().copied()).unwrap().cut(text, &mut |piece| out.push(piece));
        out
    }

    #[test]
    fn the_last_space_goes_with_the_word() {
        let gpt2 = [pattern_names::GPT2];
        assert_eq!(pieces(&gpt2, "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(pieces(&gpt2, "a\n\nb"), ["a", "\n", "\n", "b"]);
        let llama3 = [pattern_names::LLAMA3];
        assert_eq!(pieces(&llama3, "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(pieces(&llama3, "I'LL 12345"), ["I", "'LL", " ", "123", "45"]);
    }

    /// Sixteen threads, one after the other, leave one cache: there are only as many caches as were in use at once.
    #[test]
    fn threads_that_come_and_go_leave_one_cache() {
        let cutter = Cutter::new([pattern_names::QWEN2, pattern_names::GPT2]).unwrap();
        for _ in 0..16 {
            std::thread::scope(|scope| scope.spawn(|| cutter.cut("one two", &mut |_| ())).join().unwrap());
        }
        assert_eq!(cutter.idle().iter().map(Vec::len).collect::<Vec<_>>(), [2]);
        // Two calls at once need two caches.
        cutter.cut("a", &mut |_| cutter.cut("b", &mut |_| ()));
        assert_eq!(cutter.idle().len(), 2);
    }

    /// Holds for any text, and for the most patterns allowed.
    #[test]
    fn caches_stay_within_what_is_planned_for_them() {
        let all = [pattern_names::QWEN2, pattern_names::GPT2, pattern_names::LLAMA3, pattern_names::TEKKEN];
        let many: Vec<&str> = all.iter().copied().cycle().take(PATTERNS_MAX).collect();
        // Every character, in an order for which the automata have no states yet.
        let letters =
            |step: u32| (0..12_000).filter_map(move |i: u32| char::from_u32(i.wrapping_mul(step) % 0x11_0000));
        for patterns in [&all[..1], &all[1..2], &all[..], &many[..]] {
            let cutter = Cutter::new(patterns.iter().copied()).unwrap();
            for step in [1, 7919, 104_729] {
                let text: String = letters(step).collect();
                let mut whole = String::new();
                cutter.cut(&text, &mut |piece| whole.push_str(piece));
                assert_eq!(whole, text);
            }
            let used: usize = cutter.idle().iter().flatten().map(Cache::memory_usage).sum();
            println!("{} patterns: {used} bytes", patterns.len());
            assert!(used <= CUTTING_BYTES_MAX, "{used} bytes for {} patterns", patterns.len());
        }
    }

    #[test]
    fn other_look_around_is_refused() {
        assert!(Cutter::new([r"a(?=b)"]).is_err());
    }

    proptest! {
        /// Compares the implemented look-ahead with an engine that supports look-ahead.
        #[test]
        fn equals_a_backtracking_engine(text in "(?:[ \t\r\n]{0,3}(?:[a-zA-Z]{1,3}|'s|[0-9]{1,4}|é|中|\u{a0}|!)?){0,12}") {
            for pattern in [pattern_names::GPT2, pattern_names::LLAMA3, pattern_names::QWEN2, pattern_names::TEKKEN] {
                let reference = tokenizers::utils::SysRegex::new(pattern).unwrap();
                let expected: Vec<&str> = reference.find_iter(&text).map(|(a, b)| &text[a..b]).collect();
                prop_assert_eq!(pieces(&[pattern], &text), expected, "{}", pattern);
            }
        }
    }
}
