//! The readers of request bodies, without connections and without an engine's answer. Only `plimsoll-fuzz` uses this.

use std::sync::Arc;

use crate::app::App;
use crate::config::{PARSED_FACTOR, Served, ServerConfig};
use crate::error::{ApiResult, ServeError};
use crate::fields::Fields;
use crate::limits::ReadBody;
use crate::turn::Ask;
use crate::{anthropic, chat, completions, pooled, responses};

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
pub struct Bodies(Arc<App>);

impl Bodies {
    /// The readers for a model.
    ///
    /// # Errors
    /// What contradicts itself in the configuration.
    pub fn new(served: Served, config: ServerConfig) -> Result<Self, ServeError> {
        App::new(served, config).map(Self)
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
        self.0.bytes.used()
    }

    fn take(&self, route: Route, bytes: &[u8]) -> ApiResult<()> {
        let app = &*self.0;
        match route {
            Route::Completions => completions::request::parse(&mut self.body(bytes)?, app).map(drop),
            Route::Chat => self.prepare(chat::request::parse(bytes, app)?),
            Route::Messages => self.prepare(anthropic::request::parse(bytes, app)?.0),
            Route::CountTokens => prompt(app, anthropic::request::count(bytes, app)?),
            Route::Responses => self.prepare(responses::request::parse(self.body(bytes)?, app, None)?.into_ask()),
            Route::Tokenize => {
                let mut fields = Fields::of_body(bytes)?;
                let conversation = chat::messages::conversation(&mut fields, app)?;
                fields.finish()?;
                prompt(app, conversation)
            }
            Route::Embeddings => pooled::embeddings::parse(bytes, app).map(drop),
            Route::Rerank => pooled::rerank::parse(bytes, app).map(drop),
            Route::Score => pooled::score::parse(bytes, app).map(drop),
        }
    }

    fn body(&self, bytes: &[u8]) -> ApiResult<ReadBody> {
        let held = self.0.bytes.hold(bytes.len() as u64 * PARSED_FACTOR)?;
        Ok(ReadBody { bytes: bytes.to_vec(), held })
    }

    fn prepare(&self, ask: Ask) -> ApiResult<()> {
        if ask.conversation.is_elsewhere() {
            return Ok(());
        }
        ask.prepare(&self.0).map(drop)
    }
}

fn prompt(app: &App, mut conversation: crate::turn::conversation::Conversation) -> ApiResult<()> {
    if conversation.is_elsewhere() {
        return Ok(());
    }
    conversation.prompt(app, false).map(drop)
}
