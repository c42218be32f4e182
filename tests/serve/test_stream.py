"""The WebSocket: every event, every error, and what clients that behave badly cost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from tests.serve.conftest import Server
from tests.serve.models import expected, tiny
from tests.serve.sockets import asked, cut_off, frame, silent_reader, websocket
from tests.serve.test_turns import still, until
from tests.serve.test_uploads import sound_file, tone
from txl_audio.serve.client import connect
from txl_audio.serve.connections import SocketConnection
from txl_audio.serve.protocol import CLOSE_CODE, PIECE_BYTES, Refusal
from txl_audio.serve.running import running
from txl_audio.serve.service import Room, Service
from txl_audio.serve.turns import OUTBOX_PIECES, Job
from txl_audio.serve.websocket import _Session

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


def test_a_long_prompt_comes_in_pieces(server: Server) -> None:
    data = sound_file(tone(5.0))
    assert len(data) > 2 * PIECE_BYTES
    with connect(server.url, "tiny", prompt=data, seconds=0.1) as stream:
        assert len(np.concatenate(list(stream))) == 1600
        assert stream.events["started"]["prompt_samples"] == 80_000
    with connect(server.url, "other", prompt=data) as stream, pytest.raises(Refusal, match="no model"):
        list(stream)  # refused before all of it is sent


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
        until(lambda: any(job.paused_at for job in server.service.turns.jobs))
        (job,) = server.service.turns.jobs
        until(lambda: not job.in_turn)
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


def test_who_leaves_while_its_prompt_is_read_frees_the_slot(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def reading(*_: object, going_on: Callable[[], object], **__: object) -> None:
        while True:
            going_on()
            begun.set()
            time.sleep(0.001)

    monkeypatch.setattr(server.tiny, "sampler", reading)
    with opened(server) as socket:
        socket.send(start())
        assert begun.wait(20) and server.service.turns.playing == 1
    until(lambda: server.service.turns.playing == 0)


def test_who_reads_nothing_gets_no_more_than_fits(server: Server) -> None:
    # A15: the server holds OUTBOX_PIECES and what the system takes; others go on.
    slow = silent_reader(server)
    until(lambda: any(len(job.outbox) == OUTBOX_PIECES for job in server.service.turns.jobs))
    (job,) = server.service.turns.jobs
    until(lambda: still(lambda: job.made))  # the system's buffers fill too
    with connect(server.url, "tiny", seconds=10, seed=5) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream)), expected(5, 160_000))
    until(lambda: still(lambda: job.made))
    assert job.made_s < 60  # of an hour; a few seconds where the system has small buffers
    slow.close()
    until(lambda: server.service.turns.playing == 0)


def test_who_reads_nothing_is_given_up_in_the_end(serve: Serve) -> None:
    server = serve(idle_s=0.5)
    slow = silent_reader(server)
    until(lambda: server.service.turns.playing == 1)
    until(lambda: server.service.turns.playing == 0)
    slow.close()


def test_the_connection_of_who_reads_nothing_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all is made, and what is left of it waits in the server."""
    server, lost, handle = serve(idle_s=0.3), [], SocketConnection.connection_lost
    monkeypatch.setattr(
        SocketConnection, "connection_lost", lambda *arguments: lost.append(handle(*arguments))
    )
    for number, seconds in enumerate((None, 6, 7, 8), 1):  # some of them end short of a pause in writing
        with silent_reader(server, seconds=seconds):
            until(lambda: len(lost) == number)  # noqa: B023
    assert server.service.open_connections == 0


def test_pings_that_nobody_reads_take_no_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    handle = SocketConnection.handle_ping

    def noted(connection: SocketConnection) -> None:
        handle(connection)
        waiting.append(connection.transport.get_write_buffer_size())

    monkeypatch.setattr(SocketConnection, "handle_ping", noted)
    with websocket(server) as client:
        client.sendall(20_000 * frame(0x9, bytes(125)))
        until(lambda: len(waiting) == 20_000)
    assert max(waiting) < 100_000  # of 2.5 MB


def test_a_message_of_nothing_but_fragments_ends(serve: Serve) -> None:
    server = serve(start_s=1000)
    with websocket(server) as client:
        with suppress(ConnectionError):
            client.sendall(frame(0x1, last=False) + 5_000 * frame(0x0, last=False))
        cut_off(client)


