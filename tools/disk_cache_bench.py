#!/usr/bin/env python3
"""Times the prefix cache on disk of one model: the first token after a restart against a cold start, and decoding with it against without.

    tools/disk_cache_bench.py --program target/release/plimsoll --model smollm2 --tokens 7000 --rounds 5

Each round of the first part starts three servers over one directory: one with an empty cache, one after it, and one after the
directory's pages were dropped from memory (posix_fadvise), so that the disk itself is read. The second part runs two servers side
by side that take turns; the ratio is that of each pair. Only the standard library is needed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


class Server:
    """A server of one model, ended with the block."""

    def __init__(self, args, flags):
        command = [args.program, "serve", args.model, "--port", "0", *args.flags, *flags]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = self.process.stdout.readline()
        match = re.search(r"(http://[^ ]+)/v1", ready)
        if not match:
            self.log.seek(0)
            sys.exit(f"the server did not become ready: {self.log.read()}")
        self.url = match[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    def processor_seconds(self):
        """What all its threads have used of the processor: neighbours on a shared machine are not in it."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, prompt, tokens):
        """The seconds that an answer takes, its text, and its prompt tokens that were in the cache."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        answer = self.ask("/v1/completions", body)
        seconds = time.monotonic() - began
        details = answer["usage"].get("prompt_tokens_details") or {}
        return seconds, answer["choices"][0]["text"], details.get("cached_tokens", 0)


def prompt_of(tokens, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(100, 20_000) for _ in range(tokens)]


def drop_from_memory(directory):
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def first_tokens(args, scratch):
    ratios = {"restart": [], "restart, files not in memory": []}
    for number in range(args.rounds):
        directory = os.path.join(scratch, f"first-{number}")
        flags, prompt = ["--cache-dir", directory], prompt_of(args.tokens, number)
        with Server(args, flags) as server:
            cold, expected, _ = server.complete(prompt, 1)
        print(f"round {number}: cold {cold:.2f} s, {args.tokens / cold:.0f} tokens/s computed", flush=True)
        for name in ratios:
            if "not in memory" in name:
                drop_from_memory(directory)
            with Server(args, flags) as server:
                seconds, text, cached = server.complete(prompt, 1)
                disk = server.ask("/v1/cache")["disk"]
            assert text == expected, "another answer"
            ratios[name].append(cold / seconds)
            print(f"  {name}: {seconds:.3f} s, {cached} tokens found, {disk['read_bytes'] / 2**20:.0f} MiB read at "
                  f"{disk['read_bytes_per_second'] / 2**20:.0f} MiB/s, {cold / seconds:.1f} x sooner", flush=True)
        shutil.rmtree(directory)
    for name, each in ratios.items():
        print(f"first token, {name}: {statistics.median(each):.1f} x sooner (median; least {min(each):.1f})")


def decoding(args, scratch):
    ratios, work = [], []
    with Server(args, []) as off, Server(args, ["--cache-dir", os.path.join(scratch, "decode")]) as on:
        for server in (off, on):
            server.complete(prompt_of(32, 999), 8)
        for number in range(args.rounds):
            took, used = {}, {}
            order = [(off, "off"), (on, "on")]
            # Another prompt each round, so that pages are written meanwhile. The order changes.
            for server, name in order if number % 2 == 0 else reversed(order):
                before = server.processor_seconds()
                took[name] = server.complete(prompt_of(32, 1000 + number), args.decode_tokens)[0]
                used[name] = server.processor_seconds() - before
            ratios.append(took["off"] / took["on"])
            work.append(used["off"] / used["on"])
            rate = args.decode_tokens / took["on"]
            print(f"round {number}: {rate:.1f} tokens/s with the cache on disk, {ratios[-1]:.3f} x of without; "
                  f"{used['on']:.2f} and {used['off']:.2f} s of the processor", flush=True)
        disk = on.ask("/v1/cache")["disk"]
    print(f"decoding: {statistics.median(ratios):.3f} x of without (median of {len(ratios)} pairs, "
          f"{min(ratios):.3f} to {max(ratios):.3f}); {disk['written_bytes'] / 2**20:.1f} MiB written meanwhile")
    print(f"decoding, by the processor's time: {statistics.median(work):.3f} x of without "
          f"({min(work):.3f} to {max(work):.3f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/plimsoll")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of the long prompt")
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["first", "decode"], help="only this part")
    parser.add_argument("--dir", help="where the caches go [default: a temporary directory]")
    parser.add_argument("flags", nargs="*", help="more flags of `plimsoll serve`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        if args.part != "decode":
            first_tokens(args, scratch)
        if args.part != "first":
            decoding(args, scratch)


if __name__ == "__main__":
    main()
