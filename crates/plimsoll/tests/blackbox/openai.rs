//! The official `openai` Python client against the server: what its users rely on, checked by a script of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::product::{Server, repository};

/// The release the script was written against.
const OPENAI: &str = "openai==3.52.0";

/// Python with the client, installed once below the build's own files.
///
/// A plain directory instead of a virtual environment: it needs nothing but pip, and where pip may not touch the system's
/// packages it may still fill a directory.
pub fn packages() -> &'static Path {
    static PACKAGES: OnceLock<PathBuf> = OnceLock::new();
    PACKAGES.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(OPENAI.replace("==", "-"));
        let complete = target.join("complete");
        if !complete.is_file() {
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]).arg(&target).arg(OPENAI);
            let output = pip.output().expect("python3 runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "pip could not install {OPENAI}: {said}");
            std::fs::write(&complete, OPENAI).expect("the directory is ours");
        }
        target
    })
}

#[test]
fn the_openai_client_gets_what_it_expects() {
    let packages = packages();
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
