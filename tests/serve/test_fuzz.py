"""What nobody should send, and the scripts that send more of it."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from tests.serve.conftest import Server
from tests.serve.test_turns import until
from tests.test_scripts import script
from txl_audio.serve.client import connect
from txl_audio.serve.protocol import HTTP_STATUS

Serve = Callable[..., Server]


def test_every_message_is_answered(serve: Serve) -> None:
    fuzz = script("serve_fuzz")
    server = serve(start_s=1.0, idle_s=0.2, stream_s=0.2, stream_tokens=50)
    answers: Counter[str] = Counter()
    for model in ("tiny", "letters"):
        for seed in range(60):
            _, answer = fuzz.talk(server.url.replace("http", "ws") + "/v1/stream", random.Random(seed), model)
            answers[answer] += 1
    fine = set(HTTP_STATUS) - {"internal"} | {"stream"} | {f"closed {code}" for code in fuzz.CLOSED}
    assert set(answers) <= fine, answers
    assert answers["stream"] and answers["bad_message"]
    until(lambda: server.service.open_connections == 0)
    assert server.service.turns.playing == 0


def test_every_upload_is_answered(server: Server) -> None:
    fuzz, source = script("serve_fuzz"), random.Random(0)
    answers: Counter[int] = Counter()
    with httpx.Client(base_url=server.url) as client:
        for _ in range(60):
            query = {"model": "tiny", "seconds": 0.02}
            response = client.post("/v1/generate", params=query, content=fuzz.upload(source))
            answers[response.status_code] += 1
            assert response.status_code == 200 or response.json()["error"]["code"] in HTTP_STATUS
    assert set(answers) <= {200, 422} and len(answers) == 2


def test_listeners_of_the_load_script(serve: Serve) -> None:
    load = script("serve_load")
    server = serve(slots=2, queue=0, streams_per_client=100)
    seen = load.Server(None, server.url, "tiny", 2)
    figures = load.part(seen, 4, 2.0, ahead_s=1.0, buffer_s=1.0)
    assert (figures["admitted"], figures["busy"], figures["underruns"]) == (2, 2, 0)
    assert all(0.9 < speed < 2.0 for speed in figures["real_time"])
    listener = load.Listener("", "", seed=0, ahead_s=1, buffer_s=0.2, until=0)
    listener._hear(0.1, 10.0, 9.5)  # plays from 10.2 to 10.3
    listener._hear(0.1, 10.25, 9.5)  # to 10.4
    listener._hear(0.1, 10.5, 9.5)  # 0.1 late
    assert (listener.underruns, listener.first_s) == (1, 0.5)
    assert listener.silent_s == pytest.approx(0.1) and listener.heard_s == pytest.approx(0.3)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process on Windows without a word")
def test_a_process_that_is_told_to_end_says_so() -> None:
    with script("serve_load").served("kathleen") as server:
        with connect(server.url, "kathleen", ahead_s=0.2) as stream:
            for number, _ in enumerate(stream):
                if number == 1:
                    server.process.send_signal(signal.SIGTERM)
            assert stream.finished is not None and stream.finished["reason"] == "shutdown"
        begun = time.monotonic()
        server.process.wait(20)
        assert time.monotonic() - begun < 10
