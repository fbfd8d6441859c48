//! Museum T-31: decoding takes what [`Header::decode_bytes`] says and no more, also where a file was made to take more than its
//! pixels do, and what cannot be told beforehand is refused. One test, because it measures the heap of the whole process.
//!
//! [`Header::decode_bytes`]: plimsoll_media::image::Header::decode_bytes

mod common;

use std::time::Instant;

use common::fixture;
use plimsoll_media::Size;
use plimsoll_media::geometry::{Canvases, ImageRule, Longest, Pieces, ProcessorFiles, Squares, Tiles};
use plimsoll_media::image::{ImageLimits, Rgb, decode, frames, pieces, probe, resize, squares, tiles};
use plimsoll_memory::heap::{self, CountingHeap};

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

const MIB: u64 = 1 << 20;

/// Bits, the lowest of a byte first.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    count: u32,
}

impl Bits {
    fn put(&mut self, value: u32, width: u32) {
        for at in 0..width {
            if self.count.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().unwrap() |= ((value >> at & 1) as u8) << (self.count % 8);
            self.count += 1;
        }
    }

    /// A prefix code of one symbol, which then takes no bits.
    fn one(&mut self, symbol: u32) {
        self.put(0b101, 3);
        self.put(symbol, 8);
    }

    /// A prefix code of 1024 symbols of ten bits, for which a decoder makes a table of four kilobytes.
    fn wide(&mut self) {
        self.put(0, 1);
        // Of the lengths' code, fourteen lengths stand here, of which the last is that of ten.
        self.put(14 - 4, 4);
        self.put(0, 13 * 3 - 8);
        self.put(0, 8);
        self.put(1, 3);
        // A number of ten bits: two less than there are lengths, which take no bits.
        self.put(1 | 4 << 1 | 1022 << 4, 1 + 3 + 10);
    }

    /// A lossless bitstream with blocks of 4 × 4 pixels that all use the last of `groups`. `size` stands at the start
    /// of images, not of alphas.
    fn lossless(size: Option<(u32, u32)>, groups: u32, pixels: u32) -> Vec<u8> {
        let mut bits = Self::default();
        if let Some((width, height)) = size {
            bits.put(0x2F, 8);
            bits.put(width - 1, 14);
            bits.put(height - 1, 14);
            bits.put(0, 1 + 3);
        }
        // No transforms, a cache of 2048 colours, codes by the block; the image of blocks without a cache.
        bits.put(1 << 1 | 11 << 2 | 1 << 6, 1 + 1 + 4 + 1 + 3 + 1);
        [(groups - 1) % 256, (groups - 1) / 256, 0, 0, 0].into_iter().for_each(|symbol| bits.one(symbol));
        for _ in 0..groups {
            bits.wide();
            (0..4).for_each(|_| bits.one(0));
        }
        (0..pixels).for_each(|_| bits.put(0, 10));
        bits.bytes
    }
}

fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let padding = vec![0; body.len() % 2];
    [kind, &(body.len() as u32).to_le_bytes()[..], body, &padding].concat()
}

fn webp(chunks: &[Vec<u8>]) -> Vec<u8> {
    chunk(b"RIFF", &[b"WEBP".to_vec(), chunks.concat()].concat())
}

/// The bitstream of a lossy fixture.
fn lossy(name: &str) -> Vec<u8> {
    let bytes = fixture(name);
    assert_eq!(&bytes[12..16], b"VP8 ");
    let length = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
    bytes[20..20 + length].to_vec()
}

fn sides((width, height): (u32, u32)) -> Vec<u8> {
    [&(width - 1).to_le_bytes()[..3], &(height - 1).to_le_bytes()[..3]].concat()
}

/// A canvas with alpha; `flags` may say that it moves.
fn canvas(flags: u8, size: (u32, u32)) -> Vec<u8> {
    chunk(b"VP8X", &[vec![0x10 | flags, 0, 0, 0], sides(size)].concat())
}

const MOVES: u8 = 2;

fn frame(size: (u32, u32), chunks: &[Vec<u8>]) -> Vec<u8> {
    chunk(b"ANMF", &[vec![0; 6], sides(size), vec![100, 0, 0, 0], chunks.concat()].concat())
}

fn moving(size: (u32, u32), frames: &[Vec<u8>]) -> Vec<u8> {
    webp(&[vec![canvas(MOVES, size), chunk(b"ANIM", &[0; 6])], frames.to_vec()].concat())
}

/// An alpha that is opaque, coded like a lossless image.
fn opaque() -> Vec<u8> {
    let mut bits = Bits::default();
    // No transforms, no cache, one group.
    bits.put(0, 3);
    [255, 0, 0, 0, 0].into_iter().for_each(|symbol| bits.one(symbol));
    chunk(b"ALPH", &[vec![1], bits.bytes].concat())
}

fn png_chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let crc = !kind.iter().chain(body).fold(u32::MAX, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        (0..8).fold(crc, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
    });
    [&(body.len() as u32).to_be_bytes(), &kind[..], body, &crc.to_be_bytes()].concat()
}

