//! PDFs in requests: they are read in a separate process, within its limits.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::product::{Server, repository};

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(repository().join("crates/plimsoll-document/tests/fixtures").join(name)).unwrap()
}

fn part(name: &str, file: &[u8]) -> Value {
    let data = format!("data:application/pdf;base64,{}", STANDARD.encode(file));
    json!({"type": "input_file", "filename": name, "file_data": data})
}

/// The status and the answer of a token count for a message with this part.
fn count(server: &Server, part: Value) -> (u16, Value) {
    let body = json!({"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "Sum it up."}]}]});
    let answer = server.post("/v1/responses/input_tokens", &body);
    (answer.status, answer.json())
}

#[test]
fn pdfs_are_read_apart_and_within_limits() {
    let flags = ["--max-total-token-num", "2048", "--document-bytes", "33554432"];
    let server = Server::start_model(Path::new("demo"), &flags);
    let (status, read) = count(&server, part("owner.pdf", &fixture("owner.pdf")));
    assert_eq!(status, 200, "{read}");
    let told = json!({"type": "input_text", "text": "owner.pdf:\n\nOwner only.\n"});
    assert_eq!(read, count(&server, told).1, "the prompt has the PDF's text and its name");
    // A file with deeply nested objects.
    let deep = format!("%PDF-1.7\n1 0 obj\n{}\nendobj\ntrailer << /Root 1 0 R >>\n%%EOF", "[".repeat(500_000));
    for (name, file, words) in [
        ("locked.pdf", fixture("locked.pdf"), "encrypted"),
        ("empty.pdf", fixture("empty.pdf"), "no text on its 1 pages"),
        ("deep.pdf", deep.into_bytes(), "PDF"),
        ("half.pdf", fixture("two-pages.pdf")[..9000].to_vec(), "PDF"),
    ] {
        let (status, error) = count(&server, part(name, &file));
        assert_eq!(status, 400, "{name}: {error}");
        let error = &error["error"];
        assert_eq!(error["param"], "input[0].content[0].file_data");
        assert!(error["message"].as_str().unwrap().contains(words), "{name}: {error}");
    }
    let (status, again) = count(&server, part("owner.pdf", &fixture("owner.pdf")));
    assert_eq!((status, again), (200, read), "the server goes on");
    drop(server);
    // With little memory a file is refused, and the error names the flag of the limit.
    let server =
        Server::start_model(Path::new("demo"), &["--max-total-token-num", "2048", "--document-bytes", "65536"]);
    let (status, error) = count(&server, part("two.pdf", &fixture("two-pages.pdf")));
    assert_eq!(status, 400, "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("64.0 KiB of memory (--document-bytes)"), "{error}");
}
