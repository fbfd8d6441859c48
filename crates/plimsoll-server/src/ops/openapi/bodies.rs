//! The bodies of requests, field by field, each with an example that the server accepts.

use plimsoll_engine::sampling::{LOGIT_BIAS_MAX, TOP_LOGPROBS_MAX};
use serde_json::{Map, Value, json};

/// A name and its schema.
pub(super) type Fields = Vec<(&'static str, Value)>;

/// Returns the schema of an object that has these fields, each or null, and no others.
pub(super) fn object(fields: Fields, required: &[&str]) -> Value {
    let optional = |name: &str, mut schema: Value| {
        if let (false, Some(kind)) = (required.contains(&name), schema.get("type").cloned()) {
            let kinds = if kind.is_array() { kind } else { json!([kind, "null"]) };
            schema["type"] = kinds;
            if let Some(Value::Array(values)) = schema.get_mut("enum") {
                values.push(Value::Null);
            }
        }
        schema
    };
    let properties: Map<String, Value> =
        fields.into_iter().map(|(name, schema)| (name.to_owned(), optional(name, schema))).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn number(least: f64, most: f64, example: f64) -> Value {
    json!({"type": "number", "minimum": least, "maximum": most, "examples": [example]})
}

pub(super) fn integer(least: i64, example: i64) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": 4_294_967_295u64, "examples": [example]})
}

/// A number of alternatives in log-probabilities.
pub(super) fn alternatives(example: u32) -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MAX, "examples": [example]})
}

pub(super) fn flag(example: bool) -> Value {
    json!({"type": "boolean", "examples": [example]})
}

pub(super) fn text(example: &str) -> Value {
    json!({"type": "string", "examples": [example]})
}

pub(super) fn service_tier() -> Value {
    json!({"type": "string", "enum": ["auto", "default", "flex", "scale", "priority"], "examples": ["auto", "flex"],
        "description": "All are one tier here"})
}

pub(super) fn only(value: &Value, kind: &str) -> Value {
    json!({"type": kind, "enum": [value], "examples": [value]})
}

/// A field without an effect, whatever its value.
pub(super) fn hint(example: &Value) -> Value {
    json!({"description": "Taken; it changes no answer here", "examples": [example]})
}

/// `params::Common` and `form::Form`.
pub(super) fn common() -> Fields {
    [lengths(), sampling(), endings(), structured_output(), hints()].into_iter().flatten().collect()
}

/// The model, the number of choices and the length of the output.
fn lengths() -> Fields {
    let options = json!({
        "type": "object", "additionalProperties": false,
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
            "include_obfuscation": {"type": ["boolean", "null"], "enum": [false, null]}
        },
        "description": "Only with `stream: true`", "examples": [{"include_usage": true}]
    });
    vec![
        ("model", text("default")),
        ("stream", flag(true)),
        ("stream_options", options),
        ("n", integer(1, 2)),
        ("best_of", json!({"type": "integer", "minimum": 1, "description": "Equal to n", "examples": [1]})),
        ("max_tokens", integer(0, 3)),
        (
            "n_predict",
            json!({"type": "integer", "minimum": -1, "maximum": u32::MAX, "description": "llama.cpp: max_tokens; -1 is no limit", "examples": [-1]}),
        ),
        (
            "num_predict",
            json!({"type": "integer", "minimum": -1, "maximum": u32::MAX, "description": "Ollama: max_tokens; -1 is no limit", "examples": [-1]}),
        ),
        ("max_completion_tokens", integer(0, 3)),
        ("min_tokens", integer(0, 1)),
    ]
}

