"""The servers that tools/bench_peers.py compares: how each is started for a row, watched, and ended with all it started.

What is sent to them, and what is made of the answers, is not here.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = os.environ.get("PLIMSOLL", str(ROOT / "target/release/plimsoll"))
THREADS = str(len(os.sched_getaffinity(0)))
AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
PORTS = {"plimsoll": 8401, "llama": 8402, "vllm": 8403, "openvino": 8404}
READY_S = 600
# The file, and the folder with the same weights in bfloat16.
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-bf16"),
    "qwen2.5-coder-0.5b": ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-bf16"),
}
# Random weights of real widths, by tools/shape_gguf.py; only servers of GGUF files take them.
SHAPES = ("qwen3.5-35b-a3b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-4b", "llama-3.1-8b")
MODELS |= {f"{name}-shape": (f"{name}-shape.gguf", "") for name in SHAPES}


@dataclass(frozen=True)
class Row:
    """What is sent in a round, and what of it is compared."""

    streams: int
    prompt: int
    output: int
    metrics: tuple[str, ...]
    shared: int = 0
    intruder: int = 0
    requests: int = 0  # One stream is asked so often in a round; more streams all start at once.
    fresh: bool = False  # Every round starts the server anew.


def command(name: str, row: Row, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """How a server is started for a row, and with what environment: why so is said in benches/README.md."""
    peers = args.peers.resolve()
    port, file, folder = str(PORTS[name]), str(peers / "models" / MODELS[args.model][0]), str(peers / MODELS[args.model][1])
    slots = row.streams + (1 if row.intruder else 0)
    lengths = (1024, 4096, 8192, 16384, 65536)
    needed = 8192 if row.intruder else 1024 if row.prompt <= 900 else row.prompt + row.output
    length = next(length for length in lengths if length >= needed)
    if name == "plimsoll":
        room = ["--max-total-token-num", str(slots * length), "--max-req-total-len", str(length)]
        told = AMX and not {"--isa", "--compute-dtype"} & {flag.split("=")[0] for flag in args.flags}
        arithmetic = ["--compute-dtype", "bf16"] if row.streams >= 8 and told else []
        return [BINARY, "serve", file, "--port", port, "--threads", THREADS, *room, *arithmetic, *args.flags], {}
    if name == "llama":
        attention = "off" if row.prompt < 100 and not row.intruder else "on"
        room = ["--parallel", str(slots), "-c", str(slots * length), "--cache-ram", "0", "-fa", attention]
        return [str(peers / "llama/bin/llama-server"), "-m", file, "--port", port, "-t", THREADS, *room], {}
    if name == "openvino":
        batch = ["--batch-tokens", "256" if row.intruder else "2048", *(["--prefix-cache"] if row.shared else [])]
        return [str(peers / "ov/bin/python"), str(ROOT / "tools/openvino_peer.py"), file, "--port", port, *batch], {}
    home = peers / "vllm"
    preload = [next(peers.glob("deb/**/libtcmalloc_minimal.so.4")), home / "lib/libiomp5.so"]
    env = {
        "LD_PRELOAD": ":".join(map(str, preload)), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(THREADS) - 1}",
        "XDG_CACHE_HOME": str(peers / "cache"),
    }
    words = ["--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64"]
    return [str(home / "bin/vllm"), "serve", folder, "--port", port, *words], env


def ask(port: int, path: str, body: dict | None = None) -> dict:
    """One answer of a server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


class Server:
    """A process that answers; ended with everything it started."""

    def __init__(self, name: str, started: tuple[list[str], dict[str, str]], port: int | None = None):
        self.name, self.port, self.started = name, port or PORTS[name], started
        self.log = tempfile.TemporaryFile()
        # Another server there would be asked in this one's place.
        socket.create_server(("127.0.0.1", self.port)).close()
        begun = time.monotonic()
        words, env = started
        self.process = subprocess.Popen(
            words, stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True
        )
        self.model = None
        try:
            while not self.first_token():
                if self.process.poll() is not None or time.monotonic() > begun + READY_S:
                    self.log.seek(0)
                    raise SystemExit(f"{name}: not ready\n{self.log.read().decode()[-3000:]}")
                time.sleep(0.01)
        except BaseException:
            self.stop()
            raise
        self.first_token_s = time.monotonic() - begun

    def first_token(self) -> bool:
        """Asks for the model's name and one token; whether they came."""
        with contextlib.suppress(OSError, ValueError):
            self.model = self.model or ask(self.port, "/v1/models")["data"][0]["id"]
            ask(self.port, "/v1/completions", {"model": self.model, "prompt": "Hi", "max_tokens": 1, "temperature": 0})
            return True
        return False

    def pids(self) -> list[int]:
        """The process and all below it."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, task.read_text().split())
        return found

    def cpu_s(self) -> float:
        """Processor time so far."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids()]
        return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")

    def peak_rss_mib(self) -> float:
        """The most each process had resident since its start, summed."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids()]
        return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in status if "VmHWM:" in text) / 1024

    def wrapper_times(self) -> tuple[float, float]:
        """Seconds inside and outside of OpenVINO; of others all is inside."""
        if self.name != "openvino":
            return 1.0, 0.0
        told = ask(self.port, "/overhead")
        return told["inside_s"], told["outside_s"]

    def stop(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()
