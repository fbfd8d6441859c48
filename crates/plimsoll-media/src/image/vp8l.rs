//! The memory that the decoder takes for the prefix codes of a lossless WebP bitstream (RFC 9649, section 3), as trees.
//! An image of blocks has for each block the group of five codes that it uses. Its largest number gives the number of groups:
//! without a check, up to 65,536 behind an image of one pixel. So the stream is read to the end of its codes, as the
//! decoder reads it, and no pixel is decoded.
//!
//! Nothing is allocated. The time is that of the blocks' images, at most a sixteenth of the pixels each, and of the codes' symbols.

use super::malformed;
use crate::{MediaError, Size};

/// Symbols of the five codes of a group: green with the lengths of copies, red, blue, alpha, distances.
const ALPHABETS: [usize; 5] = [LITERALS + LENGTHS, 256, 256, 256, 40];
const GREEN: usize = 0;
const RED: usize = 1;
const BLUE: usize = 2;
const ALPHA: usize = 3;
const DISTANCE: usize = 4;
const LITERALS: usize = 256;
const LENGTHS: usize = 24;
const CACHE_BITS_MAX: u32 = 11;
const SYMBOLS_MAX: usize = LITERALS + LENGTHS + (1 << CACHE_BITS_MAX);
const CODE_BITS_MAX: usize = 15;
/// Order of the lengths of the code for code lengths.
const LENGTHS_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The decoder keeps five trees of 56 bytes per group in a vector that doubles. At the worst instant it has the old one and one of twice
/// its size.
const GROUP_BYTES: u64 = 3 * 5 * 56;
/// A tree has a table of four bytes for each value of its first ten bits, or of all bits of its longest code. It has two nodes of 16
/// bytes for each longer code, and the allocator's overhead of both, or the fixed nodes of a code of two symbols.
const TABLE_BITS_MAX: usize = 10;
const TABLE_ENTRY_BYTES: u64 = 4;
const LONG_CODE_BYTES: u64 = 2 * 16;
const TREE_BYTES: u64 = 96;

/// Most groups of all bitstreams of a file, which bounds the time of reading them. An image has at most half of them.
pub(super) const GROUPS_MAX: u64 = 1 << 17;

/// Returns the bytes of the trees of a bitstream: the body of a `VP8L` chunk, or the bytes after the first one of an `ALPH` chunk,
/// which has no size. Subtracts its groups from `left`.
pub(super) fn tree_bytes(stream: &[u8], size: Option<Size>, left: &mut u64) -> Result<u64, MediaError> {
    let broken = || malformed("its lossless bitstream is broken or cut off");
    let mut walk = Walk::new(stream);
    let groups = walk.groups(size).ok_or_else(broken)?;
    if groups.count > groups.blocks {
        let Groups { count, blocks, .. } = groups;
        return Err(malformed(format!(
            "it has {count} groups of prefix codes for {blocks} blocks that could use them"
        )));
    }
    let Some(others) = left.checked_sub(groups.count) else {
        return Err(malformed(format!("its frames have more than {GROUPS_MAX} groups of prefix codes together")));
    };
    *left = others;
    let mut bytes = groups.count * GROUP_BYTES;
    for _ in 0..groups.count {
        walk.codes(groups.cached).ok_or_else(broken)?;
        bytes += walk.codes.iter().map(Code::tree_bytes).sum::<u64>();
    }
    Ok(bytes)
}

/// The groups of prefix codes of an image.
struct Groups {
    count: u64,
    /// Blocks of the image that choose among the groups.
    blocks: u64,
    /// Symbols that the colour cache adds to green.
    cached: usize,
}

/// A position in a bitstream, with the codes read there.
struct Walk<'a> {
    bits: Bits<'a>,
    /// The group that was read last.
    codes: [Code; 5],
    /// Lengths of the code that is being read.
    lengths: [u8; SYMBOLS_MAX],
}

impl<'a> Walk<'a> {
    fn new(stream: &'a [u8]) -> Self {
        let codes = std::array::from_fn(|_| Code::new());
        Self { bits: Bits { bytes: stream, at: 0 }, codes, lengths: [0; SYMBOLS_MAX] }
    }

    /// Reads up to the groups of an image.
    fn groups(&mut self, size: Option<Size>) -> Option<Groups> {
        let Size { width, height } = match size {
            Some(size) => size,
            None => self.size()?,
        };
        let width = self.transforms(width, height)?;
        let cached = self.cache()?;
        if self.bits.read(1)? == 0 {
            return Some(Groups { count: 1, blocks: 1, cached });
        }
        let blocks = self.blocks(width, height)?;
        Some(Groups { count: u64::from(self.image(blocks)?) + 1, blocks, cached })
    }

    /// The header of a `VP8L` chunk.
    fn size(&mut self) -> Option<Size> {
        let signature = self.bits.read(8)?;
        let (width, height) = (self.bits.read(14)? + 1, self.bits.read(14)? + 1);
        let (_alpha, version) = (self.bits.read(1)?, self.bits.read(3)?);
        (signature == 0x2F && version == 0).then_some(Size { height, width })
    }

