//! The text that a family's processor writes for media in prompts. Most words come from the tokenizer's configuration.

use plimsoll_media::MediaError;

use super::spec::Spelling;
use crate::api::plan_error::PlanError;

/// The file that names most words.
const TOKENIZER: &str = "tokenizer_config.json";

/// The words around images, as the tokenizer's configuration names them.
pub(super) fn framed(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end, video] = words(
        (TOKENIZER, tokenizer),
        [("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")],
    )?;
    Ok(Spelling::Framed { start, end, video })
}

/// The same for Gemma 3.
pub(super) fn paragraph(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end] =
        words((TOKENIZER, tokenizer), [("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>")])?;
    Ok(Spelling::Paragraph { start, end })
}

/// The words around a video with its audio track; `default` has the words for a file that does not name them.
pub(super) fn interleaved(tokenizer: Option<&str>, default: [&'static str; 2]) -> Result<Spelling, PlanError> {
    let [start, end] = default;
    let [start, end] = words((TOKENIZER, tokenizer), [("audio_bos_token", start), ("audio_eos_token", end)])?;
    Ok(Spelling::Interleaved { start, end })
}

/// The same for LFM2-VL.
pub(super) fn pieces(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end, whole] = words(
        (TOKENIZER, tokenizer),
        [
            ("image_start_token", "<|image_start|>"),
            ("image_end_token", "<|image_end|>"),
            ("image_thumbnail_token", "<|img_thumbnail|>"),
        ],
    )?;
    Ok(Spelling::Pieces { start, end, whole })
}

/// The same for Mistral 3, whose processor's file can name the words.
pub(super) fn rows(processor: Option<&str>) -> Result<Spelling, PlanError> {
    let [next, end] = words(
        ("processor_config.json", processor),
        [("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")],
    )?;
    Ok(Spelling::Rows { next, end })
}

/// The same for Idefics3, whose processor defines the words.
pub(super) fn squares() -> Spelling {
    Spelling::Squares { around: "<fake_token_around_image>".to_owned(), whole: "<global-img>".to_owned() }
}

/// The same for Llama 4, whose processor defines the words.
pub(super) fn tiled() -> Spelling {
    let [image, start, end] = ["<|image|>", "<|image_start|>", "<|image_end|>"].map(str::to_owned);
    let [column, row] = ["<|tile_x_separator|>", "<|tile_y_separator|>"].map(str::to_owned);
    Spelling::Tiled { image, start, end, column, row }
}

/// The same for Gemma 4.
pub(super) fn between(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    // The processor adds the word for videos to the tokenizer under this name.
    let names =
        [("boi_token", "<|image>"), ("eoi_token", "<image|>"), ("boa_token", "<|audio>"), ("eoa_token", "<audio|>")];
    let [start, end, audio_start, audio_end] = words((TOKENIZER, tokenizer), names)?;
    Ok(Spelling::Clocked { start, end, video: "<|video|>".to_owned(), audio: [audio_start, audio_end] })
}

/// Reads words by their names in a file, or returns the defaults.
fn words<const N: usize>(
    file: (&'static str, Option<&str>),
    names: [(&'static str, &'static str); N],
) -> Result<[String; N], PlanError> {
    let (key, text) = file;
    let parsed = text.map(serde_json::from_str::<serde_json::Value>).transpose();
    let parsed = parsed.map_err(|why| MediaError::BadConfig { key, why: why.to_string() })?.unwrap_or_default();
    let word = |name: &str, default: &str| {
        let named = [&parsed, &parsed["extra_special_tokens"], &parsed["model_specific_special_tokens"]];
        let named = named.into_iter().map(|place| &place[name]);
        let word = named.filter_map(|token| token.as_str().or_else(|| token["content"].as_str())).next();
        word.filter(|word| !word.is_empty()).unwrap_or(default).to_owned()
    };
    Ok(names.map(|(name, default)| word(name, default)))
}
