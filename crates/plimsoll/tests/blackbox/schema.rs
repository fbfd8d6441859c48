//! `schemathesis` over the OpenAPI document: it tests the server with requests generated from the document alone.

use crate::product::{Server, repository};
use crate::python::beside;

/// The release that the script was written for.
const SCHEMATHESIS: &str = "schemathesis==4.32.5";

#[test]
#[ignore = "external"]
fn schemathesis_finds_no_5xx_and_no_mismatch() {
    // A short context keeps every answer short.
    let server =
        Server::start(&["--max-total-token-num", "4096", "--max-req-total-len", "64", "--unknown-fields", "refuse"]);
    let output = beside(SCHEMATHESIS, repository().join("tests/clients/schemathesis.sh"))
        .arg(format!("http://{}", server.address))
        .args(["python3", "-c", "from schemathesis.cli import schemathesis; schemathesis()"])
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the script runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}\nserver:\n{}", server.log());
    println!("{stdout}");
}
