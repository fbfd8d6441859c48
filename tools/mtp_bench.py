#!/usr/bin/env python3
"""Speculation against none: two servers of one checkpoint, one with --enable-mtp, asked in turn by `plimsoll bench`.

    python3 tools/mtp_bench.py FOLDER [--rounds N] [--output-tokens N] [--threads N] [--streams N ...] [-- FLAGS FOR THE DRAFTING SERVER]

FOLDER: see make_mtp_bench.py. Prints what the plan says and a table of ratios, each of a round of the one to the round of the other
right after it: the machine may change its mind between pairs. PLIMSOLL names the binary (target/release/plimsoll).
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BINARY = os.environ.get("PLIMSOLL", str(Path(__file__).resolve().parent.parent / "target/release/plimsoll"))
BUDGET = ["--memory-budget", "3GiB", "--max-req-total-len", "1024"]
PORT = 8917
READY_S = 120


def get(port: int, path: str) -> str:
    """A page of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def server(folder: str, port: int, flags: list[str]):
    """A server that is ready; ended on leaving."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [BINARY, "serve", folder, "--port", str(port), *BUDGET, *flags], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + READY_S
            while True:
                try:
                    get(port, "/health")
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise SystemExit(log.read().decode()[-2000:]) from None
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


def drafts(port: int) -> tuple[int, int]:
    """Drafted and accepted tokens since the server's start."""
    text = get(port, "/metrics")
    counts = [re.search(rf"^plimsoll_speculation_{name}_tokens\S* (\d+)", text, re.M) for name in ("drafted", "accepted")]
    return int(counts[0][1]), int(counts[1][1])


def plan(folder: str, flags: list[str]) -> dict:
    """Work of a step, as planned."""
    out = subprocess.run([BINARY, "plan", folder, "--json", *BUDGET, *flags], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)["work"]


def show(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:end]), words[end + 1:]
    plain = ["--threads", args.threads]
    drafting = [*plain, "--enable-mtp", *flags]
    for name, work in plan(args.folder, drafting).items():
        sizes = ", ".join(f"{key[:-6]} {work[key] / 1e6:.1f} MB" for key in ("weight_bytes", "kv_bytes", "state_bytes"))
        print(f"{name}: {work['flops'] / 1e9:.3f} GFLOP, {sizes}")
    print("\n| streams | plain tok/s | drafting tok/s | ratio of pairs | acceptance | drafts per token |", flush=True)
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with server(args.folder, PORT, plain), server(args.folder, PORT + 1, drafting), tempfile.TemporaryDirectory() as folder:
        for streams in args.streams:
            report = Path(folder) / "report.json"
            before = drafts(PORT + 1)
            urls = [word for i in range(2) for word in ("--url", f"http://127.0.0.1:{PORT + i}")]
            load = ["--concurrency", streams, "--requests", streams, "--prompt-tokens", 8, "--output-tokens", args.output_tokens]
            command = [BINARY, "bench", *urls, *load, "--rounds", args.rounds, "--json", report]
            subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
            both = [[r["output_tokens_per_s"] for r in s["rounds"]] for s in json.loads(report.read_text())["servers"]]
            tokens = sum(r["output_tokens"] for r in json.loads(report.read_text())["servers"][1]["rounds"])
            ratios = [b / a for a, b in zip(*both)]
            drafted, accepted = (now - then for now, then in zip(drafts(PORT + 1), before))
            cells = [show(both[0], 1), show(both[1], 1), show(ratios, 2), f"{accepted / max(drafted, 1):.3f}", f"{drafted / tokens:.2f}"]
            print(f"| {streams} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
