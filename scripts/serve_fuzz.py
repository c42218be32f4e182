"""Sends a server what nobody should send: every answer has to be a defined error, and the server has to live.

    python scripts/serve_fuzz.py kathleen --messages 10000 --uploads 500

Starts `txl-audio serve` on a free port of 127.0.0.1 and ends it. Prints one JSON object: how often which
error came, and the server's memory before, between and after. Exit code 1 where anything else than a defined
error or a stream came back, or the server ended, or still holds a slot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import Any, get_args

import httpx
import numpy as np
import soundfile
from serve_load import served
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from txl_audio.serve.protocol import Code

CODES = set(get_args(Code))
CLIENTS = 8
CLOSED = {1002, 1007, 1009}
"""Answers of the WebSocket protocol itself: not WebSocket, not UTF-8, too big."""

WORDS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "kathleen", "../../etc/passwd", "\x00", "\ud800", "😀" * 50, "a" * 5000, [], {}, [[]], {"a": {}},
]  # fmt: skip
FIELDS = [
    "type", "model", "seconds", "tokens", "seed", "temperature", "top_k", "top_p", "prompt_bytes", "text",
    "ahead_s", "token", "other", "__class__", "",
]  # fmt: skip


def message(random: random.Random, model: str, *, first: bool) -> str | bytes:
    """Half right, half wrong: to start a stream, or for one that plays."""
    kind = random.randrange(8)
    if kind == 0:
        return random.randbytes(random.choice([0, 1, 10, 1000, 70_000, 140_000]))
    fields: dict[str, Any] = {"type": random.choice(["set", "pause", "resume", "stop"])}
    if first and random.random() < 0.9:
        fields = {"type": "start", "model": model}
    if fields["type"] == "set":
        fields["temperature"] = random.choice([0, 1, 2.5])
    for _ in range(random.randrange(4)):
        fields[random.choice(FIELDS)] = random.choice(WORDS)
    text = json.dumps(fields)
    if kind == 1:
        return text[: random.randrange(len(text))]
    if kind == 2:
        at = random.randrange(len(text))
        return text[:at] + chr(random.randrange(1, 0x3000)) + text[at + 1 :]
    if kind == 3:
        return random.choice('[{"') * random.choice([1, 100, 60_000, 70_000])
    return text


def upload(random: random.Random) -> bytes:
    """A sound file with faults, or what is none."""
    pcm = np.random.default_rng(random.randrange(2**32)).uniform(-1, 1, (400, random.choice([1, 2, 9])))
    if random.random() < 0.2:
        pcm[random.randrange(400)] = random.choice([np.nan, np.inf, 1e38])
    form, subtype = random.choice(
        [
            ("WAV", "PCM_16"),
            ("WAV", "FLOAT"),
            ("WAV", "ULAW"),
            ("FLAC", "PCM_16"),
            ("OGG", "VORBIS"),
            ("AIFF", "PCM_16"),
        ]
    )
    file = BytesIO()
    if subtype != "FLOAT":  # others cannot hold it, and writing it can crash
        pcm = np.clip(np.nan_to_num(pcm), -1, 1)
    if form in ("OGG", "FLAC"):
        pcm = pcm[:, :2]
    rate_hz = random.choice([8_000, 16_000, 44_100] + [192_000] * (form != "OGG"))
    soundfile.write(file, pcm, rate_hz, format=form, subtype=subtype)
    data = bytearray(file.getvalue())
    spared = random.choice([0, 4, 4, 4])  # mostly it still looks like a sound file
    for _ in range(random.randrange(12)):
        at = spared + int(random.random() ** 3 * (len(data) - spared))
        data[at] = random.choice([0, 255, 127, 128, random.randrange(256)])
    if random.random() < 0.3:
        data = data[: random.randrange(len(data))]
    if random.random() < 0.1:
        data += random.randbytes(5000)
    return bytes(data)


def talk(url: str, random: random.Random, model: str) -> tuple[int, str]:
    """One connection with one to three messages: how many were sent, and how it ended."""
    count, sent = random.randrange(1, 4), 0
    with connect(url, max_size=None, compression=None, close_timeout=0.1, open_timeout=60) as socket:
        with suppress(ConnectionClosed):  # an answer may have come already
            for number in range(count):
                said = message(random, model, first=number == 0)
                text = said.encode("utf-8", "surrogatepass") if isinstance(said, str) else said
                sent += 1
                socket.send(text, text=isinstance(said, str) or None)
        try:
            while True:
                answer = socket.recv(timeout=60)
                if isinstance(answer, str):
                    event = json.loads(answer)
                    if event["type"] == "error":
                        return sent, event["code"]
                    if event["type"] == "finished":
                        return sent, "stream"
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else None
            return sent, f"closed {code}"
        except TimeoutError:
            return sent, "no answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", nargs="?", default="kathleen")
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--uploads", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    answers: Counter[str] = Counter()
    short = ("start_s=0.5", "idle_s=1", "stream_s=0.2", "stream_tokens=50", "streams_per_client=100")
    with served(arguments.run, *short) as server, ThreadPoolExecutor(CLIENTS) as pool:

        def one(seed: int) -> tuple[int, str]:
            return talk(server.socket_url, random.Random(seed), server.model)

        seeds = itertools.count(arguments.seed * 1_000_000)
        list(pool.map(one, itertools.islice(seeds, 200)))  # what it takes once is taken
        before, sent = server.rss_bytes(), 0
        while sent < arguments.messages:
            for count, answer in pool.map(one, itertools.islice(seeds, 200)):
                sent += count
                answers[answer] += 1
        middle = server.rss_bytes()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for number in range(arguments.uploads):
                path, seconds = ("score", {}) if number % 2 else ("generate", {"seconds": 0.02})
                response = client.post(
                    f"/v1/{path}", params={"model": server.model, **seconds}, content=upload(source)
                )
                answers["made" if response.status_code == 200 else response.json()["error"]["code"]] += 1
            metrics = client.get("/metrics").text
        alive = server.process.poll() is None
        after = server.rss_bytes()
    held = [
        line for line in metrics.splitlines() if line in ("txl_audio_streams 0.0", "txl_audio_queued 0.0")
    ]
    fine = CODES - {"internal"} | {"stream", "made"} | {f"closed {code}" for code in CLOSED}
    wrong = {answer: count for answer, count in answers.items() if answer not in fine}
    figures = {
        "messages": sent,
        "uploads": arguments.uploads,
        "answers": dict(answers.most_common()),
        "wrong": wrong,
        "alive": alive,
        "slots_free": len(held) == 2,
        "rss_mb": [round(value / 1e6, 1) for value in (before, middle, after)],
    }
    print(json.dumps(figures))
    sys.exit(0 if alive and not wrong and len(held) == 2 else 1)


if __name__ == "__main__":
    main()
