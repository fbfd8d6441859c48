//! Audio from clients: the header's claims are checked first, and decoded samples are counted all the same.
//!
//! The length of an audio clip decides its number of tokens, before it is decoded. Where a header cannot be relied on, the packets are
//! counted. The result is one channel at the file's own rate, averaged over channels as the reference's loader does.
//! [`resample`](fn@resample) and [`Mel`] turn it into an encoder's input.

mod file;
mod forward;
mod long;
mod mel;
mod resample;

pub use long::LongClip;
pub use mel::Mel;
pub use resample::{resample, resampled_len};

use std::sync::atomic::{AtomicBool, Ordering};

use symphonia::core::codecs::audio::well_known::{CODEC_ID_FLAC, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder};
use symphonia::core::common::Limit;
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::units::TimeBase;

use crate::error::contained;
use crate::{MediaError, Modality};
use file::File;
use forward::Forward;

/// Accepted sample rates, in samples per second.
const RATES: std::ops::RangeInclusive<u32> = 8_000..=192_000;
/// The most channels.
const CHANNELS_MAX: usize = 8;
/// Most bytes of tags and images inside a file.
const TAGS_MAX: usize = 1 << 20;
/// Most packets in a row that cannot be decoded. After them decoding fails.
const BAD_PACKETS_MAX: usize = 64;

/// Most bytes of the unpacked code books of a Vorbis header.
const CODE_BOOKS_MAX: u64 = 24 << 20;
/// Bytes of a decoder: code books, tags and packets. A resampler that runs after it takes fewer.
const DECODER_BYTES: u64 = 40 << 20;
/// Approximate bytes that a decoder takes for one code word.
const CODE_WORD_BYTES: u64 = 32;

const WHAT: &str = "an audio clip";
const SUPPORTED: &str = "WAV, FLAC, MP3 and Ogg Vorbis";

/// Limits of an audio clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioLimits {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Seconds.
    pub seconds: u64,
    /// The source of that limit: a flag, or the model.
    pub limited_by: &'static str,
}

impl Default for AudioLimits {
    /// 50 MiB, ten minutes.
    fn default() -> Self {
        Self { file_bytes: 50 << 20, seconds: 600, limited_by: Modality::Audio.flag() }
    }
}

/// The properties that a file declares, within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Samples per second.
    pub rate: u32,
    /// Channels; decoding averages them.
    pub channels: usize,
    /// Samples of one channel, counted packet by packet. Decoding returns as many.
    pub samples: u64,
}

impl Header {
    /// Returns the most heap bytes that decoding takes at any instant, the result included.
    pub fn decode_bytes(&self) -> u64 {
        // The result, and the decoder. The caller holds the file itself.
        self.samples * size_of::<f32>() as u64 + DECODER_BYTES
    }
}

/// One channel of audio.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioClip {
    /// Samples per second.
    pub rate: u32,
    /// The samples, between -1 and 1.
    pub samples: Vec<f32>,
}

/// Reads the header of an audio clip and counts its packets. Refuses a clip over a limit. Decodes nothing.
pub fn probe(bytes: &[u8], limits: &AudioLimits) -> Result<Header, MediaError> {
    over(bytes.len() as u64, limits.file_bytes, "bytes", "--max-audio-bytes")?;
    contained(WHAT, || count(open(File::new(bytes)?, limits)?, limits))
}

/// Decodes an audio clip, unless `stop` is set meanwhile. A decoder that panics is an error like any other.
pub fn decode(bytes: &[u8], limits: &AudioLimits, stop: &AtomicBool) -> Result<AudioClip, MediaError> {
    let header = probe(bytes, limits)?;
    contained(WHAT, || decode_opened(open(File::new(bytes)?, limits)?, header.samples, stop))
}

/// A file with an acceptable header.
struct Opened<'a> {
    format: Box<dyn FormatReader + 'a>,
    track: u32,
    parameters: AudioCodecParameters,
    rate: u32,
    channels: usize,
    /// Samples that the file declares, if that number is exact.
    exact: Option<u64>,
    /// Seconds of a unit of time.
    unit: TimeBase,
}

