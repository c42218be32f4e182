"""The WebSocket: every event, every error, and what clients that behave badly cost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from tests.serve.conftest import Server
from tests.serve.models import expected
from tests.serve.test_turns import still, until
from tests.serve.test_uploads import sound_file, tone
from txl_audio.serve.client import connect
from txl_audio.serve.protocol import CLOSE_CODE, Refusal
from txl_audio.serve.turns import OUTBOX_PIECES

Serve = Callable[..., Server]


@contextmanager
def opened(server: Server, **options: Any) -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws") + "/v1/stream"
    with connect_socket(url, max_size=None, close_timeout=0.2, **options) as socket:
        yield socket


def start(model: str = "tiny", **fields: Any) -> str:
    return json.dumps({"type": "start", "model": model, **fields})


def messages(socket: ClientConnection) -> tuple[list[dict[str, Any]], bytes, int]:
    """All events, all sound, and the code of the close."""
    events, sound = [], b""
    while True:
        try:
            message = socket.recv(timeout=20)
        except ConnectionClosed as closed:
            return events, sound, closed.rcvd.code if closed.rcvd else 1006
        if isinstance(message, bytes):
            sound += message
        else:
            events.append(json.loads(message))


def refused(server: Server, *sent: str | bytes, **options: Any) -> str:
    """The code of the error that answers these messages."""
    with opened(server, **options) as socket:
        for message in sent:
            socket.send(message)
        events, sound, code = messages(socket)
    error = events[-1]
    assert (
        error["type"] == "error"
        and set(error) == {"type", "code", "message"}
        and "\n" not in error["message"]
    )
    assert sound == b"" and code == CLOSE_CODE.get(error["code"], 1008)
    return error["code"]


def test_a_stream_from_start_to_finish(server: Server) -> None:
    with opened(server) as socket:
        socket.send(start(seconds=1.5, seed=3))
        events, sound, code = messages(socket)
    assert [event["type"] for event in events] == ["started", "stats", "finished"] and code == 1000
    assert events[0] == {
        "type": "started", "model": "tiny", "kind": "audio", "sample_rate_hz": 16_000, "seed": 3,
        "backend": "torch cpu", "prompt_samples": 0,
    }  # fmt: skip
    assert set(events[1]) == {"type", "seconds_made", "real_time_factor", "lag_s"}
    assert events[1]["seconds_made"] == 1.5 and 0 < events[1]["real_time_factor"] < 1
    assert events[2] == {"type": "finished", "samples": 24_000, "reason": "complete"}
    np.testing.assert_array_equal(np.frombuffer(sound, "<i2"), expected(3, 24_000))


def test_text_comes_over_the_same_interface(server: Server) -> None:
    with opened(server) as socket:
        socket.send(start("letters", tokens=40, text="abc"))
        events, sound, code = messages(socket)
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert len(text) == 40 and set(text) <= set("abcdefghij") and sound == b"" and code == 1000
    assert events[0]["kind"] == "text" and events[0]["sample_rate_hz"] == 0
    assert events[-1] == {"type": "finished", "samples": 0, "tokens": 40, "reason": "complete"}
    prompt = server.letters.prompts[-1]
    assert prompt is not None and prompt.tolist() == [1, 2, 3]


def test_a_prompt_is_continued(server: Server) -> None:
    data = sound_file(tone(0.5, 8_000), 8_000, "FLAC")
    with connect(server.url, "tiny", prompt=data, seconds=0.1) as stream:
        assert len(np.concatenate(list(stream))) == 1600
        assert stream.events["started"]["prompt_samples"] == 8_000
    prompt = server.tiny.prompts[-1]
    assert prompt is not None and len(prompt) == 8_000


def test_two_clients_do_not_disturb_each_other(server: Server) -> None:
    with connect(server.url, "tiny", seconds=6, seed=1) as one, connect(server.url, "tiny", seed=2) as two:
        pieces: tuple[list[Any], list[Any]] = ([], [])
        for piece, other in zip(one, two, strict=False):
            pieces[0].append(piece)
            pieces[1].append(other)
        two.set(temperature=0)
    for seed, found in enumerate(pieces, 1):
        sound = np.concatenate(found)
        np.testing.assert_array_equal(sound, expected(seed, 320_000)[: len(sound)])
    assert len(np.concatenate(pieces[0])) >= 90_000


def test_settings_act_while_playing(server: Server) -> None:
    with connect(server.url, "tiny", ahead_s=0.3) as stream:
        for piece in stream:
            if not piece.any():
                break
            stream.set(temperature=0)
        assert stream.events["started"]["seed"] == 0
        stream.set()  # the model's own
        for piece in stream:
            if piece.any():
                break
        stream.stop()
        assert list(stream)[20:] == [] and stream.finished is not None
        assert stream.finished["reason"] == "stopped"


def test_pause_and_resume(server: Server) -> None:
    with connect(server.url, "tiny", ahead_s=0.2) as stream:
        pieces = iter(stream)
        next(pieces)
        stream.pause()
        until(lambda: any(job.paused for job in server.service.turns.jobs))
        (job,) = server.service.turns.jobs
        assert still(lambda: job.made)
        stream.resume()
        made = job.made
        until(lambda: job.made > made)


def test_the_queue_and_a_full_house(serve: Serve) -> None:
    server = serve(slots=1, queue=2)
    with ExitStack() as stack:
        sockets = [stack.enter_context(opened(server)) for _ in range(3)]
        for place, socket in enumerate(sockets):
            socket.send(start(ahead_s=0.1))
            first = json.loads(socket.recv(timeout=20))
            assert first["type"] == "queued" if place else "started"
            assert not place or first["place"] == place
        assert refused(server, start()) == "busy"
        sockets[0].close()
        assert json.loads(sockets[1].recv(timeout=20))["type"] == "started"
        assert json.loads(sockets[2].recv(timeout=20)) == {"type": "queued", "place": 1}
        sockets[2].send('{"type": "stop"}')
        events, sound, _ = messages(sockets[2])
        assert events == [{"type": "finished", "samples": 0, "reason": "stopped"}] and sound == b""


def test_who_leaves_frees_the_slot_at_once(serve: Serve) -> None:
    # A15
    server = serve(slots=1, queue=0)
    for leave in ("close", "drop"):
        with opened(server) as socket:
            socket.send(start())
            assert json.loads(socket.recv(timeout=20))["type"] == "started"
            assert refused(server, start()) == "busy"
            if leave == "drop":
                socket.socket.shutdown(2)  # without a word
        until(lambda: server.service.turns.playing == 0 and server.service.open_connections == 0)


def test_who_reads_nothing_gets_no_more_than_fits(server: Server) -> None:
    # A15: the server holds OUTBOX_PIECES and what the system takes; others go on.
    slow = _silent_reader(server)
    until(lambda: any(len(job.outbox) == OUTBOX_PIECES for job in server.service.turns.jobs))
    (job,) = server.service.turns.jobs
    until(lambda: still(lambda: job.made))  # the system's buffers fill too
    assert job.made_s < 60  # of an hour; a few seconds where the system has small buffers
    with connect(server.url, "tiny", seconds=10, seed=5) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream)), expected(5, 160_000))
    assert still(lambda: job.made)
    slow.close()
    until(lambda: server.service.turns.playing == 0)


def test_who_reads_nothing_is_given_up_in_the_end(serve: Serve) -> None:
    server = serve(idle_s=0.5)
    slow = _silent_reader(server)
    until(lambda: server.service.turns.playing == 1)
    until(lambda: server.service.turns.playing == 0)
    slow.close()


def _silent_reader(server: Server) -> socket.socket:
    """A client that opens a stream and reads nothing of it."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(
        f"GET /v1/stream HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101" in client.recv(1024)
    text = start().encode()
    client.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)  # masked with zeros
    return client


