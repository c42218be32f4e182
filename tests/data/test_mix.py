"""Several sets in one stream, by weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from txl_audio import recipe
from txl_audio.codecs import MuLawCodec
from txl_audio.data.shard_writer import ShardWriter
from txl_audio.data.shards import Shards
from txl_audio.data.stream import TokenStream
from txl_audio.tokens import DataError, SpecError, TokenSpec

SPEC = MuLawCodec().spec


def write(out: Path, value: int, frames: list[int], *, split: str = "train", spec: TokenSpec = SPEC) -> Path:
    with ShardWriter(out, spec=spec, preparation={"gain": "none", "name": out.name}) as writer:
        for i, n in enumerate(frames):
            symbols = np.full(n, value)
            writer.append(symbols, id=f"{i}", split=split, source="", sha256=f"{value}")
    return out


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """70 documents of 10 to 12 symbols, all 1; 9 of 20, all 2."""
    return write(tmp_path / "a", 1, [10, 11, 12] * 20), write(tmp_path / "b", 2, [20] * 9)


def stream_of(shards: Shards, *, seed: int | None = 0, epochs: int | None = 1) -> TokenStream:
    documents = recipe.SplitDocuments(shards, "train")
    return TokenStream(documents, SPEC, lanes=2, segment_len=6, seed=seed, epochs=epochs)


def count(stream: TokenStream) -> Counter[int]:
    targets = torch.cat([batch.targets.flatten() for batch in stream])
    return Counter(targets[targets >= 0].tolist())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1), (660, 660)),  # b 3.7 times
        ((2, 1), (660, 330)),
        ((1, 4), (660, 2640)),
        ((11, 3), (660, 180)),  # in proportion to their sizes: each once
        ((100, 1), (18_000, 180)),
    ],
)
def test_an_epoch_has_frames_by_weight(
    sets: tuple[Path, Path], weights: tuple[float, float], expected: tuple[int, int]
) -> None:
    found = count(stream_of(Shards.mixed(list(zip(sets, weights, strict=True)))))
    assert found[1] == pytest.approx(expected[0], abs=12) and found[2] == pytest.approx(expected[1], abs=20)
    # The set with the fewest epochs in it is read exactly once.
    assert found[1] == 660 if expected[0] == 660 else found[2] == 180


def test_what_is_drawn_and_its_order_are_new_in_every_epoch_and_of_the_seed(sets: tuple[Path, Path]) -> None:
    mixed = Shards.mixed([(sets[0], 1), (sets[1], 1)])

    def order(seed: int, epoch: int) -> list[int]:
        return list(stream_of(mixed, seed=seed)._shuffled(epoch))

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2) and order(0, 1) != order(1, 1)
    drawn = [Counter(n for n in order(0, epoch) if n >= 60) for epoch in range(3)]
    assert all(set(c.values()) == {3, 4} for c in drawn) and drawn[0] != drawn[1] != drawn[2]
    first = order(0, 0)
    assert any(n >= 60 for n in first[:10]) and any(n < 60 for n in first[-10:]), "they are interleaved"


def test_a_position_resumes(sets: tuple[Path, Path]) -> None:
    mixed = Shards.mixed([(sets[0], 1), (sets[1], 3)])
    whole, again = stream_of(mixed, epochs=None), stream_of(mixed, epochs=None)
    for _ in range(333):
        next(whole)
    again.load_state_dict(whole.state_dict())
    for _ in range(400):
        assert torch.equal(next(whole).targets, next(again).targets)


def test_without_a_seed_every_document_is_read_once(sets: tuple[Path, Path]) -> None:
    mixed = Shards.mixed([(sets[0], 1), (sets[1], 50)])
    assert count(stream_of(mixed, seed=None)) == {1: 660, 2: 180}
    assert mixed.preparation == {"gain": "none", "mix": [[str(sets[0]), 1], [str(sets[1]), 50]]}


def test_weights_are_part_of_the_identity_of_the_data(sets: tuple[Path, Path]) -> None:
    ids = {
        recipe.SplitDocuments(Shards.mixed([(sets[0], w), (sets[1], 1)]), "train").data_id for w in (1, 2, 3)
    }
    assert len(ids) == 3


def test_sets_that_do_not_fit_are_named(sets: tuple[Path, Path], tmp_path: Path) -> None:
    other = write(tmp_path / "other", 1, [5], spec=replace(SPEC, vocab_size=128))
    with pytest.raises(SpecError, match=f"{other}(.|\n)*{sets[0]}"):
        Shards.mixed([(sets[0], 1), (other, 1)])
    silent = write(tmp_path / "silent", 1, [5], split="val")
    mixed = Shards.mixed([(sets[0], 1), (silent, 1)])
    assert len(recipe.SplitDocuments(mixed, "val")) == 1
    with pytest.raises(DataError, match=f"{silent} has no documents of train to mix"):
        recipe.SplitDocuments(mixed, "train")
    (sets[1] / "vocabulary.json").write_text("{}")
    with pytest.raises(DataError, match=f"{sets[1]} and {sets[0]} have different vocabulary.json"):
        Shards.mixed([(sets[0], 1), (sets[1], 1)])