fn open<'a>(file: File<impl AsRef<[u8]> + Send + Sync + 'a>, limits: &AudioLimits) -> Result<Opened<'a>, MediaError> {
    let format = open_container(file)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(|| malformed("it has no audio track"))?;
    let (id, claimed, unit) = (track.id, track.num_frames, track.time_base);
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio()).cloned();
    let parameters = parameters.ok_or(MediaError::Unsupported { what: WHAT, supported: SUPPORTED })?;
    let rate = parameters.sample_rate.ok_or_else(|| malformed("it names no sample rate"))?;
    let channels = parameters.channels.as_ref().map_or(1, |channels| channels.count());
    check_format(rate, channels)?;
    check_length(claimed.unwrap_or(0), rate, limits)?;
    if parameters.codec == CODEC_ID_VORBIS {
        check_code_books(parameters.extra_data.as_deref().unwrap_or_default())?;
    }
    let unit = unit.or_else(|| TimeBase::try_from_recip(rate)).ok_or_else(|| malformed("it names no unit of time"))?;
    let exact = claimed.filter(|claimed| parameters.codec == CODEC_ID_FLAC && *claimed > 0);
    Ok(Opened { format, track: id, parameters, rate, channels, exact, unit })
}

/// Counts the samples of an audio clip by its packets.
fn count(opened: Opened<'_>, limits: &AudioLimits) -> Result<Header, MediaError> {
    let Opened { mut format, track, rate, channels, exact, unit, .. } = opened;
    let (mut units, mut samples) = (0_u64, 0);
    while let Some(packet) = format.next_packet().map_err(unreadable)? {
        if packet.track_id == track {
            units = units.saturating_add(packet.dur.get());
            samples = samples_of(units, unit, rate);
            check_length(samples, rate, limits)?;
        }
    }
    if samples == 0 {
        return Err(malformed("it holds no samples"));
    }
    if let Some(claimed) = exact.filter(|claimed| *claimed > samples) {
        return Err(malformed(format!("it is cut off: of {claimed} samples {samples} are there")));
    }
    Ok(Header { rate, channels, samples })
}

/// Returns the samples in `units` units of time.
fn samples_of(units: u64, unit: TimeBase, rate: u32) -> u64 {
    let parts = u128::from(units) * u128::from(unit.numer.get()) * u128::from(rate);
    u64::try_from(parts / u128::from(unit.denom.get())).unwrap_or(u64::MAX)
}

/// Decodes `count` samples.
fn decode_opened(opened: Opened<'_>, count: u64, stop: &AtomicBool) -> Result<AudioClip, MediaError> {
    let rate = opened.rate;
    let mut forward = Forward::new(opened, count)?;
    let mut samples = Vec::with_capacity(count as usize);
    while forward.more(&mut samples, stop)? {}
    Ok(AudioClip { rate, samples })
}

/// Fails once the request has ended.
fn check_wanted(stop: &AtomicBool) -> Result<(), MediaError> {
    if stop.load(Ordering::Relaxed) { Err(MediaError::Abandoned) } else { Ok(()) }
}

/// Appends a packet's samples, each between -1 and 1; false if it cannot be decoded. A change of rate or channels is an error,
/// and so is a non-finite sample.
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
    if let Some(sample) = interleaved.iter().find(|sample| !sample.is_finite()) {
        return Err(malformed(format!("one of its samples is {sample}")));
    }
    interleaved.iter_mut().for_each(|sample| *sample = sample.clamp(-1.0, 1.0));
    Ok(true)
}

/// Refuses Vorbis headers with code books that unpack to more than any encoder's do. Twenty bytes can stand for sixteen
/// megabytes, and a header can hold 256 code books. Books begin at any bit, so all bits are searched for their mark.
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

fn open_container<'a>(
    file: File<impl AsRef<[u8]> + Send + Sync + 'a>,
) -> Result<Box<dyn FormatReader + 'a>, MediaError> {
    let stream = MediaSourceStream::new(Box::new(file), Default::default());
    let mut metadata = MetadataOptions::default();
    metadata.limit_tag_bytes = Limit::Maximum(TAGS_MAX);
    metadata.limit_visual_bytes = Limit::Maximum(TAGS_MAX);
    let probe = symphonia::default::get_probe();
    probe.probe(&Hint::new(), stream, FormatOptions::default(), metadata).map_err(unreadable)
}

fn check_length(samples: u64, rate: u32, limits: &AudioLimits) -> Result<(), MediaError> {
    over(samples.div_ceil(u64::from(rate)), limits.seconds, "seconds", limits.limited_by)
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
