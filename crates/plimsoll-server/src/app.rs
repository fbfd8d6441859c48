//! The state all handlers share, and the routes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};
use plimsoll_grammar::Grammars;
use plimsoll_memory::faults::{self, Site};
use plimsoll_text::TextError;
use tokio::sync::{Semaphore, watch};

use crate::config::{ARRIVING_BYTES, PARSED_FACTOR, Served, ServerConfig};
use crate::error::{ApiError, ApiResult, ServeError, quote};
use crate::ids::Ids;
use crate::limits::{ByteBudget, ReadBody, WorkBudget, read_json};
use crate::media::Studio;
use crate::metrics::Metrics;
use crate::prompt::MAX_PROMPTS;
use crate::rates::Rates;
use crate::responses::{self, store::ResponseStore};
use crate::running::{self, Running};
use crate::{
    anthropic, cache, chat, completions, door, form, health, memory, metrics, models, openapi, page, pooled, status,
    tokenize,
};

/// How far the server's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Accepting and answering.
    Serving,
    /// Accepting nothing new; what runs may finish.
    Draining,
    /// The deadline has passed: what still runs ends with an error now.
    Cut,
}

/// Waits until the server's life has come to `phase`, or beyond.
pub(crate) async fn reached(phases: &mut watch::Receiver<Phase>, phase: Phase) {
    // An error would mean that the server is gone, and with it everybody who could wait here.
    let _ = phases.wait_for(|now| *now >= phase).await;
}

/// The state behind all routes.
pub(crate) struct App {
    pub served: Served,
    pub config: ServerConfig,
    pub ids: Ids,
    pub bytes: Arc<ByteBudget>,
    pub metrics: Metrics,
    pub phase: watch::Sender<Phase>,
    pub running: Arc<Running>,
    pub rates: Rates,
    pub started: Instant,
    /// Bytes of the longest vocabulary entry; bounds how much text can fit into the context.
    longest_token: u64,
    pub grammars: Arc<Grammars>,
    pub responses: Arc<ResponseStore>,
    pub studio: Studio,
    text_workers: Arc<Semaphore>,
    /// Bodies that are being parsed and tokenized. Who holds a share of it may wait for one of `tokenizing`, never the other way
    /// round.
    parsing: WorkBudget,
    tokenizing: WorkBudget,
}

