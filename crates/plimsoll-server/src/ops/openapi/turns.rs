//! The bodies and answers of Anthropic's Messages and OpenAI's Responses.

use plimsoll_engine::sampling::TOP_LOGPROBS_MAX;
use serde_json::{Value, json};

use super::bodies::{Fields, common, flag, hint, integer, object, only, service_tier, text};
use super::schema::Object;

/// `params::Common::take_few`.
fn few() -> Fields {
    let names = [
        "model",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "mtp",
        "cache_salt",
    ];
    common().into_iter().filter(|(name, _)| names.contains(name)).collect()
}

/// The fields of a prompt in Anthropic's API.
fn said() -> Fields {
    let message = json!({
        "type": "object", "required": ["role", "content"], "additionalProperties": false,
        "properties": {
            "role": {"type": "string", "enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type"]}, "minItems": 1,
                "description": "Blocks: text, tool_use, tool_result, thinking, document (base64, text); image (base64, url) where the model takes images"}]}
        }
    });
    let tool = json!({"type": "object", "required": ["name", "input_schema"]});
    let kind = |description: &str, examples: Value| json!({"type": "object", "required": ["type"], "description": description, "examples": examples});
    vec![
        (
            "messages",
            json!({"type": "array", "items": message, "minItems": 1, "description": "The last is not the assistant's",
                "examples": [[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}]]}),
        ),
        (
            "system",
            json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
                "examples": ["x", [{"type": "text", "text": "x"}]]}),
        ),
        (
            "tools",
            json!({"type": "array", "items": tool, "examples": [[{"name": "f", "input_schema": {"type": "object"}}]]}),
        ),
        ("tool_choice", kind("auto, any, tool or none", json!([{"type": "none"}, {"type": "auto"}]))),
        (
            "thinking",
            kind(
                "enabled where the model thinks, disabled, adaptive",
                json!([{"type": "disabled"}, {"type": "adaptive"}]),
            ),
        ),
        ("cache_control", kind("ephemeral", json!([{"type": "ephemeral", "ttl": "5m"}]))),
        (
            "output_config",
            json!({"type": "object", "examples": [{"format": {"type": "json_schema", "schema": {"type": "object"}}}]}),
        ),
        (
            "output_format",
            json!({"type": "object", "description": "An older name of `output_config.format`",
                "examples": [{"type": "json_schema", "schema": {"type": "object"}}]}),
        ),
        ("speed", only(&json!("standard"), "string")),
        (
            "context_management",
            json!({"type": "object", "description": "Only what clears nothing",
                "examples": [{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}]}),
        ),
    ]
}

/// The body of `/v1/messages`.
pub(super) fn messages() -> Value {
    let mut fields = few();
    fields.extend(said());
    fields.extend([
        ("max_tokens", integer(1, 4)),
        (
            "stop_sequences",
            json!({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16, "examples": [["a", "b"]]}),
        ),
        (
            "metadata",
            json!({"type": "object", "additionalProperties": false, "properties": {"user_id": {"type": ["string", "null"]}}, "examples": [{"user_id": "somebody"}]}),
        ),
        ("service_tier", json!({"type": "string", "enum": ["auto", "standard_only"], "examples": ["auto"]})),
    ]);
    object(fields, &["messages", "max_tokens"])
}

/// The body of `/v1/messages/count_tokens`.
pub(super) fn count_tokens() -> Value {
    let mut fields = said();
    fields.push(("model", text("default")));
    object(fields, &["messages"])
}

/// The fields of a response's prompt.
fn asked() -> Fields {
    vec![
        (
            "input",
            json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
                "description": "A text or items, also stored ones by their ids (item_reference); input_file (file_data) among their parts, and input_image (image_url) and input_audio where the model takes them",
                "examples": ["x", [{"role": "user", "content": "x"}]]}),
        ),
        ("instructions", text("x")),
        ("previous_response_id", json!({"type": "string", "description": "A stored response"})),
        (
            "tools",
            json!({"type": "array", "items": {"type": "object", "required": ["type"]},
                "description": "Functions, also those of a namespace, and custom tools",
                "examples": [[{"type": "function", "name": "f", "parameters": {"type": "object"}}]]}),
        ),
        (
            "tool_choice",
            json!({"description": "auto, none, required, a function, a custom tool, allowed_tools", "examples": ["none"]}),
        ),
        ("parallel_tool_calls", flag(true)),
        (
            "text",
            json!({"type": "object", "examples": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}]}),
        ),
        ("reasoning", json!({"type": "object", "examples": [{"effort": "none"}]})),
        (
            "truncation",
            json!({"type": ["string", "null"], "enum": ["auto", "disabled", null], "examples": ["disabled"]}),
        ),
    ]
}

/// The body of `/v1/responses/input_tokens`.
pub(super) fn input_tokens() -> Value {
    let mut fields = asked();
    fields.push(("model", text("default")));
    object(fields, &["input"])
}

