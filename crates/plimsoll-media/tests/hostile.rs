//! Museum T-31, T-32, T-38: bombs, liars and debris cost little and end with a clear error. One test, because it measures
//! the heap of the whole process.

mod common;

use std::sync::atomic::AtomicBool;

use common::fixture;
use plimsoll_media::audio::{self, AudioClip, AudioLimits, resample};
use plimsoll_media::image::{Filter, ImageLimits, decode, frames, probe, resize};
use plimsoll_media::{MediaError, Size};
use plimsoll_memory::heap::{self, CountingHeap};

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

const MIB: u64 = 1 << 20;

fn hear(bytes: &[u8], limits: &AudioLimits) -> Result<AudioClip, MediaError> {
    audio::decode(bytes, limits, &AtomicBool::new(false))
}

/// A PNG chunk with its checksum.
fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let crc = png_crc(&[&kind[..], body].concat());
    [&(body.len() as u32).to_be_bytes(), kind, body, &crc.to_be_bytes()].concat()
}

fn png_crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        (0..8).fold(crc, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
    })
}

fn ogg_crc(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |crc, byte| {
        let crc = crc ^ u32::from(*byte) << 24;
        (0..8).fold(crc, |crc, _| if crc >> 31 == 1 { crc << 1 ^ 0x04C1_1DB7 } else { crc << 1 })
    })
}

/// Makes the checksums of a broken PNG or Ogg true again: otherwise they are all that is ever tested.
fn with_true_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4).map(|four| [four[0], four[1], four[2], four[3]]);
    let mut at = 8;
    while let (true, Some(length)) = (bytes.starts_with(b"\x89PNG"), word(&bytes, at)) {
        let end = at.saturating_add(8).saturating_add(u32::from_be_bytes(length) as usize);
        let Some(body) = bytes.get(at + 4..end) else { break };
        let crc = png_crc(body).to_be_bytes();
        let Some(place) = bytes.get_mut(end..end + 4) else { break };
        place.copy_from_slice(&crc);
        at = end + 4;
    }
    at = 0;
    while bytes.get(at..at + 4) == Some(b"OggS") {
        let Some(&segments) = bytes.get(at + 26) else { break };
        let head = at + 27 + segments as usize;
        let Some(laced) = bytes.get(at + 27..head) else { break };
        let end = head + laced.iter().map(|&length| length as usize).sum::<usize>();
        let Some(page) = bytes.get_mut(at..end) else { break };
        page[22..26].fill(0);
        let crc = ogg_crc(page).to_le_bytes();
        page[22..26].copy_from_slice(&crc);
        at = end;
    }
    bytes
}

fn png(width: u32, height: u32, more: &[Vec<u8>]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header), more.concat(), chunk(b"IEND", &[])].concat()
}

fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let mut file = b"\xff\xd8\xff\xc0\0\x0b\x08".to_vec();
    file.extend([height.to_be_bytes(), width.to_be_bytes()].concat());
    file.extend(b"\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0\xff\xd9");
    file
}

fn gif(canvas: (u16, u16), frame: (u16, u16), frames: usize) -> Vec<u8> {
    let sides = |(w, h): (u16, u16)| [w.to_le_bytes(), h.to_le_bytes()].concat();
    let head = [b"GIF89a".to_vec(), sides(canvas), vec![0x80, 0, 0, 0, 0, 0, 255, 255, 255]].concat();
    let one = [vec![0x2C, 0, 0, 0, 0], sides(frame), vec![0, 2, 2, 0x4C, 0x01, 0]].concat();
    [head, one.repeat(frames), vec![0x3B]].concat()
}

fn webp(canvas: u32, bits: u32) -> Vec<u8> {
    let wide = &(canvas - 1).to_le_bytes()[..3];
    let extended = [b"VP8X\x0a\0\0\0\0\0\0\0", wide, wide].concat();
    let stream = [&b"VP8L\x06\0\0\0\x2f"[..], &bits.to_le_bytes(), &[0]].concat();
    let body = [&b"WEBP"[..], &extended, &stream].concat();
    [b"RIFF", &(body.len() as u32).to_le_bytes()[..], &body].concat()
}

fn refused(what: &str, bytes: &[u8], words: &str) {
    let error = decode(bytes, &ImageLimits::default()).unwrap_err();
    assert!(error.is_the_clients() && error.to_string().contains(words), "{what}: {error}");
}

