#!/usr/bin/env python3
"""OpenVINO GenAI behind OpenAI's completions, as little of a server as `plimsoll bench` needs: for comparing only.

    python tools/openvino_peer.py FILE.gguf --port 8404 [--cache-gib 1] [--batch-tokens 256] [--prefix-cache]

OpenVINO GenAI comes as a library. Here one thread steps its ContinuousBatchingPipeline and writes what a step gave straight to
the sockets; another accepts requests. Text is looked up, not detokenized. What this thread does between steps while requests
run is the wrapper's, not OpenVINO's: GET /overhead tells both times, in seconds since the start, and tools/bench_peers.py takes
the wrapper's share off. Nothing runs, and nothing spins, between requests.
"""

import argparse
import json
import queue
import socket
import threading
import time
from pathlib import Path

import openvino_genai as genai


class Peer:
    """The pipeline, the requests it works on, and the time spent inside and outside of it."""

    def __init__(self, args: argparse.Namespace):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = args.cache_gib
        scheduler.max_num_batched_tokens = args.batch_tokens
        scheduler.enable_prefix_caching = args.prefix_cache
        self.model = Path(args.file).stem
        self.pipeline = genai.ContinuousBatchingPipeline(args.file, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.words = {i: w.decode(errors="replace") or "?" for w, i in self.tokenizer.get_vocab().items()}
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.running: dict[int, Request] = {}
        self.inside_s = self.outside_s = 0.0

    def admit(self, number: int, conn: socket.socket, body: dict) -> None:
        """Gives a request to the pipeline."""
        config = genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens", 16))
        config.ignore_eos = bool(body.get("ignore_eos", False))
        config.do_sample = False
        config.apply_chat_template = False
        ids = self.tokenizer.encode(body["prompt"]).input_ids
        handle = self.pipeline.add_request(number, ids, config)
        self.running[number] = Request(conn, handle, int(ids.shape[1]), bool(body.get("stream")))

    def work(self) -> None:
        """Steps for ever; sleeps while there is nothing to do."""
        number = 0
        while True:
            begun = time.perf_counter()
            idle = not self.running
            while idle or not self.waiting.empty():
                conn, body = self.waiting.get()
                if idle:
                    begun, idle = time.perf_counter(), False
                number += 1
                self.admit(number, conn, body)
            stepped = time.perf_counter()
            self.pipeline.step()
            ended = time.perf_counter()
            for key in [key for key, request in self.running.items() if request.advance(self.words)]:
                del self.running[key]
            self.inside_s += ended - stepped
            self.outside_s += stepped - begun + time.perf_counter() - ended


class Request:
    """One request under way."""

    def __init__(self, conn: socket.socket, handle, prompt_tokens: int, stream: bool):
        self.conn, self.handle, self.stream = conn, handle, stream
        self.usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
        self.text = ""
        if stream:
            self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    def send(self, data: bytes) -> None:
        """Writes; who has gone away is not told."""
        try:
            self.conn.sendall(data)
        except OSError:
            self.handle.stop()

    def event(self, value: dict) -> None:
        """Writes one event."""
        self.send(b"data: " + json.dumps(value).encode() + b"\n\n")

    def advance(self, words: dict[int, str]) -> bool:
        """Passes on what the last step gave; whether that was the end."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                ids = output.generated_ids
                self.usage["completion_tokens"] += len(ids)
                text = "".join(words.get(i, "?") for i in ids)
                if self.stream:
                    self.event({"choices": [{"index": 0, "text": text}]})
                else:
                    self.text += text
        if self.handle.get_status() == genai.GenerationStatus.RUNNING:
            return False
        if self.stream:
            self.event({"choices": [], "usage": self.usage})
            self.send(b"data: [DONE]\n\n")
            self.conn.close()
        else:
            answer(self.conn, {"choices": [{"index": 0, "text": self.text}], "usage": self.usage})
        return True


def answer(conn: socket.socket, value: dict) -> None:
    """A whole JSON answer, and the end of the connection."""
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with conn:
        conn.sendall(head.encode() + body)


def accept(listener: socket.socket, peer: Peer) -> None:
    """Reads requests and hands them to the thread that steps."""
    while True:
        conn, _ = listener.accept()
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with conn.makefile("rb") as reader:
            path, length = reader.readline().split()[1], 0
            while (line := reader.readline().strip()):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = reader.read(length)
        if path.endswith(b"/completions"):
            peer.waiting.put((conn, json.loads(body)))
        elif path.endswith(b"/overhead"):
            answer(conn, {"inside_s": peer.inside_s, "outside_s": peer.outside_s})
        else:
            answer(conn, {"data": [{"id": peer.model}]})


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8404)
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--prefix-cache", action="store_true")
    args = parser.parse_args()
    peer = Peer(args)
    listener = socket.create_server(("127.0.0.1", args.port), backlog=128)
    threading.Thread(target=accept, args=(listener, peer), daemon=True).start()
    peer.work()


if __name__ == "__main__":
    main()
