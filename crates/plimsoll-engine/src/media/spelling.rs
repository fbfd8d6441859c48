//! How a family's processor writes media into prompts: the words that the tokenizer's configuration names.

use plimsoll_media::MediaError;

use super::spec::Spelling;
use crate::plan::error::PlanError;

/// The words around images, as the tokenizer's configuration names them.
pub(super) fn framed(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end, video] =
        words(tokenizer, [("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")])?;
    Ok(Spelling::Framed { start, end, video })
}

/// The same of Gemma 3.
pub(super) fn paragraph(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end] = words(tokenizer, [("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>")])?;
    Ok(Spelling::Paragraph { start, end })
}

/// The same of LFM2-VL.
pub(super) fn pieces(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    let [start, end, whole] = words(
        tokenizer,
        [
            ("image_start_token", "<|image_start|>"),
            ("image_end_token", "<|image_end|>"),
            ("image_thumbnail_token", "<|img_thumbnail|>"),
        ],
    )?;
    Ok(Spelling::Pieces { start, end, whole })
}

/// The same of Idefics3, whose words are its processor's.
pub(super) fn squares() -> Spelling {
    Spelling::Squares { around: "<fake_token_around_image>".to_owned(), whole: "<global-img>".to_owned() }
}

/// The same of Gemma 4.
pub(super) fn between(tokenizer: Option<&str>) -> Result<Spelling, PlanError> {
    // The processor adds the word for videos to the tokenizer, by this name.
    let [start, end] = words(tokenizer, [("boi_token", "<|image>"), ("eoi_token", "<image|>")])?;
    Ok(Spelling::Clocked { start, end, video: "<|video|>".to_owned() })
}

/// Words by their names in the tokenizer's configuration, or by default.
fn words<const N: usize>(
    tokenizer: Option<&str>,
    names: [(&'static str, &'static str); N],
) -> Result<[String; N], PlanError> {
    let key = "tokenizer_config.json";
    let parsed = tokenizer.map(serde_json::from_str::<serde_json::Value>).transpose();
    let parsed = parsed.map_err(|why| MediaError::BadConfig { key, why: why.to_string() })?.unwrap_or_default();
    let word = |name: &str, default: &str| {
        let named = [&parsed, &parsed["extra_special_tokens"], &parsed["model_specific_special_tokens"]];
        let named = named.into_iter().map(|place| &place[name]);
        let word = named.filter_map(|token| token.as_str().or_else(|| token["content"].as_str())).next();
        word.filter(|word| !word.is_empty()).unwrap_or(default).to_owned()
    };
    Ok(names.map(|(name, default)| word(name, default)))
}
