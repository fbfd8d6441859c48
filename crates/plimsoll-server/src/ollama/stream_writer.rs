//! An answer as Ollama's stream: lines of JSON, of which the last has the finish reason.

use plimsoll_engine::{Delta, FinishReason};

use super::Route;
use super::error::broken;
use super::respond::{Line, Piece, reason};
use crate::conversation::active::ActiveRequest;
use crate::conversation::clock::Clock;
use crate::conversation::reply_reader::{ReplyEnd, ReplyReader};
use crate::conversation::stream::{StreamHeaders, StreamWriter};
use crate::http::error::ApiError;
use crate::http::sse::{Events, LINE_HEADERS};

/// The state of a streamed answer.
pub(super) struct Stream {
    route: Route,
    reading: ReplyReader,
    clock: Clock,
    piece: Piece,
    finish: Option<FinishReason>,
}

impl Stream {
    pub fn new(route: Route, request: &ActiveRequest, clock: Clock) -> Self {
        let reading = ReplyReader::new(&request.submission.rules);
        Self { route, reading, clock, piece: Piece::default(), finish: None }
    }

    fn line<'a>(&'a self, request: &'a ActiveRequest) -> Line<'a> {
        Line::of(self.route, &request.submission.common.model, &self.piece)
    }
}

impl StreamWriter for Stream {
    const HEADERS: StreamHeaders = LINE_HEADERS;

    fn broken(error: &ApiError, out: &mut Events) {
        broken(error, out);
    }

    fn open(&mut self, _request: &ActiveRequest, _out: &mut Events) {}

    fn delta(&mut self, request: &ActiveRequest, _choice: usize, delta: Delta, out: &mut Events) {
        self.clock.tokens(delta.tokens.len());
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        self.piece.take(self.reading.read(delta.text, end, &request.state.server.ids));
        self.finish = delta.finish.or(self.finish);
        if self.finish.is_some() {
            self.piece.close_call();
        }
        let reports = request.submission.logprobs.is_some() && !delta.tokens.is_empty();
        if self.piece.is_empty() && !reports {
            return;
        }
        let line = self.line(request);
        out.push_line(&if reports { line.with_logprobs(request, &delta.tokens) } else { line });
        self.piece.clear();
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        let counts = self.clock.counts(request.usage());
        out.push_line(&self.line(request).last(reason(self.finish), Some(counts)));
    }

    fn fail(&mut self, _request: &ActiveRequest, error: &ApiError, out: &mut Events) {
        broken(error, out);
    }

    /// The last line is recognized by its `done`.
    fn end(&self, _out: &mut Events) {}

    fn keep_alive(&self, out: &mut Events) {
        out.blank();
    }
}
