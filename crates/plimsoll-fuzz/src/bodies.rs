//! Targets for request bodies, up to their prompts: nothing is fetched, and no engine runs.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use plimsoll_engine::testing::{letters, limits, scripted_with_media};
use plimsoll_engine::{FrameTimes, ImageSpec, Limits, MediaSpec, PlaceRule, Pooling, Spelling, VideoSpec};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{ImageRule, PatchVideo, Patches, ProcessorFiles, VideoRule};
use plimsoll_media::image::Normalize;
use plimsoll_media::{OutputPool, Staging};
use plimsoll_reply::Choice;
use plimsoll_server::fuzzed::{Bodies, Route};
use plimsoll_server::{About, Formats, MediaConfig, MediaFetch, Pooled, SamplingDefaults, Served, ServerConfig};
use plimsoll_text::{ChatTemplate, Tokenizer};

use crate::{MIB, within};

/// A template in the style of Qwen models, with tools.
const TEMPLATE: &str = "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif -%}\
{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}\
{%- for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}\
{%- endif %}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

/// Reads one body; the first byte selects the route.
pub(crate) fn bodies(data: &[u8]) {
    let Some((route, body)) = data.split_first() else { return };
    let route = Route::ALL[usize::from(*route) % Route::ALL.len()];
    let bodies = match route {
        Route::Embeddings | Route::Rerank | Route::Score | Route::OllamaEmbed | Route::CohereEmbed => encoder(),
        _ => model(),
    };
    // Templates, tokenizing and grammars have their own budgets, whatever the body.
    let answer = within(64 * body.len() + 192 * MIB, || bodies.read(route, body));
    if let Err((status, words)) = answer {
        assert!((400..500).contains(&status) || status == 503, "{route:?}: {status} {words}");
        assert!(words.len() < 64 << 10, "{route:?}: {} bytes of words", words.len());
    }
    assert_eq!(bodies.held(), 0, "{route:?}: bytes are held when nothing is there");
}

fn model() -> &'static Bodies {
    static BODIES: OnceLock<Bodies> = OnceLock::new();
    BODIES.get_or_init(|| readers(false))
}

fn encoder() -> &'static Bodies {
    static BODIES: OnceLock<Bodies> = OnceLock::new();
    BODIES.get_or_init(|| readers(true))
}

fn readers(encoder: bool) -> Bodies {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/vl-qwen3/tokenizer.json");
    let tokenizer = Tokenizer::from_file(&file).expect("the fixture is there");
    let limits = Limits {
        vocab_size: tokenizer.vocab_size() as u32,
        max_req_total_len: 2048,
        max_total_token_num: 8 * 2048,
        encoder,
        ..limits()
    };
    let engine = scripted_with_media(limits, (!encoder).then(|| spec(&tokenizer)), letters).handle;
    let template = Arc::new(ChatTemplate::new(TEMPLATE, "", "<|im_end|>").expect("it compiles"));
    let served = Served {
        engine,
        tokenizer: Arc::new(tokenizer),
        formats: Formats::new(Some(&template), Choice::Auto, Choice::Auto),
        template: Some(template),
        names: vec!["tiny".into()],
        created_s: 1_700_000_000,
        about: About::default(),
        default_max_tokens: None,
        pooled: Pooled {
            pooling: encoder.then_some(Pooling::Mean),
            normalize: true,
            sigmoid: true,
            ..Pooled::default()
        },
        sampling: SamplingDefaults::default(),
    };
    let media = MediaConfig { fetch: MediaFetch::Off, ..MediaConfig::default() };
    let config = ServerConfig { max_body_bytes: 1 << 20, grammar_bytes: 16 << 20, media, ..ServerConfig::default() };
    Bodies::new(served, config).expect("nothing contradicts itself")
}

fn spec(tokenizer: &Tokenizer) -> MediaSpec {
    let sizes = r#"{"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 6400, "max_frames": 8, "min_frames": 2,
        "size": {"shortest_edge": 256, "longest_edge": 25600}}"#;
    let files = ProcessorFiles::read(Some(sizes), None, None).expect("it is right");
    let normalize = Normalize::new(&files.image, Normalize::HALVES).expect("it is right");
    let id = |name: &str| tokenizer.token_to_id(name).expect("the fixture has it");
    let image = ImageRule::Patches(Patches::image(&files.image, None).expect("it is right"));
    let video = VideoRule::Patches(PatchVideo::new(&files.video, Budget::Video, None).expect("it is right"));
    MediaSpec {
        image: Some(ImageSpec {
            rule: image,
            normalize,
            placeholder: id("<|image_pad|>"),
            tokens_max: 100,
            bounds: [].into(),
        }),
        video: Some(VideoSpec {
            rule: video,
            normalize,
            placeholder: id("<|video_pad|>"),
            tokens_max: 400,
            bounds: [].into(),
        }),
        audio: None,
        parameters: "a fuzzer".into(),
        places: Some(PlaceRule { merge: 2, frames_apart: true, steps_per_second: None, times: FrameTimes::Cut }),
        image_in_one_step: false,
        spelling: Spelling::Timed,
        items_max: 4,
        batch: 2,
        staging: Staging::new(64 << 20),
        outputs: OutputPool::new(4, 16, 64).expect("there is room"),
    }
}