/// The sampling fields.
fn sampling() -> Fields {
    let bias = json!({
        "type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": LOGIT_BIAS_MAX,
        "description": "Token id to what is added to its logit", "examples": [{"97": -1.5}]
    });
    vec![
        ("temperature", number(0.0, 100.0, 0.5)),
        ("top_p", number(0.0, 1.0, 0.9)),
        ("top_k", json!({"type": "integer", "minimum": -1, "examples": [5]})),
        ("min_p", number(0.0, 1.0, 0.1)),
        ("repetition_penalty", number(0.01, 10.0, 1.1)),
        ("repeat_penalty", number(0.01, 10.0, 1.1)),
        ("presence_penalty", number(-2.0, 2.0, 0.5)),
        ("frequency_penalty", number(-2.0, 2.0, -0.5)),
        ("logit_bias", bias),
        ("seed", json!({"type": "integer", "format": "int64", "examples": [7]})),
    ]
}

/// The fields for the end of the output, and for its reports.
fn endings() -> Fields {
    let stop = json!({
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16}, {"type": "null"}],
        "examples": ["\n\n", ["a", "b"]]
    });
    vec![
        ("stop", stop),
        (
            "stop_token_ids",
            json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 16, "examples": [[5]]}),
        ),
        ("ignore_eos", flag(true)),
        ("skip_special_tokens", flag(false)),
        ("prompt_logprobs", alternatives(1)),
        ("return_token_ids", flag(true)),
        ("return_tokens_as_token_ids", flag(true)),
        (
            "mtp",
            json!({"type": "boolean", "description": "Let tokens be guessed ahead, where the server does so", "examples": [false]}),
        ),
        (
            "cache_salt",
            json!({"type": "string", "minLength": 1, "description": "Requests whose salts differ share no cached prefix", "examples": ["tenant-1"]}),
        ),
    ]
}

/// Structured output.
fn structured_output() -> Fields {
    vec![
        ("response_format", response_format()),
        ("structured_outputs", json!({"type": "object", "examples": [{"choice": ["ab", "cd"]}]})),
        (
            "guided_json",
            json!({"type": ["object", "boolean", "string"], "description": "A JSON schema", "examples": [{"type": "object"}]}),
        ),
        ("guided_regex", text("[a-c]+")),
        (
            "guided_choice",
            json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1024, "examples": [["ab", "cd"]]}),
        ),
        ("grammar", json!({"type": "string", "description": "llama.cpp's GBNF", "examples": ["root ::= \"a\""]})),
        ("guided_grammar", json!({"type": "string", "description": "Lark", "examples": ["start: \"a\""]})),
    ]
}

/// Fields without an effect, and fields with one supported value.
fn hints() -> Fields {
    vec![
        ("user", text("somebody")),
        ("safety_identifier", text("somebody")),
        ("prompt_cache_key", text("conversation")),
        ("metadata", json!({"type": "object", "additionalProperties": {"type": "string"}, "examples": [{"a": "b"}]})),
        ("store", hint(&json!(true))),
        ("verbosity", hint(&json!("low"))),
        ("prediction", hint(&json!({"type": "content", "content": "x"}))),
        ("prompt_cache_retention", hint(&json!("24h"))),
        ("prompt_cache_options", hint(&json!({"mode": "explicit"}))),
        ("safe_prompt", hint(&json!(true))),
        ("cache_prompt", hint(&json!(true))),
        ("keep_alive", hint(&json!("5m"))),
        ("ttl", hint(&json!(300))),
        ("slot_id", hint(&json!(0))),
        ("id_slot", hint(&json!(0))),
        ("provider_specific_fields", hint(&json!({}))),
        ("reasoning_details", hint(&json!([]))),
        ("typical_p", only(&json!(1), "number")),
        ("service_tier", service_tier()),
        ("use_beam_search", only(&json!(false), "boolean")),
        ("early_stopping", only(&json!(false), "boolean")),
        ("length_penalty", only(&json!(1), "number")),
        ("include_stop_str_in_output", flag(true)),
        ("spaces_between_special_tokens", only(&json!(true), "boolean")),
        ("priority", only(&json!(0), "integer")),
        ("no_stop_trim", flag(true)),
        ("return_hidden_states", only(&json!(false), "boolean")),
        ("add_special_tokens", flag(false)),
    ]
}

