//! A clip transcribed window by window, with times: each window is a turn of one request.
//!
//! Reference: transformers, `generation_whisper.py` with `return_timestamps=True`. In contrast to it, the prompt has no text of earlier
//! windows, and no other temperatures are tried. The language is that of the first window. A window begins where the segments of the last
//! one end.

use std::pin::Pin;
use std::sync::Arc;

use plimsoll_engine::{Delta, MediaItem};

use super::request::Format;
use super::respond::{AudioLength, Usage, seconds};
use super::segments::{STEP_FRAMES, cuts, ended};
use super::whisper::{WindowPrompts, language_of};
use crate::conversation::active::{ActiveRequest, Event};
use crate::conversation::params::Common;
use crate::conversation::submission::{Submission, TokenizedPrompt};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::media::ClipWindows;
use crate::state::model::ModelState;

/// A window moves by at least this fraction of its length (1/30), or as a whole.
const LEAST_PART: u64 = 30;

/// Bytes of a kept segment besides its text and tokens, in memory and as JSON that grew by doubling.
const SEGMENT_BYTES: u64 = 1024;
/// Bytes of a kept token, and of a kept byte of text: both in memory and as JSON.
const TOKEN_BYTES: u64 = 32;
const TEXT_BYTES: u64 = 8;

/// The name of the route in the log.
const API: &str = "transcriptions";

/// The preparation of a window's spectrogram.
type Job = Pin<Box<dyn Future<Output = (ClipWindows, ApiResult<MediaItem>)> + Send>>;

/// A piece of the transcript with its times.
#[derive(Debug)]
pub(super) struct Segment {
    /// The frame of the clip at which its window begins.
    pub seek: u64,
    /// The frames of the clip at which the segment begins and ends.
    pub frames: [u64; 2],
    pub text: String,
    /// Its tokens, times included.
    pub tokens: Vec<u32>,
    /// The mean log-probability of the window's tokens, if the client requested it.
    pub avg_logprob: Option<f64>,
    /// The probability that its window is silent.
    pub no_speech_prob: Option<f64>,
    /// The text's length divided by its compressed length, for the whole window.
    pub compression_ratio: Option<f64>,
}

/// The tokens of the current window.
#[derive(Default)]
struct Said {
    /// The number of tokens still to come in the answer that name language and task.
    heading: usize,
    tokens: Vec<u32>,
    /// The sum of log-probabilities, and the number of tokens in it.
    logprobs: (f64, u32),
    /// The probability of silence.
    no_speech_prob: Option<f64>,
    /// The number of tokens with returned text.
    shown: usize,
}

/// A clip that is being transcribed.
pub(super) struct Windows {
    prompts: WindowPrompts,
    /// None while a window is being made, and after the last.
    clip: Option<ClipWindows>,
    job: Option<Job>,
    /// Rows and frames of a window, and frames of the clip.
    rows: usize,
    window: u64,
    frames: u64,
    /// The frame at which the current window begins.
    seek: u64,
    common: Common,
    length_param: &'static str,
    /// The format of the answer, which decides whether segments are kept.
    format: Format,
    said: Said,
    pub language: Option<&'static str>,
    detected: Option<u32>,
    pub text: String,
    pub segments: Vec<Segment>,
    /// Memory of the segments, in bytes.
    kept_bytes: u64,
    /// The number of windows submitted to the engine.
    begun: u64,
    /// Tokens of the windows' answers that the client's `max_tokens` does not count.
    uncounted: u64,
}

