//! Byte pair encoding of one word: from symbols to token ids by merging the best-ranked neighbours first.
//!
//! One loop serves every vocabulary that Plimsoll reads. Byte-level BPE (GPT-2 and its successors) and SentencePiece BPE (Llama, Gemma)
//! differ only in the first symbols and in the source of the ranks: a list of merges, or the scores of the pieces. The queue makes encoding
//! O(n log n) in the length of the word, so a megabyte without a space is slow but no attack. The memory is [`Scratch`]; in the worst case
//! it is a multiple of the text, see [`Scratch::bytes_max`].
//!
//! This module does not cut text into words and does not know special tokens.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use crate::error::TextError;
use crate::table::{NONE, TokenTable};

/// The merges of a vocabulary: the pairs of neighbours that may join, with rank and result.
#[derive(Default)]
pub(crate) struct Merges {
    by_pair: HashMap<u64, Merge, BuildHasherDefault<PairHasher>>,
}

/// The outcome of joining two neighbours.
#[derive(Clone, Copy)]
struct Merge {
    /// The rank of the merge. Lower ranks merge first.
    rank: u32,
    /// The token that the two become.
    id: u32,
}

impl Merges {
    /// An empty table with room for `count` merges.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { by_pair: HashMap::with_capacity_and_hasher(count, BuildHasherDefault::default()) }
    }

    /// Lets `left` and `right` join into `id`. If a pair is given twice, the first rank stays.
    pub(crate) fn insert(&mut self, left: u32, right: u32, rank: u32, id: u32) {
        self.by_pair.entry(pair_key(left, right)).or_insert(Merge { rank, id });
    }

    fn get(&self, left: u32, right: u32) -> Option<Merge> {
        self.by_pair.get(&pair_key(left, right)).copied()
    }
}

/// Builds the merges from pairs of names in the order of their ranks.
pub(crate) fn ranked_merges<'m>(
    pairs: impl Iterator<Item = Result<(&'m str, &'m str), TextError>>,
    count: usize,
    table: &TokenTable,
) -> Result<Merges, TextError> {
    let mut merges = Merges::with_capacity(count);
    let mut joined = String::new();
    for (rank, pair) in pairs.enumerate() {
        let (left, right) = pair?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let id = |name: &str| {
            table.id_of(name).ok_or_else(|| TextError::BadTokenizer(format!("merge {rank}: {name:?} is not a token")))
        };
        merges.insert(id(left)?, id(right)?, rank as u32, id(&joined)?);
    }
    Ok(merges)
}

fn pair_key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// A hasher for the 64 bits of a pair. The default hasher would take more time than the rest of a merge.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = u128::from(self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 = (mixed >> 64) as u64 ^ mixed as u64;
    }
}

/// The first symbols of a word.
pub(crate) enum Alphabet {
    /// One symbol for each byte. The table has its token, or [`NONE`] if the vocabulary lacks the byte.
    Bytes(Box<[u32; 256]>),
    /// One symbol for each character that is a token.
    Chars {
        /// Tokens of single bytes for all other characters; none if the vocabulary does not have all 256 of them.
        fallback: Option<Box<[u32; 256]>>,
    },
}

/// A BPE vocabulary, ready to encode words.
pub(crate) struct Bpe {
    /// The first symbols of a word.
    pub(crate) alphabet: Alphabet,
    /// The pairs of neighbours that may join.
    pub(crate) merges: Merges,
    /// The token for symbols without a token. Without it such symbols are dropped.
    pub(crate) unknown: Option<u32>,
    /// Whether neighbouring unknown symbols become one token instead of one each.
    pub(crate) fuse_unknown: bool,
    /// Whether a word that is a token stays whole, even if no chain of merges would build it.
    pub(crate) whole_words_first: bool,
}

/// The working memory of one call to encode, reused from word to word.
#[derive(Default)]
pub(crate) struct Scratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
    raw: String,
}

/// A piece of the word under construction, linked to its remaining neighbours.
#[derive(Clone, Copy)]
struct Symbol {
    /// Its token, or [`NONE`] once merged away into the symbol at its left.
    id: u32,
    previous: u32,
    next: u32,
}

/// A possible merge of the symbol at `position` with its right neighbour. The derived order is the order of merging: lowest rank first,
/// leftmost first among equals.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    position: u32,
    id: u32,
}

impl Scratch {
    /// Returns an upper bound in bytes for the scratch memory of encoding a text of `text_bytes` bytes.
    ///
    /// There is at most one symbol a byte. There is at most one candidate a pair at first, and each merge removes one and adds at most two.
    /// The capacity of a vector may be twice its length.
    pub(crate) fn bytes_max(text_bytes: usize) -> usize {
        let per_byte = 2 * (std::mem::size_of::<Symbol>() + 2 * std::mem::size_of::<Candidate>()) + 6;
        text_bytes.saturating_mul(per_byte)
    }
}

