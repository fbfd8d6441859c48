#!/usr/bin/env python3
"""Perplexity of a text by a running server, by llama-perplexity's rule, so that the figures of both can be compared: benches/quality.md.

    python3 tools/perplexity.py TEXT --url URL [--context 512] [--windows N] [--save FILE]
    python3 tools/perplexity.py --compare REFERENCE FILE ...

The rule: the text without its last line end becomes ids as a whole, and these are cut into windows of `context` ids; what is left over
does not count. Where the tokenizer begins every text with an id, that id stands in place of each window's first. In each window the ids
behind position context / 2 are scored, given all before them. Needs /tokenize, and `echo` with `logprobs` at /v1/completions.
"""

import argparse
import json
import math
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

REQUEST_S = 600


@dataclass
class Scores:
    """What a model made of a text."""

    source: str
    context: int
    ids: list[int]  # of all windows, as the tokenizer gave them
    logprobs: list[float | None]  # natural, of every scored id; none where the source does not say
    best: list[int]  # the id that the model thinks most likely there
    perplexity: float


def text_of(path: Path) -> str:
    """The text as llama-perplexity reads it."""
    return path.read_text(encoding="utf-8").removesuffix("\n")


def windows(ids: list[int], begin: int | None, context: int) -> list[list[int]]:
    """The windows that a model is given.

    >>> windows([1, 2, 3, 4, 5, 6, 7], None, 3)
    [[1, 2, 3], [4, 5, 6]]
    >>> windows([9, 2, 3, 4, 5, 6, 7], 9, 3)
    [[9, 2, 3], [9, 5, 6]]
    """
    cut = [ids[at:at + context] for at in range(0, len(ids) - context + 1, context)]
    return cut if begin is None else [[begin, *window[1:]] for window in cut]


def first_scored(context: int) -> int:
    """The position of the first scored id of a window.

    >>> first_scored(512), len(range(first_scored(512), 512))
    (257, 255)
    """
    return context // 2 + 1


def perplexity(logprobs: list[float]) -> float:
    """e to the mean of the negative log-probabilities.

    >>> round(perplexity([math.log(0.5), math.log(0.125)]), 6)
    4.0
    """
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def ask(url: str, path: str, body: dict) -> dict:
    """What a server answers."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}{path}: {error.code} {error.read().decode(errors='replace')[:500]}") from None


def tokenized(url: str, text: str) -> tuple[list[int], int | None]:
    """A text's ids, and the id that the tokenizer begins every text with."""
    ids, bare = (ask(url, "/tokenize", {"prompt": text, "add_special_tokens": special})["tokens"] for special in (True, False))
    if ids == bare:
        return ids, None
    if ids[1:] != bare:
        raise SystemExit("the tokenizer adds more to a text than one id before it, for which llama-perplexity has no rule")
    return ids, ids[0]


def score_window(url: str, window: list[int]) -> list[tuple[float, int]]:
    """Log-probability and the model's own choice for every scored id of a window."""
    body = {"prompt": window, "max_tokens": 0, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    report = ask(url, "/v1/completions", body)["choices"][0]["logprobs"]
    if report["tokens"] != [f"token_id:{token}" for token in window]:
        raise SystemExit("the server scored other ids than it was given")
    rest = slice(first_scored(len(window)), None)
    best = (int(max(top, key=top.get).removeprefix("token_id:")) for top in report["top_logprobs"][rest])
    return list(zip(report["token_logprobs"][rest], best, strict=True))


def score(url: str, text: str, context: int = 512, count: int | None = None) -> Scores:
    """What the model behind this address makes of a text, or of its first `count` windows."""
    ids, begin = tokenized(url, text)
    cut = windows(ids, begin, context)[:count]
    if not cut:
        raise SystemExit(f"the text has {len(ids)} tokens, a window {context}")
    pairs = [pair for window in cut for pair in score_window(url, window)]
    logprobs = [logprob for logprob, _ in pairs]
    return Scores(url, context, ids[:context * len(cut)], logprobs, [best for _, best in pairs], perplexity(logprobs))


def save(scores: Scores, path: Path | None) -> None:
    """Says what came out, and keeps it."""
    windows_done = len(scores.ids) // scores.context
    print(f"{scores.source}: perplexity {scores.perplexity:.4f}, {len(scores.logprobs)} tokens of {windows_done} windows of {scores.context}")
    if path:
        path.write_text(json.dumps(asdict(scores)) + "\n")


def compared(reference: Scores, other: Scores) -> str:
    """A line of the table.

    >>> one = Scores("one", 8, list(range(8)), [-1.0, -2.0, -9.0], [5, 6, 7], 4.0)
    >>> compared(one, Scores("two", 8, list(range(8)), [-1.5, -1.75, None], [5, 7, 7], 4.1))
    '| two | 4.1000 | +2.500 % | +0.1250 | 0.3750 | 0.5000 | 0.5000 | 66.67 % |'
    """
    if (reference.ids, reference.context) != (other.ids, other.context):
        raise SystemExit(f"{reference.source} and {other.source} scored different ids")
    # Positive: the text surprises the other one more.
    both = zip(reference.logprobs, other.logprobs, strict=True)
    gaps = [a - b for a, b in both if a is not None and b is not None]
    sizes = sorted(map(abs, gaps))
    same = sum(a == b for a, b in zip(reference.best, other.best, strict=True)) / len(reference.best)
    return (
        f"| {other.source} | {other.perplexity:.4f} | {100 * (other.perplexity / reference.perplexity - 1):+.3f} % | "
        f"{math.fsum(gaps) / len(gaps):+.4f} | {math.fsum(sizes) / len(sizes):.4f} | {sizes[int(0.99 * len(sizes))]:.4f} | "
        f"{sizes[-1]:.4f} | {100 * same:.2f} % |"
    )


def compare(files: list[Path]) -> None:
    """Prints a table: every file against the first."""
    reference, *others = (Scores(**json.loads(file.read_text())) for file in files)
    print("| source | perplexity | against the first | mean gap, nats | mean size | p99 | largest | same best token |\n" + "| --- " * 8 + "|")
    print("\n".join(compared(reference, other) for other in [reference, *others]))


def main() -> None:
    """Scores or compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--url", help="of the server, without /v1")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, help="so many only")
    parser.add_argument("--save", type=Path, help="keep every log-probability, for --compare")
    parser.add_argument("--name", help="for the table [default: the URL]")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.compare:
        return compare(args.compare)
    if not (args.text and args.url):
        parser.error("give a text and --url, or --compare")
    scores = score(args.url.rstrip("/"), text_of(args.text), args.context, args.windows)
    scores.source = args.name or scores.source
    save(scores, args.save)


if __name__ == "__main__":
    main()
