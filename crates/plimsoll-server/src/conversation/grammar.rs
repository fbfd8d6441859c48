//! The grammar of a reply: required calls, structured output, a limit of reasoning.

use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CallStyle, CallableTool, ReasoningRules, Source, ToolCalls};
use plimsoll_reply::{ReasoningFormat, Start, ToolFormat};
use serde_json::{Value, json};

use super::ReasoningBudget;
use super::reply_reader::ReplyRules;
use super::tools::{Custom, ToolChoice, ToolUse, forced_format};
use crate::conversation::output_format::{OutputFormat, grammar};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::state::model::ModelState;

/// The text before an answer in harmony.
const HARMONY_FINAL: &str = "<|channel|>final<|message|>";

/// Makes the grammar of a reply. None if the request has no `response_format`, no required or strict tool and no reasoning budget. Runs on
/// a text worker.
pub(crate) fn grammar_of(
    state: &ModelState,
    tools: Option<&ToolUse>,
    rules: &ReplyRules,
    output_format: Option<&OutputFormat>,
    budget: Option<ReasoningBudget>,
) -> ApiResult<Option<Arc<dyn Grammar>>> {
    let thinking = thinking(rules, budget)?;
    let budget = budget.filter(|_| thinking.is_some());
    let harmony = rules.spec.reasoning == Some(ReasoningFormat::Harmony);
    // If calls are optional and text is free, the grammar covers only the calls of strict tools.
    let bound = tools
        .filter(|tools| tools.choice != ToolChoice::Auto || (output_format.is_some() && rules.spec.tools.is_some()));
    let calls = bound.map(|tools| calls(state, tools, |_| true)).transpose()?;
    let strict = tools.filter(|tools| calls.is_none() && tools.strict());
    let strict = strict.map(|tools| within_text(state, tools)).transpose()?.flatten();
    let free = tools.is_none_or(|tools| tools.choice == ToolChoice::Auto);
    let answering = rules.spec.start == Start::Answer;
    let prefix = if harmony && !answering { HARMONY_FINAL } else { "" };
    if harmony && answering && !free {
        let message = "tool_choice asks for a call, which this model cannot make in an answer that has begun";
        return Err(ApiError::unsupported("tool_choice", message));
    }
    let (param, source, prefix) = match (calls, output_format) {
        // A call is required, so there is no text for the output format.
        (Some(calls), _) if !free => ("tools", Some(Source::Calls(calls)), ""),
        (Some(calls), Some(output_format)) => {
            (output_format.param, Some(Source::CallsOr(calls, Box::new(output_format.source.clone()))), prefix)
        }
        (Some(calls), None) => ("tools", Some(Source::Calls(calls)), ""),
        (None, Some(output_format)) => (output_format.param, Some(output_format.source.clone()), prefix),
        (None, None) => match (strict, budget) {
            (Some(source), _) => ("tools", Some(source), ""),
            (None, Some(budget)) => (budget.param, None, ""),
            (None, None) => return Ok(None),
        },
    };
    grammar(&state.grammars, param, source.as_ref(), prefix, thinking).map(Some)
}

fn thinking(rules: &ReplyRules, budget: Option<ReasoningBudget>) -> ApiResult<Option<ReasoningRules>> {
    let tags = rules.spec.reasoning.and_then(|format| format.open().zip(format.close()));
    match (tags, budget) {
        _ if rules.spec.start == Start::Answer => Ok(None),
        (Some((open, close)), budget) => {
            let budget = budget.map(|budget| budget.tokens);
            Ok(Some(ReasoningRules { opened: rules.spec.start == Start::Reasoning, open, close, budget }))
        }
        (None, Some(ReasoningBudget { param, .. })) if rules.spec.reasoning.is_some() => {
            let message = format!("{param} has no effect: the served model's reasoning has no tags");
            Err(ApiError::unsupported(param, message))
        }
        // A model without reasoning meets any budget.
        (None, _) => Ok(None),
    }
}

