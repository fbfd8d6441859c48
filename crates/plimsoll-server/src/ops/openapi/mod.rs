//! `GET /openapi.json`: the fields of every route and answer.
//!
//! Bodies are parsed field by field, so there are no types to derive this document from. `bodies` and `answers` repeat the fields, and
//! `tests/api/openapi.rs` compares both. Every listed field has an example, which is accepted. Every accepted field is listed. Other fields
//! are refused. Every answer fits its schema.

mod answers;
mod bodies;
mod disk;
mod ollama;
mod pooled;
mod schema;
mod transcriptions;
mod turns;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use schema::reference;

use crate::http::json::json as answer;
use crate::state::server::ServerState;

/// The handler of the document.
pub(crate) async fn handle(State(state): State<Arc<ServerState>>) -> Response {
    answer(&document(!state.config.api_keys.is_empty(), state.several, state.choices_max), None)
}

/// Routes that only a server with one model has.
const OF_ONE_MODEL: [&str; 11] = [
    "/v1/cache/save",
    "/v1/cache/load",
    "/v1/cache/saved/{name}",
    "/tokenizer_info",
    "/v1/kv_events",
    "/v1/loads",
    "/get_load",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
];

/// Returns method, path and summary of every route. `several`: whether the server has several models.
pub(crate) fn routes(several: bool) -> Vec<(String, String, String)> {
    let paths = paths();
    let methods = |(path, item): (&String, &Value)| {
        let methods = item.as_object().into_iter().flatten();
        let summary = |operation: &Value| operation["summary"].as_str().unwrap_or_default().to_owned();
        let route = |(method, operation): (&String, &Value)| (method.to_uppercase(), path.clone(), summary(operation));
        methods.map(route).collect::<Vec<_>>()
    };
    let all = paths.as_object().into_iter().flatten();
    all.filter(|(path, _)| !(several && OF_ONE_MODEL.contains(&path.as_str()))).flat_map(methods).collect()
}

/// Returns the document. `keyed`: whether the server needs API keys; `several`: whether it has several models; `choices_max`: the largest
/// `n` that it takes.
fn document(keyed: bool, several: bool, choices_max: u32) -> Value {
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Plimsoll",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "The APIs of OpenAI, Anthropic and Ollama, and what operators need. A field that is not listed is refused with a 400 that names it."
        },
        "paths": paths(),
        "components": {"schemas": answers::schemas()}
    });
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let body = &mut document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        body["properties"]["n"]["maximum"] = choices_max.into();
        body["properties"]["best_of"]["maximum"] = choices_max.into();
    }
    if several {
        if let Some(paths) = document["paths"].as_object_mut() {
            paths.retain(|path, _| !OF_ONE_MODEL.contains(&path.as_str()));
        }
        for (path, method) in [("/v1/cache", "get"), ("/v1/cache", "delete")] {
            let done = &mut document["paths"][path][method]["responses"]["200"];
            done["content"]["application/json"]["schema"] = reference("Caches");
        }
    }
    if keyed {
        document["components"]["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}
        });
        document["security"] = json!([{"bearer": []}, {"header": []}]);
        for probe in ["/health", "/ready"] {
            document["paths"][probe]["get"]["security"] = json!([]);
        }
    }
    document
}

fn paths() -> Value {
    let mut all = own_paths();
    for others in [ollama::paths(), transcriptions::paths()] {
        if let (Value::Object(all), Value::Object(others)) = (&mut all, others) {
            all.extend(others);
        }
    }
    all
}