def test_messages_that_are_none(server: Server) -> None:
    bad = (
        "", "x", "{}", "[]", "null", '{"type": "begin"}', '{"type": "start"}', b"\x00\x01",
        start(seed=-1), start(seed=2**63), start(seed=1.5), start(seconds=-1), start(seconds="5"),
        start(seconds=float("nan")), start(temperature=-1), start(top_k=0), start(top_p=0), start(top_p=2),
        start(other=1), start(ahead_s=0), start(top_k=10**20), start(temperature=1e-320),
        start(5), start(prompt_bytes=-1), "[" * 20_000, start(seconds=float("inf")), start(seed=10**400),
    )  # fmt: skip
    for message in bad:
        assert refused(server, message) == "bad_message", message[:60]
    for message in (
        "x",
        '{"type": "start"}',
        '{"type": "set", "temperature": -1}',
        b"x",
        '{"type": "pause", "a": 1}',
    ):
        with opened(server) as socket:
            socket.send(start(ahead_s=0.1))
            socket.send(message)
            events, _, code = messages(socket)
        assert events[-1]["code"] == "bad_message" and code == 1008
    assert refused(server, start("letters", text="z")) == "bad_message"  # a symbol it does not have
    assert refused(server, start(prompt_bytes=5), b"1234") == "bad_message"
    assert refused(server, start(prompt_bytes=5), "12345") == "bad_message"