impl Windows {
    /// Begins with the first window of the submission's clip. `format` decides whether segments are kept.
    pub async fn begin(
        state: &Arc<ModelState>,
        mut submission: Submission,
        prompts: WindowPrompts,
        language: Option<&'static str>,
        format: Format,
    ) -> ApiResult<(Self, ActiveRequest)> {
        let none = || ApiError::internal("internal error: there is no audio clip");
        let medium = submission.measured.pop().ok_or_else(none)?;
        let (rows, window) = (medium.shape.tokens as usize, medium.grid.patches() as u64);
        let mut clip = ClipWindows::open(state, medium, submission.held_files.take()).await?;
        let item = clip.window(0).await?;
        let mut windows = Self {
            prompts,
            frames: clip.frames,
            clip: Some(clip),
            job: None,
            rows,
            window,
            seek: 0,
            common: submission.common.clone(),
            length_param: submission.length_param,
            format,
            said: Said::default(),
            language,
            detected: None,
            text: String::new(),
            segments: Vec::new(),
            kept_bytes: 0,
            begun: 0,
            uncounted: 0,
        };
        let first = windows.submission(state, item, submission.held_prompt.take())?;
        let request = first.start(state, state.server.ids.request("transcription"), API).await?;
        Ok((windows, request))
    }

    /// Returns the submission for one window.
    fn submission(&mut self, state: &ModelState, item: MediaItem, held_prompt: Option<Held>) -> ApiResult<Submission> {
        let prompt = self.prompts.of(self.rows, self.detected, self.format == Format::Verbose);
        self.said = Said { heading: prompt.heading, ..Said::default() };
        self.begun += 1;
        self.uncounted += u64::from(prompt.uncounted);
        let mut common = self.common.clone();
        common.max_tokens = common.max_tokens.map(|most| most.saturating_add(prompt.uncounted));
        let ids = TokenizedPrompt { ids: prompt.tokens, echo: None, around: (0, 0) };
        Ok(Submission {
            grammar: Some(prompt.grammar),
            media: vec![item],
            logprobs: (self.format == Format::Verbose).then_some(0),
            prompt_param: "file",
            length_param: self.length_param,
            repeats_output: true,
            held_prompt,
            ..Submission::of_prompts(common, vec![ids], state)?
        })
    }

    /// Takes the next step, and returns text that can be shown; none at the end of the clip. Cancel-safe.
    pub async fn step(&mut self, request: &mut ActiveRequest) -> Result<Option<String>, ApiError> {
        if let Some(job) = &mut self.job {
            let (clip, item) = tokio::select! {
                biased;
                error = request.interrupted() => return Err(error),
                made = job => made,
            };
            self.job = None;
            self.clip = Some(clip);
            let resumed = item.and_then(|item| {
                request.hold_exactly(self.kept_bytes + TEXT_BYTES * self.text.len() as u64)?;
                let state = Arc::clone(&request.state);
                let next = self.submission(&state, item, request.submission.held_prompt.take())?;
                request.resume(next, API)
            });
            return match resumed {
                Ok(()) => Ok(Some(String::new())),
                Err(error) => {
                    request.record_failure(error.clone());
                    Err(error)
                }
            };
        }
        if self.clip.is_none() {
            return Ok(None);
        }
        match request.next().await {
            Event::Delta(_, delta) => Ok(Some(self.take(&request.state, delta))),
            Event::Done => {
                let text = self.end_window(&request.state);
                if self.seek >= self.frames {
                    self.clip = None;
                    return Ok(Some(text));
                }
                request.turn_ended();
                let (clip, seek) = (self.clip.take(), self.seek);
                self.job = clip.map(|mut clip| -> Job {
                    Box::pin(async move {
                        let item = clip.window(seek).await;
                        (clip, item)
                    })
                });
                Ok(Some(text))
            }
            Event::Failed(error) => Err(error),
        }
    }

    /// Takes a piece of a window's answer. Returns the text of segments that have ended with it.
    fn take(&mut self, state: &ModelState, delta: Delta) -> String {
        for token in delta.tokens {
            let silence = token.logprobs.as_ref().and_then(|report| report.top.first());
            self.said.no_speech_prob =
                self.said.no_speech_prob.or(silence.map(|(_, logprob)| f64::from(*logprob).exp()));
            if self.said.heading > 0 {
                self.said.heading -= 1;
                if self.detected.is_none() {
                    self.detected = Some(token.id);
                    self.language = language_of(state, token.id);
                }
                continue;
            }
            if let Some(own) = token.logprobs.and_then(|report| report.own) {
                self.said.logprobs.0 += f64::from(own);
                self.said.logprobs.1 += 1;
            }
            if !state.served.engine.eos().contains(&token.id) {
                self.said.tokens.push(token.id);
            }
        }
        self.show(state, ended(&self.said.tokens, self.prompts.times))
    }

