"""Fixtures of quantized Hugging Face checkpoints: whole tiny models, and single matrices with the values they stand for.

`packed.py` has the layouts. A model's reference numbers are those of transformers with the dequantized weights.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from . import checkpoint, models, nvfp4, packed

HALF, BRAIN = torch.float16, torch.bfloat16


def _compressed(bits: int, group: int | None, symmetric: bool, form: str, ignore: list[str]) -> dict:
    args = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None,
        "strategy": "group" if group else "channel", "group_size": group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ignore, "config_groups": groups,
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }


# name → (model, dtype of scales and floats, default (bits, group, symmetric), by module, quantization_config). A module
# that maps to None stays in floats; without an entry, every matrix of a layer is quantized.
MODELS = {
    "awq-llama": (
        "llama", HALF, (4, 32, False), {"model.layers.1.self_attn.o_proj": None},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["layers.1.self_attn.o_proj"]},
    ),
    "gptq-llama": (
        "llama", HALF, (4, 64, True), {},
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "damp_percent": 0.1,
         "true_sequential": True, "checkpoint_format": "gptq"},
    ),
    "gptq-llama-actorder": (
        "llama", HALF, (4, 32, False), {},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True, "damp_percent": 0.1,
         "true_sequential": True, "checkpoint_format": "gptq"},
    ),
    "gptq-qwen2-8bit": (
        "qwen2", HALF, (8, 32, False), {},
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "desc_act": False,
         "checkpoint_format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:4.0.0"]}},
    ),
    "autoround-llama": (
        "llama", HALF, (4, 32, False),
        {"model.layers.0.self_attn.q_proj": (8, 32, False), "model.layers.0.mlp.down_proj": None},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
         "sym": False, "data_type": "int", "iters": 200,
         "extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 8},
                          "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"}}},
    ),
    "ct-llama-w4a16": (
        "llama", BRAIN, (4, 32, True), {"model.layers.0.mlp.down_proj": None},
        _compressed(4, 32, True, "pack-quantized", ["lm_head", "re:.*layers\\.0\\.mlp\\.down_proj"]),
    ),
    "ct-llama-w4a16-asym": (
        "llama", BRAIN, (4, 32, False), {}, _compressed(4, 32, False, "pack-quantized", ["lm_head"]),
    ),
    "ct-llama-w8a16": (
        "llama", BRAIN, (8, None, True), {}, _compressed(8, None, True, "int-quantized", ["lm_head"]),
    ),
}


# Projections of one input share their order of columns; `k_proj` has an order of its own.
INPUTS = {"q_proj": "x", "v_proj": "x", "gate_proj": "y", "up_proj": "y"}


def _order(config: dict, module: str, k: int) -> torch.Tensor | None:
    """The order of a matrix's inputs under `desc_act`: a random one takes the place of the order by activation."""
    if not config.get("desc_act"):
        return None
    layer, part = module.split(".layers.")[1].split(".")[0], module.rsplit(".", 1)[1]
    seed = sum(f"{layer} {INPUTS.get(part, part)}".encode())
    return torch.from_numpy(np.random.default_rng(seed).permutation(k))


def _pack(config: dict, codes, scale, zero, bits: int, symmetric: bool, order=None):
    """A matrix's tensors in the form that the configuration declares, and its float32 values, read back from them."""
    method = config["quant_method"]
    if method == "awq" or "awq" in config.get("packing_format", ""):
        parts = packed.pack_awq(codes, scale, zero)
        return parts, packed.unpack_awq(parts)
    if method in ("gptq", "auto-round"):
        less_one = config.get("checkpoint_format") != "gptq_v2" and config.get("packing_format") != "auto_round"
        parts = packed.pack_gptq(codes, scale, zero, bits, less_one, order)
        return parts, packed.unpack_gptq(parts, bits, less_one)
    args = {**config["config_groups"]["group_0"]["weights"]}
    parts = packed.pack_compressed(codes, scale, zero, bits, symmetric, config["format"] == "int-quantized")
    return parts, packed.unpack_compressed(parts, args)