/// A black PNG of one row, with what stands before its pixels.
fn row(width: u32, [depth, color, bytes]: [u8; 3], before: &[u8]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &1_u32.to_be_bytes(), &[depth, color, 0, 0, 0]].concat();
    // Deflate's own codes: a zero, and that it is repeated 258 times.
    let count = width * u32::from(bytes) + 1;
    let mut bits = Bits::default();
    bits.put(0b011, 3);
    let (runs, rest) = ((count - 1) / 258, 1 + (count - 1) % 258);
    (0..rest).for_each(|_| bits.put(0b0000_1100, 8));
    (0..runs).for_each(|_| bits.put(0b1010_0011, 8 + 5));
    bits.put(0, 7);
    let pixels = png_chunk(b"IDAT", &[vec![0x78, 0x9C], bits.bytes, vec![0; 4]].concat());
    [b"\x89PNG\r\n\x1a\n", &png_chunk(b"IHDR", &header)[..], before, &pixels, &png_chunk(b"IEND", &[])].concat()
}

/// Refused before there is anything on the heap.
fn refused(what: &str, bytes: &[u8], words: &str) {
    heap::restart_peak();
    let before = heap::in_use();
    let error = decode(bytes, &ImageLimits::default()).map(|image| image.size).unwrap_err();
    let cost = heap::peak() - before;
    assert!(error.is_the_clients() && error.to_string().contains(words), "{what}: {error}");
    assert!(cost < MIB / 8, "{what} costs {cost} bytes");
}

/// Takes what it says, whatever comes of it.
fn within(what: &str, bytes: &[u8]) {
    let limits = ImageLimits::default();
    let header = probe(bytes, &limits).unwrap();
    heap::restart_peak();
    let before = heap::in_use();
    let all: Vec<u64> = (0..header.frames).collect();
    let outcome = frames(bytes, &all, &limits, |frame| assert_eq!(frame.size, header.size));
    let (cost, said) = (heap::peak() - before, header.decode_bytes());
    println!("{what}: {cost} of {said} bytes, {:.1} a pixel, {outcome:?}", cost as f64 / header.size.pixels() as f64);
    assert!(cost <= said, "{what}: {cost} of {said}");
}

