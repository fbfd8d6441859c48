//! Targets for images, animations and audio clips.

use std::sync::atomic::AtomicBool;

use plimsoll_media::audio::{self, AudioLimits};
use plimsoll_media::image::{self, ImageLimits};
use plimsoll_media::{MediaError, Size};

use crate::{KIB, MIB, within};

/// Small limits, so that a fuzzer soon finds inputs beyond them.
fn limits() -> ImageLimits {
    ImageLimits { file_bytes: 1 << 20, pixels: 1 << 20, frames: 64, animation_pixels: 1 << 22 }
}

/// The most bytes of a decoder beyond the number computed from the header: for error messages.
const SLACK: usize = 64 * KIB;

/// Returns the bytes for chunks and tags that are read before anything is decoded.
fn looking(bytes: usize) -> usize {
    4 * bytes + 2 * MIB
}

fn the_clients<T>(outcome: Result<T, MediaError>) -> Option<T> {
    outcome.map_err(|error| assert!(error.is_the_clients(), "{error}")).ok()
}

/// Reads the bytes unchanged, and with corrected checksums: decoders stop at wrong ones.
fn both(data: &[u8], read: impl Fn(&[u8])) {
    read(data);
    let mended = with_true_checksums(data);
    if mended != data {
        read(&mended);
    }
}

/// Probes, decodes and resizes an image.
pub(crate) fn image(data: &[u8]) {
    both(data, |bytes| {
        let Some(header) = the_clients(within(looking(bytes.len()), || image::probe(bytes, &limits()))) else { return };
        let cost = header.decode_bytes() as usize + SLACK;
        let Some(image) = the_clients(within(cost, || image::decode(bytes, &limits()))) else { return };
        assert_eq!((image.size, image.data.len() as u64), (header.size, 3 * header.size.pixels()));
        let to = Size { height: 28, width: 1 + u32::from(data[data.len() / 2]) };
        assert_eq!(image::resize(&image, to, image::Filter::Bicubic).data.len() as u64, 3 * to.pixels());
    });
}

/// Probes an animation, and decodes some of its frames.
pub(crate) fn frames(data: &[u8]) {
    both(data, |bytes| {
        let Some(header) = the_clients(within(looking(bytes.len()), || image::probe(bytes, &limits()))) else { return };
        let wanted: Vec<u64> = (0..header.frames).step_by(1 + data.len() % 3).collect();
        let mut taken = 0;
        let cost = header.decode_bytes() as usize + SLACK;
        let take = |frame: &image::Rgb| {
            assert_eq!((frame.size, frame.data.len() as u64), (header.size, 3 * header.size.pixels()));
            taken += 1;
        };
        if the_clients(within(cost, || image::frames(bytes, &wanted, &limits(), take))).is_some() {
            assert_eq!(taken, wanted.len());
        }
    });
}

/// Probes and decodes an audio clip.
pub(crate) fn audio(data: &[u8]) {
    let limits = AudioLimits { file_bytes: 1 << 20, seconds: 20, ..AudioLimits::default() };
    both(data, |bytes| {
        let Some(header) = the_clients(within(looking(bytes.len()) + 40 * MIB, || audio::probe(bytes, &limits))) else {
            return;
        };
        let cost = header.decode_bytes() as usize + SLACK;
        let Some(audio) = the_clients(within(cost, || audio::decode(bytes, &limits, &AtomicBool::new(false)))) else {
            return;
        };
        assert_eq!(audio.rate, header.rate);
        assert!(audio.samples.len() as u64 <= limits.seconds * u64::from(audio.rate));
    });
}

/// Returns the CRC of PNG (reflected) or Ogg (not), over these bytes.
fn crc<'a>(reflected: bool, bytes: impl Iterator<Item = &'a u8>) -> u32 {
    let start = if reflected { u32::MAX } else { 0 };
    let crc = bytes.fold(start, |crc, byte| {
        if reflected {
            let crc = crc ^ u32::from(*byte);
            (0..8).fold(crc, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
        } else {
            let crc = crc ^ u32::from(*byte) << 24;
            (0..8).fold(crc, |crc, _| if crc >> 31 == 1 { crc << 1 ^ 0x04C1_1DB7 } else { crc << 1 })
        }
    });
    crc ^ start
}

/// Corrects the checksums of a broken PNG or Ogg.
fn with_true_checksums(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_vec();
    let mut at = 8;
    while let (true, Some(length)) = (bytes.starts_with(b"\x89PNG"), bytes.get(at..at + 4)) {
        let length = u32::from_be_bytes([length[0], length[1], length[2], length[3]]) as usize;
        let end = at.saturating_add(8).saturating_add(length);
        let Some(body) = bytes.get(at + 4..end) else { break };
        let sum = crc(true, body.iter()).to_be_bytes();
        let Some(place) = bytes.get_mut(end..end + 4) else { break };
        place.copy_from_slice(&sum);
        at = end + 4;
    }
    at = 0;
    while bytes.get(at..at + 4) == Some(b"OggS") {
        let Some(&segments) = bytes.get(at + 26) else { break };
        let head = at + 27 + usize::from(segments);
        let Some(laced) = bytes.get(at + 27..head) else { break };
        let end = head + laced.iter().map(|&length| usize::from(length)).sum::<usize>();
        let Some(page) = bytes.get_mut(at..end) else { break };
        page[22..26].fill(0);
        let sum = crc(false, page.iter()).to_le_bytes();
        page[22..26].copy_from_slice(&sum);
        at = end;
    }
    bytes
}
