#!/usr/bin/env python3
"""Makes everything under tests/fixtures that needs a reference: tiny checkpoints, their numbers, GGUF blocks.

    python3 -m venv /somewhere && /somewhere/bin/pip install -r tools/requirements.txt
    /somewhere/bin/python tools/make_fixtures.py            # all of it, about ten minutes
    /somewhere/bin/python tools/make_fixtures.py qwen3 mlx  # only entries whose name starts so

The same versions give the same files: seeds are fixed and nothing depends on time or order. What each file holds is told
where it is made: fixturelib/reference.py (reference.json), tokenizer.py, models.py, mlx_affine.py, gguf_export.py,
gguf_blocks.py, hybrid.py, hybrid_forms.py, known.py, encoders.py, vision.py, tiled.py, omni.py.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib import (  # noqa: E402
    checkpoint, encoders, gguf_blocks, gguf_export, hybrid, hybrid_forms, known, mlx_affine, models, omni, reference,
    tiled, vision,
)
from fixturelib import tokenizer as tok  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
SEED = 20

# name → (bits, group, dtype of scales and of unquantized tensors, overrides by module)
MLX = {
    "mlx-llama-3bit-g64": (3, 64, torch.float16, {}),
    "mlx-llama-4bit-g64": (4, 64, torch.bfloat16, {}),
    "mlx-llama-4bit-g32": (4, 32, torch.float16, {}),
    "mlx-llama-5bit-g32": (5, 32, torch.bfloat16, {}),
    "mlx-llama-6bit-g64": (6, 64, torch.float32, {}),
    "mlx-llama-8bit-g32": (8, 32, torch.bfloat16, {}),
    "mlx-llama-mixed": (
        4, 64, torch.bfloat16,
        {
            "model.embed_tokens": {"group_size": 32, "bits": 6},
            "model.layers.1.self_attn.o_proj": {"group_size": 32, "bits": 3},
            "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8},
            "model.layers.1.mlp.gate_proj": False,
            "lm_head": {"group_size": 64, "bits": 5},
        },
    ),
}


def base(name: str):
    """A model of models.MODELS with its weights, as every derived fixture starts from."""
    raw, dtype = models.MODELS[name]
    model = models.build(raw)
    models.randomise(model, raw, SEED, dtype)
    return raw, dtype, model


def finish(folder: Path, model, tokenizer, extra: dict | None = None) -> None:
    """Writes reference.json and says how it went."""
    made = reference.make(model, tokenizer, folder.name, SEED, extra=extra)
    reference.dump(made, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:26} {size / 1000:7.0f} kB   least margin {made['margin']:.3f}", flush=True)


def make_plain(name: str, tokenizer) -> None:
    """One architecture in its own dtype."""
    raw, dtype, model = base(name)
    folder = checkpoint.fresh(ROOT / "models" / name)
    checkpoint.write_side_files(folder, raw, dtype, tokenizer, template_as_file=name == "qwen3")
    tensors = {k: v.to(getattr(torch, dtype)) for k, v in models.state(model).items()}
    checkpoint.write_tensors(folder, tensors, shards=3 if name == "llama3-rope" else 1)
    finish(folder, checkpoint.reload(folder), tokenizer)


def make_cast(name: str, source: str, dtype: str, tokenizer) -> None:
    """The same weights rounded to another dtype, with numbers of their own."""
    raw, _, model = base(source)
    folder = checkpoint.fresh(ROOT / "models" / name)
    checkpoint.write_side_files(folder, raw, dtype, tokenizer)
    checkpoint.write_tensors(folder, {k: v.to(getattr(torch, dtype)) for k, v in models.state(model).items()})
    finish(folder, checkpoint.reload(folder), tokenizer)


def make_mlx(name: str, tokenizer) -> None:
    """llama in MLX's quantized format; numbers of the values the codes stand for."""
    bits, group, dtype, overrides = MLX[name]
    raw, _, model = base("llama")
    stored, exact, entry = mlx_affine.quantize_checkpoint(models.state(model), bits, group, dtype, overrides)
    folder = checkpoint.fresh(ROOT / "models" / name)
    config = {**raw, "quantization": entry, "quantization_config": entry}
    checkpoint.write_side_files(folder, config, str(dtype).removeprefix("torch."), tokenizer)
    checkpoint.write_tensors(folder, stored)
    models.load_state(model, exact)
    finish(folder, model, tokenizer)


def jobs(tokenizer):
    """Every fixture by name, in the order they are made."""
    yield "tokenizer", lambda: tok.write_cases(tokenizer, ROOT / "tokenizer_cases.json")
    for name in models.MODELS:
        yield name, lambda name=name: make_plain(name, tokenizer)
    yield "llama-bf16", lambda: make_cast("llama-bf16", "llama", "bfloat16", tokenizer)
    yield "llama-f16", lambda: make_cast("llama-f16", "llama", "float16", tokenizer)
    for name in MLX:
        yield name, lambda name=name: make_mlx(name, tokenizer)
    for name in gguf_export.FILES:
        yield name, lambda name=name: gguf_export.make(name, ROOT / "models" / name, base, tokenizer, finish)
    yield "gguf_blocks", lambda: gguf_blocks.make(ROOT / "gguf_blocks")
    for name in hybrid.MODELS:
        yield name, lambda name=name: hybrid.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in hybrid_forms.FORMS:
        yield name, lambda name=name: hybrid_forms.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in vision.MODELS:
        yield name, lambda name=name: vision.make(name, ROOT / "models" / name, tokenizer, SEED)
    yield "omni", lambda: omni.make(ROOT / "models" / "omni", tokenizer, SEED)
    for name in tiled.MODELS:
        yield name, lambda name=name: tiled.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in encoders.MODELS:
        yield name, lambda name=name: encoders.make(name, ROOT / "models" / name, SEED)
    yield "pooling", lambda: encoders.pooled_decoder(ROOT / "models" / "qwen3", ROOT / "pooling_reference.json")
    for name in known.MODELS:
        yield name, lambda name=name: known.make(name, ROOT / "models" / name, tokenizer)


def main() -> None:
    """Runs the chosen jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="prefixes of fixture names; all without")
    names = parser.parse_args().names
    # One thread: a sum that is split the same way on every machine.
    torch.set_num_threads(1)
    ROOT.mkdir(parents=True, exist_ok=True)
    for name, job in jobs(tok.build()):
        if not names or any(name.startswith(n) for n in names):
            job()


if __name__ == "__main__":
    main()
