//! The `decoder` stage of a `tokenizer.json`, reduced to a table: which bytes each token stands for.
//!
//! A decoder is a function of a whole list of tokens, which no stream can afford. The ones that generative models
//! use are all of the same shape, text per token plus a rule for the first one, and that is what is kept.
//! The one deliberate difference: where byte tokens do not form UTF-8, the library replaces the whole run of them byte by byte,
//! and we replace each broken piece, as byte-level vocabularies do.

use serde_json::Value;

use crate::byte_level;
use crate::decode::Opening;
use crate::error::TextError;
use crate::gguf::byte_token;

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
    pub(crate) fn text(&self, raw: &str) -> Vec<u8> {
        let mut text = raw.to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => {
                    return byte_level::decode(&text).unwrap_or_else(|| text.into_bytes());
                }
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return vec![byte];
                    }
                }
                _ => step.apply(&mut text),
            }
        }
        text.into_bytes()
    }

    /// The bytes that an added token stands for: itself, but for spaces and separators. The byte-level alphabet does not
    /// apply, since added tokens are stored as they are; the library decodes them nevertheless, which mangles an added `é`.
    pub(crate) fn added_text(&self, raw: &str) -> Vec<u8> {
        let mut text = raw.to_owned();
        for step in &self.steps {
            step.apply(&mut text);
        }
        text.into_bytes()
    }
}

impl Step {
    /// Applies a step that maps text to text; the others leave it alone.
    fn apply(&self, text: &mut String) {
        match self {
            Self::ByteLevel | Self::ByteFallback => {}
            Self::Replace { from, to } => *text = text.replace(from.as_str(), to),
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
    }
}

fn unsupported(decoder: &Value) -> TextError {
    TextError::Unsupported(format!("decoder {decoder}"))
}
