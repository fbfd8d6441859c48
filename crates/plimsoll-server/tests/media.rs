//! Pictures and videos in requests, through all APIs: the engine gets the same whichever way they came, in their order; what is hostile
//! or too large is refused before it is decoded; and when all is over, nothing is held.

mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::{SEEING_SPECIALS, Server, config, eventually, post, tokenizer_with};
use plimsoll_engine::testing::{Step, letters, limits};
use plimsoll_engine::{ImageSpec, Limits, MediaSpec, PlaceRule, Request, Spelling, VideoSpec};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{ImageRule, PatchVideo, Patches, ProcessorFiles, VideoRule};
use plimsoll_media::image::Normalize;
use plimsoll_media::{OutputPool, Staging};
use plimsoll_server::{MediaConfig, MediaFetch, RecordConfig, ServerConfig};
use serde_json::{Value, json};

const IMAGE: u32 = 258;
const VIDEO: u32 = 259;

/// The way of the Qwens' templates: parts where there are parts.
const TEMPLATE: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}\
{%- for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}\
{%- endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const STAGING: u64 = 64 << 20;

fn spec() -> MediaSpec {
    let sizes = r#"{"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 6400, "max_frames": 8, "min_frames": 2,
        "size": {"shortest_edge": 256, "longest_edge": 25600}}"#;
    let files = ProcessorFiles::read(Some(sizes), None, None).unwrap();
    let normalize = Normalize::new(&files.image, Normalize::HALVES).unwrap();
    let image = ImageRule::Patches(Patches::image(&files.image, None).unwrap());
    let video = VideoRule::Patches(PatchVideo::new(&files.video, Budget::Video, None).unwrap());
    MediaSpec {
        image: Some(ImageSpec { rule: image, normalize, placeholder: IMAGE, tokens_max: 100, bounds: [].into() }),
        video: Some(VideoSpec { rule: video, normalize, placeholder: VIDEO, tokens_max: 400, bounds: [].into() }),
        audio: None,
        parameters: "test".into(),
        places: Some(PlaceRule { merge: 2, frames_apart: true, steps_per_second: None, unrounded: false }),
        spelling: Spelling::Timed,
        items_max: 4,
        batch: 2,
        staging: Staging::new(STAGING),
        outputs: OutputPool::new(4, 16, 64).unwrap(),
    }
}

fn seeing(config: ServerConfig) -> (Server, MediaSpec) {
    seeing_as(config, spec(), letters)
}

fn seeing_as(
    config: ServerConfig,
    spec: MediaSpec,
    script: impl FnMut(&Request) -> common::Script + Send + 'static,
) -> (Server, MediaSpec) {
    let limits = Limits { vocab_size: 262, max_req_total_len: 2048, max_total_token_num: 8 * 2048, ..limits() };
    (Server::seeing(TEMPLATE, config, limits, Some(spec.clone()), script), spec)
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/media");
    std::fs::read(folder.join(name)).unwrap()
}

fn data(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(bytes))
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn chat(content: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0})
}

/// What the engine was asked for.
fn asked(server: &Server, path: &str, body: &Value) -> Request {
    server.post(path, body).ok();
    server.last_request()
}

fn idle(server: &Server, spec: &MediaSpec) {
    // The test's own look at the requests keeps their pixels.
    server.observed.requests.lock().unwrap().clear();
    server.assert_idle();
    eventually("no pixels are held", || spec.staging.used() == 0);
}

