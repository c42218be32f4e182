"""The routes without a WebSocket, the command, and the server's rules about who may use them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.e2e.harness import run, text_run
from tests.serve.conftest import Server
from tests.serve.models import expected, letters, tiny
from tests.serve.sockets import asked, cut_off
from tests.serve.test_turns import until
from tests.serve.test_uploads import sound_file, tone
from txl_audio import evaluate
from txl_audio.sampling.sound import read_symbols
from txl_audio.serve import models, running
from txl_audio.serve.client import connect
from txl_audio.serve.protocol import HTTP_STATUS
from txl_audio.serve.security import is_loopback
from txl_audio.serve.service import Service
from txl_audio.tokens import ConfigError, TxlError

Serve = Callable[..., Server]


def post(server: Server, path: str, body: bytes | Iterator[bytes] = b"", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", params={"model": "tiny", **fields}, content=body, timeout=20)


def code(response: httpx.Response) -> str:
    """The code of an error, which has the right status and one line of text."""
    error = response.json()["error"]
    assert set(error) == {"code", "message"} and "\n" not in error["message"]
    assert response.status_code == HTTP_STATUS[error["code"]]
    return error["code"]


def test_files(server: Server) -> None:
    for form in ("wav", "flac"):
        response = post(server, "generate", seconds=1.2, seed=4, format=form)
        assert response.status_code == 200 and response.headers["content-type"] == f"audio/{form}"
        pcm, rate_hz = soundfile.read(BytesIO(response.content), dtype="int16")
        assert rate_hz == 16_000
        np.testing.assert_array_equal(pcm, expected(4, 19_200))
    assert post(server, "generate", seconds=0).status_code == 200


def test_streams_without_a_websocket(server: Server) -> None:
    with httpx.stream(
        "POST", server.url + "/v1/generate", params={"model": "tiny", "seconds": 3, "format": "s16le"}
    ) as response:
        assert response.status_code == 200 and response.headers["transfer-encoding"] == "chunked"
        data = b"".join(response.iter_bytes())
    np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected(0, 48_000))
    text = post(server, "generate", model="letters", tokens=20, text="abc").text
    assert len(text) == 20 and set(text) <= set("abcdefghij")


def test_a_client_that_leaves_ends_its_work(server: Server) -> None:
    turns, url = server.service.turns, server.url + "/v1/generate"
    with httpx.stream("POST", url, params={"model": "tiny", "format": "s16le"}) as response:
        chunks = response.iter_bytes()
        next(chunks)
        assert turns.playing == 1  # while `chunks` is there: httpx leaves when it is collected
    until(lambda: turns.playing == 0)
    server.tiny.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, params={"model": "tiny", "seconds": 5}, timeout=0.3)
    until(lambda: turns.playing == 0 and server.service.open_connections == 0)


def test_a_file_that_nobody_reads(serve: Serve) -> None:
    server = serve(idle_s=3.0, streams_per_client=1)
    service = server.service
    server.tiny.gate.clear()
    with asked(server, "POST /v1/generate?model=tiny&seconds=60 HTTP/1.1", "Content-Length: 0", "") as client:
        until(lambda: service.turns.playing == 1)
        server.tiny.gate.set()
        until(lambda: service.turns.playing == 0)  # made: others can have the slot
        assert code(post(server, "generate", seconds=0.1)) == "limit"  # sent it is not, so it counts
        until(lambda: service.open_connections == 0)
        cut_off(client)
    assert post(server, "generate", seconds=0.1).status_code == 200


def test_headers_come_in_time(serve: Serve) -> None:
    server = serve(start_s=0.4)
    first, host = "GET /healthz HTTP/1.1", "Host: 127.0.0.1"
    second = first, "", first, host
    unwanted = "POST /v1/score HTTP/1.1", "Content-Length: 1000000", ""  # the body of what is refused
    for lines in ((first,), second, unwanted):
        with asked(server, *lines) as client, pytest.raises(ConnectionError):
            _dribble(client)
    with asked(server) as client:  # who says nothing
        cut_off(client)
    with connect(server.url, "tiny", ahead_s=0.1) as stream:  # who got what it wanted stays
        for number, _ in enumerate(stream):
            if number == 12:
                break


def _dribble(client: socket.socket) -> None:
    for _ in range(400):
        client.sendall(b"a: b\r\n")
        time.sleep(0.05)


def test_a_prompt_in_the_body(server: Server) -> None:
    assert post(server, "generate", sound_file(tone(0.5)), seconds=0.1).status_code == 200
    prompt = server.tiny.prompts[-1]
    assert prompt is not None and len(prompt) == 8_000


def test_scores_are_those_of_evaluation(server: Server, tmp_path: Path) -> None:
    data = sound_file(tone(0.05))
    (tmp_path / "x.wav").write_bytes(data)
    model = server.tiny
    assert model.codec is not None
    nats = evaluate.score_document(model.model, read_symbols(tmp_path / "x.wav", model.codec))
    found = post(server, "score", data).json()
    assert found["count"] == 800 and found["nats"] == pytest.approx(nats.double().sum().item())
    assert found["bits_per_sample"] == pytest.approx(found["nats"] / 800 / np.log(2))


def test_what_is_refused(serve: Serve) -> None:
    server = serve(upload_bytes=20_000, prompt_s=0.3, score_s=0.5, file_s=5, stream_s=10)
    audio = sound_file(tone(0.4))
    for wanted, response in (
        ("unknown_model", post(server, "generate", model="other")),
        ("unknown_model", post(server, "score", model="/etc/passwd")),
        ("bad_message", post(server, "generate", seconds="x")),
        ("bad_message", post(server, "generate", other="1")),
        ("bad_message", post(server, "generate", format="mp3")),
        ("bad_message", httpx.post(server.url + "/v1/score")),
        ("unsupported", post(server, "generate", format="text")),
        ("unsupported", post(server, "generate", model="letters", format="wav")),
        ("unsupported", post(server, "generate", audio, model="letters")),
        ("unsupported", post(server, "score", audio, model="letters")),
        ("too_long", post(server, "generate")),  # a file without an end
        ("too_long", post(server, "generate", seconds=11, format="s16le")),
        ("too_long", post(server, "generate", audio, seconds=1)),
        ("too_long", post(server, "score", sound_file(tone(0.6)))),
        ("too_large", post(server, "score", bytes(20_001))),
        ("too_large", post(server, "score", iter([bytes(15_000)] * 2))),  # without saying how much
        ("bad_audio", post(server, "score")),
        ("bad_audio", post(server, "generate", b"no sound", seconds=1)),
    ):
        assert code(response) == wanted, response.text
    assert httpx.get(server.url + "/v1/generate").status_code == 405
    for path in ("/nothing", "/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd"):
        assert httpx.get(server.url + path).status_code == 404


def test_a_full_house(serve: Serve) -> None:
    server = serve(slots=1, queue=0)
    server.tiny.gate.clear()
    first = threading.Thread(target=post, args=(server, "generate"), kwargs={"seconds": 1})
    first.start()
    until(lambda: server.service.turns.playing == 1)
    response = post(server, "generate", seconds=1)
    assert code(response) == "busy" and response.headers["retry-after"]
    assert code(post(server, "generate", seconds=1, format="s16le")) == "busy"
    server.tiny.gate.set()
    first.join()


def test_faults_of_a_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tiny, "sampler", lambda *_, **__: 1 / 0)
    for form in ("wav", "s16le"):
        response = post(server, "generate", seconds=1, format=form)
        assert code(response) == "internal" and "division" not in response.text
    assert code(post(server, "generate", model="letters", text="z")) == "bad_message"


def test_tokens(serve: Serve) -> None:
    server = serve(token="secret")
    good = {"Authorization": "Bearer secret"}
    for path in ("/v1/generate?model=tiny&seconds=0.1", "/v1/score?model=tiny"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = httpx.post(server.url + path, headers=headers)
            assert code(response) == "unauthorised" and response.headers["www-authenticate"] == "Bearer"
    assert httpx.post(server.url + "/v1/generate?model=tiny&seconds=0.1", headers=good).status_code == 200
    assert httpx.get(server.url + "/metrics").status_code == 401
    assert httpx.get(server.url + "/metrics", headers=good).status_code == 200
    facts = httpx.get(server.url + "/v1/models").json()
    assert facts["token_needed"] is True and "secret" not in str(facts)
    assert httpx.get(server.url + "/healthz").json() == {"status": "ok"}


def test_other_sites_and_other_names(server: Server) -> None:
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Host": "["},
        {"Origin": "null"},
    ):
        assert code(httpx.post(server.url + "/v1/generate?model=tiny", headers=headers)) == "forbidden"
    port = server.url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
        response = httpx.get(server.url + "/healthz", headers={"Host": host, "Origin": f"http://{host}"})
        assert response.status_code == 200
    assert "default-src 'self'" in response.headers["content-security-policy"]


def test_models_and_metrics(server: Server) -> None:
    facts = httpx.get(server.url + "/v1/models").json()
    assert [(m["name"], m["kind"], m["takes_text"]) for m in facts["models"]] == [
        ("tiny", "audio", False), ("letters", "text", True),
    ]  # fmt: skip
    assert facts["slots"] == 2 and facts["token_needed"] is False and facts["limits"]["queue"] == 16
    post(server, "generate", seconds=2)
    post(server, "generate", seconds=-1)
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    for line in (
        'txl_audio_ended_total{reason="complete"} 1.0',
        'txl_audio_refused_total{code="bad_message"} 1.0',
        "txl_audio_slots 2.0",
        "txl_audio_streams 0.0",
        "txl_audio_first_piece_seconds_count 1.0",
    ):
        assert line in lines, line
    (made,) = (line for line in lines if line.startswith("txl_audio_sound_seconds_total "))
    assert float(made.split()[1]) == pytest.approx(2.0)


def test_openapi(server: Server) -> None:
    described = httpx.get(server.url + "/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    names = [p["name"] for p in described["paths"]["/v1/generate"]["post"]["parameters"]]
    assert {"model", "seconds", "seed", "format", "temperature"} <= set(names)
    assert {"Start", "Set", "Command", "Error"} <= set(described["components"]["schemas"])
    codes = described["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert set(codes) == set(HTTP_STATUS)


def test_where_a_server_may_listen() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "", "example.org", "192.168.0.1"))
    running.require_token("0.0.0.0", "word")
    for token in (None, ""):
        running.require_token("127.0.0.1", token)
        with pytest.raises(
            ConfigError, match="0.0.0.0 can be reached by other machines, which needs a token"
        ):
            running.require_token("0.0.0.0", token)
    with running.bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(TxlError, match="cannot listen on 127.0.0.1 port"):
            running.bind("127.0.0.1", taken.getsockname()[1])


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    failed = run("serve", "kathleen", "--host", "0.0.0.0")
    assert failed.code == 2 and "needs a token" in failed.error
    failed = run("serve", "kathleen", "quue=3", "--port", 0)
    assert failed.code == 2 and "did you mean 'queue'?" in failed.error
    failed = run("serve", tmp_path / "none", "--port", 0)
    assert failed.code == 1 and "no run folder" in failed.error
    failed = run("serve", "queue=3", "--port", 0)
    assert failed.code == 2 and "no run to serve" in failed.error
    text_run(tmp_path / "ids")
    failed = run("serve", tmp_path / "ids", "--port", 0)
    assert failed.code == 1 and "vocabulary" in failed.error


def test_names_and_slots() -> None:
    with pytest.raises(ConfigError, match="two runs are called kathleen"):
        models.load(["kathleen", "kathleen"])
    with pytest.raises(ConfigError, match="different names"):
        Service([tiny(), tiny()])
    fast, text = tiny(), letters()
    for factor, workers, slots in ((0.4, 1, 2), (0.4, 2, 4), (1.5, 1, 1), (1.5, 4, 2)):
        fast.real_time_factor = factor
        assert models.slots_for([fast, text], workers) == slots
    assert models.slots_for([text], 3) == 3


def test_sockets_have_small_buffers() -> None:
    with running.bind("127.0.0.1", 0) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * (1 << 16)
