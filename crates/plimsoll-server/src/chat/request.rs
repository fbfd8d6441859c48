//! The body of a chat request, field by field.

use super::forced::grammar_of;
use super::messages::Conversation;
use super::reading::Rules;
use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::params::Common;
use crate::submit::{Draft, Prompt};

/// What was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub draft: Draft,
    pub rules: Rules,
}

/// Parses, renders and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], app: &App) -> ApiResult<Asked> {
    let mut fields = Fields::of_body(body)?;
    let common = Common::take(&mut fields, app)?;
    let logprobs = logprobs(&mut fields)?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(false);
    let conversation = Conversation::take(&mut fields)?;
    fields.only("echo", &["false"])?;
    fields.only("modalities", &["[\"text\"]"])?;
    fields.only("verbosity", &["\"medium\""])?;
    let why = "this server serves text with the served model's own means";
    fields.never(&["audio", "prediction", "web_search_options", "mm_processor_kwargs", "media_io_kwargs"], why)?;
    let include_reasoning = fields.take("include_reasoning")?.unwrap_or(true);
    let budget = fields.take::<u32>("thinking_token_budget")?;
    fields.finish()?;
    let text = conversation.render(app)?;
    let ids = app.encode("messages", &text, add_special)?;
    let rules = Rules::new(app, &conversation, &text, include_reasoning);
    let grammar = grammar_of(app, conversation.tools.as_ref(), &rules, common.form.as_ref(), budget)?;
    let draft = Draft {
        prompts: vec![Prompt { ids, echo: None }],
        logprobs,
        prompt_logprobs: common.prompt_logprobs,
        default_max_tokens: app.served.default_max_tokens,
        prompt_param: "messages",
        kept_special_ids: rules.kept_special_ids(app),
        grammar,
        reading_bytes: rules.reading_bytes(),
        kept: None,
        common,
    };
    Ok(Asked { draft, rules })
}

fn logprobs(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.take::<u32>("top_logprobs")?;
    match (wanted, top) {
        (false, Some(n)) if n > 0 => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true"))
        }
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, _) => Ok(None),
    }
}
