//! The answer of a model that names the language before the transcript: `language English<asr_text>Hello.`
//!
//! Reference: transformers, `processing_qwen3_asr.py`.

/// Separates the language from the text.
pub(super) const MARK: &str = "<asr_text>";
/// The prefix of the language, and the name for none.
const LANGUAGE: &str = "language ";
const NO_LANGUAGE: &str = "None";
/// The mark must come within these bytes; a text without it is the transcript.
const HEAD_BYTES_MAX: usize = 128;

/// How an answer in `language` begins.
pub(super) fn begun(language: &str) -> String {
    format!("{LANGUAGE}{language}{MARK}")
}

/// Splits such an answer as it comes.
#[derive(Debug)]
pub(super) struct Tagged {
    /// The text before the mark; none after the mark.
    head: Option<String>,
    /// The language that the model has named.
    pub language: Option<String>,
}

impl Tagged {
    /// For a new answer. `expected`: it may begin with a language.
    pub fn new(expected: bool) -> Self {
        Self { head: expected.then(String::new), language: None }
    }

    /// Takes a piece of the answer, and returns the text that can be shown now.
    pub fn push(&mut self, piece: &str) -> String {
        let Some(head) = &mut self.head else { return piece.to_owned() };
        head.push_str(piece);
        if let Some((language, text)) = head.split_once(MARK) {
            let named = language.trim().strip_prefix(LANGUAGE).map(str::trim);
            self.language = named.filter(|name| !name.is_empty() && *name != NO_LANGUAGE).map(str::to_owned);
            let text = text.to_owned();
            self.head = None;
            return text;
        }
        if head.len() > HEAD_BYTES_MAX { self.end() } else { String::new() }
    }

    /// The rest of an answer that has ended.
    pub fn end(&mut self) -> String {
        self.head.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text and the language of an answer in pieces of so many bytes.
    fn read(answer: &str, bytes: usize) -> (String, Option<String>) {
        let mut tagged = Tagged::new(true);
        let pieces = answer.as_bytes().chunks(bytes).map(|piece| std::str::from_utf8(piece).unwrap());
        let mut text: String = pieces.map(|piece| tagged.push(piece)).collect();
        text.push_str(&tagged.end());
        (text, tagged.language)
    }

    #[test]
    fn the_language_is_taken_off_however_the_answer_comes() {
        for bytes in [1, 3, 100] {
            let english = Some("English".to_owned());
            assert_eq!(read("language English<asr_text>Is the mark dry?", bytes), ("Is the mark dry?".into(), english));
            assert_eq!(read("language None<asr_text>", bytes), (String::new(), None));
            assert_eq!(read("No mark in it.", bytes), ("No mark in it.".into(), None));
        }
        let long = "a".repeat(HEAD_BYTES_MAX + 1);
        assert_eq!(Tagged::new(true).push(&long), long, "what is long is not held back");
        assert_eq!(Tagged::new(false).push("language English"), "language English");
    }
}