#[test]
fn a_picture_is_the_same_whichever_way_it_comes() {
    let (server, spec) = seeing(config());
    let picture = fixture("rgb.png");
    let (url, plain) = (data(&picture), STANDARD.encode(&picture));
    let first = asked(&server, "/v1/chat/completions", &chat(&json!([text("What is"), image(&url), text("this?")])));
    let [item] = &first.media[..] else { panic!("{} items", first.media.len()) };
    let tokens = item.shape.tokens as usize;
    assert!(tokens > 1 && item.grid.height * item.grid.width == 4 * tokens, "{item:?}");
    let at = item.first as usize;
    assert!(first.prompt[at..at + tokens].iter().all(|id| *id == IMAGE));
    assert_eq!(first.prompt.iter().filter(|id| **id == IMAGE).count(), tokens);
    assert_eq!(
        (first.prompt[at - 1], first.prompt[at + tokens]),
        (260, 261),
        "between the start and the end of vision"
    );
    let words = tokenizer_with(&SEEING_SPECIALS).decode(&first.prompt, true);
    assert_eq!(words, "user\nWhat isthis?\nassistant\n");
    let (pixels, size) = (&item.pixels.frames, item.pixels.frames[0].size);
    assert_eq!((pixels.len(), size.height as usize), (1, 4 * item.grid.height));

    let block = |source: Value| json!([text("What is"), {"type": "image", "source": source}, text("this?")]);
    let anthropic = |source: Value| json!({"messages": [{"role": "user", "content": block(source)}], "max_tokens": 3});
    let part = |detail: &str| json!([{"type": "input_text", "text": "What is"}, {"type": "input_image", "image_url": url, "detail": detail}, {"type": "input_text", "text": "this?"}]);
    let responses =
        |detail: &str| json!({"input": [{"role": "user", "content": part(detail)}], "max_output_tokens": 3});
    let short = json!([text("What is"), {"type": "image_url", "image_url": url}, text("this?")]);
    let ways = [
        ("/v1/chat/completions", chat(&short)),
        ("/v1/messages", anthropic(json!({"type": "base64", "media_type": "image/png", "data": plain}))),
        ("/v1/messages", anthropic(json!({"type": "url", "url": url}))),
        ("/v1/responses", responses("auto")),
        ("/v1/responses", responses("high")),
    ];
    for (path, body) in &ways {
        let request = asked(&server, path, body);
        assert_eq!(request.prompt, first.prompt, "{path}");
        assert_eq!((request.media[0].key, request.media[0].first), (item.key, item.first), "{path}");
        assert_eq!(request.media[0].pixels.frames, item.pixels.frames, "{path}");
    }
    // Counting sees the same prompt, and decodes nothing.
    let before = spec.staging.peak();
    let count = server.post("/v1/messages/count_tokens", &json!({"messages": ways[1].1["messages"]})).ok();
    assert_eq!(count["input_tokens"], first.prompt.len());
    let tokenized = server.post("/tokenize", &json!({"messages": chat(&short)["messages"]})).ok();
    assert_eq!(tokenized["tokens"], json!(first.prompt));
    assert_eq!(spec.staging.peak(), before);
    // Streams and several choices, too; the choices share the pixels.
    let mut body = chat(&short);
    body["n"] = json!(2);
    body["stream"] = json!(true);
    assert!(server.post("/v1/chat/completions", &body).events().len() > 4);
    let requests = server.observed.requests.lock().unwrap();
    let [.., one, other] = &requests[..] else { panic!("two choices") };
    assert!(Arc::ptr_eq(&one.media[0].pixels, &other.media[0].pixels));
    drop(requests);
    drop(first);
    idle(&server, &spec);
}

