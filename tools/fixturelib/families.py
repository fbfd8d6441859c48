"""Families of decoders that differ from Llama in facts: tiny checkpoints as published, as MLX quantizes them, as GGUF.

MODELS and the tables below are what `models.py`, `gguf_export.py` and make_fixtures.py need to know of a family. Options are
small (windows of some twenty tokens, original contexts of sixteen), so that short prompts reach what only long ones reach in
published sizes.
"""

import torch
from gguf import GGMLQuantizationType as Q

from . import gemma4, latent, llama4, models, muse_glimmer

COMMON = {**models.COMMON, "pad_token_id": models.EOS - 2}

# Short prompts of a LongRoPE model take another list of factors in transformers; Plimsoll goes by the context that is served.
LONG = (17, 33, 70, 150)

SMOLLM3 = {
    **COMMON,
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "layer_types": ["full_attention"] * 5,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1],
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
PHI3 = {
    **COMMON,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 23,
}
PHI4_MINI = {
    **PHI3,
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1, 1.12, 1.3, 1.5, 2.1, 3, 4.5, 7, 11, 16, 24, 31],
        "short_factor": [1.0] * 12,
        "type": "longrope",
    },
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}

MISTRAL = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 16,
    "rope_theta": 10000.0,
    "sliding_window": 21,
}
MINISTRAL3 = {
    **COMMON,
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        # Larger than the published 0.1, so that a step at the wrong position shows.
        "llama_4_scaling_beta": 0.3,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": True,
}
GRANITE = {
    **COMMON,
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "attention_multiplier": 0.09,
    "embedding_multiplier": 1.6,
    "logits_scaling": 0.7,
    "mlp_bias": False,
    "num_hidden_layers": 3,
    "residual_multiplier": 1.3,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
OLMO2 = {
    **COMMON,
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000.0,
}
OLMO3 = {
    **OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
    },
    "sliding_window": 19,
}
GEMMA2 = {
    **{k: v for k, v in COMMON.items() if k != "hidden_act"},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    # Low enough to bend scores and logits of random weights.
    "attn_logit_softcapping": 6.0,
    "final_logit_softcapping": 25.0,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 18,
    "tie_word_embeddings": True,
}

GPT_OSS = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 17,
    "swiglu_limit": 7.0,
}

