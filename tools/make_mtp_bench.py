#!/usr/bin/env python3
"""Makes a Qwen3.5-shaped checkpoint of real sizes whose draft head's acceptance is known, to measure what speculation is worth.

    /somewhere/bin/python tools/make_mtp_bench.py FOLDER                # 4 of 5 single drafts are accepted
    /somewhere/bin/python tools/make_mtp_bench.py FOLDER --never        # none is

200 million parameters in bfloat16 (0.4 GB): layers as in the smallest Qwen3.5 (hidden 1024, 16 recurrent heads with states of
128 x 128, three recurrent layers for each attention layer), eight of them, and an output matrix that is the same share of a step
as in models of 4 billion parameters. The arithmetic is real, the words are not: see fixturelib/known.py for how the weights say
the next token. The tokenizer is the fixtures'; ids behind its 384 never come up.

The head must be wrong after fewer than one token in five: a draft that was accepted moves on by two tokens, so that a wrong one
behind it may never be asked for. The head is wrong after every ninth token of the cycle. A walk that comes there loses one draft,
moves on by one and then wins four drafts of two tokens each, which brings it to the next: 4 of 5, and a walk that starts elsewhere
joins it within nine tokens.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib import checkpoint, hybrid, known, models  # noqa: E402
from fixturelib import tokenizer as tok  # noqa: E402

VOCAB = 16384
BLOCKS = 2
PERIOD = 9
# A walk through all ordinary tokens passes the seam, which is not a multiple of the period, once.
WRONG = {p * known.STEP % known.PLAIN for p in range(0, known.PLAIN - PERIOD + 1, PERIOD)}
RAW = {
    **known.RAW,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "layer_types": hybrid.LAYER_TYPES * BLOCKS,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": len(hybrid.LAYER_TYPES) * BLOCKS,
    "num_key_value_heads": 2,
    "rope_parameters": {**hybrid.ROPE_35, "mrope_section": [11, 11, 10]},
    "vocab_size": VOCAB,
}


def codes() -> np.ndarray:
    """A code word a token; the first element is -1 where the head is to be wrong, the second is always +1."""
    words = np.random.default_rng(known.SEED).choice([-1.0, 1.0], size=(VOCAB, RAW["hidden_size"])).astype(np.float32)
    words[:, 0] = [-1.0 if t in WRONG else 1.0 for t in range(VOCAB)]
    words[:, 1] = 1.0
    return words


def fc(words: np.ndarray, never: bool) -> np.ndarray:
    """The left half of the head's `fc`: the code of its token, and much more of the witness's where it is to be wrong."""
    eye = np.eye(RAW["hidden_size"], dtype=np.float32)
    if never:
        return -eye
    mark = np.zeros(RAW["hidden_size"], dtype=np.float32)
    mark[0], mark[1] = -4, 4
    return eye + np.outer(words[known.WITNESS], mark)


def accepted(after: list[int], wrong: set[int], checks: int) -> float:
    """The share of single drafts that a walk of so many checks accepts."""
    token, hits = 0, 0
    for _ in range(checks):
        right = token not in wrong
        hits += right
        token = after[after[token]] if right else after[token]
    return hits / checks


@torch.no_grad()
def make(folder: Path, never: bool) -> None:
    """The checkpoint, its choices checked over a walk through all ordinary tokens."""
    size = RAW["hidden_size"]
    words, after = codes(), [*known.following(), *range(tok.VOCAB_SIZE, VOCAB)]
    main = models.build({k: v for k, v in RAW.items() if k != "wrap"})
    head = hybrid.MtpHead(RAW, main).eval()
    for module, seed in ((main, known.SEED), (head, known.SEED + 1)):
        hybrid.fill(module, RAW, seed)
        known.quiet(module)
    main.model.embed_tokens.weight.copy_(torch.from_numpy(words))
    order = np.empty_like(words)
    order[after] = 2 * words
    main.lm_head.weight.copy_(torch.from_numpy(order))
    head.fc.weight[:, :size] = torch.from_numpy(fc(words, never))
    head.fc.weight[:, size:] *= known.QUIET
    head.fc.weight.copy_(head.fc.weight.to(torch.bfloat16).float())

    wrong = set(range(known.PLAIN)) if never else WRONG
    walk = [0]
    while len(walk) < known.PLAIN:
        walk.append(after[walk[-1]])
    expected = [after[t] for t in walk]
    hidden = main.model(input_ids=torch.tensor([walk]), use_cache=False).last_hidden_state[0]
    assert main.lm_head(hidden).argmax(dim=-1).tolist() == expected
    guesses = main.lm_head(head(main, expected, hidden)).argmax(dim=-1).tolist()
    assert [guess == after[token] for guess, token in zip(guesses, expected)] == [token not in wrong for token in expected]

    checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, hybrid.outer_config(RAW), hybrid.DTYPE, tok.build())
    checkpoint.write_tensors(folder, hybrid.on_disk(RAW, main, head))
    count = sum(p.numel() for module in (main, head) for p in module.parameters())
    share = accepted(after, wrong, 10_000)
    print(json.dumps({"folder": str(folder), "parameters": count, "accepted": share}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--never", action="store_true", help="a head that is always wrong")
    args = parser.parse_args()
    make(args.folder, args.never)
