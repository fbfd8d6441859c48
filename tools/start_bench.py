#!/usr/bin/env python3
"""Starts of one model in turn: without --packed-cache, into an empty one, and from a filled one.

    python3 tools/start_bench.py MODEL [--rounds N] [--decode N] [-- FLAGS FOR ALL SERVERS]

Prints the median and the range of: the seconds from `exec` to the first token, the seconds that packing or mapping the weights took
(`plimsoll_weights_load_seconds`), and the tokens a second of one later stream of N tokens. One start reads the files before that.
PLIMSOLL names the binary.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench_peers import show
from peer_servers import BINARY, THREADS, Server, ask

PORT = 8421


def one(words: list[str], tokens: int) -> tuple[float, float, float]:
    """One start: seconds to the first token, of loading, and tokens a second."""
    server = Server("plimsoll", (words, {}), PORT)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60).read().decode()
        load = float(re.search(r"^plimsoll_weights_load_seconds(?:{.*?})? (\S+)$", page, re.M)[1])
        body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        begun = time.monotonic()
        done = ask(PORT, "/v1/completions", body)
        return server.first_token_s, load, done["usage"]["completion_tokens"] / (time.monotonic() - begun)
    finally:
        server.stop()


def main() -> int:
    """Starts and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=64)
    own, flags = (sys.argv[1:], []) if "--" not in sys.argv else (sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:])
    args = parser.parse_args(own)
    common = [BINARY, "serve", args.model, "--port", str(PORT), "--threads", THREADS, *flags]
    seen: dict[str, list[tuple[float, float, float]]] = {"without": [], "into": [], "from": []}
    folder = Path(tempfile.mkdtemp())
    try:
        one(common, 1)
        for number in range(args.rounds):
            shutil.rmtree(folder / "packed", ignore_errors=True)
            cached = [*common, "--packed-cache", str(folder / "packed")]
            starts = [("without", common), ("into", cached), ("from", cached)]
            # The start without a cache is the first in one round and the last in the next.
            for name, words in starts if number % 2 else starts[1:] + starts[:1]:
                seen[name].append(one(words, args.decode))
        packed = sum(file.stat().st_size for file in (folder / "packed").glob("*.file"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.model}: {packed / 2**20:.0f} MiB packed")
    for name, rounds in seen.items():
        first, load, rate = (show([values[at] for values in rounds]) for at in range(3))
        print(f"{name:8} first token {first} s, weights {load} s, {rate} tokens/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
