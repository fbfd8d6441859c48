//! A served model and its server: the state of the model's handlers.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::StatusCode;
use plimsoll_engine::{AudioSpec, TRANSCRIBES_ONLY, Transcript};
use plimsoll_grammar::{Grammars, Settings};
use plimsoll_memory::faults::{self, Site};
use plimsoll_reply::{ReasoningFormat, ToolFormat};
use plimsoll_text::{Detokenizer, TextError};

use crate::http::body::{BodyKind, EarlyBody, PARSED_FACTOR, ReadBody, read_body};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, CONTEXT_LENGTH, ServeError, quote};
use crate::state::config::{Served, ServerConfig, is_named};
use crate::state::media::pipeline::MediaPipeline;
use crate::state::running::RunningModel;
use crate::state::server::{ServerState, choices_max};

/// A served model and its server: the state of the model's handlers.
pub(crate) struct ModelState {
    pub server: Arc<ServerState>,
    pub served: Served,
    pub grammars: Arc<Grammars>,
    /// The model's name in pages that list several models; none for the only model.
    pub label: Option<Arc<str>>,
    /// Bytes of the longest vocabulary entry; bounds how much text can fit into the context.
    longest_token: u64,
    pub media_pipeline: MediaPipeline,
}

impl ModelState {
    /// The state of a server's only model.
    pub fn new(served: Served, config: ServerConfig) -> Result<Arc<Self>, ServeError> {
        let server = ServerState::new(config, Some(&served.engine))?;
        let grammar_bytes = server.config.grammar_bytes;
        Self::of(&server, served, grammar_bytes, None)
    }

