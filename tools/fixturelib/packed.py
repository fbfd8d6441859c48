"""Quantized checkpoints of Hugging Face in torch: AWQ, GPTQ, AutoRound and compressed-tensors.

All store integer codes with a scale and a zero point per group: value = scale * (code - zero). They differ in where a
code lies. Every `pack_*` has an `unpack_*` that was written from the published layout, not from the packer; the
reference values come from the unpacked tensors, so a mistake in one of them shows.
"""

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # row (of eight) in nibble 0, 1, ...


def quantize(weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype):
    """A matrix [n, k] as codes [n, k] (0 .. 2^bits - 1), scales [n, g] of `dtype`, zero points [n, g]."""
    n, k = weight.shape
    parts = weight.float().reshape(n, k // group, group)
    top = (1 << bits) - 1
    low, high = parts.amin(dim=2).clamp(max=0), parts.amax(dim=2).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / (top // 2)).clamp(min=1e-6).to(dtype)
        zero = torch.full(scale.shape, 1 << (bits - 1))
    else:
        scale = ((high - low) / top).clamp(min=1e-6).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top).long()
    codes = (parts / scale.float()[:, :, None]).round() + zero[:, :, None]
    return codes.clamp(0, top).long().reshape(n, k), scale, zero.long()


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """float32 values."""
    n, k = codes.shape
    group = k // scale.shape[1]
    times = lambda x: x.repeat_interleave(group, dim=1)  # noqa: E731
    return (codes - times(zero)).float() * times(scale.float())


def words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """The last dimension, 32 / bits fields with the first in the low bits, as one int32."""
    shifts = torch.arange(fields.shape[-1]) * bits
    value = (fields.long() << shifts).sum(dim=-1)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32)


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `words`: one more dimension."""
    value = packed.long() & 0xFFFFFFFF
    return (value.unsqueeze(-1) >> (torch.arange(32 // bits) * bits)) & ((1 << bits) - 1)


def pack_awq(codes, scale, zero) -> dict[str, torch.Tensor]:
    """AutoAWQ's GEMM form: words of eight outputs, nibble i holding output AWQ_ORDER[i]."""
    pack = lambda x: words(x.reshape(x.shape[0], -1, 8)[:, :, AWQ_ORDER], 4)  # noqa: E731
    return {"qweight": pack(codes.t()), "qzeros": pack(zero.t()), "scales": scale.t().contiguous()}


def unpack_awq(parts) -> torch.Tensor:
    """Output j of a word lies at bit 4 * (j // 2 + 4 * (j % 2))."""
    def unpack(x):
        nibbles = fields(x, 4)
        outputs = [nibbles[:, :, j // 2 + 4 * (j % 2)] for j in range(8)]
        return torch.stack(outputs, dim=-1).reshape(x.shape[0], -1).t()
    return dequantize(unpack(parts["qweight"]), parts["scales"].t(), unpack(parts["qzeros"]))


def pack_gptq(codes, scale, zero, bits: int, less_one: bool, order=None) -> dict[str, torch.Tensor]:
    """AutoGPTQ's form: words of neighbouring inputs; zero points less one in the first version. `order` has the input of each column,
    where those of a group are no neighbours."""
    per, (n, k) = 32 // bits, codes.shape
    order = torch.arange(k) if order is None else order
    back = order.argsort()
    codes = codes[:, back]
    zeros = (zero - int(less_one)) & ((1 << bits) - 1)
    return {
        "qweight": words(codes.t().reshape(k // per, per, n).transpose(1, 2), bits),
        "qzeros": words(zeros.t().reshape(-1, n // per, per), bits),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(k) // (k // scale.shape[1]))[back].to(torch.int32),
    }


def unpack_gptq(parts, bits: int, less_one: bool) -> torch.Tensor:
    """Input i of a word of `qweight`, and output i of a word of `qzeros`, at bit i * bits."""
    mask = (1 << bits) - 1
    codes = fields(parts["qweight"], bits)  # [k / per, n, per]
    codes = codes.permute(0, 2, 1).reshape(-1, parts["scales"].shape[1]).t()
    zero = (fields(parts["qzeros"], bits).flatten(1) + int(less_one)) & mask
    group = parts["g_idx"].long()
    return (codes - zero.t()[:, group]).float() * parts["scales"].t().float()[:, group]


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype):
    """A matrix [n, k] as E4M3 numbers and the scales of its blocks, [n / rows of a block, k / columns of a block]."""
    n, k = weight.shape
    scale = torch.empty(-(-n // block[0]), -(-k // block[1]))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = weight[i * block[0]:(i + 1) * block[0], j * block[1]:(j + 1) * block[1]]
            scale[i, j] = part.float().abs().max() / 448
    scale = scale.to(dtype)
    wide = spread(scale, block, (n, k))
    return (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The float32 scale of every element."""
    rows = torch.arange(shape[0]) // block[0]
    return scale.float()[rows][:, torch.arange(shape[1]) // block[1]]


def dequantize_fp8(numbers: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 values by torch's own reading of E4M3."""
    return numbers.float() * spread(scale, block, tuple(numbers.shape))


def pack_compressed(codes, scale, zero, bits: int, symmetric: bool, as_bytes: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors' forms, with its own packer."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    middle = 1 << (bits - 1)
    signed, offset = (codes - middle).to(torch.int8), (zero - middle).to(torch.int8)
    if as_bytes:
        parts = {"weight": signed, "weight_scale": scale}
    else:
        parts = {
            "weight_packed": pack_to_int32(signed, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape),
        }
    if not symmetric:
        parts["weight_zero_point"] = offset if as_bytes else pack_to_int32(offset, bits, packed_dim=0).contiguous()
    return parts


def unpack_compressed(parts, args: dict) -> torch.Tensor:
    """compressed-tensors' own decompression, its scales widened to float32 first: it computes in their type."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    name = "pack-quantized" if "weight_packed" in parts else "int-quantized"
    wide = {k: v.float() if k == "weight_scale" else v for k, v in parts.items()}
    compressor = BaseCompressor.get_value_from_registry(name)
    return compressor.decompress(wide, scheme)["weight"].float()
