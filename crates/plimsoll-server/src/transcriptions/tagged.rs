//! The answer of a model that names the language before the transcript: `language English<asr_text>Hello.` of Qwen3-ASR, or
//! `<|en|><|transcribe|><|notimestamps|> Hello.` of Whisper.
//!
//! Reference: transformers, `processing_qwen3_asr.py`, `generation_whisper.py`.

use super::languages;

/// Separates the language from the text.
const MARK: &str = "<asr_text>";
/// Whisper's token before the text, if it writes no times.
pub(super) const PLAIN: &str = "<|notimestamps|>";
/// The prefix of the language, and the name for none.
const LANGUAGE: &str = "language ";
const NO_LANGUAGE: &str = "None";
/// The mark must come within this many bytes; a text without it is the transcript.
const HEAD_BYTES_MAX: usize = 128;

/// Returns the beginning of an answer in `language`.
pub(super) fn begun(language: &str) -> String {
    format!("{LANGUAGE}{language}{MARK}")
}

/// The part of an answer before the transcript.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heading {
    /// Nothing.
    None,
    /// The language's name. Qwen3-ASR.
    Named,
    /// Tokens for the language and the task, and white space. Whisper.
    Tokens,
    /// White space. Whisper, if the prompt has those tokens.
    Space,
}

impl Heading {
    fn mark(self) -> Option<&'static str> {
        match self {
            Heading::Named => Some(MARK),
            Heading::Tokens => Some(PLAIN),
            Heading::None | Heading::Space => None,
        }
    }

    /// Returns the language that the text before the mark names.
    fn language(self, head: &str) -> Option<String> {
        if self == Heading::Named {
            let named = head.trim().strip_prefix(LANGUAGE).map(str::trim);
            return named.filter(|name| !name.is_empty() && *name != NO_LANGUAGE).map(str::to_owned);
        }
        let (code, _) = head.trim().strip_prefix("<|")?.split_once("|>")?;
        languages::all().find(|(known, _)| *known == code).map(|(_, name)| name.to_owned())
    }
}

/// Splits an answer with such a heading piece by piece.
#[derive(Debug)]
pub(super) struct Tagged {
    heading: Heading,
    /// The text before the mark; none after the mark.
    head: Option<String>,
    /// Whether white space is left out, until the text begins.
    trims: bool,
    /// The language that the model has named.
    pub language: Option<String>,
}

impl Tagged {
    /// The state at the beginning of an answer.
    pub fn new(heading: Heading) -> Self {
        let trims = matches!(heading, Heading::Tokens | Heading::Space);
        Self { heading, head: heading.mark().map(|_| String::new()), trims, language: None }
    }

    /// Takes a piece of the answer, and returns the text that can be shown now.
    pub fn push(&mut self, piece: &str) -> String {
        let Some(head) = &mut self.head else { return self.begin(piece.to_owned()) };
        head.push_str(piece);
        let mark = self.heading.mark().unwrap_or_default();
        if let Some((language, text)) = head.split_once(mark) {
            self.language = self.heading.language(language);
            let text = text.to_owned();
            self.head = None;
            return self.begin(text);
        }
        if head.len() > HEAD_BYTES_MAX { self.end() } else { String::new() }
    }

    /// Returns a piece of the text, without white space at the text's beginning.
    fn begin(&mut self, text: String) -> String {
        if !self.trims {
            return text;
        }
        let text = text.trim_start();
        self.trims = text.is_empty();
        text.to_owned()
    }

    /// Returns the rest of an answer that has ended. Tokens of a heading that `max_tokens` has cut off are not text.
    pub fn end(&mut self) -> String {
        let head = self.head.take().unwrap_or_default();
        if self.heading != Heading::Tokens {
            return head;
        }
        self.language = self.language.take().or_else(|| self.heading.language(&head));
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text and the language of an answer, read in pieces of this many bytes.
    fn read(heading: Heading, answer: &str, bytes: usize) -> (String, Option<String>) {
        let mut tagged = Tagged::new(heading);
        let pieces = answer.as_bytes().chunks(bytes).map(|piece| std::str::from_utf8(piece).unwrap());
        let mut text: String = pieces.map(|piece| tagged.push(piece)).collect();
        text.push_str(&tagged.end());
        (text, tagged.language)
    }

    #[test]
    fn the_language_is_taken_off_however_the_answer_comes() {
        for bytes in [1, 3, 100] {
            let named = |answer, bytes| read(Heading::Named, answer, bytes);
            let english = Some("English".to_owned());
            assert_eq!(
                named("language English<asr_text>Is the mark dry?", bytes),
                ("Is the mark dry?".into(), english)
            );
            assert_eq!(named("language None<asr_text>", bytes), (String::new(), None));
            assert_eq!(named("No mark in it.", bytes), ("No mark in it.".into(), None));
        }
        let long = "a".repeat(HEAD_BYTES_MAX + 1);
        assert_eq!(Tagged::new(Heading::Named).push(&long), long, "what is long is not held back");
        assert_eq!(Tagged::new(Heading::None).push("language English"), "language English");
    }

    #[test]
    fn tokens_before_a_transcript_and_its_first_space_are_taken_off() {
        for bytes in [1, 7, 100] {
            let german = Some("German".to_owned());
            let detected = read(Heading::Tokens, "<|de|><|transcribe|><|notimestamps|>  Ist es trocken? ", bytes);
            assert_eq!(detected, ("Ist es trocken? ".into(), german));
            assert_eq!(read(Heading::Space, " Is it dry?", bytes), ("Is it dry?".into(), None));
            let cut = read(Heading::Tokens, "<|de|><|transcribe|>", bytes);
            assert_eq!(cut, (String::new(), Some("German".to_owned())), "max_tokens may end a heading");
        }
    }
}
