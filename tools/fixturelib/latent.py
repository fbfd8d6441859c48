"""Latent attention (MLA): tiny checkpoints of GLM-4.7-Flash, DeepSeek-V2-Lite and DeepSeek-V3.

All families of decoders are described in `families.py`; here is what only these have. `kv_b_proj` makes keys and values of all
heads. GGUF files and newer MLX checkpoints store it as two tensors, one matrix a head, the keys' transposed.
"""

import gguf
import torch
from gguf import GGMLQuantizationType as Q

from . import models

KINDS = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
# model_type → GGUF architecture.
ARCHITECTURES = dict.fromkeys(KINDS, "deepseek2")

COMMON = {
    **models.COMMON,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "pad_token_id": models.EOS - 2,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
}
GLM_FLASH = {
    **COMMON,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "kv_lora_rank": 64,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 96,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
DEEPSEEK_V2 = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "max_position_embeddings": 640,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 16,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 32,
}
DEEPSEEK_V3 = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "max_position_embeddings": 640,
    "moe_layer_freq": 1,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 48,
    # No multiple of 32: these matrices are never quantized.
    "qk_nope_head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 48,
}

MODELS: dict[str, tuple[dict, str]] = {
    "glm4.7-flash": (GLM_FLASH, "bfloat16"),
    "deepseek-v2-lite": (DEEPSEEK_V2, "bfloat16"),
    "deepseek-v3": (DEEPSEEK_V3, "bfloat16"),
}
# As families.MLX. Older files of MLX have `kv_b_proj`, quantized.
MLX = {
    "mlx-glm4.7-flash-4bit": ("glm4.7-flash", 4, 32, torch.bfloat16, {}),
    "mlx-deepseek-v2-lite-4bit": ("deepseek-v2-lite", 4, 32, torch.bfloat16, {}),
}
APART_IN_MLX = ("mlx-glm4.7-flash-4bit",)
# As gguf_export.FILES.
GGUF: dict[str, tuple[str, Q, Q, dict[str, Q]]] = {
    "gguf-glm4.7-flash-q8_0": ("glm4.7-flash", Q.Q8_0, Q.Q8_0, {}),
    "gguf-deepseek-v2-lite-q8_0": ("deepseek-v2-lite", Q.Q8_0, Q.Q8_0, {}),
}

# Modules of a layer's attention in GGUF files.
LAYER_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.embed_q": "attn_k_b",
    "self_attn.unembed_out": "attn_v_b",
}


def apart(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`kv_b_proj` as `embed_q` [heads, rank, key] and `unembed_out` [heads, value, rank]."""
    out = {}
    for name, tensor in tensors.items():
        if ".kv_b_proj." not in name:
            out[name] = tensor
            continue
        keys, values = tensor.unflatten(0, (raw["num_attention_heads"], -1)).split([raw["qk_nope_head_dim"], raw["v_head_dim"]], 1)
        out[name.replace("kv_b_proj", "embed_q")] = keys.transpose(1, 2).contiguous()
        out[name.replace("kv_b_proj", "unembed_out")] = values.contiguous()
    return out


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `apart`."""
    out = {}
    for name, tensor in tensors.items():
        if ".embed_q." in name:
            values = tensors[name.replace("embed_q", "unembed_out")]
            out[name.replace("embed_q", "kv_b_proj")] = torch.cat([tensor.transpose(1, 2), values], 1).flatten(0, 1)
        elif ".unembed_out." not in name:
            out[name] = tensor
    return out


def write_metadata(writer: gguf.GGUFWriter, raw: dict) -> None:
    """Heads and experts as llama.cpp's converter describes them: attention over the latent row has one key/value head."""
    rank, rope = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(raw["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(raw["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    if raw["q_lora_rank"]:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    softmax = raw.get("scoring_func") == "softmax"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID)
    if scaling := raw["rope_scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        # The tenth is the converter's.
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
