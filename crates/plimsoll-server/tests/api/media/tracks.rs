//! The audio track of a video: ffmpeg decodes it from the same file; a stand-in program replaces it here. Its tokens are placed as the
//! model's processor places them.
#![cfg(target_os = "linux")]

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use plimsoll_engine::testing::{letters, limits};
use plimsoll_engine::{AudioSpec, FrameTimes, Limits, MediaSpec, PlaceRule, Request, Spelling, Transcript};
use plimsoll_media::audio::Mel;
use plimsoll_media::ffmpeg::Ffmpeg;
use plimsoll_media::geometry::{AudioRule, ProcessorFiles};
use plimsoll_media::{Modality, Staging};
use plimsoll_server::{MediaConfig, ServerConfig};
use serde_json::{Value, json};

use super::{IMAGE, VIDEO, chat, idle, seeing, text};
use crate::common::{Server, config};

const PATH: &str = "/v1/chat/completions";
/// This model uses for audio the token that others have for images.
const AUDIO: u32 = IMAGE;
const TEMPLATE: &str = "{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{%- for part in m.content %}\
{%- if part.type == 'video' %}<|im_start|><|video_pad|><|im_end|>{% elif part.type == 'audio' %}<|image_pad|>{% else %}{{ part.text }}\
{%- endif %}{% endfor %}{% endif %}{% endfor %}";

fn hearing_spec(interleaves: bool) -> MediaSpec {
    let rule = AudioRule::windows(&ProcessorFiles::default().audio, 50, 200, 2).unwrap();
    let audio = AudioSpec {
        tokens_max: rule.worst().tokens,
        mel: Arc::new(Mel::new(&rule, 8)),
        rule,
        placeholder: AUDIO,
        transcript: Transcript::Instructed,
    };
    let places = PlaceRule { merge: 2, frames_apart: false, steps_per_second: Some(13.0), times: FrameTimes::Exact };
    let [start, end] = ["<|vision_start|>", "<|vision_end|>"].map(str::to_owned);
    MediaSpec {
        image: None,
        audio: Some(audio),
        places: interleaves.then_some(places),
        spelling: if interleaves { Spelling::Interleaved { start, end } } else { Spelling::Plain },
        staging: Staging::new(256 << 20),
        ..super::spec()
    }
}

fn hearing(interleaves: bool) -> (Server, MediaSpec) {
    let program = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fake-ffmpeg.sh");
    let media = MediaConfig { ffmpeg: Some(Ffmpeg::new(program).unwrap()), ..MediaConfig::default() };
    let limits = Limits { vocab_size: 262, max_req_total_len: 2048, max_total_token_num: 8 * 2048, ..limits() };
    let spec = hearing_spec(interleaves);
    (Server::seeing(TEMPLATE, ServerConfig { media, ..config() }, limits, Some(spec.clone()), letters), spec)
}

fn film(says: &str) -> Value {
    let file = [b"\0\0\0\x20ftyp", says.as_bytes()].concat();
    json!({"type": "video_url", "video_url": {"url": format!("data:video/mp4;base64,{}", STANDARD.encode(file))}})
}

fn tracked(content: &Value) -> Value {
    let mut body = chat(content);
    body["mm_processor_kwargs"] = json!({"use_audio_in_video": true});
    body
}

/// Returns the prompt as runs of one token: length and token. Letters are left out.
fn runs(request: &Request) -> Vec<(usize, u32)> {
    let runs = request.prompt.chunk_by(|a, b| a == b).map(|run| (run.len(), run[0]));
    runs.filter(|(_, token)| *token >= 256).collect()
}