def test_a_flood_of_messages_lets_others_in(server: Server) -> None:
    class Flood:
        left = 1000

        async def receive(self) -> dict[str, str]:
            self.left -= 1
            if self.left < 0:
                return {"type": "websocket.disconnect"}
            return {"type": "websocket.receive", "text": '{"type": "resume"}'}

    async def run() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        session: Any = _Session(Flood(), server.service)  # pyright: ignore[reportArgumentType]
        with pytest.raises(WebSocketDisconnect):
            await session._control(Job(lambda _: iter(())), None)
        other.cancel()
        return turns

    assert asyncio.run(run()) > 900


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
    assert refused(server, start(prompt_bytes=5), b"1234", b"56") == "bad_message"
    assert refused(server, start(prompt_bytes=5), b"1234", b"") == "bad_message"
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
    for first in ("x", b"x"):  # before anybody said who it is, no more than a little is taken
        with opened(server) as socket:
            with suppress(ConnectionClosed):
                socket.send(first * 3_000_000)  # still being sent when the answer comes
            assert messages(socket)[2] == 1009  # the protocol's own: too big
    metrics = server.service.metrics.refused
    assert metrics.labels("unsupported")._value.get() == 4


def test_the_fault_of_a_model_is_not_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tiny, "sampler", lambda *_, **__: 1 / 0)
    assert refused(server, start()) == "internal"


def test_silence_ends(serve: Serve) -> None:
    server = serve(start_s=0.5, idle_s=0.2)
    assert refused(server) == "idle"
    assert refused(server, start(prompt_bytes=9)) == "idle"
    with opened(server) as socket:
        socket.send(start(ahead_s=0.1))
        socket.send('{"type": "pause"}')
        events, _, code = messages(socket)
        assert events[-1]["code"] == "idle" and code == 1008


def test_pausing_again_and_again_is_idle_too(serve: Serve) -> None:
    server = serve(idle_s=0.5)
    with opened(server) as socket:
        socket.send(start(ahead_s=0.1))
        with suppress(ConnectionClosed):
            for _ in range(400):
                socket.send('{"type": "pause"}')
                time.sleep(0.05)
            pytest.fail("pausing again counted as a sign of life")
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
        # Who has said nothing does not keep those out who have.
        url = server.url + "/v1/generate?model=tiny&seconds=0.1"
        assert httpx.post(url, timeout=20).status_code == 200
    until(lambda: server.service.open_connections == 0)
    with ExitStack() as stack:
        for _ in range(2):
            socket = stack.enter_context(opened(server))
            socket.send(start(ahead_s=0.1))
            assert json.loads(socket.recv(timeout=20))["type"] == "started"
        assert refused(server, start()) == "limit"
    until(lambda: server.service.open_connections == 0)
    with connect(server.url, "tiny", seconds=0.1) as stream:
        assert len(list(stream))


def test_rooms() -> None:
    room = Room(3, most_each=2)
    with ExitStack() as stack:
        for client in "aab":
            stack.enter_context(room.enter(client))
        for client, code in (("a", "limit"), ("c", "busy")):
            with pytest.raises(Refusal) as error, room.enter(client):
                pass
            assert error.value.code == code and len(room) == 3
    assert len(room) == 0


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
    lines = {
        "Host": server.url.removeprefix("http://"), "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==", **headers,
    }  # fmt: skip
    request = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with asked(server) as client:
        client.sendall(f"GET /v1/stream HTTP/1.1\r\n{request}\r\n".encode())
        assert b" 403 " in client.recv(1024)


@pytest.mark.parametrize("path", ["/", "/v1/models", "/page/app.js", "/page/"])
def test_no_other_route_is_a_websocket(server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as error, connect_socket(server.url.replace("http", "ws") + path):
        pass
    assert error.value.response.status_code == 403


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


def test_a_server_that_ends_says_so_to_who_has_not_begun() -> None:
    service = Service([tiny()], slots=1)
    context = running(service)
    server = Server(context.__enter__(), service, tiny(), tiny())
    ending = threading.Thread(target=context.__exit__, args=(None, None, None))
    uploading = asked(server, "POST /v1/score?model=tiny HTTP/1.1", "Content-Length: 9", "")
    with opened(server) as silent, opened(server) as sending, uploading:
        sending.send(start(prompt_bytes=9))
        until(lambda: (len(service.arriving), len(service.connections)) == (1, 2))
        ending.start()
        for socket in (silent, sending):
            events, _, code = messages(socket)
            assert [event["code"] for event in events] == ["shutdown"] and code == 1013
        answer = cut_off(uploading)
        assert b" 503 " in answer and b'"shutdown"' in answer
    ending.join()


def test_time_to_the_first_piece_is_counted(server: Server) -> None:
    begun = time.monotonic()
    with connect(server.url, "tiny", seconds=0.1) as stream:
        list(stream)
    wall_s = time.monotonic() - begun
    samples = {s.name: s.value for s in server.service.metrics.first_s.collect()[0].samples if not s.labels}
    assert samples["txl_audio_first_piece_seconds_count"] == 1
    assert 0 < samples["txl_audio_first_piece_seconds_sum"] < wall_s
