//! The protocol itself: revisions, requests of a server to its client, TLS, and the tokens of tools.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::ServerConfig as TlsConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::server::{ASKED, Traits};
use super::*;

const PLAINLY: Traits =
    Traits { on_list: Manner::Answers, on_call: Manner::Answers, revision: Some("2025-06-18"), tls: None };

#[test]
fn requests_of_a_server_are_answered_before_its_answer_is_read() {
    let mcp = McpServer::with(Traits { on_list: Manner::Asks(1), on_call: Manner::Asks(1), ..PLAINLY });
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let response = create(&server, &calc(&json!({"authorization": "sesame"})));
    assert_eq!(
        (&response["status"], &response["output"][1]["output"]),
        (&json!("completed"), &json!("5")),
        "{response}"
    );
    let replies: Vec<_> = mcp.came().into_iter().filter(|came| came.method == "post").collect();
    // Replies to the call's requests may come while the list's are counted: each round has four.
    assert_eq!(replies.len(), 2 * ASKED.len(), "{replies:?}");
    for (n, reply) in replies.iter().take(ASKED.len()).enumerate() {
        let id = if n % 2 == 0 { json!(n) } else { json!(n.to_string()) };
        assert_eq!((&reply.body["jsonrpc"], &reply.body["id"]), (&json!("2.0"), &id));
        match ASKED[n] {
            "ping" => assert_eq!((&reply.body["result"], &reply.body["error"]), (&json!({}), &Value::Null)),
            method => assert_eq!(reply.body["error"]["code"], -32601, "{method}: {}", reply.body),
        }
        assert!(reply.head.contains("mcp-session-id: s-1\r\nmcp-protocol-version: 2025-06-18"), "{}", reply.head);
        assert!(reply.head.contains("authorization: bearer sesame"), "{}", reply.head);
    }
    server.assert_idle();
    // 20 requests are more than the limit.
    let mcp = McpServer::with(Traits { on_call: Manner::Asks(5), ..PLAINLY });
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let response = create(&server, &calc(&json!({})));
    let call = &response["output"][1];
    assert_eq!(call["error"]["type"], "mcp_protocol_error", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("more than 16 requests"), "{call}");
    server.assert_idle();
}

#[test]
fn revisions_are_agreed_on() {
    for revision in ["2025-03-26", "2025-06-18", "2025-11-25"] {
        let mcp = McpServer::with(Traits { revision: Some(revision), ..PLAINLY });
        let server = model(allowing(&mcp, PATIENCE), CALL);
        assert_eq!(create(&server, &calc(&json!({})))["output"][1]["output"], "5", "{revision}");
        let came = mcp.came();
        assert_eq!(came[0].body["params"]["protocolVersion"], "2025-11-25", "the newest one is asked for");
        assert!(!came[0].head.contains("mcp-protocol-version"), "{}", came[0].head);
        for message in &came[1..4] {
            assert!(message.head.contains(&format!("mcp-protocol-version: {revision}\r\n")), "{}", message.head);
        }
    }
    // A server that only supports a later revision: it chooses that one all the same, or refuses `initialize`.
    for (revision, word) in [
        (Some("2099-01-01"), "it speaks revision `2099-01-01` of MCP; known here are 2025-03-26"),
        (None, "HTTP status 400: Unsupported protocol version (it speaks 2026-07-28; known here are 2025-03-26"),
    ] {
        let mcp = McpServer::with(Traits { revision, ..PLAINLY });
        let server = model(allowing(&mcp, PATIENCE), CALL);
        let error = server.post("/v1/responses", &ask(&calc(&json!({})))).error(424);
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
        assert_eq!(mcp.methods(), ["initialize"]);
        server.assert_idle();
    }
}

#[test]
fn servers_over_tls_are_checked_against_the_certificates() {
    // tools/make_tls_fixtures.sh makes them.
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tls");
    let file = |name: &str| fixtures.join(name);
    let tls = |name: &str| {
        let chain = CertificateDer::pem_file_iter(file(name)).unwrap().collect::<Result<_, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_file(file("key.pem")).unwrap();
        let config = TlsConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        Some(Arc::new(config.with_single_cert(chain, key).unwrap()))
    };
    let (ours, other) = (file("authority.pem"), file("other.pem"));
    let create_with = |mcp: &McpServer, roots: Option<&Path>| {
        let mut config = allowing(mcp, PATIENCE);
        config.mcp.root_certificates = roots.map(Into::into);
        let server = model(config, CALL);
        let answer = server.post("/v1/responses", &ask(&calc(&json!({}))));
        server.assert_idle();
        answer
    };
    let mcp = McpServer::with(Traits { tls: tls("server.pem"), on_call: Manner::Streams, ..PLAINLY });
    let response = create_with(&mcp, Some(&ours)).ok();
    assert_eq!(response["output"][1]["output"], "5", "{response}");
    assert!(mcp.url().starts_with("https://"));
    // A certificate of another authority, one checked against the built-in authorities, and one for another host.
    let elsewhere = McpServer::with(Traits { tls: tls("elsewhere.pem"), ..PLAINLY });
    for (mcp, roots) in [(&mcp, Some(&other)), (&mcp, None), (&elsewhere, Some(&ours))] {
        let before = mcp.came().len();
        let error = create_with(mcp, roots.map(PathBuf::as_path)).error(424);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("no connection") && message.contains("certificate"), "{message}");
        assert_eq!(mcp.came().len(), before, "nothing was said");
    }
    // A file without certificates is found before a model is loaded.
    for (path, word) in [(file("key.pem"), "no certificates"), (file("absent"), "absent")] {
        let mut config = allowing(&mcp, PATIENCE);
        config.mcp.root_certificates = Some(path);
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("SSL_CERT_FILE") && error.contains(word), "{error}");
    }
}

#[test]
fn tokens_of_tools_are_counted() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), ANSWER);
    let count = |asked: &Value| server.post("/v1/responses/input_tokens", asked);
    let mut asked = calc(&json!({}));
    asked["input"] = "Hi".into();
    let counted = count(&asked).ok();
    let response = create(&server, &asked);
    assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"], "{response}");
    assert_eq!(mcp.count("tools/list"), 1, "the list is cached");
    let without = count(&json!({"input": "Hi"})).ok();
    assert!(counted["input_tokens"].as_u64() > without["input_tokens"].as_u64());
    let mut fewer = calc(&json!({"allowed_tools": ["write"]}));
    fewer["input"] = "Hi".into();
    assert!(count(&fewer).ok()["input_tokens"].as_u64() < counted["input_tokens"].as_u64());
    let mut none = asked.clone();
    none["tool_choice"] = json!({"type": "mcp", "server_label": "calc", "name": "none"});
    assert_eq!(count(&none).error(400)["param"], "tool_choice.name");
    server.assert_idle();
    let mcp = McpServer::start(Manner::Status(401), Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), ANSWER);
    let error = server.post("/v1/responses/input_tokens", &asked).error(424);
    assert_eq!(error["code"], "mcp_server_failed", "{error}");
    server.assert_idle();
}
