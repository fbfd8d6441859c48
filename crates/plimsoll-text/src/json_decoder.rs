//! The `decoder` stage of a `tokenizer.json`, reduced to a table of each token's bytes.
//!
//! A decoder is a function of a whole list of tokens, which a stream cannot use. The decoders of generative models all have one form: a
//! text per token, and a rule for the first token. Only this form is kept. There is one deliberate difference, where byte tokens do not
//! form UTF-8. The library replaces their whole run byte by byte; here each broken piece is replaced, as in byte-level vocabularies.

use serde_json::Value;

use crate::byte_level::{self, byte_token};
use crate::error::TextError;
use crate::table::Opening;

/// Most steps of a decoder. Known decoders have four.
const STEPS_MAX: usize = 32;

/// Returns the most bytes of a token's text. Repeated replacements could otherwise fill any memory.
const fn text_bytes_max(raw: &str) -> usize {
    4 * raw.len() + 64
}

/// The steps that turn a token into text.
pub(crate) struct Decoding {
    steps: Vec<Step>,
    /// The rule for the first token.
    pub(crate) opening: Opening,
}

/// One step on the text of a token.
enum Step {
    ByteLevel,
    Replace {
        from: String,
        to: String,
    },
    ByteFallback,
    /// Puts a space before the token. If the token begins with the prefix, drops the prefix instead.
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
    /// Puts a space before every token except the first.
    Separate,
}

impl Decoding {
    /// Reads the stage. A step that is not a function of single tokens is [`TextError::Unsupported`].
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

    /// The bytes of a token of the model.
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

    /// The bytes of an added token: its content, changed only by the steps for spaces and separators. The byte-level alphabet does not
    /// apply, since added tokens are stored as they are. The library decodes them anyway, which corrupts an added `é`.
    pub(crate) fn added_text(&self, raw: &str) -> Result<Vec<u8>, TextError> {
        let mut text = raw.to_owned();
        for step in &self.steps {
            step.apply(&mut text, text_bytes_max(raw))?;
        }
        Ok(text.into_bytes())
    }
}

impl Step {
    /// Applies a step that maps text to text. Other steps change nothing. Refuses a result that could be longer than `bytes_max`.
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
