//! The ends of the partitions of a lossy WebP image. Their sizes follow the first partition, which must be read (RFC 6386, section 9) for
//! their number. The decoder allocates room for each before it checks that it is there: 16 MiB for three bytes.

/// Whether every partition of a key frame (the body of a `VP8 ` chunk) ends within it.
pub(super) fn partitions_fit(frame: &[u8]) -> bool {
    fits(frame).is_some()
}

fn fits(frame: &[u8]) -> Option<()> {
    let tag = u32::from_le_bytes([*frame.first()?, *frame.get(1)?, *frame.get(2)?, 0]);
    // Frames that build on others are no images. Start code and size follow.
    let first = (tag & 1 == 0).then_some((tag >> 5) as usize)?;
    let rest = frame.get(10..)?;
    let mut sizes = rest.get(first..)?;
    let count = partitions(rest.get(..first)?);
    let mut data = sizes.get(3 * (count - 1)..)?;
    for _ in 1..count {
        let (size, others) = sizes.split_first_chunk::<3>()?;
        data = data.get(u32::from_le_bytes([size[0], size[1], size[2], 0]) as usize..)?;
        sizes = others;
    }
    Some(())
}

/// Returns the number of partitions behind the first, from its header.
fn partitions(first: &[u8]) -> usize {
    let mut bits = Bits::new(first);
    // Colour space and clamping.
    bits.skip(2);
    if bits.flag() {
        let (map, data) = (bits.flag(), bits.flag());
        if data {
            bits.skip(1);
            (0..4).for_each(|_| bits.optional(7 + 1));
            (0..4).for_each(|_| bits.optional(6 + 1));
        }
        if map {
            (0..3).for_each(|_| bits.optional(8));
        }
    }
    // The loop filter's kind, level and sharpness.
    bits.skip(1 + 6 + 3);
    if bits.flag() && bits.flag() {
        (0..8).for_each(|_| bits.optional(6 + 1));
    }
    let (high, low) = (bits.flag(), bits.flag());
    1 << (2 * u8::from(high) + u8::from(low))
}

/// The arithmetic decoder of section 7.3, for bits with equal probabilities. Behind the end there are zeros.
struct Bits<'a> {
    left: &'a [u8],
    value: u32,
    range: u32,
    shifted: u32,
}

impl<'a> Bits<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut bits = Self { left: bytes, value: 0, range: 255, shifted: 0 };
        bits.value = bits.byte() << 8 | bits.byte();
        bits
    }

    fn byte(&mut self) -> u32 {
        let Some((byte, left)) = self.left.split_first() else { return 0 };
        self.left = left;
        u32::from(*byte)
    }

    fn flag(&mut self) -> bool {
        let split = 1 + (((self.range - 1) * 128) >> 8);
        let set = self.value >= split << 8;
        if set {
            self.value -= split << 8;
            self.range -= split;
        } else {
            self.range = split;
        }
        while self.range < 128 {
            self.value <<= 1;
            self.range <<= 1;
            self.shifted += 1;
            if self.shifted == 8 {
                self.shifted = 0;
                self.value |= self.byte();
            }
        }
        set
    }

    fn skip(&mut self, bits: u32) {
        for _ in 0..bits {
            self.flag();
        }
    }

    /// Skips a value of `bits` bits that exists if a flag is set.
    fn optional(&mut self, bits: u32) {
        if self.flag() {
            self.skip(bits);
        }
    }
}