fn response_format() -> Value {
    json!({
        "type": "object", "required": ["type"], "additionalProperties": false,
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": ["object", "null"], "required": ["name", "schema"], "additionalProperties": false,
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": ["string", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                    "schema": {"type": ["object", "boolean", "string"]}
                }
            }
        },
        "examples": [{"type": "text"}, {"type": "json_object"}]
    })
}

/// A part of chat's content. Parts other than text need a model that takes them.
fn part() -> Value {
    let part = |required: &[&str], properties: Value| json!({"type": "object", "required": required, "additionalProperties": false, "properties": properties});
    let url = "data:TYPE;base64,DATA, https:// or http:// (--media-fetch), file:// (--media-root)";
    let address = |detail: bool| {
        let mut object = json!({"url": {"type": "string", "description": url}, "detail": {"type": ["string", "null"], "enum": [null]}});
        if detail {
            object["detail"]["enum"] = json!(["auto", "low", "high", null]);
        }
        json!({"anyOf": [{"type": "string", "description": url}, part(&["url"], object)]})
    };
    let kind = |name: &str| json!({"type": "string", "enum": [name]});
    json!({"anyOf": [
        part(&["text"], json!({"type": {"type": ["string", "null"], "enum": ["text", null]}, "text": {"type": "string"}})),
        part(&["type", "image_url"], json!({"type": kind("image_url"), "image_url": address(true)})),
        part(&["type", "video_url"], json!({"type": kind("video_url"), "video_url": address(false)})),
        part(&["type", "input_audio"], json!({"type": kind("input_audio"), "input_audio": part(&["data", "format"], json!({
            "data": {"type": "string", "description": "Base64"}, "format": {"type": "string", "enum": ["wav", "mp3", "flac", "ogg"]}
        }))})),
        part(&["type", "audio_url"], json!({"type": kind("audio_url"), "audio_url": address(false)})),
        part(&["type", "video"], json!({
            "type": kind("video"),
            "video": {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1, "description": "Frames, each a URL"},
                {"type": "string", "description": "An animation"}]},
            "fps": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1000, "description": "Frames of the list a second"}
        }))
    ]})
}

/// `chat::messages::Conversation`.
fn conversation() -> Fields {
    let call = json!({
        "type": "object", "required": ["function"],
        "properties": {
            "id": {"type": ["string", "null"]},
            "type": {"type": ["string", "null"], "enum": ["function", null]},
            "function": {
                "type": "object", "required": ["name"],
                "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"type": ["string", "object", "null"]}}
            }
        }
    });
    let message = json!({
        "type": "object", "required": ["role"], "additionalProperties": false,
        "properties": {
            "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part()}, {"type": "null"}]},
            "name": {"type": ["string", "null"]},
            "tool_call_id": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": call},
            "reasoning": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
            "refusal": {"type": ["array", "string", "null"]},
            "annotations": {"type": ["array", "null"]},
            "audio": {"type": "null"},
            "function_call": {"type": "null"}
        }
    });
    let tool = json!({
        "type": "object", "required": ["function"],
        "properties": {"type": {"type": "string", "enum": ["function"]}, "function": {"type": "object", "required": ["name"]}}
    });
    vec![
        (
            "messages",
            json!({"type": "array", "items": message, "minItems": 1, "examples": [[{"role": "user", "content": "x"}]]}),
        ),
        (
            "tools",
            json!({"type": "array", "items": tool, "examples": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]]}),
        ),
        (
            "tool_choice",
            json!({"description": "auto, none, required, a named function or custom tool, or allowed_tools; needs tools", "examples": ["none"]}),
        ),
        ("parallel_tool_calls", flag(true)),
        ("add_generation_prompt", flag(true)),
        ("continue_final_message", flag(false)),
        ("chat_template_kwargs", json!({"type": "object", "examples": [{"mood": "fine"}]})),
        (
            "mm_processor_kwargs",
            json!({"type": "object", "description": "`use_audio_in_video`", "examples": [{"use_audio_in_video": false}]}),
        ),
        ("enable_thinking", flag(false)),
        ("think", json!({"description": "Ollama's: true, false or an effort", "examples": [false]})),
        (
            "reasoning",
            json!({"type": "object", "description": "OpenRouter's: `enabled`, `effort`", "examples": [{"effort": "low"}]}),
        ),
        (
            "reasoning_effort",
            json!({"type": "string", "description": "none, minimal, low, medium, high, xhigh or max; none turns reasoning off if the model supports that"}),
        ),
        ("documents", json!({"type": "array", "items": {"type": "object"}, "examples": [[]]})),
    ]
}

