//! Values that several parts of a configuration write in the same form: activations, float types, token ids, sides.

use super::json::{Lookup, whole};
use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::encoding::Dtype;
use crate::error::{FormatError, quote};
use serde_json::Value;

/// Most tokens that may end an answer.
const EOS_MAX: usize = 64;

/// The activation, under either of its two keys.
pub(super) fn activation(config: &Lookup, default: &str) -> Result<Activation, FormatError> {
    let name = match config.str("hidden_activation")? {
        Some(name) => name,
        None => config.str("hidden_act")?.unwrap_or(default),
    };
    activation_of(name)
}

/// The activation with this name.
pub(crate) fn activation_of(name: &str) -> Result<Activation, FormatError> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        "relu2" => Ok(Activation::ReluSquared),
        other => Err(FormatError::Unsupported(format!("activation {}", quote(other)))),
    }
}

/// The declared float type: `dtype` in transformers 5, `torch_dtype` in earlier versions.
pub(super) fn dtype(config: &Lookup) -> Result<Option<Dtype>, FormatError> {
    let name = match config.str("dtype")? {
        Some(name) => Some(name),
        None => config.str("torch_dtype")?,
    };
    Ok(match name.map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        Some("bfloat16") => Some(Dtype::Bf16),
        Some("float16" | "half") => Some(Dtype::F16),
        Some("float32" | "float") => Some(Dtype::F32),
        _ => None,
    })
}

/// A token id, or `default` if the key is absent.
pub(super) fn token(top: &Lookup, key: &str, default: u32) -> Result<u32, FormatError> {
    match top.size(key)?.map(u32::try_from) {
        None => Ok(default),
        Some(Ok(id)) => Ok(id),
        Some(Err(_)) => Err(FormatError::Config(format!("{key} is not a token id"))),
    }
}

/// Refuses an epsilon of layer norms that no vision encoder supports.
pub(super) fn check_layer_norm_eps(vision: &Lookup) -> Result<(), FormatError> {
    match vision.f32("layer_norm_eps")?.filter(|eps| *eps != 1e-6) {
        Some(eps) => {
            Err(FormatError::Unsupported(format!("layer_norm_eps {eps} in a vision encoder; supported is 1e-6")))
        }
        None => Ok(()),
    }
}

/// Refuses projectors that read another layer than the encoder's last, or whose activation is not GELU.
pub(super) fn check_projector(top: &Lookup) -> Result<(), FormatError> {
    if top.get("vision_feature_layer").is_some_and(|layer| layer.as_i64() != Some(-1)) {
        return Err(FormatError::Unsupported("vision_feature_layer other than -1".to_owned()));
    }
    match top.str("projector_hidden_act")?.unwrap_or("gelu") {
        "gelu" => Ok(()),
        other => Err(FormatError::Unsupported(format!("projector_hidden_act {}; supported is gelu", quote(other)))),
    }
}

/// A side that may be a list with one entry per axis. The entries must be equal.
pub(super) fn side(vision: &Lookup, key: &str, default: usize) -> Result<usize, FormatError> {
    let Some(sides) = vision.get(key).and_then(|value| value.as_array()) else {
        return Ok(vision.size(key)?.unwrap_or(default));
    };
    let first = sides.first().and_then(whole).and_then(|side| usize::try_from(side).ok());
    match first.filter(|_| sides.iter().all(|side| Some(side) == sides.first())) {
        Some(side) => Ok(side),
        None => Err(FormatError::Unsupported(format!("{key} with sides that differ"))),
    }
}

/// Gives a model a sliding window in the layers that `layer_types` names. Without that key, `default` returns the layers.
pub(crate) fn window(
    json: &Lookup,
    config: &mut ModelConfig,
    size: Option<usize>,
    default: impl FnOnce(usize) -> Vec<bool>,
) -> Result<(), FormatError> {
    config.layer_is_sliding = match json.get("layer_types") {
        Some(kinds) => layer_types(kinds, config.layers)?,
        None => default(config.layers),
    };
    if size.is_none() {
        config.layer_is_sliding.fill(false);
    }
    config.sliding_window = size.filter(|_| config.layer_is_sliding.contains(&true));
    Ok(())
}

/// Reads `layer_types`. Returns per layer whether it attends through the sliding window.
pub(super) fn layer_types(kinds: &Value, layers: usize) -> Result<Vec<bool>, FormatError> {
    per_layer(kinds, layers, |kind| match kind {
        "sliding_attention" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    })
}

/// Reads a list with one text per layer. `read` returns the value of a text, if it has one.
pub(crate) fn per_layer<T>(
    kinds: &Value,
    layers: usize,
    read: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, FormatError> {
    let kinds = kinds.as_array().filter(|kinds| kinds.len() == layers);
    let kinds = kinds.ok_or_else(|| FormatError::Config(format!("layer_types is not a list of {layers} texts")))?;
    let one = |kind: &Value| {
        let text = kind.as_str().unwrap_or("that is not a string");
        read(text).ok_or_else(|| FormatError::Unsupported(format!("layer type {}", quote(text))))
    };
    kinds.iter().map(one).collect()
}

/// One token id or a list of them. An empty list counts as absent.
pub(super) fn tokens(config: &Lookup, key: &str) -> Result<Option<Vec<u32>>, FormatError> {
    let Some(value) = config.get(key) else {
        return Ok(None);
    };
    let one = |value: &Value| whole(value).and_then(|id| u32::try_from(id).ok());
    let ids = match value.as_array() {
        Some(list) if list.len() > EOS_MAX => None,
        Some(list) => list.iter().map(one).collect::<Option<Vec<u32>>>(),
        None => one(value).map(|id| vec![id]),
    };
    let ids =
        ids.ok_or_else(|| FormatError::Config(format!("{key} is neither a token id nor a short list of them")))?;
    Ok(Some(ids).filter(|ids| !ids.is_empty()))
}

/// The tokens that end an answer: the generation configuration's, then the model configuration's.
pub(super) fn eos_token_ids(config: &Lookup, generation: &Lookup) -> Result<Vec<u32>, FormatError> {
    let mut distinct = Vec::new();
    for place in [generation, config] {
        for id in tokens(place, "eos_token_id")?.unwrap_or_default() {
            if !distinct.contains(&id) {
                distinct.push(id);
            }
        }
    }
    Ok(distinct)
}
