//! InternVL in its original form, class `InternVLChatModel`: its configuration and tensor names in the words of transformers.
//!
//! References: OpenGVLab/InternVL, `configuration_internvl_chat.py`, `configuration_intern_vit.py` and `modeling_internvl_chat.py`, for
//! the keys and defaults; transformers, `convert_internvl_weights_to_hf.py`, for the names. `intern` reads the result.

use super::json::{Lookup, read_bounded, read_object};
use super::values::side;
use crate::bounds::within;
use crate::config::ModelConfig;
use crate::error::{FormatError, quote};
use crate::vision::VisionKind;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The token of which each position of an image has one.
const IMAGE_TOKEN: &str = "<IMG_CONTEXT>";
/// Classes of the language models that are read. InternLM2 has other names of tensors, and joins queries, keys and values.
const LANGUAGE_MODELS: [&str; 3] = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"];
/// The same as values of `model_type`.
const MODEL_TYPES: [&str; 3] = ["qwen2", "qwen3", "qwen3_moe"];
/// Fewest and most tiles of an image where the configuration names none: those of the published code.
const TILES: [usize; 2] = [1, 12];
/// Most tiles of an image.
const TILES_MAX: usize = 1024;
/// Largest `tokenizer.json` that is read, in bytes; those of Qwen have 11 MB.
const TOKENIZER_BYTES_MAX: u64 = 64 << 20;

/// A configuration in the words of transformers.
pub(super) struct Translated {
    /// The whole `config.json`.
    pub(super) top: Map<String, Value>,
    /// Fewest and most tiles of an image.
    tiles: [u32; 2],
}

/// The class, or `model_type`.
fn is(top: &Lookup) -> Result<bool, FormatError> {
    match top.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str) {
        Some(name) => Ok(name == "InternVLChatModel"),
        None => Ok(top.str("model_type")? == Some("internvl_chat")),
    }
}

impl Translated {
    /// None for another model. `dir` has the tokenizer's files; a configuration alone is planned with the token of published models.
    pub(super) fn new(top: &Map<String, Value>, dir: Option<&Path>) -> Result<Option<Self>, FormatError> {
        let lookup = Lookup { inner: top, outer: None };
        if !is(&lookup)? {
            return Ok(None);
        }
        let part = |key: &str| {
            lookup.object(key)?.ok_or_else(|| FormatError::Config(format!("{key} of InternVLChatModel is missing")))
        };
        let (text, vision) = (part("llm_config")?, part("vision_config")?);
        refuse(&lookup)?;
        let mut own = top.clone();
        own.remove("llm_config");
        own.insert("architectures".to_owned(), json!(["InternVLForConditionalGeneration"]));
        own.insert("model_type".to_owned(), json!("internvl"));
        own.insert("text_config".to_owned(), language_model(&text)?.into());
        own.insert("vision_config".to_owned(), encoder(&vision, &lookup)?.into());
        if let Some(id) = dir.map(image_token).transpose()?.flatten() {
            own.insert("image_token_id".to_owned(), json!(id));
        }
        Ok(Some(Self { top: own, tiles: tiles(&lookup)? }))
    }

    /// Adds what transformers does not have in `config.json`.
    pub(super) fn add(&self, config: &mut ModelConfig) {
        if let Some(VisionKind::Intern(intern)) = config.vision.as_mut().map(|vision| &mut vision.encoder) {
            intern.tiles = Some(self.tiles);
        }
    }
}

/// Refuses values for which there is no code.
fn refuse(top: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    // The class's own default.
    match top.str("ps_version")?.unwrap_or("v1") {
        "v2" => {}
        other => {
            let next = "use InternVL 2.5 or newer";
            return unsupported(format!("ps_version {}; supported is v2: {next}", quote(other)));
        }
    }
    match top.get("select_layer").map_or(Some(-1), Value::as_i64) {
        Some(-1) => {}
        other => {
            let layer = other.map_or_else(|| "that is not a number".to_owned(), |layer| layer.to_string());
            let next = "use InternVL 2.5 or newer";
            return unsupported(format!("select_layer {layer}; supported is -1, the last layer: {next}"));
        }
    }
    match top.bool("pad2square")? {
        Some(true) => unsupported("pad2square true; supported is false: use InternVL 2.5 or newer".to_owned()),
        _ => Ok(()),
    }
}

