"""Tiny mixture-of-experts and hybrid models: Qwen3-MoE, Qwen3-Next, Qwen3.5 dense and MoE, the hybrids with an MTP head.

Tensors are named as in the published checkpoints, which differ: Qwen3-MoE and Qwen3-Next store one tensor per expert and
projection, Qwen3.5-MoE one stacked tensor per layer (`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`, no `.weight`);
Qwen3.5 nests its text config and prefixes `model.language_model.`. A_log and the gated norm stay float32 beside bfloat16.

transformers has no MTP module for these models, so the head is put together here from transformers' own decoder layer:
at position i it sees the embedding of token i + 1 and the main model's hidden state i (after the final norm), normalizes
each, concatenates embedding first, projects with `fc`, runs one full-attention layer and `mtp.norm`, and shares lm_head.
Drafting further tokens feeds its own normalized output back as the hidden state. Reference entry `mtp`: `ids`; `tokens`,
the head's inputs (ids shifted by one, then the model's greedy choice); `argmax` of the head at each position; `top5` at the
last; `draft`, DRAFT ids drafted in a row after the last position.
"""

import importlib

import numpy as np
import torch

from . import checkpoint, models, reference
from .models import COMMON

LENGTHS = (1, 63, 64, 65, 130, 200)
DRAFT = 3
DTYPE = "bfloat16"

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
}
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
ROPE_35 = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}

# name → config of the text model; "wrap" is the outer config's (model_type, architecture) where there is one.
MODELS: dict[str, dict] = {
    "qwen3-moe": {
        **COMMON, **MOE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
    },
    "qwen3-next": {
        **COMMON, **MOE, **LINEAR,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3.5": {
        **COMMON, **LINEAR,
        "architectures": ["Qwen3_5ForCausalLM"],
        "wrap": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "layer_types": LAYER_TYPES,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": ROPE_35,
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe": {
        **{k: v for k, v in COMMON.items() if k != "intermediate_size"}, **MOE, **LINEAR,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "wrap": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "layer_types": LAYER_TYPES,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_experts_per_tok": 3,
        "rope_parameters": ROPE_35,
        "shared_expert_intermediate_size": 32,
    },
}

# Which classes of transformers make up an MTP layer.
LAYERS = {
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
}


