//! Normalization of a piece of text before it is cut into words: composition and SentencePiece's treatment of spaces.
//!
//! Case folding, accent stripping and the other normalizers of text encoders are not here. A `tokenizer.json` with one of these runs
//! through the `tokenizers` library.

use std::borrow::Cow;

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The cases in which a text gets a `▁` in front, as if a space preceded it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PrefixSpace {
    /// Never.
    Never,
    /// Every piece of text between special tokens.
    Always,
    /// Every piece that does not begin with a space.
    AlwaysUnlessSpace,
    /// Only the piece at the start of the text, unless it begins with a space.
    FirstUnlessSpace,
}

/// The changes that a vocabulary makes to text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalizer {
    /// Whether to compose characters (Unicode NFC).
    pub(crate) nfc: bool,
    /// Whether to write spaces as `▁`, as SentencePiece does, and when to add one in front. `None` leaves spaces unchanged.
    pub(crate) escape_spaces: Option<PrefixSpace>,
}

impl Normalizer {
    /// The normal form of a piece of text. `first` is whether the piece is at the start of the text.
    pub(crate) fn apply<'t>(&self, text: &'t str, first: bool) -> Cow<'t, str> {
        let composed = if self.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            Cow::Owned(text.nfc().map(|(character, _)| character).collect())
        } else {
            Cow::Borrowed(text)
        };
        match self.escape_spaces {
            None => composed,
            Some(prefix) => escape(composed, prefix, first),
        }
    }
}

fn escape(text: Cow<'_, str>, prefix: PrefixSpace, first: bool) -> Cow<'_, str> {
    let spaced = text.starts_with([' ', '▁']);
    let prefixed = match prefix {
        PrefixSpace::Never => false,
        PrefixSpace::Always => true,
        PrefixSpace::AlwaysUnlessSpace => !spaced,
        PrefixSpace::FirstUnlessSpace => first && !spaced,
    };
    if !prefixed && !text.contains(' ') {
        return text;
    }
    let spaces = text.bytes().filter(|&byte| byte == b' ').count();
    let mut out = String::with_capacity(text.len() + 2 * spaces + 3);
    if prefixed {
        out.push('▁');
    }
    for (index, part) in text.split(' ').enumerate() {
        if index > 0 {
            out.push('▁');
        }
        out.push_str(part);
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_are_escaped_and_prefixed_as_asked() {
        let apply = |prefix, text, first| {
            Normalizer { nfc: false, escape_spaces: Some(prefix) }.apply(text, first).into_owned()
        };
        assert_eq!(apply(PrefixSpace::Never, "a  b", true), "a▁▁b");
        assert_eq!(apply(PrefixSpace::Always, " a", false), "▁▁a");
        assert_eq!(apply(PrefixSpace::AlwaysUnlessSpace, " a", false), "▁a");
        assert_eq!(apply(PrefixSpace::FirstUnlessSpace, "a", false), "a");
        assert_eq!(apply(PrefixSpace::FirstUnlessSpace, "a", true), "▁a");
    }

    #[test]
    fn decomposed_text_is_composed() {
        let normalizer = Normalizer { nfc: true, escape_spaces: None };
        assert_eq!(normalizer.apply("e\u{301}", true), "é");
    }
}
