//! Cutting text into words: the regular expressions that run before BPE.
//!
//! The published patterns use one look-ahead, `\s+(?!\S)`: a run of white space leaves its last character to the
//! word that follows. That is a rule about the end of a match, not a reason for a backtracking engine, so it is done
//! by hand here and the patterns run on a finite automaton: linear in any text, without a step limit.
//! Which model uses which pattern is written in `pattern_names`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use regex_automata::Input;
use regex_automata::meta::{Builder, Cache, Config, Regex};

use crate::error::TextError;

/// One pattern. Every match becomes a piece of its own, and so does every gap between matches.
struct Rule {
    regex: Regex,
    /// A match that ends in white space with a word behind it gives its last character back.
    gives_back: bool,
    /// Runs with a line break are matched by an alternative of their own, which gives nothing back.
    breaks_lines: bool,
}

/// Patterns applied one after the other, each to the pieces of the one before.
pub(crate) struct Cutter {
    rules: Vec<Rule>,
    /// Caches of what each pattern has learnt of its automaton: one for each thread that cuts at the same time.
    ///
    /// The patterns' own pool goes by threads: as these come and go, it makes up to nine of a cache that two would do for.
    idle: Mutex<Vec<Vec<Cache>>>,
}

/// The most patterns; known tokenizers have five. Each is applied within the pieces of the one before.
const PATTERNS_MAX: usize = 16;

/// What one pattern may take when it is compiled.
const PATTERN_BYTES_MAX: usize = 4 << 20;

/// What all patterns together learn of their automatons while one text is cut; kept for the next one. What does not fit
/// is forgotten and learnt again. A pattern with too small a share runs without, more slowly (none that has a name
/// here).
pub const CUTTING_BYTES_MAX: usize = 4 << 20;

/// Of these, what automatons share out: searching forwards and backwards is one each. The rest is what each takes however little it has.
const AUTOMATON_BYTES_MAX: usize = CUTTING_BYTES_MAX * 3 / 4;

/// Bytes that the automaton of one of so many patterns may learn, in each direction.
pub(crate) fn share(patterns: usize) -> usize {
    AUTOMATON_BYTES_MAX / (2 * patterns.max(1))
}

/// How a pattern may end, from the look-ahead on.
const TAILS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)"];

/// A pattern as an automaton can have it, and whether its look-ahead was taken off.
pub(crate) fn plain(pattern: &str) -> (String, bool) {
    match TAILS.iter().find_map(|tail| pattern.strip_suffix(tail)) {
        Some(head) => (format!(r"{head}|\s+"), true),
        None => (pattern.to_owned(), false),
    }
}

impl Cutter {
    /// Compiles `patterns`. A pattern with any other look-around is [`TextError::Unsupported`].
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
        // A panic cannot leave the list half changed.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands the pieces of `text` to `each` in order. Together they are the whole text; none is empty.
    pub(crate) fn cut<'t>(&self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        let idle = self.idle().pop();
        let mut caches = idle.unwrap_or_else(|| self.rules.iter().map(|rule| rule.regex.create_cache()).collect());
        cut(&self.rules, &mut caches, text, each);
        self.idle().push(caches);
    }
}

impl Rule {
    /// `share`: see [`share`].
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

    /// Where the match ends once it has given back what it must.
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

/// `caches`: one of each rule.
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

    /// Sixteen threads, one after the other, leave no more behind than one: caches are as many as were in use at once.
    #[test]
    fn threads_that_come_and_go_leave_one_cache() {
        let cutter = Cutter::new([pattern_names::QWEN2, pattern_names::GPT2]).unwrap();
        for _ in 0..16 {
            std::thread::scope(|scope| scope.spawn(|| cutter.cut("one two", &mut |_| ())).join().unwrap());
        }
        assert_eq!(cutter.idle().iter().map(Vec::len).collect::<Vec<_>>(), [2]);
        // Two at once need two.
        cutter.cut("a", &mut |_| cutter.cut("b", &mut |_| ()));
        assert_eq!(cutter.idle().len(), 2);
    }

    /// Whatever the text, and for as many patterns as there may be.
    #[test]
    fn caches_stay_within_what_is_planned_for_them() {
        let all = [pattern_names::QWEN2, pattern_names::GPT2, pattern_names::LLAMA3, pattern_names::TEKKEN];
        let many: Vec<&str> = all.iter().copied().cycle().take(PATTERNS_MAX).collect();
        // Every letter there is, in an order that no automaton has a state for.
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
        /// The hand-made look-ahead against an engine that has look-ahead.
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
