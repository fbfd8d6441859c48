//! The official Python clients against the server: what their users rely on, checked by a script for each.

use std::process::Command;

use serde_json::json;

use crate::page::{modules, program};
use crate::product::{Server, repository};
use crate::python::{self, comes_to_its_end};

/// The releases the scripts were written against.
pub const OPENAI: &str = "openai==3.52.0";
pub const ANTHROPIC: &str = "anthropic==2.12.0";
const AIDER: &str = "aider-chat==0.86.2";
const AGENTS: &str = "openai-agents==0.24.0";
const INSTRUCTOR: &str = "instructor==1.17.0";
const LITELLM: &str = "litellm==1.110.2";
const LANGCHAIN: [&str; 3] = ["langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24"];
const PYDANTIC_AI: &str = "pydantic-ai-slim[openai]==2.68.0";

/// Vercel's `ai`, its three providers and the schemas that the script writes: 36 MB.
const AI: [&str; 5] = [
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140",
    "zod@4.6.7",
];

/// Runs a script against a server that refuses what it does not know: the official clients' own types are all known.
fn satisfies_strictly(client: &str, script: &str) {
    let flags = ["--max-total-token-num", "16384", "--max-req-total-len", "2048", "--unknown-fields", "refuse"];
    python::satisfies(client, script, &Server::start(&flags), &[]);
}

/// Runs a script against a server of its own.
fn satisfies(client: &str, script: &str) {
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    python::satisfies(client, script, &server, &[]);
}

#[test]
#[ignore = "external"]
fn the_openai_client_gets_what_it_expects() {
    satisfies_strictly(OPENAI, "openai_client.py");
}

#[test]
#[ignore = "external"]
fn the_openai_clients_responses_are_what_it_expects() {
    satisfies_strictly(OPENAI, "responses_client.py");
}

#[test]
#[ignore = "external"]
fn the_anthropic_client_gets_what_it_expects() {
    satisfies_strictly(ANTHROPIC, "anthropic_client.py");
}

#[test]
#[ignore = "external"]
fn the_openai_agents_sdk_calls_a_tool_and_ends() {
    satisfies(AGENTS, "agents_client.py");
}

#[test]
#[ignore = "external"]
fn instructor_gets_objects() {
    satisfies(INSTRUCTOR, "instructor_client.py");
}

#[test]
#[ignore = "external"]
fn pydantic_ai_gets_typed_outputs() {
    satisfies(PYDANTIC_AI, "pydantic_ai_client.py");
}

#[test]
#[ignore = "external"]
fn litellm_calls_tools_and_gets_an_object() {
    satisfies(LITELLM, "litellm_client.py");
}

#[test]
#[ignore = "external"]
fn langchain_calls_tools_gets_objects_and_runs_an_agent() {
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    python::ends_well(python::among("langchain", &LANGCHAIN, "python3"), "langchain_client.py", &server, &[]);
}

#[test]
#[ignore = "external"]
fn the_ai_package_calls_tools_through_each_provider() {
    let modules = modules("ai-sdk", &AI);
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    let mut command = Command::new(program(&["node"]));
    command
        .arg(repository().join("tests/clients/tools.mjs"))
        .env("URL", format!("http://{}", server.address))
        .env("MODULES", modules)
        .envs([("NO_PROXY", "*"), ("no_proxy", "*")]);
    comes_to_its_end(&mut command, &server);
}

#[test]
#[ignore = "external"]
fn aider_edits_a_file() {
    satisfies(AIDER, "aider_client.py");
}

#[test]
#[ignore = "external"]
fn promtool_finds_nothing_wrong_with_the_metrics() {
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    server.ask("/v1/completions", &json!({"prompt": "a", "max_tokens": 4}));
    python::ends_well(Command::new("bash"), "promtool.sh", &server, &[]);
}