impl App {
    pub fn new(served: Served, config: ServerConfig) -> Result<Arc<Self>, ServeError> {
        config.check()?;
        if served.names.is_empty() {
            return Err(ServeError::Config("the served model needs at least one name".into()));
        }
        let tokenizer = &served.tokenizer;
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let longest_token = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1);
        let bytes = ByteBudget::new(config.max_bytes_in_flight);
        let responses = ResponseStore::new(config.response_store_bytes);
        let grammars = form::grammars(&served, config.grammar_bytes);
        let studio = Studio::new(&config.media, served.engine.media())?;
        Ok(Arc::new(Self {
            metrics: Metrics::new(&served.engine, &bytes, &grammars, &responses, &studio.counts),
            studio,
            grammars,
            responses,
            text_workers: Arc::new(Semaphore::new(config.text_workers.max(1) as usize)),
            parsing: WorkBudget::new(config.parsing_bytes_max()),
            tokenizing: WorkBudget::new(config.max_tokenizing_bytes),
            ids: Ids::default(),
            phase: watch::Sender::new(Phase::Serving),
            running: Running::new(config.max_connections),
            rates: Rates::new(config.rates),
            started: Instant::now(),
            longest_token: longest_token.max(1) as u64,
            bytes,
            served,
            config,
        }))
    }

    /// 404 unless the model goes by `name` here.
    pub fn check_model(&self, name: &str) -> ApiResult<()> {
        if name == "default" || self.served.names.iter().any(|known| known == name) {
            return Ok(());
        }
        let names = self.served.names.join("`, `");
        let message = format!("the model `{}` does not exist here; this server has `{names}`", quote(name));
        let error = ApiError::new(StatusCode::NOT_FOUND, message);
        Err(ApiError { code: Some("model_not_found"), param: Some("model".into()), ..error })
    }

    /// 400 where the model writes no text.
    pub fn check_generates(&self) -> ApiResult<()> {
        if self.served.engine.limits().encoder {
            let message = "this model makes embeddings only: ask /v1/embeddings, /v1/rerank or /v1/score";
            return Err(ApiError::unsupported("model", message));
        }
        Ok(())
    }

    /// Most sequences of one HTTP request.
    pub fn max_choices(&self) -> u32 {
        self.config.max_choices.min(self.served.engine.limits().running_max_req_size).max(1)
    }

    /// Refuses text that cannot fit into the context however it is tokenized, before any work is spent on it.
    fn check_text(&self, param: &str, bytes: usize) -> ApiResult<()> {
        let context = u64::from(self.served.engine.limits().max_req_total_len);
        // Unicode normalization may shrink text to a third before it is tokenized.
        let most = context.saturating_mul(self.longest_token).saturating_mul(3);
        if bytes as u64 > most {
            let message = format!(
                "the prompt has {bytes} bytes and cannot fit into this server's maximum context length of {context} tokens"
            );
            return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) });
        }
        Ok(())
    }

    /// Tokenizes text of bounded length, which comes in pieces that no token spans. Only on a text worker.
    pub fn encode(&self, param: &str, pieces: &[&str], add_special: bool) -> ApiResult<Vec<u32>> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        self.check_text(param, bytes)?;
        faults::site(Site::Tokenizer);
        let tokenizer = &self.served.tokenizer;
        let needed = tokenizer.encode_bytes_max(bytes) as u64;
        if needed > self.tokenizing.limit() {
            let message = format!(
                "tokenizing a text of {bytes} bytes may take {needed} bytes, more than this server's limit of {}",
                self.tokenizing.limit()
            );
            return Err(ApiError { code: Some("text_too_long"), ..ApiError::invalid(param, message) });
        }
        let ids = self.tokenizing.with(needed, || {
            let mut ids = tokenizer.encode_pieces(pieces, add_special, true);
            // They grew by doubling, and are kept for as long as the request.
            ids.iter_mut().for_each(Vec::shrink_to_fit);
            ids
        });
        ids.map_err(|error| match error {
            TextError::TextTooLong { .. } => ApiError::invalid(param, error.to_string()),
            _ => ApiError::internal(error.to_string()),
        })
    }

    /// Refuses token ids the model does not have.
    pub fn check_ids(&self, param: &str, ids: &[u32]) -> ApiResult<()> {
        let vocab = self.served.engine.limits().vocab_size;
        match ids.iter().find(|id| **id >= vocab) {
            Some(id) => Err(ApiError::invalid(param, format!("token id {id} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    /// Reads a body and has something made of it on a text worker, where it waits while others are at it, as long as together they
    /// might take more than was planned for bodies that are being parsed.
    pub async fn on_body<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        work: impl FnOnce(ReadBody, &Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (head, body) = request.into_parts();
        let body = read_json(&head.headers, body, &self.bytes, &self.config).await?;
        let app = Arc::clone(self);
        let parsed = body.bytes.len() as u64 * PARSED_FACTOR;
        self.on_text_worker(move || app.parsing.with(parsed, || work(body, &app))).await
    }

    /// Runs work on text (parsing, templates, tokenizing) on a blocking thread, a bounded number at once. A panic in it
    /// is this request's error.
    pub async fn on_text_worker<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let permit = Arc::clone(&self.text_workers).acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::unavailable("the server is shutting down", 5))?;
        let done = tokio::task::spawn_blocking(move || {
            // Held until the work is over, also when the client has gone meanwhile.
            let _permit = permit;
            work()
        });
        match done.await {
            Ok(result) => result,
            Err(_) => {
                self.served.engine.metrics().panics.inc();
                Err(ApiError::internal("the request could not be prepared: its tokenizer or template panicked"))
            }
        }
    }

    /// Counts a panic on the way back to a client, and what that client is told.
    pub fn panicked(&self) -> ApiError {
        self.served.engine.metrics().panics.inc();
        ApiError::internal("the answer could not be written: the server panicked on it")
    }
}

impl ServerConfig {
    /// Refuses limits that contradict each other.
    pub(crate) fn check(&self) -> Result<(), ServeError> {
        // Room for a body grows by an eighth.
        let least = self.max_body_bytes.saturating_add(self.max_body_bytes / 8).saturating_add(ARRIVING_BYTES);
        if self.max_bytes_in_flight < least {
            return Err(ServeError::Config(format!(
                "max_bytes_in_flight is {}, but one body of max_body_bytes needs {least}",
                self.max_bytes_in_flight
            )));
        }
        if !(1..=MAX_PROMPTS as u32).contains(&self.max_inputs) {
            let n = self.max_inputs;
            return Err(ServeError::Config(format!("--max-inputs is {n}; 1 to {MAX_PROMPTS} are allowed")));
        }
        if self.silence_timeout < Duration::from_secs(1) {
            return Err(ServeError::Config("silence_timeout must be at least 1 s".into()));
        }
        Ok(())
    }
}

/// Every route.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::index))
        .route(page::FILES, get(page::file))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/embeddings", post(pooled::embeddings::handle))
        .route("/v1/rerank", post(pooled::rerank::handle))
        .route("/v1/score", post(pooled::score::handle))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/version", get(health::version))
        .route("/metrics", get(metrics::handle))
        .route("/v1/memory", get(memory::handle))
        .route("/openapi.json", get(openapi::handle))
        .route("/v1/status", get(status::handle))
        .route("/v1/requests/{id}", delete(running::cancel))
        .route("/v1/cache", get(cache::stats).delete(cache::clear))
        .route("/v1/cache/clear", post(cache::clear))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), door::around))
        .with_state(app)
}

async fn not_found(request: Request) -> ApiError {
    let message = format!("there is nothing at {}", quote(request.uri().path()));
    ApiError { close: true, code: Some("not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} is not allowed at {}", request.method(), quote(request.uri().path()));
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message);
    ApiError { close: true, code: Some("method_not_allowed"), ..error }
}
