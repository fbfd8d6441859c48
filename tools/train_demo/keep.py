#!/usr/bin/env python3
"""Keeps held-out pictures that a running demo server reads rightly, with their questions and answers, for the repository's own tests:
`keep.py http://127.0.0.1:8000 ../../tests/fixtures/demo`."""

import base64
import json
import sys
from pathlib import Path

import numpy as np

import evaluate
import pictures

EACH = 4


def main(base: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng, atlas, kept = np.random.default_rng(evaluate.SEED + 1), pictures.Atlas(evaluate.SEED), []
    for task in ("read", "name", "count"):
        found = 0
        while found < EACH:
            messages, answer, _ = evaluate.asked(rng, task, atlas)
            said = evaluate.ask(base, "demo", messages, False)["choices"][0]["message"]["content"]
            picture, question = messages[-1]["content"]
            if said.strip() != answer or any(answer == other["answer"] for other in kept):
                continue
            name = f"{task}{found}.png"
            (folder / name).write_bytes(base64.b64decode(picture["image_url"]["url"].split(",")[1]))
            kept.append({"file": name, "question": question["text"], "answer": answer})
            found += 1
    (folder / "questions.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
