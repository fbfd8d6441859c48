//! Refused media: the error's words, and how little was done before. Hostile files, prompts without room, models without vision encoders.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use plimsoll_engine::testing::{Step, letters};
use plimsoll_engine::{MediaSpec, Request};
use plimsoll_media::Staging;
use plimsoll_server::{MediaConfig, ServerConfig};
use serde_json::{Value, json};

use super::{asked, chat, data, fixture, idle, image_part, seeing, seeing_as, text};
use crate::common::{Script, Server, config, post};

/// Returns a PNG whose head has this size, with nothing behind it.
fn announced(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = fixture("rgb.png");
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    bytes
}

/// Odd kinds of images that are decoded.
const TAKEN: [&str; 9] = [
    "turned.jpg",
    "cmyk.jpg",
    "progressive.jpg",
    "gray16.png",
    "gray_alpha.png",
    "bits.png",
    "moving.gif",
    "lossy.webp",
    "turned.webp",
];

#[test]
fn what_is_hostile_is_refused_before_it_is_decoded() {
    let (server, spec) = seeing(config());
    let image = fixture("rgb.png");
    let part = |part: Value| chat(&json!([part]));
    let of = |bytes: &[u8]| part(image_part(&data(bytes)));
    let five = chat(&Value::Array(vec![image_part(&data(&image)); 5]));
    let refusals = [
        (of(&announced(30_000, 30_000)), "limit is 16777216 (--max-decode-pixels)"),
        (of(&announced(0, 10)), "no pixels"),
        (of(&announced(1, 65_535)), "97 bytes cannot hold 65535 pixels"),
        (of(&announced(65_535, 1)), "97 bytes cannot hold 65535 pixels"),
        (of(&announced(u32::MAX, u32::MAX)), "--max-decode-pixels"),
        (of(b""), "supported are PNG, JPEG, GIF and WebP"),
        (of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "supported are PNG, JPEG, GIF and WebP"),
        (of(&image[..30]), "cannot be read"),
        (part(image_part("data:image/png;base64,!!!!")), "not base64"),
        (part(image_part("data:image/png,abc")), "data:TYPE;base64,DATA"),
        (part(image_part("data:image/svg+xml;base64,AAAA")), "`image/svg+xml` is not read here"),
        (part(image_part("data:")), "data:TYPE;base64,DATA"),
        (part(image_part("ftp://x/y")), "must begin with data:"),
        (part(image_part("x")), "must begin with data:"),
        (part(image_part("file:///etc/passwd")), "--media-root"),
        (part(json!({"type": "image_url"})), "image_url is missing"),
        (part(json!({"type": "image_url", "image_url": {"detail": "low"}})), "image_url.url is missing"),
        (
            part(json!({"type": "image_url", "image_url": {"url": data(&image), "detail": "ultra"}})),
            "known are auto, low and high",
        ),
        (part(json!({"type": "image_url", "image_url": {"url": data(&image), "colour": 1}})), "unknown field"),
        (part(json!({"type": "image_url", "image_url": 7})), "expected"),
        (
            part(json!({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
            "the served model `tiny` takes no audio",
        ),
        (part(json!({"type": "audio_url", "audio_url": {"url": "data:,"}})), "takes no audio"),
        (part(json!({"type": "file", "file": {}})), "file_data is missing"),
        (
            part(json!({"type": "hologram"})),
            "known are text, image_url, video_url, video, input_audio, audio_url and file",
        ),
        (five, "more than 4 media, the limit (--max-media-per-request)"),
    ];
    for (body, what) in &refusals {
        let error = server.post("/v1/chat/completions", body).error(400);
        assert!(error["message"].as_str().unwrap().contains(what), "{what}: {error}");
        assert!(error["param"].as_str().unwrap().starts_with("messages[0].content["), "{error}");
    }
    assert_eq!((spec.staging.peak(), server.observed.requests.lock().unwrap().len()), (0, 0));
    // An error that only decoding finds ends this request alone (T-38), also if the image is one of several.
    let mut broken = image.clone();
    let at = image.windows(4).position(|four| four == b"IDAT").unwrap() + 20;
    broken[at..at + 40].fill(0x55);
    for bytes in [broken, fixture("large.jpg")[..2000].to_vec()] {
        let body = chat(&json!([image_part(&data(&image)), image_part(&data(&bytes))]));
        let error = server.post("/v1/chat/completions", &body).error(400);
        assert!(error["param"].as_str().unwrap().starts_with("messages[0].content[1].image_url"), "{error}");
    }
    // All unusual formats are accepted: turned, of four colours, of sixteen bits, gray, animated.
    for name in TAKEN {
        let request = asked(&server, "/v1/chat/completions", &of(&fixture(name)));
        assert_eq!(request.media.len(), 1, "{name}");
    }
    let error = server.post(
        "/v1/messages",
        &json!({"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": "AAAA"}}]}]}),
    );
    assert!(error.status == 400 && error.body.contains("`image/bmp` is not read here"), "{}", error.body);
    let page = server.get("/metrics").ok_text().to_owned();
    assert!(page.contains("plimsoll_media_prepared_total") && page.contains("plimsoll_media_refused_total"), "{page}");
    idle(&server, &spec);
}

