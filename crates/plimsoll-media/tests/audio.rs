//! A chord in every format, and headers that lie.

mod common;

use std::sync::atomic::AtomicBool;

use common::fixture;
use plimsoll_media::MediaError;
use plimsoll_media::audio::{self, AudioClip, AudioLimits, probe};

fn decode(bytes: &[u8], limits: &AudioLimits) -> Result<AudioClip, MediaError> {
    audio::decode(bytes, limits, &AtomicBool::new(false))
}

fn decoded(bytes: &[u8]) -> Result<AudioClip, MediaError> {
    decode(bytes, &AudioLimits::default())
}

/// The chord at a sample: 440 and 1000 Hz, the right channel at half the left one's strength.
fn chord(sample: usize) -> f32 {
    let t = sample as f64 / 16_000.0 * std::f64::consts::TAU;
    (0.75 * (0.4 * (440.0 * t).sin() + 0.2 * (1000.0 * t).sin())) as f32
}

/// The root of the mean square of the difference, over the middle and at the best shift of up to `delay` samples.
fn error(audio: &AudioClip, delay: usize) -> f32 {
    let middle = 800..2400;
    let at = |shift: usize| {
        let squares = middle.clone().map(|i| (audio.samples[i + shift] - chord(i)).powi(2));
        (squares.sum::<f32>() / middle.len() as f32).sqrt()
    };
    (0..=delay).map(at).fold(f32::INFINITY, f32::min)
}

#[test]
fn a_chord_sounds_the_same_in_every_format() {
    for (name, delay, most) in [
        ("chord.wav", 0, 2e-5),
        ("chord_float.wav", 0, 1e-6),
        ("chord.flac", 0, 2e-5),
        ("chord.ogg", 0, 2e-2),
        ("chord.mp3", 2400, 2e-2),
    ] {
        let audio = decoded(&fixture(name)).unwrap();
        assert_eq!(audio.rate, 16_000, "{name}");
        let header = probe(&fixture(name), &AudioLimits::default()).unwrap();
        assert_eq!((header.rate, header.channels), (16_000, 2), "{name}");
        assert_eq!(header.samples, audio.samples.len() as u64, "{name}: counted before it is decoded");
        // Decoded, not filled up, but for an MP3's first packet, which may lean on one that is not there.
        let silent = audio.samples.iter().rev().take_while(|sample| **sample == 0.0).count();
        assert!(silent < 1200, "{name}: {silent} of {} samples are silent, at the end", audio.samples.len());
        let least = if name.ends_with("mp3") { 3200 } else { audio.samples.len() };
        assert!(audio.samples.len() >= least && audio.samples.len() < 3200 + 2400, "{name}: {}", audio.samples.len());
        let error = error(&audio, delay.min(audio.samples.len() - 2400));
        println!("{name}: {} samples, error {error:e}", audio.samples.len());
        assert!(error <= most, "{name}: {error}");
    }
}

#[test]
fn a_format_that_is_not_decoded_is_refused_by_name() {
    for bytes in [fixture("opus.ogg"), b"%PDF-1.7 and so on".to_vec(), Vec::new(), fixture("rgb.png")] {
        let words = decoded(&bytes).unwrap_err().to_string();
        assert_eq!(
            words,
            "an audio clip is in a format that is not supported; supported are WAV, FLAC, MP3 and Ogg Vorbis"
        );
    }
}

/// A WAV header over `data`, with what it claims.
fn wav(rate: u32, channels: u16, claimed: u32, data: &[u8]) -> Vec<u8> {
    let mut file = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0".to_vec();
    file.extend(channels.to_le_bytes());
    file.extend(rate.to_le_bytes());
    file.extend(rate.wrapping_mul(u32::from(channels)).wrapping_mul(2).to_le_bytes());
    file.extend((channels.wrapping_mul(2)).to_le_bytes());
    file.extend(b"\x10\0data");
    file.extend(claimed.to_le_bytes());
    file.extend(data);
    file
}

#[test]
fn rates_and_channels_outside_the_range_are_refused() {
    let words = |rate, channels| decoded(&wav(rate, channels, 2000, &[0; 2000])).unwrap_err().to_string();
    assert_eq!(words(1000, 1), "an audio clip cannot be read: 1000 Hz is less than 8000 Hz");
    assert_eq!(words(384_000, 1), "an audio clip has 384000 Hz; the limit is 192000 (fixed)");
    assert_eq!(words(16_000, 20), "an audio clip has 20 channels; the limit is 8 (fixed)");
    for (rate, channels) in [(0, 1), (16_000, 0), (16_000, 65_535), (u32::MAX, 1)] {
        assert!(decoded(&wav(rate, channels, 2000, &[0; 2000])).unwrap_err().is_the_clients(), "{rate} × {channels}");
    }
    assert!(decoded(&wav(16_000, 1, 2000, &[0; 2000])).is_ok());
}

#[test]
fn t32_what_a_header_claims_is_neither_allocated_nor_believed() {
    // A kilobyte that claims ten hours: a piped WAV claims the most there is, and has what it has.
    let audio = decoded(&wav(16_000, 1, u32::MAX, &[0; 1000])).unwrap();
    assert_eq!(audio.samples.len(), 500);
    // Any other claim is a file that is cut off: ten hours in a kilobyte.
    let words = decoded(&wav(16_000, 1, 10 * 3600 * 32_000, &[0; 1000])).unwrap_err().to_string();
    assert_eq!(words, "an audio clip cannot be read: it is cut off: of 1152000000 bytes 1000 are there");
    for name in ["chord.wav", "chord.flac"] {
        let whole = fixture(name);
        let words = decoded(&whole[..whole.len() * 2 / 3]).unwrap_err().to_string();
        assert!(words.contains("cannot be read"), "{name}: {words}");
    }
    // A FLAC's claim is refused before anything is decoded. Bits 108 to 143 of the first block are its samples.
    let mut flac = fixture("chord.flac");
    flac[8 + 13] |= 0x0F;
    let words = decoded(&flac).unwrap_err().to_string();
    assert!(words.contains("seconds; the limit is 600 (--max-audio-seconds)"), "{words}");
    // And one that claims less than it has is counted as it is decoded.
    let short = AudioLimits { seconds: 1, ..AudioLimits::default() };
    let words = decode(&wav(8000, 1, 40_000, &[0; 40_000]), &short).unwrap_err().to_string();
    assert!(words.ends_with("the limit is 1 (--max-audio-seconds)"), "{words}");
    let words = decode(&[0; 11], &AudioLimits { file_bytes: 10, ..short }).unwrap_err().to_string();
    assert_eq!(words, "an audio clip has 11 bytes; the limit is 10 (--max-audio-bytes)");
}

#[test]
fn nothing_and_next_to_nothing_are_refused() {
    assert!(decoded(&wav(16_000, 1, 0, &[])).is_err());
    for name in ["chord.wav", "chord.flac", "chord.ogg", "chord.mp3"] {
        for length in [4, 12, 40, 44] {
            let bytes = fixture(name);
            assert!(decoded(&bytes[..length]).unwrap_err().is_the_clients(), "{name} cut to {length}");
        }
    }
}

#[test]
fn nothing_is_decoded_without_a_waiting_request() {
    let outcome = audio::decode(&fixture("chord.wav"), &AudioLimits::default(), &AtomicBool::new(true));
    assert_eq!(outcome, Err(MediaError::Abandoned));
}