impl Bpe {
    /// Appends the tokens of `word` to `out`. `table` is the vocabulary of the merges.
    pub(crate) fn encode_word(&self, word: &str, table: &TokenTable, scratch: &mut Scratch, out: &mut Vec<u32>) {
        if self.whole_words_first
            && let Some(id) = self.whole(word, table, scratch)
        {
            out.push(id);
            return;
        }
        self.first_symbols(word, table, scratch);
        self.merge(scratch);
        out.extend(scratch.symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
    }

    /// The token whose text is the whole word, if there is one.
    fn whole(&self, word: &str, table: &TokenTable, scratch: &mut Scratch) -> Option<u32> {
        match self.alphabet {
            Alphabet::Chars { .. } => table.id_of(word),
            Alphabet::Bytes(_) => {
                // A word longer than the longest token is not in the table, so it is not looked up.
                if word.len() > table.raw_bytes_max() {
                    return None;
                }
                scratch.raw.clear();
                scratch.raw.extend(word.bytes().map(crate::byte_level::byte_to_char));
                table.id_of(&scratch.raw)
            }
        }
    }

    /// Fills `scratch` with the first symbols of `word`.
    fn first_symbols(&self, word: &str, table: &TokenTable, scratch: &mut Scratch) {
        scratch.symbols.clear();
        match &self.alphabet {
            Alphabet::Bytes(ids) => {
                for byte in word.bytes() {
                    self.push_or_unknown(ids[usize::from(byte)], &mut scratch.symbols);
                }
            }
            Alphabet::Chars { fallback } => {
                let mut buffer = [0; 4];
                for character in word.chars() {
                    let spelled = character.encode_utf8(&mut buffer);
                    match (table.id_of(spelled), fallback) {
                        (Some(id), _) => push(id, &mut scratch.symbols),
                        (None, Some(ids)) => {
                            for byte in spelled.bytes() {
                                push(ids[usize::from(byte)], &mut scratch.symbols);
                            }
                        }
                        (None, None) => self.push_or_unknown(NONE, &mut scratch.symbols),
                    }
                }
            }
        }
    }

    fn push_or_unknown(&self, id: u32, symbols: &mut Vec<Symbol>) {
        if id != NONE {
            push(id, symbols);
        } else if let Some(unknown) = self.unknown {
            let fused = self.fuse_unknown && symbols.last().is_some_and(|last| last.id == unknown);
            if !fused {
                push(unknown, symbols);
            }
        }
    }

    /// Joins neighbours, lowest rank first, until no pair may join.
    fn merge(&self, scratch: &mut Scratch) {
        let Scratch { symbols, queue, .. } = scratch;
        queue.clear();
        for position in 1..symbols.len() {
            self.offer(symbols, position - 1, position, queue);
        }
        while let Some(Reverse(best)) = queue.pop() {
            let left = best.position as usize;
            let Symbol { id, next, .. } = symbols[left];
            // A neighbour may have changed since this candidate was queued. The candidate is valid only if the current pair still makes the
            // same token.
            if id == NONE || next == NONE {
                continue;
            }
            let right = next as usize;
            let still_valid = self.merges.get(id, symbols[right].id).is_some_and(|merge| merge.id == best.id);
            if !still_valid {
                continue;
            }
            let after = symbols[right].next;
            symbols[right].id = NONE;
            symbols[left].id = best.id;
            symbols[left].next = after;
            let before = symbols[left].previous;
            if before != NONE {
                self.offer(symbols, before as usize, left, queue);
            }
            if after != NONE {
                symbols[after as usize].previous = left as u32;
                self.offer(symbols, left, after as usize, queue);
            }
        }
    }

    /// Queues the merge of two neighbours, if there is one.
    fn offer(&self, symbols: &[Symbol], left: usize, right: usize, queue: &mut BinaryHeap<Reverse<Candidate>>) {
        if let Some(merge) = self.merges.get(symbols[left].id, symbols[right].id) {
            queue.push(Reverse(Candidate { rank: merge.rank, position: left as u32, id: merge.id }));
        }
    }
}

/// Appends a symbol and links it to the previous one.
fn push(id: u32, symbols: &mut Vec<Symbol>) {
    let position = symbols.len() as u32;
    let previous = position.checked_sub(1).unwrap_or(NONE);
    if let Some(last) = symbols.last_mut() {
        last.next = position;
    }
    symbols.push(Symbol { id, previous, next: NONE });
}
