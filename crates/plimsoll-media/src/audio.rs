//! Sound from strangers: what the header claims is checked first, what comes out is counted all the same.
//!
//! The result is one channel at the file's own rate. Channels are averaged, as the reference's loader does.

use std::borrow::Cow;
use std::io::Cursor;

use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::common::Limit;
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

use crate::error::contained;
use crate::{MediaError, Modality};

/// Samples per second that are taken.
const RATES: std::ops::RangeInclusive<u32> = 8_000..=192_000;
/// The most channels.
const CHANNELS_MAX: usize = 8;
/// Bytes that tags and pictures inside a file may take.
const TAGS_MAX: usize = 1 << 20;
/// A file with this many packets in a row that cannot be decoded is given up.
const BAD_PACKETS_MAX: usize = 64;

const WHAT: &str = "a sound";
const SUPPORTED: &str = "WAV, FLAC, MP3 and Ogg Vorbis";

/// What a sound may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioLimits {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Seconds.
    pub seconds: u64,
}

impl Default for AudioLimits {
    /// 50 MiB, ten minutes.
    fn default() -> Self {
        Self { file_bytes: 50 << 20, seconds: 600 }
    }
}

impl AudioLimits {
    /// The most heap bytes that decoding a sound within these limits takes, the result included, for a file of `file_bytes`.
    pub fn decode_bytes(&self, file_bytes: u64) -> u64 {
        // The result, which may have just grown to twice its size; tags, code books and a packet of every channel.
        self.seconds * u64::from(*RATES.end()) * 4 * 3 / 2 + 2 * file_bytes + (16 << 20)
    }
}

/// One channel of sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Sound {
    /// Samples per second.
    pub rate: u32,
    /// The samples, between -1 and 1.
    pub samples: Vec<f32>,
}

/// Decodes a sound. A decoder that panics is an error like any other.
pub fn decode(bytes: &[u8], limits: &AudioLimits) -> Result<Sound, MediaError> {
    over(bytes.len() as u64, limits.file_bytes, "bytes", "--max-audio-bytes")?;
    contained(WHAT, || decode_here(bytes, limits))
}

fn decode_here(bytes: &[u8], limits: &AudioLimits) -> Result<Sound, MediaError> {
    let wav = sniff(bytes)?;
    let bytes = if wav { with_true_length(bytes) } else { Cow::Borrowed(bytes) };
    let mut format = open(&bytes)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(|| malformed("it has no sound"))?;
    let (id, claimed) = (track.id, track.num_frames.unwrap_or(0));
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or(MediaError::Unsupported { what: WHAT, supported: SUPPORTED })?;
    let rate = parameters.sample_rate.ok_or_else(|| malformed("it names no sample rate"))?;
    let channels = parameters.channels.as_ref().map_or(1, |channels| channels.count());
    check_format(rate, channels)?;
    let most = limits.seconds * u64::from(rate);
    let too_long = |frames: u64| {
        let seconds = frames.div_ceil(u64::from(rate));
        over(seconds, limits.seconds, "seconds", Modality::Audio.flag())
    };
    too_long(claimed)?;
    let decoder = symphonia::default::get_codecs().make_audio_decoder(parameters, &AudioDecoderOptions::default());
    let mut decoder = decoder.map_err(unreadable)?;
    let mut samples = Vec::new();
    let (mut interleaved, mut bad) = (Vec::new(), 0);
    while let Some(packet) = format.next_packet().map_err(unreadable)? {
        if packet.track_id != id {
            continue;
        }
        // The first packets of an MP3 may lean on ones that are not there.
        bad = if decode_packet(&mut *decoder, &packet, (rate, channels), &mut interleaved)? { 0 } else { bad + 1 };
        if bad > BAD_PACKETS_MAX {
            return Err(malformed("too much of it cannot be decoded"));
        }
        let mixed = interleaved.chunks_exact(channels).map(|frame| frame.iter().sum::<f32>() / channels as f32);
        samples.extend(mixed);
        interleaved.clear();
        if samples.len() as u64 > most {
            too_long(samples.len() as u64)?;
        }
    }
    if samples.is_empty() {
        return Err(malformed("it holds no samples"));
    }
    Ok(Sound { rate, samples })
}

