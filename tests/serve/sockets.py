"""Clients that speak HTTP and WebSocket by hand, to do what no library does."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

from tests.serve.conftest import Server


def asked(server: Server, *lines: str) -> socket.socket:
    """A connection with little room for what it is sent, on which these lines of a request were said."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.settimeout(20)
    if lines:
        said = (lines[0], f"Host: {host}:{port}", *lines[1:])
        client.sendall("".join(f"{line}\r\n" for line in said).encode())
    return client


def websocket(server: Server) -> socket.socket:
    """A WebSocket of which only the head of the answer was read."""
    client = asked(
        server, "GET /v1/stream HTTP/1.1", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==", "Sec-WebSocket-Version: 13", "",
    )  # fmt: skip
    assert b"101" in client.recv(1024)
    return client


def frame(opcode: int, data: bytes = b"", *, last: bool = True) -> bytes:
    """A frame of RFC 6455, section 5.2, of at most 125 bytes, masked with zeros."""
    assert len(data) <= 125
    return bytes([opcode | (0x80 if last else 0), 0x80 | len(data), 0, 0, 0, 0]) + data


def silent_reader(server: Server, **fields: Any) -> socket.socket:
    """A client that opens a stream and reads nothing of it."""
    client = websocket(server)
    client.sendall(frame(0x1, json.dumps({"type": "start", "model": "tiny", **fields}).encode()))
    return client


def cut_off(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    data = b""
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            data += part
    return data
