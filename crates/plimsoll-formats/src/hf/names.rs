//! Tensor names of Hugging Face checkpoints → canonical ones.
//!
//! The text model of a multimodal checkpoint has one of several prefixes, depending on the version of transformers. Other names are kept.

/// The canonical name: without prefixes of text models and encoders, and with one spelling of experts' matrices.
pub(super) fn canonical(name: &str) -> String {
    let name = without_prefix(name);
    // The first BERT used these names for a norm's weights.
    if let Some(module) = name.strip_suffix(".LayerNorm.gamma") {
        return format!("{module}.LayerNorm.weight");
    }
    if let Some(module) = name.strip_suffix(".LayerNorm.beta") {
        return format!("{module}.LayerNorm.bias");
    }
    // MLX names a layer's stacked experts `switch_mlp`; Qwen 3.5 stacks them without the ending `.weight`.
    if let Some((module, rest)) = name.split_once(".mlp.switch_mlp.") {
        return format!("{module}.mlp.experts.{rest}");
    }
    match name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj") {
        true => name + ".weight",
        false => name,
    }
}

/// The beginnings of the names of an encoder's tensors: the Qwens', then InternVL's, SigLIP's and Gemma 4's.
const TOWER_PARTS: [&str; 17] = [
    "patch_conv.",
    "ln_pre.",
    "transformer.layers.",
    "patch_embed.",
    "pos_embed.",
    "blocks.",
    "merger.",
    "deepstack_merger_list.",
    "merger_list.",
    "embeddings.",
    "encoder.layer.",
    "layernorm.",
    "encoder.layers.",
    "post_layernorm.",
    "patch_embedder.",
    "std_bias",
    "std_scale",
];

/// The beginnings of Llama 4's encoder names. Its layers have the same names as a text model's.
const LLAMA_4_PARTS: [&str; 6] = [
    "patch_embedding.linear.",
    "class_embedding",
    "positional_embedding_vlm",
    "layernorm_",
    "model.layers.",
    "vision_adapter.",
];

/// The name of a tensor of Gemma 4's `embed_vision`. This holds the projection alone, or all tensors of Unified.
fn embedder_name(rest: &str) -> Option<String> {
    let projector = rest.strip_prefix("multimodal_embedder.").unwrap_or(rest);
    if projector.starts_with("embedding_projection.") {
        return Some(format!("visual.projector.{projector}"));
    }
    ["patch_", "pos_"].iter().any(|part| rest.starts_with(part)).then(|| format!("visual.{rest}"))
}

