//! Sound from strangers: what the header claims is checked first, what comes out is counted all the same.
//!
//! The result is one channel at the file's own rate. Channels are averaged, as the reference's loader does.

use std::borrow::Cow;
use std::io::Cursor;

use symphonia::core::codecs::audio::well_known::CODEC_ID_VORBIS;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
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

/// Bytes that the code books of a Vorbis header may unpack to.
const CODE_BOOKS_MAX: u64 = 24 << 20;
/// Bytes that a decoder keeps for one code word, about.
const CODE_WORD_BYTES: u64 = 32;

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

/// What a file says of itself, within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Samples per second.
    pub rate: u32,
    /// Channels, which decoding averages.
    pub channels: usize,
    /// Samples of one channel, where the file says so. Not to be relied on.
    pub claimed: Option<u64>,
    file_bytes: u64,
}

impl Header {
    /// The most heap bytes that decoding takes at any instant, the result included.
    pub fn decode_bytes(&self, limits: &AudioLimits) -> u64 {
        // The result while it moves to a place of twice its size; the file, perhaps copied; code books, tags and packets.
        limits.seconds * u64::from(self.rate) * 4 * 3 + 2 * self.file_bytes + (40 << 20)
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

/// Reads the header of a sound and refuses it where it is over a limit. Decodes nothing.
pub fn probe(bytes: &[u8], limits: &AudioLimits) -> Result<Header, MediaError> {
    over(bytes.len() as u64, limits.file_bytes, "bytes", "--max-audio-bytes")?;
    contained(WHAT, || {
        let bytes = readable(bytes)?;
        Ok(open(&bytes, limits)?.header)
    })
}

/// Decodes a sound. A decoder that panics is an error like any other.
pub fn decode(bytes: &[u8], limits: &AudioLimits) -> Result<Sound, MediaError> {
    over(bytes.len() as u64, limits.file_bytes, "bytes", "--max-audio-bytes")?;
    contained(WHAT, || {
        let bytes = readable(bytes)?;
        decode_opened(open(&bytes, limits)?, limits)
    })
}

/// A file whose header is acceptable.
struct Opened<'a> {
    format: Box<dyn FormatReader + 'a>,
    track: u32,
    parameters: AudioCodecParameters,
    header: Header,
}

fn open<'a>(bytes: &'a [u8], limits: &AudioLimits) -> Result<Opened<'a>, MediaError> {
    let format = open_container(bytes)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(|| malformed("it has no sound"))?;
    let (id, claimed) = (track.id, track.num_frames);
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio()).cloned();
    let parameters = parameters.ok_or(MediaError::Unsupported { what: WHAT, supported: SUPPORTED })?;
    let rate = parameters.sample_rate.ok_or_else(|| malformed("it names no sample rate"))?;
    let channels = parameters.channels.as_ref().map_or(1, |channels| channels.count());
    check_format(rate, channels)?;
    check_length(claimed.unwrap_or(0), rate, limits)?;
    if parameters.codec == CODEC_ID_VORBIS {
        check_code_books(parameters.extra_data.as_deref().unwrap_or_default())?;
    }
    let header = Header { rate, channels, claimed, file_bytes: bytes.len() as u64 };
    Ok(Opened { format, track: id, parameters, header })
}

fn decode_opened(opened: Opened<'_>, limits: &AudioLimits) -> Result<Sound, MediaError> {
    let Opened { mut format, track, parameters, header: Header { rate, channels, .. } } = opened;
    let decoder = symphonia::default::get_codecs().make_audio_decoder(&parameters, &AudioDecoderOptions::default());
    let mut decoder = decoder.map_err(unreadable)?;
    let mut samples = Vec::new();
    let (mut interleaved, mut bad) = (Vec::new(), 0);
    while let Some(packet) = format.next_packet().map_err(unreadable)? {
        if packet.track_id != track {
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
        check_length(samples.len() as u64, rate, limits)?;
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

/// The bytes as a decoder may have them. Refuses what is none of the formats, so that nothing is searched for one.
fn readable(bytes: &[u8]) -> Result<Cow<'_, [u8]>, MediaError> {
    match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Ok(with_true_length(bytes)),
        [b'f', b'L', b'a', b'C', ..] | [b'O', b'g', b'g', b'S', ..] | [b'I', b'D', b'3', ..] => {
            Ok(Cow::Borrowed(bytes))
        }
        [0xFF, second, ..] if second & 0xE0 == 0xE0 => Ok(Cow::Borrowed(bytes)),
        _ => Err(MediaError::Unsupported { what: WHAT, supported: SUPPORTED }),
    }
}

/// A WAV whose lengths are those it has: one that was written to a pipe claims nothing or the most there is.
fn with_true_length(bytes: &[u8]) -> Cow<'_, [u8]> {
    let all = (bytes.len() - 8) as u32;
    let mut own = Cow::Borrowed(bytes);
    let mut correct = |at: usize, length: u32| {
        if bytes[at..at + 4] != length.to_le_bytes() {
            own.to_mut()[at..at + 4].copy_from_slice(&length.to_le_bytes());
        }
    };
    correct(4, all);
    let mut at = 12_usize;
    while let Some(head) = bytes.get(at..at.saturating_add(8)) {
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let left = bytes.len() - at - 8;
        if length > left {
            correct(at + 4, left as u32);
            break;
        }
        at += 8 + length + length % 2;
    }
    own
}

/// Refuses Vorbis headers whose code books unpack to more than any encoder's do: twenty bytes can stand for sixteen
/// megabytes, and a header can hold 256 of them. Books begin at any bit, so all bits are searched for their mark.
fn check_code_books(headers: &[u8]) -> Result<(), MediaError> {
    let bits = |at: usize, count: usize| {
        let bit = |i: usize| headers.get((at + i) / 8).map_or(0, |byte| u64::from(byte >> ((at + i) % 8) & 1));
        (0..count).map(|i| bit(i) << i).sum::<u64>()
    };
    let mut window = 0_u64;
    let mut total = 0;
    for at in 0..headers.len() * 8 {
        window = (window >> 1) | bits(at, 1) << 23;
        if window == 0x56_4342 {
            let (dimensions, entries) = (bits(at + 1, 16), bits(at + 17, 24));
            // The decoder itself refuses books with more dimensions or entries than these.
            if dimensions <= 32 && entries <= 1 << 17 {
                total += entries * (4 * dimensions + CODE_WORD_BYTES);
            }
        }
    }
    over(total, CODE_BOOKS_MAX, "bytes of code books", "fixed")
}

fn open_container(bytes: &[u8]) -> Result<Box<dyn FormatReader + '_>, MediaError> {
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let mut metadata = MetadataOptions::default();
    metadata.limit_tag_bytes = Limit::Maximum(TAGS_MAX);
    metadata.limit_visual_bytes = Limit::Maximum(TAGS_MAX);
    let probe = symphonia::default::get_probe();
    probe.probe(&Hint::new(), stream, FormatOptions::default(), metadata).map_err(unreadable)
}

fn check_length(samples: u64, rate: u32, limits: &AudioLimits) -> Result<(), MediaError> {
    over(samples.div_ceil(u64::from(rate)), limits.seconds, "seconds", Modality::Audio.flag())
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
