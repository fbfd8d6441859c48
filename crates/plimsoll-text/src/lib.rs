//! Plimsoll: the conversions between characters and token ids.
//!
//! A prompt is a list of messages. The model's chat template ([`ChatTemplate`]) renders it as text, and the model's vocabulary
//! ([`Tokenizer`]) turns the text into ids. Generated ids become text one at a time ([`Detokenizer`]), until a stop string
//! ([`StopMatcher`]) or an end token. Clients send the texts, so every step has a limit in bytes or in steps, and a panic in a library ends
//! one request. Tokenizers and templates come from the model's files, which are trusted within their readers' limits.
//!
//! **Invariant:** this crate depends on no model, device or protocol, opens no connection, and keeps no state between calls except in the
//! caller's values.

#![forbid(unsafe_code)]

mod bpe;
mod bpe_files;
mod byte_level;
mod charsmap;
mod chat;
mod decode;
mod error;
mod fim;
mod foreign;
mod gguf;
mod gguf_library;
mod gguf_vocab;
mod json;
mod json_decoder;
mod json_description;
mod json_pipeline;
mod neighbours;
mod normalize;
mod pair;
mod pattern_names;
mod post_processor;
mod pretokenize;
mod specials;
mod stop;
mod table;
mod template_files;
mod tokenizer;

pub use chat::{ChatTemplate, Ending, PROMPT_BYTES_MAX, TEMPLATE_BYTES_MAX, strftime};
pub use decode::Detokenizer;
pub use error::TextError;
pub use fim::{FimIds, FimTokens};
pub use gguf_vocab::GgufVocab;
pub use pair::Pair;
pub use pretokenize::CUTTING_BYTES_MAX;
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopMatcher};
pub use template_files::{TemplateSources, chat_template_sources};
pub use tokenizer::{DEFAULT_TEXT_BYTES_MAX, Tokenizer};