fn pixel_bombs() {
    refused("30,000²", &png(30_000, 30_000, &[]), "900000000 pixels; the limit is 16777216 (--max-decode-pixels)");
    refused("a PNG too short for its size", &png(4000, 4000, &[]), "cannot hold 16000000 pixels");
    refused("a JPEG of 65,535²", &jpeg(65_535, 65_535), "4294836225 pixels");
    refused("a JPEG too short for its size", &jpeg(4000, 4000), "cannot hold 16000000 pixels");
    refused("a GIF of 65,535²", &gif((65_535, 65_535), (1, 1), 1), "4294836225 pixels");
    refused("a frame larger than its canvas", &gif((1, 1), (65_535, 65_535), 1), "4294836225 pixels");
    refused("frames without end", &gif((1, 1), (1, 1), 100_000), "100000 frames; the limit is 768");
    refused("many large frames", &gif((4000, 4000), (1, 1), 700), "pixels in all frames; the limit is 235929600");
    refused("a WebP of 16,777,216²", &webp(1 << 24, 0), "pixels; the limit is 16777216");
    refused("a bitstream larger than its canvas", &webp(4, u32::MAX), "268435456 pixels");
    for nothing in [png(0, 5, &[]), png(5, 0, &[]), jpeg(0, 5), jpeg(5, 0), gif((0, 5), (0, 5), 1)] {
        refused("no pixels", &nothing, "has no pixels");
    }
    refused("nothing", &[], "supported are PNG, JPEG, GIF and WebP");
    let strip = ImageLimits::default();
    let long = probe(&png(1, 65_535, &[chunk(b"IDAT", &[0; 300])]), &strip).unwrap();
    assert_eq!(long.size, Size::new(65_535, 1), "a legal header; the resize rules refuse its aspect");
    // The decoder unpacks the frame, whatever the canvas shows of it.
    let frame = probe(&[gif((8, 8), (1000, 1000), 2), vec![0; 300]].concat(), &strip).unwrap();
    assert!(frame.decode_bytes() > 4 * 1000 * 1000, "{}", frame.decode_bytes());
    let words = decode(&[0; 99], &ImageLimits { file_bytes: 98, ..strip }).unwrap_err().to_string();
    assert_eq!(words, "an image has 99 bytes; the limit is 98 (--max-image-bytes)");
}

/// Chunks beside the pixels that unpack to much: a zlib stream of 100 MB of zeros, stored as a colour profile and as text.
fn metadata_bombs() {
    // One stored block, then many that each repeat the last byte 258 times: fixed Huffman code, distance one.
    let mut bits: Vec<bool> = vec![true, true, false];
    bits.extend([false, false, true, true, false, false, false, false]);
    for _ in 0..400_000 {
        bits.extend([true, true, false, false, false, true, false, true, false, false, false, false, false]);
    }
    bits.extend([false; 7]);
    let packed = bits.chunks(8).map(|bits| bits.iter().enumerate().map(|(i, &bit)| u8::from(bit) << i).sum::<u8>());
    let zlib: Vec<u8> = [0x78, 0x9C].into_iter().chain(packed).collect();
    let profile = chunk(b"iCCP", &[b"x\0\0".to_vec(), zlib.clone()].concat());
    let text = chunk(b"zTXt", &[b"x\0\0".to_vec(), zlib].concat());
    let small = png(
        1,
        1,
        &[profile, text, chunk(b"IDAT", &[0x78, 0xDA, 0x63, 0x60, 0x64, 0x62, 0x06, 0x00, 0x00, 0x0E, 0x00, 0x07])],
    );
    assert_eq!(decode(&small, &ImageLimits::default()).map(|image| image.data.len()), Ok(3));
}

/// An Ogg page with one packet.
fn page(flags: u8, sequence: u32, packet: &[u8]) -> Vec<u8> {
    let mut laced = vec![255_u8; packet.len() / 255];
    laced.push((packet.len() % 255) as u8);
    let mut page = [&b"OggS\0"[..], &[flags], &[0; 8], &[7, 0, 0, 0], &sequence.to_le_bytes(), &[0; 4]].concat();
    page.push(laced.len() as u8);
    page.extend(laced);
    page.extend(packet);
    let crc = ogg_crc(&page);
    page[22..26].copy_from_slice(&crc.to_le_bytes());
    page
}

