//! The official Python clients against the server: what their users rely on, checked by a script for each.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::product::{Server, repository};

/// The releases the scripts were written against.
pub const OPENAI: &str = "openai==3.52.0";
const ANTHROPIC: &str = "anthropic==2.12.0";

/// Python with a client, installed once below the build's own files.
///
/// A plain directory instead of a virtual environment: it needs nothing but pip, and where pip may not touch the system's
/// packages it may still fill a directory.
pub fn packages(client: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(client.replace("==", "-"));
    let complete = target.join("complete");
    if !complete.is_file() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]).arg(&target).arg(client);
        let output = pip.output().expect("python3 runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "pip could not install {client}: {said}");
        std::fs::write(&complete, client).expect("the directory is ours");
    }
    target
}

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