/// Returns the grammar of text with calls in it. Arguments of strict tools match their schemas; arguments of other tools are JSON. None if
/// the format has no such grammar: many clients mark all tools as strict, so this is not an error.
fn within_text(state: &ModelState, tools: &ToolUse) -> ApiResult<Option<Source>> {
    let format = state.served.formats.tools;
    if format.filter(|format| forced_format(*format) == *format && is_held_in_text(*format)).is_none() {
        // A grammar from the client must be enforced or refused.
        return match tools.custom.iter().find(|custom| custom.input.is_some()) {
            None => Ok(None),
            Some(Custom { name, .. }) => {
                let message = format!(
                    "the tool `{}` has a grammar, which this model's format of calls can hold only if a call is asked for: set tool_choice to required or to the tool",
                    quote(name)
                );
                Err(ApiError::unsupported("tools", message))
            }
        };
    }
    calls(state, tools, |function| function["strict"] == true).map(|calls| Some(Source::TextWithCalls(calls)))
}

/// Returns whether a grammar can cover the calls of this format within text.
fn is_held_in_text(format: ToolFormat) -> bool {
    match format {
        // Several markers begin a call, or none does.
        ToolFormat::Llama3 | ToolFormat::Granite | ToolFormat::Phi4Mini => false,
        // Calls are outside of the text.
        ToolFormat::Harmony => false,
        // The model numbers its calls, and a call style has no numbers.
        ToolFormat::KimiK2 => false,
        _ => true,
    }
}

/// Returns the possible calls. `kept`: whether a function's arguments must match its schema.
fn calls(state: &ModelState, tools: &ToolUse, kept: impl Fn(&Value) -> bool) -> ApiResult<ToolCalls> {
    let named = match &tools.choice {
        ToolChoice::Auto | ToolChoice::Required => None,
        ToolChoice::Named(name) => Some(name.as_str()),
    };
    let Some(format) = state.served.formats.tools.map(forced_format) else {
        let message = "tool_choice asks for a call, but this server reads none (--tool-call-parser none)";
        return Err(ApiError::unsupported("tool_choice", message));
    };
    let call = |tool: &Value| {
        let function = &tool["function"];
        let name = function["name"].as_str().filter(|name| named.is_none_or(|wanted| wanted == *name))?;
        let custom = tools.custom.iter().find(|custom| custom.name == name);
        let parameters = if custom.is_some() || kept(function) { parameters(function) } else { Value::Null };
        let strict = custom.is_some() || function["strict"] == true;
        Some(CallableTool {
            name: name.to_owned(),
            parameters,
            strict,
            input: custom.and_then(|custom| custom.input.clone()),
        })
    };
    let list = tools.list.as_array().into_iter().flatten().filter_map(call).collect();
    let several = named.is_none() && tools.parallel;
    let arguments_marker = state.served.tokenizer.token_to_id("[ARGS]").is_some();
    Ok(ToolCalls { tools: list, several, style: style(format, arguments_marker) })
}

/// Returns the schema of a function's arguments. A function without `parameters` takes none, as OpenAI defines it.
fn parameters(function: &Value) -> Value {
    match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        parameters => parameters.clone(),
    }
}