fn without_prefix(name: &str) -> String {
    // The thinker of a model that also generates speech: its language model and encoders.
    let name = name.strip_prefix("thinker.").unwrap_or(name);
    // An encoder with a head.
    let name = name.strip_prefix("nomic_bert.").unwrap_or(name);
    let inner = name.strip_prefix("model.").unwrap_or(name);
    for (prefix, own) in [("audio_tower.", "audio"), ("embed_audio.", "audio.projector")] {
        if let Some(rest) = inner.strip_prefix(prefix) {
            return format!("{own}.{rest}");
        }
    }
    // The draft head, which some converters move into the language model's names.
    for prefix in ["language_model.mtp.", "model.language_model.mtp.", "language_model.model.mtp.", "model.mtp."] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return format!("mtp.{rest}");
        }
    }
    if let Some(rest) = name.strip_prefix("model.language_model.") {
        // Most files have `model.language_model.layers...`, but some have `model.language_model.lm_head.weight`.
        return match rest.strip_prefix("model.") {
            Some(inner) => format!("model.{inner}"),
            None if rest.starts_with("lm_head.") => rest.to_owned(),
            None => format!("model.{rest}"),
        };
    }
    if let Some(rest) = name.strip_prefix("language_model.") {
        let bare = !rest.starts_with("model.") && !rest.starts_with("lm_head.");
        return if bare { format!("model.{rest}") } else { rest.to_owned() };
    }
    if let Some(rest) = name.strip_prefix("backbone.") {
        return format!("model.{rest}");
    }
    for prefix in ["bert.", "roberta."] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return rest.to_owned();
        }
    }
    // The text model of Idefics3 and SmolVLM.
    if let Some(rest) = inner.strip_prefix("text_model.") {
        return format!("model.{rest}");
    }
    if let Some(rest) = inner.strip_prefix("connector.modality_projection.") {
        return format!("visual.projector.{rest}");
    }
    let own = inner.strip_prefix("vision_model.");
    if let Some(rest) = own.filter(|rest| LLAMA_4_PARTS.iter().any(|part| rest.starts_with(part))) {
        return format!("visual.{rest}");
    }
    // A vision encoder, under any of its prefixes.
    for prefix in ["model.visual.", "model.vision_tower.", "vision_tower.", "model.vision_model.", "vision_model."] {
        let rest = name.strip_prefix(prefix).unwrap_or_default();
        let rest = rest.strip_prefix("vision_model.").unwrap_or(rest);
        if TOWER_PARTS.iter().any(|part| rest.starts_with(part)) {
            return format!("visual.{rest}");
        }
    }
    let projector = name.strip_prefix("model.").unwrap_or(name).strip_prefix("multi_modal_projector.");
    if let Some(rest) = projector.filter(|rest| {
        ["layer_norm.", "linear_", "mm_", "norm.", "patch_merger."].iter().any(|part| rest.starts_with(part))
    }) {
        return format!("visual.projector.{rest}");
    }
    let embedder = name.strip_prefix("model.").unwrap_or(name).strip_prefix("embed_vision.");
    if let Some(name) = embedder.and_then(embedder_name) {
        return name;
    }
    // A text model that was saved without its head.
    const BARE: [&str; 6] = [
        "layers.",
        "embed_tokens.",
        "norm.",
        "embed_tokens_per_layer.",
        "per_layer_model_projection.",
        "per_layer_projection_norm.",
    ];
    if BARE.iter().any(|prefix| name.starts_with(prefix)) {
        return format!("model.{name}");
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn prefixes_of_all_vintages_are_removed() {
        for (name, want) in [
            ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.language_model.model.norm.weight", "model.norm.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.language_model.lm_head.weight", "lm_head.weight"),
            ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight"),
            ("model.language_model.layers.1.experts.down_proj", "model.layers.1.experts.down_proj.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("nomic_bert.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
            ("nomic_bert.pooler.dense.bias", "pooler.dense.bias"),
            ("backbone.layers.0.mixer.D", "model.layers.0.mixer.D"),
            ("model.vision_tower.norm.weight", "model.vision_tower.norm.weight"),
            ("vision_tower.vision_model.head.weight", "vision_tower.vision_model.head.weight"),
            ("model.visual.blocks.0.attn.qkv.bias", "visual.blocks.0.attn.qkv.bias"),
            ("visual.merger.ln_q.weight", "visual.merger.ln_q.weight"),
            ("vision_tower.patch_embed.proj.weight", "visual.patch_embed.proj.weight"),
            ("model.vision_tower.encoder.layer.3.lambda_1", "visual.encoder.layer.3.lambda_1"),
            ("vision_tower.embeddings.cls_token", "visual.embeddings.cls_token"),
            ("model.vision_model.post_layernorm.bias", "visual.post_layernorm.bias"),
            ("model.vision_model.encoder.layers.3.mlp.fc1.bias", "visual.encoder.layers.3.mlp.fc1.bias"),
            ("vision_tower.transformer.layers.3.ffn_norm.weight", "visual.transformer.layers.3.ffn_norm.weight"),
            ("model.vision_tower.patch_conv.weight", "visual.patch_conv.weight"),
            ("multi_modal_projector.norm.weight", "visual.projector.norm.weight"),
            ("model.connector.modality_projection.proj.weight", "visual.projector.proj.weight"),
            ("model.text_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
            ("multi_modal_projector.linear_1.bias", "visual.projector.linear_1.bias"),
            ("multi_modal_projector.mm_soft_emb_norm.weight", "visual.projector.mm_soft_emb_norm.weight"),
            ("vision_tower.vision_model.post_layernorm.bias", "visual.post_layernorm.bias"),
            ("model.vision_tower.encoder.layers.3.mlp.fc1.bias", "visual.encoder.layers.3.mlp.fc1.bias"),
            ("model.embed_vision.embedding_projection.weight", "visual.projector.embedding_projection.weight"),
            ("model.embed_vision.patch_ln1.bias", "visual.patch_ln1.bias"),
            (
                "model.embed_vision.multimodal_embedder.embedding_projection.weight",
                "visual.projector.embedding_projection.weight",
            ),
            ("model.vision_tower.std_bias", "visual.std_bias"),
            (
                "model.vision_tower.encoder.layers.3.mlp.up_proj.input_max",
                "visual.encoder.layers.3.mlp.up_proj.input_max",
            ),
            ("vision_tower.patch_embedder.input_proj.weight", "visual.patch_embedder.input_proj.weight"),
            ("thinker.audio_tower.layers.0.fc1.bias", "audio.layers.0.fc1.bias"),
            ("model.audio_tower.conv2d1.weight", "audio.conv2d1.weight"),
            ("model.embed_audio.embedding_projection.weight", "audio.projector.embedding_projection.weight"),
            ("thinker.visual.merger_list.0.ln_q.bias", "visual.merger_list.0.ln_q.bias"),
            ("model.visual.merger_list.0.mlp.2.bias", "visual.merger_list.0.mlp.2.bias"),
            ("thinker.model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
            ("thinker.lm_head.weight", "lm_head.weight"),
            ("vision_model.model.layers.0.mlp.fc1.bias", "visual.model.layers.0.mlp.fc1.bias"),
            ("vision_model.class_embedding", "visual.class_embedding"),
            ("thinker.audio_tower.conv1.weight", "audio.conv1.weight"),
            ("thinker.visual.blocks.0.attn.q.bias", "visual.blocks.0.attn.q.bias"),
            ("talker.model.norm.weight", "talker.model.norm.weight"),
            ("mtp.fc.weight", "mtp.fc.weight"),
            ("language_model.mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
            ("model.language_model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj.weight"),
            ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.gate_up_proj.weight"),
            (
                "language_model.model.layers.1.mlp.switch_mlp.gate_proj.scales",
                "model.layers.1.mlp.experts.gate_proj.scales",
            ),
            ("model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight"),
        ] {
            assert_eq!(canonical(name), want);
        }
    }
}
