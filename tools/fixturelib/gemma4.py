"""Gemma 4: tiny checkpoints of the two kinds of size, and what its converter writes into GGUF files.

`gemma4-e2b` has what the small sizes have: an embedding for each layer, layers that read others' keys and values, wider
feed-forward parts in those. `gemma4-26b` has what the large ones have: one projection for keys and values in global layers, and
experts beside the feed-forward part.

The GGUF names and keys are those of llama.cpp's converter, which was read, not run.
"""

import gguf
import numpy as np

from . import models

COMMON = {
    **{k: v for k, v in models.COMMON.items() if k != "hidden_act"},
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    # Low enough to bend logits of random weights.
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    # Not a square: the embedding scale sqrt(hidden) is no round number.
    "hidden_size": 96,
    "intermediate_size": 96,
    "pad_token_id": models.EOS - 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 18,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": models.COMMON["vocab_size"],
}
SLIDING, FULL = "sliding_attention", "full_attention"
E2B = {
    **COMMON,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 32,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    # The last three: a sliding layer reads layer 1, the global one layer 2.
    "num_kv_shared_layers": 3,
    "top_k_experts": None,
    "use_double_wide_mlp": True,
}
MOE = {
    **COMMON,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 0,
    "top_k_experts": 2,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
MODELS: dict[str, tuple[dict, str]] = {"gemma4-e2b": (E2B, "bfloat16"), "gemma4-26b": (MOE, "bfloat16")}

TOP_NAMES = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
LAYER_NAMES = {
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
}


def gguf_name(name: str) -> str | None:
    """The GGUF name of what only this family has; None for the others."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = (name.split(".", 3) + ["", ""])[:4]
    return f"blk.{layer}.{LAYER_NAMES[rest]}" if rest in LAYER_NAMES else None


def feed_forward(raw: dict) -> list[int] | int:
    """The width, or a width for each layer."""
    width, layers, shared = (raw[k] for k in ("intermediate_size", "num_hidden_layers", "num_kv_shared_layers"))
    if not raw["use_double_wide_mlp"]:
        return width
    return [width * (1 if layer + shared < layers else 2) for layer in range(layers)]


def kv_heads(raw: dict) -> list[int] | int:
    """The number of KV heads, or one for each layer."""
    heads = raw["num_global_key_value_heads"]
    if heads is None:
        return raw["num_key_value_heads"]
    return [raw["num_key_value_heads"] if kind == SLIDING else heads for kind in raw["layer_types"]]


def write_metadata(writer: gguf.GGUFWriter, raw: dict) -> None:
    """What the family has beyond sizes that all have."""
    rope = raw["rope_parameters"]
    writer.add_rope_freq_base(rope[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(rope[SLIDING]["rope_theta"])
    writer.add_rope_dimension_count(raw["global_head_dim"])
    writer.add_rope_dimension_count_swa(raw["head_dim"])
    writer.add_key_length(raw["global_head_dim"])
    writer.add_value_length(raw["global_head_dim"])
    writer.add_key_length_swa(raw["head_dim"])
    writer.add_value_length_swa(raw["head_dim"])
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in raw["layer_types"]])
    writer.add_shared_kv_layers(raw["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if raw["enable_moe_block"]:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["top_k_experts"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])


def rope_divisors(raw: dict) -> np.ndarray:
    """What the frequencies of global layers are divided by: those beyond the rotated share by so much that they stand still."""
    half = raw["global_head_dim"] // 2
    rotated = int(half * raw["rope_parameters"][FULL]["partial_rotary_factor"])
    return np.array([1.0] * rotated + [1e30] * (half - rotated), dtype=np.float32)
