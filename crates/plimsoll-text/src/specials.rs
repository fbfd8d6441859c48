//! Finds the tokens that are matched in the text before it is cut into words.
//!
//! Control tokens (`<|im_end|>`) are matched only if the caller trusts the text; user-defined tokens (`<tool_call>`) always are. The
//! leftmost match wins, then the longest. The search is one automaton, so it is linear in the text for any number of tokens.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use crate::error::TextError;

/// A token that is matched literally.
#[derive(Clone)]
pub(crate) struct Special {
    /// The text to find.
    pub(crate) content: String,
    /// The id of the token.
    pub(crate) id: u32,
    /// Whether it is a control token, which is matched only with `parse_special`.
    pub(crate) control: bool,
    /// Whether it includes the white space before it.
    pub(crate) strip_left: bool,
    /// Whether it includes the white space after it.
    pub(crate) strip_right: bool,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    /// A token found in the text.
    Token(u32),
    /// The text between tokens, never empty.
    Text(&'t str),
}

/// Cuts texts at special tokens.
pub(crate) struct Specials {
    every: Searcher,
    user_defined: Searcher,
}

impl Specials {
    /// Prepares the search for `specials`. Specials with empty content are ignored.
    pub(crate) fn new(specials: Vec<Special>) -> Result<Self, TextError> {
        let user_defined: Vec<_> = specials.iter().filter(|s| !s.control).cloned().collect();
        Ok(Self { every: Searcher::new(specials)?, user_defined: Searcher::new(user_defined)? })
    }

    /// Cuts `text` and passes the fragments to `each` in order. Control tokens are matched only with `parse_special`.
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        mut each: impl FnMut(Fragment<'t>) -> Result<(), TextError>,
    ) -> Result<(), TextError> {
        let searcher = if parse_special { &self.every } else { &self.user_defined };
        let mut done = 0;
        if let Some(automaton) = &searcher.automaton {
            for found in automaton.find_iter(text) {
                let special = &searcher.specials[found.pattern().as_usize()];
                if found.start() < done {
                    // The previous token already included the white space that this token begins with.
                    continue;
                }
                let mut before = &text[done..found.start()];
                if special.strip_left {
                    before = before.trim_end();
                }
                if !before.is_empty() {
                    each(Fragment::Text(before))?;
                }
                each(Fragment::Token(special.id))?;
                done = found.end();
                if special.strip_right {
                    let rest = &text[done..];
                    done += rest.len() - rest.trim_start().len();
                }
            }
        }
        if done < text.len() {
            each(Fragment::Text(&text[done..]))?;
        }
        Ok(())
    }
}

struct Searcher {
    specials: Vec<Special>,
    /// `None` if there are no tokens to find.
    automaton: Option<AhoCorasick>,
}

impl Searcher {
    fn new(mut specials: Vec<Special>) -> Result<Self, TextError> {
        specials.retain(|special| !special.content.is_empty());
        if specials.is_empty() {
            return Ok(Self { specials, automaton: None });
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // A DFA over thousands of reserved tokens would be hundreds of megabytes.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(specials.iter().map(|special| &special.content))
            .map_err(|error| TextError::BadTokenizer(format!("special tokens: {error}")))?;
        Ok(Self { specials, automaton: Some(automaton) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(content: &str, id: u32, control: bool) -> Special {
        Special { content: content.to_owned(), id, control, strip_left: false, strip_right: false }
    }

    fn split(specials: &Specials, text: &str, parse: bool) -> String {
        let mut out = Vec::new();
        specials
            .split(text, parse, |fragment| {
                out.push(match fragment {
                    Fragment::Token(id) => format!("#{id}"),
                    Fragment::Text(text) => format!("{text:?}"),
                });
                Ok(())
            })
            .unwrap();
        out.join(" ")
    }

    #[test]
    fn leftmost_longest_and_control_only_on_demand() {
        let specials = Specials::new(vec![
            special("<a>", 1, true),
            special("<a><b>", 2, true),
            special("  ", 3, false),
            special("   ", 4, false),
            special("", 5, true),
        ])
        .unwrap();
        assert_eq!(split(&specials, "x<a><b><a>y", true), r##""x" #2 #1 "y""##);
        assert_eq!(split(&specials, "x<a>    y", false), r##""x<a>" #4 " y""##);
        assert_eq!(split(&specials, "", true), "");
    }

    #[test]
    fn white_space_is_swallowed_on_the_side_asked_for() {
        let specials = Specials::new(vec![
            Special { strip_right: true, ..special("<r>", 1, true) },
            Special { strip_left: true, ..special("<l>", 2, true) },
            special(" ", 3, true),
        ])
        .unwrap();
        assert_eq!(split(&specials, "a<r>\n b", true), r##""a" #1 "b""##);
        assert_eq!(split(&specials, "a\n<l>b", true), r##""a" #2 "b""##);
        assert_eq!(split(&specials, "<r> <l>", true), "#1 #2");
    }
}