    /// Returns the text of a window's tokens up to `end`, from the first token with text that was not returned before.
    fn show(&mut self, state: &ModelState, end: usize) -> String {
        let begin = self.said.shown;
        if end <= begin {
            return String::new();
        }
        self.said.shown = end;
        let text = self.spell(state, &self.said.tokens[begin..end]);
        let text = if self.text.is_empty() { text.trim_start().to_owned() } else { text };
        self.text.push_str(&text);
        text
    }

    /// Returns the text of tokens, without times.
    fn spell(&self, state: &ModelState, tokens: &[u32]) -> String {
        let texts: Vec<u32> = tokens.iter().copied().filter(|token| !self.prompts.times.has(*token)).collect();
        state.served.tokenizer.decode(&texts, true)
    }

    /// Cuts a window's answer into segments, and moves to the next. Returns the text that is left to show.
    fn end_window(&mut self, state: &ModelState) -> String {
        let filled = self.window.min(self.frames - self.seek);
        let (found, moved) = cuts(&self.said.tokens, self.prompts.times, filled, (self.window / LEAST_PART).max(1));
        let mut shown = String::new();
        for cut in &found {
            shown.push_str(&self.show(state, cut.tokens.end));
        }
        if self.format.shows_times() {
            let texts = found.iter().map(|cut| self.spell(state, &self.said.tokens[cut.tokens.clone()]));
            let texts: Vec<String> = texts.collect();
            let (sum, count) = self.said.logprobs;
            let avg_logprob = (count > 0).then(|| sum / f64::from(count));
            let (no_speech_prob, compression_ratio) = (self.said.no_speech_prob, compression_ratio(&texts.concat()));
            for (cut, text) in found.into_iter().zip(texts) {
                let frames = cut.steps.map(|step| self.seek + step * STEP_FRAMES);
                let tokens = self.said.tokens[cut.tokens].to_vec();
                self.kept_bytes += SEGMENT_BYTES + TOKEN_BYTES * tokens.len() as u64 + TEXT_BYTES * text.len() as u64;
                let seek = self.seek;
                let segment = Segment { seek, frames, text, tokens, avg_logprob, no_speech_prob, compression_ratio };
                self.segments.push(segment);
            }
        }
        self.said = Said::default();
        self.seek += moved;
        shown
    }

    /// Returns the token usage of the windows so far. Heading tokens that are known count as input, even if the model writes them.
    pub fn usage(&self, request: &ActiveRequest) -> Usage {
        Usage::of(request, self.audio(&request.state)).counting_as_input(self.uncounted)
    }

    /// Returns the length of the audio in the windows so far.
    pub fn audio(&self, state: &ModelState) -> AudioLength {
        AudioLength { tokens: self.begun * self.rows as u64, seconds: seconds(state, self.frames) }
    }
}

/// Returns the ratio of a text's bytes to its bytes compressed by zlib: OpenAI's `compression_ratio`.
fn compression_ratio(text: &str) -> Option<f64> {
    use std::io::Write;
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).ok()?;
    let compressed = encoder.finish().ok()?;
    Some(text.len() as f64 / compressed.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_text_is_compressed_and_no_text_has_no_ratio_to_speak_of() {
        assert_eq!(compression_ratio(""), Some(0.0));
        assert!(compression_ratio("Is the mark dry?").unwrap() < 1.0);
        assert!(compression_ratio(&" Thank you.".repeat(40)).unwrap() > 10.0);
    }
}
