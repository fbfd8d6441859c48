//! The official clients against the server: a script for each checks the features that its users rely on.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::page::{modules, program};
use crate::product::{Server, plimsoll, repository, run};
use crate::python::{self, comes_to_its_end};

/// The releases that the scripts were written for.
pub const OPENAI: &str = "openai==3.52.0";
pub const ANTHROPIC: &str = "anthropic==2.12.0";
const OLLAMA: &str = "ollama==0.6.3";
const OLLAMA_JS: &str = "ollama@0.6.4";
const MCP: [&str; 2] = ["mcp==2.3.0", OPENAI];
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

/// Runs a script against a server that refuses unknown fields. The server knows all fields of the official clients.
fn satisfies_strictly(client: &str, script: &str) {
    let flags = ["--max-total-token-num", "16384", "--max-req-total-len", "2048", "--unknown-fields", "refuse"];
    python::satisfies(client, script, &Server::start(&flags), &[]);
}

/// Runs a script against a new server.
fn satisfies(client: &str, script: &str) {
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    python::satisfies(client, script, &server, &[]);
}

/// Runs a Node.js script, which finds its packages in `modules`.
fn runs_in_node(script: &str, modules: &Path, server: &Server) {
    let mut command = Command::new(program(&["node"]));
    command
        .arg(repository().join("tests/clients").join(script))
        .env("URL", format!("http://{}", server.address))
        .env("MODULES", modules)
        .envs([("NO_PROXY", "*"), ("no_proxy", "*")]);
    comes_to_its_end(&mut command, server);
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

/// An MCP server from the official package.
struct McpServer {
    child: Child,
    url: String,
    /// Its log, which stays open.
    _log: BufReader<ChildStdout>,
}

impl McpServer {
    fn start(words: &[&str]) -> Self {
        let mut command = python::among("mcp", &MCP, "python3");
        command.arg(repository().join("tests/clients/mcp_server.py")).args(words);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("python3 runs");
        let (mut url, mut log) = (String::new(), BufReader::new(child.stdout.take().expect("piped")));
        log.read_line(&mut url).expect("it says its address");
        let url = url.trim().to_owned();
        let address = url.split('/').nth(2).expect("it has a host");
        let since = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(since.elapsed() < Duration::from_secs(60), "it does not listen");
            sleep(Duration::from_millis(50));
        }
        Self { child, url, _log: log }
    }
}

impl Drop for McpServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "external"]
fn tools_of_the_mcp_package_are_listed_and_called() {
    let (streams, json) = (McpServer::start(&[]), McpServer::start(&["json"]));
    let named = [format!("streams={}", streams.url), format!("json={}", json.url)];
    let flags = ["--max-total-token-num", "16384", "--max-req-total-len", "2048", "--unknown-fields", "refuse"];
    let server = Server::start(&[&flags[..], &["--mcp-server", &named[0], "--mcp-server", &named[1]]].concat());
    let command = python::among("mcp", &MCP, "python3");
    python::ends_well(command, "mcp_client.py", &server, &named.map(PathBuf::from));
}

#[test]
#[ignore = "external"]
fn the_anthropic_client_gets_what_it_expects() {
    satisfies_strictly(ANTHROPIC, "anthropic_client.py");
}

#[test]
#[ignore = "external"]
fn the_ollama_client_gets_what_it_expects() {
    let flags = ["--max-total-token-num", "16384", "--max-req-total-len", "2048", "--unknown-fields", "refuse"];
    run(&["pull", "minilm"]).good();
    let embedder =
        Server::try_start(plimsoll(["serve", "minilm", "--port", "0"])).unwrap_or_else(|words| panic!("{words}"));
    let server = Server::start(&flags);
    let second = format!("http://{}", embedder.address).into();
    python::satisfies(OLLAMA, "ollama_client.py", &server, &[second]);
}

#[test]
#[ignore = "external"]
fn the_ollama_package_gets_what_it_expects() {
    let modules = modules("ollama", &[OLLAMA_JS]);
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    runs_in_node("ollama.mjs", &modules, &server);
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
    runs_in_node("tools.mjs", &modules, &server);
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
