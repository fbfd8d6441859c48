"""Tiny Qwen4-Exp models: hyper-connections, sparse attention over selected blocks, n-gram embeddings.

Tables of n-grams are stored in parts, as published (`ngram_embedding.shard_0.weight`). Prompts are long enough that the indexer
leaves blocks out; the longer ones have the token inside at which n-grams end.
"""

import torch

from . import checkpoint, models, reference
from .hybrid import LENGTHS

DTYPE = "bfloat16"
# Least lead of the last selected block over the first one left out. torch says nothing of the order of equal scores.
LEAD = 5e-5

# name → config.json of the text model.
MODELS: dict[str, dict] = {
    "qwen4-exp": {
        **{k: v for k, v in models.COMMON.items() if k != "intermediate_size"},
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "attention_bias": False,
        "hc_count": 3,
        "hc_lowrank": 20,
        "head_dim": 32,
        "heads_per_ngram": 2,
        "hidden_size": 48,
        # Blocks of three positions lie across pages of sixteen.
        "indexer_budget": 24,
        "indexer_compress_ratio": 3,
        "indexer_head_dim": 24,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 8,
        "layer_types": [
            "linear_attention", "full_attention", "linear_attention", "linear_attention", "indexed_attention",
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "make_ngram_vocab_size_divisible_by": 16,
        "moe_intermediate_size": 16,
        "ngram_size": 3,
        "ngram_vocab_size_base": 97,
        "norm_topk_prob": True,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "output_gate_type": "sigmoid",
        "ple_conv_kernel_size": 3,
        "ple_embed_dim": 32,
        "ple_layer_ids": [1, 4],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "seed": 77,
        "shared_expert_intermediate_size": 20,
        "split_ngram_parts": 5,
    },
}

# What the text model of one that sees has beside a hybrid's keys (vision.py).
SEEING = {
    "hc_count": 2,
    "hc_lowrank": 12,
    "heads_per_ngram": 2,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 16,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 8,
    "make_ngram_vocab_size_divisible_by": 16,
    "ngram_size": 2,
    "ngram_vocab_size_base": 97,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 16,
    "ple_layer_ids": [1],
    "shared_expert_intermediate_size": 16,
    "split_ngram_parts": 3,
    "tie_word_embeddings": False,
}


def in_parts(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tables of n-grams as they are published."""
    out = {}
    for name, tensor in tensors.items():
        module = name.removesuffix("ngram_embedding.weight")
        if module == name:
            out[name] = tensor if tensor.dtype == torch.int64 else tensor.to(getattr(torch, DTYPE))
            continue
        for i, part in enumerate(tensor.chunk(raw["split_ngram_parts"])):
            out[f"{module}ngram_embedding.shard_{i}.weight"] = part.to(getattr(torch, DTYPE))
    return dict(sorted(out.items()))


def prompts(length: int, tokenizer, rng):
    """Prompts of a length, the longer ones of several texts."""
    for ids in reference.candidates(length, tokenizer, rng):
        for place in (length // 3, length // 3 + 2, length // 2) if length >= 60 else ():
            ids[place] = models.EOS
        yield ids


@torch.no_grad()
def is_clear(model, made: dict) -> bool:
    """Whether every choice of blocks is clear, in all prompts and their continuations."""
    topk, leads = torch.Tensor.topk, []

    def watched(scores, k, dim=-1, **more):
        # The indexer alone looks for the greatest of a vector.
        if scores.dim() == 1 and len(scores) > k:
            ordered = scores.sort(descending=True).values
            leads.append(float(ordered[k - 1] - ordered[k]))
        return topk(scores, k, dim=dim, **more)

    torch.Tensor.topk = watched
    try:
        for prompt in (*made["prompts"], made["chat"]):
            model(input_ids=torch.tensor([prompt["ids"] + prompt["greedy"]]), use_cache=False)
    finally:
        torch.Tensor.topk = topk
    assert leads, "no block is left out"
    return min(leads) >= LEAD


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    raw = MODELS[name]
    model = models.build(raw)
    models.randomise(model, raw, seed, DTYPE)
    checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, raw, DTYPE, tokenizer)
    checkpoint.write_tensors(folder, in_parts(raw, models.state(model)))
    loaded = checkpoint.reload(folder)
    for key, value in models.state(model).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    tries = (reference.make(loaded, tokenizer, name, seed + i, lengths=LENGTHS, draw=prompts) for i in range(50))
    made = next(made for made in tries if is_clear(loaded, made))
    reference.dump(made, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   least margin {made['margin']:.3f}", flush=True)