/// The body of `/v1/chat/completions`.
pub(super) fn chat() -> Value {
    let mut fields = common();
    // Only completions accept 0: they may have an echo.
    let lengths = fields.iter_mut().filter(|(name, _)| ["max_tokens", "max_completion_tokens"].contains(name));
    lengths.for_each(|(_, schema)| schema["minimum"] = 1.into());
    fields.extend(conversation());
    fields.extend([
        ("logprobs", flag(true)),
        ("top_logprobs", json!({"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MAX, "description": "Above 0 only with `logprobs: true`", "examples": [0]})),
        ("echo", only(&json!(false), "boolean")),
        ("modalities", only(&json!(["text"]), "array")),
        ("separate_reasoning", only(&json!(true), "boolean")),
        ("stream_reasoning", only(&json!(true), "boolean")),
        ("include_reasoning", flag(false)),
        ("thinking_token_budget", json!({"type": "integer", "minimum": 0, "maximum": u32::MAX, "description": "Where the model thinks"})),
    ]);
    object(fields, &["messages"])
}

/// The body of `/v1/completions`.
pub(super) fn completions() -> Value {
    let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
    let texts = json!({"type": "array", "items": {"type": "string"}, "minItems": 1});
    let lists = json!({"type": "array", "items": ids, "minItems": 1});
    let prompt =
        json!({"anyOf": [{"type": "string"}, texts, ids, lists], "examples": ["x", ["x", "y"], [97], [[97], [98]]]});
    let mut fields = common();
    fields.extend([
        ("prompt", prompt),
        ("echo", flag(true)),
        ("logprobs", alternatives(1)),
        ("suffix", json!({"type": "string", "description": "Where the model has fill-in-the-middle tokens", "examples": ["", "x"]})),
    ]);
    object(fields, &["prompt"])
}

/// The body of `/tokenize`: a prompt, or else a conversation.
pub(super) fn tokenize() -> Value {
    let mut fields = conversation();
    fields.extend([
        ("model", text("default")),
        ("prompt", text("x")),
        ("add_special_tokens", flag(false)),
        ("return_token_strs", flag(true)),
    ]);
    let mut body = object(fields, &[]);
    body["anyOf"] = json!([{"required": ["prompt"]}, {"required": ["messages"]}]);
    body
}

/// A name of a saved prefix.
pub(super) fn prefix_name() -> Value {
    json!({"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "examples": ["agent-system-prompt"]})
}

/// The body of `/v1/cache/save`.
pub(super) fn save_prefix() -> Value {
    let mut fields = conversation();
    fields.extend([
        ("name", prefix_name()),
        ("model", text("default")),
        ("prompt", text("x")),
        ("add_special_tokens", flag(false)),
    ]);
    let mut body = object(fields, &["name"]);
    body["anyOf"] = json!([{"required": ["prompt"]}, {"required": ["messages"]}]);
    body
}

/// The body of `/v1/cache/load`.
pub(super) fn load_prefix() -> Value {
    object(vec![("name", prefix_name()), ("model", text("default"))], &["name"])
}

/// The body of `/detokenize`.
pub(super) fn detokenize() -> Value {
    let tokens = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "examples": [[97]]});
    object(vec![("model", text("default")), ("tokens", tokens)], &["tokens"])
}
