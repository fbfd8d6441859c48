//! Structured output: its fields, and the grammar that they become.

use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CompileLimits, GrammarError, Grammars, Guide, ReasoningRules, Source, gbnf};
use serde_json::value::RawValue;

use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::{Fields, MAX_NODES, check_nodes};
use crate::state::threads::client_left;

/// The most texts of a choice.
const MAX_CHOICES: usize = 1024;

/// A requested output format.
#[derive(Clone, Debug)]
pub(crate) struct OutputFormat {
    /// The field that requests it.
    pub param: &'static str,
    pub source: Source,
}

impl OutputFormat {
    /// Takes the fields. At most one of them may be set.
    pub fn take(fields: &mut Fields<'_>) -> ApiResult<Option<Self>> {
        let mut formats: Vec<Self> = Vec::new();
        let mut add = |param, source: Option<Source>| formats.extend(source.map(|source| Self { param, source }));
        add("response_format", response_format(fields)?);
        add("structured_outputs", structured_outputs(fields)?);
        add("guided_json", schema(fields, "guided_json")?.map(Source::JsonSchema));
        add("guided_regex", fields.take("guided_regex")?.map(Source::Regex));
        add("guided_choice", choice(fields, "guided_choice")?);
        add("guided_grammar", fields.take("guided_grammar")?.map(Source::Lark));
        add("grammar", gbnf(fields)?);
        match &formats[..] {
            [] | [_] => Ok(formats.pop()),
            [first, second, ..] => {
                let message = format!("{} and {} both set the output format; give one", first.param, second.param);
                Err(ApiError::invalid(second.param, message))
            }
        }
    }

    /// Returns about the heap bytes of the format.
    pub fn bytes(&self) -> u64 {
        match &self.source {
            Source::JsonSchema(text) | Source::Regex(text) | Source::Lark(text) => text.capacity() as u64,
            Source::Choice(texts) => texts.iter().map(|text| (size_of::<String>() + text.capacity()) as u64).sum(),
            // These are made of the tools, whose bytes are counted with their conversation.
            Source::JsonObject | Source::Calls(_) | Source::TextWithCalls(_) | Source::CallsOr(..) => 0,
        }
    }

    /// Returns the grammar of this format, after the fixed text `prefix` and the model's reasoning, if any. Runs on a text worker.
    pub fn grammar(
        &self,
        grammars: &Arc<Grammars>,
        prefix: &str,
        thinking: Option<ReasoningRules>,
    ) -> ApiResult<Arc<dyn Grammar>> {
        grammar(grammars, self.param, Some(&self.source), prefix, thinking)
    }
}

/// Returns the grammar of a source, of limited reasoning, or of both. Only on a text worker.
pub(crate) fn grammar(
    grammars: &Arc<Grammars>,
    param: &str,
    source: Option<&Source>,
    prefix: &str,
    thinking: Option<ReasoningRules>,
) -> ApiResult<Arc<dyn Grammar>> {
    match Guide::new(grammars, source, prefix, thinking, &CompileLimits::new(&client_left)) {
        Ok(guide) => Ok(Arc::new(guide)),
        Err(GrammarError::Invalid(reason)) => Err(ApiError::invalid(param, format!("{param}: {reason}"))),
        // The client has disconnected and does not read this error.
        Err(gone @ GrammarError::ClientDisconnected) => Err(ApiError::unavailable(gone.to_string(), 1)),
        Err(later @ (GrammarError::Full(_) | GrammarError::NoThread(_))) => {
            Err(ApiError::unavailable(later.to_string(), 1))
        }
    }
}

fn response_format(fields: &mut Fields<'_>) -> ApiResult<Option<Source>> {
    let Some(raw) = fields.raw("response_format") else { return Ok(None) };
    let mut format = Fields::of("response_format".into(), raw)?;
    let kind = format.take::<String>("type")?.unwrap_or_default();
    let json_schema = format.raw("json_schema");
    format.finish()?;
    match (kind.as_str(), json_schema) {
        ("json_schema", Some(raw)) => named_schema(Fields::of("response_format.json_schema".into(), raw)?),
        ("json_schema", None) => {
            Err(ApiError::invalid("response_format.json_schema", "response_format.json_schema is missing"))
        }
        (kind, None) => plain_format("response_format.type", kind),
        ("text" | "json_object", Some(_)) => {
            let message = format!("response_format.json_schema has no effect with type {kind}");
            Err(ApiError::invalid("response_format.json_schema", message))
        }
        (kind, Some(_)) => plain_format("response_format.type", kind),
    }
}

