"""`plimsoll bench` as the tools that compare servers call it: one round against one server, and what else the cores did meanwhile."""

import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from peer_servers import Server

ROUND_S = 1200


def round_of(client: str | Path, server: Server, seed: int, **load: int) -> dict:
    """The report of one round. `load` has the flags of `plimsoll bench`, with `_` for `-`; errors of requests are errors here."""
    flags = {"url": f"http://127.0.0.1:{server.port}", "model": server.model, "rounds": 1, "seed": seed}
    with tempfile.NamedTemporaryFile() as report:
        flags |= {name.replace("_", "-"): value for name, value in load.items()} | {"json": report.name}
        words = [f"--{name}={value}" for name, value in flags.items()]
        ran = subprocess.run([client, "bench", *words], capture_output=True, text=True, timeout=ROUND_S)
        if ran.returncode != 0:
            raise RuntimeError(f"{server.name}: {ran.stderr[-500:]}")
        done = json.loads(Path(report.name).read_text())["servers"][0]["rounds"][0]
    if done["errors"]:
        raise RuntimeError(f"{server.name}: {done['errors']} errors: {done['first_error']}")
    if done["intruder_error"]:
        raise RuntimeError(f"{server.name}: the intruder: {done['intruder_error']}")
    return done


class Others:
    """Processor time that other processes take: neither these servers, nor this process and the children that it has waited for."""

    def __init__(self, servers: list[Server]):
        self.servers = servers
        self.begun = self.now()

    def now(self) -> tuple[float, float]:
        """The time, and the processor seconds of all others so far, with those that a hypervisor has taken."""
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
        machine = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in of) + sum(server.cpu_s() for server in self.servers)
        return time.monotonic(), machine - own

    def cores(self) -> float:
        """The mean number of cores that others have taken since this object was made."""
        (then, before), (now, after) = self.begun, self.now()
        return (after - before) / max(now - then, 0.001)
