#!/usr/bin/env python3
"""Compares fixturelib/mlx_affine.py with Apple's MLX (`pip install mlx[cpu]` runs on Linux): same codes, same values.

Needs numpy, torch and mlx; run it after changing the packing.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib import mlx_affine  # noqa: E402

for bits in (3, 4, 5, 6, 8):
    for group in (32, 64):
        w = np.random.default_rng(bits * group).standard_normal((48, 192)).astype(np.float32)
        ours = mlx_affine.quantize(torch.from_numpy(w), bits, group, torch.float32)
        words, scales, biases = (np.array(x) for x in mx.quantize(mx.array(w), group_size=group, bits=bits))
        mine = ours["weight"].view(torch.int32).numpy().view("<u4")
        same = (mlx_affine.unpack(mine, bits) == mlx_affine.unpack(words, bits)).mean()
        scale_error = np.abs(ours["scales"].numpy() - scales).max()
        bias_error = np.abs(ours["biases"].numpy() - biases).max()
        theirs = np.array(
            mx.dequantize(
                mx.array(mine), mx.array(ours["scales"].numpy()), mx.array(ours["biases"].numpy()), group_size=group, bits=bits
            )
        )
        value_error = np.abs(theirs - mlx_affine.dequantize(ours, bits, group).numpy()).max()
        print(f"bits {bits} group {group}: codes equal {same:.4f}, scale {scale_error:.1e}, bias {bias_error:.1e}, value {value_error:.1e}")
        assert same > 0.999 and scale_error < 1e-6 and bias_error < 1e-6 and value_error < 1e-6
