"""Hybrids and mixtures of experts as other tools store them: MLX's converter and llama.cpp's.

What they change, and we with them. MLX (mlx-lm): names under `language_model.`, experts stacked as `switch_mlp.{gate,up,down}_proj`,
the convolution's taps before a last dimension of 1, 1 added to every norm but the one in a recurrent layer, every matrix
quantized, routers and the shared expert's gate to 8 bits. The draft head, which mlx-lm drops and people add again, keeps its
norms as published: such mixtures are about.

llama.cpp: 1 added to the same norms; A_log becomes `ssm_a` = -exp(A_log); Qwen3-Next's `in_proj_qkvz` is taken apart (its
`in_proj_ba` is not); Qwen3.5's value heads are put in tiled order (head v is served by key head v mod key heads) in every
tensor that has them; experts are stacked; the draft head is the block after the last, its own tensors called `nextn.*`.

The reference is the model that the files' dequantized values make, read back with those changes undone.
"""

import numpy as np
import torch
import gguf
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from . import checkpoint, gguf_export, hybrid, mlx_affine, models

SMALL = {
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_hidden_layers": 2,
}
TINY = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
# Three value heads a key head: an order that is its own inverse would hide mistakes.
THREE = {"linear_num_value_heads": 6}
MOE35 = {**hybrid.MODELS["qwen3.5-moe"], **SMALL, "num_attention_heads": 2, "num_key_value_heads": 1}
LENGTHS = (1, 63, 65, 130)

# name → config of the model
FORMS: dict[str, dict] = {
    "mlx-qwen3.5-moe-4bit": MOE35,
    "gguf-qwen3moe-q8_0": {
        k: v for k, v in {**hybrid.MODELS["qwen3-moe"], **TINY}.items()
        if k not in ("layer_types", "full_attention_interval")
    },
    "gguf-qwen3next-q8_0": {
        k: v for k, v in {
            **hybrid.MODELS["qwen3-next"], **TINY, "head_dim": 16, "tie_word_embeddings": False,
        }.items()
        if k != "layer_types"
    },
    "gguf-qwen35moe-q8_0": {**MOE35, **TINY, **THREE},
    "gguf-qwen35-q8_0": {
        k: v for k, v in {**hybrid.MODELS["qwen3.5"], **TINY, **THREE}.items() if k != "num_experts"
    },
}
BITS, GROUP = 4, 32
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def shifted(raw: dict, name: str) -> bool:
    """Whether a converter adds 1 to this tensor."""
    return raw["model_type"] != "qwen3_moe" and "norm" in name and "linear_attn" not in name


def split_experts(tensors: dict) -> dict:
    """Stacked gate_up_proj as gate_proj and up_proj; every stacked name ends in `.weight`."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            out[f"{prefix}.gate_proj.weight"], out[f"{prefix}.up_proj.weight"] = gate.contiguous(), up.contiguous()
        elif last == "down_proj" and prefix.endswith("experts"):
            out[f"{name}.weight"] = tensor
        else:
            out[name] = tensor
    return out


def join_experts(tensors: dict) -> dict:
    """The inverse of `split_experts`."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([tensor, up], dim=1)
        elif name.endswith(".experts.down_proj.weight"):
            out[name.removesuffix(".weight")] = tensor
        elif not name.endswith(".experts.up_proj.weight"):
            out[name] = tensor
    return out


