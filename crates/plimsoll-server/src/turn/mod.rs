//! One turn of a conversation, whatever API asked for it: a prompt from messages and tools, rules for reading the reply, the form
//! it must have. Chat, Messages and Responses differ in how a body is taken apart and how the parts of a reply are
//! spelled; all between is here, so that a reply is the same whichever way it was asked for.

mod adapt;
pub(crate) mod content;
pub(crate) mod conversation;
mod forced;
pub(crate) mod reading;
pub(crate) mod tools;

use std::sync::Arc;

use conversation::{Conversation, Prompt};
use plimsoll_text::Tokenizer;
use reading::Rules;

use crate::app::App;
use crate::error::ApiResult;
use crate::generation::Generation;
use crate::limits::Held;
use crate::logprobs::Spelling;
use crate::media::{self, Measured};
use crate::params::Common;
use crate::submit::{self, Draft};

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
    /// The field that holds the number of tokens to generate, for errors.
    pub length_param: &'static str,
    /// As in [`Draft`].
    pub fills_context: bool,
    /// As in [`Draft`].
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
pub(crate) struct Turn {
    pub draft: Draft,
    pub rules: Rules,
    pub media: Vec<Measured>,
    /// Their files' share of the byte budget.
    files: Option<Held>,
}

impl Ask {
    /// Heap bytes of it, about.
    pub fn bytes(&self) -> u64 {
        self.conversation.bytes() + self.common.bytes()
    }

    /// Gets what the conversation names elsewhere, then renders and tokenizes. `held` is what the body has become so far. When the
    /// prompt is known to fit, `after` makes what is to be kept beside it, and says how many bytes that takes.
    pub async fn turn<T: Send + 'static>(
        mut self,
        app: &Arc<App>,
        mut held: Held,
        after: impl FnOnce() -> (u64, T) + Send + 'static,
    ) -> ApiResult<(Turn, T)> {
        self.conversation.fetch(app, &mut held).await?;
        let own = Arc::clone(app);
        let work = move || {
            let mut turn = self.prepare(&own)?;
            let (beside, more) = after();
            let files = turn.media.iter().map(Measured::file_bytes).sum();
            held.become_bytes(turn.draft.bytes() + beside + files)?;
            turn.files = Some(held.split(files));
            turn.draft.kept = Some(held);
            Ok((turn, more))
        };
        app.on_text_worker(work).await
    }

    /// Renders and tokenizes. Runs on a text worker.
    pub(crate) fn prepare(self, app: &App) -> ApiResult<Turn> {
        let Self { mut conversation, mut common, .. } = self;
        let Prompt { text, ids, media } = conversation.prompt(app, self.add_special)?;
        // Only the grammar, which is made below, needs it.
        let form = common.form.take();
        let (formed, stops) = (form.is_some(), !common.stop.is_empty());
        let rules = Rules::new(app, &conversation, &text, formed, stops, self.include_reasoning, self.call_prefix);
        let grammar = forced::grammar_of(app, conversation.tools.as_ref(), &rules, form.as_ref(), self.budget)?;
        let draft = Draft {
            prompts: vec![submit::Prompt { ids, echo: None, around: (0, 0) }],
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            default_max_tokens: app.served.default_max_tokens,
            prompt_param: conversation.param,
            length_param: self.length_param,
            kept_special_ids: rules.kept_special_ids(app),
            grammar,
            reading_bytes: rules.reading_bytes(),
            kept: None,
            media: Vec::new(),
            fills_context: self.fills_context,
            gathers: self.gathers,
            common,
        };
        // Before anything is decoded.
        draft.max_tokens(app, &draft.prompts[0])?;
        Ok(Turn { draft, rules, media, files: None })
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

/// Decodes a turn's media and hands it to the engine. `id` is the one the client will see.
pub(crate) async fn begin(app: &Arc<App>, id: String, api: &'static str, turn: Turn) -> ApiResult<Begun> {
    let Turn { mut draft, rules, media, files } = turn;
    draft.media = media::prepare(app, media, files).await?;
    let mut started = draft.start(app, &id)?;
    let choices = started.readers.len();
    let generation = Generation::new(app, &id, api, &draft, &mut started);
    let tokenizer = Arc::clone(&app.served.tokenizer);
    let created = crate::models::now_s();
    let context = Context { id, created, tokenizer, draft, rules, app: Arc::clone(app) };
    Ok(Begun { context, generation, held: started.held, choices })
}
