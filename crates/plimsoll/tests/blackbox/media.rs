//! Pictures and videos as users send them: through the official clients, with the prompts of transformers; hostile ones; clients that go.

use serde_json::{Value, json};

use crate::clients::{ANTHROPIC, OPENAI};
use crate::product::{Server, eventually, fixture};
use crate::python::satisfies;

/// Numbers as transformers' are.
const EXACT: [&str; 8] =
    ["--dtype", "f32", "--kv-dtype", "f32", "--max-total-token-num", "8192", "--media-bytes", "67108864"];

fn serve(model: &str, more: &[&str]) -> Server {
    Server::start_model(&fixture(model), &[&EXACT[..], more].concat())
}

/// All that pictures took is back, and nothing took more than was planned for it.
fn idle(server: &Server) {
    eventually("everything is given back", || {
        let memory = server.memory();
        memory["pools"]["host_bytes"]["used"] == 0 && memory["pools"]["http_bytes"]["used"] == 0
    });
    for row in server.memory()["components"].as_array().expect("components") {
        let bytes = |of: &str| row[of].as_u64().unwrap_or_else(|| panic!("{row}"));
        assert!(bytes("committed_bytes") <= bytes("planned_bytes"), "I2: {row}");
    }
}

fn check(model: &str, client: &str, name: &str) {
    let server = serve(model, &["--visual-infer-batch-size", "2"]);
    let before = peak(&server);
    satisfies(client, "media_client.py", &server, &[fixture(model).join("reference.json"), name.into()]);
    // Everything together, hostile pictures among it (T-31).
    let rise = peak(&server).saturating_sub(before);
    assert!(rise < 64 << 20, "resident memory rose by {rise} bytes");
    idle(&server);
}

fn peak(server: &Server) -> u64 {
    server.memory()["process"]["vm_hwm"].as_u64().expect("Linux tells the most that was resident")
}

#[test]
#[ignore = "external"]
fn the_openai_client_shows_pictures() {
    check("vl-qwen3.5", OPENAI, "openai");
}

#[test]
#[ignore = "external"]
fn the_openai_client_shows_pictures_and_videos_to_an_older_family() {
    check("vl-qwen2.5", OPENAI, "openai");
}

#[test]
#[ignore = "external"]
fn the_anthropic_client_shows_pictures() {
    check("vl-qwen3", ANTHROPIC, "anthropic");
}

/// A model of text alone says so, and what it is called.
#[test]
fn a_model_without_eyes_refuses_pictures() {
    let server = Server::start_model(&fixture("qwen3"), &["--max-total-token-num", "4096"]);
    let part = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({"messages": [{"role": "user", "content": [part]}]});
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!(refused.status, 400);
    let error: Value = refused.json()["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("the served model `qwen3` takes no images"), "{error}");
}

/// Sounds, beside pictures and videos in one model.
#[test]
#[ignore = "external"]
fn the_openai_client_is_heard() {
    let server =
        serve("omni", &["--visual-infer-batch-size", "2", "--max-audio-seconds", "20", "--max-audio-bytes", "2000000"]);
    let info = server.get("/model_info").json();
    assert_eq!((&info["has_audio_understanding"], &info["has_image_understanding"]), (&json!(true), &json!(true)));
    let before = peak(&server);
    let media = fixture("omni").join("../../media");
    satisfies(OPENAI, "audio_client.py", &server, &[fixture("omni").join("reference.json"), media]);
    let rise = peak(&server).saturating_sub(before);
    assert!(rise < 64 << 20, "resident memory rose by {rise} bytes");
    idle(&server);
}

/// A model that sees and does not hear says so.
#[test]
fn a_model_without_ears_refuses_sounds() {
    let server = serve("vl-qwen3", &[]);
    let info = server.get("/model_info").json();
    assert_eq!((&info["has_audio_understanding"], &info["has_image_understanding"]), (&json!(false), &json!(true)));
    for part in [
        json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        json!({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}),
    ] {
        let refused = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": [part]}]}));
        assert_eq!(refused.status, 400);
        let error: Value = refused.json()["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("the served model `vl-qwen3` takes no audio"), "{error}");
    }
}
