"""Tiny models that see, as the two GGUF files that llama.cpp's converter makes: model.gguf and mmproj.gguf.

What the converter changes beyond gguf_export.py and hybrid_forms.py, and we with it: the encoder's tensors are called `v.*` and
`mm.*`; the two frames of the patch embedding are two tensors; Qwen2-VL's joined projection is taken apart, Qwen3-VL's is not;
deepstack mergers have the number of their layer; Qwen2-VL's feed_forward_length is the model's width, which is wrong. Old converters
called the two feed-forward projections of a layer by each other's names: vl-gguf-qwen2 does.

Not in any file: the bounds of videos, which are the published ones, and Qwen2.5-VL's tokens_per_second, which is 2. Its window_size is
112 unless `clip.vision.window_size` says otherwise, as it does here.

The reference (as in vision.py) is the model that the files' dequantized values make, read back with those changes undone.
"""

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer

from . import checkpoint, hybrid_forms, models, reference, vision

TILED = {"hidden_size": 32, "intermediate_size": 64}

# name → (model of vision.py, changes of its vision_config, type of the text's matrices, type of the encoder's)
FILES: dict[str, tuple[str, dict, Q, Q]] = {
    "vl-gguf-qwen3.5": ("vl-qwen3.5", {}, Q.Q8_0, Q.F16),
    "vl-gguf-qwen3.5-moe": ("vl-qwen3.5-moe", {}, Q.BF16, Q.BF16),
    "vl-gguf-qwen3": ("vl-qwen3", TILED, Q.Q8_0, Q.Q8_0),
    "vl-gguf-qwen3-moe": ("vl-qwen3-moe", {}, Q.BF16, Q.F32),
    "vl-gguf-qwen2.5": ("vl-qwen2.5", {"tokens_per_second": 2}, Q.Q8_0, Q.BF16),
    "vl-gguf-qwen2": ("vl-qwen2", {}, Q.F16, Q.F16),
}
ARCHITECTURES = {
    "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
}
PROJECTORS = {"qwen2_vl": gguf.VisionProjectorType.QWEN2VL, "qwen2_5_vl": gguf.VisionProjectorType.QWEN25VL}
# Videos that the published bounds leave as they are.
CASES = {**vision.CASES, "video": [(4, 32, 32)], "both": [(0, 16, 16), (4, 32, 40)]}
PIXELS = (64, 16384)
LAYER = {
    "norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", "attn.qkv": "attn_qkv", **{f"attn.{q}": f"attn_{q}" for q in "qkv"},
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate",
}
MERGER = {
    "merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2",
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "pos_embed": "v.position_embd",
}
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def targets(raw: dict, name: str, w: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors of mmproj.gguf that one of the encoder's tensors becomes."""
    kind = raw["model_type"]
    if name == "patch_embed.proj.weight":
        return [("v.patch_embd.weight", w[:, :, 0]), ("v.patch_embd.weight.1", w[:, :, 1])]
    if name == "patch_embed.proj.bias":
        return [("v.patch_embd.bias", w)]
    module, leaf = name.rsplit(".", 1)
    if module in MERGER:
        return [(f"{MERGER[module]}.{leaf}", w)]
    if module.startswith("deepstack_merger_list."):
        _, level, part = module.split(".")
        layer = raw["vision_config"]["deepstack_visual_indexes"][int(level)]
        return [(f"v.deepstack.{layer}.{DEEPSTACK[part]}.{leaf}", w)]
    _, layer, part = module.split(".", 2)
    if part == "attn.qkv" and not vision.later(raw):
        return [(f"v.blk.{layer}.attn_{q}.{leaf}", piece) for q, piece in zip("qkv", np.split(w, 3))]
    part = LAYER[part]
    part = SWAPPED.get(part, part) if kind == "qwen2_vl" else part
    return [(f"v.blk.{layer}.{part}.{leaf}", w)]


def together(name: str, pieces: list[np.ndarray]) -> np.ndarray:
    """The inverse of `targets`, of one tensor's values."""
    if name == "patch_embed.proj.weight":
        return np.stack(pieces, axis=2)
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def write_encoder(path, raw: dict, tensors: dict, matrix: Q) -> dict:
    """mmproj.gguf; what a reader gets, by the names below `model.visual.`."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(PROJECTORS.get(raw["model_type"], gguf.VisionProjectorType.QWEN3VL))
    (_, image), _ = processors(raw)
    describe_images(writer, raw, (image.image_mean, image.image_std))
    exact = write_images(writer, raw, tensors, matrix)
    finish(writer)
    return exact


def describe_images(writer: gguf.GGUFWriter, raw: dict, colours: tuple) -> None:
    """What the file says of the encoder, and of the means and deviations of images."""
    about, old = raw["vision_config"], raw["model_type"] == "qwen2_vl"
    writer.add_vision_projection_dim(raw.get("text_config", raw)["hidden_size"])
    side = int(about.get("num_position_embeddings", 0) ** 0.5) * about["patch_size"]
    writer.add_vision_image_size(side or 560)
    writer.add_vision_patch_size(about["patch_size"])
    writer.add_vision_embedding_length(about["embed_dim"] if old else about["hidden_size"])
    writer.add_vision_feed_forward_length(about["hidden_size"] if old else about["intermediate_size"])
    writer.add_vision_block_count(about["depth"])
    writer.add_vision_head_count(about["num_heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean(list(colours[0]))
    writer.add_vision_image_std(list(colours[1]))
    writer.add_vision_min_pixels(PIXELS[0])
    writer.add_vision_max_pixels(PIXELS[1])
    if vision.later(raw):
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(about["spatial_merge_size"])
        deep = about.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(about["depth"])])
    elif not old:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(about["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", about["window_size"])


def write_images(writer: gguf.GGUFWriter, raw: dict, tensors: dict, matrix: Q) -> dict:
    """The encoder's tensors; what a reader gets, by the names in `tensors`."""
    exact = {}
    for name, tensor in tensors.items():
        pieces = []
        for target, w in targets(raw, name, tensor.float().numpy()):
            kind = matrix if w.ndim >= 2 else Q.F32
            if w.ndim > 2:
                kind = Q.F16 if matrix == Q.F16 else Q.F32
            if "position_embd" in target:
                kind = Q.F32
            data = np.ascontiguousarray(quantize(np.ascontiguousarray(w), kind))
            writer.add_tensor(target, data, raw_dtype=kind)
            pieces.append(np.array(dequantize(data, kind), dtype=np.float32).reshape(w.shape))
        exact[name] = torch.from_numpy(together(name, pieces))
        assert torch.allclose(exact[name], tensor.float(), atol=0.05), name
    return exact


def write_text(path, raw: dict, name: str, tensors: dict, tokenizer, matrix: Q) -> dict:
    """model.gguf; what a reader gets, by the names below `model.language_model.`, `lm_head.` and `mtp.`."""
    text = raw.get("text_config", raw)
    # The plain families' files are made as Qwen3-MoE's are.
    alias = {**text, "model_type": text["model_type"] if raw["model_type"].startswith("qwen3_5") else "qwen3_moe"}
    tensors = hybrid_forms.split_experts(tensors)
    drafts = int(any(key.startswith("mtp.") for key in tensors))
    writer = gguf.GGUFWriter(path, ARCHITECTURES[raw["model_type"]])
    hybrid_forms.write_metadata(writer, alias, name, tokenizer, drafts, vision.EXTRA, vision.CHAT_TEMPLATE)
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if deep := raw["vision_config"].get("deepstack_visual_indexes"):
        writer.add_num_deepstack_layers(len(deep))
    exact = hybrid_forms.write_tensors(writer, alias, tensors, matrix)
    finish(writer)
    return hybrid_forms.join_experts(exact)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def processors(raw: dict):
    """Those of vision.py with the bounds that the files, or the published models, have."""
    (image, made), (video, moving) = vision.processors(raw)
    pixels = (4096, 25165824) if vision.later(raw) else PIXELS
    size = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
    return (image, made), ({**video, "size": size}, type(moving)(**{**video, "size": size}, do_sample_frames=False))


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """One pair of files with its reference."""
    source, changes, text_kind, encoder_kind = FILES[name]
    raw = vision.MODELS[source]
    raw = {**raw, "vision_config": {**raw["vision_config"], **changes}}
    if raw["model_type"].startswith("qwen3_5"):
        # What layer_types says; GGUF has no such list.
        raw["text_config"] = {**raw["text_config"], "full_attention_interval": 2}
    config = transformers.AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = getattr(transformers, raw["architectures"][0])(config).float().eval()
    vision.fill(model, {**raw.get("text_config", raw), "model_type": raw["model_type"]}, seed)
    head = vision.draft_head(raw, model, seed)
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in vision.EXTRA])
    encoder, text = {}, {}
    for key, tensor in models.state(model).items():
        if key.startswith("model.visual."):
            encoder[key.removeprefix("model.visual.")] = tensor
        else:
            text[key.replace("model.language_model.", "model.")] = tensor.float()
    if head is not None:
        text |= {f"mtp.{key}": tensor.detach().float() for key, tensor in head.state_dict().items()}
    checkpoint.fresh(folder)
    encoder = write_encoder(folder / "mmproj.gguf", raw, encoder, encoder_kind)
    text = write_text(folder / "model.gguf", raw, name, text, extended, text_kind)
    if head is not None:
        of_head = {key.removeprefix("mtp."): tensor for key, tensor in text.items() if key.startswith("mtp.")}
        head.load_state_dict(of_head, strict=True)
    exact = {f"model.visual.{key}": tensor for key, tensor in encoder.items()}
    for key, tensor in text.items():
        if not key.startswith("mtp."):
            exact[key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key] = tensor
    if model.config.tie_word_embeddings or raw["tie_word_embeddings"]:
        exact["lm_head.weight"] = exact["model.language_model.embed_tokens.weight"]
    model.load_state_dict(exact, strict=True)
    made = vision.cases_of(model, head, raw, extended, CASES, vision.case, processors(raw))
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump({"model": name, "made_with": made_with, "cases": made}, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   {type(model).__name__}", flush=True)
