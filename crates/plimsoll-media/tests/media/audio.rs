//! A chord in every format, headers that lie, and tones at other rates and in their bands.

use std::sync::atomic::AtomicBool;

use crate::common::fixture;
use plimsoll_media::MediaError;
use plimsoll_media::audio::{self, AudioClip, AudioLimits, Mel, probe, resample, resampled_len};
use plimsoll_media::geometry::{AudioRule, ProcessorFiles};

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

fn tone(hertz: f64, rate: u32, samples: usize) -> Vec<f32> {
    (0..samples).map(|i| (std::f64::consts::TAU * hertz * i as f64 / f64::from(rate)).sin() as f32).collect()
}

fn resampled(samples: Vec<f32>, rate: u32) -> Vec<f32> {
    resample(samples, rate, 16_000, &AtomicBool::new(false)).unwrap()
}

#[test]
fn nothing_is_made_without_a_waiting_request() {
    let outcome = resample(vec![0.0; 48_000], 48_000, 16_000, &AtomicBool::new(true));
    assert_eq!(outcome, Err(MediaError::Abandoned));
}

#[test]
fn tones_keep_their_pitch_and_what_is_too_high_is_silent() {
    for rate in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 191_999] {
        let samples = rate as usize / 4;
        let found = resampled(tone(1000.0, rate, samples), rate);
        assert_eq!(found.len() as u64, resampled_len(samples as u64, rate, 16_000));
        let expected = tone(1000.0, 16_000, found.len());
        // The filter rings at both ends of the tone. Worst at 8 kHz, with half the rate nearest to the tone: 4e-4
        // after 300 samples.
        let middle = 1000..found.len() - 1000;
        let worst = middle.clone().map(|i| (found[i] - expected[i]).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{rate}: off by {worst}");
        if rate > 20_000 {
            let high = resampled(tone(9_000.0, rate, samples), rate);
            let worst = middle.map(|i| high[i].abs()).fold(0.0, f32::max);
            assert!(worst < 1e-3, "{rate}: 9 kHz comes out as {worst}");
        }
    }
    let same = tone(440.0, 16_000, 777);
    assert_eq!(resampled(same.clone(), 16_000), same);
    assert_eq!(resampled(vec![0.5], 48_000).len(), 1);
}

#[test]
fn a_tone_is_in_its_band() {
    let rule = AudioRule::windows(&ProcessorFiles::default().audio, 50, 800, 60).unwrap();
    let mel = Mel::new(&rule, 128);
    // Slaney's scale: even up to 1 kHz, logarithmic above.
    let step = 6.4_f64.ln() / 27.0;
    let highest = 15.0 + 8.0_f64.ln() / step;
    let hertz_of = |mel: f64| if mel < 15.0 { 200.0 * mel / 3.0 } else { 1000.0 * ((mel - 15.0) * step).exp() };
    for hertz in [300.0, 1000.0, 5000.0] {
        let tone = tone(hertz, 16_000, 3300);
        let mut out = vec![0.0; mel.frames(tone.len()) * mel.bands()];
        mel.spectrogram(&tone, &mut out);
        assert_eq!(out.len(), 20 * 128);
        // The first two frames hear the tone beside its mirror image.
        for frame in out.chunks_exact(128).skip(2) {
            let loudest = frame.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            let centre = hertz_of(highest * (loudest + 1) as f64 / 129.0);
            assert!((centre - hertz).abs() < 60.0, "{centre} for {hertz}");
        }
    }
}
