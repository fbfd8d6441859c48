"""Blocks of every GGUF type with what gguf.quants.dequantize makes of them.

<TYPE>.bin holds whole blocks back to back, <TYPE>.f32 the little-endian float32 values, one row. Quants are random bytes;
scales are ordinary in the first half of the blocks and go through the extremes of finite f16 in the second.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .checkpoint import fresh

# Byte offsets of a block's f16 scales; types without any are plain floats.
SCALES = {
    "F32": [], "F16": [], "BF16": [], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}
# Zeros, subnormals, the smallest normal, one and its neighbours, the largest, in both signs.
EXTREME_F16 = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3BFF, 0x3C00, 0x3C01, 0xBC00, 0x7BFF, 0xFBFF], dtype="<u2"
)
EXTREME_F32 = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF], dtype="<u4"
)
VALUES = 2048


def floats(name: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of plain floats, extremes first; infinities are left out as no weight may be one."""
    ordinary = rng.standard_normal(256).astype("<f4")
    if name == "F32":
        return np.concatenate([EXTREME_F32.view("<f4"), ordinary]).view(np.uint8)
    if name == "F16":
        return np.concatenate([EXTREME_F16, ordinary.astype("<f2").view("<u2")]).view(np.uint8)
    return np.concatenate([EXTREME_F32 >> 16, ordinary.view("<u4") >> 16]).astype("<u2").view(np.uint8)


def blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of VALUES / block-size quantized blocks."""
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    count = VALUES // per_block
    data = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for slot, offset in enumerate(SCALES[name]):
        scale = (rng.standard_normal(count) * 0.02).astype("<f2").view("<u2")
        for i in range(count // 2, count):
            # Different strides let d and dmin meet in many combinations.
            scale[i] = EXTREME_F16[((i - count // 2) * (3 + 2 * slot) + 11) % len(EXTREME_F16)]
        data[:, offset:offset + 2] = scale.view(np.uint8).reshape(count, 2)
    return data.reshape(-1)


def make(folder: Path) -> None:
    """Writes both files of every type."""
    fresh(folder)
    for seed, name in enumerate(SCALES):
        rng = np.random.default_rng(seed)
        data = floats(name, rng) if GGML_QUANT_SIZES[GGMLQuantizationType[name]][0] == 1 else blocks(name, rng)
        values = dequantize(np.ascontiguousarray(data)[None, :], GGMLQuantizationType[name]).reshape(-1).astype("<f4")
        assert np.isfinite(values).all(), name
        (folder / f"{name}.bin").write_bytes(data.tobytes())
        (folder / f"{name}.f32").write_bytes(values.tobytes())
    total = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{'gguf_blocks':26} {total / 1000:7.0f} kB   {len(SCALES)} types", flush=True)