def make(name: str, folder: Path, base, tokenizer, finish) -> None:
    """One whole model."""
    source, dtype, default, by_module, config = MODELS[name]
    raw, _, model = base(source)
    stored, exact = {}, {}
    for tensor, value in models.state(model).items():
        module = tensor.removesuffix(".weight")
        rule = by_module.get(module, default) if value.dim() == 2 and ".layers." in tensor else None
        if rule is None:
            stored[tensor] = value.to(dtype)
            exact[tensor] = stored[tensor].float()
            continue
        bits, group, symmetric = rule
        order = _order(config, module, value.shape[1])
        sorted_by = value if order is None else value[:, order]
        codes, scale, zero = packed.quantize(sorted_by, bits, group or value.shape[1], symmetric, dtype)
        parts, exact[tensor] = _pack(config, codes, scale, zero, bits, symmetric, order)
        again = exact[tensor] if order is None else exact[tensor][:, order]
        assert torch.equal(again, packed.dequantize(codes, scale, zero)), tensor
        stored.update({f"{module}.{leaf}": part for leaf, part in parts.items()})
    folder = checkpoint.fresh(folder)
    raw = {**raw, "quantization_config": config}
    checkpoint.write_side_files(folder, raw, str(dtype).removeprefix("torch."), tokenizer)
    checkpoint.write_tensors(folder, stored)
    models.load_state(model, exact)
    finish(folder, model, tokenizer)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_CHANNEL = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
    }},
}
# name → (quantization_config, block of the scales (0: all rows or columns), their name and dtype)
FP8_MODELS = {
    "fp8-llama": (
        {**FP8, "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}, (32, 32), "weight_scale_inv",
        torch.float32,
    ),
    "ct-llama-fp8": (FP8_CHANNEL, (1, 0), "weight_scale", BRAIN),
}
FP8_MATRICES = {
    # The last block of rows and of columns is cut.
    "fp8-block": ({**FP8, "weight_block_size": [12, 48]}, (12, 48), "weight_scale_inv", torch.float32),
    "fp8-tensor": ({**FP8, "activation_scheme": "static"}, (0, 0), "weight_scale_inv", BRAIN),
    "fp8-modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 0), "weight_scale", torch.float32),
    "fp8-fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0), "weight_scale", torch.float32),
    "ct-fp8-channel": (FP8_CHANNEL, (1, 0), "weight_scale", BRAIN),
}


def _block(block, shape) -> tuple[int, int]:
    return block[0] or shape[0], block[1] or shape[1]


def make_fp8(name: str, folder: Path, base, tokenizer, finish) -> None:
    """One whole model in FP8."""
    config, block, leaf, dtype = FP8_MODELS[name]
    raw, _, model = base("llama")
    stored, exact = {}, {}
    for tensor, value in models.state(model).items():
        if value.dim() != 2 or ".layers." not in tensor:
            stored[tensor] = value.to(BRAIN)
            exact[tensor] = stored[tensor].float()
            continue
        own = _block(block, value.shape)
        stored[tensor], scale = packed.quantize_fp8(value, own, dtype)
        stored[tensor.removesuffix("weight") + leaf] = scale
        exact[tensor] = packed.dequantize_fp8(stored[tensor], scale, own)
    folder = checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, {**raw, "quantization_config": config}, "bfloat16", tokenizer)
    checkpoint.write_tensors(folder, stored)
    models.load_state(model, exact)
    finish(folder, model, tokenizer)