#[test]
fn pictures_keep_their_places_and_their_names() {
    let (server, spec) = seeing(config());
    let [a, b] = ["rgb.png", "palette.png"].map(|name| data(&fixture(name)));
    let both = |one: &str, other: &str| {
        let content = json!([image(one), text("and"), image(other)]);
        asked(&server, "/v1/chat/completions", &chat(&content))
    };
    let (ab, ba, aa) = (both(&a, &b), both(&b, &a), both(&a, &a));
    let keys = |request: &Request| -> Vec<_> { request.media.iter().map(|item| item.key).collect() };
    let [x, y] = keys(&ab)[..] else { panic!() };
    assert_ne!(x, y);
    assert_eq!((keys(&ba), keys(&aa)), (vec![y, x], vec![x, x]));
    for request in [&ab, &ba, &aa] {
        let (first, second) = (&request.media[0], &request.media[1]);
        assert!(first.first + first.shape.tokens as u32 + 2 < second.first);
        assert_eq!(request.prompt[second.first as usize - 1], 260);
    }
    // A picture per message, and in a tool's result.
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": [image(&a)]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("seen"), image(&b)]},
        {"role": "user", "content": "so?"}
    ]);
    let told = asked(&server, "/v1/chat/completions", &json!({"messages": messages, "max_tokens": 2}));
    assert_eq!(keys(&told), [x, y]);
    drop(told);
    let result = json!([{"type": "tool_result", "tool_use_id": "c", "is_error": true, "content": [{"type": "text", "text": "seen"},
        {"type": "image", "source": {"type": "url", "url": b}}]}]);
    let messages = json!([
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": a}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": result}
    ]);
    let told = asked(&server, "/v1/messages", &json!({"messages": messages, "max_tokens": 2}));
    assert_eq!(keys(&told), [x, y]);
    // Fewer pixels are another processing; where there are no fewer, they are not.
    let low = |url: &str| {
        let part = json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
        asked(&server, "/v1/chat/completions", &chat(&json!([part])))
    };
    assert_eq!(keys(&low(&a)), [x]);
    drop((ab, ba, aa, told));
    idle(&server, &spec);
}