/// The body of `/v1/responses`.
pub(super) fn responses() -> Value {
    let mut fields = few();
    fields.extend(asked());
    fields.extend([
        ("max_output_tokens", integer(1, 3)),
        ("max_tool_calls", json!({"type": ["integer", "null"], "minimum": 0, "maximum": 128, "description": "Calls of tools of MCP servers", "examples": [2]})),
        ("store", flag(false)),
        ("metadata", json!({"type": "object", "additionalProperties": {"type": "string"}, "examples": [{"a": "b"}]})),
        ("client_metadata", json!({"type": "object", "additionalProperties": {"type": "string"}, "examples": [{"a": "b"}]})),
        ("include", json!({"type": "array", "items": {"type": "string", "enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, "examples": [["message.output_text.logprobs"]]})),
        ("top_logprobs", json!({"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MAX, "description": "Above 0 only with `include`", "examples": [0]})),
        ("stream_options", json!({"type": "object", "examples": [{"include_obfuscation": false}]})),
        ("background", json!({"type": ["boolean", "null"], "description": "Needs `store`; at most 16 at once", "examples": [false]})),
        ("service_tier", service_tier()),
        ("prompt_cache_retention", hint(&json!("24h"))),
        ("prompt_cache_options", hint(&json!({"mode": "explicit"}))),
        ("prediction", hint(&json!({"type": "content", "content": "x"}))),
        ("safe_prompt", hint(&json!(true))),
        ("prompt_cache_key", text("conversation")),
        ("safety_identifier", text("somebody")),
        ("user", text("somebody")),
    ]);
    object(fields, &["input"])
}

/// The schemas of the answers.
pub(super) const OBJECTS: &[Object] = &[
    (
        "AnthropicMessage",
        &[
            ("id", "string"),
            ("type", "string"),
            ("role", "string"),
            ("model", "string"),
            ("content", "[Block]"),
            ("stop_reason", "string?"),
            ("stop_sequence", "string?"),
            ("usage", "MessageUsage"),
        ],
    ),
    (
        "Block",
        &[
            ("type", "string"),
            ("text", "~string"),
            ("thinking", "~string"),
            ("signature", "~string"),
            ("id", "~string"),
            ("name", "~string"),
            ("input", "~object"),
        ],
    ),
    (
        "MessageUsage",
        &[
            ("input_tokens", "integer"),
            ("cache_creation_input_tokens", "integer"),
            ("cache_read_input_tokens", "integer"),
            ("cache_creation", "MessageCacheCreation"),
            ("output_tokens", "integer"),
            ("service_tier", "string"),
        ],
    ),
    ("MessageCacheCreation", &[("ephemeral_5m_input_tokens", "integer"), ("ephemeral_1h_input_tokens", "integer")]),
    ("MessageCount", &[("input_tokens", "integer")]),
    ("ResponseCount", &[("object", "string"), ("input_tokens", "integer")]),
    ("MessageError", &[("type", "string"), ("error", "MessageErrorInner"), ("request_id", "~string")]),
    ("MessageErrorInner", &[("type", "string"), ("message", "string"), ("details", "~ErrorDetails")]),
    ("ErrorDetails", &[("error_code", "string")]),
    (
        "Response",
        &[
            ("id", "string"),
            ("object", "string"),
            ("created_at", "integer"),
            ("completed_at", "integer?"),
            ("status", "string"),
            ("background", "boolean"),
            ("error", "object?"),
            ("incomplete_details", "object?"),
            ("instructions", "string?"),
            ("max_output_tokens", "integer?"),
            ("max_tool_calls", "integer?"),
            ("metadata", "object"),
            ("model", "string"),
            ("output", "[object]"),
            ("parallel_tool_calls", "boolean"),
            ("previous_response_id", "string?"),
            ("prompt_cache_key", "string?"),
            ("reasoning", "object"),
            ("safety_identifier", "string?"),
            ("service_tier", "string"),
            ("store", "boolean"),
            ("temperature", "number"),
            ("text", "object"),
            ("tool_choice", "Anything"),
            ("tools", "[object]"),
            ("top_logprobs", "integer"),
            ("top_p", "number"),
            ("truncation", "string"),
            ("usage", "ResponseUsage?"),
            ("user", "string?"),
        ],
    ),
    (
        "ResponseUsage",
        &[
            ("input_tokens", "integer"),
            ("input_tokens_details", "object"),
            ("output_tokens", "integer"),
            ("output_tokens_details", "object"),
            ("total_tokens", "integer"),
        ],
    ),
    ("ResponseDeleted", &[("id", "string"), ("object", "string"), ("deleted", "boolean")]),
    (
        "ItemList",
        &[
            ("object", "string"),
            ("data", "[object]"),
            ("first_id", "string?"),
            ("last_id", "string?"),
            ("has_more", "boolean"),
        ],
    ),
];