/// An image becomes what an encoder sees in no more memory than its fit says, beside what the encoder sees.
fn resizes() {
    let files = |text| ProcessorFiles::read(Some(text), None, Some(r#"{"image_seq_length": 256}"#)).unwrap();
    let published = r#"{"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}"#;
    let rules = [
        ImageRule::Squares(Squares::new(&files(published), 16, 4).unwrap()),
        ImageRule::Canvases(Canvases::new(&files("{}"), 14, 2).unwrap()),
        ImageRule::Longest(Longest::new(&files(r#"{"size": {"longest_edge": 1540}}"#), 14, 2).unwrap()),
        ImageRule::Pieces(Pieces::new(&files("{}")).unwrap()),
        ImageRule::Tiles(Tiles::new(&files(r#"{"size": {"height": 448, "width": 448}}"#), 14, 2).unwrap()),
    ];
    let sizes = [(1725, 1700), (125, 1825), (3000, 4000), (48, 48), (1, 1500), (1, 50_000), (50_000, 1)];
    let mut resized = 0;
    for (rule, (height, width)) in rules.iter().flat_map(|rule| sizes.map(|size| (rule, size))) {
        let size = Size { height, width };
        let Ok(fit) = rule.fit(size) else { continue };
        heap::restart_peak();
        let before = heap::in_use();
        let image = Rgb { size, data: vec![7; 3 * size.pixels() as usize] };
        let made = match (fit.steps, fit.cut) {
            (Some(steps), _) => squares(image, steps, fit.canvas, fit.size, fit.filter),
            (None, Some(cut)) => pieces(&image, fit.canvas, fit.size, cut.whole, fit.filter),
            (None, None) if fit.canvas != fit.size => tiles(&image, fit.canvas, fit.size, fit.filter),
            (None, None) => vec![resize(&image, fit.size, fit.filter)],
        };
        let seen: u64 = made.iter().map(|image| image.data.len() as u64).sum();
        let (cost, said) = (heap::peak() - before, fit.held_bytes(size) + seen);
        println!("{height} × {width}: {cost} of {said} bytes, {} images", made.len());
        // Beside them a list of the images.
        assert!(cost <= said + 4096, "{height} × {width}: {cost} of {said} bytes, {rule:?}");
        resized += 1;
    }
    assert!(resized > 18, "{resized}");
}

fn groups_of_codes() {
    const ALL: u32 = 1 << 16;
    let words = "it has 65536 groups of prefix codes for 1 blocks that could use them";
    refused("codes for one pixel", &webp(&[chunk(b"VP8L", &Bits::lossless(Some((1, 1)), ALL, 1))]), words);
    let alpha = chunk(b"ALPH", &[vec![1], Bits::lossless(None, ALL, 0)].concat());
    let image = chunk(b"VP8 ", &lossy("lossy.webp"));
    let words = "it has 65536 groups of prefix codes for 35 blocks";
    refused("codes of an alpha", &webp(&[canvas(0, (28, 20)), alpha.clone(), image.clone()]), words);
    let frames = [frame((28, 20), &[opaque(), image.clone()]), frame((28, 20), &[alpha, image])];
    refused("codes of a frame's alpha", &moving((28, 20), &frames), words);
    // As many groups as blocks are legal, and counted.
    let legal = webp(&[chunk(b"VP8L", &Bits::lossless(Some((256, 256)), 4096, 256 * 256))]);
    assert!(decode(&legal, &ImageLimits::default()).unwrap().data.iter().all(|&value| value == 0));
    within("a group of codes for each block", &legal);
    // So are they in a frame, but not in any number of them: reading them takes time.
    let frames = vec![frame((1024, 1024), &[chunk(b"VP8L", &Bits::lossless(Some((1024, 1024)), ALL, 0))]); 3];
    let before = Instant::now();
    refused("codes of many frames", &moving((1024, 1024), &frames), "its frames have more than 131072 groups");
    println!("{:?} for as many groups as there may be", before.elapsed());
}

fn liars_in_frames() {
    let (small, large) = (chunk(b"VP8 ", &lossy("lossy.webp")), chunk(b"VP8 ", &lossy("large.webp")));
    let raw = chunk(b"ALPH", &[0; 17]);
    let words = "a frame of 4 × 4 pixels holds an image of 2000 × 1500 pixels";
    refused("a liar in a frame", &moving((4, 4), &[frame((4, 4), std::slice::from_ref(&large))]), words);
    refused("a liar behind an alpha", &moving((4, 4), &[frame((4, 4), &[raw.clone(), large.clone()])]), words);
    let renamed = [b"JUNK", &large[4..]].concat();
    let words = "a frame has no lossy image behind its alpha";
    refused("a liar by another name", &moving((4, 4), &[frame((4, 4), &[raw, renamed])]), words);
    // Behind a frame of odd length a decoder looks for the next one in the padding. No other reader does.
    let mut odd = frame((28, 20), std::slice::from_ref(&small));
    odd[4] += 1;
    odd.extend(b"\0ANMF");
    refused("an odd frame", &moving((28, 20), &[odd]), "one of its frames has an odd length");
    let still = webp(&[canvas(0, (28, 20)), frame((28, 20), &[opaque(), small.clone()]), small]);
    refused("frames that do not move", &still, "it has frames and does not say that it moves");
}

fn more_than_pixels() {
    let large = chunk(b"VP8 ", &lossy("large.webp"));
    within("motion with alpha", &moving((2000, 1500), &vec![frame((2000, 1500), &[opaque(), large.clone()]); 2]));
    within("a picture with alpha", &webp(&[canvas(0, (2000, 1500)), opaque(), large]));
    let mut padded = lossy("lossy.webp");
    padded.resize(17 << 20, 0);
    within("a partition with room to spare", &webp(&[chunk(b"VP8 ", &padded)]));
    within("a row of 64 bits a pixel", &row(1 << 20, [16, 6, 8], &[]));
    within("a row of 32 bits a pixel", &row(1 << 20, [8, 6, 4], &[]));
    within("a row of grey", &row(1 << 20, [8, 0, 1], &[]));
    within("an orientation of 8 MiB", &row(1, [8, 2, 3], &png_chunk(b"eXIf", &vec![0; 8 << 20])));
    let mut strip = fixture("progressive.jpg");
    let at = strip.windows(2).position(|two| two == [0xFF, 0xC2]).unwrap();
    strip[at + 5..at + 9].copy_from_slice(&[0, 1, 0xFF, 0xDC]);
    within("a strip of 65,500 pixels", &strip);
}

/// Every truncation and every flipped bit of small lossless images: no panic, which would be said to be a decoder's.
fn debris() {
    for name in ["blocks.webp", "blocks_palette.webp", "blocks_alpha.webp", "turned.webp", "moving.webp"] {
        let whole = fixture(name);
        assert!(probe(&whole, &ImageLimits::default()).is_ok(), "{name}");
        heap::restart_peak();
        let before = heap::in_use();
        let check = |bytes: &[u8]| {
            if let Err(error) = probe(bytes, &ImageLimits::default()) {
                assert!(error.is_the_clients() && !error.to_string().contains("its decoder failed"), "{name}: {error}");
            }
        };
        (0..whole.len()).for_each(|length| check(&whole[..length]));
        let mut broken = whole.clone();
        for bit in 0..8 * whole.len() {
            broken[bit / 8] ^= 1 << (bit % 8);
            check(&broken);
            broken[bit / 8] ^= 1 << (bit % 8);
        }
        let cost = heap::peak() - before;
        assert!(cost < MIB / 8, "probing a broken {name} costs {cost} bytes");
    }
}

#[test]
#[ignore = "soak"]
fn t31_decoding_takes_no_more_than_is_said() {
    resizes();
    groups_of_codes();
    liars_in_frames();
    more_than_pixels();
    debris();
}