/// A response's input comes back as it was sent, and a later one goes on from it, with its picture.
#[test]
fn responses_keep_their_pictures() {
    let (server, spec) = seeing(config());
    let url = data(&fixture("rgb.png"));
    let parts =
        json!([{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": url, "detail": "low"}]);
    let body = json!({"input": [{"role": "user", "content": parts}], "max_output_tokens": 3, "store": true});
    let answer = server.post("/v1/responses", &body).ok();
    let first = server.last_request();
    let id = answer["id"].as_str().unwrap();
    let items = server.get(&format!("/v1/responses/{id}/input_items")).ok();
    assert_eq!(items["data"][0]["content"], parts);
    let next = json!({"previous_response_id": id, "input": "and?", "max_output_tokens": 3});
    let second = asked(&server, "/v1/responses", &next);
    assert_eq!((second.media[0].key, second.media[0].first), (first.media[0].key, first.media[0].first));
    assert_eq!(second.prompt[..first.prompt.len()], first.prompt);
    drop((first, second));
    idle(&server, &spec);
}

#[test]
fn videos_are_frames_with_their_times() {
    let (server, spec) = seeing(config());
    let gif = format!("data:image/gif;base64,{}", STANDARD.encode(fixture("moving.gif")));
    let frame = STANDARD.encode(fixture("gray.jpg"));
    let url = format!("data:image/jpeg;base64,{frame}");
    let ways = [
        // Four frames of 100 ms are sampled twice a second, and at least twice: the first and the last.
        (json!({"type": "video_url", "video_url": {"url": gif}}), 2, vec!["0.1"]),
        (json!({"type": "video", "video": [url, url, url], "fps": 1}), 3, vec!["0.5", "2.0"]),
        (
            json!({"type": "video_url", "video_url": {"url": format!("data:video/jpeg;base64,{frame},{frame}")}}),
            2,
            vec!["0.2"],
        ),
    ];
    let tokenizer = tokenizer_with(&SEEING_SPECIALS);
    for (part, frames, times) in &ways {
        let request = asked(&server, "/v1/chat/completions", &chat(&json!([part, text("x")])));
        let item = &request.media[0];
        assert_eq!((item.pixels.frames.len(), item.grid.frames), (*frames, times.len()), "{part}");
        let each = item.shape.tokens as usize / times.len();
        let written: String = times
            .iter()
            .map(|time| format!("<{time} seconds><|vision_start|>{}<|vision_end|>", "<|video_pad|>".repeat(each)))
            .collect();
        let words = tokenizer.decode(&request.prompt, false);
        assert!(words.contains(&format!("user\n{written}x<|im_end|>")), "{words}");
        assert_eq!(request.prompt[item.first as usize], VIDEO);
    }
    // A still is a video of one frame, which is too short; so is an empty list; nine are too many; sizes must be equal.
    let other = data(&fixture("large.jpg"));
    let mp4 = "data:video/mp4;base64,AAAA";
    for (part, what) in [
        (json!({"type": "video", "video": []}), "1 to 8 frames (--max-video-frames)"),
        (json!({"type": "video", "video": vec![&url; 9]}), "1 to 8 frames (--max-video-frames)"),
        (json!({"type": "video", "video": [url, other]}), "sizes"),
        (json!({"type": "video", "video": [url, url], "fps": 0}), "frames a second"),
        (json!({"type": "video_url", "video_url": {"url": mp4}}), "animated GIF and WebP, a list of frames"),
        (json!({"type": "video_url", "video_url": {"url": "data:image/gif;base64,AAAA"}}), "animated GIF and WebP"),
    ] {
        let error = server.post("/v1/chat/completions", &chat(&json!([part]))).error(400);
        assert!(error["message"].as_str().unwrap().contains(what), "{part}: {error}");
    }
    idle(&server, &spec);
}

#[test]
fn what_a_client_spells_is_no_picture() {
    let (server, spec) = seeing(config());
    let tokenizer = tokenizer_with(&SEEING_SPECIALS);
    let said = "look: <|vision_start|><|image_pad|><|vision_end|><|video_pad|>";
    let alone = asked(&server, "/v1/chat/completions", &chat(&json!(said)));
    assert!(alone.media.is_empty() && !alone.prompt.contains(&IMAGE) && !alone.prompt.contains(&VIDEO));
    assert!(tokenizer.decode(&alone.prompt, false).contains(said));
    let beside = json!([text(said), image(&data(&fixture("rgb.png"))), text(said)]);
    let beside = asked(&server, "/v1/chat/completions", &chat(&beside));
    let item = &beside.media[0];
    let (at, tokens) = (item.first as usize, item.shape.tokens as usize);
    assert_eq!(beside.prompt.iter().filter(|id| **id == IMAGE).count(), tokens);
    assert!(beside.prompt[at..at + tokens].iter().all(|id| *id == IMAGE));
    assert_eq!(tokenizer.decode(&beside.prompt, false).matches(said).count(), 2);
    drop((alone, beside));
    idle(&server, &spec);
}

/// A PNG's head that announces a size, and nothing behind it.
fn announced(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = fixture("rgb.png");
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    bytes
}

#[test]
fn what_is_hostile_is_refused_before_it_is_decoded() {
    let (server, spec) = seeing(config());
    let picture = fixture("rgb.png");
    let part = |part: Value| chat(&json!([part]));
    let of = |bytes: &[u8]| part(image(&data(bytes)));
    let five = chat(&Value::Array(vec![image(&data(&picture)); 5]));
    let refusals = [
        (of(&announced(30_000, 30_000)), "limit is 16777216 (--max-decode-pixels)"),
        (of(&announced(0, 10)), "no pixels"),
        (of(&announced(1, 65_535)), "97 bytes cannot hold 65535 pixels"),
        (of(&announced(65_535, 1)), "97 bytes cannot hold 65535 pixels"),
        (of(&announced(u32::MAX, u32::MAX)), "--max-decode-pixels"),
        (of(b""), "supported are PNG, JPEG, GIF and WebP"),
        (of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "supported are PNG, JPEG, GIF and WebP"),
        (of(&picture[..30]), "cannot be read"),
        (part(image("data:image/png;base64,!!!!")), "not base64"),
        (part(image("data:image/png,abc")), "data:TYPE;base64,DATA"),
        (part(image("data:image/svg+xml;base64,AAAA")), "`image/svg+xml` is not read here"),
        (part(image("data:")), "data:TYPE;base64,DATA"),
        (part(image("ftp://x/y")), "must begin with data:"),
        (part(image("x")), "must begin with data:"),
        (part(image("file:///etc/passwd")), "--media-root"),
        (part(json!({"type": "image_url"})), "image_url is missing"),
        (part(json!({"type": "image_url", "image_url": {"detail": "low"}})), "image_url.url is missing"),
        (
            part(json!({"type": "image_url", "image_url": {"url": data(&picture), "detail": "ultra"}})),
            "known are auto, low and high",
        ),
        (part(json!({"type": "image_url", "image_url": {"url": data(&picture), "colour": 1}})), "unknown field"),
        (part(json!({"type": "image_url", "image_url": 7})), "expected"),
        (
            part(json!({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
            "the served model `tiny` takes no audio",
        ),
        (part(json!({"type": "audio_url", "audio_url": {"url": "data:,"}})), "takes no audio"),
        (part(json!({"type": "file", "file": {}})), "reads no documents"),
        (part(json!({"type": "hologram"})), "known are text, image_url, video_url, video, input_audio and audio_url"),
        (five, "more than 4 media, the limit (--max-media-per-request)"),
    ];
    for (body, what) in &refusals {
        let error = server.post("/v1/chat/completions", body).error(400);
        assert!(error["message"].as_str().unwrap().contains(what), "{what}: {error}");
        assert!(error["param"].as_str().unwrap().starts_with("messages[0].content["), "{error}");
    }
    assert_eq!((spec.staging.peak(), server.observed.requests.lock().unwrap().len()), (0, 0));
    // What only decoding can find out ends this request alone (T-38), also where it is one of several.
    let mut broken = picture.clone();
    let at = picture.windows(4).position(|four| four == b"IDAT").unwrap() + 20;
    broken[at..at + 40].fill(0x55);
    for bytes in [broken, fixture("large.jpg")[..2000].to_vec()] {
        let body = chat(&json!([image(&data(&picture)), image(&data(&bytes))]));
        let error = server.post("/v1/chat/completions", &body).error(400);
        assert!(error["param"].as_str().unwrap().starts_with("messages[0].content[1].image_url"), "{error}");
    }
    // All the odd kinds are taken: turned, of four colours, of sixteen bits, gray, moving.
    for name in [
        "turned.jpg",
        "cmyk.jpg",
        "progressive.jpg",
        "gray16.png",
        "gray_alpha.png",
        "bits.png",
        "moving.gif",
        "lossy.webp",
        "turned.webp",
    ] {
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
fn a_prompt_that_is_too_long_is_refused_before_its_pictures_are_decoded() {
    let (server, spec) = seeing(config());
    let long = "a".repeat(2000);
    let body = chat(&json!([text(&long), image(&data(&fixture("large.jpg")))]));
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert_eq!((&error["code"], spec.staging.peak()), (&json!("context_length_exceeded"), 0), "{error}");
    let mut body = chat(&json!([image(&data(&fixture("large.jpg")))]));
    body["max_tokens"] = json!(2040);
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert_eq!((&error["code"], spec.staging.peak()), (&json!("context_length_exceeded"), 0), "{error}");
    idle(&server, &spec);
}

/// The document lists exactly the parts that are taken.
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
        image(&still),
        json!({"type": "video_url", "video_url": {"url": moving}}),
        json!({"type": "video", "video": [still, still], "fps": 2.5}),
    ];
    assert_eq!(kinds, parts.each_ref().map(|part| part["type"].as_str().unwrap()));
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
        image(&url),
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
    let small = MediaSpec { staging: Staging::new(4 << 20), ..spec() };
    let media = MediaConfig { room_timeout: Duration::from_millis(300), ..MediaConfig::default() };
    let hang = |_: &Request| -> common::Script { Box::new([Step::Token(97, "a".into())].into_iter()) };
    let (server, spec) = seeing_as(ServerConfig { media, ..config() }, small, hang);
    let body = chat(&json!([image(&data(&fixture("rgb.png")))]));
    // Somebody has nearly everything.
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
    // Room that comes back in time is taken.
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
    // What could never fit is the request's fault.
    let body = chat(&json!([image(&data(&fixture("large.jpg")))]));
    let tiny = MediaSpec { staging: Staging::new(1 << 20), ..common_spec() };
    let (server, spec) = seeing_as(config(), tiny, letters);
    let error = server.post("/v1/chat/completions", &body).error(400);
    assert!(error["message"].as_str().unwrap().contains("--media-bytes"), "{error}");
    idle(&server, &spec);
}

fn common_spec() -> MediaSpec {
    spec()
}

/// A server of pictures on the loopback network.
struct Pictures {
    url: String,
    asked: Arc<AtomicUsize>,
}

impl Pictures {
    fn start(address: &str, pages: BTreeMap<&'static str, Vec<u8>>) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                let pages = pages.clone();
                std::thread::spawn(move || {
                    let mut head = [0; 4096];
                    let read = stream.read(&mut head).unwrap();
                    let line = String::from_utf8_lossy(&head[..read]).into_owned();
                    let path = line.split(' ').nth(1).unwrap();
                    let body = pages.get(path).cloned().unwrap_or_default();
                    let status = if pages.contains_key(path) { "200 OK" } else { "404 Not Found" };
                    if path == "/late" {
                        std::thread::sleep(Duration::from_millis(600));
                    }
                    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
                    if path == "/slow" {
                        let _ = stream.write_all(&body[..50]);
                        std::thread::sleep(Duration::from_secs(2));
                    } else {
                        let _ = stream.write_all(&body);
                    }
                });
            }
        });
        Self { url, asked }
    }
}

fn pictures() -> Pictures {
    pictures_at("127.0.0.1")
}

fn pictures_at(address: &str) -> Pictures {
    let pages = [
        ("/a.png", fixture("rgb.png")),
        ("/late", fixture("rgb.png")),
        ("/slow", fixture("rgb.png")),
        ("/text", b"no picture".to_vec()),
        ("/large", vec![0; 3 << 20]),
    ];
    Pictures::start(address, BTreeMap::from(pages))
}

fn fetching(fetch: MediaFetch) -> ServerConfig {
    let mut media = MediaConfig { fetch, fetch_timeout: Duration::from_secs(1), ..MediaConfig::default() };
    media.image.file_bytes = 1 << 20;
    ServerConfig { media, ..config() }
}

#[test]
fn pictures_are_fetched_under_limits() {
    let elsewhere = pictures();
    let (server, spec) = seeing(fetching(MediaFetch::Any));
    let at = |path: &str| chat(&json!([text("x"), image(&format!("{}{path}", elsewhere.url))]));
    let fetched = asked(&server, "/v1/chat/completions", &at("/a.png"));
    let inline = asked(&server, "/v1/chat/completions", &chat(&json!([text("x"), image(&data(&fixture("rgb.png")))])));
    assert_eq!((fetched.prompt, fetched.media[0].key), (inline.prompt, inline.media[0].key));
    let counted = json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": format!("{}/a.png", elsewhere.url)}}]}]});
    assert!(server.post("/v1/messages/count_tokens", &counted).ok()["input_tokens"].as_u64().unwrap() > 20);
    for (path, what) in [
        ("/none", "`127.0.0.1` answered with status 404"),
        ("/text", "supported are PNG"),
        ("/large", "limit is 1048576 (--max-image-bytes)"),
        ("/slow", "`127.0.0.1` took longer than 1 s to fetch it (--media-fetch-timeout)"),
    ] {
        let error = server.post("/v1/chat/completions", &at(path)).error(400);
        assert!(error["message"].as_str().unwrap().contains(what), "{path}: {error}");
        assert_eq!(error["param"], "messages[0].content[1].image_url");
    }
    drop((fetched.media, inline.media));
    let page = server.get("/metrics").ok_text().to_owned();
    assert!(page.contains("plimsoll_media_fetched_total 3"), "{page}");
    idle(&server, &spec);
    // The default asks nobody who is not public; off asks nobody.
    let before = elsewhere.asked.load(Ordering::SeqCst);
    let (public, spec) = seeing(fetching(MediaFetch::Public));
    let error = public.post("/v1/chat/completions", &at("/a.png")).error(400);
    assert!(error["message"].as_str().unwrap().contains("not a public one (--media-fetch)"), "{error}");
    idle(&public, &spec);
    let (off, _) = seeing(fetching(MediaFetch::Off));
    let error = off.post("/v1/chat/completions", &at("/a.png")).error(400);
    assert!(error["message"].as_str().unwrap().contains("--media-fetch off"), "{error}");
    assert_eq!(elsewhere.asked.load(Ordering::SeqCst), before);
}

/// A host that is slow has its share of the turns, and whoever asks another does not wait for it.
#[test]
fn a_slow_host_holds_up_nobody_elses_pictures() {
    let (slow, quick) = (pictures(), pictures_at("127.0.0.2"));
    let mut config = fetching(MediaFetch::Any);
    config.media.fetch_timeout = Duration::from_secs(4);
    let (server, spec) = seeing(config);
    let at = |pictures: &Pictures, path: &str| chat(&json!([image(&format!("{}{path}", pictures.url))]));
    let stuck: Vec<_> =
        (0..7).map(|_| server.send(post("/v1/chat/completions", &at(&slow, "/slow").to_string()))).collect();
    let metric = |line: &str| server.get("/metrics").ok_text().contains(line);
    eventually("four are fetched and three wait", || {
        metric("plimsoll_media_fetching 4\n") && metric("plimsoll_media_fetches_waiting 3\n")
    });
    eventually("the four have asked", || slow.asked.load(Ordering::SeqCst) == 4);
    let began = Instant::now();
    server.post("/v1/chat/completions", &at(&quick, "/a.png")).ok();
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    assert!(slow.asked.load(Ordering::SeqCst) == 4 && metric("plimsoll_media_fetches_waiting 3\n"), "they still wait");
    // Those that wait have their turn when the first are through with it (after two seconds, with half a picture each).
    eventually("all had their turn", || slow.asked.load(Ordering::SeqCst) == 7);
    for mut client in stuck {
        let error = client.answer().error(400);
        assert!(error["message"].as_str().unwrap().contains("`127.0.0.1`"), "{error}");
    }
    assert!(metric("plimsoll_media_fetching 0\n") && metric("plimsoll_media_fetches_waiting 0\n"));
    idle(&server, &spec);
}

/// Clients count from when they asked: what is fetched and decoded before the engine hears of it is part of their time.
#[test]
fn the_clock_starts_when_the_request_arrives() {
    let elsewhere = pictures();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let record = Some(RecordConfig { file: file.clone(), content: false, max_bytes: 1 << 20 });
    let (server, spec) = seeing(ServerConfig { record, ..fetching(MediaFetch::Any) });
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&file).unwrap();
        text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    server.post("/v1/chat/completions", &chat(&json!([image(&format!("{}/late", elsewhere.url))]))).ok();
    server.post("/v1/chat/completions", &chat(&json!("x"))).ok();
    eventually("both are recorded", || lines().len() == 2);
    let ms = |at: usize, name: &str| lines()[at][name].as_u64().unwrap();
    assert!(ms(0, "first_ms") >= 600 && ms(0, "ms") >= ms(0, "first_ms"), "{:?}", lines());
    assert!(ms(1, "first_ms") < 500 && ms(1, "at_ms") >= ms(0, "at_ms") + 600, "{:?}", lines());
    idle(&server, &spec);
}

/// V-3, V-E: clients that go while their picture is fetched or while they wait for room leave nothing behind.
#[test]
fn clients_that_go_leave_nothing() {
    let elsewhere = pictures();
    let (server, spec) = seeing(fetching(MediaFetch::Any));
    let slow = chat(&json!([image(&data(&fixture("rgb.png"))), image(&format!("{}/slow", elsewhere.url))]));
    let slow = post("/v1/chat/completions", &slow.to_string());
    let clients: Vec<_> = (0..3).map(|_| server.send(&slow)).collect();
    eventually("all are being fetched", || elsewhere.asked.load(Ordering::SeqCst) == 3);
    drop(clients);
    idle(&server, &spec);
    assert!(server.observed.requests.lock().unwrap().is_empty());
    let taken = spec.staging.reserve(spec.staging.limit()).unwrap();
    let ready = post("/v1/chat/completions", &chat(&json!([image(&data(&fixture("rgb.png")))])).to_string());
    let clients: Vec<_> = (0..3).map(|_| server.send(&ready)).collect();
    std::thread::sleep(Duration::from_millis(200));
    drop(clients);
    std::thread::sleep(Duration::from_millis(200));
    drop(taken);
    idle(&server, &spec);
    assert!(server.observed.requests.lock().unwrap().is_empty(), "nobody decodes for who has gone");
}

#[test]
fn files_are_read_under_their_roots() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("pictures");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("a b.png"), fixture("rgb.png")).unwrap();
    std::fs::write(folder.path().join("secret.png"), fixture("rgb.png")).unwrap();
    let media = MediaConfig { roots: vec![root.clone()], ..MediaConfig::default() };
    let (server, spec) = seeing(ServerConfig { media, ..config() });
    let at = |path: &str| chat(&json!([image(&format!("file://{}/{path}", root.display()))]));
    let request = asked(&server, "/v1/chat/completions", &at("a%20b.png"));
    let inline = asked(&server, "/v1/chat/completions", &chat(&json!([image(&data(&fixture("rgb.png")))])));
    assert_eq!(request.media[0].key, inline.media[0].key);
    for path in ["../secret.png", "%2e%2e/secret.png", "none.png", ""] {
        let error = server.post("/v1/chat/completions", &at(path)).error(400);
        assert!(error["message"].as_str().unwrap().contains("no such file under this server's media roots"), "{error}");
    }
    drop((request, inline));
    idle(&server, &spec);
}