HUNYUAN = {
    **COMMON,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "attention_bias": False,
    "head_dim": 32,
    "mlp_bias": False,
    "rope_scaling": {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_qk_norm": True,
}
ERNIE = {
    **COMMON,
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "head_dim": 32,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
ERNIE_MOE = {
    **COMMON,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 2,
    "num_hidden_layers": 3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
GLM4 = {
    **COMMON,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}
GLM4_MOE = {
    **COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    # Published sizes have one group.
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.4,
    "topk_group": 1,
    "use_qk_norm": True,
}

LAGUNA = {
    **COMMON,
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "attention_bias": False,
    "gating": True,
    "head_dim": 32,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"],
    "moe_apply_router_weight_on_input": False,
    "moe_intermediate_size": 32,
    "moe_routed_scaling_factor": 1.7,
    "moe_router_logit_softcapping": 0.0,
    # Published sizes have as many in all layers of one type.
    "num_attention_heads_per_layer": [4, 6, 2, 6, 4],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "attention_factor": 1.2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "rope_theta": 500000.0,
            "rope_type": "yarn",
        },
        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "shared_expert_intermediate_size": 48,
    "sliding_window": 19,
}
# A gate for each element and biases, as no published size has them; a bound on the router's logits.
LAGUNA_ELEMENTS = {
    **LAGUNA,
    "attention_bias": True,
    "gating": "per-element",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "moe_router_logit_softcapping": 0.8,
    "num_attention_heads_per_layer": [6, 2, 4],
    "num_hidden_layers": 3,
    "rope_parameters": {
        "full_attention": {"rope_theta": 100000.0, "rope_type": "default"},
        "sliding_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000.0, "rope_type": "default"},
    },
    "sliding_window": 21,
}

LFM2 = {
    **{k: v for k, v in COMMON.items() if k != "rms_norm_eps"},
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 180,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [1, 3],
    "intermediate_size": 180,
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "tie_word_embeddings": True,
}
LFM2_MOE = {
    **{k: v for k, v in COMMON.items() if k != "rms_norm_eps"},
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_L_cache": 4,
    "conv_bias": False,
    "layer_types": ["conv", "full_attention", "conv"],
    "moe_intermediate_size": 32,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "use_expert_bias": True,
}

GRANITE4 = {
    **COMMON,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.09,
    "embedding_multiplier": 1.6,
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 0.7,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 3,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.8,
    "rope_scaling": None,
    "rope_theta": 10000,
    "shared_intermediate_size": 128,
    "tie_word_embeddings": True,
}
GRANITE4_MOE = {
    **GRANITE4,
    "intermediate_size": 32,
    # Published sizes have one group.
    "mamba_n_groups": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 6,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 64,
}

FALCON_H1 = {
    **COMMON,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 1.4,
    "head_dim": 32,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.9,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 96,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 6,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mlp_bias": False,
    "mlp_multipliers": [1.3, 0.6],
    "num_hidden_layers": 3,
    "projectors_bias": False,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [1.1, 0.8, 0.9, 1.3, 0.7],
    "ssm_out_multiplier": 0.6,
}
FALCON_H1_NORM = {
    **FALCON_H1,
    "mamba_n_groups": 2,
    "mamba_rms_norm": True,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}

NEMOTRON_H = {
    **{k: v for k, v in COMMON.items() if k not in ("hidden_act", "rms_norm_eps")},
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 32,
    "hybrid_override_pattern": "M-*M-",
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 16,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 6,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 2,
    "num_hidden_layers": 5,
    "ssm_state_size": 32,
    # transformers bounds the steps of a prompt by it, but not those of generated tokens.
    "time_step_min": 1e-9,
    "use_bias": False,
    "use_conv_bias": True,
}
NEMOTRON_H_MOE = {
    **NEMOTRON_H,
    "hybrid_override_pattern": "ME*E",
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
# As Nemotron 3 Super, whose experts have a width of their own.
NEMOTRON_H_LATENT = {**NEMOTRON_H_MOE, "moe_latent_size": 32, "n_group": 1}

# name → (config.json without the dtype, dtype on disk)
MODELS: dict[str, tuple[dict, str]] = {
    "smollm3": (SMOLLM3, "bfloat16"),
    "phi3": (PHI3, "bfloat16"),
    "phi4-mini": (PHI4_MINI, "bfloat16"),
    "mistral": (MISTRAL, "bfloat16"),
    "ministral3": (MINISTRAL3, "bfloat16"),
    "granite": (GRANITE, "bfloat16"),
    "olmo2": (OLMO2, "bfloat16"),
    "olmo3": (OLMO3, "bfloat16"),
    "gemma2": (GEMMA2, "bfloat16"),
    "gpt-oss": (GPT_OSS, "bfloat16"),
    "hunyuan": (HUNYUAN, "bfloat16"),
    "ernie4.5": (ERNIE, "bfloat16"),
    "ernie4.5-moe": (ERNIE_MOE, "bfloat16"),
    "glm4": (GLM4, "bfloat16"),
    "glm4-moe": (GLM4_MOE, "bfloat16"),
    **gemma4.MODELS,
    **latent.MODELS,
    **muse_glimmer.MODELS,
    **llama4.MODELS,
    "laguna": (LAGUNA, "bfloat16"),
    "laguna-elements": (LAGUNA_ELEMENTS, "bfloat16"),
    "lfm2": (LFM2, "bfloat16"),
    "lfm2-moe": (LFM2_MOE, "bfloat16"),
    "granite4-h": (GRANITE4, "bfloat16"),
    "granite4-h-moe": (GRANITE4_MOE, "bfloat16"),
    "falcon-h1": (FALCON_H1, "bfloat16"),
    "falcon-h1-norm": (FALCON_H1_NORM, "bfloat16"),
    "nemotron-h": (NEMOTRON_H, "bfloat16"),
    "nemotron-h-moe": (NEMOTRON_H_MOE, "bfloat16"),
    "nemotron-h-latent": (NEMOTRON_H_LATENT, "bfloat16"),
}

# The same for fixtures in other formats alone: experts of 64 inputs, a block of NVFP4.
WIDE: dict[str, tuple[dict, str]] = {
    "ernie4.5-moe-wide": ({**ERNIE_MOE, "moe_intermediate_size": 64}, "bfloat16"),
}

# name → (model, bits, group, dtype of scales and of unquantized tensors, overrides by module)
MLX: dict[str, tuple[str, int, int, torch.dtype, dict]] = {
    "mlx-smollm3-4bit": ("smollm3", 4, 32, torch.bfloat16, {}),
    "mlx-phi4-mini-4bit": (
        "phi4-mini", 4, 32, torch.bfloat16, {"model.layers.1.self_attn.qkv_proj": {"bits": 8, "group_size": 32}},
    ),
    "mlx-ministral3-4bit": ("ministral3", 4, 64, torch.bfloat16, {}),
    "mlx-granite-4bit": ("granite", 4, 32, torch.bfloat16, {}),
    "mlx-olmo3-4bit": ("olmo3", 4, 64, torch.bfloat16, {}),
    "mlx-gemma2-4bit": ("gemma2", 4, 32, torch.bfloat16, {}),
    "mlx-gpt-oss-4bit": ("gpt-oss", 4, 32, torch.bfloat16, {"model.layers.1.mlp.router": {"bits": 8, "group_size": 32}}),
    "mlx-glm4-moe-4bit": ("glm4-moe", 4, 32, torch.bfloat16, {}),
    "mlx-gemma4-e2b-4bit": ("gemma4-e2b", 4, 32, torch.bfloat16, {}),
    "mlx-gemma4-26b-4bit": (
        "gemma4-26b", 4, 32, torch.bfloat16, {"model.layers.1.router.proj": {"bits": 8, "group_size": 32}},
    ),
    "mlx-llama4-4bit": ("llama4", 4, 32, torch.bfloat16, {}),
    "mlx-lfm2-moe-4bit": ("lfm2-moe", 4, 32, torch.bfloat16, {}),
    "mlx-granite4-h-4bit": ("granite4-h", 4, 32, torch.bfloat16, {}),
    **latent.MLX,
}

# As gguf_export.FILES.
GGUF: dict[str, tuple[str, Q, Q, dict[str, Q]]] = {
    "gguf-smollm3-q8_0": ("smollm3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-phi3-q8_0": ("phi3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-phi4-mini-q8_0": ("phi4-mini", Q.Q8_0, Q.Q8_0, {}),
    "gguf-ministral3-q8_0": ("ministral3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-granite-q8_0": ("granite", Q.Q8_0, Q.Q8_0, {}),
    "gguf-olmo3-q8_0": ("olmo3", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gemma2-q8_0": ("gemma2", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gpt-oss-q8_0": ("gpt-oss", Q.Q8_0, Q.Q8_0, {}),
    # As published: experts alone are in MXFP4.
    "gguf-gpt-oss-mxfp4": (
        "gpt-oss", Q.Q8_0, Q.Q8_0,
        {f"blk.{i}.ffn_{part}_exps.weight": Q.MXFP4 for i in range(3) for part in ("gate", "up", "down")},
    ),
    "gguf-hunyuan-q8_0": ("hunyuan", Q.Q8_0, Q.Q8_0, {}),
    "gguf-ernie4.5-moe-q8_0": ("ernie4.5-moe", Q.Q8_0, Q.Q8_0, {}),
    "gguf-ernie4.5-moe-nvfp4": ("ernie4.5-moe-wide", Q.NVFP4, Q.Q8_0, {}),
    "gguf-glm4-q8_0": ("glm4", Q.Q8_0, Q.Q8_0, {}),
    "gguf-glm4-moe-q8_0": ("glm4-moe", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gemma4-e2b-q8_0": ("gemma4-e2b", Q.Q8_0, Q.Q8_0, {}),
    "gguf-gemma4-26b-q8_0": ("gemma4-26b", Q.Q8_0, Q.Q8_0, {}),
    "gguf-llama4-q8_0": ("llama4", Q.Q8_0, Q.Q8_0, {}),
    "gguf-lfm2-q8_0": ("lfm2", Q.Q8_0, Q.Q8_0, {}),
    "gguf-lfm2-moe-q8_0": ("lfm2-moe", Q.Q8_0, Q.Q8_0, {}),
    "gguf-granite4-h-q8_0": ("granite4-h", Q.Q8_0, Q.Q8_0, {}),
    "gguf-granite4-h-moe-q8_0": ("granite4-h-moe", Q.Q8_0, Q.Q8_0, {}),
    "gguf-nemotron-h-q8_0": ("nemotron-h", Q.Q8_0, Q.Q8_0, {}),
    "gguf-nemotron-h-latent-q8_0": ("nemotron-h-latent", Q.Q8_0, Q.Q8_0, {}),
    **latent.GGUF,
}

EXPERTS = ".experts."
# Whose experts have their inputs before their outputs.
TURNED = ("gpt_oss", "llama4_text")
# A fused gate and up projection beside the experts.
SHARED = ".shared_mlp.input_linear."
CORRECTION = "e_score_correction_bias"


def published(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as published checkpoints have them, where transformers keeps them otherwise: experts one by one.

    One fixture of Laguna stays as transformers saves it.
    """
    if raw is LAGUNA_ELEMENTS or raw["model_type"] not in ("ernie4_5_moe", "glm4_moe", "laguna", "lfm2_moe", "nemotron_h", *latent.KINDS):
        return tensors
    out, experts = {}, EXPERTS
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if raw["model_type"] == "lfm2_moe" else {}
    for name, tensor in split_experts(raw, tensors).items():
        name = name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics.")
        if raw["model_type"] == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
        module, _, last = name.partition(experts)
        if last:
            part, kind = last.split(".")
            last = f"{parts.get(part, part)}.{kind}"
            out.update({f"{module}{experts}{i}.{last}": one.contiguous() for i, one in enumerate(tensor)})
            continue
        if raw["model_type"] == "laguna":
            name = name.replace(".gate.e_score", ".experts.e_score").replace(".shared_experts.", ".shared_expert.")
        out[name] = tensor
    return out


def split_experts(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gate_up_proj as gate_proj and up_proj, [experts, out, in]: as MLX and llama.cpp store experts."""
    out, experts = {}, EXPERTS
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if SHARED in name:
            halves = zip(("gate", "up"), tensor.chunk(2))
            out.update({name.replace("input_linear", f"{part}_proj"): half.contiguous() for part, half in halves})
            continue
        if experts not in name:
            out[name] = tensor
            continue
        kind = "bias" if last.endswith("_bias") else "weight"
        last = last.removesuffix("_bias")
        if raw["model_type"] in TURNED and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if last != "gate_up_proj":
            out[f"{module}.{last}.{kind}"] = tensor.contiguous()
        elif raw["model_type"] == "gpt_oss":
            out[f"{module}.gate_proj.{kind}"] = tensor[:, ::2].contiguous()
            out[f"{module}.up_proj.{kind}"] = tensor[:, 1::2].contiguous()
        else:
            gate, up = tensor.chunk(2, dim=1)
            out[f"{module}.gate_proj.{kind}"], out[f"{module}.up_proj.{kind}"] = gate.contiguous(), up.contiguous()
    return out


def join_experts(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `split_experts`."""
    out, experts = {}, EXPERTS
    for name, tensor in tensors.items():
        if raw["model_type"] == "nemotron_h":
            # No gate that is stored with the up projection.
            out[name.removesuffix(".weight") if experts in name else name] = tensor
            continue
        if ".shared_mlp.gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "input_linear")] = torch.cat([tensor, up])
            continue
        if experts not in name or ".up_proj." in name:
            if experts not in name and ".shared_mlp.up_proj." not in name:
                out[name] = tensor
            continue
        module, last, kind = name.rsplit(".", 2)
        if last == "gate_proj":
            up = tensors[name.replace("gate_proj", "up_proj")]
            by_turns = raw["model_type"] == "gpt_oss"
            tensor = torch.stack([tensor, up], dim=2).flatten(1, 2) if by_turns else torch.cat([tensor, up], dim=1)
            last = "gate_up_proj"
        if raw["model_type"] in TURNED and kind == "weight":
            tensor = tensor.transpose(1, 2).contiguous()
        out[f"{module}.{last}" + ("_bias" if kind == "bias" else "")] = tensor
    return out


def for_mlx(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as mlx-lm stores them: stacked experts under its own name, but for gpt-oss; taps before a last dimension of 1."""
    out = {}
    for name, tensor in tensors.items():
        own = {"gpt_oss": EXPERTS, "llama4_text": EXPERTS, "gemma4_text": ".experts.switch_glu."}
        name = name.replace(EXPERTS, own.get(raw["model_type"], ".switch_mlp."))
        if raw["model_type"] == "lfm2_moe":
            for stored, part in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                name = name.replace(f".feed_forward.{stored}.", f".feed_forward.{part}.")
        # Without experts, the shared one is a plain feed-forward part.
        if ".shared_mlp." in name and raw["num_local_experts"] == 0:
            name = name.replace(".shared_mlp.output_linear.", ".mlp.down_proj.").replace(".shared_mlp.", ".mlp.")
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            tensor = tensor.transpose(1, 2)
        out[name] = tensor
    return out


# The numbers of four bits that MXFP4 has, by their codes.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [.., groups, 16], scales [.., groups] and the values they stand for; the even element is the low half of a byte."""
    groups = tensor.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).clamp(min=1e-20).log2().floor() - 2
    scaled = groups / exponent.exp2()[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    exact = (E2M1[codes] * exponent.exp2()[..., None]).flatten(-2)
    return packed, (exponent + 127).to(torch.uint8), exact


def mxfp4_checkpoint(tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """gpt-oss as published: experts' matrices as codes and scales, [experts, out, groups, 16]; and what the tensors stand for."""
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        if EXPERTS not in name or name.endswith("_bias"):
            stored[name] = tensor.to(torch.bfloat16)
            exact[name] = stored[name].float()
            continue
        codes, scales, values = mxfp4(tensor.transpose(1, 2).contiguous())
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = codes, scales
        exact[name] = values.transpose(1, 2).contiguous()
    return stored, exact


# Prompt lengths of models that are not compared at all of reference.LENGTHS, by model_type or fixture.
LENGTHS = {name: LONG for name in ("phi4-mini", "mlx-phi4-mini-4bit", "gguf-phi4-mini-q8_0")}
