//! The tokenizer for the rest of the engine: text to ids, and ids to text.
//!
//! This module only joins the parts. `gguf` and `json` build the parts from a GGUF vocabulary or a `tokenizer.json`. The parts are in
//! `specials`, `pretokenize`, `bpe`, `table` and `decode`. A tokenizer that our pipeline does not support runs through the `tokenizers`
//! library (`foreign`).

use crate::bpe::{Bpe, Scratch};
use crate::error::{TextError, shielded};
use crate::fim::{FimIds, FimTokens};
use crate::foreign::Foreign;
use crate::normalize::Normalizer;
use crate::pair::{Pair, Pairing};
use crate::pretokenize::Cutter;
use crate::specials::{Fragment, Specials};
use crate::table::{Kind, Opening, TokenTable};

/// The longest text that a tokenizer accepts by default, in bytes: about a million tokens of prose.
pub const DEFAULT_TEXT_BYTES_MAX: usize = 4 << 20;

/// Turns text into token ids and back. It is immutable once loaded, so one tokenizer serves all threads.
pub struct Tokenizer {
    pub(crate) parts: Parts,
    fim: Option<FimTokens>,
    text_bytes_max: usize,
}

/// The parts that a loader builds.
pub(crate) struct Parts {
    pub(crate) table: TokenTable,
    pub(crate) engine: Engine,
    pub(crate) opening: Opening,
    /// The tokens that `add_special` puts before the text; `suffix` has those after it.
    pub(crate) prefix: Vec<u32>,
    pub(crate) suffix: Vec<u32>,
    /// The rule that joins two texts into one sequence; none if the tokenizer has none.
    pub(crate) pairing: Option<Pairing>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Vec<u32>,
}

/// The code that turns text into ids.
pub(crate) enum Engine {
    /// Our pipeline.
    Own(Box<Pipeline>),
    /// The `tokenizers` library.
    Foreign(Box<Foreign>),
}

/// Our pipeline: special tokens, then normalization, then words, then BPE.
pub(crate) struct Pipeline {
    pub(crate) specials: Specials,
    pub(crate) normalizer: Normalizer,
    pub(crate) cutter: Cutter,
    pub(crate) bpe: Bpe,
}

impl Tokenizer {
    pub(crate) fn new(parts: Parts) -> Self {
        let fim = FimTokens::find(&parts.table, FimIds::default());
        Self { parts, fim, text_bytes_max: DEFAULT_TEXT_BYTES_MAX }
    }

    /// Returns the tokenizer with the fill-in-the-middle tokens that a file names.
    pub(crate) fn with_fim(mut self, ids: FimIds) -> Self {
        self.fim = FimTokens::find(&self.parts.table, ids);
        self
    }

    /// Returns the tokenizer with another limit on the length of a text, in bytes.
    pub fn with_text_bytes_max(mut self, bytes: usize) -> Self {
        // Positions within a word are 32-bit.
        self.text_bytes_max = bytes.min(u32::MAX as usize / 4);
        self
    }

    /// The longest text that [`Self::encode`] accepts, in bytes.
    pub fn text_bytes_max(&self) -> usize {
        self.text_bytes_max
    }

