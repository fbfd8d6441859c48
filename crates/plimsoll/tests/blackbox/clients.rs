//! The official Python clients against the server: what their users rely on, checked by a script for each.

use std::process::Command;

use crate::product::{Server, repository};
use crate::python::packages;

/// The releases the scripts were written against.
pub const OPENAI: &str = "openai==3.52.0";
const ANTHROPIC: &str = "anthropic==2.12.0";

/// Runs a script of `tests/clients` against a server of its own.
fn satisfies(client: &str, script: &str) {
    let packages = packages(client);
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    let output = Command::new("python3")
        .arg(repository().join("tests/clients").join(script))
        .arg(format!("http://{}", server.address))
        .env("PYTHONPATH", packages)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        // Nothing on this machine may come between the client and the loopback address.
        .envs([("NO_PROXY", "*"), ("no_proxy", "*")])
        .output()
        .expect("python3 runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}\nserver:\n{}", server.log());
    assert!(stdout.trim_end().ends_with("all good"), "the script came to its end: {stdout}");
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