/// An Ogg Vorbis file of six kilobytes with 256 code books that unpack to eight megabytes each.
fn code_book_bomb() {
    let ident = [&b"\x01vorbis\0\0\0\0\x01"[..], &16_000_u32.to_le_bytes(), &[0; 12], &[0xB8, 1]].concat();
    let comment = b"\x03vorbis\0\0\0\0\0\0\0\0\x01".to_vec();
    let mut bits: Vec<bool> = Vec::new();
    // Mark, dimensions, entries, ordered, all words of 17 bits; a lookup of the first kind with two values of one bit.
    let book = [
        (0x56_4342, 24),
        (16, 16),
        (1 << 17, 24),
        (1, 1),
        (16, 5),
        (1 << 17, 18),
        (1, 4),
        (0, 32),
        (0, 32),
        (0, 4),
        (0, 1),
        (0, 2),
    ];
    for _ in 0..256 {
        bits.extend(book.iter().flat_map(|&(value, count): &(u32, u32)| (0..count).map(move |i| value >> i & 1 == 1)));
    }
    let books = bits.chunks(8).map(|bits| bits.iter().enumerate().map(|(i, &bit)| u8::from(bit) << i).sum::<u8>());
    let setup: Vec<u8> = b"\x05vorbis\xff".iter().copied().chain(books).chain([0; 32]).collect();
    let file = [page(2, 0, &ident), page(0, 1, &comment), page(0, 2, &setup), page(4, 3, &[0; 9])].concat();
    let words = hear(&file, &AudioLimits::default()).unwrap_err().to_string();
    assert!(words.contains("bytes of code books; the limit is 25165824 (fixed)"), "{words}");
}

/// A chunk that claims four gigabytes, which a decoder would make room for.
fn chunk_length_bomb() {
    let mut whole = fixture("turned.webp");
    let at = whole.windows(4).position(|four| four == b"EXIF").unwrap();
    whole[at + 7] = 0xE8;
    refused("a chunk longer than its file", &whole, "its header is cut off");
    // Found by a fuzzer: a lossy image in four partitions, of which the second has 12 MB in a file of 186 bytes.
    let mut whole = fixture("lossy.webp");
    whole[31] = 0x32;
    refused("a partition longer than its file", &whole, "its header is cut off");
}

const IMAGES: [&str; 20] = [
    "rgb.png",
    "rgba.png",
    "palette.png",
    "gray.png",
    "gray_alpha.png",
    "bits.png",
    "gray16.png",
    "turned.jpg",
    "cmyk.jpg",
    "gray.jpg",
    "progressive.jpg",
    "turned.webp",
    "lossy.webp",
    "palette.gif",
    "moving.gif",
    "moving.webp",
    "large.webp",
    "blocks.webp",
    "blocks_palette.webp",
    "blocks_alpha.webp",
];
const CLIPS: [&str; 6] = ["chord.wav", "chord_float.wav", "chord.flac", "chord.ogg", "chord.mp3", "opus.ogg"];

/// Every truncation and thousands of broken copies: an answer or the client's error, never a crash or a large heap.
fn debris() {
    let limits = ImageLimits { pixels: 1 << 20, ..ImageLimits::default() };
    let seconds = AudioLimits { seconds: 20, ..AudioLimits::default() };
    let mut random = 20_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize
    };
    let check = |name: &str, outcome: Result<(), MediaError>| {
        if let Err(error) = outcome {
            assert!(error.is_the_clients(), "{name}: {error}");
        }
    };
    for name in IMAGES.iter().chain(&CLIPS) {
        let whole = fixture(name);
        let run = |bytes: &[u8]| {
            let before = heap::in_use();
            if IMAGES.contains(name) {
                let taken = frames(bytes, &[0], &limits, |frame| assert!(frame.size.pixels() <= limits.pixels));
                check(name, taken.and_then(|()| decode(bytes, &limits)).map(drop));
            } else {
                check(name, hear(bytes, &seconds).map(drop));
            }
            let cost = heap::peak() - before;
            assert!(cost < 64 * MIB, "a broken {name} costs {cost} bytes: {:?}", &bytes[..bytes.len().min(120)]);
        };
        for _ in 0..60 {
            run(&whole[..next() % whole.len()]);
        }
        for _ in 0..300 {
            let mut broken = whole.clone();
            for _ in 0..1 + next() % 4 {
                // Headers are the interesting part.
                let at = next() % if next() % 2 == 0 { broken.len() } else { broken.len().min(120) };
                broken[at] = next() as u8;
            }
            run(&with_true_checksums(broken));
        }
    }
}

/// T-38: an image that is cut off is an error, not half an image.
fn truncations() {
    for name in IMAGES.iter().filter(|name| !name.starts_with("moving")) {
        let whole = fixture(name);
        let cut = &whole[..whole.len() * 2 / 3];
        assert!(decode(cut, &ImageLimits::default()).is_err(), "{name} cut off");
    }
}

