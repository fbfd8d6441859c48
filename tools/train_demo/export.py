#!/usr/bin/env python3
"""Writes a run's model as a Hugging Face checkpoint and checks that transformers, reading it, gives the same logits.

    export.py RUN_FOLDER ../../models/demo --catalogue ../../crates/plimsoll-hub/src/demo.rs
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

import batches
import pictures
import text_tasks
import words
from model import TEXT, VISION, Demo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fixturelib.hybrid import MtpHead  # noqa: E402

FRAMES = VISION["temporal_patch_size"]
KEPT_WHOLE = ("A_log", "linear_attn.norm.weight")
# Square pictures of any size become 64 x 64; the widest kept shapes are 64 x 96.
PIXELS_MIN, PIXELS_MAX = 2048, 6144
LARGEST_DIFFERENCE = 2e-3


def rounded(state: dict) -> dict:
    """The weights as they will be on disk."""
    return {k: v.float() if k.endswith(KEPT_WHOLE) else v.to(torch.bfloat16).float() for k, v in state.items()}


def published(state: dict) -> dict:
    """By the published names, in the published shapes and types."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("patch_embed.proj.weight"):
            patch = VISION["patch_size"]
            tensor = (tensor / FRAMES).view(-1, 3, 1, patch, patch).expand(-1, -1, FRAMES, -1, -1)
        out[name] = tensor.float() if name.endswith(KEPT_WHOLE) else tensor.to(torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in sorted(out.items())}


def write(folder: Path, state: dict, tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words.write(tokenizer, folder)
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end", "im_end", "endoftext")}
    ends = {"eos_token_id": ids["im_end"], "pad_token_id": ids["endoftext"]}
    files = {
        "config.json": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "dtype": "bfloat16",
            "image_token_id": ids["image_pad"],
            "model_type": "qwen3_5",
            "text_config": {**TEXT, **ends},
            "tie_word_embeddings": True,
            "transformers_version": transformers.__version__,
            "video_token_id": ids["video_pad"],
            "vision_config": VISION,
            "vision_end_token_id": ids["vision_end"],
            "vision_start_token_id": ids["vision_start"],
        },
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [ids["im_end"], ids["endoftext"]],
            "pad_token_id": ids["endoftext"],
            "transformers_version": transformers.__version__,
        },
        "preprocessor_config.json": {
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "image_std": [0.5, 0.5, 0.5],
            "merge_size": VISION["spatial_merge_size"],
            "patch_size": VISION["patch_size"],
            "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": PIXELS_MAX, "shortest_edge": PIXELS_MIN},
            "temporal_patch_size": FRAMES,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    save_file(published(state), str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def largest_difference(folder: Path, demo: Demo, tokenizer) -> dict:
    """Logits of transformers on what was written against those of the training's own model."""
    full, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    processor = transformers.Qwen2VLImageProcessor.from_pretrained(folder)
    chats, atlas, rng, worst = words.Chats(tokenizer), pictures.Atlas(3), np.random.default_rng(3), {}
    text = SimpleNamespace(config=full.config.text_config, model=full.model.language_model, lm_head=full.lm_head)
    head = MtpHead({**TEXT}, text).eval()
    head.load_state_dict({k.removeprefix("mtp."): v for k, v in demo.state_dict().items() if k.startswith("mtp.")})
    for size in pictures.PICTURE_SIZES:
        for task in ("read", "two"):
            rows, grids, shots, grid = batches.picture_rows(rng, chats, atlas, 1, size, task)
            batch = batches.collate(chats, rows, grids, shots, grid)
            hidden, _, _ = demo(batch["ids"], batch["places"], batch["pictures"], grid, batch["pads"])
            ours = hidden @ demo.table.T
            seen = processor([Image.fromarray(shot) for shot in shots], return_tensors="pt")
            assert seen["image_grid_thw"].tolist() == [[1, *grid]] * len(shots), (size, seen["image_grid_thw"])
            theirs = full(
                input_ids=batch["ids"], pixel_values=seen["pixel_values"], image_grid_thw=seen["image_grid_thw"],
                mm_token_type_ids=batch["pads"].int(),
            ).logits
            worst[f"{task} {size[0]}x{size[1]}"] = float((ours - theirs)[:, : len(rows[0][0])].abs().max())
    for task in text_tasks.TASKS:
        ids, _ = chats.chat(text_tasks.TASKS[task][0](rng))
        ids, places = torch.tensor([ids]), torch.arange(len(ids)).expand(3, 1, -1)
        hidden, angles, rows = demo(ids, places)
        theirs = full.model(input_ids=ids).last_hidden_state
        worst[task] = float(((hidden - theirs) @ demo.table.T).abs().max())
        drafts = demo.draft(ids, hidden, angles, rows)[0] @ demo.table.T
        reference = head(text, ids[0, 1:].tolist(), theirs[0, :-1]) @ demo.table.T
        worst[f"{task} drafts"] = float((drafts - reference).abs().max())
    return worst


def with_rows(source: str, folder: Path) -> str:
    """The catalogue's Rust with the sizes and sums of these files."""
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        size = f"{len(content):_}" if len(content) >= 10_000 else len(content)
        row = f'beside("{file.name}", {size}, "{hashlib.sha256(content).hexdigest()}")'
        source, found = re.subn(rf'beside\("{re.escape(file.name)}", [0-9_]+, "[0-9a-f]+"\)', row, source)
        assert found == (file.name != "README.md"), file.name
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--catalogue", type=Path, help="the Rust file with the sizes and sums of the files")
    args = parser.parse_args()
    kept = torch.load(args.run / "checkpoint.pt", weights_only=True)
    tokenizer, state = words.of_run(args.run), rounded(kept["model"])
    write(args.folder, state, tokenizer)
    demo = Demo().eval()
    demo.load_state_dict(state)
    worst = largest_difference(args.folder, demo, tokenizer)
    print(json.dumps({"steps": kept["step"], "largest difference of a logit": max(worst.values())}))
    assert max(worst.values()) < LARGEST_DIFFERENCE, worst
    if args.catalogue:
        args.catalogue.write_text(with_rows(args.catalogue.read_text(), args.folder))


if __name__ == "__main__":
    main()
