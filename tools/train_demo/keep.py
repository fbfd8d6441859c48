#!/usr/bin/env python3
"""Keeps held-out pictures that running demo servers read rightly, all of them, with their questions and answers, for the repository's own tests:
`keep.py http://127.0.0.1:8000 http://127.0.0.1:8001 ../../tests/fixtures/demo`, one of them with `--compute-dtype f32`: what is right by a
coin's flip (log-probabilities -0.695 and -0.697) is no question."""

import base64
import json
import sys
from pathlib import Path

import numpy as np

import evaluate
import pictures

EACH = 4


def main(bases: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng, atlas, kept = np.random.default_rng(evaluate.SEED + 1), pictures.Atlas(evaluate.SEED), []
    for task in ("read", "name", "count"):
        found = 0
        while found < EACH:
            messages, answer, _ = evaluate.asked(rng, task, atlas)
            asked = [evaluate.ask(base, "demo", messages, False) for base in bases]
            said = {one["choices"][0]["message"]["content"].strip() for one in asked}
            picture, question = messages[-1]["content"]
            if said != {answer} or any(answer == other["answer"] for other in kept):
                continue
            name = f"{task}{found}.png"
            (folder / name).write_bytes(base64.b64decode(picture["image_url"]["url"].split(",")[1]))
            kept.append({"file": name, "question": question["text"], "answer": answer})
            found += 1
    (folder / "questions.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:-1], Path(sys.argv[-1]))