/// The memory that decoding takes is at most the announced memory.
fn large_images() {
    for name in ["large.jpg", "large.webp"] {
        let bytes = fixture(name);
        let header = probe(&bytes, &ImageLimits::default()).unwrap();
        let before = heap::in_use();
        let image = decode(&bytes, &ImageLimits::default()).unwrap();
        let cost = heap::peak() - before;
        println!("{name}: {:.1} bytes a pixel", cost as f64 / image.size.pixels() as f64);
        assert!(cost <= header.decode_bytes(), "{name}: {cost} of {}", header.decode_bytes());
        assert_eq!(resize(&image, Size::new(28, 28), Filter::Bicubic).data.len(), 28 * 28 * 3);
    }
}

/// An audio clip of a minute that compresses to little.
fn long_audio() {
    let samples = vec![0_u8; 16_000 * 2 * 60];
    let mut wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data".to_vec();
    wav.extend((samples.len() as u32).to_le_bytes());
    wav.extend(samples);
    let limits = AudioLimits { seconds: 60, ..AudioLimits::default() };
    let header = audio::probe(&wav, &limits).unwrap();
    heap::restart_peak();
    let before = heap::in_use();
    let audio = hear(&wav, &limits).unwrap();
    assert_eq!(audio.samples.len(), 16_000 * 60);
    let cost = heap::peak() - before;
    assert!(cost <= header.decode_bytes(), "{cost} of {}", header.decode_bytes());
    // Lengths that a pipe could not know are put right without a copy.
    let mut piped = wav.clone();
    piped[4..8].fill(0xFF);
    piped[40..44].fill(0xFF);
    heap::restart_peak();
    let before = heap::in_use();
    assert_eq!(audio::probe(&piped, &limits).unwrap(), header);
    let cost = heap::peak() - before;
    assert!(cost < MIB, "{cost} bytes to read the header of {}", piped.len());
    let words = audio::probe(&wav, &AudioLimits { seconds: 59, ..limits }).unwrap_err().to_string();
    assert_eq!(words, "an audio clip has 60 seconds; the limit is 59 (--max-audio-seconds)");
}

/// A rate that has no factor in common with the encoder's takes the longest blocks.
fn awkward_rates() {
    for rate in [191_999, 189_999, 8_001] {
        let audio = AudioClip { rate, samples: vec![0.25; 2 * rate as usize] };
        heap::restart_peak();
        let before = heap::in_use();
        let made = resample(audio.samples, rate, 16_000, &AtomicBool::new(false)).unwrap();
        let cost = heap::peak() - before;
        println!("{rate} Hz: {cost} bytes");
        assert!(cost < 40 * MIB + 4 * made.len() as u64, "{rate} Hz: {cost}");
    }
}

/// WAVs of floating-point numbers hold whatever their writer likes.
fn wild_numbers() {
    let limits = AudioLimits::default();
    let file = |sample: f32| {
        let mut file = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x03\0\x01\0\x80\x3e\0\0\0\xfa\0\0\x04\0\x20\0data".to_vec();
        file.extend(16_000_u32.to_le_bytes());
        (0..4000).for_each(|i| file.extend(if i % 7 == 3 { sample } else { 0.25 }.to_le_bytes()));
        file
    };
    for sample in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = hear(&file(sample), &limits).unwrap_err();
        assert!(error.is_the_clients(), "{error}");
        assert!(error.to_string().contains(&format!("one of its samples is {sample}")), "{error}");
    }
    for sample in [1e30, f32::MAX, -1e30] {
        let audio = hear(&file(sample), &limits).unwrap();
        assert_eq!(&audio.samples[..4], [0.25, 0.25, 0.25, sample.signum()]);
    }
}

#[test]
fn t31_bombs_and_debris_cost_little() {
    heap::restart_peak();
    let before = heap::in_use();
    let spent = |what: &str, most: u64| {
        let peak = heap::peak() - before;
        println!("{what}: {:.1} MiB at most so far", peak as f64 / MIB as f64);
        assert!(peak < most, "{what}: {peak}");
    };
    pixel_bombs();
    spent("pixel bombs", 8 * MIB);
    metadata_bombs();
    chunk_length_bomb();
    code_book_bomb();
    // Most of this is the bomb itself, as the test packs it.
    spent("metadata bombs", 16 * MIB);
    truncations();
    large_images();
    long_audio();
    wild_numbers();
    awkward_rates();
    debris();
    spent("large pictures and debris", 64 * MIB);
}
