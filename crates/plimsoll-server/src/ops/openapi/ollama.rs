//! The bodies and answers of Ollama's routes, of Cohere's embeddings and of llama.cpp's `/infill`.

use serde_json::{Value, json};

use super::bodies::{Fields, alternatives, common, flag, hint, integer, object, only, text};
use super::schema::{Object, reference};
use super::{getting, posting};
use crate::ollama::options::{LOADING, OF_MIROSTAT};

fn any_of(kinds: &[&str], examples: Value) -> Value {
    let kinds: Vec<Value> = kinds.iter().chain(&["null"]).map(|kind| json!({"type": kind})).collect();
    json!({"anyOf": kinds, "examples": examples})
}

/// The field `options`, whose own fields are those of a model file.
fn options() -> Value {
    let number = |names: &[&str], kind: &str| -> Vec<(String, Value)> {
        names.iter().map(|name| ((*name).to_owned(), json!({"type": [kind, "null"]}))).collect()
    };
    let whole = ["seed", "num_predict", "num_ctx", "top_k", "repeat_last_n", "mirostat"];
    let real = ["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"];
    let off = ["tfs_z", "typical_p"];
    let mut properties: serde_json::Map<String, Value> = number(&whole, "integer").into_iter().collect();
    properties.extend([number(&real, "number"), number(&off, "number")].concat());
    // Accepted with any value: they have no effect.
    properties.extend(LOADING.iter().chain(&OF_MIROSTAT).map(|name| ((*name).to_owned(), json!({}))));
    properties.insert("stop".into(), any_of(&["string", "array"], json!([])));
    json!({
        "type": "object", "properties": properties, "additionalProperties": false,
        "examples": [{"temperature": 0.5, "num_predict": 4, "seed": 1, "stop": ["x"], "num_ctx": 64, "num_thread": 2}]
    })
}

fn keep_alive() -> Value {
    let mut field = any_of(&["string", "number"], json!(["5m", 300]));
    field["description"] = "Taken; the server decides how long a model stays".into();
    field
}

/// The fields of both routes that generate.
fn shared() -> Fields {
    vec![
        ("model", text("default")),
        ("stream", json!({"type": "boolean", "description": "On unless it is false", "examples": [false]})),
        ("options", options()),
        (
            "format",
            json!({"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}, {"type": "null"}],
                "description": "`json`, or a JSON schema", "examples": ["", "json", {"type": "object"}]}),
        ),
        ("think", json!({"description": "true, false or an effort", "examples": [false]})),
        ("logprobs", flag(true)),
        ("top_logprobs", alternatives(0)),
        ("keep_alive", keep_alive()),
        ("truncate", flag(true)),
        ("shift", flag(true)),
    ]
}

/// The body of `/api/chat`.
pub(super) fn chat() -> Value {
    let call = json!({
        "type": "object", "required": ["function"],
        "properties": {"function": {"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string"}, "arguments": {"type": ["object", "string", "null"]}
        }}}
    });
    let message = json!({
        "type": "object", "required": ["role"], "additionalProperties": false,
        "properties": {
            "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
            "content": {"type": ["string", "null"]},
            "thinking": {"type": ["string", "null"]},
            "images": {"type": ["array", "null"], "items": {"type": "string"}, "description": "Base64"},
            "tool_calls": {"type": ["array", "null"], "items": call},
            "tool_name": {"type": ["string", "null"]},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"]}
        }
    });
    let tool = json!({
        "type": "object", "required": ["function"],
        "properties": {"type": {"type": "string", "enum": ["function"]}, "function": {"type": "object", "required": ["name"]}}
    });
    let mut fields = shared();
    fields.extend([
        (
            "messages",
            json!({"type": "array", "items": message, "description": "Without one the model is loaded",
                "examples": [[{"role": "user", "content": "x"}], []]}),
        ),
        (
            "tools",
            json!({"type": "array", "items": tool, "examples": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]]}),
        ),
    ]);
    object(fields, &[])
}

/// The body of `/api/generate`.
pub(super) fn generate() -> Value {
    let mut fields = shared();
    fields.extend([
        ("prompt", text("x")),
        ("suffix", json!({"type": "string", "description": "Where the model has fill-in-the-middle tokens", "examples": ["x"]})),
        ("system", text("x")),
        ("raw", flag(true)),
        ("images", json!({"type": "array", "items": {"type": "string"}, "description": "Base64", "examples": [[]]})),
        ("template", only(&json!(""), "string")),
        ("context", json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 0, "examples": [[]]})),
    ]);
    object(fields, &[])
}

/// The body of `/api/embed`.
pub(super) fn embed() -> Value {
    let input = json!({
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}], "examples": ["x", ["x", "y"]]
    });
    let fields = vec![
        ("model", text("default")),
        ("input", input),
        ("truncate", flag(false)),
        ("dimensions", integer(1, 4)),
        ("options", options()),
        ("keep_alive", keep_alive()),
    ];
    object(fields, &["input"])
}

