"""Random weights of what Gemma 4 has and other families do not; `models.py` has the others."""

import numpy as np
import torch

# Gemma scales the embedding by sqrt(hidden): without louder layers every model would echo its input.
CENTRES = {
    "post_attention_layernorm": 2.2,
    "post_feedforward_layernorm": 2.2,
    "post_per_layer_input_norm": 1.5,
    "norm": 4.3,
    # Scores are not scaled.
    "q_norm": 0.6,
}


def tensor(name: str, noise: np.ndarray) -> np.ndarray | None:
    """Random weights of what only this family has; None for the others."""
    owner, last = name.split(".")[-2:]
    if last == "layer_scalar":
        return 1.0 + 0.2 * noise
    if last in ("scale", "per_expert_scale"):
        return 1.0 + 0.3 * noise
    if "norm" in owner:
        return CENTRES.get(owner, 1.0) + 0.2 * noise
    if owner == "embed_tokens":
        return 0.09 * noise
    if owner == "embed_tokens_per_layer":
        return 0.2 * noise
    if owner == "proj":
        # The router's input is divided by sqrt(hidden), beside its norm.
        return 2.0 * noise
    if owner in ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"):
        return 1.4 / np.sqrt(noise.shape[-1]) * noise
    return None


def fill_buffers(model, seed: int, dtype: torch.dtype) -> None:
    """The layers' scalars, and what the encoders have: bounds that some numbers reach, shifts and scales of tokens."""
    from . import models

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            noise, last = models._normal(seed, name, buffer.shape), name.split(".")[-1]
            if last in ("input_min", "output_min"):
                value = -1.6 + 0.2 * np.tanh(noise)
            elif last in ("input_max", "output_max"):
                value = 1.7 + 0.2 * np.tanh(noise)
            elif last == "std_bias":
                value = 0.5 * noise
            elif last in ("std_scale", "layer_scalar"):
                value = 1.0 + 0.2 * noise
            else:
                continue
            buffer.copy_(torch.from_numpy(np.asarray(value, dtype=np.float32)).to(dtype).float())
