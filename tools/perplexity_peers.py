#!/usr/bin/env python3
"""The other sides of benches/quality.md, scored by the rule of perplexity.py, every token of them kept for its --compare.

    perplexity_peers.py transformers TEXT FILE.gguf --save FILE              float32 arithmetic on the dequantized weights: the reference
    perplexity_peers.py llama TEXT FILE.gguf --save FILE [-- FLAGS]          llama-perplexity, which must be in PATH; FLAGS are its own

The first needs torch, transformers 5.19, gguf and accelerate, the second numpy: vLLM's environment of benches/README.md has them.
"""

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from perplexity import Scores, first_scored, perplexity, save, text_of, windows


def transformers_scores(text: str, file: Path, context: int, count: int | None) -> Scores:
    """The reference."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    ).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids, bare = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    cut = windows(ids, None if ids == bare else ids[0], context)[:count]
    logprobs: list[float] = []
    best: list[int] = []
    for number, window in enumerate(cut, 1):
        given = torch.tensor([window])
        with torch.inference_mode():
            hidden = model.model(given).last_hidden_state[0, first_scored(context) - 1:-1]
            logits = model.lm_head(hidden).double()
        targets = given[0, first_scored(context):]
        logprobs += logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        best += logits.argmax(-1).tolist()
        print(f"[{number}/{len(cut)}] {perplexity(logprobs):.4f}", file=sys.stderr, flush=True)
    return Scores("transformers, float32", context, ids[:context * len(cut)], logprobs, best, perplexity(logprobs))


def llama_scores(path: Path, file: Path, context: int, count: int | None, flags: list[str]) -> Scores:
    """llama-perplexity, and what it writes for others to compare with: 16 bits for every log-probability of the vocabulary.

    A step is at most 16 / 65535, exact enough for single tokens. What lies more than 16 below the best is written as 16 below it: such
    a token's value is unknown. The perplexity is the one it prints.
    """
    end, start = os.pipe()
    words = ["llama-perplexity", "-m", file, "-f", path, "-c", context, "--save-all-logits", f"/dev/fd/{start}", *flags]
    words += [] if count is None else ["--chunks", count]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, pass_fds=[start]) as run:
            os.close(start)
            with open(end, "rb") as stream:
                ids, logprobs, best = read_logits(stream, context)
        log.seek(0)
        said = log.read()
    final = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
    if run.returncode != 0 or not final:
        raise SystemExit(f"llama-perplexity ended with {run.returncode}:\n{said[-2000:]}")
    return Scores(f"llama.cpp {' '.join(flags)}".strip(), context, ids, logprobs, best, float(final[1]))


def read_logits(stream: BinaryIO, context: int) -> tuple[list[int], list[float | None], list[int]]:
    """Ids, their log-probabilities and the best ones of what llama-perplexity writes, as far as it goes: who dies says why elsewhere."""
    head = stream.read(20)
    if len(head) < 20:
        return [], [], []
    said, vocabulary, count = struct.unpack("<8x3i", head)
    assert head.startswith(b"_logits_") and said == context
    ids = np.frombuffer(stream.read(4 * count * context), "<i4").reshape(count, context)
    # A step and the least value as two floats, and a code for every id; to an even number.
    first, width = first_scored(context), 4 + 2 * ((vocabulary + 1) // 2)
    logprobs: list[float | None] = []
    best: list[int] = []
    for window in ids:
        block = stream.read(2 * width * (context - first))
        if len(block) < 2 * width * (context - first):
            break
        rows = np.frombuffer(block, "<u2").reshape(-1, width)
        step, least = np.ascontiguousarray(rows[:, :4]).view("<f4").T
        codes = rows[:, 4:4 + vocabulary]
        chosen = codes[np.arange(len(codes)), window[first:]]
        logprobs += [value if code > 0 else None for code, value in zip(chosen, (step * chosen + least).tolist())]
        best += codes.argmax(-1).tolist()
    return ids.flatten().tolist(), logprobs, best


def main() -> None:
    """Scores by one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["transformers", "llama"])
    parser.add_argument("text", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--save", type=Path)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:end]), words[end + 1:]
    if args.peer == "llama":
        scores = llama_scores(args.text, args.file, args.context, args.windows, flags)
    else:
        scores = transformers_scores(text_of(args.text), args.file, args.context, args.windows)
    save(scores, args.save)


if __name__ == "__main__":
    main()
