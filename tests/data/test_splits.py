"""Which recordings are for training, validation and test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_datasets import splits
from txl_audio.data.recordings import Recording
from txl_audio.data.splits import assign_splits
from txl_audio.tokens import ConfigError, DataError


def test_every_nth_goes_by_base_name() -> None:
    names = [f"speaker{i % 3}/{i:03d}.wav" for i in range(100)]
    recordings = [Recording(id=n[:-4], path=Path(n), source=n) for n in sorted(names)]
    assigned, rule = assign_splits(recordings, None)
    assert rule == "every-20th"
    number = {r.id: int(r.id[-3:]) for r in assigned}
    assert sorted(number[r.id] for r in assigned if r.split == "val") == [0, 20, 40, 60, 80]
    assert sorted(number[r.id] for r in assigned if r.split == "test") == [10, 30, 50, 70, 90]
    assert sum(r.split == "train" for r in assigned) == 90
    assert [r.id for r in assigned] == [r.id for r in recordings]
    assert [r.split for r in assign_splits(recordings[:1], None)[0]] == ["val"]
    third = [r.split for r in assign_splits(recordings[:4], "every-3rd")[0]]
    assert sorted(map(str, third)) == ["test", "train", "val", "val"]


def test_lists_choose_by_id_or_path(tmp_path: Path) -> None:
    recordings = [Recording(id=i, path=Path(i), source=f"{i}.wav") for i in "abcd"]
    (tmp_path / "train.txt").write_text("a\nb.wav\n\n")
    (tmp_path / "val.txt").write_text("d\n")
    assigned, _ = assign_splits(recordings, f"lists:{tmp_path}")
    assert splits(assigned) == {"a": "train", "b": "train", "d": "val"}
    (tmp_path / "val.txt").write_text("b\n")
    with pytest.raises(DataError, match="'b' is listed in train and val"):
        assign_splits(recordings, f"lists:{tmp_path}")
    (tmp_path / "val.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"'a' is listed in train.txt and val.txt"):
        assign_splits(recordings, f"lists:{tmp_path}")
    (tmp_path / "val.txt").write_text("z\n")
    with pytest.raises(DataError, match=r"1 entries .* \(first: 'z'\)"):
        assign_splits(recordings, f"lists:{tmp_path}")
    with pytest.raises(DataError, match="no split lists in"):
        assign_splits(recordings, f"lists:{tmp_path / 'absent'}")


def test_official_and_one_split() -> None:
    known = [Recording(id="a", path=Path("a"), source="a", split="dev")]
    unknown = [Recording(id="b", path=Path("b"), source="b")]
    assert assign_splits(known, None) == (known, "official")
    assert splits(assign_splits(known + unknown, "all:test")[0]) == {"a": "test", "b": "test"}
    with pytest.raises(DataError, match=r"1 of 2 recordings \(first: b\)"):
        assign_splits(known + unknown, "official")


@pytest.mark.parametrize("rule", ["every-2nd", "every-20", "random", "all:", "lists:", ""])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="expected every-20th"):
        assign_splits([Recording(id="a", path=Path("a"), source="a")], rule)
