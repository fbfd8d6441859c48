#!/usr/bin/env python3
"""Makes everything under tests/fixtures that needs a reference: tiny checkpoints, their numbers, GGUF blocks.

    python3 -m venv /somewhere && /somewhere/bin/pip install -r tools/requirements.txt
    /somewhere/bin/python tools/make_fixtures.py            # all of it, about ten minutes
    /somewhere/bin/python tools/make_fixtures.py qwen3 mlx  # only entries whose name starts so

The same versions give the same files: seeds are fixed and nothing depends on time or order. What each file holds is told
where it is made: fixturelib/reference.py (reference.json), tokenizer.py, models.py, mlx_affine.py, gguf_export.py,
packed_forms.py, nvfp4.py, hybrid.py, hybrid_forms.py, qwen4.py, nextn.py, families.py, muse_glimmer.py, llama4.py, gemma4.py, latent.py, known.py, encoders.py, encoder_files.py, nomic_moe.py, reranker.py, vision.py, tiled.py, intern_chat.py,
siglip.py, idefics3.py, llama4_images.py, pixtral.py, lfm2_vl.py, budget.py, conformer.py, unified.py, omni.py, omni2_5.py, asr.py, whisper.py, mmproj.py, mmproj_images.py, mmproj_audio.py.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib import (  # noqa: E402
    asr, budget, checkpoint, conformer, encoder_files, encoders, families, gguf_export, hybrid, hybrid_forms, idefics3, intern_chat, known, latent, lfm2_vl, llama4_images, mlx_affine, mmproj,
    mmproj_audio, mmproj_images, models, nextn, nomic_moe, nvfp4, omni, omni2_5, packed_forms, pixtral, qwen4, reference, reranker, siglip, tiled, unified, vision, whisper,
)
from fixturelib import tokenizer as tok  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
FORMATS = ROOT.parent.parent / "crates" / "plimsoll-formats" / "tests" / "fixtures"
SEED = 20

# All plain decoders, by name.
MODELS = {**models.MODELS, **families.MODELS}
# name → (bits, group, dtype of scales and of unquantized tensors, overrides by module); the model is llama.
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
    """A model of MODELS, models.WIDE or families.WIDE with its weights, as every derived fixture starts from."""
    raw, dtype = (MODELS | models.WIDE | families.WIDE)[name]
    model = models.build(raw)
    models.randomise(model, raw, SEED, dtype)
    return raw, dtype, model


def finish(folder: Path, model, tokenizer, extra: dict | None = None, head=None) -> None:
    """Writes reference.json, the part of an MTP head included, and says how it went."""
    lengths = families.LENGTHS.get(folder.name, reference.LENGTHS)
    made = reference.make(model, tokenizer, folder.name, SEED, lengths=lengths, extra=extra)
    if head is not None:
        made["mtp"] = hybrid.mtp_entries(head, model, tokenizer, SEED)
    reference.dump(made, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:26} {size / 1000:7.0f} kB   least margin {made['margin']:.3f}", flush=True)


def make_plain(name: str, tokenizer) -> None:
    """One architecture in its own dtype."""
    raw, dtype, model = base(name)
    head = nextn.head_of(name, raw, model, dtype)
    folder = checkpoint.fresh(ROOT / "models" / name)
    checkpoint.write_side_files(folder, raw, dtype, tokenizer, template_as_file=name == "qwen3")
    tensors = families.published(raw, nextn.with_head(name, raw, models.state(model), head))
    tensors = {k: v.to(getattr(torch, dtype)) for k, v in tensors.items()}
    checkpoint.write_tensors(folder, tensors, shards=3 if name == "llama3-rope" else 1)
    finish(folder, checkpoint.reload(folder), tokenizer, head=head)


def make_cast(name: str, source: str, dtype: str, tokenizer) -> None:
    """The same weights rounded to another dtype, with numbers of their own."""
    raw, _, model = base(source)
    folder = checkpoint.fresh(ROOT / "models" / name)
    checkpoint.write_side_files(folder, raw, dtype, tokenizer)
    checkpoint.write_tensors(folder, {k: v.to(getattr(torch, dtype)) for k, v in models.state(model).items()})
    finish(folder, checkpoint.reload(folder), tokenizer)


def make_mlx(name: str, tokenizer) -> None:
    """A model in MLX's quantized format; numbers of the values the codes stand for."""
    source, bits, group, dtype, overrides = families.MLX.get(name) or ("llama", *MLX[name])
    raw, of_source, model = base(source)
    head = nextn.head_of(name, raw, model, of_source)
    tensors = families.split_experts(raw, nextn.with_head(name, raw, models.state(model), head))
    if name in latent.APART_IN_MLX:
        tensors = latent.apart(raw, tensors)
    stored, exact, entry = mlx_affine.quantize_checkpoint(tensors, bits, group, dtype, overrides)
    folder = checkpoint.fresh(ROOT / "models" / name)
    config = {**raw, "quantization": entry, "quantization_config": entry}
    checkpoint.write_side_files(folder, config, str(dtype).removeprefix("torch."), tokenizer)
    checkpoint.write_tensors(folder, families.for_mlx(raw, stored))
    nextn.load(raw, model, head, families.join_experts(raw, latent.together(exact)))
    finish(folder, model, tokenizer, head=head)