/// The configuration of the language model, with its class as `model_type`.
fn language_model(text: &Lookup) -> Result<Map<String, Value>, FormatError> {
    let class = text.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let name = match class {
        Some(class) => class,
        None => text.str("model_type")?.unwrap_or("that is not named"),
    };
    if !LANGUAGE_MODELS.contains(&name) && !MODEL_TYPES.contains(&name) {
        let (name, all) = (quote(name), LANGUAGE_MODELS.join(", "));
        let next = "use the model's version for transformers, whose name ends in -hf, or an InternVL with Qwen";
        return Err(FormatError::Unsupported(format!(
            "InternVLChatModel with language model {name}; supported are {all}: {next}"
        )));
    }
    let mut own = text.inner.clone();
    own.insert("model_type".to_owned(), name.into());
    Ok(own)
}

/// The configuration of the encoder, with the defaults of its class.
fn encoder(vision: &Lookup, top: &Lookup) -> Result<Map<String, Value>, FormatError> {
    let image = side(vision, "image_size", 224)?;
    if let Some(forced) = top.size("force_image_size")?.filter(|forced| *forced != image) {
        return Err(FormatError::Unsupported(format!(
            "force_image_size {forced} where image_size is {image}: positions are not resized; make both the same"
        )));
    }
    let mut own = vision.inner.clone();
    own.insert("image_size".to_owned(), json!(image));
    for (key, in_transformers, default) in [
        ("qk_normalization", "use_qk_norm", json!(true)),
        ("qkv_bias", "attention_bias", json!(false)),
        ("norm_type", "norm_type", json!("rms_norm")),
        ("hidden_size", "hidden_size", json!(3200)),
        ("num_attention_heads", "num_attention_heads", json!(25)),
        ("num_hidden_layers", "num_hidden_layers", json!(48)),
        ("intermediate_size", "intermediate_size", json!(12_800)),
    ] {
        let value = vision.get(key).cloned().unwrap_or(default);
        own.remove(key);
        own.insert(in_transformers.to_owned(), value);
    }
    // The class has no norm behind the last layer.
    own.insert("use_mean_pooling".to_owned(), json!(true));
    Ok(own)
}

/// Fewest and most tiles of an image.
fn tiles(top: &Lookup) -> Result<[u32; 2], FormatError> {
    if top.bool("dynamic_image_size")? == Some(false) {
        return Ok([1, 1]);
    }
    let most = top.size("max_dynamic_patch")?.unwrap_or(TILES[1]);
    within("max_dynamic_patch", most, TILES_MAX)?;
    let fewest = top.size("min_dynamic_patch")?.unwrap_or(TILES[0]);
    within("min_dynamic_patch", fewest, most)?;
    if most > 1 && top.bool("use_thumbnail")? == Some(false) {
        let what = "use_thumbnail false with several tiles; supported is true, or max_dynamic_patch 1";
        return Err(FormatError::Unsupported(what.to_owned()));
    }
    Ok([fewest as u32, most as u32])
}

/// The members of `tokenizer.json` that are read here.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<Added>,
}

/// An added token.
#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

/// The id of [`IMAGE_TOKEN`]; none where the directory has no tokenizer.
fn image_token(dir: &Path) -> Result<Option<u32>, FormatError> {
    let [added, config, tokenizer] =
        ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"].map(|name| dir.join(name));
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let mut any = false;
    if added.is_file() {
        any = true;
        if let Some(id) = read_object(&added)?.get(IMAGE_TOKEN).and_then(id) {
            return Ok(Some(id));
        }
    }
    if config.is_file() {
        any = true;
        let config = read_object(&config)?;
        let tokens = config.get("added_tokens_decoder").and_then(Value::as_object);
        let found = tokens.and_then(|tokens| tokens.iter().find(|(_, token)| token["content"] == IMAGE_TOKEN));
        if let Some(id) = found.and_then(|(id, _)| id.parse().ok()) {
            return Ok(Some(id));
        }
    }
    if tokenizer.is_file() {
        any = true;
        let bytes = read_bounded(&tokenizer, TOKENIZER_BYTES_MAX)?;
        let parsed: Tokenizer = serde_json::from_slice(&bytes)
            .map_err(|error| FormatError::Config(format!("{}: {error}", tokenizer.display())))?;
        if let Some(token) = parsed.added_tokens.iter().find(|token| token.content == IMAGE_TOKEN) {
            return Ok(Some(token.id));
        }
    }
    match any {
        true => Err(FormatError::Config(format!(
            "the tokenizer's files have no token {IMAGE_TOKEN}, which stands for images: fetch added_tokens.json and tokenizer.json again"
        ))),
        false => Ok(None),
    }
}

