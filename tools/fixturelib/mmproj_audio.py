"""Qwen2.5-Omni, Qwen3-Omni and Qwen3-ASR as the two GGUF files that llama.cpp's converter makes: model.gguf and mmproj.gguf.

What the converter changes beyond mmproj.py, and we with it: the audio encoder's tensors are called `a.*` and `mm.a.*`; weights of
convolutions are in F16, and their biases have dimensions of one; 1,500 positions, which transformers computes, are a tensor. Qwen2.5-Omni
has one type of projector for both encoders, Qwen3-Omni one for each. Qwen3-Omni's text says that it takes no deepstack levels, which
it does. The template of Qwen3-ASR takes text alone.

Not in any file: the sizes of chunks and windows, and the steps of time to a second, which are the published ones.

The reference (as in omni.py and asr.py) is the model that the files' dequantized values make, read back with those changes undone.
"""

from dataclasses import replace

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer

from . import asr, checkpoint, hybrid_forms, mmproj, models, omni, omni2_5

# name → (type of the text's matrices, type of the encoders')
FILES = {"vl-gguf-omni2.5": (Q.Q8_0, Q.F16), "vl-gguf-omni": (Q.BF16, Q.BF16), "gguf-asr": (Q.F16, Q.Q8_0)}
POSITIONS = 1500
# The published names, in the order of omni.EXTRA.
OMNI2_5_TOKENS = ["<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
# What the converter writes in place of the model's own.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The longest sound of asr.py does not fill two windows of the published size.
ASR_CASES = {**asr.CASES, "long": [8 * omni.RATE + 4_321]}
PARTS = {
    "conv1": "a.conv1d.1", "conv2": "a.conv1d.2", **{f"conv2d{i}": f"a.conv2d.{i}" for i in (1, 2, 3)}, "conv_out": "a.conv_out",
    "ln_post": "a.post_ln", "proj": "mm.a.fc", "proj1": "mm.a.mlp.1", "proj2": "mm.a.mlp.2",
    "linear_1": "mm.a.mlp.1", "linear_2": "mm.a.mlp.2",
}
LAYER = {
    "self_attn_layer_norm": "ln1", "final_layer_norm": "ln2", "self_attn.out_proj": "attn_out", "fc1": "ffn_up", "fc2": "ffn_down",
    **{f"self_attn.{q}_proj": f"attn_{q}" for q in "qkv"},
}
VISUAL, AUDIO = "model.visual.", ("model.audio_tower.", "model.multi_modal_projector.")


def audio_name(name: str) -> str:
    """The name in mmproj.gguf of one of the audio encoder's tensors."""
    module, leaf = name.rsplit(".", 1)
    if module.startswith("layers."):
        _, layer, part = module.split(".", 2)
        return f"a.blk.{layer}.{LAYER[part]}.{leaf}"
    return f"{PARTS[module]}.{leaf}"


def positions(width: int) -> np.ndarray:
    """Sines, then cosines, of the positions."""
    scales = np.exp(-np.log(10_000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(POSITIONS)[:, None] * scales
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def stored_as(name: str, w: np.ndarray, matrix: Q) -> Q:
    """The type of a tensor. What has no whole block in a row is in F16."""
    if w.ndim == 1:
        return Q.F32
    if ".conv" in name and name.endswith(".weight"):
        return Q.F16
    return Q.F16 if matrix == Q.Q8_0 and w.shape[-1] % 32 else matrix


def write_audio(writer: gguf.GGUFWriter, about: dict, tensors: dict, matrix: Q) -> dict:
    """The audio encoder, and what the file says of it; what a reader gets, by the names in `tensors`."""
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(about["output_dim"])
    writer.add_audio_embedding_length(about["d_model"])
    writer.add_audio_feed_forward_length(about["encoder_ffn_dim"])
    writer.add_audio_block_count(about["encoder_layers"])
    writer.add_audio_head_count(about["encoder_attention_heads"])
    writer.add_audio_num_mel_bins(about["num_mel_bins"])
    writer.add_audio_attention_layernorm_eps(1e-5)
    exact = {}

    def put(target: str, w: np.ndarray) -> np.ndarray:
        kind = stored_as(target, w, matrix)
        data = np.ascontiguousarray(quantize(np.ascontiguousarray(w), kind))
        writer.add_tensor(target, data, raw_dtype=kind)
        return np.array(dequantize(data, kind), dtype=np.float32).reshape(w.shape)

    put("a.position_embd.weight", positions(about["d_model"]))
    for key, tensor in tensors.items():
        w, name = tensor.float().numpy(), next(key.removeprefix(prefix) for prefix in AUDIO if key.startswith(prefix))
        if name.startswith("audio_bos_eos_token"):
            # Neither the converter nor transformers has a use for it.
            exact[key] = tensor.float()
            continue
        if name.startswith("conv2d") and name.endswith(".bias"):
            w = w[:, None, None]
        elif name.startswith("conv") and name.endswith(".bias"):
            w = w[:, None]
        exact[key] = torch.from_numpy(put(audio_name(name), w).reshape(tensor.shape))
        assert torch.allclose(exact[key], tensor.float(), atol=0.05), key
    return exact


def with_levels(name: str) -> str:
    """The name in Qwen3-VL of one of Qwen3-Omni's deepstack mergers; other names as they are."""
    if not name.startswith("merger_list."):
        return name
    for ours, theirs in (("ln_q", "norm"), ("mlp.0", "linear_fc1"), ("mlp.2", "linear_fc2")):
        name = name.replace(f".{ours}.", f".{theirs}.")
    return f"deepstack_{name}"


def write_encoders(path, raw: dict, tensors: dict, matrix: Q) -> dict:
    """mmproj.gguf; what a reader gets, by the names of the state dictionary."""
    kind, exact = raw["model_type"], {}
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    images = {key.removeprefix(VISUAL): tensor for key, tensor in tensors.items() if key.startswith(VISUAL)}
    if images:
        writer.add_clip_has_vision_encoder(True)
        mmproj.describe_images(writer, raw, ([0.5] * 3, [0.5] * 3))
        ours = {with_levels(name): name for name in images}
        made = mmproj.write_images(writer, raw, {name: images[own] for name, own in ours.items()}, matrix)
        exact = {VISUAL + ours[name]: tensor for name, tensor in made.items()}
    if kind == "qwen2_5_omni":
        writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN25O)
    else:
        writer.add_clip_audio_projector_type(gguf.VisionProjectorType.QWEN3A)
        if images:
            writer.add_clip_vision_projector_type(gguf.VisionProjectorType.QWEN3VL)
    exact |= write_audio(writer, raw["audio_config"], {k: v for k, v in tensors.items() if k.startswith(AUDIO)}, matrix)
    mmproj.finish(writer)
    return exact


def write_text(path, name: str, raw: dict, tensors: dict, tokens: tuple, matrix: Q) -> dict:
    """model.gguf; what a reader gets. `tokens`: the tokenizer, special tokens, template, tokens that are not special."""
    text, architecture = raw["text_config"], {"qwen2_5_omni": "qwen2vl", "qwen3_omni_moe": "qwen3vlmoe", "qwen3_asr": "qwen3vl"}
    # As in mmproj.py.
    alias = {**text, "model_type": "qwen3_moe"}
    tokenizer, special, template, added = tokens
    writer = gguf.GGUFWriter(path, architecture[raw["model_type"]])
    hybrid_forms.write_metadata(writer, alias, name, tokenizer, 0, special, template, added)
    sections = (text.get("rope_scaling") or {}).get("mrope_section") or [4, 2, 2]
    writer.add_rope_dimension_sections([*sections, 0])
    if raw["model_type"] != "qwen2_5_omni":
        writer.add_num_deepstack_layers(0)
    exact = hybrid_forms.write_tensors(writer, alias, hybrid_forms.split_experts(tensors), matrix)
    mmproj.finish(writer)
    return hybrid_forms.join_experts(exact)


def write(folder, raw: dict, model, tokens: tuple) -> None:
    """Both files; the model takes what a reader gets."""
    text_kind, encoder_kind = FILES[folder.name]
    encoders, text = {}, {}
    for key, tensor in models.state(model).items():
        if key.startswith((VISUAL, *AUDIO)):
            encoders[key] = tensor
        else:
            text[key.replace("model.language_model.", "model.")] = tensor.float()
    checkpoint.fresh(folder)
    exact = write_encoders(folder / "mmproj.gguf", raw, encoders, encoder_kind)
    for key, tensor in write_text(folder / "model.gguf", folder.name, raw, text, tokens, text_kind).items():
        exact[key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key] = tensor
    if raw["text_config"]["tie_word_embeddings"]:
        exact["lm_head.weight"] = exact["model.language_model.embed_tokens.weight"]
    model.load_state_dict(exact, strict=True)


def published(of: omni.Kind, audio: dict, **thinker) -> omni.Kind:
    """The model with the constants of published ones, which are in no file."""
    own = of.raw["thinker_config"]
    return replace(of, raw={**of.raw, "thinker_config": {**own, "audio_config": {**own["audio_config"], **audio}, **thinker}})


def omnis(name: str) -> tuple[omni.Kind, list[str]]:
    """A model that takes images, and its special tokens."""
    if name == "vl-gguf-omni":
        return replace(published(omni.OMNI, {"n_window_infer": 800}), joined=True), omni.EXTRA
    numbers = {"max_source_positions": POSITIONS, "n_window": 100}
    return published(omni2_5.KIND, numbers, position_id_per_seconds=25), OMNI2_5_TOKENS


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """One pair of files with its reference."""
    if name == "gguf-asr":
        audio = {**asr.RAW["audio_config"], "d_model": 32, "encoder_ffn_dim": 64, "n_window_infer": 800}
        raw = {**asr.RAW, "audio_config": audio}
        model, extended = asr.build(raw, seed), asr.with_tokens(tokenizer)
        write(folder, raw, model, (extended, asr.EXTRA[:3], CHATML, asr.EXTRA[3:]))
        model.name_or_path = str(folder.parent / "asr")
        asr.write_reference(model, folder, extended, ASR_CASES)
        return
    of, special = omnis(name)
    thinker = of.raw["thinker_config"]
    raw = {"model_type": of.raw["model_type"], **{key: thinker[key] for key in ("audio_config", "vision_config")}, "text_config": of.text}
    model, extended = omni.build(of, seed), Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    template = omni.CHAT_TEMPLATE
    for ours, own in zip(omni.EXTRA, special):
        template = template.replace(ours, own)
    write(folder, raw, model, (extended, special, template, ()))
    omni.write_reference(of, model, folder, extended)