def make_mxfp4(name: str, source: str, tokenizer) -> None:
    """gpt-oss with its experts in MXFP4."""
    raw, dtype, model = base(source)
    stored, exact = families.mxfp4_checkpoint(models.state(model))
    folder = checkpoint.fresh(ROOT / "models" / name)
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"modules_to_not_convert": spared, "quant_method": "mxfp4"}
    checkpoint.write_side_files(folder, {**raw, "quantization_config": entry}, dtype, tokenizer)
    checkpoint.write_tensors(folder, stored)
    models.load_state(model, exact)
    finish(folder, model, tokenizer)


def jobs(tokenizer):
    """Every fixture by name, in the order they are made."""
    yield "tokenizer", lambda: tok.write_cases(tokenizer, ROOT / "tokenizer_cases.json")
    for name in MODELS:
        yield name, lambda name=name: make_plain(name, tokenizer)
    yield "llama-bf16", lambda: make_cast("llama-bf16", "llama", "bfloat16", tokenizer)
    yield "llama-f16", lambda: make_cast("llama-f16", "llama", "float16", tokenizer)
    for name in (*MLX, *families.MLX):
        yield name, lambda name=name: make_mlx(name, tokenizer)
    for name in gguf_export.FILES:
        yield name, lambda name=name: gguf_export.make(name, ROOT / "models" / name, base, tokenizer, finish)
    for name in packed_forms.MODELS:
        yield name, lambda name=name: packed_forms.make(name, ROOT / "models" / name, base, tokenizer, finish)
    for name in packed_forms.FP8_MODELS:
        yield name, lambda name=name: packed_forms.make_fp8(name, ROOT / "models" / name, base, tokenizer, finish)
    for name in nvfp4.MODELS:
        yield name, lambda name=name: nvfp4.make(name, ROOT / "models" / name, base, families, tokenizer, finish)
    yield "packed", lambda: packed_forms.make_matrices(FORMATS / "packed")
    yield "gpt-oss-mxfp4", lambda: make_mxfp4("gpt-oss-mxfp4", "gpt-oss", tokenizer)
    for name in hybrid.MODELS:
        yield name, lambda name=name: hybrid.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in qwen4.MODELS:
        yield name, lambda name=name: qwen4.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in hybrid_forms.FORMS:
        yield name, lambda name=name: hybrid_forms.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in vision.MODELS:
        yield name, lambda name=name: vision.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in mmproj.FILES:
        yield name, lambda name=name: mmproj.make(name, ROOT / "models" / name, tokenizer, SEED)
    yield "omni", lambda: omni.make(ROOT / "models" / "omni", tokenizer, SEED)
    yield "omni2.5", lambda: omni2_5.make(ROOT / "models" / "omni2.5", tokenizer, SEED)
    for name in asr.MODELS:
        yield name, lambda name=name: asr.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in whisper.MODELS:
        yield name, lambda name=name: whisper.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in tiled.MODELS:
        yield name, lambda name=name: tiled.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in intern_chat.MODELS:
        yield name, lambda name=name: intern_chat.make(name, ROOT / "models")
    for name in conformer.MODELS:
        yield name, lambda name=name: conformer.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in unified.MODELS:
        yield name, lambda name=name: unified.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in siglip.MODELS:
        yield name, lambda name=name: siglip.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in idefics3.MODELS:
        yield name, lambda name=name: idefics3.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in llama4_images.MODELS:
        yield name, lambda name=name: llama4_images.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in pixtral.MODELS:
        yield name, lambda name=name: pixtral.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in lfm2_vl.MODELS:
        yield name, lambda name=name: lfm2_vl.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in budget.MODELS:
        yield name, lambda name=name: budget.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in mmproj_images.FILES:
        yield name, lambda name=name: mmproj_images.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in mmproj_audio.FILES:
        yield name, lambda name=name: mmproj_audio.make(name, ROOT / "models" / name, tokenizer, SEED)
    for name in encoders.MODELS:
        yield name, lambda name=name: encoders.make(name, ROOT / "models" / name, SEED)
    for name in encoder_files.MODELS:
        yield name, lambda name=name: encoder_files.make(name, ROOT / "models" / name, SEED)
    for name in nomic_moe.NAMES:
        yield name, lambda name=name: nomic_moe.make(name, ROOT / "models" / name, SEED)
    for name in reranker.NAMES:
        yield name, lambda name=name: reranker.make(name, ROOT / "models" / name, tokenizer, SEED)
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
