//! A video with its audio track: the order of the track's tokens among those of the frames, as transformers' processors write them.

use crate::EncoderKind;

/// A family's order of the two kinds of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interleave {
    /// Time steps per second of video. A token of audio takes one step.
    pub steps_per_second: f64,
    /// Steps of a chunk: the frames of a chunk come before its audio (Qwen2.5-Omni). Without chunks, each group of frames comes before the
    /// audio from the group's time on (Qwen3-Omni).
    pub chunk: Option<u64>,
}

/// The encoder and the number of consecutive tokens of it.
pub type Stretch = (EncoderKind, usize);

impl Interleave {
    /// Returns the stretches of a video of `groups` groups of `tokens` tokens, `seconds` apart, and a track of `audio` tokens. Neighbouring
    /// stretches have different encoders.
    #[must_use]
    pub fn stretches(&self, (groups, tokens): (usize, usize), seconds: f64, audio: usize) -> Vec<Stretch> {
        // The references also compute in double precision and in this order.
        let time = |token: usize| (token / tokens.max(1)) as f64 * seconds * self.steps_per_second;
        let mut all: Vec<Stretch> = Vec::new();
        let mut add = |kind, more: usize| match all.last_mut() {
            Some((last, length)) if *last == kind => *length += more,
            _ if more > 0 => all.push((kind, more)),
            _ => {}
        };
        match self.chunk {
            Some(chunk) => {
                let (mut frames, mut sounds) =
                    (Chunks::new(groups * tokens, chunk, time), Chunks::new(audio, chunk, |token| token as f64));
                loop {
                    let (seen, heard) = (frames.next(), sounds.next());
                    if seen.is_none() && heard.is_none() {
                        break;
                    }
                    add(EncoderKind::Vision, seen.unwrap_or(0));
                    add(EncoderKind::Audio, heard.unwrap_or(0));
                }
            }
            None => {
                let mut heard = 0;
                for group in 0..groups {
                    let until = (time(group * tokens).ceil() as usize).min(audio);
                    add(EncoderKind::Audio, until.saturating_sub(heard));
                    heard = heard.max(until);
                    add(EncoderKind::Vision, tokens);
                }
                add(EncoderKind::Audio, audio - heard);
            }
        }
        all
    }

    /// The most stretches that [`Self::stretches`] returns.
    #[must_use]
    pub fn most(tokens: usize, audio: usize) -> usize {
        2 * tokens.min(audio) + 1
    }
}

/// The lengths of chunks. A token several chunks ahead ends only one chunk, as in the references.
struct Chunks<T> {
    next: usize,
    tokens: usize,
    steps: u64,
    ended: u64,
    time: T,
}

impl<T: Fn(usize) -> f64> Chunks<T> {
    fn new(tokens: usize, steps: u64, time: T) -> Self {
        Self { next: 0, tokens, steps, ended: 0, time }
    }
}

impl<T: Fn(usize) -> f64> Iterator for Chunks<T> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.next == self.tokens {
            return None;
        }
        let (first, end) = (self.next, (self.ended + 1).saturating_mul(self.steps) as f64);
        self.next = (first + 1..self.tokens).find(|token| (self.time)(*token) >= end).unwrap_or(self.tokens);
        self.ended += 1;
        Some(self.next - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEN: fn(usize) -> Stretch = |tokens| (EncoderKind::Vision, tokens);
    const HEARD: fn(usize) -> Stretch = |tokens| (EncoderKind::Audio, tokens);

    #[test]
    fn chunk_of_frames_stands_before_its_audio() {
        let chunks = Interleave { steps_per_second: 25.0, chunk: Some(50) };
        // A group per second: two in each chunk of two seconds.
        assert_eq!(chunks.stretches((5, 4), 1.0, 110), [SEEN(8), HEARD(50), SEEN(8), HEARD(50), SEEN(4), HEARD(10)]);
        assert_eq!(chunks.stretches((2, 4), 1.0, 110), [SEEN(8), HEARD(110)]);
        assert_eq!(chunks.stretches((4, 4), 1.0, 7), [SEEN(8), HEARD(7), SEEN(8)]);
        // Groups further apart than a chunk: the tokens of a group are in several chunks.
        let sparse = chunks.stretches((3, 4), 6.0, 110);
        assert_eq!(sparse, [SEEN(4), HEARD(50), SEEN(1), HEARD(50), SEEN(1), HEARD(10), SEEN(6)]);
        assert!(sparse.len() <= Interleave::most(12, 110));
    }

    #[test]
    fn frames_without_chunks_stand_at_their_times() {
        let exact = Interleave { steps_per_second: 13.0, chunk: None };
        // Groups at the steps 0, 6.5, 13: a group comes before the audio from its time on.
        assert_eq!(exact.stretches((3, 2), 0.5, 20), [SEEN(2), HEARD(7), SEEN(2), HEARD(6), SEEN(2), HEARD(7)]);
        assert_eq!(exact.stretches((3, 2), 0.5, 8), [SEEN(2), HEARD(7), SEEN(2), HEARD(1), SEEN(2)]);
        assert_eq!(exact.stretches((2, 2), 9.0, 3), [SEEN(2), HEARD(3), SEEN(2)]);
    }
}
