//! The body of a completion request, field by field.

use crate::conversation::params::Common;
use crate::conversation::prompt::PromptInput;
use crate::conversation::submission::{Prompt, Submission};
use crate::http::body::ReadBody;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// Generated tokens when the client names no number, as OpenAI and vLLM have it.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// What was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub draft: Submission,
    pub echo: bool,
}

/// Parses and tokenizes; what is made of a body of ids is held beside it. Runs on a text worker.
pub(crate) fn parse(body: &mut ReadBody, state: &ModelState) -> ApiResult<Asked> {
    let ReadBody { bytes, held } = body;
    let mut fields = Fields::of_body(bytes)?;
    let mut common = Common::take(&mut fields, state)?;
    let input = fields.take::<PromptInput>("prompt")?;
    let input = input.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let echo = fields.take("echo")?.unwrap_or(false);
    let logprobs = fields.take::<u32>("logprobs")?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(true);
    fields.only("suffix", &["\"\""])?;
    fields.never(&["prompt_embeds"], "this server takes text or token ids")?;
    fields.finish()?;
    check(&common, echo)?;
    // An echo with log-probabilities reports the prompt's too; an echo alone computes the prompt and reports nothing.
    let echoed = echo && (logprobs.is_some() || common.max_tokens == Some(0));
    let prompt_logprobs = common.prompt_logprobs.or_else(|| echoed.then(|| logprobs.unwrap_or(0)));
    let grammar = common.form.take().map(|form| form.grammar(&state.grammars, "", None)).transpose()?;
    let draft = Submission {
        prompts: prompts(input, state, add_special, echo.then_some(held))?,
        logprobs,
        prompt_logprobs,
        default_max_tokens: Some(state.served.default_max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        prompt_param: "prompt",
        length_param: "max_tokens",
        kept_special_ids: Vec::new(),
        grammar,
        reading_bytes: 0,
        kept: None,
        media: Vec::new(),
        fills_context: false,
        gathers: false,
        common,
    };
    Ok(Asked { draft, echo })
}

fn check(common: &Common, echo: bool) -> ApiResult<()> {
    if common.max_tokens == Some(0) && !echo && common.prompt_logprobs.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1 unless echo is true"));
    }
    if common.prompt_logprobs.is_some() && echo {
        let message = "give either prompt_logprobs or echo with logprobs: both report the prompt";
        return Err(ApiError::unsupported("prompt_logprobs", message));
    }
    Ok(())
}

/// Those that are to be echoed with their text, for which `echo` holds what it takes.
fn prompts(
    input: PromptInput,
    state: &ModelState,
    add_special: bool,
    mut echo: Option<&mut Held>,
) -> ApiResult<Vec<Prompt>> {
    let (count, limit) = (input.count(), state.max_choices() as usize);
    if count > limit {
        return Err(ApiError::invalid("prompt", format!("{count} prompts, more than the limit of {limit}")));
    }
    match input {
        PromptInput::Texts(texts) => {
            let prompt = |text: String| {
                let ids = state.encode("prompt", &[&text], add_special)?;
                state.check_length("prompt", ids.len())?;
                let around = if add_special { state.served.tokenizer.around() } else { (0, 0) };
                Ok(Prompt { ids, echo: echo.is_some().then_some(text), around })
            };
            texts.into_iter().map(prompt).collect()
        }
        PromptInput::Ids(lists) => {
            let prompt = |ids: Vec<u32>| {
                state.check_length("prompt", ids.len())?;
                state.check_ids("prompt", &ids)?;
                let echo = echo.as_mut().map(|held| state.decode("prompt", &ids, held)).transpose()?;
                Ok(Prompt { ids, echo, around: (0, 0) })
            };
            lists.into_iter().map(prompt).collect()
        }
    }
}
