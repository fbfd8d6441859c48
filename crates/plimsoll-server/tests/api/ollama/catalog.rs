//! Ollama's routes that list models, and those that would change them.

use plimsoll_engine::Limits;
use plimsoll_engine::testing::{letters, limits};
use serde_json::{Value, json};

use super::{THINKS, error, says};
use crate::common::{Server, config, post};

#[test]
fn clients_that_probe_find_a_server() {
    let server = Server::start(letters);
    assert_eq!(server.get("/").status, 200);
    let mut head = server.send("HEAD / HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert!(head.until("\r\n\r\n").starts_with("HTTP/1.1 200"));
    let version = server.get("/api/version").ok();
    let numbers: Vec<u32> = version["version"].as_str().unwrap().split('.').map(|part| part.parse().unwrap()).collect();
    assert!(numbers >= vec![0, 6, 4], "some clients ask for this release at least: {numbers:?}");
}

#[test]
fn every_name_is_listed_with_a_tag() {
    let server = Server::start(letters);
    let list = server.get("/api/tags").ok();
    let names: Vec<&str> = list["models"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny:latest", "org/tiny-alias:latest"]);
    let model = &list["models"][0];
    assert_eq!(model["model"], model["name"]);
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    assert_eq!((&model["modified_at"], &model["size"]), (&json!("2023-11-14T22:13:20Z"), &json!(98_765_432)));
    let details = json!({
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "134.52M",
        "quantization_level": "Q4_1"
    });
    assert_eq!(model["details"], details);
    // Each of these names is accepted.
    for name in names {
        server.post("/api/show", &json!({"model": name})).ok();
    }
}

#[test]
fn running_models_are_on_the_cpu() {
    let server = Server::start(letters);
    let list = server.get("/api/ps").ok();
    let model = &list["models"][0];
    assert_eq!((&model["name"], &model["size_vram"]), (&json!("tiny:latest"), &json!(0)));
    assert_eq!(model["context_length"], limits().max_req_total_len);
    assert!(model["size"].is_u64() && model["expires_at"].as_str().unwrap().starts_with("9999"));
}

fn show(server: &Server) -> Value {
    server.post("/api/show", &json!({"model": "tiny"})).ok()
}

#[test]
fn show_says_what_the_model_is_and_can() {
    let server = says(THINKS, "x");
    let model = show(&server);
    assert_eq!(model["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(model["model_info"]["general.architecture"], "llama");
    assert_eq!(model["model_info"]["llama.context_length"], limits().max_req_total_len);
    assert_eq!(model["model_info"]["general.parameter_count"], 134_515_008);
    assert_eq!((&model["details"]["family"], &model["template"]), (&json!("llama"), &json!(THINKS)));
    assert!(model["parameters"].as_str().unwrap().contains("temperature 1\n"));
    assert_eq!(show(&Server::start(letters))["capabilities"], json!(["completion", "tools"]));
    let encoder = Server::with(config(), Limits { encoder: true, ..limits() }, letters);
    assert_eq!(show(&encoder)["capabilities"], json!(["embedding"]));
    assert!(error(&server.post("/api/show", &json!({"name": "other"})), 404).contains("other"));
}

#[test]
fn pull_has_what_is_there_and_delete_refuses() {
    let server = Server::start(letters);
    let streamed = server.post("/api/pull", &json!({"model": "tiny"}));
    assert_eq!(streamed.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(streamed.body, "{\"status\":\"pulling manifest\"}\n{\"status\":\"success\"}\n");
    let whole = server.post("/api/pull", &json!({"name": "tiny:latest", "stream": false, "insecure": false}));
    assert_eq!(whole.ok(), json!({"status": "success"}));
    assert!(error(&server.post("/api/pull", &json!({"model": "llama3"})), 404).contains("llama3"));
    let text = post("/api/delete", &json!({"model": "tiny"}).to_string()).replacen("POST", "DELETE", 1);
    assert!(error(&server.send(text).answer(), 400).contains("deletes no models"));
}
