//! A clip decoded forward, packet by packet. Memory holds no more samples than the caller keeps.

use std::sync::atomic::AtomicBool;

use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};

use super::{BAD_PACKETS_MAX, Opened, check_wanted, decode_packet, malformed, samples_of, unreadable};
use crate::MediaError;

/// Most samples of silence that are appended at once.
const SILENCE: u64 = 1 << 16;

/// The decoder of a clip with a counted number of samples. Packets that cannot be decoded become silence; excess samples are left out.
pub(super) struct Forward<'a> {
    opened: Opened<'a>,
    decoder: Box<dyn AudioDecoder>,
    /// Samples still to return.
    left: u64,
    /// Samples of silence before the next packet.
    silent: u64,
    /// Packets in a row that could not be decoded.
    bad: usize,
    begun: bool,
    interleaved: Vec<f32>,
}

impl<'a> Forward<'a> {
    pub fn new(opened: Opened<'a>, count: u64) -> Result<Self, MediaError> {
        let options = AudioDecoderOptions::default();
        let decoder = symphonia::default::get_codecs().make_audio_decoder(&opened.parameters, &options);
        let decoder = decoder.map_err(unreadable)?;
        Ok(Self { opened, decoder, left: count, silent: 0, bad: 0, begun: false, interleaved: Vec::new() })
    }

    /// Appends the samples of the next packet, or a piece of silence. False once all counted samples were returned.
    pub fn more(&mut self, samples: &mut Vec<f32>, stop: &AtomicBool) -> Result<bool, MediaError> {
        check_wanted(stop)?;
        if self.silent == 0 && !self.packet(samples)? {
            if !self.begun {
                return Err(malformed("it holds no samples"));
            }
            self.silent = self.left;
            if self.left == 0 {
                return Ok(false);
            }
        }
        let silent = self.silent.min(SILENCE).min(self.left);
        samples.resize(samples.len() + silent as usize, 0.0);
        self.left -= silent;
        self.silent = if self.left == 0 { 0 } else { self.silent - silent };
        Ok(true)
    }

    /// Appends the samples of the next packet of the track; false if there is none.
    fn packet(&mut self, samples: &mut Vec<f32>) -> Result<bool, MediaError> {
        let Opened { format, track, rate, channels, unit, .. } = &mut self.opened;
        let packet = loop {
            match format.next_packet().map_err(unreadable)? {
                Some(packet) if packet.track_id == *track => break packet,
                Some(_) => {}
                None => return Ok(false),
            }
        };
        // The first packets of an MP3 may depend on packets that were cut away.
        let decoded = decode_packet(&mut *self.decoder, &packet, (*rate, *channels), &mut self.interleaved)?;
        self.bad = if decoded { 0 } else { self.bad + 1 };
        if self.interleaved.is_empty() {
            self.silent = samples_of(packet.dur.get(), *unit, *rate).min(self.left);
            self.begun |= self.silent > 0;
        }
        if self.bad > BAD_PACKETS_MAX {
            return Err(malformed("too much of it cannot be decoded"));
        }
        let frames = self.interleaved.chunks_exact(*channels);
        let mixed = frames.map(|frame| frame.iter().sum::<f32>() / *channels as f32);
        let before = samples.len();
        samples.extend(mixed.take(usize::try_from(self.left).unwrap_or(usize::MAX)));
        self.left -= (samples.len() - before) as u64;
        self.begun |= samples.len() > before;
        self.interleaved.clear();
        Ok(true)
    }
}
