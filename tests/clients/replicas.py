#!/usr/bin/env python3
"""Replicas of one model behind a gateway, under load, while one is killed and one is drained.

Every group of requests shares a long beginning. What is measured: how much of the prompts was found in prefix caches, compared with one
server that sees the same requests; and what became of the requests that were under way when a server went. Every answer is compared
with the one that a server gave alone. Everything listens on the loopback address and is gone at the end.

    replicas.py --plimsoll BINARY --model DIRECTORY --gateway smg|vllm-router|dynamo --replicas N

With --control the same load goes through the same gateway once more, which then takes the servers in turn, undisturbed: what looking for
prefixes is worth.
"""

import argparse
import concurrent.futures
import ctypes
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
DEPLOY = HERE.parent.parent / "deploy"
WORKER = DEPLOY / "dynamo/plimsoll_worker.py"
# A server's pool, and what one request may come to.
POOL_TOKENS, CONTEXT = 16384, 2048
# A client asks again this often when it is told that a server was lost.
TRIES = 5
LIBC = ctypes.CDLL(None)


def dies_with_us():
    """The kernel ends this child when this script ends, however it ends."""
    LIBC.prctl(1, signal.SIGKILL)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Child:
    """A process whose output is kept."""

    def __init__(self, name, command, folder, env=None):
        self.name, self.log = name, folder / f"{name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=dies_with_us, env=env
            )

    def said(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, condition, what, within=120):
        end = time.monotonic() + within
        while not condition():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended while waiting for {what}:\n{self.said()[-4000:]}")
            if time.monotonic() > end:
                raise SystemExit(f"{self.name}: no {what} within {within} s:\n{self.said()[-4000:]}")
            time.sleep(0.1)

    def end(self, number=signal.SIGTERM, within=30):
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(within)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def ask(port, method, path, body=None, timeout=60):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def well(port, path):
    try:
        return ask(port, "GET", path, timeout=5)[0] == 200
    except OSError:
        return False


class Replica:
    """A Plimsoll server, and its Dynamo worker where there is one."""

    def __init__(self, world, number):
        self.world, self.number, self.port, self.worker = world, number, free_port(), None
        self.start()

    def start(self):
        flags = ["--port", str(self.port), "--threads", "1", "--max-total-token-num", str(POOL_TOKENS)]
        flags += ["--max-req-total-len", str(CONTEXT), "--served-model-name", "model", "--kv-events"]
        command = [self.world.plimsoll, "serve", self.world.model, *flags]
        self.server = Child(f"server-{self.number}", command, self.world.folder)
        self.server.wait_for(lambda: well(self.port, "/ready"), "readiness")
        if self.world.gateway == "dynamo":
            command = [sys.executable, WORKER, "--url", f"http://127.0.0.1:{self.port}", "--model-path", self.world.model]
            before = self.worker.said().count("ready: ") if self.worker else 0
            self.worker = Child(f"worker-{self.number}", command, self.world.folder, self.world.env)
            self.worker.wait_for(lambda: self.worker.said().count("ready: ") > before, "registration")

    def again(self):
        """The same server in the same place, as whoever runs them would start it again."""
        if self.worker:
            self.worker.end()
        self.start()

    def end(self):
        for child in (self.worker, self.server):
            if child:
                child.end()


