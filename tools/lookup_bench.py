#!/usr/bin/env python3
"""Drafts looked up in the text against none: two servers of one model, one with --prompt-lookup-num-tokens, asked in turn.

    python3 tools/lookup_bench.py MODEL [--tokens N] [--rounds N] [--output-tokens N] [--streams N ...] [-- FLAGS FOR BOTH SERVERS]

Three texts of benches/opticks.txt: `quoted`, a passage and then its beginning once more, which the model goes on to repeat; `prose`, a
passage to go on from; `drawn`, the same at temperature 1. Prints tokens a second, prompts included, the ratio of pairs of rounds, and
how many drafts a token were checked and right. Ends with an error if an answer is not the same from both. PLIMSOLL names the binary.
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

from mtp_bench import PORT, server, show

TEXT = (Path(__file__).resolve().parent.parent / "benches/opticks.txt").read_text()
PASSAGE = 900


def request(kind: str, number: int, tokens: int) -> dict:
    """The number-th request of a kind; no two share a passage."""
    start = number % (len(TEXT) // PASSAGE) * PASSAGE
    passage = TEXT[start:start + PASSAGE]
    prompt = f"{passage}\n\nThe same once more:\n\n{passage[:100]}" if kind == "quoted" else passage[:200]
    sampling = {"temperature": 1.0, "seed": number} if kind == "drawn" else {"temperature": 0}
    return {"model": "default", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **sampling}


def ask(port: int, body: dict) -> dict:
    """A completion."""
    to = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(to, timeout=600) as answer:
        return json.load(answer)


def round_of(port: int, bodies: list[dict]) -> tuple[float, list[dict]]:
    """All of them at once: tokens a second, and the answers."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda body: ask(port, body), bodies))
        seconds = time.monotonic() - began
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds, answers


def compare(kind: str, streams: int, rounds: int, tokens: int, first: int) -> str:
    """A row of the table."""
    rates, drafted, accepted, said = ([], []), 0, 0, 0
    for number in range(rounds):
        bodies = [request(kind, first + number * streams + i, tokens) for i in range(streams)]
        (plain, expected), (drafting, answers) = (round_of(PORT + i, bodies) for i in range(2))
        texts = [[answer["choices"][0]["text"] for answer in all_of] for all_of in (expected, answers)]
        if texts[0] != texts[1]:
            raise SystemExit(f"{kind}: the answers differ")
        rates[0].append(plain)
        rates[1].append(drafting)
        for answer in answers:
            speculation = answer["usage"].get("speculation", {})
            drafted += speculation.get("drafted", 0)
            accepted += speculation.get("accepted", 0)
            said += answer["usage"]["completion_tokens"]
    ratios = [drafting / plain for plain, drafting in zip(*rates)]
    cells = [*(f"{statistics.median(rate):.0f}" for rate in rates), f"**{show(ratios, 2)}**"]
    return f"| {kind} | {streams} | " + " | ".join([*cells, f"{drafted / said:.2f}", f"{accepted / said:.2f}"]) + " |"


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:end]), words[end + 1:]
    drafting = [*flags, "--prompt-lookup-num-tokens", str(args.tokens)]
    print("| text | streams | plain tok/s | drafting tok/s | ratio of pairs | drafted a token | right |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with server(args.model, PORT, flags), server(args.model, PORT + 1, drafting):
        first = 0
        for kind in ("quoted", "prose", "drawn"):
            for streams in args.streams:
                print(compare(kind, streams, args.rounds, args.output_tokens, first), flush=True)
                first += args.rounds * streams


if __name__ == "__main__":
    main()
