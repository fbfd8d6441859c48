//! The configuration files of a checkpoint's media processors.

use serde::Deserialize;
use serde_json::Value;

use crate::MediaError;
use crate::image::Filter;

/// Limit of the pixels to which the smallest images may be enlarged: all smaller images are tried for the worst case. No processor comes
/// near it.
const MIN_PIXELS_MAX: u64 = 1 << 22;

/// The processors' configurations of one checkpoint, searched in the order of transformers 5: first nested in
/// `processor_config.json`, else in their own file; a video's last in the image's file.
#[derive(Clone, Debug, Default)]
pub struct ProcessorFiles {
    /// Fields of the image processor.
    pub image: Fields,
    /// Fields of the video processor.
    pub video: Fields,
    /// Whether a video has bounds of its own; otherwise it has the image processor's.
    pub video_apart: bool,
    /// Fields of the feature extractor.
    pub audio: Fields,
    /// Fields of the processor itself.
    pub processor: Fields,
}

/// The fields that sizes depend on, as in the file. A missing field has the processor's default.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Fields {
    pub(crate) min_pixels: Option<u64>,
    pub(crate) max_pixels: Option<u64>,
    #[serde(default)]
    pub(crate) size: SizeField,
    #[serde(default, deserialize_with = "side")]
    pub(crate) patch_size: Option<u64>,
    pub(crate) temporal_patch_size: Option<u64>,
    pub(crate) merge_size: Option<u64>,
    pub(crate) min_frames: Option<u64>,
    pub(crate) max_frames: Option<u64>,
    pub(crate) num_frames: Option<u64>,
    pub(crate) fps: Option<f64>,
    pub(crate) cap_pixels_per_frame: Option<bool>,
    pub(crate) max_video_tokens: Option<u64>,
    pub(crate) min_patches: Option<u64>,
    pub(crate) max_patches: Option<u64>,
    pub(crate) image_seq_length: Option<u64>,
    pub(crate) image_seq_len: Option<u64>,
    pub(crate) spatial_merge_size: Option<u64>,
    #[serde(default)]
    pub(crate) max_image_size: SizeField,
    pub(crate) hop_length: Option<u64>,
    pub(crate) chunk_length: Option<u64>,
    pub(crate) n_fft: Option<u64>,
    pub(crate) min_length: Option<u64>,
    pub(crate) sampling_rate: Option<u64>,
    pub(crate) audio_samples_per_token: Option<u64>,
    pub(crate) frame_length_ms: Option<f64>,
    pub(crate) hop_length_ms: Option<f64>,
    pub(crate) fft_overdrive: Option<bool>,
    pub(crate) min_frequency: Option<f64>,
    pub(crate) max_frequency: Option<f64>,
    pub(crate) preemphasis: Option<f64>,
    pub(crate) dither: Option<f64>,
    pub(crate) input_scale_factor: Option<f64>,
    pub(crate) mel_floor: Option<f64>,
    pub(crate) per_bin_mean: Option<Vec<f64>>,
    pub(crate) per_bin_stddev: Option<Vec<f64>>,
    pub(crate) feature_size: Option<u64>,
    pub(crate) image_mean: Option<[f64; 3]>,
    pub(crate) image_std: Option<[f64; 3]>,
    pub(crate) rescale_factor: Option<f64>,
    pub(crate) do_resize: Option<bool>,
    pub(crate) do_rescale: Option<bool>,
    pub(crate) do_normalize: Option<bool>,
    pub(crate) do_pan_and_scan: Option<bool>,
    pub(crate) max_soft_tokens: Option<u64>,
    pub(crate) pooling_kernel_size: Option<u64>,
    pub(crate) image_processor_type: Option<String>,
    pub(crate) resample: Option<u64>,
    pub(crate) encoder_patch_size: Option<u64>,
    pub(crate) downsample_factor: Option<u64>,
    pub(crate) resize_to_max_canvas: Option<bool>,
    pub(crate) do_image_splitting: Option<bool>,
    pub(crate) use_thumbnail: Option<bool>,
    pub(crate) min_tiles: Option<u64>,
    pub(crate) max_tiles: Option<u64>,
    pub(crate) tile_size: Option<u64>,
    pub(crate) min_image_tokens: Option<u64>,
    pub(crate) max_image_tokens: Option<u64>,
    pub(crate) max_pixels_tolerance: Option<f64>,
    pub(crate) use_image_special_tokens: Option<bool>,
}

/// Reads a side that may be given for each axis; both must be equal.
fn side<'de, D: serde::Deserializer<'de>>(source: D) -> Result<Option<u64>, D::Error> {
    let value = Value::deserialize(source)?;
    let axis = |key: &str| value.get(key).and_then(Value::as_u64);
    match (&value, value.as_u64()) {
        (Value::Null, _) => Ok(None),
        (_, Some(side)) => Ok(Some(side)),
        (Value::Object(_), None) if axis("height").is_some() && axis("height") == axis("width") => Ok(axis("height")),
        _ => {
            let why = format!("patch_size is {value}; supported are a whole number, or equal height and width");
            Err(serde::de::Error::custom(why))
        }
    }
}