#[test]
fn a_prompt_that_is_too_long_is_refused_before_its_images_are_decoded() {
    let (server, spec) = seeing(config());
    let long = "a".repeat(2000);
    let body = chat(&json!([text(&long), image_part(&data(&fixture("large.jpg")))]));
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert_eq!((&error["code"], spec.staging.peak()), (&json!("context_length_exceeded"), 0), "{error}");
    let mut body = chat(&json!([image_part(&data(&fixture("large.jpg")))]));
    body["max_tokens"] = json!(2040);
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert_eq!((&error["code"], spec.staging.peak()), (&json!("context_length_exceeded"), 0), "{error}");
    idle(&server, &spec);
}

/// The OpenAPI document lists exactly the parts that are accepted.
#[test]
fn the_document_has_every_part() {
    let (server, spec) = seeing(config());
    let document = server.get("/openapi.json").ok();
    let body =
        &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let content = &body["properties"]["messages"]["items"]["properties"]["content"]["anyOf"];
    let list = content.as_array().unwrap().iter().find(|kind| kind["type"] == "array").unwrap();
    let kinds: Vec<&str> = list["items"]["anyOf"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["properties"]["type"]["enum"][0].as_str().unwrap())
        .collect();
    let (still, moving) =
        (data(&fixture("rgb.png")), format!("data:image/gif;base64,{}", STANDARD.encode(fixture("moving.gif"))));
    let parts = [
        text("x"),
        image_part(&still),
        json!({"type": "video_url", "video_url": {"url": moving}}),
        json!({"type": "video", "video": [still, still], "fps": 2.5}),
    ];
    // The document lists audio parts whether or not the model takes audio.
    let (heard, seen): (Vec<&str>, Vec<&str>) = kinds.iter().partition(|kind| kind.contains("audio"));
    assert_eq!(seen, parts.each_ref().map(|part| part["type"].as_str().unwrap()));
    assert_eq!(heard, ["input_audio", "audio_url"]);
    for part in parts {
        server.post("/v1/chat/completions", &chat(&json!([part]))).ok();
    }
    idle(&server, &spec);
}

#[test]
fn a_model_without_eyes_says_so() {
    let server = Server::start(letters);
    let url = data(&fixture("rgb.png"));
    for part in [
        image_part(&url),
        json!({"type": "video_url", "video_url": {"url": "data:,"}}),
        json!({"type": "video", "video": []}),
    ] {
        let error = server.post("/v1/chat/completions", &chat(&json!([part]))).error(400);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("the served model `tiny` takes no"), "{error}");
        assert_eq!(error["param"], "messages[0].content[0].type");
    }
}

#[test]
fn room_is_waited_for_and_then_refused() {
    let small = MediaSpec { staging: Staging::new(4 << 20), ..super::spec() };
    let media = MediaConfig { room_timeout: Duration::from_millis(300), ..MediaConfig::default() };
    let hang = |_: &Request| -> Script { Box::new([Step::Token(97, "a".into())].into_iter()) };
    let (server, spec) = seeing_as(ServerConfig { media, ..config() }, small, hang);
    let body = chat(&json!([image_part(&data(&fixture("rgb.png")))]));
    // Nearly all staging bytes are taken.
    let taken = spec.staging.reserve(spec.staging.limit() - 1000).unwrap();
    let began = Instant::now();
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!(refused.error(503)["code"], "unavailable");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert!(
        refused.body.contains("bytes for media") && began.elapsed() >= Duration::from_millis(250),
        "{}",
        refused.body
    );
    // A request that waits for room takes it when it is released in time.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let mut client = server.send(post("/v1/chat/completions", &streamed.to_string()));
    std::thread::sleep(Duration::from_millis(100));
    drop(taken);
    client.until("\"a\"");
    let item = server.last_request().media[0].clone();
    let held: usize = item.pixels.frames.iter().map(|frame| frame.data.capacity()).sum();
    assert_eq!(spec.staging.used(), held as u64, "what is held now is the pixels");
    drop((client, item));
    idle(&server, &spec);
    // Media that can never fit are an error of the request.
    let body = chat(&json!([image_part(&data(&fixture("large.jpg")))]));
    let tiny = MediaSpec { staging: Staging::new(1 << 20), ..super::spec() };
    let (server, spec) = seeing_as(config(), tiny, letters);
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert!(error["message"].as_str().unwrap().contains("--media-bytes"), "{error}");
    idle(&server, &spec);
}
