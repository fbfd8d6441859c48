//! A clip of any length as windows of one spectrogram. It is decoded forward, with no more samples in memory than a window needs.
//!
//! The values are those of the whole clip's spectrogram, as Whisper's feature extractor computes it without truncation. Its loudest
//! value changes all others, so the clip is decoded twice: once for that value, and once for the windows.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::file::File;
use super::forward::Forward;
use super::resample::{Resampling, resampled_len, resampler_bytes};
use super::{AudioLimits, DECODER_BYTES, Header, Mel, WHAT, malformed, open};
use crate::MediaError;
use crate::error::contained;

/// Most samples at the encoder's rate from one packet. A block of FLAC has 65,535, and at the lowest rate they double.
const PACKET_SAMPLES: usize = 1 << 18;
/// Frames that are transformed at once in search of the loudest value.
const CHUNK: usize = 256;

/// A clip that is read window by window.
pub struct LongClip {
    parts: Parts<'static>,
    loudest: f32,
}

impl fmt::Debug for LongClip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LongClip").field("samples", &self.parts.total).finish_non_exhaustive()
    }
}

impl LongClip {
    /// Returns the most heap bytes of a clip with windows of `frames` frames, without the file and the windows.
    pub fn bytes(header: &Header, mel: &Mel, frames: usize) -> u64 {
        let held = Parts::held(mel, frames.max(CHUNK)) + PACKET_SAMPLES + CHUNK * mel.bands();
        DECODER_BYTES + resampler_bytes(header.rate, mel.rate()) + (held * size_of::<f32>()) as u64
    }

    /// Decodes a clip in search of the loudest value; `limits` are those under which its header was read. Stops if `stop` is set.
    pub fn open(
        file: Vec<u8>,
        header: &Header,
        limits: &AudioLimits,
        mel: &Arc<Mel>,
        frames: usize,
        stop: &AtomicBool,
    ) -> Result<Self, MediaError> {
        contained(WHAT, || {
            let mut whole = Parts::open(File::new(&file[..])?, header, limits, mel, CHUNK)?;
            let (count, mut loudest) = (whole.frames(), f32::NEG_INFINITY);
            let mut values = vec![0.0; CHUNK * mel.bands()];
            for first in (0..count).step_by(CHUNK) {
                let frames = CHUNK.min((count - first) as usize);
                loudest = loudest.max(whole.logarithms(first, &mut values[..frames * mel.bands()], stop)?);
            }
            drop(whole);
            Ok(Self { parts: Parts::open(File::new(file)?, header, limits, mel, frames)?, loudest })
        })
    }

    /// Returns the frames of the whole clip.
    pub fn frames(&self) -> u64 {
        self.parts.frames()
    }

    /// Fills `out` with the frames from `first` on, and with 0 behind the last one. No window may begin before an earlier one.
    pub fn window(&mut self, first: u64, out: &mut [f32], stop: &AtomicBool) -> Result<(), MediaError> {
        let (bands, left) = (self.parts.mel.bands(), self.frames().saturating_sub(first));
        let (own, rest) = out.split_at_mut(out.len().min(left as usize * bands));
        rest.fill(0.0);
        let loudest = self.loudest;
        contained(WHAT, || {
            self.parts.logarithms(first, own, stop)?;
            Mel::cut(loudest, own);
            Ok(())
        })
    }
}

/// The decoded part of a clip at the encoder's rate: the samples that the next frames need.
struct Parts<'a> {
    mel: Arc<Mel>,
    forward: Forward<'a>,
    resampling: Option<Resampling>,
    /// Decoded samples before they are resampled.
    decoded: Vec<f32>,
    ended: bool,
    /// Samples of the whole clip.
    total: u64,
    held: Vec<f32>,
    /// Index of the first sample in `held`.
    first: u64,
}

impl<'a> Parts<'a> {
    fn open(
        file: File<impl AsRef<[u8]> + Send + Sync + 'a>,
        header: &Header,
        limits: &AudioLimits,
        mel: &Arc<Mel>,
        frames: usize,
    ) -> Result<Self, MediaError> {
        let opened = open(file, limits)?;
        let (rate, to) = (opened.rate, mel.rate());
        let total = resampled_len(header.samples, rate, to);
        if total <= mel.reach() as u64 {
            return Err(malformed(format!("{total} samples are too few to transform: send a longer clip")));
        }
        Ok(Self {
            mel: Arc::clone(mel),
            forward: Forward::new(opened, header.samples)?,
            resampling: (rate != to).then(|| Resampling::new(rate, to)).transpose()?,
            decoded: Vec::new(),
            ended: false,
            total,
            held: Vec::with_capacity(Self::held(mel, frames)),
            first: 0,
        })
    }

    /// Returns the samples in memory for `frames` frames, with those of the last packet.
    fn held(mel: &Mel, frames: usize) -> usize {
        frames * mel.hop() + 2 * mel.reach() + PACKET_SAMPLES
    }

    fn frames(&self) -> u64 {
        self.total / self.mel.hop() as u64
    }

    /// Fills `out` with the logarithms of the frames from `first` on, and returns the largest.
    fn logarithms(&mut self, first: u64, out: &mut [f32], stop: &AtomicBool) -> Result<f32, MediaError> {
        let (hop, reach) = (self.mel.hop() as u64, self.mel.reach() as u64);
        let count = (out.len() / self.mel.bands()) as u64;
        if count == 0 {
            return Ok(f32::NEG_INFINITY);
        }
        let from = (first * hop).saturating_sub(reach);
        if from < self.first {
            return Err(malformed("its windows overlap more than they may"));
        }
        // The mirror image at the beginning needs as many samples as a transform reaches.
        let until = ((first + count - 1) * hop + reach).max(2 * reach + 1).min(self.total);
        self.forget(from);
        while self.first + (self.held.len() as u64) < until {
            if !self.more(stop)? {
                return Err(malformed("it ends before its last packet"));
            }
            self.forget(from);
        }
        let (held, start) = (&self.held, self.first);
        Ok(self.mel.part(self.total, first, |at| held[(at - start) as usize], out))
    }

    /// Drops samples before `from`.
    fn forget(&mut self, from: u64) {
        let count = from.saturating_sub(self.first).min(self.held.len() as u64);
        self.held.drain(..count as usize);
        self.first += count;
    }

    /// Decodes the next samples; false at the end.
    fn more(&mut self, stop: &AtomicBool) -> Result<bool, MediaError> {
        let Some(resampling) = &mut self.resampling else { return self.forward.more(&mut self.held, stop) };
        if self.ended {
            return Ok(false);
        }
        self.decoded.clear();
        if self.forward.more(&mut self.decoded, stop)? {
            resampling.push(&self.decoded, &mut self.held)?;
        } else {
            self.ended = true;
            resampling.finish(&mut self.held)?;
        }
        Ok(true)
    }
}
