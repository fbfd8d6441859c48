//! Images and videos in requests, through all APIs. The engine gets the same media in the same order by every API. Hostile or too large
//! files are refused before they are decoded. When all requests have ended, nothing is held.

mod fetched;
mod refused;
mod tracks;
mod transcribed;
mod ways;

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use plimsoll_engine::testing::{letters, limits};
use plimsoll_engine::{FrameTimes, Grid, ImageSpec, Limits, MediaSpec, PlaceRule, Request, Spelling, VideoSpec};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{ImageRule, PatchVideo, Patches, ProcessorFiles, VideoRule};
use plimsoll_media::image::Normalize;
use plimsoll_media::{OutputPool, Staging};
use plimsoll_server::ServerConfig;
use serde_json::{Value, json};

use crate::common::{Script, Server, eventually};

const IMAGE: u32 = 258;
const VIDEO: u32 = 259;

/// The shape of the Qwens' templates: a message has a string or parts.
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
    let image = Patches::image(&files.image, None).unwrap();
    let video = PatchVideo::new(&files.video, Budget::Video, None).unwrap();
    let grid = |frames: u64, (a, b): (u64, u64)| Grid {
        frames: frames as usize,
        height: 2 * a as usize,
        width: 2 * b as usize,
    };
    let images = image.frontier().into_iter().map(|sides| grid(1, sides)).collect();
    let films = (1..=8).flat_map(|frames: u64| {
        let sides = video.frontier(frames).into_iter();
        sides.map(move |sides| grid(frames.div_ceil(2), sides))
    });
    let films = films.collect();
    let (image, video) = (ImageRule::Patches(image), VideoRule::Patches(video));
    MediaSpec {
        image: Some(ImageSpec { rule: image, normalize, placeholder: IMAGE, tokens_max: 100, bounds: images }),
        video: Some(VideoSpec { rule: video, normalize, placeholder: VIDEO, tokens_max: 400, bounds: films }),
        audio: None,
        parameters: "test".into(),
        places: Some(PlaceRule { merge: 2, frames_apart: true, steps_per_second: None, times: FrameTimes::Cut }),
        image_in_one_step: false,
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
    script: impl FnMut(&Request) -> Script + Send + 'static,
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

fn image_part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn chat(content: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0})
}

/// Sends a request and returns the request that the engine got.
fn asked(server: &Server, path: &str, body: &Value) -> Request {
    server.post(path, body).ok();
    server.last_request()
}

fn idle(server: &Server, spec: &MediaSpec) {
    // The test's record of the requests holds their pixels.
    server.observed.requests.lock().unwrap().clear();
    server.assert_idle();
    eventually("no pixels are held", || spec.staging.used() == 0);
}