/// `size` in all its spellings.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct SizeField {
    pub(crate) shortest_edge: Option<u64>,
    pub(crate) longest_edge: Option<u64>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    pub(crate) height: Option<u64>,
    pub(crate) width: Option<u64>,
}

impl ProcessorFiles {
    /// Reads the texts of `preprocessor_config.json`, `video_preprocessor_config.json` and `processor_config.json`.
    pub fn read(preprocessor: Option<&str>, video: Option<&str>, processor: Option<&str>) -> Result<Self, MediaError> {
        let own = parse("preprocessor_config.json", preprocessor)?;
        let video = parse("video_preprocessor_config.json", video)?;
        let outer = parse("processor_config.json", processor)?;
        let nested = |keys: [&str; 2]| keys.iter().find_map(|key| outer.as_ref()?.get(*key)).cloned();
        let video = nested(["video_processor", "video_processor"]).or(video);
        Ok(Self {
            video_apart: video.is_some(),
            image: seen(nested(["image_processor", "image_processor"]).or_else(|| own.clone()))?,
            video: seen(video.or_else(|| own.clone()))?,
            audio: fields(nested(["feature_extractor", "audio_processor"]).or(own))?,
            processor: fields(outer)?,
        })
    }
}

fn parse(key: &'static str, text: Option<&str>) -> Result<Option<Value>, MediaError> {
    let parsed = text.map(serde_json::from_str).transpose();
    parsed.map_err(|why| MediaError::BadConfig { key, why: why.to_string() })
}

fn fields(value: Option<Value>) -> Result<Fields, MediaError> {
    let Some(value) = value else { return Ok(Fields::default()) };
    Fields::deserialize(value).map_err(|why| MediaError::BadConfig { key: "a field", why: why.to_string() })
}

/// Reads the fields of a processor of images or videos. Here they are always resized, rescaled and normalized.
fn seen(value: Option<Value>) -> Result<Fields, MediaError> {
    // A feature extractor in the same file may declare that it does not normalize.
    let shared = value.as_ref().is_some_and(|value| value.get("feature_extractor_type").is_some());
    let fields = fields(value)?;
    // Gemma 4's processor leaves it to the model: `Normalize::centred`.
    let shared = shared || fields.image_processor_type.as_ref().is_some_and(|kind| kind.starts_with("Gemma4"));
    let steps = [
        // LFM2-VL's processor resizes even if its file says otherwise.
        ("do_resize", fields.do_resize.filter(|_| fields.encoder_patch_size.is_none())),
        ("do_rescale", fields.do_rescale),
        ("do_normalize", fields.do_normalize.filter(|_| !shared)),
    ];
    if let Some((key, _)) = steps.into_iter().find(|(_, step)| *step == Some(false)) {
        return Err(MediaError::BadConfig { key, why: "false is not supported".into() });
    }
    if fields.do_pan_and_scan == Some(true) {
        return Err(MediaError::BadConfig { key: "do_pan_and_scan", why: "true is not supported".into() });
    }
    match fields.resample {
        Some(other) if Filter::of_pillow(other).is_none() => {
            let why = format!("{other} is not supported, only 1 (Lanczos), 2 (bilinear) and 3 (bicubic)");
            Err(MediaError::BadConfig { key: "resample", why })
        }
        _ => Ok(fields),
    }
}

impl Fields {
    /// Returns the bands of a feature extractor.
    pub fn bands(&self) -> Option<u64> {
        self.feature_size
    }

    /// Returns the filter of the resize; `default` if the file names none.
    pub(crate) fn filter(&self, default: Filter) -> Filter {
        self.resample.and_then(Filter::of_pillow).unwrap_or(default)
    }

    /// Returns the least and the most pixels; the fields beside `size` have priority, as in transformers.
    pub(crate) fn pixels(&self, defaults: (u64, u64)) -> Result<(u64, u64), MediaError> {
        let size = &self.size;
        let min = self.min_pixels.or(size.shortest_edge).or(size.min_pixels).unwrap_or(defaults.0);
        let max = self.max_pixels.or(size.longest_edge).or(size.max_pixels).unwrap_or(defaults.1);
        if min == 0 || min > MIN_PIXELS_MAX || max < min || max > 1 << 40 {
            let why = format!("{min} to {max} is not a range of pixels");
            return Err(MediaError::BadConfig { key: "min_pixels, max_pixels", why });
        }
        Ok((min, max))
    }
}

/// Checks that a field lies in a range.
pub(crate) fn within(
    key: &'static str,
    value: Option<u64>,
    default: u64,
    range: std::ops::RangeInclusive<u64>,
) -> Result<u64, MediaError> {
    let value = value.unwrap_or(default);
    if range.contains(&value) {
        return Ok(value);
    }
    let why = format!("{value} is not between {} and {}", range.start(), range.end());
    Err(MediaError::BadConfig { key, why })
}
