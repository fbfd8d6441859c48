//! Files among the parts of a message.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use std::io::{Read, Write};
use std::net::TcpListener;

use plimsoll_server::{MediaConfig, MediaFetch};

use super::*;

fn file(name: Option<&str>, content: &[u8]) -> Value {
    let data = format!("data:text/plain;base64,{}", STANDARD.encode(content));
    json!({"type": "input_file", "filename": name, "file_data": data})
}

fn asked(parts: &Value) -> Value {
    json!({"input": [{"role": "user", "content": parts}]})
}

#[test]
fn text_files_are_text_of_their_message() {
    let server = says(PLAIN, "Ok.", 2, FinishReason::Stop);
    let question = json!({"type": "input_text", "text": "What is this?"});
    let note = file(Some("note.md"), "# Tide\n3 m, na\u{ef}ve\n".as_bytes());
    let response = create(&server, &asked(&json!([question, note])));
    let prompt = "[user]What is this?\nnote.md:\n\n# Tide\n3 m, na\u{ef}ve\n";
    assert_eq!(prompt_text(&server), prompt);
    // The file is stored as it was sent, and read again when the conversation continues.
    let id = response["id"].as_str().unwrap();
    let items = server.get(&format!("/v1/responses/{id}/input_items")).ok();
    assert_eq!(items["data"][0]["content"][1], note);
    create(&server, &json!({"previous_response_id": id, "input": "And?"}));
    assert_eq!(prompt_text(&server), format!("{prompt}[assistant]Ok.[user]And?"));
    // The same in chat, with base64 only, and at Messages.
    let data = STANDARD.encode("plain");
    let part = json!({"type": "file", "file": {"filename": "a.txt", "file_data": data}});
    let body = json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 5});
    server.post("/v1/chat/completions", &body).ok();
    assert_eq!(prompt_text(&server), "[user]a.txt:\n\nplain\n");
    for source in [
        json!({"type": "text", "media_type": "text/plain", "data": "plain"}),
        json!({"type": "base64", "media_type": "text/plain", "data": data}),
    ] {
        let block = json!({"type": "document", "source": source, "title": "a.txt", "context": "Mine.", "citations": {"enabled": false}});
        let body = json!({"messages": [{"role": "user", "content": [block]}], "max_tokens": 5});
        server.post("/v1/messages", &body).ok();
        assert_eq!(prompt_text(&server), "[user]Mine.\na.txt:\n\nplain\n");
    }
    server.assert_idle();
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    let server = says(PLAIN, "Ok.", 2, FinishReason::Stop);
    let long = "x".repeat(300);
    for (part, param, words) in [
        (file(None, b"%PDF-1.7"), "file_data", "--document-bytes"),
        (file(Some("a.docx"), b"PK\x03\x04\0"), "file_data", "`a.docx` is neither"),
        (file(None, b" \n"), "file_data", "is empty"),
        (file(Some(&long), b"x"), "file_data", "256 bytes"),
        (json!({"type": "input_file", "file_data": "no base64!"}), "file_data", "not base64"),
        (json!({"type": "input_file", "file_data": "data:text/plain,hi"}), "file_data", "data:TYPE;base64"),
        (json!({"type": "input_file", "file_id": "file_1"}), "file_id", "keeps no files"),
        (json!({"type": "input_file", "file_url": "ftp://x/"}), "file_url", "must begin with https://"),
        (json!({"type": "input_file", "file_url": "data:text/plain;base64,iVBORw0KGgo="}), "file_url", "neither"),
        (json!({"type": "input_file", "file_url": "http://x/", "file_data": "eA=="}), "file_data", "one of them"),
        (json!({"type": "input_file"}), "file_data", "is missing"),
    ] {
        let error = server.post("/v1/responses", &ask(&asked(&json!([part])))).error(400);
        assert_eq!(error["param"], format!("input[0].content[0].{param}"), "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    server.assert_idle();
}

/// Starts a server of files on a loopback port and returns its address.
fn files() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 4096];
            let read = stream.read(&mut head).unwrap();
            let line = String::from_utf8_lossy(&head[..read]).into_owned();
            let (status, length, body): (_, usize, &[u8]) = match line.split(' ').nth(1).unwrap() {
                "/note.md" => (200, 11, b"# Tide\n3 m\n"),
                "/image" => (200, 4, b"\x89PNG"),
                "/empty" => (200, 1, b"\n"),
                "/paper.pdf" => (200, 8, b"%PDF-1.7"),
                "/large" => (200, (16 << 20) + 1, b"x"),
                _ => (404, 0, b""),
            };
            let _ = write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n");
            let _ = stream.write_all(&body[..length.min(body.len())]);
        }
    });
    url
}

