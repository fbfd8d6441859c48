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
use crate::conversation::reading::{Part, Reading, ReplyEnd};
use crate::conversation::stream::Shape;
use crate::conversation::submission::Submission;
use crate::http::json::json;
use crate::http::sse::Events;
use crate::state::model::ModelState;

/// The audio of a submission.
#[derive(Clone, Copy, Debug)]
pub(super) struct AudioLength {
    pub tokens: u64,
    /// In whole frames of the spectrogram.
    pub seconds: f64,
}

impl AudioLength {
    /// The audio of a submission before its media are decoded.
    pub fn of(state: &ModelState, submission: &Submission) -> Self {
        let tokens = submission.measured.iter().map(|medium| medium.shape.tokens).sum();
        let frames: u64 = submission.measured.iter().map(|medium| medium.clip_frames).sum();
        let rule = state.served.engine.media().and_then(|spec| spec.audio.as_ref()).map(|audio| &audio.rule);
        Self { tokens, seconds: rule.map_or(0.0, |rule| frames as f64 * rule.hop as f64 / rule.rate as f64) }
    }
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
    usage: Usage,
}

/// What is asked for, and how it is answered.
pub(super) struct Form {
    pub task: Task,
    pub format: Format,
    pub heading: Heading,
    /// The language's name, where it is known before.
    pub language: Option<&'static str>,
}

/// The whole answer.
pub(super) fn whole(
    mut request: ActiveRequest,
    mut collected: Vec<Collected>,
    form: Form,
    audio: AudioLength,
) -> Response {
    let Form { task, format, heading, language } = form;
    let held = request.take_held();
    let mut reading = Reading::new(&request.submission.rules);
    let (mut text, mut tagged) = (String::new(), Tagged::new(heading));
    for choice in &mut collected {
        let end = ReplyEnd::of(choice.finish, choice.stop_reason.as_deref());
        let parts = reading.read(std::mem::take(&mut choice.text), end, &request.state.server.ids);
        parts.iter().filter_map(content).for_each(|piece| text.push_str(&tagged.push(piece)));
    }
    text.push_str(&tagged.end());
    let verbose = format == Format::Verbose;
    if format == Format::Text {
        text.push('\n');
        return plain("text/plain; charset=utf-8", text);
    }
    let answer = Answer {
        task: verbose.then_some(task.name()),
        language: language.or(tagged.language.as_deref()).filter(|_| verbose).map(str::to_lowercase),
        duration: verbose.then_some(audio.seconds),
        text: &text,
        usage: Usage::of(&request, audio),
    };
    json(&answer, held)
}

/// A text of this type.
pub(super) fn plain(kind: &'static str, text: String) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], Body::from(text)).into_response()
}

fn content(part: &Part) -> Option<&str> {
    match part {
        Part::Content(text) => Some(text),
        _ => None,
    }
}

/// The stream's state.
pub(super) struct Stream {
    reading: Reading,
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
        let (reading, tagged) = (Reading::new(&request.submission.rules), Tagged::new(heading));
        Self { reading, tagged, text: String::new(), audio }
    }

    fn show(&mut self, piece: &str, out: &mut Events) {
        self.text.push_str(piece);
        show(piece, out);
    }
}

impl Shape for Stream {
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