    /// Passes over the transforms; each may occur once. Returns the remaining width: several indices of a small palette share a pixel.
    fn transforms(&mut self, mut width: u32, height: u32) -> Option<u32> {
        let mut seen = [false; 4];
        while self.bits.read(1)? == 1 {
            let kind = self.bits.read(2)? as usize;
            if std::mem::replace(&mut seen[kind], true) {
                return None;
            }
            match kind {
                // Predictors and colours: an image of blocks.
                0 | 1 => {
                    let blocks = self.blocks(width, height)?;
                    self.image(blocks)?;
                }
                // Subtracted green has no data.
                2 => {}
                _ => {
                    let colors = self.bits.read(8)? + 1;
                    self.image(u64::from(colors))?;
                    width = width.div_ceil(match colors {
                        1..=2 => 8,
                        3..=4 => 4,
                        5..=16 => 2,
                        _ => 1,
                    });
                }
            }
        }
        Some(width)
    }

    /// Reads the side of a block; returns the number of blocks in the image.
    fn blocks(&mut self, width: u32, height: u32) -> Option<u64> {
        let side = 4 << self.bits.read(3)?;
        Some(u64::from(width.div_ceil(side)) * u64::from(height.div_ceil(side)))
    }

    /// Symbols of the colour cache.
    fn cache(&mut self) -> Option<usize> {
        if self.bits.read(1)? == 0 {
            return Some(0);
        }
        let bits = self.bits.read(4)?;
        (1..=CACHE_BITS_MAX).contains(&bits).then_some(1 << bits)
    }

    /// Passes over an auxiliary image. Returns the largest number that red and green of a pixel form. Copies
    /// and the cache only repeat earlier values, or are zero, so that no pixel is kept.
    fn image(&mut self, pixels: u64) -> Option<u32> {
        let cached = self.cache()?;
        self.codes(cached)?;
        let (mut passed, mut largest) = (0, 0);
        while passed < pixels {
            let green = self.symbol(GREEN)?;
            passed += match green {
                ..LITERALS => {
                    let [red, ..] = [self.symbol(RED)?, self.symbol(BLUE)?, self.symbol(ALPHA)?];
                    largest = largest.max((red << 8 | green) as u32);
                    1
                }
                _ if green < LITERALS + LENGTHS => {
                    let length = self.number(green - LITERALS)?;
                    let distance = self.symbol(DISTANCE)?;
                    self.number(distance)?;
                    u64::from(length)
                }
                _ => 1,
            };
        }
        (passed == pixels).then_some(largest)
    }

    /// Reads the length or distance that a symbol begins.
    fn number(&mut self, symbol: usize) -> Option<u32> {
        if symbol < 4 {
            return Some(symbol as u32 + 1);
        }
        let more = (symbol as u32 - 2) / 2;
        Some(((2 + (symbol as u32 & 1)) << more) + self.bits.read(more)? + 1)
    }

    fn symbol(&mut self, code: usize) -> Option<usize> {
        self.codes[code].symbol(&mut self.bits)
    }

    /// Reads a group.
    fn codes(&mut self, cached: usize) -> Option<()> {
        for (at, (code, alphabet)) in self.codes.iter_mut().zip(ALPHABETS).enumerate() {
            let alphabet = if at == GREEN { alphabet + cached } else { alphabet };
            code.read(&mut self.bits, &mut self.lengths[..alphabet])?;
        }
        Some(())
    }
}

/// A prefix code.
struct Code {
    /// Number of symbols for each code length in bits. If all are zero, there is one symbol, and its code has no bits.
    counts: [u16; CODE_BITS_MAX + 1],
    /// The symbols in the order of their codes, as numbers, short ones first.
    symbols: [u16; SYMBOLS_MAX],
}

impl Code {
    fn new() -> Self {
        Self { counts: [0; CODE_BITS_MAX + 1], symbols: [0; SYMBOLS_MAX] }
    }

    /// Reads a code for `lengths.len()` symbols.
    fn read(&mut self, bits: &mut Bits, lengths: &mut [u8]) -> Option<()> {
        if bits.read(1)? == 1 {
            return self.read_simple(bits, lengths.len());
        }
        let mut for_lengths = [0; LENGTHS_ORDER.len()];
        let count = bits.read(4)? as usize + 4;
        for &symbol in &LENGTHS_ORDER[..count] {
            for_lengths[symbol] = bits.read(3)? as u8;
        }
        self.set(&for_lengths)?;
        let mut count = lengths.len();
        if bits.read(1)? == 1 {
            let width = 2 + 2 * bits.read(3)?;
            count = Some(bits.read(width)? as usize + 2).filter(|&count| count <= lengths.len())?;
        }
        // A single length takes no bits, however often it repeats: a loop over it would only cost time.
        if let (true, length @ 1..16) = (self.is_one(), self.symbols[0]) {
            return self.set_equal(usize::from(length), count);
        }
        let end = self.read_lengths(bits, lengths, count)?;
        self.set(&lengths[..end])
    }