fn style(format: ToolFormat, arguments_marker: bool) -> CallStyle {
    let plain = CallStyle { marker: "", open: "", before: "", between: "", after: "", next: "", close: "" };
    match format {
        ToolFormat::Llama3 => {
            CallStyle { before: "{\"name\": \"", between: "\", \"parameters\": ", after: "}", next: "; ", ..plain }
        }
        ToolFormat::Mistral if arguments_marker => {
            CallStyle { marker: "[TOOL_CALLS]", before: "[TOOL_CALLS]", between: "[ARGS]", ..plain }
        }
        ToolFormat::Mistral => list("[TOOL_CALLS]", "[TOOL_CALLS][", "]"),
        ToolFormat::Nemotron => list("<TOOLCALL>", "<TOOLCALL>[", "]</TOOLCALL>"),
        ToolFormat::Granite => list("<|tool_call|>", "<|tool_call|>[", "]"),
        ToolFormat::Phi4Mini => list("<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"),
        ToolFormat::Hunyuan => list("<tool_calls>", "<tool_calls>[", "]</tool_calls>"),
        // Without a number, the server gives the call its id.
        ToolFormat::KimiK2 => CallStyle {
            marker: "<|tool_calls_section_begin|>",
            open: "<|tool_calls_section_begin|>",
            before: "<|tool_call_begin|>functions.",
            between: "<|tool_call_argument_begin|>",
            after: "<|tool_call_end|>",
            close: "<|tool_calls_section_end|>",
            ..plain
        },
        ToolFormat::DeepSeek => CallStyle {
            marker: "<｜tool▁calls▁begin｜>",
            open: "<｜tool▁calls▁begin｜>",
            before: "<｜tool▁call▁begin｜>",
            between: "<｜tool▁sep｜>",
            after: "<｜tool▁call▁end｜>",
            close: "<｜tool▁calls▁end｜>",
            ..plain
        },
        ToolFormat::Harmony => CallStyle {
            before: "<|channel|>commentary to=functions.",
            between: " <|constrain|>json<|message|>",
            next: "<|call|><|start|>assistant",
            ..plain
        },
        _ => CallStyle {
            marker: "<tool_call>",
            before: "<tool_call>\n{\"name\": \"",
            between: "\", \"arguments\": ",
            after: "}\n</tool_call>",
            next: "\n",
            ..plain
        },
    }
}

/// The style of calls as a list of JSON objects.
fn list(marker: &'static str, open: &'static str, close: &'static str) -> CallStyle {
    let (before, between) = ("{\"name\": \"", "\", \"arguments\": ");
    CallStyle { marker, open, before, between, after: "}", next: ", ", close }
}

#[cfg(test)]
mod tests {
    use plimsoll_reply::{Event, ReplyParser, Spec, Tools};

    use super::*;

    /// The reader of a format must recognize all calls that the format's grammar allows.
    #[test]
    fn forced_calls_are_read_in_every_format() {
        use ToolFormat as F;
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let known = Arc::new(Tools::from_openai(&tools));
        let own = [F::Llama3, F::Mistral, F::DeepSeek, F::KimiK2, F::Nemotron, F::Granite, F::Phi4Mini, F::Hunyuan];
        let others = [F::Hermes, F::Harmony, F::QwenXml, F::Glm, F::FunctionGemma, F::Gemma4, F::Lfm2, F::Olmo3];
        for format in own.into_iter().chain(others).map(forced_format) {
            for arguments_marker in [false, true] {
                let CallStyle { marker, open, before, between, after, next, close } = style(format, arguments_marker);
                assert!(open.starts_with(marker) || before.starts_with(marker), "{format:?}");
                let call = format!("{before}f{between}{{\"a\": 1}}{after}");
                let text = format!("{open}{call}{next}{call}{close}");
                let tools = Some((format, Arc::clone(&known)));
                let mut parser = ReplyParser::new(&Spec { tools, ..Spec::default() });
                let mut events = Vec::new();
                parser.push(&text, &mut events);
                parser.finish(&mut events);
                let begin = Event::CallBegin { name: "f".into(), id: None };
                let call = [begin, Event::Arguments("{\"a\": 1}".into()), Event::CallEnd];
                assert_eq!(events, [call.clone(), call].concat(), "{text}");
            }
        }
    }

    #[test]
    fn a_function_without_parameters_takes_no_arguments() {
        let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
        assert_eq!(parameters(&json!({"name": "now"})), nothing);
        assert_eq!(parameters(&json!({"name": "now", "parameters": null})), nothing);
        assert_eq!(parameters(&json!({"name": "any", "parameters": {}})), json!({}));
    }
}
