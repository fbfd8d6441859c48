//! Images, videos and audio as users send them: through the official clients, with the prompts of transformers; hostile files; clients
//! that disconnect.

use std::path::Path;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::clients::{ANTHROPIC, OPENAI};
use crate::image::{chat, data_url, part, png};
use crate::product::{Server, eventually, fixture, run};
use crate::python::satisfies;
use crate::terminal::Data;

/// Flags for the number formats of transformers.
const EXACT: [&str; 8] =
    ["--dtype", "f32", "--kv-dtype", "f32", "--max-total-token-num", "8192", "--media-bytes", "67108864"];

fn serve(model: &str, more: &[&str]) -> Server {
    Server::start_model(&fixture(model), &[&EXACT[..], more].concat())
}

/// Waits until all memory of requests is freed. Checks that no component exceeded its plan.
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
    // All requests together, hostile images included (T-31).
    let rise = peak(&server).saturating_sub(before);
    assert!(rise < 64 << 20, "resident memory rose by {rise} bytes");
    idle(&server);
}

fn peak(server: &Server) -> u64 {
    server.memory()["process"]["vm_hwm"].as_u64().expect("Linux tells the most that was resident")
}

#[test]
#[ignore = "external"]
fn the_openai_client_shows_images() {
    check("vl-qwen3.5", OPENAI, "openai");
}

#[test]
#[ignore = "external"]
fn the_openai_client_shows_images_and_videos_to_an_older_family() {
    check("vl-qwen2.5", OPENAI, "openai");
}

#[test]
#[ignore = "external"]
fn the_anthropic_client_shows_images() {
    check("vl-qwen3", ANTHROPIC, "anthropic");
}

/// The error for an image names the model, which takes only text.
#[test]
fn model_without_vision_encoder_refuses_images() {
    let server = Server::start_model(&fixture("qwen3"), &["--max-total-token-num", "4096"]);
    let part = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({"messages": [{"role": "user", "content": [part]}]});
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!(refused.status, 400);
    let error: Value = refused.json()["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("the served model `qwen3` takes no images"), "{error}");
}

/// A GGUF model with an `mmproj` file beside it and the template in the file. Its answer is that of the same weights in the
/// layout of transformers.
#[test]
fn gguf_model_with_mmproj_answers_as_in_the_transformers_layout() {
    let body = chat(&[part(&png(24, 40, 3)), part(&png(16, 16, 4))], 8);
    let answer = |model: &str| {
        let server = serve(model, &[]);
        let choice = server.ask("/v1/chat/completions", &body)["choices"][0].clone();
        idle(&server);
        choice
    };
    let (gguf, other) = (answer("vl-gguf-qwen3.5-moe"), answer("vl-qwen3.5-moe"));
    assert_eq!(gguf["token_ids"], other["token_ids"]);
    let logprobs = |choice: &Value| -> Vec<f64> {
        let tokens = choice["logprobs"]["content"].as_array().expect("log-probabilities");
        tokens.iter().map(|token| token["logprob"].as_f64().expect("a number")).collect()
    };
    for (own, expected) in logprobs(&gguf).iter().zip(logprobs(&other)) {
        assert!((own - expected).abs() < 1e-3, "{own} instead of {expected}");
    }
}

/// An image is encoded once, after any text, also over a restart. `cache ls` lists encoder outputs as their own kind.
#[test]
fn image_is_not_encoded_again_after_a_restart() {
    let folder = Data::new("media-cache");
    let dir = folder.at("cache");
    let ask = |server: &Server, text: &str| {
        let content = [json!({"type": "text", "text": text}), part(&png(24, 40, 3))];
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "logprobs": true});
        let answer = server.ask("/v1/chat/completions", &body);
        (answer["choices"][0]["message"].clone(), answer["choices"][0]["logprobs"].clone())
    };
    let plain = serve("vl-qwen3", &[]);
    let expected = ask(&plain, "And what is that?");
    drop(plain);
    let caching = || serve("vl-qwen3", &["--cache-dir", &dir, "--cache-bytes", "64MiB"]);
    let mut server = caching();
    ask(&server, "What is this?");
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
    let listing = run(&["cache", "ls", &dir]).good();
    assert!(listing.contains("\n  page ") && listing.contains("\n  encoder_output "), "{listing}");
    let server = caching();
    assert_eq!(ask(&server, "And what is that?"), expected);
    let disk = server.get("/v1/cache").json()["disk"].clone();
    assert_eq!(disk["hit_media"], 1, "{disk}");
    assert_eq!(disk["kinds"]["encoder_output"]["hits"], disk["kinds"]["encoder_output"]["files"], "{disk}");
    let metrics = server.get("/metrics").text();
    for line in ["plimsoll_encoder_media_total 0", "plimsoll_prefix_disk_media_total 1"] {
        assert!(metrics.lines().any(|own| own == line), "{line}");
    }
    let hits = "plimsoll_prefix_disk_hits_total{kind=\"encoder_output\"} ";
    assert!(metrics.lines().any(|line| line.strip_prefix(hits).is_some_and(|hits| hits != "0")), "{metrics}");
    idle(&server);
}

