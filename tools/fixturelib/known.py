"""Checkpoints whose draft head's acceptance is known: weights set by hand, so that the next token is a fixed permutation of
the current one and the multi-token-prediction head predicts it for some tokens and not for others.

Every token's embedding is a code word of +1 and -1 in 32 dimensions, no two closer than an inner product of MAX_INNER. The row
of lm_head for `next[t]` is twice the code of t, so that the logit of the right token leads by 36 and more: greedy and sampled
choices are the same. Layers are random but quiet; they move every state and every logit a little and never a choice.

The head's `fc` passes the code of the token it is given: it predicts `next` of it ("always"); the negative of the code, which
is nearest to any code but its own ("never"); or the code and, for tokens whose code begins with -1, much more of the code of
WITNESS, so that it predicts `next[WITNESS]` for those ("half").

reference.json: `next[t]` for every token, `wrong`: the tokens after which the head's prediction is not `next`.
Ordinary tokens form one cycle (t + 101 mod 381), so that no end-of-sequence token comes up.
"""

import json
import math

import numpy as np
import torch

from . import checkpoint, hybrid, models, reference
from .tokenizer import SPECIALS, VOCAB_SIZE

MODELS = ("mtp-always", "mtp-half", "mtp-never")
SEED = 20
PLAIN = VOCAB_SIZE - len(SPECIALS)
STEP = 101
MAX_INNER = 14
WITNESS = 7
QUIET = 0.03
RAW = {
    **hybrid.MODELS["qwen3.5"],
    "full_attention_interval": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def following() -> list[int]:
    """next[t] of every token."""
    assert math.gcd(STEP, PLAIN) == 1
    specials = [PLAIN + (i + 1) % len(SPECIALS) for i in range(len(SPECIALS))]
    return [(t + STEP) % PLAIN for t in range(PLAIN)] + specials


def codes() -> np.ndarray:
    """A code word a token; the first element says whether "half" predicts right after it, the second is always +1."""
    rng = np.random.default_rng(SEED)
    words: list[np.ndarray] = []
    while len(words) < VOCAB_SIZE:
        word = rng.choice([-1.0, 1.0], size=32).astype(np.float32)
        word[1] = 1.0
        if len(words) == WITNESS:
            word[0] = 1.0
        if all(abs(float(word @ other)) <= MAX_INNER for other in words):
            words.append(word)
    return np.stack(words)


def fc(name: str, words: np.ndarray) -> np.ndarray:
    """The left half of the head's `fc`, which sees the embedding."""
    eye = np.eye(32, dtype=np.float32)
    if name == "mtp-always":
        return eye
    if name == "mtp-never":
        return -eye
    mark = np.zeros(32, dtype=np.float32)
    mark[0], mark[1] = -4, 4
    return eye + np.outer(words[WITNESS], mark)


def quiet(module: torch.nn.Module) -> None:
    """Layers that hardly speak, norms that do not scale."""
    for name, parameter in module.named_parameters():
        owner = name.split(".")[-2]
        if owner in ("out_proj", "o_proj", "down_proj"):
            parameter.mul_(QUIET)
        elif "norm" in owner and "linear_attn" not in name:
            parameter.zero_()
        parameter.copy_(parameter.to(torch.bfloat16).float())


@torch.no_grad()
def make(name: str, folder, tokenizer) -> None:
    """One checkpoint, checked: every choice of model and head, over a walk through all tokens."""
    words, after = codes(), following()
    main = models.build({k: v for k, v in RAW.items() if k != "wrap"})
    head = hybrid.MtpHead(RAW, main).eval()
    for module, seed in ((main, SEED), (head, SEED + 1)):
        hybrid.fill(module, RAW, seed)
        quiet(module)
    main.model.embed_tokens.weight.copy_(torch.from_numpy(words))
    order = np.empty_like(words)
    order[after] = 2 * words
    main.lm_head.weight.copy_(torch.from_numpy(order))
    head.fc.weight[:, :32] = torch.from_numpy(fc(name, words))
    head.fc.weight[:, 32:] *= QUIET
    head.fc.weight.copy_(head.fc.weight.to(torch.bfloat16).float())

    wrong = {
        "mtp-always": [],
        "mtp-half": [t for t in range(VOCAB_SIZE) if words[t, 0] < 0],
        "mtp-never": list(range(VOCAB_SIZE)),
    }[name]
    for start in (0, 5, 200):
        walk = [start]
        while len(walk) < PLAIN + 1:
            walk.append(after[walk[-1]])
        ids = walk if start else [int(i) for i in np.random.default_rng(1).permutation(PLAIN)]
        expected = [after[t] for t in ids]
        hidden = main.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        best = main.lm_head(hidden).topk(2, dim=-1)
        assert best.indices[:, 0].tolist() == expected
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > 30
        out = head(main, expected, hidden)
        best = main.lm_head(out).topk(2, dim=-1)
        right = [guess == after[token] for guess, token in zip(best.indices[:, 0].tolist(), expected)]
        assert right == [token not in wrong for token in expected]
        if name != "mtp-never":
            assert float((best.values[:, 0] - best.values[:, 1]).min()) > 20
        # Fed back its own output, the head is as right as before: it goes by the token alone.
        again = main.lm_head(head(main, expected, out)).argmax(dim=-1).tolist()
        assert right == [guess == after[token] for guess, token in zip(again, expected)]

    checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, hybrid.outer_config(RAW), hybrid.DTYPE, tokenizer)
    checkpoint.write_tensors(folder, hybrid.on_disk(RAW, main, head))
    loaded = checkpoint.reload(folder)
    assert torch.equal(loaded.lm_head.weight, main.lm_head.weight)
    text = json.dumps({"model": name, "next": after, "wrong": wrong}, separators=(",", ":"))
    (folder / "reference.json").write_text(text + "\n")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   {len(wrong)} of {VOCAB_SIZE} tokens predicted wrongly", flush=True)
