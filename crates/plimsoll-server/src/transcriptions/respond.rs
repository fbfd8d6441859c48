//! A transcription's answer: whole, or as a stream of pieces and the whole text at its end.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use plimsoll_engine::Delta;
use serde::Serialize;

use super::Task;
use super::request::Format;
use super::tagged::{Heading, Tagged};
use crate::conversation::active::ActiveRequest;
use crate::conversation::choices::Collected;
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
use crate::conversation::stream::StreamWriter;
use crate::conversation::submission::Submission;
use crate::http::budget::Held;
use crate::http::json::json;
use crate::http::sse::Events;
use crate::state::model::ModelState;

/// The audio of a submission.
#[derive(Clone, Copy, Debug)]
pub(super) struct AudioLength {
    pub tokens: u64,
    /// The length in whole frames of the spectrogram.
    pub seconds: f64,
}

impl AudioLength {
    /// The audio of a submission before its media are decoded.
    pub fn of(state: &ModelState, submission: &Submission) -> Self {
        let tokens = submission.measured.iter().map(|medium| medium.shape.tokens).sum();
        let frames: u64 = submission.measured.iter().map(|medium| medium.clip_frames).sum();
        Self { tokens, seconds: seconds(state, frames) }
    }
}

/// Returns the duration of this many frames in seconds.
pub(super) fn seconds(state: &ModelState, frames: u64) -> f64 {
    state.audio().map_or(0.0, |audio| (frames * audio.rule.hop) as f64 / audio.rule.rate as f64)
}

#[derive(Serialize)]
pub(super) struct Usage {
    #[serde(rename = "type")]
    kind: &'static str,
    input_tokens: u64,
    input_token_details: InputDetails,
    output_tokens: u64,
    total_tokens: u64,
}

#[derive(Serialize)]
struct InputDetails {
    audio_tokens: u64,
    text_tokens: u64,
}

impl Usage {
    pub fn of(request: &ActiveRequest, audio: AudioLength) -> Self {
        let usage = request.usage();
        let text_tokens = usage.prompt_tokens.saturating_sub(audio.tokens);
        Self {
            kind: "tokens",
            input_tokens: usage.prompt_tokens,
            input_token_details: InputDetails { audio_tokens: audio.tokens, text_tokens },
            output_tokens: usage.completion_tokens,
            total_tokens: usage.total_tokens,
        }
    }

    /// Counts this many tokens of the answer as input.
    pub fn counting_as_input(mut self, tokens: u64) -> Self {
        self.input_tokens += tokens;
        self.input_token_details.text_tokens += tokens;
        self.output_tokens = self.output_tokens.saturating_sub(tokens);
        self
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration: Option<f64>,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    segments: Option<Vec<Segment<'a>>>,
    usage: Usage,
}

/// A segment in the form of OpenAI's API.
#[derive(Serialize)]
pub(super) struct Segment<'a> {
    pub id: usize,
    /// The number of frames before the window.
    pub seek: u64,
    pub start: f64,
    pub end: f64,
    pub text: &'a str,
    pub tokens: &'a [u32],
    pub temperature: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_logprob: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_speech_prob: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_ratio: Option<f64>,
}

/// A finished transcript.
pub(super) struct Transcript<'a> {
    pub text: &'a str,
    pub language: Option<&'a str>,
    pub audio: AudioLength,
    pub usage: Usage,
    /// None for a transcript without times.
    pub segments: Option<Vec<Segment<'a>>>,
}

impl Transcript<'_> {
    /// Returns the answer as an object: with all fields in `verbose_json`, else with the text.
    pub fn object(self, form: &Form, held: Option<Held>) -> Response {
        let verbose = form.format == Format::Verbose;
        let answer = Answer {
            task: verbose.then_some(form.task.name()),
            language: self.language.filter(|_| verbose).map(str::to_lowercase),
            duration: verbose.then_some(self.audio.seconds),
            text: self.text,
            segments: self.segments.filter(|_| verbose),
            usage: self.usage,
        };
        json(&answer, held)
    }
}

/// The task and the format of the answer.
pub(super) struct Form {
    pub task: Task,
    pub format: Format,
    pub heading: Heading,
    /// The language's name, if it is known before the answer.
    pub language: Option<&'static str>,
}

/// Returns the whole answer.
pub(super) fn whole(
    mut request: ActiveRequest,
    mut collected: Vec<Collected>,
    form: &Form,
    audio: AudioLength,
) -> Response {
    let held = request.take_held();
    let mut reading = ReplyReader::new(&request.submission.rules);
    let (mut text, mut tagged) = (String::new(), Tagged::new(form.heading));
    for choice in &mut collected {
        let end = ReplyEnd::of(choice.finish, choice.stop_reason.as_deref());
        let parts = reading.read(std::mem::take(&mut choice.text), end, &request.state.server.ids);
        parts.iter().filter_map(content).for_each(|piece| text.push_str(&tagged.push(piece)));
    }
    text.push_str(&tagged.end());
    if form.format == Format::Text {
        return text_only(text);
    }
    let language = form.language.or(tagged.language.as_deref());
    let usage = Usage::of(&request, audio);
    Transcript { text: &text, language, audio, usage, segments: None }.object(form, held)
}

/// Returns the answer in the format `text`.
pub(super) fn text_only(text: String) -> Response {
    plain("text/plain; charset=utf-8", text + "\n")
}

/// Returns a text of this media type.
pub(super) fn plain(kind: &'static str, text: String) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], Body::from(text)).into_response()
}

fn content(part: &Part) -> Option<&str> {
    match part {
        Part::Content(text) => Some(text),
        _ => None,
    }
}

/// The state of a streamed answer.
pub(super) struct Stream {
    reading: ReplyReader,
    tagged: Tagged,
    text: String,
    audio: AudioLength,
}

#[derive(Serialize)]
struct Piece<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    delta: &'a str,
}

#[derive(Serialize)]
struct Done<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    usage: Usage,
}

/// Writes the event of a piece of text, if there is any.
pub(super) fn show(piece: &str, out: &mut Events) {
    if !piece.is_empty() {
        out.push(&Piece { kind: "transcript.text.delta", delta: piece });
    }
}

/// Writes the event of the whole text.
pub(super) fn done(text: &str, usage: Usage, out: &mut Events) {
    out.push(&Done { kind: "transcript.text.done", text, usage });
}

impl Stream {
    pub fn new(request: &ActiveRequest, audio: AudioLength, heading: Heading) -> Self {
        let (reading, tagged) = (ReplyReader::new(&request.submission.rules), Tagged::new(heading));
        Self { reading, tagged, text: String::new(), audio }
    }

    fn show(&mut self, piece: &str, out: &mut Events) {
        self.text.push_str(piece);
        show(piece, out);
    }
}

impl StreamWriter for Stream {
    fn open(&mut self, _request: &ActiveRequest, out: &mut Events) {
        out.comment();
    }

    fn delta(&mut self, request: &ActiveRequest, _choice: usize, delta: Delta, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        for part in self.reading.read(delta.text, end, &request.state.server.ids) {
            if let Some(piece) = content(&part) {
                let piece = self.tagged.push(piece);
                self.show(&piece, out);
            }
        }
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        let rest = self.tagged.end();
        self.show(&rest, out);
        done(&self.text, Usage::of(request, self.audio), out);
    }
}
