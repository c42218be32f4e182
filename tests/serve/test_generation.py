"""How much is made in one turn, and when reading a prompt stops; with a clock of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.models import letters, tiny
from tests.serve.test_uploads import tone
from tests.tiny import wave_model
from txl_audio.evaluate import EvaluateConfig
from txl_audio.serve import models
from txl_audio.serve.models import Generation, ServedModel
from txl_audio.serve.protocol import Limits, Request


class Clock:
    """In place of `time.perf_counter`: it runs when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(models.time, "perf_counter", lambda: self.now)


def go_on() -> None:
    pass


@pytest.mark.parametrize(("token_s", "counts"), [(0.019, [1, 2, 4, 5, 5]), (0.4, [1, 1, 1, 1, 1])])
def test_text_is_made_for_a_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, token_s: float, counts: list[int]
) -> None:
    clock, model = Clock(monkeypatch), letters()

    class Slow:
        def next_frames(self, count: int) -> torch.Tensor:
            clock.now += count * token_s
            return torch.ones(1, count, 1, dtype=torch.int64)

    monkeypatch.setattr(model, "sampler", lambda *_, **__: Slow())
    pieces = Generation(model, Request(model="letters"), Limits()).prepare(go_on)
    assert [piece.count for piece in itertools.islice(pieces, 5)] == counts


@pytest.mark.parametrize(("factor", "chunk"), [(None, 1600), (0.3, 1600), (2.0, 800)])
def test_a_slow_model_makes_less_in_one_turn(factor: float | None, chunk: int) -> None:
    model = tiny()
    model.real_time_factor = factor
    pieces = Generation(model, Request(model="tiny", seconds=1), Limits()).prepare(go_on)
    assert [piece.count for piece in itertools.islice(pieces, 3)] == [320, chunk, chunk]


@pytest.mark.parametrize("config", [{}, {"segment_len": 64}, {"window": "segment"}])
def test_scores_are_made_for_a_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    model = ServedModel("wave", wave_model(), evaluate=EvaluateConfig(**config))
    pcm = tone(0.05).astype(np.float32)
    nats = sum(piece.data.nats for piece in model.scores(pcm))
    length = model.evaluate.view(model.model).core.config.segment_len
    clock, scored = Clock(monkeypatch), models.score_pieces

    def slow(*arguments: Any) -> Iterator[torch.Tensor]:
        for piece in scored(*arguments):
            clock.now += 1.0
            yield piece

    monkeypatch.setattr(models, "score_pieces", slow)
    model._score_in_turns()
    # Only where the length of segments changes nothing, and none was asked for.
    shorter = length // 10 if not config else length
    assert model.evaluate.view(model.model).core.config.segment_len == shorter
    pieces = list(model.scores(pcm))
    assert sum(piece.count for piece in pieces) == 800
    assert sum(piece.data.nats for piece in pieces) == pytest.approx(nats, rel=1e-5)
    assert max(piece.count for piece in pieces) <= shorter * model.model.spec.symbols_per_frame


def test_a_prompt_is_read_no_further_than_somebody_waits() -> None:
    asked: list[int] = []

    class LeftError(Exception):
        pass

    def going_on() -> None:
        asked.append(0)
        if len(asked) == 3:
            raise LeftError

    model = ServedModel("wave", wave_model(), backend="torch")
    length = model.model.core.config.segment_len * model.model.spec.symbols_per_frame
    prompt = np.zeros(10 * length, np.float32)
    generation = Generation(model, Request(model="wave", seconds=0), Limits(), prompt)
    with pytest.raises(LeftError):
        generation.prepare(going_on)
    assert len(asked) == 3
    asked = []
    list(generation.prepare(lambda: asked.append(0)))
    assert len(asked) in (9, 10)  # segments, but for the frame that waits for the first step
