//! The parsers of request bodies and of MCP servers' answers, without connections and without an engine's answer. Only `plimsoll-fuzz` uses
//! this.

use std::sync::Arc;

use crate::conversation::ChatRequest;
pub use crate::mcp::fuzzed as mcp;

use crate::http::body::{PARSED_FACTOR, ReadBody};
use crate::http::error::{ApiResult, ServeError};
use crate::http::fields::Fields;
use crate::ollama::request::Work;
use crate::state::config::{Served, ServerConfig};
use crate::state::model::ModelState;
use crate::transcriptions::Task;
use crate::{chat, completions, messages, ollama, pooling, responses, transcriptions};

/// The routes with bodies that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/responses`
    Responses,
    /// `/tokenize` of a conversation
    Tokenize,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/rerank`
    Rerank,
    /// `/v1/score`
    Score,
    /// `/api/chat`
    OllamaChat,
    /// `/api/generate`
    OllamaGenerate,
    /// `/api/embed`
    OllamaEmbed,
    /// `/v2/embed`
    CohereEmbed,
    /// `/infill`
    Infill,
    /// `/v1/audio/transcriptions`: a form with the boundary `edge`
    Transcriptions,
}

impl Route {
    /// All routes.
    pub const ALL: [Self; 15] = [
        Self::Completions,
        Self::Chat,
        Self::Messages,
        Self::CountTokens,
        Self::Responses,
        Self::Tokenize,
        Self::Embeddings,
        Self::Rerank,
        Self::Score,
        Self::OllamaChat,
        Self::OllamaGenerate,
        Self::OllamaEmbed,
        Self::CohereEmbed,
        Self::Infill,
        Self::Transcriptions,
    ];
}

/// Reads request bodies for one model.
pub struct Bodies(Arc<ModelState>);

impl Bodies {
    /// Makes the readers for a model.
    ///
    /// # Errors
    /// A contradiction in the configuration.
    pub fn new(served: Served, config: ServerConfig) -> Result<Self, ServeError> {
        ModelState::new(served, config).map(Self)
    }

    /// Parses a body, and makes a prompt of it if nothing must be fetched for that: the work of a text worker.
    ///
    /// # Errors
    /// Status and message of the refusal.
    pub fn read(&self, route: Route, bytes: &[u8]) -> Result<(), (u16, String)> {
        self.take(route, bytes).map_err(|error| (error.status.as_u16(), error.message))
    }

    /// Returns the bytes that the budget of bodies in flight holds: none between two bodies.
    pub fn held(&self) -> u64 {
        self.0.server.bytes.used()
    }

    fn take(&self, route: Route, bytes: &[u8]) -> ApiResult<()> {
        let state = &*self.0;
        match route {
            Route::Completions => completions::request::parse(&mut self.body(bytes)?, state).map(drop),
            Route::Chat => self.prepare(chat::request::parse(bytes, state)?),
            Route::Messages => self.prepare(messages::request::parse(bytes, state)?.0),
            Route::CountTokens => prompt(state, messages::request::count(bytes, state)?),
            Route::Responses => self.prepare(responses::request::parse(self.body(bytes)?, state, None)?.request),
            Route::Tokenize => {
                let mut fields = Fields::of_body(bytes)?;
                let conversation = chat::messages::conversation(&mut fields, state)?;
                fields.finish()?;
                prompt(state, conversation)
            }
            Route::Embeddings => pooling::embeddings::parse(bytes, state).map(drop),
            Route::Rerank => pooling::rerank::parse(bytes, state).map(drop),
            Route::Score => pooling::score::parse(bytes, state).map(drop),
            Route::OllamaChat => self.work(ollama::request::chat(bytes, state)?),
            Route::OllamaGenerate => self.work(ollama::request::generate(bytes, state)?),
            Route::OllamaEmbed => pooling::ollama::parse(bytes, state).map(drop),
            Route::CohereEmbed => pooling::cohere::parse(bytes, state).map(drop),
            Route::Infill => completions::infill::parse(bytes, state).map(drop),
            Route::Transcriptions => {
                self.prepare(transcriptions::request::parse(bytes, "edge", Task::Transcribe, state)?.chat)
            }
        }
    }

    fn body(&self, bytes: &[u8]) -> ApiResult<ReadBody> {
        let held = self.0.server.bytes.hold(bytes.len() as u64 * PARSED_FACTOR)?;
        Ok(ReadBody { bytes: bytes.to_vec(), held })
    }

    fn work(&self, work: Work) -> ApiResult<()> {
        match work {
            Work::Turn(turn) => self.prepare(*turn),
            Work::Load { .. } | Work::Text(_) => Ok(()),
        }
    }

    fn prepare(&self, request: ChatRequest) -> ApiResult<()> {
        if request.conversation.needs_fetch() {
            return Ok(());
        }
        request.prepare(&self.0).map(drop)
    }
}

fn prompt(state: &ModelState, mut conversation: crate::conversation::prompt::Conversation) -> ApiResult<()> {
    if conversation.needs_fetch() {
        return Ok(());
    }
    conversation.prompt(state, false).map(drop)
}
