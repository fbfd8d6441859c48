#!/usr/bin/env python3
"""Reference embeddings of the real all-MiniLM-L6-v2: tests/fixtures/minilm_reference.json.

    python tools/reference_minilm.py DIRECTORY   # of the pulled model: `plimsoll pull minilm`

transformers in float32 with eager attention, one text at a time, the mean over all positions, scaled to length 1: what
sentence-transformers makes of the files beside the model. Per text its `ids` and its `embedding`.
"""

import argparse
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib.reference import dump  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
TEXTS = [
    "A ship that takes on cargo sinks a little with every crate.",
    "Each box that is loaded makes the vessel lie a bit deeper in the water.",
    "The tokenizer splits words it has never seen into smaller pieces.",
    "Où est la bibliothèque? 図書館はどこですか?",
]


@torch.no_grad()
def main() -> None:
    """One model directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    # The file asks for 128 tokens of every text, whatever it has; an embedding is of the text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    texts = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        unit = mean / mean.norm()
        texts.append({"text": text, "ids": ids, "embedding": [float(f"{float(x):.6g}") for x in unit]})
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    dump({"model": "minilm", "made_with": made_with, "texts": texts}, ROOT / "minilm_reference.json")


if __name__ == "__main__":
    main()
