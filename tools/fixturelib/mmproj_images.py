"""Gemma 3, Gemma 4, Mistral 3, Idefics3, InternVL and LFM2-VL as the two GGUF files that llama.cpp's converter makes: model.gguf and mmproj.gguf.

What the converter changes beyond gguf_export.py, and we with it: the encoder's tensors are called `v.*` and `mm.*`; the norm before
Gemma 3's projection has 1 added; the rows of Mistral 3's queries and keys are interleaved as `llama`'s; the patch embedding of Gemma 4 and LFM2-VL becomes a convolution, and Gemma 4's bounds have one
dimension. The number of patches per side of a token is written where it is not the published one, and so are the bounds of images.

The reference (as in vision.py) is the model that the files' dequantized values make, read back with those changes undone. Pictures
are prepared by the processor of the same model in the transformers layout.
"""

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer

from . import budget, checkpoint, conformer, families, gemma4_tensors, gguf_export, idefics3, lfm2_vl, llama4_images, models, pixtral, reference, siglip, tiled, vision
from .mmproj import finish

# name → (where the model is, the model, type of the text's matrices, type of the encoder's)
FILES = {
    "vl-gguf-gemma3": (siglip, "vl-gemma3", Q.F16, Q.F16),
    "vl-gguf-gemma4": (budget, "vl-gemma4", Q.F16, Q.BF16),
    "vl-gguf-gemma4-e2b": (budget, "vl-gemma4-e2b", Q.F16, Q.F16),
    "vl-gguf-gemma4-audio": (conformer, "vl-gemma4-audio", Q.F16, Q.F16),
    "vl-gguf-idefics3": (idefics3, "vl-idefics3", Q.F16, Q.F16),
    "vl-gguf-mistral3": (pixtral, "vl-mistral3", Q.F16, Q.F16),
    "vl-gguf-llama4": (llama4_images, "vl-llama4", Q.F16, Q.F16),
    "vl-gguf-intern": (tiled, "vl-intern", Q.F16, Q.F16),
    "vl-gguf-intern-rms": (tiled, "vl-intern-rms", Q.F16, Q.BF16),
    "vl-gguf-lfm2": (lfm2_vl, "vl-lfm2", Q.F16, Q.F16),
    "vl-gguf-lfm2-bare": (lfm2_vl, "vl-lfm2-bare", Q.Q8_0, Q.BF16),
}
PROJECTORS = {"llama4": "llama4", "gemma3": "gemma3", "gemma4": "gemma4v", "lfm2_vl": "lfm2", "mistral3": "pixtral", "idefics3": "idefics3", "internvl": "internvl"}
PARTS = {
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd", "post_layernorm": "v.post_ln",
    "mm_input_projection": "mm.input_projection", "mm_soft_emb_norm": "mm.soft_emb_norm", "embedding_projection": "mm.input_projection",
    "patch_embedder.input_proj": "v.patch_embd", "patch_embedder.position_embedding_table": "v.position_embd",
    "layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2",
    "modality_projection.proj": "mm.model.fc", "patch_conv": "v.patch_embd", "ln_pre": "v.pre_ln", "norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
    "embeddings.patch_embeddings.projection": "v.patch_embd",
}
# InternVL's projector, and the two rows of embeddings that have no leaf of their own in transformers.
INTERN = {
    "multi_modal_projector.layer_norm": "mm.model.mlp.0", "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3", "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
}
LAYER = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "input_layernorm": "ln1", "pre_feedforward_layernorm": "ln2", "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "attention_norm": "ln1", "ffn_norm": "ln2", "attention.o_proj": "attn_out", **{f"attention.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_out", **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "layernorm_before": "ln1", "layernorm_after": "ln2", "attention.projection_layer": "attn_out",
    "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm", "lambda_1": "ls1", "lambda_2": "ls2",
}
TOWERS = ("model.vision_tower.", "model.vision_model.", "model.multi_modal_projector.", "model.connector.", "model.embed_vision.")
LLAMA4_TOWERS = ("vision_model.", "multi_modal_projector.")
HEARS = ("model.audio_tower.", "model.embed_audio.")
# Gemma 4's audio encoder: the parts, and those of a layer.
AUDIO = {
    "audio_tower.subsample_conv_projection.layer0.conv": "a.conv1d.0", "audio_tower.subsample_conv_projection.layer1.conv": "a.conv1d.1",
    "audio_tower.subsample_conv_projection.layer0.norm": "a.conv1d.0.norm",
    "audio_tower.subsample_conv_projection.layer1.norm": "a.conv1d.1.norm",
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.input_projection", "audio_tower.output_proj": "a.pre_encode.out",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}
AUDIO_LAYER = {
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}, "self_attn.post": "attn_out", "self_attn.relative_k_proj": "attn_k_rel",
    "self_attn.per_dim_scale": "per_dim_scale", "norm_pre_attn": "attn_pre_norm", "norm_post_attn": "attn_post_norm", "norm_out": "ln2",
    "lconv1d.pre_layer_norm": "conv_norm", "lconv1d.conv_norm": "norm_conv", "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.linear_start": "conv_pw1", "lconv1d.linear_end": "conv_pw2",
}
for at, end in ((1, ""), (2, "_1")):
    parts = {"ffw_layer_1": "ffn_up", "ffw_layer_2": "ffn_down", "pre_layer_norm": "ffn_norm", "post_layer_norm": "ffn_post_norm"}
    AUDIO_LAYER |= {f"feed_forward{at}.{ours}": f"{theirs}{end}" for ours, theirs in parts.items()}


