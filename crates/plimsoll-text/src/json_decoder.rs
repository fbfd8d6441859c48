//! The `decoder` stage of a `tokenizer.json`, reduced to a table: which bytes each token stands for.
//!
//! A decoder is a function of a whole list of tokens, which no stream can afford. The ones that generative models
//! use are all of the same shape, text per token plus a rule for the first one, and that is what is kept.
//! The one deliberate difference: where byte tokens do not form UTF-8, the library replaces the whole run of them byte by byte,
//! and we replace each broken piece, as byte-level vocabularies do.

use serde_json::Value;

use crate::byte_level::{self, byte_token};
use crate::error::TextError;
use crate::table::Opening;

/// The most steps of a decoder; known ones have four.
const STEPS_MAX: usize = 32;

/// The most bytes that a token of the vocabulary may stand for: replacements of replacements could fill any memory.
const fn text_bytes_max(raw: &str) -> usize {
    4 * raw.len() + 64
}

/// How tokens become text.
pub(crate) struct Decoding {
    steps: Vec<Step>,
    /// The rule for the first token.
    pub(crate) opening: Opening,
}

/// One thing done to the text of a token.
enum Step {
    ByteLevel,
    Replace {
        from: String,
        to: String,
    },
    ByteFallback,
    /// A space before the token unless it begins with the prefix, which is dropped.
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
    /// A space before every token but the first.
    Separate,
}

impl Decoding {
    /// Reads the stage. What is not a matter of single tokens is [`TextError::Unsupported`].
    pub(crate) fn new(decoder: &Value) -> Result<Self, TextError> {
        let mut decoding = Self { steps: Vec::new(), opening: Opening::Plain };
        if decoder.is_null() {
            decoding.steps.push(Step::Separate);
            decoding.opening = Opening::Raw { cleanup: false };
        } else {
            decoding.add(decoder)?;
        }
        if decoding.steps.len() > STEPS_MAX {
            let message = format!("a decoder of {} steps, the limit is {STEPS_MAX}", decoding.steps.len());
            return Err(TextError::Unsupported(message));
        }
        Ok(decoding)
    }

    fn add(&mut self, decoder: &Value) -> Result<(), TextError> {
        let text = |key: &str| decoder[key].as_str().map(str::to_owned);
        match decoder["type"].as_str().unwrap_or_default() {
            "ByteLevel" => self.steps.push(Step::ByteLevel),
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => {}
            "Sequence" => {
                for part in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(part)?;
                }
            }
            "Replace" => {
                let from = decoder["pattern"]["String"].as_str().map(str::to_owned);
                match (from, text("content")) {
                    (Some(from), Some(to)) => self.steps.push(Step::Replace { from, to }),
                    _ => return Err(unsupported(decoder)),
                }
            }
            "Strip" => {
                let one_space = decoder["content"] == " " && decoder["start"] == 1 && decoder["stop"] == 0;
                if !one_space {
                    return Err(unsupported(decoder));
                }
                self.opening = Opening::StripSpace;
            }
            "Metaspace" => {
                if decoder["replacement"] != "▁" {
                    return Err(unsupported(decoder));
                }
                let to = " ".to_owned();
                let from = "▁".to_owned();
                self.steps.push(Step::Replace { from, to });
                let never = decoder["prepend_scheme"] == "never" || decoder["add_prefix_space"] == false;
                if !never {
                    self.opening = Opening::StripMarks;
                }
            }
            "WordPiece" => {
                let prefix = text("prefix").unwrap_or_else(|| "##".to_owned());
                let cleanup = decoder["cleanup"].as_bool().unwrap_or(true);
                self.opening = Opening::Raw { cleanup };
                self.steps.push(Step::WordPiece { prefix, cleanup });
            }
            _ => return Err(unsupported(decoder)),
        }
        Ok(())
    }

    /// The bytes that a token of the model stands for.
    pub(crate) fn text(&self, raw: &str) -> Result<Vec<u8>, TextError> {
        let mut text = raw.to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => {
                    return Ok(byte_level::decode(&text).unwrap_or_else(|| text.into_bytes()));
                }
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return Ok(vec![byte]);
                    }
                }
                _ => step.apply(&mut text, text_bytes_max(raw))?,
            }
        }
        Ok(text.into_bytes())
    }

    /// The bytes that an added token stands for: itself, but for spaces and separators. The byte-level alphabet does not
    /// apply, since added tokens are stored as they are; the library decodes them nevertheless, which mangles an added `é`.
    pub(crate) fn added_text(&self, raw: &str) -> Result<Vec<u8>, TextError> {
        let mut text = raw.to_owned();
        for step in &self.steps {
            step.apply(&mut text, text_bytes_max(raw))?;
        }
        Ok(text.into_bytes())
    }
}

impl Step {
    /// Applies a step that maps text to text; the others leave it alone. What could become longer than `bytes_max` is refused before.
    fn apply(&self, text: &mut String, bytes_max: usize) -> Result<(), TextError> {
        match self {
            Self::ByteLevel | Self::ByteFallback => {}
            Self::Replace { from, to } => {
                let added = text.matches(from.as_str()).count().saturating_mul(to.len());
                if text.len().saturating_add(added) > bytes_max {
                    let message = format!("its decoder makes more than {bytes_max} bytes of one token");
                    return Err(TextError::BadTokenizer(message));
                }
                *text = text.replace(from.as_str(), to);
            }
            Self::Separate => text.insert(0, ' '),
            Self::WordPiece { prefix, cleanup } => {
                *text = match text.strip_prefix(prefix.as_str()) {
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                if *cleanup {
                    *text = tokenizers::decoders::wordpiece::cleanup(text);
                }
            }
        }
        Ok(())
    }
}

fn unsupported(decoder: &Value) -> TextError {
    TextError::Unsupported(format!("decoder {decoder}"))
}
