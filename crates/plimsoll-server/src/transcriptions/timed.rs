//! The answer of a transcription with times: whole, as subtitles, or as a stream of the segments' texts.

use std::sync::Arc;

use axum::response::Response;
use plimsoll_engine::Delta;

use super::request::Format;
use super::respond::{self, Form, Segment, Transcript, plain, seconds, text_only};
use super::subtitles;
use super::whisper::WindowPrompts;
use super::windows::Windows;
use crate::conversation::active::ActiveRequest;
use crate::conversation::stream::{self, StreamWriter};
use crate::conversation::submission::Submission;
use crate::http::error::ApiResult;
use crate::http::sse::Events;
use crate::state::model::ModelState;

/// Transcribes the submission's clip window by window, and answers.
pub(super) async fn answer(
    state: &Arc<ModelState>,
    submission: Submission,
    prompts: WindowPrompts,
    form: Form,
) -> ApiResult<Response> {
    let (streams, temperature) = (submission.common.stream, submission.common.sampling.temperature);
    let (mut windows, mut request) = Windows::begin(state, submission, prompts, form.language, form.format).await?;
    if streams {
        return Ok(stream::response(request, Stream { windows }));
    }
    while windows.step(&mut request).await?.is_some() {}
    Ok(whole(request, windows, &form, temperature))
}

/// Returns the whole answer.
fn whole(mut request: ActiveRequest, windows: Windows, form: &Form, temperature: f32) -> Response {
    let (state, held) = (Arc::clone(&request.state), request.take_held());
    let millis = |frames| (1000.0 * seconds(&state, frames)).round() as u64;
    let cues = windows.segments.iter().map(|segment| (segment.frames.map(millis), segment.text.as_str()));
    match form.format {
        Format::Text => return text_only(windows.text),
        Format::Srt => return plain("application/x-subrip; charset=utf-8", subtitles::srt(cues)),
        Format::Vtt => return plain("text/vtt; charset=utf-8", subtitles::vtt(cues)),
        Format::Json | Format::Verbose => {}
    }
    let segments = windows.segments.iter().enumerate().map(|(id, own)| {
        let [start, end] = own.frames.map(|frames| seconds(&state, frames));
        Segment {
            id,
            seek: own.seek,
            start,
            end,
            text: &own.text,
            tokens: &own.tokens,
            temperature,
            avg_logprob: own.avg_logprob,
            no_speech_prob: own.no_speech_prob,
            compression_ratio: own.compression_ratio,
        }
    });
    let (text, language) = (windows.text.as_str(), windows.language);
    let (audio, usage) = (windows.audio(&state), windows.usage(&request));
    Transcript { text, language, audio, usage, segments: Some(segments.collect()) }.object(form, held)
}

/// The state of a streamed answer.
struct Stream {
    windows: Windows,
}

impl StreamWriter for Stream {
    fn open(&mut self, _request: &ActiveRequest, out: &mut Events) {
        out.comment();
    }

    /// [`Self::step`] takes every piece.
    fn delta(&mut self, _request: &ActiveRequest, _choice: usize, _delta: Delta, _out: &mut Events) {}

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        respond::done(&self.windows.text, self.windows.usage(request), out);
    }

    async fn write_next(&mut self, request: &mut ActiveRequest, out: &mut Events) -> bool {
        match self.windows.step(request).await {
            Ok(Some(piece)) => {
                respond::show(&piece, out);
                return false;
            }
            Ok(None) => self.close(request, out),
            Err(error) => self.fail(request, &error, out),
        }
        self.end(out);
        true
    }
}