class World:
    """The replicas and what stands before them."""

    def __init__(self, args, folder, gateway, replicas, in_turn=False):
        self.plimsoll, self.model, self.gateway, self.folder = args.plimsoll, args.model, gateway, folder
        self.front, self.in_turn = None, in_turn
        folder.mkdir()
        self.env = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        self.replicas = []
        try:
            for number in range(replicas):
                self.replicas.append(Replica(self, number))
            self.port = self.replicas[0].port if gateway is None else self.open_gateway()
        except BaseException:
            self.end()
            raise

    def open_gateway(self):
        port, metrics = free_port(), free_port()
        urls = [f"http://127.0.0.1:{replica.port}" for replica in self.replicas]
        env = self.env
        match self.gateway:
            case "smg" | "vllm-router":
                # As an operator starts it, with what only a test wants.
                command = ["sh", DEPLOY / f"router/{self.gateway}.sh", str(port), *urls, "--"]
                command += ["--worker-startup-check-interval", "1"]
                command += ["--shutdown-grace-period-secs", "1"] if self.gateway == "smg" else []
                command += ["--policy", "round_robin"] if self.in_turn else []
                # Where this interpreter's packages have their programs, and those beside it.
                beside = [pathlib.Path(sys.executable).parent]
                beside += [pathlib.Path(entry) / "bin" for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
                path = os.pathsep.join([*map(str, beside), os.environ.get("PATH", "")])
                env = {**env, "PATH": path, "METRICS_PORT": str(metrics)}
            case "dynamo":
                command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
                command += ["--router-mode", "round-robin" if self.in_turn else "kv", "--migration-limit", "3"]
                # A page of a prompt costs a CPU more than one that is only read.
                command += ["--router-prefill-load-scale", "4"]
        self.front = Child("gateway", command, self.folder, env)
        probe = {"model": "model", "prompt": "a", "max_tokens": 1}

        def answers():
            try:
                return ask(port, "POST", "/v1/completions", probe)[0] == 200
            except OSError:
                return False

        self.front.wait_for(answers, "an answer through it")
        return port

    def end(self):
        if self.front:
            self.front.end(within=15)
        for replica in self.replicas:
            replica.end()


def prompt(group, turn):
    """About 700 tokens that a group shares, and about 50 of its own."""
    words = " ".join(f"g{group}w{(group * 7919 + i * 104729) % 1000}" for i in range(100))
    return f"{words} turn {turn} of {group}: " + " ".join(f"{(turn * 31 + i) % 97}" for i in range(10))


def body(group, turn, tokens):
    """Every other answer is a stream."""
    asked = {"model": "model", "prompt": prompt(group, turn), "max_tokens": tokens}
    asked |= {"temperature": 0, "ignore_eos": True, "seed": 1}
    return asked | {"stream": True, "stream_options": {"include_usage": True}} if turn % 2 else asked


def read(text, stream):
    """The text and the usage of an answer; nothing of a stream that has no end."""
    if not stream:
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"]
    events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ConnectionError("a stream was broken off")
    chunks = [json.loads(event) for event in events[:-1]]
    if broken := next((chunk["error"] for chunk in chunks if chunk.get("error")), None):
        raise ConnectionError(f"a stream was broken off: {broken.get('message')}")
    words = "".join(choice.get("text") or "" for chunk in chunks for choice in chunk.get("choices", []))
    return words, next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))


class Load:
    """Clients, each with one group of requests after another."""

    def __init__(self, port, groups, turns, tokens, clients):
        self.port, self.groups, self.turns, self.tokens, self.clients = port, groups, turns, tokens, clients
        self.lock = threading.Lock()
        self.answers, self.troubles, self.lost = {}, [], []
        self.prompt_tokens = self.cached_tokens = self.done = 0
        # Set when there is nothing more to come, whatever the reason.
        self.over = threading.Event()
        # The second half of the groups begins when this is set: a server that starts again may take longer than a whole load.
        self.second_half = threading.Event()

    def turn(self, group, turn):
        for _ in range(TRIES):
            try:
                asked = body(group, turn, self.tokens)
                status, text = ask(self.port, "POST", "/v1/completions", asked)
                if status == 200:
                    words, usage = read(text, "stream" in asked)
                    with self.lock:
                        self.answers[group, turn] = words
                        self.prompt_tokens += usage["prompt_tokens"]
                        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                        self.done += 1
                    return
                trouble = f"{status} {text[:200]!r}"
                if 400 <= status < 500 and status != 429:
                    raise SystemExit(f"refused: {trouble}")
            except (OSError, http.client.HTTPException) as error:
                trouble = f"{type(error).__name__}: {error}"
            with self.lock:
                self.troubles.append(trouble)
            time.sleep(0.2)
        with self.lock:
            self.lost.append((group, turn))

    def group(self, group):
        if group >= self.groups // 2:
            self.second_half.wait()
        try:
            for turn in range(self.turns):
                self.turn(group, turn)
        except BaseException:
            # A load that has failed keeps no thread waiting.
            self.over.set()
            self.second_half.set()
            raise

    def run(self, at_once=True):
        if at_once:
            self.second_half.set()
        try:
            with concurrent.futures.ThreadPoolExecutor(self.clients) as pool:
                list(pool.map(self.group, range(self.groups)))
        finally:
            self.over.set()
        return self

    def ended(self):
        with self.lock:
            return self.done + len(self.lost)

    def hit_rate(self):
        return self.cached_tokens / max(self.prompt_tokens, 1)


def kill_and_drain(world, load):
    """At a third of all requests one server is killed, at two thirds another is drained; with two of them each comes back.

    The second half of the load waits until the first is done, so that requests are left when the second server is drained.
    """
    try:
        return kill_then_drain(world, load)
    finally:
        load.second_half.set()