#[test]
fn tokens_of_a_track_stand_among_those_of_the_frames() {
    let (server, spec) = hearing(true);
    let asked = |body: &Value| {
        server.post(PATH, body).ok();
        server.last_request()
    };
    let request = asked(&tracked(&json!([text("a"), film("sounds"), film("sounds"), text("b")])));
    let (start, end) = ((1, 256), (1, 257));
    let one = [start, (1, 260), (4, VIDEO), (13, AUDIO), (4, VIDEO), (7, AUDIO), (1, 261), end];
    assert_eq!(runs(&request), [one, one].concat());
    let kinds: Vec<_> = request.media.iter().map(|item| (item.shape.modality, item.of_video)).collect();
    assert_eq!(kinds, [(Modality::Video, false), (Modality::Audio, true)].repeat(2));
    let firsts: Vec<u32> = request.media.iter().map(|item| item.first).collect();
    assert_eq!(firsts[1] - firsts[0], 4, "{firsts:?}");
    assert_eq!(firsts[3] - firsts[1], 32, "{firsts:?}");
    assert_eq!(request.media[0].seconds, Some(1.0));
    // Without the option the track is not decoded.
    let deaf = asked(&chat(&json!([film("sounds")])));
    assert_eq!(runs(&deaf), [start, (8, VIDEO), end]);
    assert_eq!(deaf.media.len(), 1);
    drop((request, deaf));
    idle(&server, &spec);
}

#[test]
fn track_stands_behind_its_video_where_the_processor_does_not_interleave() {
    let (server, spec) = hearing(false);
    server.post(PATH, &tracked(&json!([film("sounds"), text("b")]))).ok();
    let request = server.last_request();
    assert_eq!(runs(&request), [(1, 256), (8, VIDEO), (1, 257), (20, AUDIO)]);
    assert!(!request.media[1].of_video && request.media[1].first > request.media[0].first + 8);
    drop(request);
    idle(&server, &spec);
}

#[test]
fn track_that_cannot_be_heard_is_refused_with_the_next_step() {
    let refused = |server: &Server, body: &Value, param: &str, words: &[&str]| {
        let error = server.post(PATH, body).error(400);
        let message = error["message"].as_str().unwrap();
        assert!(words.iter().all(|word| message.contains(word)) && error["param"] == param, "{error}");
    };
    let at = "messages[0].content[0].video_url";
    let leave = "leave out mm_processor_kwargs.use_audio_in_video";
    let (server, spec) = hearing(true);
    refused(&server, &tracked(&json!([film("silent")])), at, &["the video has no audio track", leave]);
    let url = format!("data:image/gif;base64,{}", STANDARD.encode(super::fixture("moving.gif")));
    let moving = json!({"type": "video_url", "video_url": {"url": url}});
    refused(&server, &tracked(&json!([moving])), at, &["the video has no audio track", leave]);
    let still = json!({"type": "video_url", "video_url": {"url": super::data(&super::fixture("rgb.png"))}});
    refused(&server, &tracked(&json!([still])), at, &["video"]);
    let frames = json!({"type": "video", "video": [super::data(&super::fixture("rgb.png"))]});
    refused(&server, &tracked(&json!([frames])), "messages[0].content[0].video", &["a list of frames", "leave it out"]);
    // A video and its track count as two of four media.
    let three = tracked(&Value::Array(vec![film("sounds"); 3]));
    refused(&server, &three, at.replace("[0].video", "[2].video").as_str(), &["more than 4 media", "counts as two"]);
    let mut other = chat(&json!("Hi"));
    other["mm_processor_kwargs"] = json!({"min_pixels": 1});
    refused(&server, &other, "mm_processor_kwargs.min_pixels", &["only use_audio_in_video is known"]);
    idle(&server, &spec);

    let (deaf, _) = seeing(config());
    let param = "mm_processor_kwargs.use_audio_in_video";
    refused(&deaf, &tracked(&json!([film("sounds")])), param, &["the served model `tiny` takes no audio"]);
    let (without, _) = super::seeing_as(config(), hearing_spec(true), letters);
    refused(&without, &tracked(&json!([film("sounds")])), at, &["--ffmpeg"]);
}