    /// The ids of `text`.
    ///
    /// With `add_special`, the tokens that the model expects around a text (such as a beginning-of-sequence token) are added. With
    /// `parse_special`, control tokens in the text become tokens. Without it they are plain text, which is necessary for untrusted input.
    /// User-defined tokens are always matched.
    ///
    /// # Errors
    ///
    /// [`TextError::TextTooLong`] beyond [`Self::text_bytes_max`]; [`TextError::Encode`] if the tokenizer fails or panics.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>, TextError> {
        self.encode_pieces(&[text], add_special, parse_special)
    }

    /// The ids of a text that is given in pieces. No token spans two pieces: a control token that is cut in two is text.
    ///
    /// # Errors
    ///
    /// As [`Self::encode`], for all pieces together.
    pub fn encode_pieces(
        &self,
        pieces: &[&str],
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        if bytes > self.text_bytes_max {
            return Err(TextError::TextTooLong { bytes, limit: self.text_bytes_max });
        }
        shielded(TextError::Encode, || {
            let mut out = Vec::new();
            if add_special {
                out.extend_from_slice(&self.parts.prefix);
            }
            for (i, piece) in pieces.iter().enumerate() {
                match &self.parts.engine {
                    Engine::Own(pipeline) => {
                        pipeline.encode(piece, i == 0, parse_special, &self.parts.table, &mut out)?;
                    }
                    Engine::Foreign(foreign) => foreign.encode(piece, parse_special, &mut out)?,
                }
            }
            if add_special {
                out.extend_from_slice(&self.parts.suffix);
            }
            Ok(out)
        })
    }

    /// The number of tokens that `add_special` puts before a text, and after it.
    pub fn around(&self) -> (usize, usize) {
        (self.parts.prefix.len(), self.parts.suffix.len())
    }

    /// Joins two texts, encoded without special tokens, into one sequence for cross-encoders. None if the tokenizer does not define pairs.
    pub fn pair(&self, first: &[u32], second: &[u32]) -> Option<Pair> {
        self.parts.pairing.as_ref().map(|pairing| pairing.join(first, second))
    }

    /// Returns an upper bound for the heap bytes that [`Self::encode`] needs at once for a text of `text_bytes` bytes, result included.
    /// Text without word boundaries reaches it; ordinary text needs a tenth of it.
    pub fn encode_bytes_max(&self, text_bytes: usize) -> usize {
        // Ids grow by doubling: the old and the new buffer exist at once.
        let ids = 3 * std::mem::size_of::<u32>();
        match &self.parts.engine {
            Engine::Own(_) => Scratch::bytes_max(text_bytes).saturating_add(text_bytes.saturating_mul(ids)),
            Engine::Foreign(_) => text_bytes.saturating_mul(Foreign::BYTES_PER_BYTE + ids),
        }
    }

    /// One more than the largest id, holes included.
    pub fn vocab_size(&self) -> usize {
        self.parts.table.len()
    }

    /// The bytes of a token inside a text, which may be incomplete characters. Empty for holes and for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.parts.table.text(id)
    }

    /// Whether a token is a control token, not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.parts.table.kind(id) == Kind::Special
    }

    /// The id of the token with this name in the vocabulary (`Ġthe`, `▁the`, `<|im_end|>`).
    pub fn token_to_id(&self, name: &str) -> Option<u32> {
        self.parts.table.id_of(name)
    }

    /// The name of a token in the vocabulary; the inverse of [`Self::token_to_id`].
    pub fn token_name(&self, id: u32) -> &str {
        self.parts.table.raw(id)
    }

    /// The beginning-of-sequence token, whether or not [`Self::encode`] adds it.
    pub fn bos(&self) -> Option<u32> {
        self.parts.bos
    }

    /// The tokens that end a generation, the main one first. May be empty.
    pub fn eos(&self) -> &[u32] {
        &self.parts.eos
    }

    /// The tokens of fill-in-the-middle; none for a model that was not trained with them.
    pub fn fim(&self) -> Option<&FimTokens> {
        self.fim.as_ref()
    }

    /// The tokens that `add_special` puts before a text.
    pub fn prefix_ids(&self) -> &[u32] {
        &self.parts.prefix
    }

    /// The heap bytes of the vocabulary's tables, without merges and automata.
    pub fn table_bytes(&self) -> usize {
        self.parts.table.heap_bytes()
    }

    pub(crate) fn table(&self) -> &TokenTable {
        &self.parts.table
    }

    pub(crate) fn opening(&self) -> Opening {
        self.parts.opening
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("own", &matches!(self.parts.engine, Engine::Own(_)))
            .field("bos", &self.parts.bos)
            .field("eos", &self.parts.eos)
            .finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Appends the ids of `text`. `first` is whether the text begins with this piece.
    fn encode(
        &self,
        text: &str,
        mut first: bool,
        parse_special: bool,
        table: &TokenTable,
        out: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut scratch = Scratch::default();
        self.specials.split(text, parse_special, |fragment| {
            match fragment {
                Fragment::Token(id) => out.push(id),
                Fragment::Text(part) => {
                    let normal = self.normalizer.apply(part, first);
                    self.cutter.cut(&normal, &mut |word| {
                        self.bpe.encode_word(word, table, &mut scratch, out);
                    });
                }
            }
            first = false;
            Ok(())
        })
    }
}
