#!/usr/bin/env python3
"""Plimsoll beside its peers on this machine, same weights, same prompts, in turn: the comparison of benches/README.md.

    python3 tools/bench_peers.py DIR [--model NAME] [--rounds N] [--only NAME ...] [--rows NAME ...] [--json FILE] [--shares]
                                 [-- FLAGS]

DIR holds what benches/README.md builds. All servers of a row stand ready at once; one is asked at a time, and idle ones must not
take processor time. Each round asks every server once, beginning with another one each time; a ratio is of two neighbours in
one round. FLAGS go to `plimsoll serve`. PLIMSOLL names the binary (target/release/plimsoll), BENCH_CLIENT the one whose `bench` asks (the same).
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench_client import round_of
from peer_servers import BINARY, MODELS, PORTS, THREADS, Row, Server, command

CLIENT = os.environ.get("BENCH_CLIENT", BINARY)
SWEEP_BYTES = 1 << 30
ROWS_OF_STEP = 512  # of the plan's largest step: the default of --batch-max-tokens
IDLE_SHARE_MAX = 0.05  # of a core, which a server that nobody asks may take
SLOW = {"vllm"}  # takes a minute to start: it is started once, not every round, for a row that is about starting
BEHIND = ("step_tok_s",)
DECODE, PREFILL = ("out_tok_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms"), ("prefill_tok_s",)
ROWS = {
    "decode-1": Row(1, 58, 128, DECODE, requests=3),
    "decode-4": Row(4, 58, 128, DECODE),
    "decode-16": Row(16, 58, 128, DECODE),
    "decode-32": Row(32, 58, 128, DECODE),
    "prompt-450": Row(1, 450, 4, PREFILL, requests=3),
    "prompt-512": Row(1, 512, 4, PREFILL, requests=3),
    "prompt-2048": Row(1, 2048, 4, PREFILL),
    "prompt-8192": Row(1, 8192, 4, PREFILL),
    "behind-8k": Row(1, 8192, 64, BEHIND),
    "behind-32k": Row(1, 32000, 64, BEHIND),
    "prompts-8x512": Row(8, 512, 4, PREFILL),
    "prompts-8x2048": Row(8, 2048, 4, PREFILL),
    "mixed-8x496": Row(8, 496, 64, ("prompt_tok_s", "out_tok_s")),
    "prefix-1": Row(1, 2112, 16, ("wall_ms",), shared=2048),
    "prefix-8": Row(8, 2112, 16, ("wall_ms", "ttft_p50_ms", "ttft_p99_ms"), shared=2048),
    "intruder-8k": Row(4, 58, 2600, ("beside_p99_ms", "beside_over_quiet", "intruder_ttft_ms"), intruder=7900),
    "memory-1": Row(1, 58, 128, ("peak_rss_mib",), fresh=True),
    "memory-32": Row(32, 58, 128, ("peak_rss_mib",), fresh=True),
    "start": Row(1, 58, 1, ("first_token_ms",), fresh=True),
}
# Of these more is better; of all others less.
MORE = {"out_tok_s", "prefill_tok_s", "prompt_tok_s", "step_tok_s"}


def metrics(row: Row, done: dict, share: float) -> dict[str, float]:
    """What a round says, with only `share` of the time counted."""
    # Prompts that begin together are worked off when the last has its first token.
    slowest = done["ttft_p99_s"] if row.streams > 1 else done["ttft_p50_s"]
    prompt_tokens = done["prompt_tokens"] / (row.requests or 1)
    values = {f"{name}_ms": done[f"{name}_s"] * 1e3 * share for name in ("wall", "ttft_p50", "ttft_p99", "gap_p99")}
    values["out_tok_s"] = done["output_tokens_per_s"] / share
    # Between two pieces of text there is one token, or several where drafts are accepted: no row here has drafts.
    values["step_tok_s"] = 1 / (done["gap_p50_s"] * share) if done["gap_p50_s"] else 0.0
    values["prompt_tok_s"] = done["prompt_tokens_per_s"] / share
    values["prefill_tok_s"] = prompt_tokens / slowest / share
    if window := done["intruder"]:
        values["beside_p99_ms"] = window["gap_p99_s"] * 1e3 * share
        values["beside_over_quiet"] = window["gap_p99_s"] / window["quiet_gap_p50_s"]
        values["intruder_ttft_ms"] = window["ttft_s"] * 1e3 * share
    return {name: values[name] for name in row.metrics}


def bench(server: Server, row: Row, seed: int) -> dict[str, float]:
    """One round against one server."""
    before = server.wrapper_times()
    load = {
        "concurrency": row.streams, "requests": row.requests or row.streams, "prompt_tokens": row.prompt,
        "output_tokens": row.output, "shared_prefix": row.shared, **({"intruder_tokens": row.intruder} if row.intruder else {}),
    }
    done = round_of(CLIENT, server, seed, **load)
    inside, outside = (now - then for now, then in zip(server.wrapper_times(), before))
    return metrics(row, done, inside / (inside + outside) if server.name == "openvino" else 1.0)


def one(name: str, row: Row, seed: int, fleet: dict[str, Server], args: argparse.Namespace) -> dict[str, float]:
    """What one server does with one round of one row."""
    if not row.fresh:
        return bench(fleet[name], row, seed)
    if name in fleet:
        fleet.pop(name).stop()
    server = fleet[name] = Server(name, command(name, row, args))
    if "first_token_ms" in row.metrics:
        return {"first_token_ms": server.first_token_s * 1e3}
    bench(server, replace(row, metrics=()), seed)
    return {"peak_rss_mib": server.peak_rss_mib()}


def require_idle(fleet: dict[str, Server]) -> None:
    """Nobody may take processor time from who is asked."""
    time.sleep(2)
    before = {name: server.cpu_s() for name, server in fleet.items()}
    time.sleep(2)
    for name, server in fleet.items():
        share = (server.cpu_s() - before[name]) / 2
        if share > IDLE_SHARE_MAX:
            raise SystemExit(f"{name} takes {share:.2f} of a core although nobody asks it")


def show(values: list[float]) -> str:
    """Median and range."""
    if not values:
        return "–"
    middle = statistics.median(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def table(row_name: str, names: list[str], rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    """Lines of a row: every metric of every server, and Plimsoll's ratio to the best peer (above 1: Plimsoll is ahead)."""
    lines = []
    for metric in ROWS[row_name].metrics:
        seen = {name: [r[name][metric] for r in rounds if name in r] for name in names}
        medians = {name: statistics.median(values) for name, values in seen.items() if values and name != "plimsoll"}
        cells, ratio = [show(seen[name]) for name in names], "–"
        if medians and seen.get("plimsoll"):
            best = (max if metric in MORE else min)(medians, key=medians.get)
            pairs = [(r["plimsoll"][metric], r[best][metric]) for r in rounds if "plimsoll" in r and best in r]
            ratio = f"**{show([a / b if metric in MORE else b / a for a, b in pairs])}** {best}"
        lines.append(f"| {row_name} | {metric} | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def read_gb_s() -> float:
    """Bytes that all cores read of memory a second, the best of five: what decoding is held against."""
    import threading

    import numpy as np  # Not needed for anything else.

    parts = [np.ones(SWEEP_BYTES // 8 // int(THREADS), np.uint64) for _ in range(int(THREADS))]
    best = 0.0
    for _ in range(5):
        threads = [threading.Thread(target=part.max) for part in parts]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(part.nbytes for part in parts) / (time.monotonic() - begun) / 1e9)
    return best


def peaks_gop_s(flags: list[str]) -> dict[str, float]:
    """Billions of operations a second that the processor's product instructions reach on all cores, by arithmetic: `cargo bench … peaks`."""
    isa = [value for flag, value in zip(flags, flags[1:]) if flag == "--isa"]
    env = {**os.environ, **({"ISA": isa[0]} if isa else {})}
    words = ["cargo", "bench", "-q", "-p", "plimsoll-kernels", "--bench", "kernels", "--", "peaks", "--color", "never"]
    subprocess.run([*words, "--list"], cwd=ROOT, env=env, check=True, capture_output=True)  # Builds it.
    running = [subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(int(THREADS))]
    sums: dict[str, float] = {}
    for process in running:
        said, _ = process.communicate()
        # A name, and the first column of the line below it: the fastest.
        for name, rate, unit in re.findall(r"(int8|auto|float32) .*\n\D*([\d.]+) ([GT])item/s", said):
            sums[name] = sums.get(name, 0.0) + float(rate) * {"G": 1, "T": 1000}[unit]
    if not sums:
        raise SystemExit(f"cargo bench printed no rate of peaks:\n{said}")
    return sums


def shares(report: dict[str, list], args: argparse.Namespace) -> list[str]:
    """The shares of the machine that Plimsoll's rows of one stream take: weights of memory's rate, operations of the products' peak."""
    model = args.peers / "models" / MODELS[args.model][0]
    words = [BINARY, "plan", str(model), "--json", "--max-total-token-num", "65536", *args.flags]
    work = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["work"]
    decode, prefill = work["one_decode_row_at_position_127"], work["largest_prefill_step"]
    gb_s, peaks = read_gb_s(), peaks_gop_s(args.flags)
    arithmetic = "int8" if "int8" in args.flags else "auto"
    said = ", ".join(f"{name} {rate:.0f}" for name, rate in peaks.items())
    lines = [f"memory reads {gb_s:.1f} GB/s (numpy), products in registers reach, in billions of operations a second: {said}"]
    for row_name, rounds in report.items():
        row = ROWS[row_name]
        for metric in {"out_tok_s", "step_tok_s", "prefill_tok_s"} & set(row.metrics) if row.streams == 1 else ():
            seen = [done["plimsoll"][metric] for done in rounds if "plimsoll" in done]
            if not seen:
                continue
            rate = statistics.median(seen)
            of = rate * decode["weight_bytes"] / 1e9 / gb_s if metric != "prefill_tok_s" else rate * prefill["flops"] / ROWS_OF_STEP / 1e9 / peaks[arithmetic]
            of_what = f"the peak of {arithmetic}" if metric == "prefill_tok_s" else "read bandwidth"
            lines.append(f"{row_name}: {rate:.1f} {metric}, {of:.0%} of {of_what}")
    return lines


def compare(row_name: str, fleet: dict[str, Server], args: argparse.Namespace) -> list[dict]:
    """All rounds of a row."""
    row, rounds = ROWS[row_name], []
    for name in args.only:
        started = command(name, row, args)
        if name in fleet and fleet[name].started != started:
            fleet.pop(name).stop()
        if name not in fleet and not row.fresh:
            fleet[name] = Server(name, started)
    require_idle(fleet)
    for number in range(args.rounds):
        rounds.append({})
        first = number % len(args.only)
        for name in args.only[first:] + args.only[:first]:
            if row.fresh and name in SLOW and number > 0:
                continue
            try:
                # No two rounds share a prompt, so that no cache helps where none is asked about.
                rounds[-1][name] = one(name, row, list(ROWS).index(row_name) * 1000 + number, fleet, args)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{row_name}, round {number + 1}, {name}: {error}", file=sys.stderr, flush=True)
    return rounds


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", type=Path)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PORTS, default=list(PORTS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shares", action="store_true", help="print the shares of memory bandwidth and of the peak of products that Plimsoll reaches (needs numpy)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end], argparse.Namespace(flags=words[end + 1:]))
    if args.model.endswith("-shape") and {"vllm", "openvino"} & set(args.only):
        parser.error(f"--model {args.model} is a GGUF file alone: give --only plimsoll llama")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    fleet: dict[str, Server] = {}
    report: dict[str, list] = {}
    print(f"| row | metric | {' | '.join(args.only)} | Plimsoll to the best |\n" + "| --- " * (3 + len(args.only)) + "|", flush=True)
    try:
        for row_name in args.rows:
            rounds = report[row_name] = compare(row_name, fleet, args)
            print("\n".join(table(row_name, args.only, rounds)), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"names": args.only, "flags": args.flags, "rows": report}, indent=1) + "\n")
    finally:
        for server in fleet.values():
            server.stop()
    if args.shares:
        # With no server left that could take processor time.
        print("\n".join(shares(report, args)))


if __name__ == "__main__":
    main()
