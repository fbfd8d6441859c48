"""Muse Glimmer: the text model of a tiny checkpoint that has a vision encoder, too.

Plimsoll runs the text alone. transformers has no class for the text with its output layer, so the encoder is there and stays unused.
"""

import numpy as np

from .tokenizer import VOCAB_SIZE

EOS = VOCAB_SIZE - 1

TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    # Low enough to bend the logits of random weights.
    "final_logit_softcapping": 15.0,
    "head_dim": 32,
    "hidden_activation": "silu",
    "hidden_size": 64,
    "intermediate_size": 112,
    "max_position_embeddings": 512,
    "model_type": "muse_glimmer_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "output_multiplier": 0.8,
    "pad_token_id": EOS - 2,
    # Unusual, so that each epsilon shows where it is added.
    "post_norm_eps": 0.05,
    "qk_scale_factor": 1.9,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 18,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
}
RAW = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    # Beyond the tokenizer: transformers replaces these tokens in texts.
    "image_token_id": VOCAB_SIZE,
    "model_type": "muse_glimmer",
    "out_hidden_size": 64,
    "projector_hidden_size": 16,
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "video_token_id": VOCAB_SIZE + 1,
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "merge_size": 2, "model_type": "muse_glimmer_vision",
        "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 2, "patch_temporal": 2, "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
}

MODELS = {"muse-glimmer": (RAW, "bfloat16")}


def tensor(name: str, noise: np.ndarray) -> np.ndarray | None:
    """Values that differ from those of other families; none where they do not."""
    owner = name.split(".")[-2]
    if "language_model" not in name and owner != "lm_head":
        return 0.1 * noise
    if owner == "embed_tokens":
        # Rows of a length at which the epsilon of their norm shows.
        return 0.05 * noise
    if owner.endswith("layernorm"):
        return 0.2 * noise
    return None