def test_what_cannot_be_had(serve: Serve) -> None:
    server = serve(upload_bytes=20_000, prompt_s=0.5, stream_s=10, stream_tokens=20, message_bytes=1000)
    long = sound_file(tone(0.6))
    for code, *sent in (
        ("unknown_model", start("kathleen")),
        ("unknown_model", start("../models/kathleen")),
        ("unsupported", start(text="hello")),
        ("unsupported", start(tokens=5)),
        ("unsupported", start("letters", seconds=5)),
        ("unsupported", start("letters", prompt_bytes=4)),
        ("too_long", start(seconds=11)),
        ("too_long", start("letters", tokens=21)),
        ("too_long", start(prompt_bytes=len(long)), long),
        ("too_large", start(prompt_bytes=20_001)),
        ("too_large", start(text="x" * 1000)),
        ("bad_audio", start(prompt_bytes=4), b"RIFF"),
    ):
        assert refused(server, *sent) == code, sent
    with opened(server) as socket:
        socket.send(start(prompt_bytes=20_000))
        socket.send(bytes(20_001))
        assert messages(socket)[2] == 1009  # the protocol's own: too big
    metrics = server.service.metrics.refused
    assert metrics.labels("unsupported")._value.get() == 4


def test_the_fault_of_a_model_is_not_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tiny, "sampler", lambda *_, **__: 1 / 0)
    assert refused(server, start()) == "internal"


def test_silence_ends(serve: Serve) -> None:
    server = serve(start_s=0.1, idle_s=0.2)
    assert refused(server) == "idle"
    assert refused(server, start(prompt_bytes=9)) == "idle"
    with opened(server) as socket:
        socket.send(start(ahead_s=0.1))
        socket.send('{"type": "pause"}')
        events, _, code = messages(socket)
        assert events[-1]["code"] == "idle" and code == 1008


def test_a_pause_between_pieces_ends_too(serve: Serve) -> None:
    """The server waits for the clock of a listener, not for a piece that is being made."""
    server = serve(idle_s=0.3)
    with opened(server) as socket:
        socket.send(start(ahead_s=1.0))
        time.sleep(0.5)  # a second is made, and the next piece is not due
        socket.send('{"type": "pause"}')
        events, _, code = messages(socket)
        assert events[-1]["code"] == "idle" and code == 1008


def test_tokens(serve: Serve) -> None:
    server = serve(token="väry secret")
    for token in (None, "", "vary secret", "väry secre", "väry secret "):
        assert refused(server, start(token=token)) == "unauthorised"
    with (
        connect(server.url, "tiny", seconds=0.1, token=None) as stream,
        pytest.raises(Refusal, match="token"),
    ):
        list(stream)
    with opened(server) as socket:
        socket.send(start(token="väry secret", seconds=0.1))
        assert messages(socket)[0][-1]["type"] == "finished"
    ascii_token = serve(token="secret")
    with connect(ascii_token.url, "tiny", seconds=0.1, token="secret") as stream:
        assert len(list(stream)) and stream.finished


def test_streams_per_client(serve: Serve) -> None:
    server = serve(slots=9, streams_per_client=2)
    with opened(server), opened(server):
        until(lambda: server.service.open_connections == 2)
        assert refused(server) == "limit"
    until(lambda: server.service.open_connections == 0)
    with connect(server.url, "tiny", seconds=0.1) as stream:
        assert len(list(stream))


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
def test_other_sites_are_refused(server: Server, headers: dict[str, str]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        lines = {
            "Host": f"{host}:{port}", "Upgrade": "websocket", "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==", **headers,
        }  # fmt: skip
        request = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        client.sendall(f"GET /v1/stream HTTP/1.1\r\n{request}\r\n".encode())
        assert b" 403 " in client.recv(1024)


def test_the_page_itself_is_not_refused(server: Server) -> None:
    with opened(server, origin=server.url) as socket:
        socket.send(start(seconds=0.1))
        assert messages(socket)[0][-1]["type"] == "finished"
    with pytest.raises(InvalidStatus), opened(server, origin="https" + server.url[4:] + "0"):
        pass


def test_a_server_that_ends_says_so(serve: Serve) -> None:
    server = serve(slots=1)
    with opened(server) as playing, opened(server) as waiting:
        playing.send(start(ahead_s=0.1))
        assert json.loads(playing.recv(timeout=20))["type"] == "started"
        waiting.send(start())
        assert json.loads(waiting.recv(timeout=20))["type"] == "queued"
        server.service.turns.close()
        for socket in (playing, waiting):
            events, _, code = messages(socket)
            assert events[-1]["type"] == "finished" and events[-1]["reason"] == "shutdown" and code == 1000
        assert refused(server, start()) == "shutdown"


def test_time_to_the_first_piece_is_counted(server: Server) -> None:
    begun = time.monotonic()
    with connect(server.url, "tiny", seconds=0.1) as stream:
        list(stream)
    wall_s = time.monotonic() - begun
    samples = {s.name: s.value for s in server.service.metrics.first_s.collect()[0].samples if not s.labels}
    assert samples["txl_audio_first_piece_seconds_count"] == 1
    assert 0 < samples["txl_audio_first_piece_seconds_sum"] < wall_s
