"""Llama 4: the text model, as a checkpoint of its own and inside one that has a vision encoder, too.

Plimsoll runs the text alone; the encoder is there and stays unused. Chunks of attention are shorter than most prompts, and steps of
the growth of queries shorter still.
"""

import gguf
import numpy as np

from .tokenizer import VOCAB_SIZE

EOS = VOCAB_SIZE - 1

# As Scout: experts in all layers, norms after rotation.
TEXT = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 21,
    "attention_dropout": 0.0,
    # Larger than the published 0.1, so that a step at the wrong position shows.
    "attn_scale": 0.4,
    "attn_temperature_tuning": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "floor_scale": 16,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 112,
    "max_position_embeddings": 512,
    "model_type": "llama4_text",
    "moe_layers": None,
    "no_rope_layers": [],
    "num_attention_heads": 6,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": EOS - 2,
    "rms_norm_eps": 1e-3,
    # Without a ramp between the two wavelengths.
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": VOCAB_SIZE,
}
# As Maverick: experts in every other layer, no norms. Published sizes choose one expert.
WHOLE = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "image_token_index": VOCAB_SIZE,
    "model_type": "llama4",
    "text_config": {
        **{k: v for k, v in TEXT.items() if k not in ("architectures", "rope_scaling")},
        "attention_chunk_size": 27,
        "intermediate_size": 48,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 1],
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 16, "image_size": 8, "intermediate_size": 64, "model_type": "llama4_vision_model",
        "num_attention_heads": 1, "num_channels": 3, "num_hidden_layers": 1, "patch_size": 2, "projector_input_dim": 16,
        "projector_output_dim": 16, "vision_output_dim": 16,
    },
}

MODELS = {"llama4": (TEXT, "bfloat16"), "llama4-whole": (WHOLE, "bfloat16")}


def tensor(name: str, noise: np.ndarray) -> np.ndarray | None:
    """The encoder's values; none for the text model."""
    return 0.1 * noise if name.startswith(("vision_model.", "multi_modal_projector.")) else None


def write_metadata(writer: gguf.GGUFWriter, raw: dict) -> None:
    """What a file has beyond Llama's metadata. Published ones have no keys for chunks and growth: llama.cpp takes the published sizes."""
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_interleave_moe_layer_step(raw["interleave_moe_layer_step"])
    writer.add_expert_count(raw["num_local_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(raw["intermediate_size"])
    writer.add_sliding_window(raw["attention_chunk_size"])
    arch = "llama4"
    writer.add_uint32(gguf.Keys.Attention.TEMPERATURE_LENGTH.format(arch=arch), raw["floor_scale"])
    writer.add_float32(gguf.Keys.Attention.TEMPERATURE_SCALE.format(arch=arch), raw["attn_scale"])
