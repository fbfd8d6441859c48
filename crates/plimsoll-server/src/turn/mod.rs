//! One turn of a conversation, whatever API asked for it: a prompt from messages and tools, rules for reading the reply, the form
//! it must have. Chat, Messages and Responses differ in how a body is taken apart and how the parts of a reply are
//! spelled; all between is here, so that a reply is the same whichever way it was asked for.

mod adapt;
pub(crate) mod conversation;
mod forced;
pub(crate) mod reading;
pub(crate) mod tools;

use std::sync::Arc;

use conversation::Conversation;
use plimsoll_text::Tokenizer;
use reading::Rules;

use crate::app::App;
use crate::error::ApiResult;
use crate::generation::Generation;
use crate::limits::Held;
use crate::logprobs::Spelling;
use crate::params::Common;
use crate::submit::{Draft, Prompt};

/// What a client asks of one turn.
pub(crate) struct Ask {
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
}

/// Most tokens that may be thought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// The field that asks for it.
    pub param: &'static str,
    pub tokens: u32,
}

/// A turn that is ready to be computed.
#[derive(Debug)]
pub(crate) struct Turn {
    pub draft: Draft,
    pub rules: Rules,
}

impl Ask {
    /// Renders and tokenizes. Runs on a text worker.
    pub fn prepare(self, app: &App) -> ApiResult<Turn> {
        let Self { conversation, common, .. } = self;
        let text = conversation.render(app)?;
        let ids = app.encode(conversation.param, &text, self.add_special)?;
        let formed = common.form.is_some();
        let rules = Rules::new(app, &conversation, &text, formed, self.include_reasoning, self.call_prefix);
        let grammar = forced::grammar_of(app, conversation.tools.as_ref(), &rules, common.form.as_ref(), self.budget)?;
        let draft = Draft {
            prompts: vec![Prompt { ids, echo: None }],
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            default_max_tokens: app.served.default_max_tokens,
            prompt_param: conversation.param,
            length_param: "max_tokens",
            kept_special_ids: rules.kept_special_ids(app),
            grammar,
            reading_bytes: rules.reading_bytes(),
            kept: None,
            fills_context: false,
            gathers: false,
            common,
        };
        Ok(Turn { draft, rules })
    }
}

/// What every piece of one answer repeats, and what was asked for.
pub(crate) struct Context {
    pub id: String,
    pub created: u64,
    pub tokenizer: Arc<Tokenizer>,
    pub draft: Draft,
    pub rules: Rules,
    pub app: Arc<App>,
}

impl Context {
    pub fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: &self.tokenizer, as_ids: self.draft.common.tokens_as_ids }
    }
}

/// A turn that is being computed.
pub(crate) struct Begun {
    pub context: Context,
    pub generation: Generation,
    /// The share of the byte budget that the answer may need.
    pub held: Option<Held>,
    pub choices: usize,
}

/// Hands a turn to the engine. `id` is the one the client will see.
pub(crate) fn begin(app: &Arc<App>, id: String, api: &'static str, turn: Turn) -> ApiResult<Begun> {
    let Turn { draft, rules } = turn;
    let mut started = draft.start(app, &id)?;
    let choices = started.readers.len();
    let generation = Generation::new(app, &id, api, &draft, &mut started);
    let tokenizer = Arc::clone(&app.served.tokenizer);
    let created = crate::models::now_s();
    let context = Context { id, created, tokenizer, draft, rules, app: Arc::clone(app) };
    Ok(Begun { context, generation, held: started.held, choices })
}
