"""Writes tiny models as GGUF the way llama.cpp's converter does, and takes the reference from what the file says.

What the converter changes, and we with it: `llama` q and k rows are interleaved pair-wise (rotary pairs become neighbours
instead of halves apart); gemma norms are stored with 1 already added; Llama 3's rope scaling becomes a tensor of divisors,
rope_freqs.weight; norms and biases stay F32. The reference reads the file back through gguf's reader, dequantizes, undoes
those changes and runs transformers: nothing of the unquantized weights is left in it.
"""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from . import models, tokenizer as tok
from .checkpoint import fresh

# name → (model, type of matrices, type of embedding and output, exceptions by GGUF name)
FILES: dict[str, tuple[str, Q, Q, dict[str, Q]]] = {
    "gguf-llama-f32": ("llama", Q.F32, Q.F32, {}),
    "gguf-llama-f16": ("llama", Q.F16, Q.F16, {}),
    "gguf-llama-q8_0": ("llama", Q.Q8_0, Q.Q8_0, {}),
    "gguf-llama-q4_0": ("llama", Q.Q4_0, Q.Q8_0, {}),
    "gguf-llama3-rope-q8_0": ("llama3-rope", Q.Q8_0, Q.Q8_0, {}),
    "gguf-qwen2-f32": ("qwen2", Q.F32, Q.F32, {}),
    "gguf-qwen2-f16": ("qwen2", Q.F16, Q.F16, {}),
    "gguf-qwen2-q8_0": ("qwen2", Q.Q8_0, Q.Q8_0, {}),
    "gguf-qwen2-q4_0": ("qwen2", Q.Q4_0, Q.Q4_0, {}),
    "gguf-qwen3-mixed": (
        "qwen3", Q.Q5_1, Q.Q5_0,
        {
            "blk.0.ffn_down.weight": Q.BF16, "blk.0.ffn_gate.weight": Q.Q4_1, "blk.1.ffn_up.weight": Q.Q5_0,
            "blk.1.attn_output.weight": Q.Q4_1, "blk.1.attn_v.weight": Q.F16, "output.weight": Q.Q8_0,
        },
    ),
    "gguf-gemma3-f16": ("gemma3", Q.F16, Q.F16, {}),
    "gguf-gemma3-q8_0": ("gemma3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gemma3-q4_0": ("gemma3", Q.Q4_0, Q.Q8_0, {}),
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def config_for(raw: dict) -> dict:
    """The config a GGUF can express: gemma3 files carry no query scale, so readers use head_dim ** -0.5."""
    if raw["model_type"] == "gemma3_text":
        return {**raw, "query_pre_attn_scalar": raw["head_dim"]}
    return raw


def gguf_name(raw: dict, name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    table = GEMMA_LAYER_NAMES if raw["model_type"] == "gemma3_text" else LAYER_NAMES
    return f"blk.{layer}.{table[module]}.{kind}"


def heads_permuted(raw: dict, name: str) -> int:
    """How many heads' rows are interleaved in a tensor of this name; 0 if it is left alone."""
    if raw["model_type"] != "llama":
        return 0
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return raw["num_attention_heads"]
    return raw["num_key_value_heads"] if name.endswith(("k_proj.weight", "k_proj.bias")) else 0


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half next to row i of its second half."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def separate(w: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleave`."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def adds_one(raw: dict, name: str) -> bool:
    """Whether a tensor is one of gemma's norms."""
    return raw["model_type"] == "gemma3_text" and name.endswith("norm.weight")


def rope_divisors(raw: dict) -> np.ndarray | None:
    """Llama 3's scaling as llama.cpp stores it: what each rotary frequency is divided by."""
    scaling = raw.get("rope_scaling")
    if not scaling or scaling["rope_type"] != "llama3":
        return None
    dim, original = raw["head_dim"], scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * raw["rope_theta"] ** (i / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def write_metadata(writer: gguf.GGUFWriter, raw: dict, name: str, tokenizer) -> None:
    """Hyperparameters and the embedded tokenizer."""
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    if raw["model_type"] == "llama":
        writer.add_vocab_size(raw["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if "head_dim" in raw:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if raw["model_type"] == "gemma3_text":
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(raw["rope_scaling"]["factor"])

    inner = json.loads(tokenizer.to_str())["model"]
    by_id = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = set(tok.SPECIALS)
    tokens = [by_id[i] for i in range(raw["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in inner["merges"]])
    writer.add_bos_token_id(tok.special_id(tokenizer, "<|endoftext|>"))
    writer.add_eos_token_id(tok.special_id(tokenizer, "<|im_end|>"))
    writer.add_pad_token_id(tok.special_id(tokenizer, "<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(tok.CHAT_TEMPLATE)


def write_tensors(writer: gguf.GGUFWriter, raw: dict, tensors, kinds) -> None:
    """Every tensor, changed as the converter changes it, in the type chosen for it."""
    matrix, outer, exceptions = kinds
    divisors = rope_divisors(raw)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, tensor in tensors.items():
        w = tensor.float().numpy()
        if heads := heads_permuted(raw, name):
            w = interleave(w, heads)
        if adds_one(raw, name):
            w = w + np.float32(1)
        target = gguf_name(raw, name)
        kind = outer if target in ("token_embd.weight", "output.weight") else matrix
        kind = Q.F32 if w.ndim == 1 else exceptions.get(target, kind)
        writer.add_tensor(target, np.ascontiguousarray(quantize(np.ascontiguousarray(w), kind)), raw_dtype=kind)


def read_back(path: Path, raw: dict, names) -> dict[str, torch.Tensor]:
    """The tensors a file holds, by Hugging Face names, with the converter's changes undone."""
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name in names:
        t = stored.pop(gguf_name(raw, name))
        w = np.array(dequantize(t.data, t.tensor_type), dtype=np.float32)
        if heads := heads_permuted(raw, name):
            w = separate(w, heads)
        if adds_one(raw, name):
            w = w - np.float32(1)
        out[name] = torch.from_numpy(np.ascontiguousarray(w))
    assert set(stored) <= {"rope_freqs.weight"}, stored
    return out


def make(name: str, folder: Path, base, tokenizer, finish) -> None:
    """One file with its reference."""
    source, *kinds = FILES[name]
    raw, _, model = base(source)
    tensors = models.state(model)
    raw = config_for(raw)
    fresh(folder)
    path = folder / "model.gguf"
    architecture = {"gemma3_text": "gemma3"}.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, raw, name, tokenizer)
    write_tensors(writer, raw, tensors, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = models.build(raw)
    divisors = rope_divisors(raw)
    if divisors is not None:
        plain = raw["rope_theta"] ** -(np.arange(0, raw["head_dim"], 2) / raw["head_dim"])
        assert np.allclose(model.model.rotary_emb.inv_freq.numpy(), plain / divisors, rtol=1e-5)
    models.load_state(model, read_back(path, raw, tensors))
    finish(folder, model, tokenizer)