    /// Reads a code of one symbol or two. The first of two has code zero, even if it is the larger one.
    fn read_simple(&mut self, bits: &mut Bits, alphabet: usize) -> Option<()> {
        let two = bits.read(1)?;
        let wide = bits.read(1)?;
        self.counts = [0; CODE_BITS_MAX + 1];
        self.symbols[0] = bits.read(1 + 7 * wide)? as u16;
        if two == 1 {
            self.counts[1] = 2;
            self.symbols[1] = bits.read(8)? as u16;
        }
        self.symbols[..1 + two as usize].iter().all(|&symbol| usize::from(symbol) < alphabet).then_some(())
    }

    /// Reads `left` lengths of a code's symbols with this code; three of its symbols are runs. Returns the end of the lengths.
    fn read_lengths(&self, bits: &mut Bits, lengths: &mut [u8], mut left: usize) -> Option<usize> {
        let (mut at, mut last) = (0, 8);
        while at < lengths.len() && left > 0 {
            left -= 1;
            let (value, times) = match self.symbol(bits)? {
                16 => (last, 3 + bits.read(2)?),
                17 => (0, 3 + bits.read(3)?),
                18 => (0, 11 + bits.read(7)?),
                length => (length as u8, 1),
            };
            lengths.get_mut(at..at + times as usize)?.fill(value);
            at += times as usize;
            if value > 0 {
                last = value;
            }
        }
        Some(at)
    }

    /// Sets `count` symbols with codes of one length.
    fn set_equal(&mut self, length: usize, count: usize) -> Option<()> {
        self.counts = [0; CODE_BITS_MAX + 1];
        (0..).zip(&mut self.symbols[..count]).for_each(|(symbol, place)| *place = symbol);
        self.counts[length] = count as u16;
        (count == 1 << length).then_some(())
    }

    /// Gives symbols the codes of these lengths, which must fill the space of codes, unless there is only one symbol. The decoder accepts
    /// some lengths that do not. Its trees for them are not counted here, so they are refused.
    fn set(&mut self, lengths: &[u8]) -> Option<()> {
        self.counts = [0; CODE_BITS_MAX + 1];
        lengths.iter().for_each(|&length| self.counts[usize::from(length)] += 1);
        self.counts[0] = 0;
        let mut starts = [0; CODE_BITS_MAX + 2];
        let mut filled = 0;
        for length in 1..=CODE_BITS_MAX {
            starts[length + 1] = starts[length] + usize::from(self.counts[length]);
            filled += usize::from(self.counts[length]) << (CODE_BITS_MAX - length);
        }
        let alone = starts[CODE_BITS_MAX + 1] == 1;
        for (symbol, &length) in lengths.iter().enumerate().filter(|&(_, &length)| length > 0) {
            let place = &mut starts[usize::from(length)];
            self.symbols[*place] = symbol as u16;
            *place += 1;
        }
        if alone {
            self.counts = [0; CODE_BITS_MAX + 1];
        }
        (alone || filled == 1 << CODE_BITS_MAX).then_some(())
    }

    /// Reads a symbol.
    fn symbol(&self, bits: &mut Bits) -> Option<usize> {
        if self.is_one() {
            return Some(usize::from(self.symbols[0]));
        }
        let ahead = bits.peek();
        // Codes of one length follow each other: `first` is the first of them, `shorter` the number of symbols with shorter codes.
        let (mut code, mut first, mut shorter) = (0, 0, 0);
        for length in 1..=CODE_BITS_MAX {
            code = code << 1 | (ahead >> (length - 1) & 1) as usize;
            let count = usize::from(self.counts[length]);
            if code < first + count {
                bits.skip(length as u32)?;
                return Some(usize::from(self.symbols[shorter + code - first]));
            }
            shorter += count;
            first = (first + count) << 1;
        }
        None
    }

    fn is_one(&self) -> bool {
        self.counts == [0; CODE_BITS_MAX + 1]
    }

    /// Returns the bytes of the decoder's tree.
    fn tree_bytes(&self) -> u64 {
        let Some(longest) = self.counts.iter().rposition(|&count| count > 0) else { return 0 };
        let (_, long) = self.counts.split_at(TABLE_BITS_MAX + 1);
        let long = long.iter().map(|&count| u64::from(count)).sum::<u64>();
        TREE_BYTES + (TABLE_ENTRY_BYTES << longest.min(TABLE_BITS_MAX)) + LONG_CODE_BYTES * long
    }
}

/// Bits, the lowest of a byte first.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    /// Returns at least the next 25 bits; behind the end there are zeros.
    fn peek(&self) -> u32 {
        let left = &self.bytes[self.at / 8..];
        let word = match left.first_chunk() {
            Some(&four) => u32::from_le_bytes(four),
            None => left.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte)),
        };
        word >> (self.at % 8)
    }

    fn skip(&mut self, count: u32) -> Option<()> {
        self.at = self.at.checked_add(count as usize).filter(|&at| at <= 8 * self.bytes.len())?;
        Some(())
    }

    /// Reads the next `count` bits, at most 25.
    fn read(&mut self, count: u32) -> Option<u32> {
        let value = self.peek() & ((1 << count) - 1);
        self.skip(count)?;
        Some(value)
    }
}

#[cfg(test)]
#[path = "vp8l_tests.rs"]
mod tests;
