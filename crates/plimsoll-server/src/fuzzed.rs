//! The readers of request bodies, without connections and without an engine's answer. Only `plimsoll-fuzz` uses this.

use std::sync::Arc;

use crate::conversation::ChatRequest;
use crate::http::body::{PARSED_FACTOR, ReadBody};
use crate::http::error::{ApiResult, ServeError};
use crate::http::fields::Fields;
use crate::state::config::{Served, ServerConfig};
use crate::state::model::ModelState;
use crate::{chat, completions, messages, pooling, responses};

/// What can be asked.
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
}

impl Route {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Completions,
        Self::Chat,
        Self::Messages,
        Self::CountTokens,
        Self::Responses,
        Self::Tokenize,
        Self::Embeddings,
        Self::Rerank,
        Self::Score,
    ];
}

/// Reads request bodies for one model.
pub struct Bodies(Arc<ModelState>);

impl Bodies {
    /// The readers for a model.
    ///
    /// # Errors
    /// What contradicts itself in the configuration.
    pub fn new(served: Served, config: ServerConfig) -> Result<Self, ServeError> {
        ModelState::new(served, config).map(Self)
    }

    /// Takes a body apart, and makes a prompt of it where nothing has to be fetched for that: what a text worker does.
    ///
    /// # Errors
    /// Status and words of the refusal.
    pub fn read(&self, route: Route, bytes: &[u8]) -> Result<(), (u16, String)> {
        self.take(route, bytes).map_err(|error| (error.status.as_u16(), error.message))
    }

    /// Bytes of bodies in flight that are held: none between two bodies.
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
            Route::Responses => self.prepare(responses::request::parse(self.body(bytes)?, state, None)?.into_ask()),
            Route::Tokenize => {
                let mut fields = Fields::of_body(bytes)?;
                let conversation = chat::messages::conversation(&mut fields, state)?;
                fields.finish()?;
                prompt(state, conversation)
            }
            Route::Embeddings => pooling::embeddings::parse(bytes, state).map(drop),
            Route::Rerank => pooling::rerank::parse(bytes, state).map(drop),
            Route::Score => pooling::score::parse(bytes, state).map(drop),
        }
    }

    fn body(&self, bytes: &[u8]) -> ApiResult<ReadBody> {
        let held = self.0.server.bytes.hold(bytes.len() as u64 * PARSED_FACTOR)?;
        Ok(ReadBody { bytes: bytes.to_vec(), held })
    }

    fn prepare(&self, ask: ChatRequest) -> ApiResult<()> {
        if ask.conversation.is_elsewhere() {
            return Ok(());
        }
        ask.prepare(&self.0).map(drop)
    }
}

fn prompt(state: &ModelState, mut conversation: crate::conversation::messages::Conversation) -> ApiResult<()> {
    if conversation.is_elsewhere() {
        return Ok(());
    }
    conversation.prompt(state, false).map(drop)
}