def kill_then_drain(world, load):
    total, again = load.groups * load.turns, len(world.replicas) == 2

    def reach(part):
        while load.ended() < total * part:
            if load.over.wait(0.02) and load.ended() < total * part:
                raise SystemExit("the load has ended before its time")

    reach(1 / 3)
    killed, drained = world.replicas[0], world.replicas[1]
    lost = at_work(killed)
    killed.server.end(signal.SIGKILL)
    if again:
        killed.again()
    load.second_half.set()
    reach(2 / 3)
    finished = at_work(drained)
    code = drained.server.end(signal.SIGTERM, within=60)
    if again:
        drained.again()
    return lost, finished, code


def told(world):
    """Prompts that servers got past the gateway: of how many it knows where they are, having been told."""
    groups = {1000 + 10 * replica.number + n: replica for replica in world.replicas for n in range(4)}
    for group, replica in groups.items():
        assert ask(replica.port, "POST", "/v1/completions", body(group, 0, 1))[0] == 200
    time.sleep(2)
    answers = [ask(world.port, "POST", "/v1/completions", body(group, 2, 1)) for group in groups]
    usages = [json.loads(text)["usage"] for _, text in answers]
    found = [usage for usage in usages if (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) > 256]
    return f"{len(found)} of {len(groups)}"


def without_a_limit(port):
    """A chat that says nothing of max_tokens: how many tokens it has got, and why it ended."""
    asked = {"model": "model", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    status, text = ask(port, "POST", "/v1/chat/completions", asked, timeout=120)
    assert status == 200, f"{status} {text[:400]!r}"
    answer = json.loads(text)
    return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]


def at_work(replica):
    """Waits until this server has something to do; how many requests."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        running = json.loads(ask(replica.port, "GET", "/v1/loads")[1])["loads"][0]["num_running_reqs"]
        if running:
            return running
        time.sleep(0.01)
    raise SystemExit(f"server {replica.number} has had nothing to do for 30 s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gateway", choices=["smg", "vllm-router", "dynamo"], required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--groups", type=int, default=36)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--keep", help="a directory for logs, instead of one that is removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(args.keep or scratch)
        folder.mkdir(exist_ok=True)
        shape = (args.groups, args.turns, args.tokens, args.clients)
        alone = World(args, folder / "alone", None, 1)
        try:
            whole = without_a_limit(alone.port)
            golden = Load(alone.port, *shape).run()
        finally:
            alone.end()
        world = World(args, folder / "together", args.gateway, args.replicas)
        try:
            known = told(world) if args.gateway == "dynamo" else None
            whole_too = without_a_limit(world.port)
            load, began = Load(world.port, *shape), time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                chaos = pool.submit(kill_and_drain, world, load)
                load.run(at_once=False)
                killed_at_work, drained_at_work, code = chaos.result()
            seconds = time.monotonic() - began
        finally:
            world.end()
        control = None
        if args.control:
            world = World(args, folder / "in-turn", args.gateway, args.replicas, in_turn=True)
            try:
                control = Load(world.port, *shape).run()
            finally:
                world.end()
    wrong = [key for key, text in load.answers.items() if text != golden.answers[key]]
    report = {
        "gateway": args.gateway,
        "replicas": args.replicas,
        "requests": args.groups * args.turns,
        "answered": load.done,
        "lost": len(load.lost),
        "asked again by the client": len(load.troubles),
        "answers that differ": len(wrong),
        "hit rate of one server": round(golden.hit_rate(), 4),
        "hit rate of all": round(load.hit_rate(), 4),
        "share": round(load.hit_rate() / golden.hit_rate(), 4),
        "running when killed": killed_at_work,
        "running when drained": drained_at_work,
        "seconds": round(seconds, 1),
        "exit code of the drained server": code,
        "a chat without a limit": whole_too,
    }
    if known:
        report["prompts found that did not come through it"] = known
        assert len(set(known.split(" of "))) == 1, f"the router was not told: {known}"
    if control:
        report["share when taken in turn"] = round(control.hit_rate() / golden.hit_rate(), 4)
    print(json.dumps(report, indent=1))
    kinds = {re.sub(r"\d{4,}", "N", trouble) for trouble in load.troubles}
    for kind in sorted(kinds)[:10]:
        print("told a client:", kind)
    assert golden.hit_rate() > 0.5 and not golden.lost and not golden.troubles, (golden.hit_rate(), golden.troubles)
    assert load.done == args.groups * args.turns and not load.lost, f"lost: {load.lost}"
    assert whole_too == whole and whole[0] > 16, f"a chat without a limit got {whole_too}, of one server {whole}"
    assert not wrong, f"other answers than one server's: {wrong[:5]}"
    assert code == 0, f"the drained server ended with {code}"
    assert report["share"] >= 0.9, "prefixes are not found where they were computed"
    assert not control or control.hit_rate() < 0.9 * golden.hit_rate(), "this load needs no gateway that looks"
    print("all good")


if __name__ == "__main__":
    main()