def audio_name(key: str) -> str:
    """The name of one of the audio encoder's tensors."""
    name = key.removeprefix("model.").replace(".linear.", ".")
    name = f"{name}.weight" if name.endswith("per_dim_scale") else name
    module, leaf = name.rsplit(".", 1)
    if module.startswith("audio_tower.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"a.blk.{layer}.{AUDIO_LAYER[part]}.{leaf}"
    return f"{AUDIO[module]}.{leaf}"


def gguf_name(key: str, kind: str) -> str:
    """The name of one of the encoder's tensors in mmproj.gguf."""
    if kind == "llama4":
        return llama4_images.gguf_name(key)
    if key.startswith(HEARS):
        return audio_name(key)
    if kind == "internvl":
        own = next((name for name in INTERN if key.startswith(f"model.{name}")), None)
        if own:
            return INTERN[own] + key.removeprefix(f"model.{own}")
        key = f"{key}.weight" if ".lambda_" in key else key
    name = next(key.removeprefix(prefix) for prefix in TOWERS if key.startswith(prefix))
    name = name.replace(".linear.weight", ".weight").replace("projection_weight", "projection.weight")
    name = name.removesuffix(".weight") + ".weight" if name.endswith("_table") else name
    if name.startswith("std_"):
        return f"v.{name}"
    module, leaf = name.rsplit(".", 1)
    if module.startswith(("encoder.layer", "transformer.layers.")):
        _, _, layer, part = module.split(".", 3)
        return f"v.blk.{layer}.{LAYER[part]}.{leaf}"
    return f"{PARTS[module]}.{leaf}"


def changed(key: str, w: np.ndarray, raw: dict, back: bool) -> np.ndarray:
    """What the converter does to one of the encoder's tensors, or the inverse."""
    if key.endswith("soft_emb_norm.weight"):
        return w + np.float32(-1 if back else 1)
    if key.endswith("input_proj.weight") or raw["model_type"] == "lfm2_vl" and key.endswith("patch_embedding.weight"):
        patch = raw["vision_config"]["patch_size"]
        if back:
            return w.transpose(0, 2, 3, 1).reshape(len(w), -1)
        return w.reshape(len(w), patch, patch, 3).transpose(0, 3, 1, 2)
    if raw["model_type"] == "mistral3" and key.endswith(("q_proj.weight", "k_proj.weight")):
        heads = raw["vision_config"]["num_attention_heads"]
        halves = (heads, -1, 2) if back else (heads, 2, -1)
        return w.reshape(*halves, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
    if key.endswith("per_dim_scale"):
        return np.log(np.expm1(w)) if back else np.log1p(np.exp(w))
    if key.endswith("depthwise_conv1d.weight"):
        return w[:, None] if back else w[:, 0]
    if back:
        return w.reshape(()) if key.endswith(("_min", "_max")) else w
    return w.reshape(1) if w.ndim == 0 else w


def side(size) -> int:
    """A side of a square that a configuration may give twice."""
    return size[0] if isinstance(size, list) else size


def write_encoder(path, raw: dict, tensors: dict, matrix: Q) -> dict:
    """mmproj.gguf; what a reader gets, by the names of the state dictionary."""
    about, width, kind = raw["vision_config"], raw["text_config"]["hidden_size"], raw["model_type"]
    four, patch = kind == "gemma4", side(about["patch_size"])
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_string("clip.vision.projector_type" if four else "clip.projector_type", PROJECTORS[kind])
    writer.add_vision_projection_dim(width)
    # Of Mistral 3 what the processor's file says, which is the same in published models.
    sides = {"gemma4": 224, "lfm2_vl": 256, "mistral3": 45}
    writer.add_vision_image_size(sides.get(kind) or side(about["image_size"]))
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(about["hidden_size"])
    writer.add_vision_feed_forward_length(about["intermediate_size"])
    writer.add_vision_block_count(about["num_hidden_layers"])
    writer.add_vision_head_count(about["num_attention_heads"])
    # Of Idefics3 what the converter writes where the configuration says nothing: transformers computes with 1e-6 then.
    writer.add_vision_attention_layernorm_eps(1e-5 if kind in ("mistral3", "idefics3", "llama4") else 1e-6)
    (plain, _), _ = pixtral.processors(raw) if kind == "mistral3" else ((None, None), None)
    writer.add_vision_image_mean(plain["image_mean"] if plain else [0.0 if four else 0.5] * 3)
    writer.add_vision_image_std(plain["image_std"] if plain else [1.0 if four else 0.5] * 3)
    if four:
        # Not in published files, whose budget is the default one.
        writer.add_vision_max_pixels(budget.BUDGET * (patch * about["pooling_kernel_size"]) ** 2)
    elif kind == "mistral3":
        writer.add_vision_use_silu(True)
        writer.add_vision_spatial_merge_size(raw["spatial_merge_size"])
        # A row of the text's embeddings, for programs that do not look it up there.
        writer.add_tensor("v.token_embd.img_break", np.zeros(width, dtype=np.float32))
    else:
        writer.add_vision_use_gelu(True)
    if kind == "gemma3":
        writer.add_vision_projector_scale_factor(about["image_size"] // patch // int(raw["mm_tokens_per_image"] ** 0.5))
    if kind == "idefics3":
        writer.add_vision_projector_scale_factor(raw["scale_factor"])
        writer.add_vision_preproc_image_size(idefics3.longest(raw))
    if kind == "llama4":
        (image, _), _ = llama4_images.processors(raw)
        writer.add_vision_projector_scale_factor(int(1 / about["pixel_shuffle_ratio"]))
        # Not in published files, which have the default of 16.
        writer.add_vision_preproc_max_tiles(image["max_patches"])
    if kind == "internvl":
        (image, _), _ = tiled.processors(raw)
        writer.add_vision_projector_scale_factor(int(1 / raw["downsample_ratio"]))
        writer.add_vision_preproc_min_tiles(image["min_patches"])
        writer.add_vision_preproc_max_tiles(image["max_patches"])
    if kind == "lfm2_vl":
        writer.add_vision_projector_scale_factor(raw["downsample_factor"])
        (image, _), _ = lfm2_vl.processors(raw)
        token = (patch * raw["downsample_factor"]) ** 2
        writer.add_vision_min_pixels(image["min_image_tokens"] * token)
        writer.add_vision_max_pixels(image["max_image_tokens"] * token)
    if any(key.startswith(HEARS) for key in tensors):
        write_audio(writer, raw["audio_config"])
    exact = {}
    for key, tensor in tensors.items():
        w, target = np.ascontiguousarray(changed(key, tensor.float().numpy(), raw, False)), gguf_name(key, kind)
        stored = matrix if w.ndim >= 2 else Q.F32
        if w.ndim > 2 or "_embd" in target:
            stored = Q.F32
        if target.startswith(("a.conv1d", "a.input_projection")) or ".conv_dw" in target:
            stored = Q.F32
        if target == "mm.input_projection.weight" and not four:
            stored = Q.F16
        if kind == "internvl" and raw["vision_config"].get("use_qk_norm"):
            # Older converters left out dimensions of one.
            w = w.squeeze()
        data = np.ascontiguousarray(quantize(w, stored))
        writer.add_tensor(target, data, raw_dtype=stored)
        back = np.array(dequantize(data, stored), dtype=np.float32).reshape(tensor.shape if kind == "internvl" else w.shape)
        exact[key] = torch.from_numpy(np.ascontiguousarray(changed(key, back, raw, True)))
        assert torch.allclose(exact[key], tensor.float(), atol=0.05), key
    finish(writer)
    return exact


def write_audio(writer: gguf.GGUFWriter, about: dict) -> None:
    """What the file says of the audio encoder."""
    writer.add_clip_has_audio_encoder(True)
    writer.add_clip_audio_projector_type("gemma4a")
    writer.add_audio_block_count(about["num_hidden_layers"])
    writer.add_audio_embedding_length(about["hidden_size"])
    writer.add_audio_feed_forward_length(4 * about["hidden_size"])
    writer.add_audio_head_count(about["num_attention_heads"])
    writer.add_audio_num_mel_bins(about["subsampling_conv_channels"][0])
    writer.add_audio_attention_layernorm_eps(1e-6)


def write_text(path, raw: dict, name: str, tensors: dict, tokenizer, source, matrix: Q) -> dict:
    """model.gguf; what a reader gets."""
    text = raw["text_config"]
    writer = gguf.GGUFWriter(path, gguf_export.ARCHITECTURES.get(text["model_type"], text["model_type"]))
    gguf_export.write_metadata(writer, text, name, tokenizer, tokens(source), source.CHAT_TEMPLATE)
    gguf_export.write_tensors(writer, text, tensors, (matrix, matrix, {}))
    finish(writer)
    return gguf_export.read_back(path, text, tensors)


def tokens(source) -> list[str]:
    """The tokens that a model has beside those of all."""
    return source.EXTRA + getattr(source, "PLACES", [])


def as_file(text: dict) -> dict:
    """The text model's configuration that a file can express: every sixth layer of Gemma 3 is global. In float32 throughout."""
    text = {"model_type": "gemma3_text", **{k: v for k, v in text.items() if k != "dtype"}}
    if text["model_type"] == "mistral":
        # Of the architecture `llama` in files.
        text = {k: v for k, v in text.items() if k != "sliding_window"} | {"model_type": "llama"}
    if text["model_type"] == "gemma3_text":
        text |= {"num_hidden_layers": 6, "sliding_window_pattern": 6}
    return gguf_export.config_for(text)


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """One pair of files with its reference."""
    source, original, text_kind, encoder_kind = FILES[name]
    raw = getattr(source, "IN_FILE", source.MODELS)[original]
    raw = {**raw, "text_config": as_file(raw["text_config"])}
    config = transformers.AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = getattr(transformers, raw["architectures"][0])(config).float().eval()
    vision.fill(model, raw["text_config"], seed)
    if raw["model_type"] == "gemma4":
        gemma4_tensors.fill_buffers(model, seed, getattr(torch, vision.DTYPE))
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in tokens(source)])
    language = "model.text_model." if raw["model_type"] == "idefics3" else "model.language_model."
    four = raw["model_type"] == "llama4"
    if four:
        language = "language_model.model."
    encoder, text = {}, {}
    for key, tensor in models.state(model).items():
        if key.startswith(LLAMA4_TOWERS if four else (*TOWERS, *HEARS)):
            encoder[key] = tensor
        else:
            text[key.replace(language, "model.").removeprefix("language_model.")] = tensor.float()
    if four:
        text = families.split_experts(raw["text_config"], text)
    checkpoint.fresh(folder)
    exact = write_encoder(folder / "mmproj.gguf", raw, encoder, encoder_kind)
    read = write_text(folder / "model.gguf", raw, name, text, extended, source, text_kind)
    read = {key: tensor.reshape(text[key].shape) for key, tensor in read.items()}
    if four:
        read = {f"language_model.{key}": tensor for key, tensor in families.join_experts(raw["text_config"], read).items()}
    for key, tensor in read.items():
        exact[key if four else key.replace("model.", language, 1)] = tensor
    if raw["tie_word_embeddings"]:
        exact["lm_head.weight"] = exact[f"{language}embed_tokens.weight"]
    model.load_state_dict(exact, strict=True)
    model.name_or_path = str(folder.parent / original)
    made = vision.cases_of(model, None, raw, extended, getattr(source, "STILL", source.CASES), source.case)
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump({"model": name, "made_with": made_with, "cases": made}, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   {type(model).__name__}", flush=True)
