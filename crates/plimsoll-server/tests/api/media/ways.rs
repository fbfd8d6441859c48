//! The same image or video by every API and in every encoding: the engine gets the same media, each item in its place. Each request gets
//! its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use plimsoll_engine::Request;
use serde_json::{Value, json};

use super::{IMAGE, VIDEO, asked, chat, data, fixture, idle, image_part, seeing, text};
use crate::common::{SEEING_SPECIALS, config, tokenizer_with};

#[test]
fn a_model_is_listed_with_the_media_it_takes() {
    let (server, spec) = seeing(config());
    let media = [("image", spec.image.is_some()), ("video", spec.video.is_some()), ("audio", spec.audio.is_some())];
    let taken: Vec<_> = media.into_iter().filter_map(|(name, taken)| taken.then_some(name)).collect();
    assert!(!taken.is_empty());
    let model = &server.get("/v1/models").ok()["data"][0];
    assert_eq!(model["input_modalities"], json!([&["text"], &taken[..]].concat()));
}

#[test]
fn a_image_is_the_same_whichever_way_it_comes() {
    let (server, spec) = seeing(config());
    let image = fixture("rgb.png");
    let (url, plain) = (data(&image), STANDARD.encode(&image));
    let first =
        asked(&server, "/v1/chat/completions", &chat(&json!([text("What is"), image_part(&url), text("this?")])));
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
    // Counting tokens sees the same prompt and decodes nothing.
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
fn images_keep_their_places_and_their_names() {
    let (server, spec) = seeing(config());
    let [a, b] = ["rgb.png", "palette.png"].map(|name| data(&fixture(name)));
    let both = |one: &str, other: &str| {
        let content = json!([image_part(one), text("and"), image_part(other)]);
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
    // An image per message, and in a tool's result.
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": [image_part(&a)]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("seen"), image_part(&b)]},
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
    // Fewer pixels are another processing. If an image has no more pixels than the limit, the processing is the same.
    let low = |url: &str| {
        let part = json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
        asked(&server, "/v1/chat/completions", &chat(&json!([part])))
    };
    assert_eq!(keys(&low(&a)), [x]);
    drop((ab, ba, aa, told));
    idle(&server, &spec);
}

/// A response's input is returned as it was sent. A later response continues from it, with its image.
#[test]
fn responses_keep_their_images() {
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
    let capitals = format!("DATA:IMAGE/GIF;BASE64,{}", STANDARD.encode(fixture("moving.gif")));
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
        // A data: URL may be written in capitals.
        (
            json!({"type": "video_url", "video_url": {"url": format!("DATA:VIDEO/JPEG;BASE64,{frame},{frame}")}}),
            2,
            vec!["0.2"],
        ),
        (json!({"type": "video_url", "video_url": {"url": capitals}}), 2, vec!["0.1"]),
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
    // A still is a video of one frame, which is too short, and so is an empty list. Nine frames are too many; sizes must be equal.
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
fn spelled_placeholder_is_not_an_image() {
    let (server, spec) = seeing(config());
    let tokenizer = tokenizer_with(&SEEING_SPECIALS);
    let said = "look: <|vision_start|><|image_pad|><|vision_end|><|video_pad|>";
    let alone = asked(&server, "/v1/chat/completions", &chat(&json!(said)));
    assert!(alone.media.is_empty() && !alone.prompt.contains(&IMAGE) && !alone.prompt.contains(&VIDEO));
    assert!(tokenizer.decode(&alone.prompt, false).contains(said));
    let beside = json!([text(said), image_part(&data(&fixture("rgb.png"))), text(said)]);
    let beside = asked(&server, "/v1/chat/completions", &chat(&beside));
    let item = &beside.media[0];
    let (at, tokens) = (item.first as usize, item.shape.tokens as usize);
    assert_eq!(beside.prompt.iter().filter(|id| **id == IMAGE).count(), tokens);
    assert!(beside.prompt[at..at + tokens].iter().all(|id| *id == IMAGE));
    assert_eq!(tokenizer.decode(&beside.prompt, false).matches(said).count(), 2);
    drop((alone, beside));
    idle(&server, &spec);
}

/// Many requests run at once, of several kinds, with text in between. Each gets its own image, and nothing is held afterwards (T-29, V-3).
#[test]
fn many_at_once_get_their_own() {
    let (server, spec) = seeing(config());
    let names = ["rgb.png", "palette.png", "gray.jpg", "lossy.webp", "gray16.png", "cmyk.jpg"];
    let keys = Mutex::new(BTreeMap::new());
    for name in names {
        let request =
            asked(&server, "/v1/chat/completions", &chat(&json!([text(name), image_part(&data(&fixture(name)))])));
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
                    let mut body = chat(&json!([text(name), image_part(&data(&fixture(name)))]));
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
