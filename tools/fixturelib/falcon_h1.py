"""Falcon-H1 in GGUF. llama.cpp's converter multiplies every factor of the configuration into the weights, and no metadata names it."""

import gguf
import torch

from . import models

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier", "lm_head_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier",
)


def without_factors(raw: dict) -> dict:
    """The configuration of a model whose weights have the factors in them; so both ends have weights of their own."""
    apart = {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5, "tie_word_embeddings": False}
    return {**raw, **dict.fromkeys(FACTORS, 1.0), **apart}


def factor(raw: dict, name: str) -> float | torch.Tensor:
    """What a tensor is multiplied with."""
    attention = raw["attention_in_multiplier"]
    parts = {
        "embed_tokens": raw["embedding_multiplier"],
        "lm_head": raw["lm_head_multiplier"],
        "q_proj": attention,
        "k_proj": attention * raw["key_multiplier"],
        "v_proj": attention,
        "o_proj": raw["attention_out_multiplier"],
        "gate_proj": raw["mlp_multipliers"][0],
        "down_proj": raw["mlp_multipliers"][1],
        "out_proj": raw["ssm_out_multiplier"],
    }
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module != "in_proj":
        return parts.get(module, 1.0)
    state = raw["mamba_n_groups"] * raw["mamba_d_state"]
    counts = [raw["mamba_d_ssm"], raw["mamba_d_ssm"], state, state, raw["mamba_n_heads"]]
    rows = torch.cat([torch.full((count,), by) for count, by in zip(counts, raw["ssm_multipliers"])])
    return (rows * raw["ssm_in_multiplier"])[:, None]


@torch.no_grad()
def folded(raw: dict, model, tensors: dict) -> dict:
    """The weights with their factors; the model that they make is the same."""
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}
    out = {name: tensor.float() * factor(raw, name) for name, tensor in tensors.items()}
    other = models.build(without_factors(raw))
    models.load_state(other, out)
    ids = torch.arange(3, 40)[None]
    apart = (model.float().eval()(ids).logits - other.float().eval()(ids).logits).abs().max()
    assert apart < 1e-4, apart
    return out


def write_metadata(writer: gguf.GGUFWriter, raw: dict) -> None:
    """The sizes of the recurrence."""
    writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
    writer.add_ssm_state_size(raw["mamba_d_state"])
    writer.add_ssm_group_count(raw["mamba_n_groups"])
    writer.add_ssm_inner_size(raw["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