/// Reads the Responses API's `text.format`: chat's `response_format` with one level less.
pub(crate) fn text_format(raw: &RawValue) -> ApiResult<Option<Source>> {
    let mut format = Fields::of("text.format".into(), raw)?;
    let kind = format.take::<String>("type")?.unwrap_or_default();
    if kind == "json_schema" {
        return named_schema(format);
    }
    format.finish()?;
    plain_format("text.format.type", &kind)
}

fn plain_format(param: &str, kind: &str) -> ApiResult<Option<Source>> {
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(Source::JsonObject)),
        _ => Err(ApiError::unsupported(param, format!("{param} must be text, json_object or json_schema"))),
    }
}

/// Takes a schema with its name, description and `strict`.
fn named_schema(mut fields: Fields<'_>) -> ApiResult<Option<Source>> {
    let missing = |param: String| ApiError::invalid(&param, format!("{param} is missing"));
    let (name, schema_param) = (fields.param("name"), fields.param("schema"));
    let named = fields.take::<String>("name")?;
    fields.take::<String>("description")?;
    // The format is always enforced, so `strict` changes nothing.
    fields.take::<bool>("strict")?;
    let schema = schema(&mut fields, "schema")?;
    fields.finish()?;
    named.ok_or_else(|| missing(name))?;
    schema.map(|schema| Some(Source::JsonSchema(schema))).ok_or_else(|| missing(schema_param))
}

fn structured_outputs(fields: &mut Fields<'_>) -> ApiResult<Option<Source>> {
    let Some(raw) = fields.raw("structured_outputs") else { return Ok(None) };
    let mut inner = Fields::of("structured_outputs".into(), raw)?;
    let all = [
        schema(&mut inner, "json")?.map(Source::JsonSchema),
        inner.take("regex")?.map(Source::Regex),
        choice(&mut inner, "choice")?,
        inner.take("grammar")?.map(Source::Lark),
        inner.take::<bool>("json_object")?.filter(|on| *on).map(|_| Source::JsonObject),
    ];
    inner.finish()?;
    let mut asked = all.into_iter().flatten();
    match (asked.next(), asked.next()) {
        (Some(source), None) => Ok(Some(source)),
        _ => {
            let message = "structured_outputs needs exactly one of json, regex, choice, grammar, json_object";
            Err(ApiError::invalid("structured_outputs", message))
        }
    }
}

/// Takes a schema, as JSON or as a string of JSON. It stays text, which keeps every number exact.
pub(crate) fn schema(fields: &mut Fields<'_>, name: &str) -> ApiResult<Option<String>> {
    let param = fields.param(name);
    let Some(raw) = fields.raw(name) else { return Ok(None) };
    check_nodes(&param, raw.get(), MAX_NODES)?;
    let text = match serde_json::from_str::<String>(raw.get()) {
        Ok(text) => text,
        Err(_) => return Ok(Some(raw.get().to_owned())),
    };
    check_nodes(&param, &text, MAX_NODES)?;
    let parsed = serde_json::from_str::<&RawValue>(&text);
    parsed.map_err(|error| ApiError::invalid(&param, format!("{param} is not JSON: {error}")))?;
    Ok(Some(text))
}

/// Takes llama.cpp's `grammar`.
fn gbnf(fields: &mut Fields<'_>) -> ApiResult<Option<Source>> {
    let Some(text) = fields.take::<String>("grammar")?.filter(|text| !text.is_empty()) else { return Ok(None) };
    let lark = gbnf::to_lark(&text).map_err(|why| ApiError::invalid("grammar", format!("grammar (GBNF): {why}")))?;
    Ok(Some(Source::Lark(lark)))
}

fn choice(fields: &mut Fields<'_>, name: &str) -> ApiResult<Option<Source>> {
    let Some(all) = fields.take_few::<Vec<String>>(name, 4 * MAX_CHOICES)? else { return Ok(None) };
    let param = fields.param(name);
    if all.is_empty() || all.len() > MAX_CHOICES || all.iter().any(String::is_empty) {
        let message = format!("{param} needs 1 to {MAX_CHOICES} texts, none of them empty");
        return Err(ApiError::invalid(param, message));
    }
    Ok(Some(Source::Choice(all)))
}
