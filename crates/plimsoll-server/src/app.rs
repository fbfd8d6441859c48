//! The state all handlers share, the routes, and what every answer gets whatever its route.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::FutureExt;
use plimsoll_grammar::Grammars;
use plimsoll_memory::faults::{self, Site};
use plimsoll_text::TextError;
use tokio::sync::{Semaphore, watch};

use crate::config::{Served, ServerConfig};
use crate::error::{ApiError, ApiResult, ServeError, quote};
use crate::ids::Ids;
use crate::limits::{ByteBudget, WorkBudget};
use crate::metrics::Metrics;
use crate::prompt::MAX_PROMPTS;
use crate::{chat, completions, form, health, memory, metrics, models, pooled, tokenize};

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
    /// Bytes of the longest vocabulary entry; bounds how much text can fit into the context.
    longest_token: u64,
    pub grammars: Arc<Grammars>,
    text_workers: Arc<Semaphore>,
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
        let grammars = form::grammars(&served, config.grammar_bytes);
        Ok(Arc::new(Self {
            metrics: Metrics::new(&served.engine, &bytes, &grammars),
            grammars,
            text_workers: Arc::new(Semaphore::new(config.text_workers.max(1) as usize)),
            tokenizing: WorkBudget::new(config.max_tokenizing_bytes),
            ids: Ids::default(),
            phase: watch::Sender::new(Phase::Serving),
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
    fn check_text(&self, param: &str, text: &str) -> ApiResult<()> {
        let context = u64::from(self.served.engine.limits().max_req_total_len);
        // Unicode normalization may shrink text to a third before it is tokenized.
        let most = context.saturating_mul(self.longest_token).saturating_mul(3);
        if text.len() as u64 > most {
            let message = format!(
                "the prompt has {} bytes and cannot fit into this server's maximum context length of {context} tokens",
                text.len()
            );
            return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) });
        }
        Ok(())
    }

    /// Tokenizes text of bounded length. Only on a text worker.
    pub fn encode(&self, param: &str, text: &str, add_special: bool) -> ApiResult<Vec<u32>> {
        self.check_text(param, text)?;
        faults::site(Site::Tokenizer);
        let tokenizer = &self.served.tokenizer;
        let needed = tokenizer.encode_bytes_max(text.len()) as u64;
        if needed > self.tokenizing.limit() {
            let message = format!(
                "tokenizing a text of {} bytes may take {needed} bytes, more than this server's limit of {}",
                text.len(),
                self.tokenizing.limit()
            );
            return Err(ApiError { code: Some("text_too_long"), ..ApiError::invalid(param, message) });
        }
        let ids = self.tokenizing.with(needed, || {
            let mut ids = tokenizer.encode(text, add_special, true);
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
    fn check(&self) -> Result<(), ServeError> {
        let least = self.max_body_bytes.saturating_mul(crate::config::BODY_FACTOR);
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
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
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
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), around))
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

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest `x-request-id` that is echoed.
const REQUEST_ID_BYTES: usize = 128;

/// Echoes or makes up the request id, and counts the answer.
async fn around(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID);
    let id = match given {
        Some(id) if id.len() > REQUEST_ID_BYTES || id.to_str().is_err() => {
            let message = format!("x-request-id must be at most {REQUEST_ID_BYTES} visible ASCII characters");
            return ApiError { close: true, ..ApiError::invalid("x-request-id", message) }.into_response();
        }
        Some(id) => id.clone(),
        None => HeaderValue::try_from(app.ids.request("req")).unwrap_or(HeaderValue::from_static("req")),
    };
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    // A panic while an answer is shaped costs this answer, not the connection and those behind it.
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let mut response = answer.unwrap_or_else(|_| app.panicked().into_response());
    app.metrics.answered(path.as_deref().unwrap_or("other"), response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