/// The name in transformers of a tensor whose prefix has been removed; none for any other name.
pub(super) fn renamed(name: &str) -> Option<String> {
    if let Some(rest) = name.strip_prefix("mlp1.") {
        let (part, leaf) = rest.split_once('.')?;
        let part = match part {
            "0" => "layer_norm",
            "1" => "linear_1",
            "3" => "linear_2",
            _ => return None,
        };
        return Some(format!("visual.projector.{part}.{leaf}"));
    }
    let name = name.strip_prefix("visual.")?;
    if let Some(rest) = name.strip_prefix("encoder.layers.") {
        let (layer, part) = rest.split_once('.')?;
        return Some(format!("visual.encoder.layer.{layer}.{}", of_layer(part)?));
    }
    let known = match name {
        "embeddings.class_embedding" => "cls_token",
        "embeddings.position_embedding" => "position_embeddings",
        "embeddings.patch_embedding.weight" => "patch_embeddings.projection.weight",
        "embeddings.patch_embedding.bias" => "patch_embeddings.projection.bias",
        _ => return None,
    };
    Some(format!("visual.embeddings.{known}"))
}

/// The same of a part of a layer. One matrix has the rows of queries, then keys, then values.
fn of_layer(part: &str) -> Option<String> {
    let (module, leaf) = match part {
        "ls1" => return Some("lambda_1".to_owned()),
        "ls2" => return Some("lambda_2".to_owned()),
        _ => part.rsplit_once('.')?,
    };
    let module = match module {
        "attn.qkv" => "attention.qkv",
        "attn.proj" => "attention.projection_layer",
        "attn.q_norm" => "attention.q_norm",
        "attn.k_norm" => "attention.k_norm",
        "norm1" => "layernorm_before",
        "norm2" => "layernorm_after",
        "mlp.fc1" | "mlp.fc2" => module,
        _ => return None,
    };
    Some(format!("{module}.{leaf}"))
}

#[cfg(test)]
mod tests {
    use super::renamed;

    #[test]
    fn tensors_have_the_names_of_transformers() {
        for (name, want) in [
            ("visual.embeddings.class_embedding", "visual.embeddings.cls_token"),
            ("visual.embeddings.position_embedding", "visual.embeddings.position_embeddings"),
            ("visual.embeddings.patch_embedding.bias", "visual.embeddings.patch_embeddings.projection.bias"),
            ("visual.encoder.layers.3.attn.qkv.weight", "visual.encoder.layer.3.attention.qkv.weight"),
            ("visual.encoder.layers.3.attn.proj.bias", "visual.encoder.layer.3.attention.projection_layer.bias"),
            ("visual.encoder.layers.3.attn.k_norm.weight", "visual.encoder.layer.3.attention.k_norm.weight"),
            ("visual.encoder.layers.3.norm1.bias", "visual.encoder.layer.3.layernorm_before.bias"),
            ("visual.encoder.layers.3.mlp.fc2.weight", "visual.encoder.layer.3.mlp.fc2.weight"),
            ("visual.encoder.layers.3.ls2", "visual.encoder.layer.3.lambda_2"),
            ("mlp1.0.bias", "visual.projector.layer_norm.bias"),
            ("mlp1.3.weight", "visual.projector.linear_2.weight"),
        ] {
            assert_eq!(renamed(name).as_deref(), Some(want));
        }
        for name in ["visual.encoder.layer.3.lambda_2", "mlp1.2.weight", "model.layers.0.mlp.up_proj.weight"] {
            assert_eq!(renamed(name), None, "{name}");
        }
    }
}
