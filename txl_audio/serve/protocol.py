"""What clients and server say to each other, and what is refused."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from txl_audio.config import Config
from txl_audio.tokens import TxlError

Code = Literal[
    "bad_message", "unsupported", "unauthorised", "forbidden", "unknown_model", "idle", "too_large",
    "too_long", "bad_audio", "limit", "internal", "busy", "shutdown",
]  # fmt: skip

HTTP_STATUS: dict[Code, int] = {
    "bad_message": 400,
    "unsupported": 400,
    "unauthorised": 401,
    "forbidden": 403,
    "unknown_model": 404,
    "idle": 408,
    "too_large": 413,
    "too_long": 422,
    "bad_audio": 422,
    "limit": 429,
    "internal": 500,
    "busy": 503,
    "shutdown": 503,
}
assert set(HTTP_STATUS) == set(get_args(Code))

CLOSE_CODE: dict[Code, int] = {"internal": 1011, "busy": 1013, "shutdown": 1013}
"""Of a WebSocket after an error (RFC 6455, section 7.4.1, and IANA's registry); else 1008, policy."""

PIECE_BYTES = 1 << 16
"""Of a prompt or a file, in one message."""

B = TypeVar("B", bound=BaseModel)


class Refusal(TxlError):  # noqa: N818 - it is an answer
    """What a client asked for and does not get: a code for programs, a line for people."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code

    @property
    def event(self) -> dict[str, str]:
        return {"type": "error", "code": self.code, "message": str(self)}

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def close_code(self) -> int:
        return CLOSE_CODE.get(self.code, 1008)


def ending() -> Refusal:
    """What everyone is told who comes, or still speaks, while the server ends."""
    return Refusal("shutdown", "the server is ending; try again when it is back")


class Limits(Config):
    """What a server bears.

    upload_bytes: of one audio file. prompt_s, score_s: of sound in it, to continue and to score.
    message_bytes: of one JSON message.
    stream_s, stream_tokens: of one stream, sound and text. file_s: of sound that is sent as one file.
    streams_per_client: connections of one address that play or wait, and as many that have not said yet what
    they want. start_s: until a connection says it, and for the headers of a request.
    idle_s: that a client may pause, or take nothing of what is sent.
    queue: streams that wait for a slot.
    """

    upload_bytes: int = Field(default=16 << 20, ge=1)
    prompt_s: float = Field(default=30.0, gt=0)
    score_s: float = Field(default=120.0, gt=0)
    message_bytes: int = Field(default=1 << 16, ge=1)
    stream_s: float = Field(default=3600.0, gt=0)
    stream_tokens: int = Field(default=100_000, ge=1)
    file_s: float = Field(default=300.0, gt=0)
    streams_per_client: int = Field(default=8, ge=1)
    start_s: float = Field(default=10.0, gt=0)
    idle_s: float = Field(default=60.0, gt=0)
    queue: int = Field(default=16, ge=0)


class Drawing(Config):
    """How symbols are drawn; null is the model's own setting. See `sampling.filters.Filters`."""

    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=1, le=2**31)
    top_p: float | None = Field(default=None, gt=0, le=1)

    @field_validator("temperature")
    @classmethod
    def _not_next_to_zero(cls, value: float | None) -> float | None:
        # Probabilities to the power of its inverse are no numbers any more.
        if value is not None and 0 < value < 1e-3:
            raise ValueError("expected 0 or at least 0.001")
        return value


class Request(Drawing):
    """What is to be made.

    seconds, tokens: of sound or text, null up to the server's limit. text: the prompt of a text model, or
        what a model that speaks is to say.
    """

    model: str
    seconds: float | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    text: str | None = None


class Start(Request):
    """The first message on a WebSocket.

    prompt_bytes: size of the audio file that follows, 0 for none; in binary messages of at most 64 KiB.
    ahead_s: sound is made at most this far ahead of a clock that runs from the first sound and stands still
        while paused; null: as fast as it is taken.
    token: for browsers, which cannot set headers.
    """

    type: Literal["start"]
    prompt_bytes: int = Field(default=0, ge=0)
    ahead_s: float | None = Field(default=None, ge=0.1)
    token: str | None = None


class Set(Drawing):
    """Exchanges all settings of drawing while a stream plays."""

    type: Literal["set"]


class Command(Config):
    """Pauses, goes on or ends."""

    type: Literal["pause", "resume", "stop"]


Control = Annotated[Set | Command, Field(discriminator="type")]
_CONTROL: TypeAdapter[Set | Command] = TypeAdapter(Control)


def read_start(text: str) -> Start:
    """Raises Refusal `bad_message`."""
    try:
        return Start.model_validate_json(text)
    except ValidationError as error:
        raise _bad("start message", error) from error


def read_control(text: str) -> Set | Command:
    """Raises Refusal `bad_message`."""
    try:
        return _CONTROL.validate_json(text)
    except ValidationError as error:
        raise _bad("message", error) from error


def read_query(cls: type[B], fields: dict[str, str]) -> B:
    """A query string's fields, where numbers are words. Raises Refusal `bad_message`."""
    try:
        return cls.model_validate_strings(fields)
    except ValidationError as error:
        raise _bad("query", error) from error


def _bad(what: str, error: ValidationError) -> Refusal:
    """The first fault in one line, without what the client sent."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(str(part) for part in fault["loc"])[:100]
    said = f"{key}: {fault['msg']}" if key else fault["msg"]
    return Refusal("bad_message", f"the {what} is not as the protocol has it: {' '.join(said.split())[:300]}")