def make_fp8_matrices(folder: Path, text: dict) -> None:
    """One 16 × 128 matrix a form with every E4M3 number but NaN."""
    generator = torch.Generator().manual_seed(8)
    for name, (config, block, leaf, dtype) in FP8_MATRICES.items():
        shape = (16, 128)
        own = _block(block, shape)
        numbers = torch.randint(0, 254, shape, generator=generator).to(torch.uint8)
        numbers = torch.where(numbers >= 127, numbers + 1, numbers).view(torch.float8_e4m3fn)
        count = (-(-shape[0] // own[0]), -(-shape[1] // own[1]))
        scale = torch.tensor(SCALES)[torch.randint(0, len(SCALES), count, generator=generator)].to(dtype)
        exact = packed.dequantize_fp8(numbers, scale, own)
        assert exact.isfinite().all()
        tensors = {"weight": numbers, leaf: scale.reshape(()) if name == "fp8-tensor" else scale}
        write_matrix(folder / name, config, text, dtype, tensors, exact)


def write_matrix(into: Path, config: dict, text: dict, dtype, parts: dict, exact: torch.Tensor) -> None:
    """config.json, model.safetensors and expected.f32 of one matrix."""
    into = checkpoint.fresh(into)
    tensors = {f"model.layers.0.mlp.up_proj.{leaf}": part.contiguous() for leaf, part in parts.items()}
    save_file(tensors, str(into / "model.safetensors"), metadata={"format": "pt"})
    named = {**text, "torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": config}
    (into / "config.json").write_text(json.dumps(named) + "\n")
    np.ascontiguousarray(exact.numpy(), dtype="<f4").tofile(into / "expected.f32")


# name → (quantization_config, bits, group, symmetric, dtype of the scales)
MATRICES = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4, 32, False, HALF),
    "gptq-2bit": ({"quant_method": "gptq", "bits": 2, "group_size": 32, "sym": False}, 2, 32, False, HALF),
    "gptq-4bit": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, 4, 64, False, HALF),
    "gptq-4bit-sym": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4, 128, True, HALF),
    "gptq-8bit-v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        8, 32, False, HALF,
    ),
    "autoround-awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 16,
         "sym": False},
        4, 16, False, HALF,
    ),
    "autoround": (
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False},
        4, 32, False, HALF,
    ),
    "ct-4bit": (_compressed(4, 64, True, "pack-quantized", []), 4, 64, True, BRAIN),
    "ct-4bit-asym": (_compressed(4, 32, False, "pack-quantized", []), 4, 32, False, HALF),
    "ct-8bit-asym": (_compressed(8, None, False, "pack-quantized", []), 8, 128, False, BRAIN),
    "ct-3bit": (_compressed(3, 32, True, "pack-quantized", []), 3, 32, True, torch.float32),
    "ct-bytes": (_compressed(8, None, True, "int-quantized", []), 8, 128, True, BRAIN),
    "ct-bytes-asym": (_compressed(8, 32, False, "int-quantized", []), 8, 32, False, HALF),
}
# Negative, tiny, subnormal and ordinary scales.
SCALES = [0.0123, -0.4, 1.0, 3e-6, -6e-8, 0.0, 37.5, -0.007]


def make_matrices(folder: Path) -> None:
    """One 16 × 128 matrix a form, all codes and zero points possible, with expected.f32."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda top, *shape: torch.randint(0, top, shape, generator=generator)  # noqa: E731
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
    for name, (config, bits, group, symmetric, dtype) in MATRICES.items():
        codes = draw(1 << bits, 16, 128)
        scale = torch.tensor(SCALES)[draw(len(SCALES), 16, 128 // group)].to(dtype)
        zero = torch.full(scale.shape, 1 << (bits - 1)) if symmetric else draw(1 << bits, *scale.shape)
        parts, exact = _pack(config, codes, scale, zero, bits, symmetric)
        assert torch.equal(exact, packed.dequantize(codes, scale, zero)), name
        write_matrix(folder / name, config, text, dtype, parts, exact)
    make_fp8_matrices(folder, text)
    nvfp4.make_matrices(folder, text, write_matrix)