/// The body of `/api/embeddings`.
pub(super) fn embeddings() -> Value {
    let fields =
        vec![("model", text("default")), ("prompt", text("x")), ("options", options()), ("keep_alive", keep_alive())];
    object(fields, &["prompt"])
}

/// The body of `/api/show`.
pub(super) fn show() -> Value {
    let fields = vec![
        ("model", text("default")),
        ("name", text("default")),
        ("verbose", flag(true)),
        ("system", only(&json!(""), "string")),
        ("template", only(&json!(""), "string")),
        ("options", json!({"type": "object", "properties": {}, "additionalProperties": false, "examples": [{}]})),
    ];
    object(fields, &[])
}

/// The body of `/api/pull`.
pub(super) fn pull() -> Value {
    let fields = vec![
        ("model", text("default")),
        ("name", text("default")),
        ("stream", json!({"type": "boolean", "description": "On unless it is false", "examples": [false]})),
        ("insecure", flag(false)),
    ];
    object(fields, &[])
}

/// The body of `/v2/embed`.
pub(super) fn cohere() -> Value {
    let words = |words: &[&str]| json!({"type": "string", "enum": words, "examples": [words[0]]});
    let types = json!({
        "type": "array", "items": {"type": "string", "enum": ["float", "base64"]}, "minItems": 1,
        "examples": [["float"], ["base64"], ["float", "base64"]]
    });
    let most =
        json!({"type": "integer", "minimum": 1, "description": "Tokens of a text that are read", "examples": [8]});
    let fields = vec![
        ("model", text("default")),
        ("texts", json!({"type": "array", "items": {"type": "string"}, "minItems": 1, "examples": [["x", "y"]]})),
        ("input_type", words(&["search_document", "search_query", "classification", "clustering"])),
        ("embedding_types", types),
        ("truncate", words(&["END", "NONE"])),
        ("max_tokens", most),
        ("output_dimension", integer(1, 4)),
        ("priority", hint(&json!(0))),
    ];
    object(fields, &["texts"])
}

/// The body of `/infill`.
pub(super) fn infill() -> Value {
    // One gap is filled once, and the answer repeats nothing of its prompt.
    const OTHERS: [&str; 8] = [
        "n",
        "best_of",
        "stream",
        "stream_options",
        "add_special_tokens",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
    ];
    let mut fields = common();
    fields.retain(|(name, _)| !OTHERS.contains(name));
    let lengths = fields.iter_mut().filter(|(name, _)| ["max_tokens", "max_completion_tokens"].contains(name));
    lengths.for_each(|(_, schema)| schema["minimum"] = 1.into());
    let file = json!({
        "type": "object", "required": ["text"], "additionalProperties": false,
        "properties": {"filename": {"type": ["string", "null"]}, "text": {"type": "string"}, "time": {"description": "Taken"}}
    });
    fields.extend([
        ("stream", flag(false)),
        ("input_prefix", text("x")),
        ("input_suffix", text("y")),
        ("input_extra", json!({"type": "array", "items": file, "examples": [[{"filename": "a.rs", "text": "x"}]]})),
        ("prompt", json!({"type": "string", "description": "What stands in the gap already", "examples": ["x"]})),
    ]);
    object(fields, &["input_prefix", "input_suffix"])
}

/// The routes.
pub(super) fn paths() -> Value {
    json!({
        "/infill": {"post": posting("Fill a gap between two texts, as llama.cpp's server does", &infill(), "Infill")},
        "/api/chat": {"post": ollamas(lines(posting("Answer a conversation, as Ollama's API does", &chat(), "OllamaChat")))},
        "/api/generate": {"post": ollamas(lines(posting("Answer a prompt", &generate(), "OllamaGenerate")))},
        "/api/embed": {"post": ollamas(posting("What texts mean, as numbers", &embed(), "OllamaEmbed"))},
        "/api/embeddings": {"post": ollamas(posting("The same for one text", &embeddings(), "OllamaEmbedding"))},
        "/api/show": {"post": ollamas(posting("What a model is and can do", &show(), "OllamaShow"))},
        "/api/pull": {"post": ollamas(lines(posting("Have a model there", &pull(), "OllamaStatus")))},
        "/api/tags": {"get": ollamas(getting("Every name of every model", "OllamaModels"))},
        "/api/ps": {"get": ollamas(getting("The models that are loaded", "OllamaModels"))},
        "/api/version": {"get": ollamas(getting("The release of Ollama whose API this is", "OllamaVersion"))},
        "/api/delete": {"delete": ollamas(getting("Always refused", "OllamaStatus"))},
        "/score": {"post": posting("The same, where older clients look for it", &super::pooled::score(), "Scores")},
        "/v2/embed": {"post": posting("What texts mean, as Cohere's API says it", &cohere(), "CohereEmbeddings")}
    })
}

