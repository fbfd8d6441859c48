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

from . import falcon_h1, families, gemma4, latent, llama4, models, nextn, nvfp4, tokenizer as tok
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
    "gguf-llama-codebooks": (
        "llama-wide", Q.IQ4_XS, Q.IQ4_NL,
        {
            "output.weight": Q.IQ4_XS,
            "blk.0.attn_q.weight": Q.IQ3_S, "blk.0.attn_k.weight": Q.IQ3_XXS, "blk.0.attn_v.weight": Q.IQ4_XS,
            "blk.0.attn_output.weight": Q.IQ2_S, "blk.0.ffn_gate.weight": Q.MXFP4, "blk.0.ffn_up.weight": Q.NVFP4,
            "blk.0.ffn_down.weight": Q.IQ4_NL, "blk.1.attn_q.weight": Q.IQ2_XXS, "blk.1.attn_k.weight": Q.IQ2_XS,
            "blk.1.attn_v.weight": Q.IQ1_S, "blk.1.attn_output.weight": Q.IQ1_M, "blk.1.ffn_gate.weight": Q.TQ1_0,
            "blk.1.ffn_up.weight": Q.TQ2_0, "blk.1.ffn_down.weight": Q.MXFP4,
        },
    ),
    "gguf-gemma3-f16": ("gemma3", Q.F16, Q.F16, {}),
    "gguf-gemma3-q8_0": ("gemma3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gemma3-q4_0": ("gemma3", Q.Q4_0, Q.Q8_0, {}),
    "gguf-falcon-h1-q8_0": ("falcon-h1", Q.Q8_0, Q.F16, {}),
    "gguf-falcon-h1-norm-f16": ("falcon-h1-norm", Q.F16, Q.F16, {}),
    **families.GGUF,
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
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
FUSED_LAYER_NAMES = {**LAYER_NAMES, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
MOE_LAYER_NAMES = {
    **LAYER_NAMES,
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SHARED_LAYER_NAMES = {
    **MOE_LAYER_NAMES,
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
GLM_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
LLAMA4_LAYER_NAMES = {
    **LAYER_NAMES,
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
HUNYUAN_LAYER_NAMES = {
    **LAYER_NAMES, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
}
LFM2_LAYER_NAMES = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"feed_forward.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
GRANITE4_LAYER_NAMES = {
    **LAYER_NAMES,
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
NEMOTRON_H_LAYER_NAMES = {
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
# Parts of a layer whose names have no module.
BARE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    **{f"{module}.A_log": "ssm_a" for module in ("mamba", "mixer")},
    **{f"{module}.D": "ssm_d" for module in ("mamba", "mixer")},
    **{f"{module}.dt_bias": "ssm_dt.bias" for module in ("mamba", "mixer")},
}
GPT_OSS_LAYER_NAMES = {**MOE_LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}
GEMMA_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# model_type → names of a layer's modules, where they are not LAYER_NAMES.
NAMES_OF = {
    "gemma2": GEMMA_LAYER_NAMES, "gemma3_text": GEMMA_LAYER_NAMES, "phi3": FUSED_LAYER_NAMES,
    "hunyuan_v1_dense": HUNYUAN_LAYER_NAMES, "llama4_text": LLAMA4_LAYER_NAMES, "ernie4_5_moe": SHARED_LAYER_NAMES, "glm4": GLM_LAYER_NAMES,
    "glm4_moe": {**SHARED_LAYER_NAMES, **nextn.GGUF_NAMES, "post_attention_layernorm": "post_attention_norm"},
    "granitemoehybrid": GRANITE4_LAYER_NAMES, "falcon_h1": falcon_h1.LAYER_NAMES, "nemotron_h": NEMOTRON_H_LAYER_NAMES, "lfm2": LFM2_LAYER_NAMES, "lfm2_moe": LFM2_LAYER_NAMES,
    **dict.fromkeys(latent.KINDS, {**SHARED_LAYER_NAMES, **nextn.GGUF_NAMES, **latent.LAYER_NAMES}),
    "gpt_oss": GPT_OSS_LAYER_NAMES, "olmo2": GEMMA_LAYER_NAMES, "olmo3": GEMMA_LAYER_NAMES,
}
# model_type → GGUF architecture, where they differ.
ARCHITECTURES = {**latent.ARCHITECTURES, "gemma3_text": "gemma3", "gemma4_text": "gemma4", "gpt_oss": "gpt-oss", "hunyuan_v1_dense": "hunyuan-dense", "ernie4_5_moe": "ernie4_5-moe", "glm4_moe": "glm4moe", "lfm2_moe": "lfm2moe", "llama4_text": "llama4", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "ministral3": "mistral3", "olmo3": "olmo2"}
# Families whose converter is that of Llama, with the rows of heads interleaved.
INTERLEAVED = ("llama", "smollm3", "ministral3", "granite", "granitemoehybrid")


def config_for(raw: dict) -> dict:
    """The config a GGUF can express: Gemma's files carry no query scale, so readers use head_dim ** -0.5."""
    if raw["model_type"] in ("gemma2", "gemma3_text"):
        return {**raw, "query_pre_attn_scalar": raw["head_dim"]}
    return falcon_h1.without_factors(raw) if raw["model_type"] == "falcon_h1" else raw


def gguf_name(raw: dict, name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in NAMES:
        return NAMES[name]
    if raw["model_type"] == "gemma4_text" and (special := gemma4.gguf_name(name)):
        return special
    _, _, layer, rest = name.split(".", 3)
    if rest.endswith(models.CORRECTIONS):
        return f"blk.{layer}.exp_probs_b.bias"
    if rest in BARE_NAMES:
        return f"blk.{layer}.{BARE_NAMES[rest]}"
    module, kind = rest.rsplit(".", 1)
    if module.startswith("shared_mlp."):
        part = module.removeprefix("shared_mlp.").removesuffix("_proj").replace("output_linear", "down")
        return f"blk.{layer}.ffn_{part}{'_shexp' if raw['num_local_experts'] else ''}.{kind}"
    return f"blk.{layer}.{NAMES_OF.get(raw['model_type'], LAYER_NAMES)[module]}.{kind}"


def heads_permuted(raw: dict, name: str) -> int:
    """How many heads' rows are interleaved in a tensor of this name; 0 if it is left alone."""
    if raw["model_type"] not in INTERLEAVED:
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
    return raw["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight")


def is_convolution(name: str) -> bool:
    """Whether a tensor has the taps of a causal convolution, which a file keeps without the dimension of 1 between."""
    return name.endswith(("conv.conv.weight", "conv1d.weight"))


# Vectors of Mamba layers that a file keeps with two dimensions.
MAMBA = (".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")


def as_stored(raw: dict, name: str, w: np.ndarray) -> np.ndarray:
    """A vector of Mamba layers as a file keeps it: columns of heads, the decay's rate itself, norms by groups."""
    if name.endswith(".A_log"):
        return -np.exp(w)[:, None]
    if name.endswith(MAMBA[1]):
        return w[:, None]
    groups = raw.get("mamba_n_groups") or raw.get("n_groups")
    return w.reshape(groups, -1) if name.endswith(MAMBA[2:]) else w


def as_published(name: str, w: np.ndarray) -> np.ndarray:
    """The inverse of `as_stored`."""
    if name.endswith(".A_log"):
        return np.log(-w[:, 0])
    return w.reshape(-1) if name.endswith(MAMBA[1:]) else w


def rope_divisors(raw: dict) -> np.ndarray | None:
    """Llama 3's scaling as llama.cpp stores it: what each rotary frequency is divided by."""
    if raw["model_type"] == "gemma4_text":
        return gemma4.rope_divisors(raw)
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


def write_long_rope(writer: gguf.GGUFWriter, raw: dict) -> None:
    """LongRoPE: both lists as tensors, the factor on sine and cosine as metadata."""
    scaling = raw.get("rope_scaling")
    original = raw["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    if not scaling:
        return
    scale = raw["max_position_embeddings"] / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], dtype=np.float32))


def write_yarn(writer: gguf.GGUFWriter, scaling: dict) -> None:
    """YaRN as metadata."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "attention_factor" in scaling:
        writer.add_rope_scaling_attn_factors(scaling["attention_factor"])
    if "mscale_all_dim" in scaling:
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])


def write_family(writer: gguf.GGUFWriter, raw: dict) -> None:
    """What a family has beyond Llama's metadata."""
    kind = raw["model_type"]
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if kind == "phi3":
        head_dim = raw["hidden_size"] // raw["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * raw.get("partial_rotary_factor", 1)))
        write_long_rope(writer, raw)
    if kind in ("glm4", "glm4_moe"):
        writer.add_rope_dimension_count(int(raw["head_dim"] * raw["partial_rotary_factor"]))
    if kind == "ernie4_5_moe":
        writer.add_expert_count(raw["moe_num_experts"])
        writer.add_expert_used_count(raw["moe_k"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(raw["moe_intermediate_size"] * raw["moe_num_shared_experts"])
        writer.add_expert_shared_count(raw["moe_num_shared_experts"])
        writer.add_leading_dense_block_count(raw["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
    if kind == "glm4_moe":
        writer.add_expert_count(raw["n_routed_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    if kind == "lfm2_moe":
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_leading_dense_block_count(raw["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "llama4_text":
        llama4.write_metadata(writer, raw)
    if kind == "gpt_oss":
        writer.add_expert_count(raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in raw["layer_types"]])
    if kind in ("phi3", "olmo3", "gemma2", "gpt_oss"):
        writer.add_sliding_window(raw["sliding_window"] or 0)
    if kind == "olmo3":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in raw["layer_types"]])
    if scaling.get("rope_type") == "yarn":
        write_yarn(writer, scaling)
    if kind == "ministral3":
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if kind == "nemotron_h":
        writer.add_ssm_conv_kernel(raw["conv_kernel"])
        writer.add_ssm_state_size(raw["ssm_state_size"])
        writer.add_ssm_group_count(raw["n_groups"])
        writer.add_ssm_inner_size(raw["mamba_num_heads"] * raw["mamba_head_dim"])
        writer.add_ssm_time_step_rank(raw["mamba_num_heads"])
        writer.add_rope_scaling_finetuned(False)
        if "E" in raw["hybrid_override_pattern"]:
            writer.add_expert_count(raw["n_routed_experts"])
            writer.add_expert_used_count(raw["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(raw["moe_shared_expert_intermediate_size"])
            writer.add_expert_shared_count(raw["n_shared_experts"])
            writer.add_expert_weights_norm(raw["norm_topk_prob"])
            writer.add_expert_weights_scale(raw["routed_scaling_factor"])
            writer.add_expert_group_count(raw["n_group"])
            if latent := raw.get("moe_latent_size"):
                writer.add_moe_latent_size(latent)
    if kind == "falcon_h1":
        falcon_h1.write_metadata(writer, raw)
    if kind == "granitemoehybrid":
        width = raw["mamba_expand"] * raw["hidden_size"]
        writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
        writer.add_ssm_state_size(raw["mamba_d_state"])
        writer.add_ssm_group_count(raw["mamba_n_groups"])
        writer.add_ssm_inner_size(width)
        writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
        writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(raw["position_embedding_type"] == "rope")
        if raw["num_local_experts"]:
            writer.add_expert_count(raw["num_local_experts"])
            writer.add_expert_used_count(raw["num_experts_per_tok"])
    if kind in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])


def feed_forward_length(raw: dict) -> int | list[int]:
    """The width of the plain feed-forward part; a list where layers are either this or another part."""
    if raw["model_type"] == "nemotron_h":
        width = raw.get("moe_intermediate_size", raw["intermediate_size"])
        return [width if kind in "-E" else 0 for kind in raw["hybrid_override_pattern"]]
    if raw["model_type"] != "lfm2":
        return raw.get("intermediate_size_mlp", raw["intermediate_size"])
    multiple = raw["block_multiple_of"]
    return -(-int(raw["block_ffn_dim_multiplier"] * int(2 * raw["block_ff_dim"] / 3)) // multiple) * multiple


def kv_heads(raw: dict) -> int | list[int]:
    """Key/value heads; of a hybrid a list, with 0 where a layer does not attend."""
    heads = raw["num_key_value_heads"]
    if not raw["model_type"].startswith(("lfm2", "granitemoehybrid", "nemotron_h")):
        return heads
    attends = [kind == "full_attention" for kind in models.config_of(raw).layer_types]
    return [heads if here else 0 for here in attends]


def write_metadata(writer: gguf.GGUFWriter, raw: dict, name: str, tokenizer, extra=(), template=tok.CHAT_TEMPLATE, added=()) -> None:
    """Hyperparameters and the embedded tokenizer; `extra` and `added` as of `write_tokenizer`."""
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    four, mla = raw["model_type"] == "gemma4_text", raw["model_type"] in latent.KINDS
    if "intermediate_size" in raw:
        writer.add_feed_forward_length(gemma4.feed_forward(raw) if four else feed_forward_length(raw))
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(gemma4.kv_heads(raw) if four else 1 if mla else kv_heads(raw))
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps") or raw.get("norm_eps") or raw["layer_norm_epsilon"])
    if four:
        gemma4.write_metadata(writer, raw)
    elif mla:
        latent.write_metadata(writer, raw)
    else:
        write_heads_and_rope(writer, raw, head_dim)
    write_tokenizer(writer, raw, tokenizer, extra, template, added)


def write_heads_and_rope(writer: gguf.GGUFWriter, raw: dict, head_dim: int) -> None:
    """Heads and rotation of families whose layers are alike, and what else a family has."""
    theta = raw["rope_theta"] if "rope_theta" in raw else raw.get("rope_parameters", {"rope_theta": 10000})["rope_theta"]
    if alpha := (raw.get("rope_scaling") or {}).get("alpha"):
        theta *= alpha ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
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

    write_family(writer, raw)


def write_tokenizer(writer: gguf.GGUFWriter, raw: dict, tokenizer, extra, template, added=()) -> None:
    """The embedded tokenizer, `extra` special tokens among its own, and `added` ones that are not special."""
    inner = json.loads(tokenizer.to_str())["model"]
    by_id = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = {*tok.SPECIALS, *extra}
    tokens = [by_id[i] for i in range(raw["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = {**dict.fromkeys(added, gguf.TokenType.USER_DEFINED), **dict.fromkeys(special, gguf.TokenType.CONTROL)}
    writer.add_token_types([kinds.get(t, gguf.TokenType.NORMAL) for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in inner["merges"]])
    writer.add_bos_token_id(tok.special_id(tokenizer, "<|endoftext|>"))
    writer.add_eos_token_id(tok.special_id(tokenizer, "<|im_end|>"))
    writer.add_pad_token_id(tok.special_id(tokenizer, "<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


# Byte offsets of the f16 scale of blocks that gguf cannot make.
SCALES = {
    Q.IQ2_XXS: 0, Q.IQ2_XS: 0, Q.IQ2_S: 0, Q.IQ3_XXS: 0, Q.IQ3_S: 0, Q.IQ1_S: 0, Q.IQ4_NL: 0, Q.IQ4_XS: 0,
}


def set_scale(blocks: np.ndarray, kind: Q, scale: float) -> None:
    """Gives every block this scale; IQ1_M has its bits in the upper nibbles of four words."""
    bits = int(np.float16(scale).view("<u2"))
    if kind == Q.IQ1_M:
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 0x0F | (bits >> 4 * i & 0x0F) << 4
    else:
        blocks[:, SCALES[kind]:SCALES[kind] + 2] = [bits & 0xFF, bits >> 8]


def stored(w: np.ndarray, kind: Q, seed: int) -> np.ndarray:
    """A tensor's blocks. Where gguf only dequantizes, any blocks will do that spread as widely."""
    try:
        return quantize(w, kind)
    except NotImplementedError:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(seed).integers(0, 256, (w.size // per_block, size), dtype=np.uint8)
        if kind == Q.NVFP4:
            # Exponents around that of 1/32, the least of them subnormal.
            blocks[:, :4] = np.random.default_rng(seed).integers(4, 24, (len(blocks), 4))
            return blocks.reshape(w.shape[0], -1)
        set_scale(blocks, kind, 1.0)
        set_scale(blocks, kind, w.std() / dequantize(blocks, kind).std())
        return blocks.reshape(w.shape[0], -1)


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
        if is_convolution(name):
            w = w[:, 0]
        w = as_stored(raw, name, w)
        target = gguf_name(raw, name)
        kind = outer if target in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight") else matrix
        # Biases of experts have two dimensions.
        floats = w.ndim == 1 or target.endswith(".bias") or ".ffn_gate_inp." in target or is_convolution(name)
        floats = floats or name.endswith(MAMBA)
        kind = Q.F32 if floats else exceptions.get(target, kind)
        if kind == matrix == Q.NVFP4:
            nvfp4.write(writer, target, np.ascontiguousarray(w))
            continue
        blocks = stored(np.ascontiguousarray(w), kind, len(writer.tensors[-1]))
        writer.add_tensor(target, np.ascontiguousarray(blocks), raw_dtype=kind)


def read_back(path: Path, raw: dict, names) -> dict[str, torch.Tensor]:
    """The tensors a file holds, by Hugging Face names, with the converter's changes undone."""
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name in names:
        t = stored.pop(gguf_name(raw, name))
        w = np.array(dequantize(t.data, t.tensor_type), dtype=np.float32)
        w = nvfp4.with_second_scale(w, t.name, stored)
        if heads := heads_permuted(raw, name):
            w = separate(w, heads)
        if adds_one(raw, name):
            w = w - np.float32(1)
        if is_convolution(name):
            w = w[:, None]
        w = as_published(name, w)
        out[name] = torch.from_numpy(np.ascontiguousarray(w))
    assert set(stored) <= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}, stored
    return out


def make(name: str, folder: Path, base, tokenizer, finish) -> None:
    """One file with its reference."""
    source, *kinds = FILES[name]
    raw, dtype, model = base(source)
    head = nextn.head_of(name, raw, model, dtype)
    # Gemma 4 keeps gate and up projection in one tensor.
    four = raw["model_type"] == "gemma4_text"
    tensors = nextn.with_head(name, raw, models.state(model), head)
    if not four:
        tensors = families.split_experts(raw, tensors)
    if raw["model_type"] in latent.KINDS:
        tensors = latent.apart(raw, tensors)
    if raw["model_type"] == "falcon_h1":
        tensors = falcon_h1.folded(raw, model, tensors)
    raw = config_for(raw)
    fresh(folder)
    path = folder / "model.gguf"
    architecture = ARCHITECTURES.get(raw["model_type"], raw["model_type"])
    if "E" in raw.get("hybrid_override_pattern", ""):
        architecture += "_moe"
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, nextn.with_blocks(raw, head), name, tokenizer)
    if head is not None:
        writer.add_nextn_predict_layers(1)
    write_tensors(writer, raw, tensors, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = models.build(raw)
    divisors = rope_divisors(raw)
    if divisors is not None and not four:
        plain = raw["rope_theta"] ** -(np.arange(0, raw["head_dim"], 2) / raw["head_dim"])
        assert np.allclose(model.model.rotary_emb.inv_freq.numpy(), plain / divisors, rtol=1e-5)
    read = read_back(path, raw, tensors)
    nextn.load(raw, model, head, read if four else families.join_experts(raw, latent.together(read)))
    finish(folder, model, tokenizer, head=head)