fn fetching(fetch: MediaFetch) -> ServerConfig {
    ServerConfig { media: MediaConfig { fetch, ..MediaConfig::default() }, ..config() }
}

#[test]
fn files_are_fetched_by_the_rules_of_media() {
    let files = files();
    let server = says_with(PLAIN, fetching(MediaFetch::Any), "Ok.", 2, FinishReason::Stop);
    let of = |path: &str| json!({"type": "input_file", "filename": "note.md", "file_url": format!("{files}{path}")});
    let response = create(&server, &asked(&json!([of("/note.md")])));
    let prompt = "[user]note.md:\n\n# Tide\n3 m\n";
    assert_eq!(prompt_text(&server), prompt);
    // The store keeps the file's URL. The next response of the conversation fetches it again.
    let id = response["id"].as_str().unwrap();
    let items = server.get(&format!("/v1/responses/{id}/input_items")).ok();
    assert_eq!(items["data"][0]["content"][0], of("/note.md"));
    create(&server, &json!({"previous_response_id": id, "input": "And?"}));
    assert_eq!(prompt_text(&server), format!("{prompt}[assistant]Ok.[user]And?"));
    assert_eq!(server.metric("plimsoll_media_fetched_total"), 2);
    let many = vec![of("/note.md"); 65];
    let error = server.post("/v1/responses", &ask(&asked(&json!(many)))).error(400);
    assert_eq!(error["param"], "input[0].content[64].file_url", "{error}");
    assert_eq!(server.metric("plimsoll_media_fetched_total"), 2, "it is refused before anything is fetched");
    let source = json!({"type": "url", "url": format!("{files}/note.md")});
    let block = json!({"type": "document", "source": source, "title": "note.md"});
    let body = json!({"messages": [{"role": "user", "content": [block]}], "max_tokens": 5});
    server.post("/v1/messages", &body).ok();
    assert_eq!(prompt_text(&server), prompt);
    let data = json!({"type": "input_file", "file_url": "data:text/plain;base64,cGxhaW4="});
    create(&server, &asked(&json!([data])));
    assert_eq!(prompt_text(&server), "[user]plain");
    for (path, code, words) in [
        ("/image", "unsupported", "`note.md` is neither UTF-8 text nor a PDF"),
        ("/empty", "invalid_value", "is empty"),
        ("/paper.pdf", "unsupported", "--document-bytes"),
        ("/large", "invalid_value", "16777217 bytes"),
        ("/none", "fetch_failed", "status 404"),
    ] {
        let error = server.post("/v1/responses", &ask(&asked(&json!([of(path)])))).error(400);
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!("input[0].content[0].file_url"), &json!(code)),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    server.assert_idle();
    // By default no file is fetched from this machine; with `off`, none at all.
    for (fetch, words) in [(MediaFetch::Public, "(--media-fetch)"), (MediaFetch::Off, "--media-fetch off")] {
        let server = says_with(PLAIN, fetching(fetch), "Ok.", 2, FinishReason::Stop);
        let error = server.post("/v1/responses", &ask(&asked(&json!([of("/note.md")])))).error(400);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        server.assert_idle();
    }
}