/// An unusable `mmproj` file is left out with a warning, or refused if `--mmproj` names it.
#[test]
fn unknown_mmproj_is_left_out_unless_it_is_named() {
    let dir = std::env::temp_dir().join(format!("plimsoll-mmproj-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let model = dir.join("model.gguf");
    std::fs::copy(fixture("vl-gguf-qwen3"), &model).expect("a copy");
    let mut encoder = std::fs::read(fixture("vl-gguf-qwen3").with_file_name("mmproj.gguf")).expect("an encoder");
    let at = encoder.windows(7).position(|bytes| bytes == b"qwen3vl").expect("a type of projector");
    encoder[at..at + 7].copy_from_slice(b"qwen9vl");
    let path = dir.join("mmproj-F16.gguf");
    std::fs::write(&path, &encoder).expect("an encoder");
    let image = chat(&[part(&png(16, 16, 4))], 4);
    let server = Server::start_model(&model, &EXACT);
    let log = server.log();
    assert!(log.contains("the model takes text only") && log.contains("qwen9vl_merger"), "{log}");
    assert_eq!(server.post("/v1/chat/completions", &image).status, 400);
    let named = ["serve", model.to_str().expect("UTF-8"), "--mmproj", path.to_str().expect("UTF-8"), "--port", "0"];
    let words = run(&named).refused();
    assert!(words.contains("supported are qwen2vl_merger") && words.contains("--no-mmproj"), "{words}");
    drop(server);
    // `--mmproj` takes precedence over the file beside the model. `--no-mmproj` leaves it out.
    let whole = fixture("vl-gguf-qwen3").with_file_name("mmproj.gguf");
    let server = Server::start_model(&model, &[&EXACT[..], &["--mmproj", whole.to_str().expect("UTF-8")]].concat());
    assert_eq!(server.post("/v1/chat/completions", &image).status, 200);
    drop(server);
    let server = Server::start_model(&model, &[&EXACT[..], &["--no-mmproj"]].concat());
    assert_eq!(server.post("/v1/chat/completions", &image).status, 400);
    assert!(!server.log().contains("qwen9vl"), "{}", server.log());
    drop(server);
    std::fs::remove_dir_all(dir).expect("it goes");
}

/// Audio clips, beside images and videos in one model.
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

/// A model with only a vision encoder returns an error for audio.
#[test]
fn model_without_audio_encoder_refuses_audio() {
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

/// Runs ffmpeg with these arguments, and returns its file as a data: URL.
fn made(folder: &Path, media_type: &str, arguments: &[&str]) -> String {
    let mut command = Command::new("ffmpeg");
    command.current_dir(folder).args(["-v", "error", "-y", "-nostdin"]).args(arguments);
    let output = command.output().expect("ffmpeg is installed (tests/clients/install.sh)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let file = std::fs::read(folder.join(arguments.last().expect("a file"))).expect("the file");
    format!("data:{media_type};base64,{}", STANDARD.encode(file))
}

fn choice(server: &Server, part: &Value) -> Value {
    server.ask("/v1/chat/completions", &chat(std::slice::from_ref(part), 8))["choices"][0].clone()
}

fn refuses(server: &Server, part: &Value, words: &str) {
    let refused = server.post("/v1/chat/completions", &chat(std::slice::from_ref(part), 4));
    let (status, text) = (refused.status, refused.text());
    assert!(status == 400 && text.contains(words), "{status}: {text}");
}

/// A server with ffmpeg, for which the default of `--media-bytes` is enough.
fn decoding(model: &str) -> Server {
    Server::start_model(&fixture(model), &[&EXACT[..6], &["--ffmpeg"]].concat())
}

/// A video file with an audio track has the answer of its frames and samples, if the model's processor takes both.
#[test]
#[ignore = "external"]
fn audio_track_of_a_video_file_is_heard() {
    let folder = std::env::temp_dir().join(format!("plimsoll-tracks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a directory");
    for at in 0..4 {
        std::fs::write(folder.join(format!("{at}.png")), png(64, 48, at + 1)).expect("a frame");
    }
    let frames = ["-framerate", "2", "-i", "%d.png"];
    let sine = ["-f", "lavfi", "-i", "sine=frequency=330:duration=2"];
    let codecs = ["-c:v", "libx264rgb", "-qp", "0", "-c:a", "aac", "a.mp4"];
    let video = made(&folder, "video/mp4", &[&frames[..], &sine, &codecs].concat());
    let wave = made(&folder, "audio/wav", &["-i", "a.mp4", "-vn", "-ac", "1", "-ar", "16000", "a.wav"]);
    let film = json!({"type": "video_url", "video_url": {"url": video}});
    let sound = json!({"type": "audio_url", "audio_url": {"url": wave}});
    let tracked = |parts: &[Value]| {
        let mut body = chat(parts, 8);
        body["mm_processor_kwargs"] = json!({"use_audio_in_video": true});
        body
    };
    let ask = |server: &Server, body: &Value| server.ask("/v1/chat/completions", body);

    let gemma = decoding("vl-gemma4-audio");
    let (own, beside) =
        (ask(&gemma, &tracked(std::slice::from_ref(&film))), ask(&gemma, &chat(&[film.clone(), sound], 8)));
    assert_eq!(own["prompt_token_ids"], beside["prompt_token_ids"]);
    assert_eq!(own["choices"], beside["choices"]);
    idle(&gemma);
    drop(gemma);

    let omni = decoding("omni");
    let answer = ask(&omni, &tracked(std::slice::from_ref(&film)));
    let ids: Vec<u64> = answer["prompt_token_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    let media = |id: &u64| [387, 390].contains(id);
    let runs: Vec<(u64, usize)> =
        ids.chunk_by(|a, b| a == b).filter(|run| media(&run[0])).map(|run| (run[0], run.len())).collect();
    // One second between two groups of frames, and 13 tokens of audio per second.
    let [(387, group), (390, 13), (387, same), (390, rest)] = runs[..] else { panic!("{runs:?}") };
    assert!(group == same && (12..=15).contains(&rest), "{runs:?}");
    let silent = made(&folder, "video/mp4", &["-i", "a.mp4", "-an", "-c", "copy", "b.mp4"]);
    let body = tracked(&[json!({"type": "video_url", "video_url": {"url": silent}})]);
    let refused = omni.post("/v1/chat/completions", &body);
    let (status, text) = (refused.status, refused.text());
    assert!(status == 400 && text.contains("the video has no audio track; leave out"), "{status}: {text}");
    idle(&omni);
    std::fs::remove_dir_all(folder).expect("it goes");
}

/// A video file gets the answer of its frames, and an AAC file that of its samples. Both need `--ffmpeg`.
#[test]
#[ignore = "external"]
fn ffmpeg_decodes_video_files_and_audio() {
    let folder = std::env::temp_dir().join(format!("plimsoll-clips-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a directory");
    let frames: Vec<Vec<u8>> = (1..=4).map(|seed| png(64, 48, seed)).collect();
    for (at, frame) in frames.iter().enumerate() {
        std::fs::write(folder.join(format!("{at}.png")), frame).expect("a frame");
    }
    let lossless = ["-framerate", "2", "-i", "%d.png", "-c:v", "libx264rgb", "-qp", "0", "a.mp4"];
    let video = made(&folder, "video/mp4", &lossless);
    let file = json!({"type": "video_url", "video_url": {"url": video}});
    let listed: Vec<String> = frames.iter().map(|frame| data_url(frame)).collect();
    let listed = json!({"type": "video", "video": listed, "fps": 2.0});
    let server = decoding("vl-qwen2.5");
    assert_eq!(choice(&server, &file), choice(&server, &listed));
    let cut = json!({"type": "video_url", "video_url": {"url": &video[..22 + video.len() / 8 * 4]}});
    refuses(&server, &cut, "a video cannot be read: ffmpeg");
    idle(&server);
    assert!(server.get("/metrics").text().contains("plimsoll_media_ffmpeg_runs_total 2"));
    drop(server);
    refuses(&serve("vl-qwen2.5", &["--ffmpeg"]), &file, "--media-bytes");
    refuses(&serve("vl-qwen2.5", &[]), &file, "with --ffmpeg also MP4");

    made(&folder, "audio/mp4", &["-f", "lavfi", "-i", "sine=frequency=330:duration=2", "-c:a", "aac", "a.m4a"]);
    let aac = made(&folder, "audio/mp4", &["-i", "a.m4a", "-c", "copy", "b.m4a"]);
    let wave = made(&folder, "audio/wav", &["-i", "a.m4a", "-ac", "1", "-ar", "16000", "a.wav"]);
    let heard = |url: &str| json!({"type": "audio_url", "audio_url": {"url": url}});
    let server = decoding("omni");
    assert_eq!(choice(&server, &heard(&aac)), choice(&server, &heard(&wave)));
    idle(&server);
    std::fs::remove_dir_all(folder).expect("it goes");
}

#[test]
fn ffmpeg_that_is_not_there_is_named_before_the_model_loads() {
    let words = run(&["serve", "demo", "--ffmpeg", "/no/such/program", "--port", "0"]).refused();
    assert!(words.contains("--ffmpeg: /no/such/program") && words.contains("install ffmpeg 5.1"), "{words}");
}