/// Appends a packet's samples; false where it cannot be decoded. A change of rate or channels is an error.
fn decode_packet(
    decoder: &mut dyn AudioDecoder,
    packet: &symphonia::core::packet::Packet,
    expected: (u32, usize),
    interleaved: &mut Vec<f32>,
) -> Result<bool, MediaError> {
    let Ok(decoded) = decoder.decode(packet) else { return Ok(false) };
    let spec = decoded.spec();
    if (spec.rate(), spec.channels().count()) != expected {
        let (rate, channels) = expected;
        let why = format!("it changes from {rate} Hz × {channels} to {} Hz × {}", spec.rate(), spec.channels().count());
        return Err(malformed(why));
    }
    decoded.copy_to_vec_interleaved(interleaved);
    Ok(true)
}

/// Whether it is a WAV. Refuses what is none of the formats that are decoded, so that nothing is searched for one.
fn sniff(bytes: &[u8]) -> Result<bool, MediaError> {
    match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Ok(true),
        [b'f', b'L', b'a', b'C', ..] | [b'O', b'g', b'g', b'S', ..] | [b'I', b'D', b'3', ..] => Ok(false),
        [0xFF, second, ..] if second & 0xE0 == 0xE0 => Ok(false),
        _ => Err(MediaError::Unsupported { what: WHAT, supported: SUPPORTED }),
    }
}

/// A WAV whose data end where the file ends: one that was written to a pipe claims the most there is.
fn with_true_length(bytes: &[u8]) -> Cow<'_, [u8]> {
    let mut at = 12_usize;
    while let Some(head) = bytes.get(at..at.saturating_add(8)) {
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let left = bytes.len() - at - 8;
        if length > left {
            let mut own = bytes.to_vec();
            own[at + 4..at + 8].copy_from_slice(&(left as u32).to_le_bytes());
            let all = (bytes.len() - 8) as u32;
            own[4..8].copy_from_slice(&all.to_le_bytes());
            return Cow::Owned(own);
        }
        at += 8 + length + length % 2;
    }
    Cow::Borrowed(bytes)
}

fn open(bytes: &[u8]) -> Result<Box<dyn FormatReader + '_>, MediaError> {
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let mut metadata = MetadataOptions::default();
    metadata.limit_tag_bytes = Limit::Maximum(TAGS_MAX);
    metadata.limit_visual_bytes = Limit::Maximum(TAGS_MAX);
    let probe = symphonia::default::get_probe();
    probe.probe(&Hint::new(), stream, FormatOptions::default(), metadata).map_err(unreadable)
}

fn check_format(rate: u32, channels: usize) -> Result<(), MediaError> {
    if rate < *RATES.start() {
        return Err(malformed(format!("{rate} Hz is less than {} Hz", RATES.start())));
    }
    over(u64::from(rate), u64::from(*RATES.end()), "Hz", "fixed")?;
    over(channels as u64, CHANNELS_MAX as u64, "channels", "fixed")?;
    if channels == 0 {
        return Err(malformed("it has no channels"));
    }
    Ok(())
}

fn over(asked: u64, limit: u64, unit: &'static str, flag: &'static str) -> Result<(), MediaError> {
    if asked > limit {
        return Err(MediaError::OverLimit { what: WHAT, asked, limit, unit, flag });
    }
    Ok(())
}

fn malformed(why: impl Into<String>) -> MediaError {
    MediaError::Malformed { what: WHAT, why: why.into() }
}

fn unreadable(error: Error) -> MediaError {
    match error {
        Error::Unsupported(_) => MediaError::Unsupported { what: WHAT, supported: SUPPORTED },
        other => malformed(other.to_string()),
    }
}
