//! `POST /tokenize` and `POST /detokenize`, in vLLM's form.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::{Serialize, Serializer};

use crate::chat::messages::conversation;
use crate::conversation::logprobs::Spelling;
use crate::conversation::prompt::Conversation;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::{json, json_bytes, json_sized};
use crate::state::model::ModelState;

#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [u32],
    token_strs: Option<Texts<'a>>,
}

/// The text of each token, made one at a time.
struct Texts<'a> {
    spelling: Spelling<'a>,
    tokens: &'a [u32],
}

impl Texts<'_> {
    fn all(&self) -> impl Iterator<Item = String> {
        self.tokens.iter().map(|id| self.spelling.text(*id))
    }
}

impl Serialize for Texts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.all())
    }
}

#[derive(Serialize)]
struct Detokenized {
    prompt: String,
}

/// A description of the tokenizer, for clients that use it remotely. A token that the model does not have is null.
#[derive(Serialize)]
struct Info<'a> {
    tokenizer_class: &'static str,
    bos_token: Option<&'a str>,
    eos_token: Option<&'a str>,
    pad_token: Option<&'a str>,
    vocab_size: usize,
    model_max_length: u32,
    chat_template: Option<&'a str>,
}

/// `GET /tokenizer_info`, as in vLLM: with it, `lm-eval` tokenizes here and sends ids.
pub(crate) async fn info(State(state): State<Arc<ModelState>>) -> Response {
    let tokenizer = &state.served.tokenizer;
    let name = |id: Option<u32>| id.map(|id| tokenizer.token_name(id));
    let info = Info {
        tokenizer_class: "PreTrainedTokenizerFast",
        bos_token: name(tokenizer.bos()),
        eos_token: name(tokenizer.eos().first().copied()),
        pad_token: None,
        vocab_size: tokenizer.vocab_size(),
        model_max_length: state.served.engine.limits().max_req_total_len,
        chat_template: state.served.template.as_ref().map(|template| template.source()),
    };
    json(&info, None)
}

/// Bytes of an answer's JSON besides ids and texts.
const ANSWER_BYTES: usize = 128;

/// The most bytes of an id as JSON.
const ID_BYTES: usize = "4294967295,".len();

/// Converts text or a conversation to ids.
pub(crate) async fn tokenize(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let (request, held) = state
        .on_body(request, |body, state| {
            let mut fields = Fields::of_body(&body.bytes)?;
            check_model(&mut fields, state)?;
            let with_texts = fields.take("return_token_strs")?.unwrap_or(false);
            let add_special = fields.take::<bool>("add_special_tokens")?;
            let input = Input::take(&mut fields, state)?;
            fields.finish()?;
            let held = body.keep(input.bytes())?;
            Ok((TokenizeRequest { input, with_texts, add_special }, held))
        })
        .await?;
    request.answer(&state, held).await
}

/// A prompt: a text, or a conversation.
pub(crate) enum Input {
    Text(String),
    Conversation(Box<Conversation>),
}

struct TokenizeRequest {
    input: Input,
    with_texts: bool,
    add_special: Option<bool>,
}

impl Input {
    /// Takes `prompt`, or else the fields of a conversation.
    pub fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        Ok(match fields.take::<String>("prompt")? {
            Some(text) => Self::Text(text),
            None => Self::Conversation(Box::new(conversation(fields, state)?)),
        })
    }

    pub fn has_media(&self) -> bool {
        matches!(self, Self::Conversation(conversation) if !conversation.media.is_empty())
    }

    /// Fetches the media and documents of a conversation; `held` grows by their bytes.
    pub async fn fetch(&mut self, state: &Arc<ModelState>, held: &mut Held) -> ApiResult<()> {
        match self {
            Self::Text(_) => Ok(()),
            Self::Conversation(conversation) => conversation.fetch(state, held).await,
        }
    }

    /// Returns the token ids, and the field that they come from. Runs on a text worker.
    pub fn ids(mut self, state: &ModelState, add_special: Option<bool>) -> ApiResult<(&'static str, Vec<u32>)> {
        Ok(match &mut self {
            Self::Text(text) => ("prompt", state.encode("prompt", &[text], add_special.unwrap_or(true))?),
            Self::Conversation(conversation) => {
                ("messages", conversation.prompt(state, add_special.unwrap_or(false))?.ids)
            }
        })
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Text(text) => text.capacity() as u64,
            Self::Conversation(conversation) => conversation.bytes(),
        }
    }
}

impl TokenizeRequest {
    async fn answer(self, state: &Arc<ModelState>, mut held: Held) -> ApiResult<Response> {
        let Self { mut input, with_texts, add_special } = self;
        input.fetch(state, &mut held).await?;
        let own = Arc::clone(state);
        state
            .server
            .on_text_worker(move || {
                let state = &*own;
                let (param, tokens) = input.ids(state, add_special)?;
                let spelling = Spelling { tokenizer: &state.served.tokenizer, as_ids: false };
                let token_strs = with_texts.then_some(Texts { spelling, tokens: &tokens });
                let texts = token_strs.iter().flat_map(Texts::all).map(|text| json_bytes(&text)).sum::<usize>();
                let bytes = ANSWER_BYTES + tokens.len() * ID_BYTES + texts;
                let all = (size_of_val(&*tokens) + bytes) as u64;
                state.server.bytes.ever_holds(param, all)?;
                held.become_bytes(all)?;
                let max_model_len = state.served.engine.limits().max_req_total_len;
                let answer = Tokenized { count: tokens.len(), max_model_len, tokens: &tokens, token_strs };
                Ok(json_sized(&answer, bytes, held))
            })
            .await
    }
}

/// Converts ids to text.
pub(crate) async fn detokenize(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    state
        .on_body(request, |body, state| {
            let mut fields = Fields::of_body(&body.bytes)?;
            check_model(&mut fields, state)?;
            let tokens = fields.required::<Vec<u32>>("tokens")?;
            fields.finish()?;
            let limit = state.served.engine.limits().max_req_total_len;
            if tokens.len() > limit as usize {
                let message = format!("tokens has {} ids, more than this server's context of {limit}", tokens.len());
                return Err(ApiError::invalid("tokens", message));
            }
            state.check_ids("tokens", &tokens)?;
            let mut held = body.keep(size_of_val(&*tokens) as u64)?;
            let prompt = state.decode("tokens", &tokens, &mut held)?;
            let bytes = ANSWER_BYTES + json_bytes(&prompt);
            let all = (prompt.capacity() + bytes) as u64;
            state.server.bytes.ever_holds("tokens", all)?;
            held.become_bytes(all)?;
            Ok(json_sized(&Detokenized { prompt }, bytes, held))
        })
        .await
}

pub(crate) fn check_model(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<()> {
    fields.take::<String>("model")?.map_or(Ok(()), |name| state.check_model(&name))
}