def load(raw: dict, tensors: dict):
    """The model and its draft head, of float32 tensors by their names in transformers (the head's after `mtp.`)."""
    main = models.build({k: v for k, v in raw.items() if k != "wrap"})
    tensors = join_experts(tensors)
    models.load_state(main, {k: v for k, v in tensors.items() if not k.startswith("mtp.")})
    of_head = {k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")}
    if not of_head:
        return main, None
    head = hybrid.MtpHead(raw, main).eval()
    head.load_state_dict(of_head, strict=True)
    return main, head


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def make_mlx(name: str, folder, raw: dict, tensors: dict, tokenizer, seed: int) -> None:
    """As mlx-lm would write it."""
    stored, exact, overrides = {}, {}, {}
    for key, tensor in split_experts(tensors).items():
        module = key.removesuffix(".weight")
        disk = module.replace(".experts.", ".switch_mlp.")
        disk = disk if key.startswith("mtp.") else f"language_model.{disk}"
        wide = module.endswith((".mlp.gate", ".shared_expert_gate"))
        if key.endswith("conv1d.weight"):
            value = tensor.to(torch.bfloat16)
            stored[f"{disk}.weight"], exact[key] = value.moveaxis(2, 1).contiguous(), value.float()
        elif tensor.dim() >= 2:
            bits, group = (8, 64) if wide else (BITS, GROUP)
            parts = mlx_affine.quantize(rows(tensor), bits, group, torch.bfloat16)
            value = mlx_affine.dequantize(parts, bits, group)
            leading = tuple(tensor.shape[:-1])
            stored.update({f"{disk}.{k}": v.reshape(*leading, v.shape[-1]) for k, v in parts.items()})
            exact[key] = value.reshape(tensor.shape)
            if wide:
                overrides[disk] = {"group_size": group, "bits": bits}
        else:
            add = 1.0 if shifted(raw, key) and not key.startswith("mtp.") else 0.0
            value = tensor if key.endswith("A_log") else (tensor + add).to(torch.bfloat16)
            disk = f"{disk}.weight" if key.endswith(".weight") else disk
            stored[disk], exact[key] = value.clone(), value.float() - add
    entry = {"group_size": GROUP, "bits": BITS, "mode": "affine", **overrides}
    config = {**hybrid.outer_config(raw), "quantization": entry, "quantization_config": entry}
    checkpoint.write_side_files(folder, config, "bfloat16", tokenizer)
    checkpoint.write_tensors(folder, dict(sorted(stored.items())))
    main, head = load(raw, exact)
    hybrid.finish(name, folder, main, head, tokenizer, seed, LENGTHS)


NAMES = {
    **gguf_export.LAYER_NAMES,
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
NEXTN = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def gguf_name(raw: dict, name: str) -> str:
    """llama.cpp's name of a tensor."""
    layers = raw["num_hidden_layers"]
    if name in gguf_export.NAMES:
        return gguf_export.NAMES[name]
    module, _, leaf = name.rpartition(".")
    if module in NEXTN:
        return f"blk.{layers}.{NEXTN[module]}.{leaf}"
    head = name.startswith("mtp.")
    _, layer, rest = (name if head else name.removeprefix("model.")).removeprefix("mtp.").split(".", 2)
    layer = layers if head else int(layer)
    if rest == "linear_attn.A_log":
        return f"blk.{layer}.ssm_a"
    if rest == "linear_attn.dt_bias":
        return f"blk.{layer}.ssm_dt.bias"
    module, leaf = rest.rsplit(".", 1)
    after = "post_attention_norm" if raw["model_type"] != "qwen3_moe" else "ffn_norm"
    return f"blk.{layer}.{after if module == 'post_attention_layernorm' else NAMES[module]}.{leaf}"


def reorder(raw: dict, name: str, w: torch.Tensor, back: bool) -> torch.Tensor:
    """Value heads from grouped to tiled order in the tensors of a Qwen3.5 layer that have them, or back."""
    leaf = name.split("linear_attn.")[-1].removesuffix(".weight")
    if not raw["model_type"].startswith("qwen3_5") or "linear_attn." not in name or leaf == "norm":
        return w
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    key_rows = 2 * keys * raw["linear_key_head_dim"]

    def tiled(part: torch.Tensor, dim: int, width: int) -> torch.Tensor:
        shape = list(part.shape)
        groups = [values // keys, keys] if back else [keys, values // keys]
        return part.reshape(*shape[:dim], *groups, width, *shape[dim + 1:]).transpose(dim, dim + 1).reshape(shape)

    width = raw["linear_value_head_dim"]
    if leaf in ("in_proj_qkv", "conv1d"):
        return torch.cat([w[:key_rows], tiled(w[key_rows:], 0, width)])
    if leaf == "out_proj":
        return tiled(w, 1, width)
    return tiled(w, 0, width if leaf == "in_proj_z" else 1)


def qkvz_apart(raw: dict, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-Next's joined projection as q|k|v and z."""
    keys, key = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
    value = raw["linear_num_value_heads"] // keys * raw["linear_value_head_dim"]
    parts = w.reshape(keys, 2 * key + 2 * value, -1).split([key, key, value, value], dim=1)
    q, k, v, z = (part.reshape(-1, w.shape[-1]) for part in parts)
    return torch.cat([q, k, v]), z


def qkvz_together(raw: dict, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The inverse of `qkvz_apart`."""
    keys, width = raw["linear_num_key_heads"], qkv.shape[-1]
    rows = keys * raw["linear_key_head_dim"]
    parts = (qkv[:rows], qkv[rows:2 * rows], qkv[2 * rows:], z)
    return torch.cat([part.reshape(keys, -1, width) for part in parts], dim=1).reshape(-1, width)


def write_metadata(writer: gguf.GGUFWriter, raw: dict, name: str, tokenizer, drafts: int, *special) -> None:
    """What the converter writes for these families on top of the plain ones; `special` as of gguf_export.py."""
    plain = {**raw, "num_hidden_layers": raw["num_hidden_layers"] + drafts}
    plain["rope_theta"] = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    gguf_export.write_metadata(writer, plain, name, tokenizer, *special)
    if "num_experts" in raw:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if raw["model_type"] == "qwen3_moe":
        return
    if "num_experts" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
    writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
    writer.add_uint32(f"{ARCHITECTURES[raw['model_type']]}.full_attention_interval", raw["full_attention_interval"])
    partial = (raw.get("rope_parameters") or raw).get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(raw["head_dim"] * partial))
    if drafts:
        writer.add_nextn_predict_layers(drafts)


def make_gguf(name: str, folder, raw: dict, tensors: dict, tokenizer, seed: int) -> None:
    """As llama.cpp's converter would write it, matrices in Q8_0."""
    if raw["model_type"] == "qwen3_next":
        # The converter leaves the head of this family out.
        tensors = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
    tensors = split_experts(tensors)
    drafts = int(any(k.startswith("mtp.") for k in tensors))
    writer = gguf.GGUFWriter(folder / "model.gguf", ARCHITECTURES[raw["model_type"]])
    write_metadata(writer, raw, name, tokenizer, drafts)
    exact = write_tensors(writer, raw, tensors, Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    main, head = load(raw, exact)
    hybrid.finish(name, folder, main, head, tokenizer, seed, LENGTHS)


def write_tensors(writer: gguf.GGUFWriter, raw: dict, tensors: dict, matrix: Q) -> dict[str, torch.Tensor]:
    """Every tensor, changed as the converter changes it; what a reader gets, with the changes undone."""
    exact: dict[str, torch.Tensor] = {}

    def put(target: str, w: torch.Tensor) -> torch.Tensor:
        """Writes a tensor; what a reader gets."""
        kind = matrix if w.dim() >= 2 and "conv1d" not in target and "shexp.weight" not in target.replace(
            "ffn_gate_inp_shexp", "shexp") else Q.F32
        data = np.ascontiguousarray(quantize(np.ascontiguousarray(w.numpy()), kind))
        writer.add_tensor(target, data, raw_dtype=kind)
        return torch.from_numpy(np.array(dequantize(data, kind), dtype=np.float32)).reshape(w.shape)

    for key, tensor in tensors.items():
        if key.endswith("in_proj_qkvz.weight"):
            layer = key.split(".")[2]
            qkv, z = qkvz_apart(raw, tensor)
            qkv, z = put(f"blk.{layer}.attn_qkv.weight", qkv), put(f"blk.{layer}.attn_gate.weight", z)
            exact[key] = qkvz_together(raw, qkv, z)
            assert torch.allclose(exact[key], tensor, atol=0.05)
            continue
        w = reorder(raw, key, tensor, back=False)
        if key.endswith("A_log"):
            w = -torch.exp(w)
        elif key.endswith("conv1d.weight"):
            w = w[:, 0, :]
        elif key.endswith("shared_expert_gate.weight"):
            w = w[0]
        elif shifted(raw, key):
            w = w + 1
        w = put(gguf_name(raw, key), w)
        if key.endswith("A_log"):
            w = torch.log(-w)
        elif shifted(raw, key):
            w = w - 1
        exact[key] = reorder(raw, key, w.reshape(tensor.shape), back=True)
        assert torch.allclose(exact[key], tensor, atol=0.05), key
    return exact


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """One fixture with its reference."""
    raw = FORMS[name]
    main = models.build({k: v for k, v in raw.items() if k != "wrap"})
    hybrid.fill(main, raw, seed)
    tensors = models.state(main)
    if raw["model_type"] in hybrid.LAYERS:
        head = hybrid.MtpHead(raw, main).eval()
        hybrid.fill(head, raw, seed + 1)
        tensors |= {f"mtp.{k}": v.detach() for k, v in head.state_dict().items()}
    checkpoint.fresh(folder)
    form = make_mlx if name.startswith("mlx") else make_gguf
    form(name, folder, raw, {k: v.float() for k, v in tensors.items()}, tokenizer, seed)