class MtpHead(torch.nn.Module):
    """One multi-token-prediction layer over a main model's hidden states."""

    def __init__(self, raw: dict, main):
        super().__init__()
        folder, prefix = LAYERS[raw["model_type"]]
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        # Of GLM and DeepSeek, a layer like the last.
        hybrid = folder.startswith("qwen")
        index = main.config.layer_types.index("full_attention") if hybrid else raw["num_hidden_layers"] - 1
        layer = getattr(module, f"{prefix}DecoderLayer")(main.config, index)
        norm = getattr(module, f"{prefix}RMSNorm")
        size, eps = raw["hidden_size"], raw["rms_norm_eps"]
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([layer])
        self.norm = norm(size, eps=eps)
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)

    def forward(self, main, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Normalized output for every position: tokens [n], hidden [n, size] → [n, size]."""
        embedded = main.model.embed_tokens(torch.tensor([tokens]))
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden[None])], dim=-1)
        positions = torch.arange(len(tokens))[None]
        rotary = main.model.rotary_emb(joined, positions)
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        out = self.layers[0](
            self.fc(joined), position_embeddings=rotary, attention_mask=mask, position_ids=positions, past_key_values=None
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)[0]


@torch.no_grad()
def mtp_reference(head: MtpHead, main, ids: list[int], following: int) -> dict | None:
    """What the head says after `ids` when the main model chose `following`; None if a choice is nearly a tie."""
    hidden = main.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    tokens, entry, draft = ids[1:] + [following], {}, []
    while len(draft) < DRAFT:
        out = head(main, tokens, hidden)
        logits = main.lm_head(out)
        best = logits.topk(2, dim=-1)
        lead = best.values[:, 0] - best.values[:, 1]
        if float(lead[-1]) < reference.MARGIN or (not draft and float(lead.min()) < 0.01):
            return None
        if not draft:
            top = torch.log_softmax(logits[-1], dim=-1).topk(5)
            entry = {
                "ids": ids,
                "tokens": tokens,
                "argmax": best.indices[:, 0].tolist(),
                "top5": [[int(i), reference.short(v)] for v, i in zip(top.values, top.indices)],
            }
        draft.append(int(best.indices[-1, 0]))
        # The next step reads the head's own output; earlier positions keep what they had.
        tokens, hidden = tokens + [draft[-1]], torch.cat([hidden, out[-1:]])
    return {**entry, "draft": draft}


def with_expert_names(raw: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits stacked experts for the architectures whose checkpoints store them one by one."""
    if raw["model_type"] not in ("qwen3_moe", "qwen3_next"):
        return tensors
    out = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, both in enumerate(tensor):
                out[f"{prefix}.{i}.gate_proj.weight"], out[f"{prefix}.{i}.up_proj.weight"] = both.chunk(2)
        elif last == "down_proj" and prefix.endswith("experts"):
            out.update({f"{prefix}.{i}.down_proj.weight": w for i, w in enumerate(tensor)})
        else:
            out[name] = tensor
    return out


def on_disk(raw: dict, main, head: MtpHead | None) -> dict[str, torch.Tensor]:
    """All tensors by their published names, in the dtypes they are published in."""
    tensors = models.state(main)
    if head is not None:
        tensors |= {f"mtp.{k}": v.detach() for k, v in head.state_dict().items()}
    out = {}
    for name, tensor in with_expert_names(raw, tensors).items():
        if "wrap" in raw and name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        keep = "wrap" in raw and name.endswith(("A_log", "linear_attn.norm.weight"))
        out[name] = tensor.clone() if keep else tensor.to(getattr(torch, DTYPE))
    return dict(sorted(out.items()))


def outer_config(raw: dict) -> dict:
    """config.json: the text config itself, or a composite config around it."""
    text = {k: v for k, v in raw.items() if k != "wrap"}
    if "wrap" not in raw:
        return text
    kind, architecture = raw["wrap"]
    del text["architectures"]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {**text, "dtype": DTYPE},
        "tie_word_embeddings": raw["tie_word_embeddings"],
    }


def fill(module: torch.nn.Module, raw: dict, seed: int) -> None:
    """Random weights representable on disk, float32 where the checkpoint keeps float32."""
    models.randomise(module, raw, seed, DTYPE)
    if "wrap" not in raw:
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("A_log", "linear_attn.norm.weight")):
                parameter.add_(torch.linspace(0, 1e-3, parameter.numel()))


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    raw = MODELS[name]
    text = {k: v for k, v in raw.items() if k != "wrap"}
    main = models.build(text)
    fill(main, raw, seed)
    head = None
    if raw["model_type"] in LAYERS:
        head = MtpHead(raw, main).eval()
        fill(head, raw, seed + 1)
    checkpoint.fresh(folder)
    config = outer_config(raw)
    checkpoint.write_side_files(folder, config, DTYPE, tokenizer)
    checkpoint.write_tensors(folder, on_disk(raw, main, head))
    loaded = checkpoint.reload(folder)
    for key, value in models.state(main).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    finish(name, folder, loaded, head, tokenizer, seed)


def mtp_entries(head: MtpHead, main, tokenizer, seed: int) -> list[dict]:
    """The head's references: the first prompt of each length without a near tie."""
    entries = []
    for length in (8, 70):
        rng = np.random.default_rng(seed + length)
        for ids in reference.candidates(length, tokenizer, rng):
            following, margin = reference.greedy_of(main, ids, 1)
            entry = mtp_reference(head, main, ids, following[0]) if margin >= reference.MARGIN else None
            if entry:
                entries.append(entry)
                break
    return entries


def finish(name: str, folder, main, head: MtpHead | None, tokenizer, seed: int, lengths=LENGTHS) -> None:
    """Writes reference.json, the head's part included, and says how it went."""
    made = reference.make(main, tokenizer, name, seed, lengths=lengths)
    if head is not None:
        made["mtp"] = mtp_entries(head, main, tokenizer, seed)
    reference.dump(made, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   least margin {made['margin']:.3f}   {type(main).__name__}", flush=True)
