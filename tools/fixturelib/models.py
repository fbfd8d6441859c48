"""The tiny architectures: their config.json as found in the wild, and random weights that behave.

"Behave" means: the residual stream moves at every layer (a wrong layer shows), attention is neither uniform nor a
single token, biases and norm weights matter, and logits spread widely enough that greedy decoding has clear winners.
The standard deviations below follow from that; they are not those of a trained model.
"""

import hashlib

import numpy as np
import torch
import transformers

from . import gemma4_tensors, llama4, muse_glimmer
from .tokenizer import VOCAB_SIZE

EOS = VOCAB_SIZE - 1
COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
GEMMA3 = {
    **{k: v for k, v in COMMON.items() if k != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    # Not a square: the embedding scale sqrt(hidden) is no round number.
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 16,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}

# name → (config.json without the dtype, dtype on disk). The old key names (rope_theta, torch_dtype) are what most
# checkpoints on the hub have; entries with rope_parameters show what transformers 5 writes.
MODELS: dict[str, tuple[dict, str]] = {
    "llama": (LLAMA, "float32"),
    "llama-tied": (
        {
            **{k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")},
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            # Unusual, so that where epsilon is added shows in the numbers.
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
    "llama3-rope": (
        {**LLAMA, "head_dim": 32, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "eos_token_id": [EOS, EOS - 2]},
        "bfloat16",
    ),
    "qwen2": (
        {
            **COMMON,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "max_window_layers": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        "float32",
    ),
    "qwen3": (QWEN3, "float32"),
    "gemma3": (GEMMA3, "bfloat16"),
    "gemma3-layer-types": (
        {
            **{
                k: v for k, v in GEMMA3.items()
                if k not in ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
            },
            "head_dim": 32,
            "hidden_size": 64,
            "intermediate_size": 128,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 32,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "bfloat16",
    ),
}

# The same for fixtures in other formats alone: rows as wide as the 256 elements of GGUF's longest blocks.
WIDE: dict[str, tuple[dict, str]] = {
    "llama-wide": ({**LLAMA, "hidden_size": 256, "intermediate_size": 256}, "float32"),
}


def config_of(raw: dict) -> transformers.PreTrainedConfig:
    """The transformers config that a config.json yields."""
    kind = transformers.AutoConfig.for_model(raw["model_type"]).__class__
    return kind.from_dict(dict(raw))


def build(raw: dict) -> transformers.PreTrainedModel:
    """The model of a config, float32, eager, weights untouched."""
    config = config_of(raw)
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    kind = getattr(transformers, raw["architectures"][0])
    return kind(config).float().eval()


def _normal(seed: int, name: str, shape) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(tuple(shape)).astype(np.float32)


# Factor on 1/sqrt(fan-in), by the last but one part of a tensor's name.
GAIN = {
    "q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.0, "o_proj": 2.0, "gate_proj": 1.4, "up_proj": 1.2, "down_proj": 1.6,
    "gate": 2.0, "gate_up_proj": 1.3, "shared_expert_gate": 2.0, "in_proj_qkv": 1.0, "in_proj_qkvz": 1.0,
    "qkv_proj": 1.3, "g_proj": 1.2, "router": 2.0, "in_proj_z": 1.0, "in_proj_ba": 1.0, "in_proj_b": 1.0, "in_proj_a": 1.0, "out_proj": 1.5, "fc": 1.0,
    "q_a_proj": 1.3, "q_b_proj": 1.5, "kv_a_proj_with_mqa": 1.3, "kv_b_proj": 1.3, "fc1_latent_proj": 1.2, "fc2_latent_proj": 1.2, "input_linear": 1.3, "output_linear": 1.6, "in_proj": 1.0, "w1": 1.4, "w2": 1.6, "w3": 1.2,
    "index_qk_proj": 1.5, "input_mix_weight_down": 2.0, "input_mix_weight_up": 2.0, "block_inject_weight": 2.0, "key_proj": 1.5, "value_proj": 1.2,
}


# What a family calls a router's correction of scores.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def _tensor(seed: int, raw: dict, name: str, shape) -> np.ndarray:
    noise = _normal(seed, name, shape)
    gemma = raw["model_type"].startswith(("gemma2", "gemma3"))
    zero_centred = gemma or raw["model_type"].startswith(("qwen3_next", "qwen3_5", "qwen4_exp"))
    parts = name.split(".")
    last, owner = parts[-1], parts[-2]
    if raw["model_type"] in ("gemma4_text", "gemma4_unified_text"):
        special = gemma4_tensors.tensor(name, noise)
        if special is not None:
            return special
    if raw["model_type"] == "muse_glimmer":
        special = muse_glimmer.tensor(name, noise)
        if special is not None:
            return special
    if raw["model_type"] == "llama4":
        special = llama4.tensor(name, noise)
        if special is not None:
            return special
    if last == "A_log":
        # Heads that forget within a few tokens beside heads that remember hundreds.
        return 1.5 * noise - np.float32(2.5)
    if last == "dt_bias":
        return 0.5 * noise - 1.0
    if last == "D":
        return 0.3 * noise + np.float32(0.6)
    if owner == "conv1d" or owner == "conv" and last == "weight":
        return 0.5 * noise + np.float32(0.2)
    if last in CORRECTIONS:
        return 0.1 * noise
    if last == "bias" or last.endswith("_bias"):
        return 0.4 * noise
    if last == "sinks":
        return 0.7 * noise + np.float32(1.5)
    if "norm" in owner:
        if owner == "norm" and "linear_attn" in parts:
            return 1.0 + 0.2 * noise
        centre = 0.0 if zero_centred else 1.0
        if gemma:
            # Gemma scales the embedding by sqrt(hidden): without louder layers every model would echo its input.
            centre = {"post_attention_layernorm": 1.2, "post_feedforward_layernorm": 1.2, "norm": 3.3}.get(owner, 0.0)
        return centre + 0.2 * noise
    if owner == "ngram_embedding":
        return noise
    if owner in ("embed_tokens", "embeddings"):
        if gemma:
            return 0.09 * noise
        return (0.3 if raw["tie_word_embeddings"] else 1.0) * noise
    if owner == "lm_head":
        # The streams of Qwen4-Exp are averaged: hidden states are quieter.
        return (2.0 if raw["model_type"].startswith("qwen4_exp") else 0.5) * noise
    key = owner if last == "weight" else last
    # Experts of gpt-oss and Llama 4 have their inputs before their outputs.
    turned = raw["model_type"] in ("gpt_oss", "llama4", "llama4_text")
    inputs = shape[-2] if turned and len(shape) == 3 else shape[-1]
    return GAIN[key] / np.sqrt(inputs) * noise


def randomise(model: transformers.PreTrainedModel, raw: dict, seed: int, dtype: str) -> None:
    """Fills a model with weights that a checkpoint of `dtype` can hold exactly."""
    with torch.no_grad():
        # A router's correction of scores is a buffer in some families, and so is the scalar of a layer.
        stored = (*CORRECTIONS, "layer_scalar")
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(stored)]
        for name, parameter in [*model.named_parameters(), *buffers]:
            value = torch.from_numpy(np.ascontiguousarray(_tensor(seed, raw, name, parameter.shape), dtype=np.float32))
            parameter.copy_(value.to(getattr(torch, dtype)).float())


def state(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint stores: everything but a tied output matrix, in a stable order."""
    tied = model.config.tie_word_embeddings
    return {k: v.detach() for k, v in sorted(model.state_dict().items()) if not (tied and k == "lm_head.weight")}


def load_state(model: transformers.PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Puts tensors of the same names back, ties included; any name left over or missing is an error."""
    have = dict(tensors)
    if model.config.tie_word_embeddings:
        have["lm_head.weight"] = have["model.embed_tokens.weight"]
    model.load_state_dict({k: v.float() for k, v in have.items()}, strict=True)
