//! The bodies and answers of embeddings, reranking and scores.

use serde_json::{Value, json};

use super::bodies::{flag, integer, object, text};
use super::schema::Object;

/// A text or a list of texts. `ids`: token ids are allowed, too.
fn input(ids: bool) -> Value {
    let one = json!({"type": "string"});
    let texts = json!({"type": "array", "items": {"type": "string"}, "minItems": 1});
    if !ids {
        return json!({"anyOf": [one, texts], "examples": ["x", ["x"]]});
    }
    let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
    let lists = json!({"type": "array", "items": ids, "minItems": 1});
    json!({"anyOf": [one, texts, ids, lists], "examples": ["x", ["x", "y"], [97], [[97], [98]]]})
}

/// A number from 1 up; the request's list bounds it.
fn count() -> Value {
    json!({"type": "integer", "minimum": 1, "examples": [1]})
}

/// The number of tokens that are read of a longer input.
fn truncate() -> Value {
    json!({"type": "integer", "minimum": -1, "description": "Tokens of an input that are read, -1 for as many as the model takes; without it, what is longer is refused",
        "examples": [-1]})
}

/// The body of `/v1/embeddings`.
pub(super) fn embeddings() -> Value {
    let formats = json!({"type": "string", "enum": ["float", "base64"], "examples": ["float", "base64"]});
    let fields = vec![
        ("model", text("default")),
        ("input", input(true)),
        ("encoding_format", formats),
        ("dimensions", integer(1, 4)),
        ("add_special_tokens", flag(false)),
        ("user", text("somebody")),
        ("truncate_prompt_tokens", truncate()),
    ];
    object(fields, &["input"])
}

/// The body of `/v1/rerank`.
pub(super) fn rerank() -> Value {
    let document = json!({
        "type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}, "additionalProperties": false
    });
    let documents = json!({
        "type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, document]},
        "examples": [["x", "y"], [{"text": "x"}]]
    });
    let fields = vec![
        ("model", text("default")),
        ("query", text("x")),
        ("documents", documents),
        ("top_n", count()),
        ("return_documents", flag(false)),
        ("truncate_prompt_tokens", truncate()),
        ("max_tokens_per_doc", count()),
    ];
    object(fields, &["query", "documents"])
}

/// The body of `/v1/score`.
pub(super) fn score() -> Value {
    let fields = vec![
        ("model", text("default")),
        ("text_1", input(false)),
        ("text_2", input(false)),
        ("truncate_prompt_tokens", truncate()),
    ];
    object(fields, &["text_1", "text_2"])
}

/// The one schema that is not a plain object: numbers, or their bytes in base64.
pub(super) fn numbers() -> Value {
    json!({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})
}

pub(super) const OBJECTS: &[Object] = &[
    ("Embeddings", &[("object", "string"), ("data", "[Embedding]"), ("model", "string"), ("usage", "PooledUsage")]),
    ("Embedding", &[("object", "string"), ("index", "integer"), ("embedding", "Numbers")]),
    ("PooledUsage", &[("prompt_tokens", "integer"), ("total_tokens", "integer")]),
    ("Ranking", &[("id", "string"), ("model", "string"), ("results", "[Ranked]"), ("usage", "PooledUsage")]),
    ("Ranked", &[("index", "integer"), ("relevance_score", "number"), ("document", "~RankedText")]),
    ("RankedText", &[("text", "string")]),
    (
        "Scores",
        &[
            ("id", "string"),
            ("object", "string"),
            ("created", "integer"),
            ("model", "string"),
            ("data", "[Score]"),
            ("usage", "PooledUsage"),
        ],
    ),
    ("Score", &[("index", "integer"), ("object", "string"), ("score", "number")]),
];
