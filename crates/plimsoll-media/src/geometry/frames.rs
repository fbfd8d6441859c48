//! The choice of a video's frames, and their times.

use super::config::{Fields, within};
use super::round_half_even;
use crate::{MediaError, Modality};

/// The scope of the pixel bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Each frame: Qwen2-VL, Qwen2.5-VL.
    Frame,
    /// All frames of a video together: Qwen3-VL and later.
    Video,
}

/// The requested number of frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wanted {
    /// All of them, up to the limit.
    All,
    /// This many.
    Count(u64),
    /// This many per second.
    PerSecond(f64),
}

/// The rule by which frames are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// From the first, in equal steps; the count is a multiple of the frames of a patch.
    Steps,
    /// From the first to the last.
    Ends,
    /// In the middle of equal parts.
    Middles,
    /// At the start of equal parts.
    Starts,
}

/// The frame sampling of a video processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    wanted: Wanted,
    spread: Spread,
    min_frames: u64,
    /// The most frames of one video, which the self-test runs.
    pub max_frames: u64,
    temporal: u64,
}

/// Longest accepted video, in frames: a day at 100 per second. Its positions are exact in `f64`.
const TOTAL_MAX: u64 = 100 * 86_400;

impl Sampling {
    pub(crate) fn patches(fields: &Fields, budget: Budget, temporal: u64) -> Result<Self, MediaError> {
        let max_frames = within("max_frames", fields.max_frames, 768, temporal..=65_536)?;
        let min_frames = within("min_frames", fields.min_frames, 4, 1..=max_frames)?;
        let (spread, default) = match budget {
            Budget::Frame => (Spread::Steps, Wanted::All),
            Budget::Video => (Spread::Ends, Wanted::PerSecond(2.0)),
        };
        Ok(Self { wanted: wanted(fields)?.unwrap_or(default), spread, min_frames, max_frames, temporal })
    }

    /// Returns InternVL's sampling: frames from the middle of equal parts, at most `max_frames`.
    pub fn middles(fields: &Fields, max_frames: u64) -> Result<Self, MediaError> {
        let wanted = wanted(fields)?.unwrap_or(Wanted::All);
        Ok(Self { wanted, spread: Spread::Middles, min_frames: 1, max_frames: max_frames.max(1), temporal: 1 })
    }

    /// Returns Gemma 4's sampling: frames from the start of equal parts, 32 unless configured otherwise.
    pub(crate) fn starts(fields: &Fields) -> Result<Self, MediaError> {
        let max_frames = within("max_frames", fields.max_frames, 768, 1..=65_536)?;
        let wanted = wanted(fields)?.unwrap_or(Wanted::Count(32));
        Ok(Self { wanted, spread: Spread::Starts, min_frames: 1, max_frames, temporal: 1 })
    }

    /// Returns this sampling with a request's own number of frames.
    pub fn with(self, wanted: Wanted) -> Self {
        Self { wanted, ..self }
    }

    /// Returns the positions of the frames to take out of `total` frames shown at `fps` per second.
    pub fn indices(&self, total: u64, fps: f64) -> Result<Vec<u64>, MediaError> {
        let malformed = |why: String| MediaError::Malformed { what: "a video", why };
        if total == 0 || total > TOTAL_MAX || !(fps.is_finite() && fps > 0.0) {
            return Err(malformed(format!("{total} frames at {fps} per second cannot be sampled")));
        }
        let count = self.count(total, fps);
        // Frames beyond the tested number are refused, not dropped: the request named them.
        if count > self.max_frames {
            let (limit, flag) = (self.max_frames, Modality::Video.flag());
            return Err(MediaError::OverLimit { what: "a video", asked: count, limit, unit: "frames", flag });
        }
        let too_few = count == 0 || (count > total && self.spread != Spread::Ends);
        if too_few {
            return Err(malformed(format!("{count} frames are to be taken out of {total}")));
        }
        let step = total as f64 / count as f64;
        Ok(match self.spread {
            Spread::Steps => equal_steps(0.0, total, step),
            Spread::Middles => equal_steps(step / 2.0, total, step),
            Spread::Ends => from_end_to_end(total, count),
            Spread::Starts => (0..count).map(|part| part * total / count).collect(),
        })
    }

    fn count(&self, total: u64, fps: f64) -> u64 {
        let at_rate = |rate: f64| total as f64 / fps * rate;
        match (self.spread, self.wanted) {
            (Spread::Steps | Spread::Middles | Spread::Starts, Wanted::All) => total,
            (Spread::Steps, Wanted::Count(count)) => round_half_even(count, self.temporal) * self.temporal,
            (Spread::Steps, Wanted::PerSecond(rate)) => {
                let most = self.max_frames.min(total) / self.temporal * self.temporal;
                let count = at_rate(rate).max(self.min_frames as f64).min(most as f64).min(total as f64);
                (count / self.temporal as f64).floor() as u64 * self.temporal
            }
            (Spread::Ends | Spread::Middles | Spread::Starts, Wanted::Count(count)) => count,
            (Spread::Ends, Wanted::All) => total.max(self.min_frames).min(self.max_frames),
            (Spread::Ends, Wanted::PerSecond(rate)) => {
                (at_rate(rate) as u64).max(self.min_frames).min(self.max_frames).min(total)
            }
            (Spread::Middles, Wanted::PerSecond(rate)) => at_rate(rate) as u64,
            (Spread::Starts, Wanted::PerSecond(rate)) => (at_rate(rate) as u64).max(1),
        }
    }

    /// Returns the time of each group of frames, in seconds: the mean of its first and its last.
    pub fn timestamps(&self, indices: &[u64], fps: f64) -> Vec<f64> {
        let groups = indices.chunks(self.temporal as usize);
        // A group that is short of frames repeats its last one.
        groups.map(|group| (group[0] as f64 / fps + group[group.len() - 1] as f64 / fps) / 2.0).collect()
    }
}

fn wanted(fields: &Fields) -> Result<Option<Wanted>, MediaError> {
    match (fields.num_frames, fields.fps) {
        (Some(count), _) => Ok(Some(Wanted::Count(within("num_frames", Some(count), 0, 1..=65_536)?))),
        (None, Some(fps)) if fps.is_finite() && fps > 0.0 => Ok(Some(Wanted::PerSecond(fps))),
        (None, Some(fps)) => Err(MediaError::BadConfig { key: "fps", why: format!("{fps} is not a rate") }),
        (None, None) => Ok(None),
    }
}

/// Torch's `arange(start, total, step)` in single precision, cut to whole numbers.
fn equal_steps(start: f64, total: u64, step: f64) -> Vec<u64> {
    let count = ((total as f64 - start) / step).ceil() as u64;
    (0..count).map(|i| (start + i as f64 * step) as f32 as u64).collect()
}

/// NumPy's `linspace(0, total - 1, count)`, rounded half to even.
fn from_end_to_end(total: u64, count: u64) -> Vec<u64> {
    let last = total - 1;
    if count == 1 {
        return vec![0];
    }
    let step = last as f64 / (count - 1) as f64;
    (0..count).map(|i| if i == count - 1 { last } else { (i as f64 * step).round_ties_even() as u64 }).collect()
}
