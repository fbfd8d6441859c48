"""NVFP4 with a second scale per matrix, as ModelOpt quantizes: value = E2M1 number * (E4M3 scale of 16 elements * second scale).

llama.cpp's converter keeps codes and scales in blocks of its type NVFP4, and the second scale as a tensor beside them:
`X.scale` beside `X.weight`, with one number, or one an expert. It writes the scale of the input, too, as `X.input_scale`.
compressed-tensors stores the reciprocal of the second scale, and divides by it.
"""

import gguf
import numpy as np
import torch

from . import checkpoint, models

GROUP = 16
# The numbers of four bits by their codes.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INPUT_SCALE = 0.0123  # Of no use to a reader that quantizes activations otherwise.


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix [n, k] as codes [n, k], scales [n, k / 16] in E4M3, and the second scale."""
    groups = w.float().unflatten(-1, (-1, GROUP))
    # The largest scale becomes the largest E4M3 number, 448.
    second = w.float().abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / (6 * second)).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * second).clamp(min=1e-20)[..., None]
    return (scaled[..., None] - E2M1).abs().argmin(-1).flatten(-2).to(torch.uint8), scales, second


def dequantize(codes: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """float32 values."""
    return E2M1[codes.long()] * (scales.float() * second).repeat_interleave(GROUP, dim=-1)


def blocks(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Rows of GGUF's blocks: 4 scales, then for each 8 bytes, elements 0-7 in low nibbles and 8-15 in high ones."""
    n, k = codes.shape
    parts = codes.numpy().reshape(n, k // 64, 4, 2, 8)
    nibbles = (parts[:, :, :, 0] | parts[:, :, :, 1] << 4).reshape(n, k // 64, 32)
    exponents = scales.view(torch.uint8).numpy().reshape(n, k // 64, 4)
    return np.concatenate([exponents, nibbles], axis=-1).reshape(n, -1)


def write(writer: gguf.GGUFWriter, name: str, w: np.ndarray) -> None:
    """A matrix, or one of each expert, and its scales beside it."""
    matrices = [quantize(matrix) for matrix in torch.from_numpy(w).reshape(-1, *w.shape[-2:])]
    rows = np.stack([blocks(codes, scales) for codes, scales, _ in matrices]).reshape(*w.shape[:-1], -1)
    writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    second = np.array([float(second) for _, _, second in matrices], dtype=np.float32)
    writer.add_tensor(name.replace(".weight", ".scale"), second)
    writer.add_tensor(name.replace(".weight", ".input_scale"), np.full_like(second, INPUT_SCALE))


def with_second_scale(w: np.ndarray, name: str, stored: dict) -> np.ndarray:
    """A tensor times the scale beside it, if there is one; both scales leave `stored`."""
    stored.pop(name.replace(".weight", ".input_scale"), None)
    second = stored.pop(name.replace(".weight", ".scale"), None)
    return w if second is None else w * np.array(second.data).reshape(-1, *[1] * (w.ndim - 1))


MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.37.0"},
    "ignore": ["lm_head", "*.mlp.gate"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    }},
}
WEIGHTS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": WEIGHTS,
        "input_activations": {**WEIGHTS, "dynamic": "local"}, "output_activations": None,
    }},
}
# name → (model, quantization_config)
MODELS = {"nvfp4-ernie4.5-moe": ("ernie4.5-moe", MODELOPT), "ct-llama-nvfp4": ("llama", COMPRESSED)}


def pack(config: dict, codes, scales, second) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix's tensors in the form that the configuration declares, and its float32 values."""
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if config is MODELOPT:
        parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": second, "input_scale": torch.tensor(INPUT_SCALE)}
        return parts, dequantize(codes, scales, second)
    parts = {
        "weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / second).reshape(1),
        "input_global_scale": torch.tensor([1 / INPUT_SCALE]),
    }
    return parts, unpack_compressed(parts)


def unpack_compressed(parts: dict) -> torch.Tensor:
    """compressed-tensors' own reading, in float32: by itself it computes in bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize as library
    n, half = parts["weight_packed"].shape
    numbers = unpack_fp4_from_uint8(parts["weight_packed"], n, 2 * half, dtype=torch.float32)
    scale, factor = parts["weight_scale"].float(), parts["weight_global_scale"]
    return library(numbers, scale, args=QuantizationArgs(**WEIGHTS), global_scale=factor, dtype=torch.float32)


def make(name: str, folder, base, families, tokenizer, finish) -> None:
    """One whole model; experts one by one."""
    source, config = MODELS[name]
    raw, _, model = base(source)
    stored, exact = {}, {}
    for tensor, value in families.split_experts(raw, models.state(model)).items():
        if value.dim() < 2 or ".layers." not in tensor or tensor.endswith((".mlp.gate.weight", ".e_score_correction_bias")):
            stored[tensor] = value.to(torch.bfloat16)
            exact[tensor] = stored[tensor].float()
            continue
        module, several = tensor.removesuffix(".weight"), value.dim() == 3
        matrices = []
        for i, matrix in enumerate(value if several else [value]):
            own = module.replace(".experts.", f".experts.{i}.") if several else module
            parts, values = pack(config, *quantize(matrix))
            stored.update({f"{own}.{leaf}": part for leaf, part in parts.items()})
            matrices.append(values)
        exact[tensor] = torch.stack(matrices) if several else matrices[0]
    stored = {k.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics."): v for k, v in stored.items()}
    folder = checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, {**raw, "quantization_config": config}, "bfloat16", tokenizer)
    checkpoint.write_tensors(folder, stored)
    models.load_state(model, families.join_experts(raw, exact))
    finish(folder, model, tokenizer)


def make_matrices(folder, text: dict, write_matrix) -> None:
    """One 16 × 128 matrix a form with all codes, and scales of both signs but no NaN."""
    generator = torch.Generator().manual_seed(9)
    for name, config, second in (("nvfp4-modelopt", MODELOPT, 0.000123), ("ct-nvfp4", COMPRESSED, 0.0077)):
        codes = torch.randint(0, 16, (16, 128), generator=generator).to(torch.uint8)
        scales = torch.randint(0, 254, (16, 8), generator=generator).to(torch.uint8)
        scales = torch.where(scales >= 127, scales + 1, scales).view(torch.float8_e4m3fn)
        parts, exact = pack(config, codes, scales, torch.tensor(second))
        assert exact.isfinite().all()
        assert torch.allclose(exact, dequantize(codes, scales, torch.tensor(second)), rtol=1e-6)
        write_matrix(folder / name, config, text, torch.bfloat16, parts, exact)
