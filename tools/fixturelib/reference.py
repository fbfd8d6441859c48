"""Runs transformers in float32 with eager attention and writes down what it says.

A reference.json holds, per prompt: `ids`; `logprobs` (of ids[i] given ids[..i], null for i = 0); `top5` ([id, logprob]
after the whole prompt); `greedy` (32 ids; end-of-sequence is not a stop, and none occurs) with `greedy_logprobs`; and
`margin`, the smallest lead in logits of the best over the second-best token on the greedy path. Prompts are drawn until
that lead is at least MARGIN, so a correct implementation has no excuse for another token. `hidden` holds the residual
stream of the last position of one short prompt, layer by layer, to find the layer where an implementation goes astray.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from . import text
from . import tokenizer as tok

LENGTHS = (1, 5, 17, 33, 70, 150)
GREEDY = 32
MARGIN = 0.1
DISTINCT = 6


def short(x: float) -> float:
    """Seven significant digits: finer than any two float32 implementations agree."""
    return float(f"{float(x):.7g}")


@torch.no_grad()
def logits_of(model, ids: list[int]) -> torch.Tensor:
    """Logits of every position, [len, vocab], from one forward pass without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy_of(model, ids: list[int], count: int) -> tuple[list[int], float]:
    """The greedy continuation with a cache, and the smallest lead of a chosen token over the next best.

    Gives up (a shorter continuation) at the first lead below MARGIN: nobody wants the rest.
    """
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    chosen, margin = [], float("inf")
    while True:
        best = out.logits[0, -1].float().topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        chosen.append(int(best.indices[0]))
        if len(chosen) == count or margin < MARGIN:
            return chosen, margin
        out = model(input_ids=torch.tensor([chosen[-1:]]), past_key_values=out.past_key_values, use_cache=True)


def record(model, ids: list[int], greedy: list[int], margin: float) -> dict:
    """One prompt's entry; also checks that a single pass over everything agrees with the cached run."""
    logits = logits_of(model, ids + greedy[:-1])
    lp = torch.log_softmax(logits, dim=-1)
    again = logits[len(ids) - 1:].argmax(dim=-1).tolist()
    assert again == greedy, "cached and uncached greedy differ"
    top = lp[len(ids) - 1].topk(5)
    return {
        "ids": ids,
        "logprobs": [None] + [short(lp[i - 1, ids[i]]) for i in range(1, len(ids))],
        "top5": [[int(i), short(v)] for v, i in zip(top.values, top.indices)],
        "greedy": greedy,
        "greedy_logprobs": [short(lp[len(ids) - 1 + i, t]) for i, t in enumerate(greedy)],
        "margin": short(margin),
    }


def candidates(length: int, tokenizer, rng):
    """Prompts of a length without end: pieces of the corpus, or arbitrary ids where that tests more."""
    corpus = tokenizer.encode(text.CORPUS, add_special_tokens=False).ids
    plain = tok.VOCAB_SIZE - len(tok.SPECIALS)
    while True:
        if length in (1, 33, 64):
            yield [int(i) for i in rng.integers(0, plain, size=length)]
        else:
            start = int(rng.integers(0, len(corpus) - length))
            yield corpus[start:start + length]


def messages() -> list[str]:
    """Things a user may say: the prepared ones, then any two of them together."""
    single = text.CHAT_MESSAGES
    return single + [f"{a} {b}" for a in single for b in single if a != b]


def acceptable(greedy: list[int], margin: float) -> bool:
    """No near-tie, no special token (it would stop a server), and not just one token over and over."""
    plain = tok.VOCAB_SIZE - len(tok.SPECIALS)
    return margin >= MARGIN and max(greedy) < plain and len(set(greedy)) >= DISTINCT


def search(model, prompts, what: str, tries: int = 1500) -> dict:
    """The first candidate whose continuation is acceptable, recorded."""
    for _, ids in zip(range(tries), prompts):
        greedy, margin = greedy_of(model, ids, GREEDY)
        if acceptable(greedy, margin):
            return record(model, ids, greedy, margin)
    raise RuntimeError(f"no prompt with a clear greedy path: {what}")


@torch.no_grad()
def hidden_of(model, ids: list[int]) -> dict:
    """Residual stream at the last position: after the embedding, after each layer, after the final norm."""
    taken: list[list[float]] = []

    def take(_module, _inputs, output):
        value = output[0] if isinstance(output, tuple) else output
        taken.append([short(v) for v in value[0, -1]])

    inner = getattr(model.model, "language_model", model.model)
    named = dict(inner.named_children())
    first = named.get("embed_tokens") or named["embeddings"]
    last = next(named[name] for name in ("norm", "embedding_norm", "norm_f", "final_layernorm", "hyper_connection_mixer") if name in named)
    modules = [first, *inner.layers, last]
    hooks = [m.register_forward_hook(take) for m in modules]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"ids": ids, "embedding": taken[0], "layers": taken[1:-1], "final_norm": taken[-1]}


def make(
    model, tokenizer, name: str, seed: int, lengths=LENGTHS, extra: dict | None = None, draw=candidates,
) -> dict:
    """The whole reference of one model; `draw` says what prompts of a length there are."""
    model.eval()
    rng = np.random.default_rng(seed)
    prompts = [search(model, draw(n, tokenizer, rng), f"{name}, {n} tokens") for n in lengths]

    rendered = {m: tok.render([{"role": "user", "content": m}]) for m in messages()}
    encoded = {m: tokenizer.encode(r, add_special_tokens=False).ids for m, r in rendered.items()}
    chat = search(model, encoded.values(), f"{name}, chat")
    message = next(m for m, ids in encoded.items() if ids == chat["ids"])
    chat = {
        "messages": [{"role": "user", "content": message}],
        **chat,
        "text": tokenizer.decode(chat["greedy"], skip_special_tokens=True),
    }
    five = next(p["ids"] for p in prompts if len(p["ids"]) >= 5)
    return {
        "model": name,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager",
        "margin": min(p["margin"] for p in [*prompts, chat]),
        **(extra or {}),
        "prompts": prompts,
        "chat": chat,
        "hidden": hidden_of(model, five[:5]),
    }


def dump(value: dict, path: Path, limit: int = 60_000) -> None:
    """Writes one top-level key (and one list element) a line: small, and still readable in a diff."""
    dense = dict(separators=(",", ":"), ensure_ascii=False)
    lines = []
    for key, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            body = "[\n" + ",\n".join("  " + json.dumps(e, **dense) for e in item) + "\n ]"
        else:
            body = json.dumps(item, **dense)
        lines.append(f" {json.dumps(key)}: {body}")
    out = "{\n" + ",\n".join(lines) + "\n}\n"
    assert len(out.encode()) <= limit, f"{path.name}: {len(out.encode())} bytes"
    path.write_text(out)
