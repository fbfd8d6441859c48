//! The schemas of answers. Objects are closed: a field that is answered and not listed fails a test.

use serde_json::{Map, Value, json};

/// A closed object: `name: kind`, where a kind ends with `?` if it may be null and begins with `~` if the field may be absent.
fn closed(fields: &[(&str, &str)]) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, kind) in fields {
        let (kind, present) = kind.strip_prefix('~').map_or((*kind, true), |kind| (kind, false));
        let (kind, null) = kind.strip_suffix('?').map_or((kind, false), |kind| (kind, true));
        properties.insert((*name).into(), schema(kind, null));
        if present {
            required.push(*name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// `string`, `integer`, …; `[kind]` a list; a capital letter begins the name of a schema.
fn schema(kind: &str, null: bool) -> Value {
    if let Some(item) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
        let kinds = if null { json!(["array", "null"]) } else { json!("array") };
        return json!({"type": kinds, "items": schema(item, false)});
    }
    if kind.starts_with(char::is_uppercase) {
        let reference = super::reference(kind);
        return if null { json!({"anyOf": [reference, {"type": "null"}]}) } else { reference };
    }
    if null { json!({"type": [kind, "null"]}) } else { json!({"type": kind}) }
}

/// All of them.
pub(super) fn schemas() -> Value {
    let mut all = Map::new();
    for (name, fields) in OBJECTS.iter().chain(super::turns::OBJECTS).chain(super::pooled::OBJECTS) {
        all.insert((*name).into(), closed(fields));
    }
    all.insert("Anything".into(), json!({}));
    all.insert("Numbers".into(), super::pooled::numbers());
    all.insert("OldLoads".into(), schema("[OldLoad]", false));
    all.insert("Document".into(), json!({"type": "object"}));
    all.insert("Reports".into(), json!({"type": "array", "items": {"type": ["object", "null"]}}));
    Value::Object(all)
}

pub(super) type Object = (&'static str, &'static [(&'static str, &'static str)]);

const OBJECTS: &[Object] = &[
    ("Error", &[("error", "ErrorInner")]),
    ("ErrorInner", &[("message", "string"), ("type", "string"), ("param", "string?"), ("code", "string?")]),
    (
        "Usage",
        &[
            ("prompt_tokens", "integer"),
            ("completion_tokens", "integer"),
            ("total_tokens", "integer"),
            ("prompt_tokens_details", "PromptDetails"),
            ("speculation", "~Speculation"),
        ],
    ),
    ("PromptDetails", &[("cached_tokens", "integer")]),
    ("Speculation", &[("drafted", "integer"), ("accepted", "integer")]),
    (
        "Completion",
        &[
            ("id", "string"),
            ("object", "string"),
            ("created", "integer"),
            ("model", "string"),
            ("choices", "[CompletionChoice]"),
            ("usage", "~Usage?"),
        ],
    ),
    (
        "CompletionChoice",
        &[
            ("index", "integer"),
            ("text", "string"),
            ("logprobs", "CompletionLogprobs?"),
            ("finish_reason", "string?"),
            ("stop_reason", "string?"),
            ("token_ids", "~[integer]"),
            ("prompt_token_ids", "~[integer]"),
            ("prompt_logprobs", "~Reports"),
        ],
    ),
    (
        "CompletionLogprobs",
        &[("tokens", "[string]"), ("token_logprobs", "array"), ("top_logprobs", "array"), ("text_offset", "[integer]")],
    ),
    (
        "ChatCompletion",
        &[
            ("id", "string"),
            ("object", "string"),
            ("created", "integer"),
            ("model", "string"),
            ("choices", "[ChatChoice]"),
            ("usage", "Usage"),
            ("prompt_logprobs", "~Reports"),
            ("prompt_token_ids", "~[integer]"),
        ],
    ),
    (
        "ChatChoice",
        &[
            ("index", "integer"),
            ("message", "Message"),
            ("logprobs", "ChatLogprobs?"),
            ("finish_reason", "string?"),
            ("stop_reason", "string?"),
            ("token_ids", "~[integer]"),
        ],
    ),
    (
        "Message",
        &[
            ("role", "string"),
            ("content", "string?"),
            ("refusal", "string?"),
            ("reasoning_content", "~string"),
            ("reasoning", "~string"),
            ("tool_calls", "~[object]"),
        ],
    ),
    ("ChatLogprobs", &[("content", "[ChatToken]"), ("refusal", "[ChatToken]?")]),
    (
        "ChatToken",
        &[("token", "string"), ("logprob", "number"), ("bytes", "[integer]"), ("top_logprobs", "[ChatAlternative]")],
    ),
    ("ChatAlternative", &[("token", "string"), ("logprob", "number"), ("bytes", "[integer]")]),
    (
        "Tokens",
        &[("count", "integer"), ("max_model_len", "integer"), ("tokens", "[integer]"), ("token_strs", "[string]?")],
    ),
    ("Text", &[("prompt", "string")]),
    (
        "TokenizerInfo",
        &[
            ("tokenizer_class", "string"),
            ("bos_token", "string?"),
            ("eos_token", "string?"),
            ("pad_token", "string?"),
            ("vocab_size", "integer"),
            ("model_max_length", "integer"),
            ("chat_template", "string?"),
        ],
    ),
    (
        "ModelList",
        &[
            ("object", "string"),
            ("data", "[Model]"),
            ("first_id", "string?"),
            ("last_id", "string?"),
            ("has_more", "boolean"),
        ],
    ),
    (
        "Model",
        &[
            ("id", "string"),
            ("object", "string"),
            ("created", "integer"),
            ("owned_by", "string"),
            ("root", "string"),
            ("parent", "string?"),
            ("type", "string"),
            ("display_name", "string"),
            ("created_at", "string"),
            // Where there are several, of those that are loaded.
            ("max_model_len", "~integer"),
            ("state", "~string"),
        ],
    ),
    ("Health", &[("status", "string"), ("steps", "integer")]),
    ("Version", &[("version", "string")]),
    ("Cancelled", &[("id", "string"), ("object", "string"), ("cancelled", "integer")]),
    ("CacheCleared", &[("object", "string"), ("before", "Cache"), ("after", "Cache")]),
    (
        "Cache",
        &[
            ("enabled", "boolean"),
            ("page_tokens", "integer"),
            ("page_bytes", "integer"),
            ("entries", "integer"),
            ("pages", "integer"),
            ("bytes", "integer"),
            ("state_checkpoints", "integer"),
            ("state_bytes", "integer"),
            ("encoder_entries", "integer"),
            ("encoder_bytes", "integer"),
            ("hit_tokens", "integer"),
            ("miss_tokens", "integer"),
            ("inserted_pages", "integer"),
            ("evicted_pages", "integer"),
        ],
    ),
    (
        "Status",
        &[
            ("object", "string"),
            ("model", "string"),
            ("generates", "boolean"),
            ("images", "boolean"),
            ("max_body_bytes", "integer"),
            ("uptime_seconds", "number"),
            ("healthy", "boolean"),
            ("draining", "boolean"),
            ("totals", "Totals"),
            ("pools", "Pools"),
            ("degradation", "Degradation"),
            ("requests", "[Running]"),
            ("models", "~[ModelPart]"),
        ],
    ),
    (
        "Totals",
        &[
            ("running", "integer"),
            ("waiting", "integer"),
            ("answering", "integer"),
            ("memory_bytes", "integer"),
            ("tokens_per_second", "number"),
            ("prompt_tokens", "integer"),
            ("cached_tokens", "integer"),
            ("generated_tokens", "integer"),
            ("finished", "integer"),
            ("aborted", "integer"),
            ("failed", "integer"),
            ("steps", "integer"),
        ],
    ),
    (
        "Running",
        &[
            ("id", "string"),
            ("request_id", "string"),
            ("endpoint", "string"),
            ("model", "~string"),
            ("stream", "boolean"),
            ("phase", "string"),
            ("choices", "integer"),
            ("prompt_tokens", "integer"),
            ("cached_tokens", "integer"),
            ("computed_tokens", "integer"),
            ("generated_tokens", "integer"),
            ("memory_bytes", "integer"),
            ("kv_pages", "integer"),
            ("kv_bytes", "integer"),
            ("state_slots", "integer"),
            ("state_bytes", "integer"),
            ("host_bytes", "integer"),
            ("age_seconds", "number"),
            ("tokens_per_second", "number?"),
        ],
    ),
    (
        "Pools",
        &[
            ("kv_pages", "Pages"),
            ("state_slots", "Pages"),
            ("encoder_outputs", "Pages"),
            ("media_bytes", "Share"),
            ("requests", "Places"),
            ("host_bytes", "Share"),
            ("http_bytes", "~Share"),
        ],
    ),
    ("Pages", &[("used", "integer"), ("total", "integer"), ("cached", "integer")]),
    (
        "Places",
        &[
            ("running", "integer"),
            ("waiting", "integer"),
            ("in_system", "integer"),
            ("running_max", "integer"),
            ("waiting_max", "integer"),
        ],
    ),
    ("Share", &[("used", "integer"), ("total", "integer")]),
    (
        "Degradation",
        &[
            ("level", "string"),
            ("entered", "[LevelCount]"),
            ("reading", "object"),
            ("reserve_blocks_released", "integer"),
            ("reserve_blocks_missing", "integer"),
        ],
    ),
    ("LevelCount", &[("level", "string"), ("times", "integer")]),
    (
        "Memory",
        &[
            ("line_bytes", "integer"),
            ("line_source", "string"),
            ("planned_bytes", "integer"),
            ("committed_bytes", "integer"),
            ("unaccounted_bytes", "integer"),
            ("components", "[Component]"),
            ("process", "object"),
            ("heap", "object"),
            ("device_allocations", "object"),
            ("pools", "Pools"),
            ("degradation", "Degradation"),
            ("requests", "object"),
            ("steps", "integer"),
            ("models", "~[ModelPart]"),
        ],
    ),
    (
        "ModelPart",
        &[
            ("model", "string"),
            ("state", "string"),
            ("planned_bytes", "integer?"),
            ("loads", "integer"),
            ("in_use", "integer"),
            ("waiting", "integer"),
            ("idle_seconds", "number"),
            ("ledger", "~object"),
        ],
    ),
    (
        "ServerInfo",
        &[
            ("version", "string"),
            ("model_path", "string"),
            ("served_model_name", "string"),
            ("tokenizer_path", "string"),
            ("tp_size", "integer"),
            ("dp_size", "integer"),
            ("page_size", "integer"),
            ("context_length", "integer"),
            ("max_total_num_tokens", "integer"),
            ("max_total_tokens", "integer"),
            ("max_prefill_tokens", "integer"),
            ("max_running_requests", "integer"),
            ("max_queued_requests", "integer"),
            ("disable_radix_cache", "boolean"),
            ("kv_events", "boolean"),
            ("status", "string"),
        ],
    ),
    (
        "ModelInfo",
        &[
            ("model_path", "string"),
            ("tokenizer_path", "string"),
            ("served_model_name", "string"),
            ("is_generation", "boolean"),
            ("has_image_understanding", "boolean"),
            ("has_audio_understanding", "boolean"),
            ("max_context_length", "integer"),
            ("vocab_size", "integer"),
            ("eos_token_ids", "[integer]"),
        ],
    ),
    (
        "Loads",
        &[
            ("timestamp", "number"),
            ("version", "string"),
            ("dp_rank_count", "integer"),
            ("loads", "[Load]"),
            ("aggregate", "AggregateLoad"),
        ],
    ),
    (
        "Load",
        &[
            ("dp_rank", "integer"),
            ("num_running_reqs", "integer"),
            ("num_waiting_reqs", "integer"),
            ("num_total_reqs", "integer"),
            ("num_used_tokens", "integer"),
            ("max_total_num_tokens", "integer"),
            ("token_usage", "number"),
            ("max_running_requests", "integer"),
            ("utilization", "number"),
            ("cache_hit_rate", "number"),
        ],
    ),
    (
        "AggregateLoad",
        &[
            ("total_running_reqs", "integer"),
            ("total_waiting_reqs", "integer"),
            ("total_reqs", "integer"),
            ("avg_token_usage", "number"),
            ("avg_utilization", "number"),
        ],
    ),
    (
        "OldLoad",
        &[("dp_rank", "integer"), ("num_reqs", "integer"), ("num_waiting_reqs", "integer"), ("num_tokens", "integer")],
    ),
    ("Caches", &[("object", "string"), ("models", "[ModelCache]")]),
    ("ModelCache", &[("model", "string"), ("before", "~Cache"), ("cache", "Cache")]),
    (
        "Component",
        &[
            ("component", "string"),
            ("planned_bytes", "integer"),
            ("committed_bytes", "integer"),
            ("peak_bytes", "integer"),
            ("detail", "string"),
        ],
    ),
];