/// Adds errors in Ollama's form.
fn ollamas(mut operation: Value) -> Value {
    operation["responses"]["default"] = json!({
        "description": "An error, in Ollama's shape", "content": {"application/json": {"schema": reference("OllamaError")}}
    });
    operation
}

/// Adds a stream of lines as the other answer; each line fits the same schema.
fn lines(mut operation: Value) -> Value {
    let content = &mut operation["responses"]["200"]["content"];
    content["application/x-ndjson"] = content["application/json"].clone();
    operation
}

pub(super) const OBJECTS: &[Object] = &[
    ("OllamaError", &[("error", "string")]),
    ("OllamaVersion", &[("version", "string")]),
    ("OllamaStatus", &[("status", "string")]),
    (
        "OllamaChat",
        &[
            ("model", "string"),
            ("created_at", "string"),
            ("message", "OllamaMessage"),
            ("logprobs", "~[ChatToken]"),
            ("done", "boolean"),
            ("done_reason", "~string"),
            ("total_duration", "~integer"),
            ("load_duration", "~integer"),
            ("prompt_eval_count", "~integer"),
            ("prompt_eval_duration", "~integer"),
            ("eval_count", "~integer"),
            ("eval_duration", "~integer"),
        ],
    ),
    (
        "OllamaMessage",
        &[("role", "string"), ("content", "string"), ("thinking", "~string"), ("tool_calls", "~[OllamaCall]")],
    ),
    ("OllamaCall", &[("id", "string"), ("function", "OllamaFunction")]),
    ("OllamaFunction", &[("index", "integer"), ("name", "string"), ("arguments", "Anything")]),
    (
        "OllamaGenerate",
        &[
            ("model", "string"),
            ("created_at", "string"),
            ("response", "string"),
            ("thinking", "~string"),
            ("logprobs", "~[ChatToken]"),
            ("done", "boolean"),
            ("done_reason", "~string"),
            ("total_duration", "~integer"),
            ("load_duration", "~integer"),
            ("prompt_eval_count", "~integer"),
            ("prompt_eval_duration", "~integer"),
            ("eval_count", "~integer"),
            ("eval_duration", "~integer"),
        ],
    ),
    (
        "OllamaEmbed",
        &[
            ("model", "string"),
            ("embeddings", "[[number]]"),
            ("total_duration", "integer"),
            ("load_duration", "integer"),
            ("prompt_eval_count", "integer"),
        ],
    ),
    ("OllamaEmbedding", &[("embedding", "[number]")]),
    ("OllamaModels", &[("models", "[OllamaModel]")]),
    (
        "OllamaModel",
        &[
            ("name", "string"),
            ("model", "string"),
            ("modified_at", "~string"),
            ("size", "integer"),
            ("digest", "string"),
            ("details", "OllamaDetails"),
            ("expires_at", "~string"),
            ("size_vram", "~integer"),
            ("context_length", "~integer"),
        ],
    ),
    (
        "OllamaDetails",
        &[
            ("parent_model", "string"),
            ("format", "string"),
            ("family", "string"),
            ("families", "[string]"),
            ("parameter_size", "string"),
            ("quantization_level", "string"),
        ],
    ),
    (
        "OllamaShow",
        &[
            ("modelfile", "string"),
            ("parameters", "string"),
            ("template", "string"),
            ("details", "OllamaDetails"),
            ("model_info", "Anything"),
            ("capabilities", "[string]"),
            ("modified_at", "string"),
        ],
    ),
    (
        "CohereEmbeddings",
        &[
            ("id", "string"),
            ("embeddings", "CohereVectors"),
            ("texts", "[string]"),
            ("meta", "CohereMeta"),
            ("response_type", "string"),
        ],
    ),
    ("CohereVectors", &[("float", "~[[number]]"), ("base64", "~[string]")]),
    ("CohereMeta", &[("api_version", "CohereVersion"), ("billed_units", "CohereUnits")]),
    ("CohereVersion", &[("version", "string")]),
    ("CohereUnits", &[("input_tokens", "integer")]),
    (
        "Infill",
        &[
            ("index", "integer"),
            ("content", "string"),
            ("stop", "boolean"),
            ("model", "string"),
            ("tokens_predicted", "integer"),
            ("tokens_evaluated", "integer"),
            ("stop_type", "~string"),
            ("stopping_word", "~string"),
            ("truncated", "~boolean"),
            ("tokens_cached", "~integer"),
            ("timings", "~Timings"),
        ],
    ),
    (
        "Timings",
        &[
            ("cache_n", "integer"),
            ("prompt_n", "integer"),
            ("prompt_ms", "number"),
            ("prompt_per_second", "number"),
            ("predicted_n", "integer"),
            ("predicted_ms", "number"),
            ("predicted_per_second", "number"),
        ],
    ),
];
