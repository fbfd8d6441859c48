"""MLX affine quantization in numpy: quantize, pack, and the exact values a reader must see.

Layout (MLX, mode "affine"): a weight [out, in] becomes `weight` u32 [out, in * bits / 32], `scales` and `biases`
[out, in / group]. Codes of a row form one little-endian bit stream: code j occupies bits j*bits .. (j+1)*bits of the
row, so 3-, 5- and 6-bit codes straddle words. Value = scale * code + bias, where scale and bias are stored in the
checkpoint's dtype; the reference multiplies and adds in float32.
"""

import numpy as np
import torch


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] (n * bits a multiple of 32) as u32 [rows, n * bits / 32]."""
    rows, _ = codes.shape
    planes = (codes[:, :, None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = planes.reshape(rows, -1)
    return np.packbits(stream, axis=1, bitorder="little").view("<u4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`."""
    rows = words.shape[0]
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    planes = stream.reshape(rows, -1, bits).astype(np.uint32)
    return (planes << np.arange(bits, dtype=np.uint32)).sum(axis=2).astype(np.uint8)


def quantize(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A matrix as its three tensors, with the scales and biases MLX itself would choose."""
    w = weight.float().numpy()
    rows, columns = w.shape
    groups = w.reshape(rows, columns // group, group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    top = (1 << bits) - 1
    # The end of larger magnitude is represented exactly, and so is zero; if that end is the maximum, the scale is negative.
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32(top), np.float32(1e-7))
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps == 0, scale, edge / np.where(steps == 0, 1, steps))
    bias = np.where(steps == 0, 0, edge)
    stored = [torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(dtype) for x in (scale, bias)]
    s, b = (x.float().numpy()[:, :, None] for x in stored)
    codes = np.clip(np.rint((groups - b) / s), 0, top).astype(np.uint8).reshape(rows, columns)
    words = pack(codes, bits)
    assert (unpack(words, bits) == codes).all()
    return {"weight": torch.from_numpy(words.view(np.int32)).view(torch.uint32), "scales": stored[0], "biases": stored[1]}


def dequantize(parts: dict[str, torch.Tensor], bits: int, group: int) -> torch.Tensor:
    """float32 scale * code + bias, both operations rounded."""
    codes = unpack(parts["weight"].view(torch.int32).numpy().view("<u4"), bits).astype(np.float32)
    rows, columns = codes.shape
    groups = codes.reshape(rows, columns // group, group)
    value = groups * parts["scales"].float().numpy()[:, :, None] + parts["biases"].float().numpy()[:, :, None]
    return torch.from_numpy(np.ascontiguousarray(value.reshape(rows, columns), dtype=np.float32))


def quantize_checkpoint(tensors, bits: int, group: int, dtype: torch.dtype, overrides: dict):
    """Quantizes every matrix of a checkpoint, stacked experts too.

    `overrides` maps a module name to {"bits", "group_size"} or to False (left as it is), as mlx-lm writes it.
    Returns (tensors to store, float32 tensors they stand for, the `quantization` entry of config.json).
    """
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        rule = overrides.get(module, {"bits": bits, "group_size": group})
        convolution = name.endswith(("conv.conv.weight", "conv1d.weight"))
        if tensor.dim() < 2 or rule is False or convolution or not name.endswith(".weight"):
            stored[name] = tensor.to(dtype)
            exact[name] = stored[name].float()
            continue
        # Stacked experts are matrices below each other.
        parts = quantize(tensor.flatten(0, -2), rule["bits"], rule["group_size"], dtype)
        stored.update({f"{module}.{key}": value.unflatten(0, tensor.shape[:-1]) for key, value in parts.items()})
        exact[name] = dequantize(parts, rule["bits"], rule["group_size"]).unflatten(0, tensor.shape[:-1])
    return stored, exact, {"group_size": group, "bits": bits, "mode": "affine", **overrides}
