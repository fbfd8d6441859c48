"""NVFP4 with a second scale per matrix, as ModelOpt quantizes: value = E2M1 number * (E4M3 scale of 16 elements * second scale).

llama.cpp's converter keeps codes and scales in blocks of its type NVFP4, and the second scale as a tensor beside them:
`X.scale` beside `X.weight`, with one number, or one an expert. It writes the scale of the input, too, as `X.input_scale`.
"""

import gguf
import numpy as np
import torch

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
