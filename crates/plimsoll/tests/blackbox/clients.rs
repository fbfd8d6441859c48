//! The official Python clients against the server: what their users rely on, checked by a script for each.

use crate::product::Server;
use crate::python;

/// The releases the scripts were written against.
pub const OPENAI: &str = "openai==3.52.0";
pub const ANTHROPIC: &str = "anthropic==2.12.0";

/// Runs a script against a server of its own.
fn satisfies(client: &str, script: &str) {
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    python::satisfies(client, script, &server, &[]);
}

#[test]
fn the_openai_client_gets_what_it_expects() {
    satisfies(OPENAI, "openai_client.py");
}

#[test]
fn the_openai_clients_responses_are_what_it_expects() {
    satisfies(OPENAI, "responses_client.py");
}

#[test]
fn the_anthropic_client_gets_what_it_expects() {
    satisfies(ANTHROPIC, "anthropic_client.py");
}