/// Many at once, of several kinds, with text in between: everybody's own picture, nothing left over (T-29, V-3).
#[test]
fn many_at_once_get_their_own() {
    let (server, spec) = seeing(config());
    let names = ["rgb.png", "palette.png", "gray.jpg", "lossy.webp", "gray16.png", "cmyk.jpg"];
    let keys = Mutex::new(BTreeMap::new());
    for name in names {
        let request = asked(&server, "/v1/chat/completions", &chat(&json!([text(name), image(&data(&fixture(name)))])));
        keys.lock().unwrap().insert(request.prompt.clone(), request.media[0].key);
    }
    assert_eq!(keys.lock().unwrap().len(), names.len());
    server.observed.requests.lock().unwrap().clear();
    std::thread::scope(|scope| {
        for worker in 0..6 {
            let server = &server;
            scope.spawn(move || {
                for round in 0..20 {
                    let name = names[(worker + round) % names.len()];
                    let mut body = chat(&json!([text(name), image(&data(&fixture(name)))]));
                    if round % 4 == 1 {
                        body = chat(&json!("only text"));
                    }
                    let answer = server.post("/v1/chat/completions", &body);
                    assert!(matches!(answer.status, 200 | 429), "{}", answer.body);
                }
            });
        }
    });
    let keys = keys.into_inner().unwrap();
    let requests = std::mem::take(&mut *server.observed.requests.lock().unwrap());
    let mut seen = 0;
    for request in requests.iter().filter(|request| !request.media.is_empty()) {
        assert_eq!(keys.get(&request.prompt), Some(&request.media[0].key));
        seen += 1;
    }
    assert!(seen > 60, "{seen}");
    drop(requests);
    idle(&server, &spec);
}
