//! The official `openai` Python client against the server: what its users rely on, checked by a script of its own.

use std::process::Command;

use crate::product::{Server, repository};
use crate::python::packages;

/// The release the script was written against.
const OPENAI: &str = "openai==3.52.0";

#[test]
fn the_openai_client_gets_what_it_expects() {
    let packages = packages(OPENAI);
    let server = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    let output = Command::new("python3")
        .arg(repository().join("tests/clients/openai_client.py"))
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
