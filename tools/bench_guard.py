#!/usr/bin/env python3
"""The speed of this tree beside that of an earlier revision, in turn on this machine: fails where a ratio is below 0.95.

    python3 tools/bench_guard.py [REVISION] [--model MODEL] [--rounds N] [--least RATIO] [--new BINARY] [--old BINARY]

REVISION (the last tag, if there is one) is built in a worktree of its own, below `target/guard`. Both servers stand ready; one is
asked at a time: a round asks them in the order a b b a, the next one b a a b. The median ratio of all rounds counts, and a line
below the limit is measured a second time before it counts. A round in which other work took the cores (`--others`) is not counted:
beside it one binary is up to seven times as fast as itself. Without enough quiet rounds there is no verdict, and the exit code is 1.
Only ratios of one run say something: machines differ, and their neighbours too. This belongs to the slow tier.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench_client import Others, round_of
from peer_servers import ROOT, THREADS, Server

PORTS = {"new": 8411, "old": 8412}
TARGET = ROOT / "target/guard"
TRIES = 3  # Rounds that are tried for each that is to count, at most.
# Name, what is asked, and the number of the answer that counts: (streams, prompt tokens, output tokens), field, whether more is better.
LINES = {
    "decode, one stream": ((1, 58, 64), "output_tokens_per_s", True),
    "decode, eight streams": ((8, 58, 64), "output_tokens_per_s", True),
    "prompt of 512": ((1, 512, 2), "ttft_p50_s", False),
    "eight prompts of 512": ((8, 512, 2), "ttft_p99_s", False),
}


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build(tree: Path, target: Path) -> Path:
    """The release binary of a tree."""
    env = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(["cargo", "build", "--release", "-p", "plimsoll", "--bin", "plimsoll"], cwd=tree, env=env, check=True)
    return target / "release/plimsoll"


def build_revision(revision: str) -> Path:
    """The release binary of a revision, which is checked out for as long as it is built."""
    tree = TARGET / "tree"
    TARGET.mkdir(parents=True, exist_ok=True)
    git("worktree", "add", "--force", "--detach", str(tree), revision)
    try:
        return build(tree, TARGET / "old")
    finally:
        git("worktree", "remove", "--force", str(tree))


def ask(client: Path, server: Server, line: str, seed: int) -> float:
    """One round: the number that counts, so that more is better."""
    (streams, prompt, output), field, more = LINES[line]
    load = {"concurrency": streams, "requests": max(streams, 2), "prompt_tokens": prompt, "output_tokens": output}
    done = round_of(client, server, seed, **load)
    return done[field] if more else 1 / done[field]


def pair(asked: Callable[[str, int], float], seed: int, number: int) -> float:
    """New over old in one round: both are asked twice, in the order a b b a, so that neither gains by being first or last."""
    first, second = ("old", "new") if number % 2 else ("new", "old")
    seen = {"old": 1.0, "new": 1.0}
    for at, name in enumerate((first, second, second, first)):
        seen[name] *= asked(name, seed + at // 2)
    return (seen["new"] / seen["old"]) ** 0.5


def ratios(client: Path, servers: dict[str, Server], line: str, args: argparse.Namespace, seed: int) -> list[float]:
    """The ratios of `--rounds` rounds. A round beside other work does not count and is repeated."""
    kept: list[float] = []
    for number in range(args.rounds * TRIES):
        others = Others(list(servers.values()))
        one = pair(lambda name, seed: ask(client, servers[name], line, seed), seed + 2 * number, number)
        taken = others.cores()
        if taken <= args.others:
            kept.append(one)
        else:
            print(f"{line}: {one:.3f} is not counted, others took {taken:.2f} cores", flush=True)
        if len(kept) == args.rounds:
            return kept
    raise SystemExit(f"{line}: {len(kept)} of {args.rounds} rounds were quiet: repeat it on a machine without other work, or raise --others")


def main() -> int:
    """Builds, measures, judges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="the last tag by default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=float, default=0.1, help="cores that other work may take in a round that counts (0.1)")
    parser.add_argument("--least", type=float, default=0.95)
    parser.add_argument("--new", type=Path, help="a binary of this tree, in place of a build")
    parser.add_argument("--old", type=Path, help="a binary of the earlier revision, in place of a build")
    args = parser.parse_args()
    revision = args.revision
    if not (revision or args.old):
        if not (revision := git("tag", "--sort=-creatordate").partition("\n")[0]):
            parser.error("this repository has no tag: name a revision, or an --old binary")
    binaries = {"old": args.old or build_revision(revision), "new": args.new or build(ROOT, TARGET / "new")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    servers: dict[str, Server] = {}
    slower = []
    try:
        for name, binary in binaries.items():
            room = ["--max-total-token-num", "8192", "--max-req-total-len", "1024"]
            words = [str(binary), "serve", args.model, "--port", str(PORTS[name]), "--threads", THREADS, *room]
            servers[name] = Server(name, (words, {}), PORTS[name])
        for index, line in enumerate(LINES):
            ask(binaries["new"], servers["new"], line, 1)  # Both have served such a request once before it counts.
            ask(binaries["new"], servers["old"], line, 1)
            for attempt in (1, 2):
                all_of_them = ratios(binaries["new"], servers, line, args, 1000 * index + 100 * attempt)
                middle = statistics.median(all_of_them)
                print(f"{line}: {middle:.3f} ({min(all_of_them):.3f}–{max(all_of_them):.3f})", flush=True)
                if middle >= args.least:
                    break
            else:
                slower.append(line)
    finally:
        for server in servers.values():
            server.stop()
    if slower:
        print(f"slower than {revision or args.old} by more than the limit of {args.least}: {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