fn own_paths() -> Value {
    let id = |name: &str| json!([{"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
    let resumed = |mut parameters: Value| {
        let query = |name: &str, schema: Value, description: &str| json!({"name": name, "in": "query", "schema": schema, "description": description});
        if let Value::Array(list) = &mut parameters {
            list.push(query("stream", json!({"type": "boolean"}), "The events of a response in the background"));
            list.push(query(
                "starting_after",
                json!({"type": "integer", "minimum": 0}),
                "The events after this one; needs stream",
            ));
        }
        parameters
    };
    let with = |mut operation: Value, parameters: Value| {
        operation["parameters"] = parameters;
        operation
    };
    let path_name = json!([{"name": "name", "in": "path", "required": true, "schema": bodies::prefix_name()}]);
    json!({
        "/v1/chat/completions": {"post": generating("Answer a conversation", &bodies::chat(), "ChatCompletion")},
        "/v1/completions": {"post": generating("Continue a text", &bodies::completions(), "Completion")},
        "/v1/messages": {"post": anthropics(generating("Answer a conversation, as Anthropic's API does", &turns::messages(), "AnthropicMessage"))},
        "/v1/messages/count_tokens": {"post": anthropics(posting("The tokens of its prompt", &turns::count_tokens(), "MessageCount"))},
        "/v1/responses": {"post": generating("Answer a conversation, and keep it", &turns::responses(), "Response")},
        "/v1/responses/input_tokens": {"post": posting("The tokens of its prompt", &turns::input_tokens(), "ResponseCount")},
        "/v1/responses/{id}": {
            "get": with(getting("A stored response", "Response"), resumed(id("id"))),
            "delete": with(getting("Forget it", "ResponseDeleted"), id("id"))
        },
        "/v1/responses/{id}/cancel": {"post": with(getting("End a running response", "Response"), id("id"))},
        "/v1/responses/{id}/input_items": {"get": with(getting("What came before its output", "ItemList"), id("id"))},
        "/v1/embeddings": {"post": posting("What texts mean, as numbers", &pooled::embeddings(), "Embeddings")},
        "/v1/rerank": {"post": posting("Documents by how well they answer a query", &pooled::rerank(), "Ranking")},
        "/v2/rerank": {"post": posting("The same, where Cohere's clients look for it", &pooled::rerank(), "Ranking")},
        "/rerank": {"post": posting("The same, where gateways look for it", &pooled::rerank(), "Ranking")},
        "/v1/score": {"post": posting("How well texts fit each other", &pooled::score(), "Scores")},
        "/tokenize": {"post": posting("Text or a conversation to token ids", &bodies::tokenize(), "Tokens")},
        "/detokenize": {"post": posting("Token ids to text", &bodies::detokenize(), "Text")},
        "/tokenizer_info": {"get": getting("The tokenizer's special tokens, its size and the chat template", "TokenizerInfo")},
        "/v1": {"get": getting("What is here", "Index")},
        "/v1/models": {"get": getting("Every name the model goes by", "ModelList")},
        "/v1/models/{id}": {"get": with(getting("One name", "Model"), id("id"))},
        "/v1/status": {"get": getting("Every request that is being answered, and totals", "Status")},
        "/v1/requests/{id}": {"delete": with(getting("End a request by the id in its answer or its x-request-id", "Cancelled"), id("id"))},
        "/v1/cache": {
            "get": getting("What the prefix cache holds", "Cache"),
            "delete": getting("Forget it; the pages are free when the answer comes", "CacheCleared")
        },
        "/v1/cache/save": {"post": posting("Compute a prompt and keep its pages on disk under a name; with --cache-dir", &bodies::save_prefix(), "PrefixDone")},
        "/v1/cache/load": {"post": posting("Bring a saved prefix into memory", &bodies::load_prefix(), "PrefixDone")},
        "/v1/cache/saved/{name}": {"delete": with(getting("Keep it no longer", "PrefixRemoved"), path_name)},
        "/v1/kv_events": {"get": plain("What the prefix cache holds and how it changes, for routers; with --kv-events", "text/event-stream")},
        "/v1/loads": {"get": getting("How much there is to do", "Loads")},
        "/get_load": {"get": getting("The same, for older gateways", "OldLoads")},
        "/server_info": {"get": getting("What gateways ask of a server", "ServerInfo")},
        "/get_server_info": {"get": getting("The same under its older name", "ServerInfo")},
        "/model_info": {"get": getting("What gateways ask of its model", "ModelInfo")},
        "/get_model_info": {"get": getting("The same under its older name", "ModelInfo")},
        "/v1/memory": {"get": getting("The ledger: every component's planned, committed and peak bytes", "Memory")},
        "/health": {"get": getting("Does the engine make progress?", "Health")},
        "/ready": {"get": getting("Would a request be taken?", "Health")},
        "/version": {"get": getting("The version of this build", "Version")},
        "/metrics": {"get": metrics()},
        "/openapi.json": {"get": getting("This document", "Document")}
    })
}

/// The operation of `/metrics`, whose answer has the format that `Accept` prefers.
fn metrics() -> Value {
    let mut operation = plain("Prometheus metrics", "text/plain");
    let content = &mut operation["responses"]["200"]["content"];
    content["application/openmetrics-text"] = content["text/plain"].clone();
    operation
}

fn errors() -> Value {
    json!({"description": "An error, in OpenAI's shape", "content": {"application/json": {"schema": reference("Error")}}})
}

fn getting(summary: &str, schema: &str) -> Value {
    json!({
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": {"application/json": {"schema": reference(schema)}}},
            "default": errors()
        }
    })
}

/// Adds errors in Anthropic's form.
fn anthropics(mut operation: Value) -> Value {
    operation["responses"]["default"] = json!({
        "description": "An error, in Anthropic's shape", "content": {"application/json": {"schema": reference("MessageError")}}
    });
    operation
}

fn plain(summary: &str, kind: &str) -> Value {
    let mut content = Map::new();
    content.insert(kind.into(), json!({"schema": {"type": "string"}}));
    json!({"summary": summary, "responses": {"200": {"description": "Done", "content": content}, "default": errors()}})
}

fn posting(summary: &str, body: &Value, schema: &str) -> Value {
    let mut operation = getting(summary, schema);
    operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": body}}});
    operation
}

/// An operation with a stream as the other answer.
fn generating(summary: &str, body: &Value, schema: &str) -> Value {
    let mut operation = posting(summary, body, schema);
    operation["responses"]["200"]["content"]["text/event-stream"] = json!({
        "schema": {
            "type": "object", "required": ["data"],
            "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
            "description": "Each event's data is a chunk; comments or pings while nothing comes; `data: [DONE]`, or an event that is known by its name, at every end"
        }
    });
    operation
}
