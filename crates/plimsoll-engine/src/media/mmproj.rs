//! The preparation of media for encoders from an `mmproj` file, written as a processor's files in the transformers layout. The same for
//! InternVL in its original form.

use plimsoll_formats::{Audio, AudioKind, Processor, Vision, VisionKind};
use plimsoll_media::MediaError;
use serde_json::{Map, Value, json};

/// The fewest and most pixels where the file names none: the values of the published models' processors.
fn published(encoder: VisionKind) -> (u64, u64) {
    match encoder {
        VisionKind::Qwen3 => (65_536, 16_777_216),
        _ => (3_136, 12_845_056),
    }
}

/// The same for all frames of a video together. `None` where a video's frames have the bounds of images.
fn published_video(encoder: VisionKind) -> Option<(u64, u64)> {
    (encoder == VisionKind::Qwen3).then_some((4_096, 25_165_824))
}

/// The longer side of an image of Mistral 3, and the squares on a side of an image of SmolVLM, in published models.
const LONGEST: u64 = 1540;
const SQUARES: u64 = 4;
/// Seconds to which the feature extractor of published Qwen2.5-Omni models fills up a clip.
const CHUNK_SECONDS: u64 = 300;

/// The texts of `preprocessor_config.json` and of `video_preprocessor_config.json`, where videos have a file of their own.
pub(super) fn files(config: Option<&Vision>, audio: Option<&Audio>, processor: &Processor) -> (String, Option<String>) {
    let mut own = Map::new();
    let mut video = None;
    if let Some(config) = config {
        let (min, max) = published(config.encoder);
        own = fields(config, processor, (processor.min_pixels.unwrap_or(min), processor.max_pixels.unwrap_or(max)));
        video = match config.encoder {
            // A frame is one tile.
            VisionKind::Intern(_) => Some(own.clone()),
            encoder => published_video(encoder).map(|pixels| fields(config, processor, pixels)),
        };
    }
    if audio.is_some_and(|audio| matches!(audio.encoder, AudioKind::Chunks(_))) {
        own.insert("chunk_length".to_owned(), json!(CHUNK_SECONDS));
    }
    let text = |fields| Value::Object(fields).to_string();
    (text(own), video.map(text))
}

/// Means and deviations of ImageNet: the values in the published code of InternVL.
const IMAGENET: [[f32; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];

/// [`files`] for InternVL in its original form. `config.json` has the numbers of tiles. Only means and deviations are read from
/// `preprocessor_config.json`: its sizes belong to a processor without tiles.
pub(super) fn files_of_original(
    config: &Vision,
    tiles: [u32; 2],
    preprocessor: Option<&str>,
) -> Result<(String, Option<String>), MediaError> {
    let bad = |why: serde_json::Error| MediaError::BadConfig { key: "preprocessor_config.json", why: why.to_string() };
    let parsed: Value = preprocessor.map(serde_json::from_str).transpose().map_err(bad)?.unwrap_or_default();
    let numbers = |name: &str, default: [f32; 3]| match &parsed[name] {
        Value::Null => Ok(default),
        given => serde_json::from_value(given.clone()).map_err(bad),
    };
    let [mean, std] = IMAGENET;
    let processor = Processor {
        mean: Some(numbers("image_mean", mean)?),
        std: Some(numbers("image_std", std)?),
        tiles: tiles.map(|tiles| Some(u64::from(tiles))),
        ..Processor::default()
    };
    Ok(files(Some(config), None, &processor))
}

/// Returns the fields of an image processor's file.
fn fields(config: &Vision, processor: &Processor, (shortest, longest): (u64, u64)) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    put("patch_size", json!(config.patch));
    match config.encoder {
        VisionKind::Siglip | VisionKind::Intern(_) | VisionKind::Llama4(_) => {
            let side = config.table_side * config.patch;
            put("size", json!({"height": side, "width": side}));
            for (key, tiles) in [("min_patches", processor.tiles[0]), ("max_patches", processor.tiles[1])] {
                if let Some(tiles) = tiles {
                    put(key, json!(tiles));
                }
            }
        }
        VisionKind::Gemma4(_) => {
            put("image_processor_type", json!("Gemma4ImageProcessor"));
            put("pooling_kernel_size", json!(config.merge));
            if let Some(pixels) = processor.max_pixels {
                put("max_soft_tokens", json!(pixels / (config.patch * config.merge).pow(2) as u64));
            }
        }
        VisionKind::Pixtral(_) => {
            put("size", json!({"longest_edge": processor.side.unwrap_or(LONGEST)}));
        }
        VisionKind::Idefics3 => {
            let side = processor.side.unwrap_or((config.table_side * config.patch) as u64);
            let longest = processor.longest.unwrap_or(side.saturating_mul(SQUARES).min(4096));
            put("max_image_size", json!({"longest_edge": side}));
            put("size", json!({"longest_edge": longest}));
        }
        VisionKind::Siglip2(_) => {
            put("encoder_patch_size", json!(config.patch));
            put("downsample_factor", json!(config.merge));
            let token = (config.patch * config.merge).pow(2) as u64;
            for (key, pixels) in
                [("min_image_tokens", processor.min_pixels), ("max_image_tokens", processor.max_pixels)]
            {
                if let Some(pixels) = pixels {
                    put(key, json!(pixels / token));
                }
            }
        }
        _ => {
            put("merge_size", json!(config.merge));
            put("temporal_patch_size", json!(config.temporal));
            put("size", json!({"shortest_edge": shortest, "longest_edge": longest}));
        }
    }
    let halves = matches!(config.encoder, VisionKind::Qwen3 | VisionKind::Omni).then_some([0.5; 3]);
    for (key, numbers) in [("image_mean", processor.mean.or(halves)), ("image_std", processor.std.or(halves))] {
        if let Some(numbers) = numbers {
            put(key, json!(numbers.map(decimal)));
        }
    }
    fields
}

/// The shortest decimal number that is this f32: a processor's file has means as doubles of few digits.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}

#[cfg(test)]
mod tests {
    use super::decimal;

    #[test]
    fn means_have_seven_digits_of_the_published_ones() {
        for number in [0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711, 0.5] {
            assert!((decimal(number as f32) - number).abs() < 3e-8, "{number}");
        }
    }
}
