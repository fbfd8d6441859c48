//! A long clip in windows: the whole clip's spectrogram, without the whole clip in memory.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::common::fixture;
use plimsoll_media::MediaError;
use plimsoll_media::audio::{AudioLimits, LongClip, Mel, decode, probe, resample};
use plimsoll_media::geometry::{AudioRule, ProcessorFiles};

/// Frames of a window: two seconds.
const WINDOW: usize = 200;
const BANDS: usize = 20;

fn mel() -> Arc<Mel> {
    Arc::new(Mel::new(&AudioRule::fixed(&ProcessorFiles::default().audio, WINDOW as u64, 60).unwrap(), BANDS))
}

/// Seconds of a tone that rises and becomes louder, as a WAV file of one channel.
fn rising(rate: u32, samples: u32) -> Vec<u8> {
    let mut file = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0".to_vec();
    file.extend([rate, 2 * rate].map(u32::to_le_bytes).as_flattened());
    file.extend(b"\x02\0\x10\0data");
    file.extend((2 * samples).to_le_bytes());
    let at = |i: u32| {
        let share = f64::from(i) / f64::from(samples);
        let phase = f64::from(i) / f64::from(rate) * (200.0 + 900.0 * share);
        ((std::f64::consts::TAU * phase).sin() * 30_000.0 * share * share) as i16
    };
    (0..samples).for_each(|i| file.extend(at(i).to_le_bytes()));
    file
}

fn open(file: &[u8]) -> Result<LongClip, MediaError> {
    let limits = AudioLimits::default();
    let header = probe(file, &limits)?;
    LongClip::open(file.to_vec(), &header, &limits, &mel(), WINDOW, &AtomicBool::new(false))
}

/// The spectrogram of all of it at once.
fn whole(file: &[u8]) -> Vec<f32> {
    let (mel, stop) = (mel(), AtomicBool::new(false));
    let clip = decode(file, &AudioLimits::default(), &stop).unwrap();
    let samples = resample(clip.samples, clip.rate, 16_000, &stop).unwrap();
    let mut values = vec![0.0; mel.frames(samples.len()) * BANDS];
    mel.spectrogram(&samples, &mut values);
    values
}

#[test]
fn windows_have_the_numbers_of_the_whole_clip() {
    let long = [8_000, 16_000, 44_100, 191_999].map(|rate| rising(rate, 7 * rate + rate / 3));
    for file in long.into_iter().chain(["chord.flac", "chord.mp3", "chord.ogg"].map(fixture)) {
        let (whole, mut clip) = (whole(&file), open(&file).unwrap());
        assert_eq!(clip.frames() as usize * BANDS, whole.len());
        let (mut first, mut worst) = (0, 0.0_f32);
        // By a little, to an odd frame, from an overlap to a gap, and behind the end.
        for step in [0, 3, 40, 200, 250, 111, 129, 60] {
            first += step;
            let mut values = vec![9.0; WINDOW * BANDS];
            clip.window(first, &mut values, &AtomicBool::new(false)).unwrap();
            let own = whole.get(first as usize * BANDS..).unwrap_or_default();
            for (i, value) in values.iter().enumerate() {
                worst = worst.max((value - own.get(i).copied().unwrap_or(0.0)).abs());
            }
        }
        assert!(worst < 1e-6, "off by {worst:e}");
    }
}

#[test]
fn what_cannot_be_cut_into_windows_is_an_error() {
    let words = open(&rising(16_000, 200)).unwrap_err().to_string();
    assert_eq!(words, "an audio clip cannot be read: 200 samples are too few to transform: send a longer clip");
    let file = rising(16_000, 64_000);
    let limits = AudioLimits { seconds: 3, limited_by: "--max-transcription-seconds", ..AudioLimits::default() };
    let words = probe(&file, &limits).unwrap_err().to_string();
    assert_eq!(words, "an audio clip has 4 seconds; the limit is 3 (--max-transcription-seconds)");
    let (stop, header) = (AtomicBool::new(true), probe(&file, &AudioLimits::default()).unwrap());
    let ended = LongClip::open(file.clone(), &header, &AudioLimits::default(), &mel(), WINDOW, &stop);
    assert_eq!(ended.unwrap_err(), MediaError::Abandoned, "the client has left");
    let mut clip = open(&file).unwrap();
    let mut values = vec![0.0; WINDOW * BANDS];
    clip.window(100, &mut values, &AtomicBool::new(false)).unwrap();
    assert!(clip.window(50, &mut values, &AtomicBool::new(false)).is_err(), "it has gone by");
}

/// The reader's room does not depend on how long a clip is.
#[test]
fn longer_clips_take_no_more_memory() {
    let bytes = |seconds: u32| {
        let header = probe(&rising(16_000, seconds * 16_000), &AudioLimits::default()).unwrap();
        LongClip::bytes(&header, &mel(), WINDOW)
    };
    assert_eq!(bytes(3), bytes(60));
}
