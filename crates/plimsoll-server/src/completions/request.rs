//! The body of a completion request, field by field.

use crate::conversation::infill::{self, Gap};
use crate::conversation::params::Common;
use crate::conversation::prompt_input::PromptInput;
use crate::conversation::submission::{Submission, TokenizedPrompt};
use crate::http::body::ReadBody;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// Generated tokens if the client names no number, as in OpenAI's API and vLLM.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Parses and tokenizes. `body.held` grows by the texts of token ids that are echoed. Runs on a text worker.
pub(crate) fn parse(body: &mut ReadBody, state: &ModelState) -> ApiResult<Submission> {
    let ReadBody { bytes, held } = body;
    let mut fields = Fields::of_body(bytes)?;
    let mut common = Common::take(&mut fields, state)?;
    let input = fields.take::<PromptInput>("prompt")?;
    let input = input.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let echo = fields.take("echo")?.unwrap_or(false);
    let logprobs = fields.take::<u32>("logprobs")?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(true);
    let suffix = fields.take::<String>("suffix")?.filter(|suffix| !suffix.is_empty());
    fields.never(&["prompt_embeds"], "this server takes text or token ids")?;
    fields.finish()?;
    check(&common, echo)?;
    if let Some(suffix) = &suffix {
        check_suffix(&common, echo)?;
        common.stop_token_ids.extend(&infill::tokens(state, "suffix")?.ends);
        let gap = Gap { suffix, suffix_param: "suffix", ..Gap::default() };
        return submission(common, gaps(input, state, &gap)?, logprobs, None, state);
    }
    // An echo with log-probabilities reports the prompt's too; an echo alone computes the prompt and reports nothing.
    let echoed = echo && (logprobs.is_some() || common.max_tokens == Some(0));
    let prompt_logprobs = common.prompt_logprobs.or_else(|| echoed.then(|| logprobs.unwrap_or(0)));
    let prompts = prompts(input, state, add_special, echo.then_some(held))?;
    submission(common, prompts, logprobs, prompt_logprobs, state)
}

fn submission(
    common: Common,
    prompts: Vec<TokenizedPrompt>,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    state: &ModelState,
) -> ApiResult<Submission> {
    Ok(Submission {
        logprobs,
        prompt_logprobs,
        default_max_tokens: Some(state.served.default_max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        ..Submission::of_prompts(common, prompts, state)?
    })
}

/// Refuses to echo or report the prompt with `suffix`: this prompt has no plain text that could be repeated.
fn check_suffix(common: &Common, echo: bool) -> ApiResult<()> {
    for (name, given) in [("echo", echo), ("prompt_logprobs", common.prompt_logprobs.is_some())] {
        if given {
            return Err(ApiError::unsupported(name, format!("{name} is not supported with suffix")));
        }
    }
    Ok(())
}

/// Makes prompts that ask for the text between each of the inputs and the suffix.
fn gaps(input: PromptInput, state: &ModelState, gap: &Gap<'_>) -> ApiResult<Vec<TokenizedPrompt>> {
    check_count(input.count(), state)?;
    let prefixes: Vec<Vec<u32>> = match input {
        PromptInput::Texts(texts) => {
            texts.iter().map(|text| state.encode_plain("prompt", &[text])).collect::<ApiResult<_>>()?
        }
        PromptInput::Ids(lists) => {
            lists.iter().try_for_each(|ids| state.check_ids("prompt", ids))?;
            lists
        }
    };
    let frame = gap.frame(state)?;
    let prompt = |prefix: &Vec<u32>| Ok(TokenizedPrompt { ids: frame.ids(state, prefix)?, echo: None, around: (0, 0) });
    prefixes.iter().map(prompt).collect()
}

fn check_count(count: usize, state: &ModelState) -> ApiResult<()> {
    let limit = state.choices_max() as usize;
    if count > limit {
        return Err(ApiError::invalid("prompt", format!("{count} prompts, more than the limit of {limit}")));
    }
    Ok(())
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

/// Tokenizes the prompts. `echo`: prompts keep their text, and this share of the byte budget grows by it.
fn prompts(
    input: PromptInput,
    state: &ModelState,
    add_special: bool,
    mut echo: Option<&mut Held>,
) -> ApiResult<Vec<TokenizedPrompt>> {
    check_count(input.count(), state)?;
    match input {
        PromptInput::Texts(texts) => {
            let prompt = |text: String| {
                let ids = state.encode("prompt", &[&text], add_special)?;
                state.check_length("prompt", ids.len())?;
                let around = if add_special { state.served.tokenizer.around() } else { (0, 0) };
                Ok(TokenizedPrompt { ids, echo: echo.is_some().then_some(text), around })
            };
            texts.into_iter().map(prompt).collect()
        }
        PromptInput::Ids(lists) => {
            let prompt = |ids: Vec<u32>| {
                state.check_length("prompt", ids.len())?;
                state.check_ids("prompt", &ids)?;
                let echo = echo.as_mut().map(|held| state.decode("prompt", &ids, held)).transpose()?;
                Ok(TokenizedPrompt { ids, echo, around: (0, 0) })
            };
            lists.into_iter().map(prompt).collect()
        }
    }
}
