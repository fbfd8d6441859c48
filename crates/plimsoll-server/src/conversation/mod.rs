//! One turn of a conversation, whatever API asked for it: a prompt from messages and tools, rules for reading the reply, the form
//! it must have. Chat, Messages and Responses differ in how a body is taken apart and how the parts of a reply are
//! spelled; all between is here, so that a reply is the same whichever way it was asked for.

pub(crate) mod active;
mod adapt;
pub(crate) mod choices;
pub(crate) mod content;
mod forced;
pub(crate) mod form;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod params;
pub(crate) mod price;
pub(crate) mod prompt;
pub(crate) mod reading;
pub(crate) mod stream;
pub(crate) mod submission;
pub(crate) mod submit;
pub(crate) mod tools;

use std::sync::Arc;

use messages::{Conversation, Prompt};
use plimsoll_text::Tokenizer;
use reading::Rules;

use crate::conversation::active::ActiveRequest;
use crate::conversation::logprobs::Spelling;
use crate::conversation::params::Common;
use crate::conversation::submission::Submission;
use crate::http::budget::Held;
use crate::http::error::ApiResult;
use crate::media::{self, Measured};
use crate::state::model::ModelState;

/// What a client asks of one turn.
pub(crate) struct ChatRequest {
    pub conversation: Conversation,
    pub common: Common,
    /// Alternatives per generated token, when asked for.
    pub logprobs: Option<u32>,
    /// Let the tokenizer add its own special tokens; templates bring theirs.
    pub add_special: bool,
    pub include_reasoning: bool,
    pub budget: Option<Budget>,
    /// How ids of tool calls begin in this API.
    pub call_prefix: &'static str,
    /// The field that holds the number of tokens to generate, for errors.
    pub length_param: &'static str,
    /// As in [`Submission`].
    pub fills_context: bool,
    /// As in [`Submission`].
    pub gathers: bool,
}

/// Most tokens that may be thought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// The field that asks for it.
    pub param: &'static str,
    pub tokens: u32,
}

/// A turn that is ready to be computed, when its media are decoded.
#[derive(Debug)]
pub(crate) struct PreparedChat {
    pub draft: Submission,
    pub rules: Rules,
    pub media: Vec<Measured>,
    /// Their files' share of the byte budget.
    files: Option<Held>,
}

impl ChatRequest {
    /// Heap bytes of it, about.
    pub fn bytes(&self) -> u64 {
        self.conversation.bytes() + self.common.bytes()
    }

    /// Gets what the conversation names elsewhere, then renders and tokenizes. `held` is what the body has become so far. When the
    /// prompt is known to fit, `after` makes what is to be kept beside it, and says how many bytes that takes.
    pub async fn turn<T: Send + 'static>(
        mut self,
        state: &Arc<ModelState>,
        mut held: Held,
        after: impl FnOnce() -> (u64, T) + Send + 'static,
    ) -> ApiResult<(PreparedChat, T)> {
        self.conversation.fetch(state, &mut held).await?;
        let own = Arc::clone(state);
        let work = move || {
            let mut turn = self.prepare(&own)?;
            let (beside, more) = after();
            let files = turn.media.iter().map(Measured::file_bytes).sum();
            held.become_bytes(turn.draft.bytes() + beside + files)?;
            turn.files = Some(held.split(files));
            turn.draft.kept = Some(held);
            Ok((turn, more))
        };
        state.server.on_text_worker(work).await
    }

    /// Renders and tokenizes. Runs on a text worker.
    pub(crate) fn prepare(self, state: &ModelState) -> ApiResult<PreparedChat> {
        let Self { mut conversation, mut common, .. } = self;
        let Prompt { text, ids, media } = conversation.prompt(state, self.add_special)?;
        // Only the grammar, which is made below, needs it.
        let form = common.form.take();
        let (formed, stops) = (form.is_some(), !common.stop.is_empty());
        let rules = Rules::new(state, &conversation, &text, formed, stops, self.include_reasoning, self.call_prefix);
        let grammar = forced::grammar_of(state, conversation.tools.as_ref(), &rules, form.as_ref(), self.budget)?;
        let draft = Submission {
            prompts: vec![submission::Prompt { ids, echo: None, around: (0, 0) }],
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            default_max_tokens: state.served.default_max_tokens,
            prompt_param: conversation.param,
            length_param: self.length_param,
            kept_special_ids: rules.kept_special_ids(state),
            grammar,
            reading_bytes: rules.reading_bytes(),
            kept: None,
            media: Vec::new(),
            fills_context: self.fills_context,
            gathers: self.gathers,
            common,
        };
        // Before anything is decoded.
        draft.max_tokens(state, &draft.prompts[0])?;
        Ok(PreparedChat { draft, rules, media, files: None })
    }
}

/// What every piece of one answer repeats, and what was asked for.
pub(crate) struct ReplyContext {
    pub id: String,
    pub created: u64,
    pub tokenizer: Arc<Tokenizer>,
    pub draft: Submission,
    pub rules: Rules,
    pub state: Arc<ModelState>,
}

impl ReplyContext {
    pub fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: &self.tokenizer, as_ids: self.draft.common.tokens_as_ids }
    }
}

/// A turn that is being computed.
pub(crate) struct StartedChat {
    pub context: ReplyContext,
    pub active_request: ActiveRequest,
    /// The share of the byte budget that the answer may need.
    pub held: Option<Held>,
    pub choices: usize,
}

/// Decodes a turn's media and hands it to the engine. `id` is the one the client will see.
pub(crate) async fn begin(
    state: &Arc<ModelState>,
    id: String,
    api: &'static str,
    turn: PreparedChat,
) -> ApiResult<StartedChat> {
    let PreparedChat { mut draft, rules, media, files } = turn;
    draft.media = media::prepare(state, media, files).await?;
    let mut started = draft.start(state, &id)?;
    let choices = started.readers.len();
    let active_request = ActiveRequest::new(state, &id, api, &draft, &mut started);
    let tokenizer = Arc::clone(&state.served.tokenizer);
    let created = crate::http::ids::now_s();
    let context = ReplyContext { id, created, tokenizer, draft, rules, state: Arc::clone(state) };
    Ok(StartedChat { context, active_request, held: started.held, choices })
}