    /// The state of one model of this server. `grammar_bytes`: the memory for its grammars.
    pub fn of(
        server: &Arc<ServerState>,
        served: Served,
        grammar_bytes: u64,
        label: Option<Arc<str>>,
    ) -> Result<Arc<Self>, ServeError> {
        if served.names.is_empty() {
            return Err(ServeError::Config("the served model needs at least one name".into()));
        }
        let tokenizer = &served.tokenizer;
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let longest_token = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1);
        let grammars = grammars(&served, grammar_bytes, server.config.grammar_sandbox.clone());
        let media_pipeline = MediaPipeline::new(&server.config.media, served.engine.media())?;
        Ok(Arc::new(Self {
            server: Arc::clone(server),
            media_pipeline,
            grammars,
            label,
            longest_token: longest_token.max(1) as u64,
            served,
        }))
    }

    /// This model's name and sizes, for the list of running requests.
    pub fn of_running(&self) -> RunningModel {
        let engine = &self.served.engine;
        RunningModel {
            name: self.label.clone(),
            page_bytes: engine.page_bytes(),
            window_page_bytes: engine.window_page_bytes(),
            slot_bytes: engine.slot_bytes(),
        }
    }

    /// Refuses with 404 a name that is not the model's.
    pub fn check_model(&self, name: &str) -> ApiResult<()> {
        if name == "default" || is_named(&self.served.names, name) {
            return Ok(());
        }
        let names = self.served.names.join("`, `");
        let message = format!("the model `{}` does not exist here; this server has `{names}`", quote(name));
        let error = ApiError::new(StatusCode::NOT_FOUND, message);
        Err(ApiError { code: Some("model_not_found"), param: Some("model".into()), ..error })
    }

    /// Refuses with 400 where the model continues no text of a client: it writes none, or only transcripts.
    pub fn check_generates(&self) -> ApiResult<()> {
        if self.served.transcribes_only() {
            return Err(ApiError::unsupported("model", TRANSCRIBES_ONLY));
        }
        self.check_writes()
    }

    /// Returns the model's audio input; none if it takes no audio.
    pub fn audio(&self) -> Option<&AudioSpec> {
        self.served.engine.media().and_then(|spec| spec.audio.as_ref())
    }

    /// Returns how the model is prompted for a transcript; none if it takes no audio.
    pub fn transcript(&self) -> Option<Transcript> {
        self.served.engine.media().and_then(|spec| spec.transcript())
    }

    /// Refuses with 400 where the model writes no text.
    pub fn check_writes(&self) -> ApiResult<()> {
        if !self.served.generates() {
            let message = match self.served.pooled.judges {
                true => "this model scores texts only: ask /v1/rerank or /v1/score",
                false => "this model makes embeddings only: ask /v1/embeddings, /v1/rerank or /v1/score",
            };
            return Err(ApiError::unsupported("model", message));
        }
        Ok(())
    }

    /// The most choices of one request.
    pub fn choices_max(&self) -> u32 {
        choices_max(&self.server.config, self.served.engine.limits())
    }

    /// The bytes of the longest text that can fit into the context.
    fn text_bytes_max(&self) -> u64 {
        let context = u64::from(self.served.engine.limits().max_req_total_len);
        // Unicode normalization may shrink text to a third before it is tokenized.
        context.saturating_mul(self.longest_token).saturating_mul(3)
    }

    /// Returns the beginning of a text, as long as may fit into the context.
    pub fn beginning<'t>(&self, text: &'t str) -> &'t str {
        let most = usize::try_from(self.text_bytes_max()).unwrap_or(usize::MAX);
        &text[..text.floor_char_boundary(most)]
    }

    /// Refuses text that is too long for the context in any tokenization, before any work on it.
    fn check_text(&self, param: &str, bytes: usize) -> ApiResult<()> {
        if bytes as u64 > self.text_bytes_max() {
            let context = self.served.engine.limits().max_req_total_len;
            let message = format!(
                "this model's maximum context length is {context} tokens, into which the prompt's {bytes} bytes cannot fit"
            );
            return Err(ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::invalid(param, message) });
        }
        Ok(())
    }

    /// Tokenizes text of bounded length. No token spans two `pieces`. Runs on a text worker.
    pub fn encode(&self, param: &str, pieces: &[&str], add_special: bool) -> ApiResult<Vec<u32>> {
        self.tokenize(param, pieces, add_special, true)
    }

    /// Tokenizes text without adding special tokens; the names of special tokens in it are plain text.
    pub fn encode_plain(&self, param: &str, pieces: &[&str]) -> ApiResult<Vec<u32>> {
        self.tokenize(param, pieces, false, false)
    }

    fn tokenize(&self, param: &str, pieces: &[&str], add_special: bool, parse_special: bool) -> ApiResult<Vec<u32>> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        self.check_text(param, bytes)?;
        faults::site(Site::Tokenizer);
        let tokenizer = &self.served.tokenizer;
        let needed = tokenizer.encode_bytes_max(bytes) as u64;
        if needed > self.server.tokenizing.limit() {
            let message = format!(
                "tokenizing a text of {bytes} bytes may take {needed} bytes, more than this server's limit of {}",
                self.server.tokenizing.limit()
            );
            return Err(ApiError { code: Some("text_too_long"), ..ApiError::invalid(param, message) });
        }
        let ids = self.server.tokenizing.with(needed, || {
            let mut ids = tokenizer.encode_pieces(pieces, add_special, parse_special);
            // The list grew by doubling, and lives as long as the request.
            ids.iter_mut().for_each(Vec::shrink_to_fit);
            ids
        });
        ids.map_err(|error| match error {
            TextError::TextTooLong { .. } => ApiError::invalid(param, error.to_string()),
            _ => ApiError::internal(error.to_string()),
        })
    }

    /// Refuses more ids than fit into the context, before any work on them.
    pub fn check_length(&self, param: &str, ids: usize) -> ApiResult<()> {
        let context = self.served.engine.limits().max_req_total_len;
        if ids > context as usize {
            let message = format!("this model's maximum context length is {context} tokens; {param} has {ids}");
            return Err(ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::invalid(param, message) });
        }
        Ok(())
    }

    /// Returns the text of `ids`. The text grows by an eighth at a time; `held` grows before it.
    pub fn decode(&self, param: &str, ids: &[u32], held: &mut Held) -> ApiResult<String> {
        let (mut text, mut detokenizer) = (String::new(), Detokenizer::new(false));
        let tokenizer = &self.served.tokenizer;
        for id in ids {
            let most = Detokenizer::appended_max(tokenizer, *id);
            if text.capacity() - text.len() < most {
                let more = most.max(text.len() / 8);
                self.server.bytes.ever_holds(param, held.bytes() + more as u64)?;
                held.grow(more as u64)?;
                text.reserve_exact(more);
            }
            detokenizer.push(tokenizer, *id, &mut text);
        }
        detokenizer.finish(&mut text);
        Ok(text)
    }

    /// Refuses token ids outside the vocabulary.
    pub fn check_ids(&self, param: &str, ids: &[u32]) -> ApiResult<()> {
        let vocab = self.served.engine.limits().vocab_size;
        match ids.iter().find(|id| **id >= vocab) {
            Some(id) => Err(ApiError::invalid(param, format!("token id {id} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    /// Reads a JSON body, then runs `work` on a text worker.
    pub async fn on_body<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        work: impl FnOnce(ReadBody, &Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        self.on_body_of(BodyKind::Json, request, work).await
    }

    /// Reads the body, then runs `work` on a text worker. `work` waits while other bodies fill the memory planned for
    /// parsing.
    pub async fn on_body_of<T: Send + 'static>(
        self: &Arc<Self>,
        kind: BodyKind,
        request: Request,
        work: impl FnOnce(ReadBody, &Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (mut head, body) = request.into_parts();
        let body = match head.extensions.remove::<EarlyBody>().and_then(|early| early.take()) {
            Some(read) => read,
            None => {
                let limits = self.server.config.body_limits();
                read_body(kind, &head.headers, body, &self.server.bytes, limits).await?
            }
        };
        let state = Arc::clone(self);
        let parsed = body.bytes.len() as u64 * PARSED_FACTOR;
        self.server.on_text_worker(move || state.server.parsing.with(parsed, || work(body, &state))).await
    }
}

/// Makes the grammar cache of a served model.
fn grammars(served: &Served, bytes: u64, sandbox: Option<PathBuf>) -> Arc<Grammars> {
    let tokenizer = &served.tokenizer;
    let ends = match served.engine.eos() {
        [] => tokenizer.eos(),
        ends => ends,
    };
    let tools = [served.formats.tools, Some(ToolFormat::Hermes)];
    let markers = tools.iter().flatten().flat_map(|format| format.markers());
    let reasoning = [served.formats.reasoning, served.formats.reasoning_with_tools];
    let reasoning = reasoning.into_iter().flatten().flat_map(ReasoningFormat::markers);
    let ids = markers.chain(reasoning).filter_map(|marker| tokenizer.token_to_id(marker));
    Grammars::new(Settings {
        tokenizer: Arc::clone(tokenizer),
        vocab: served.engine.limits().vocab_size as usize,
        ends: ends.to_vec(),
        spelled: ids.filter(|id| !ends.contains(id)).collect(),
        bytes,
        sandbox,
    })
}
