"""As many listeners as a server holds in real time, then twice as many.

    python scripts/serve_load.py kathleen --minutes 1

Starts `txl-audio serve` on a free port of 127.0.0.1 and ends it. Every listener plays what it gets on a clock
of its own, from the first sound on and --buffer seconds behind it; the time for which it had nothing to play
is its underrun. Prints a table, or one JSON object with --json: of either part, who was admitted, how fast,
with what underruns, how soon the first sound came, how many were told "busy", and the server's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from txl_audio.serve.client import connect
from txl_audio.serve.protocol import Refusal

START_S = 900
"""A first start on a machine compiles the sampler."""


@dataclass(frozen=True)
class Server:
    """A server as a process of its own."""

    process: subprocess.Popen[str]
    url: str
    model: str
    slots: int

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/stream"

    def rss_bytes(self) -> int:
        """Resident memory, as its own metrics have it."""
        for line in httpx.get(self.url + "/metrics", timeout=30).text.splitlines():
            if line.startswith("process_resident_memory_bytes"):
                return int(float(line.split()[1]))
        return 0  # only Linux has it


@contextmanager
def served(run: str, *words: str) -> Iterator[Server]:
    """`txl-audio serve RUN WORDS` on a free port, until the context ends."""
    command = [sys.executable, "-m", "txl_audio.cli", "serve", run, "--port", "0", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    killer = threading.Timer(START_S, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if line.startswith("listening on "):
                url = line.split()[2].rstrip(",")
                break
        killer.cancel()
        if not url:
            sys.exit("error: the server did not start")
        rest = threading.Thread(target=lambda: sys.stderr.writelines(process.stderr or []), daemon=True)
        rest.start()
        facts = httpx.get(url + "/v1/models", timeout=30).json()
        yield Server(process, url, facts["models"][0]["name"], facts["slots"])
    finally:
        killer.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Listener:
    """One client: what it heard."""

    url: str
    model: str
    seed: int
    ahead_s: float
    buffer_s: float
    until: float
    refused: str = ""
    first_s: float = 0.0
    heard_s: float = 0.0
    wall_s: float = 0.0
    underruns: int = 0
    silent_s: float = 0.0
    factors: list[float] = field(default_factory=list)

    def run(self) -> None:
        asked = time.monotonic()
        try:
            with connect(self.url, self.model, seed=self.seed, ahead_s=self.ahead_s) as stream:
                for pcm in stream:
                    now = time.monotonic()
                    self._hear(len(pcm) / stream.events["started"]["sample_rate_hz"], now, asked)
                    stats = stream.events.pop("stats", None)
                    if stats:
                        self.factors.append(stats["real_time_factor"])
                    if now >= self.until:
                        return
        except Refusal as refusal:
            self.refused = refusal.code

    def _hear(self, seconds: float, now: float, asked: float) -> None:
        if not self.heard_s:
            self.first_s, self._ends = now - asked, now + self.buffer_s
            self._begun = now
        elif now > self._ends:  # everything had been played
            self.underruns += 1
            self.silent_s += now - self._ends
            self._ends = now
        self._ends += seconds
        self.heard_s += seconds
        self.wall_s = now - self._begun


def part(server: Server, clients: int, seconds: float, *, ahead_s: float, buffer_s: float) -> dict[str, Any]:
    """So many listeners at once, for so long."""
    until = time.monotonic() + seconds
    listeners = [
        Listener(server.url, server.model, seed, ahead_s, buffer_s, until) for seed in range(clients)
    ]
    threads = [threading.Thread(target=listener.run, daemon=True) for listener in listeners]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    memory = []
    while time.monotonic() < until and any(thread.is_alive() for thread in threads):
        memory.append(server.rss_bytes() / 1e6)
        time.sleep(min(5.0, seconds / 10))
    for thread in threads:
        thread.join(30)
    heard = [listener for listener in listeners if listener.heard_s]
    return {
        "clients": clients,
        "admitted": len(heard),
        "busy": sum(listener.refused == "busy" for listener in listeners),
        "real_time": [round(x.heard_s / max(x.wall_s, 1e-9), 3) for x in heard],
        "real_time_factor": round(float(np.mean([f for x in heard for f in x.factors] or [0])), 3),
        "underruns": sum(x.underruns for x in heard),
        "silent_s": round(sum(x.silent_s for x in heard), 2),
        "first_sound_ms": [round(1000 * x.first_s) for x in heard],
        "rss_mb": [round(value, 1) for value in memory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", nargs="?", default="kathleen")
    parser.add_argument("--minutes", type=float, default=1.0, help="of either part")
    parser.add_argument("--ahead", type=float, default=2.0, help="seconds that the server may be ahead")
    parser.add_argument("--buffer", type=float, default=0.3, help="seconds a listener waits before it plays")
    parser.add_argument("--streams", type=int, help="slots [default: what the server finds]")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    streams = [] if arguments.streams is None else ["--streams", str(arguments.streams)]
    parts = []
    with served(arguments.run, *streams, "queue=0", "streams_per_client=1000") as server:
        for clients in (server.slots, 2 * server.slots):
            seconds = 60 * arguments.minutes
            parts.append(part(server, clients, seconds, ahead_s=arguments.ahead, buffer_s=arguments.buffer))
            time.sleep(1)
    if arguments.json:
        print(json.dumps({"run": arguments.run, "slots": server.slots, "parts": parts}))
        return
    for row in parts:
        memory = row.pop("rss_mb")
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        print(f"  server memory {memory[0]:.0f} to {memory[-1]:.0f} MB, at most {max(memory):.0f}")


if __name__ == "__main__":
    main()
