"""Which recordings are for training, validation and test."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from txl_audio.data.recordings import Recording
from txl_audio.tokens import ConfigError, DataError

DEFAULT_SPLIT = "every-20th"


def assign_splits(recordings: list[Recording], rule: str | None) -> tuple[list[Recording], str]:
    """Recordings with their splits, and the rule that was used.

    Rules:
        `every-Nth`: base names sorted; number i is `val` where i % N is 0, `test` where it is
            N // 2, `train` otherwise. Files count whether or not they turn out to be readable.
            A single file is thus `val`, and fewer than N // 2 + 1 give no `test`.
        `lists:DIR`: files train.txt, val.txt and test.txt of ids or relative paths; recordings in
            no list are left out.
        `official`: the data set's or manifest's own.
        `all:NAME`: one split for everything.
        None: `official` where every recording has one, `every-20th` otherwise.

    Raises ConfigError for another rule, DataError where the rule does not fit the recordings.
    """
    if rule is None:
        rule = "official" if all(r.split is not None for r in recordings) else DEFAULT_SPLIT
    kind, _, value = rule.partition(":")
    every = re.fullmatch(r"every-(\d+)(?:st|nd|rd|th)", rule)
    if every and int(every[1]) >= 3:
        return _every_nth(recordings, int(every[1])), rule
    if rule == "official":
        without = [r.id for r in recordings if r.split is None]
        if without:
            raise DataError(
                f"no official split is known for {len(without)} of {len(recordings)} recordings "
                f"(first: {without[0]}); use every-20th or lists:DIR"
            )
        return recordings, rule
    if kind == "lists" and value:
        return _from_lists(recordings, Path(value)), rule
    if kind == "all" and value:
        return [replace(r, split=value) for r in recordings], rule
    raise ConfigError(
        f"no split rule {rule!r}; expected every-20th (N at least 3), lists:DIR, official or all:NAME"
    )


def _every_nth(recordings: list[Recording], n: int) -> list[Recording]:
    order = sorted(recordings, key=lambda r: (PurePosixPath(r.source).stem, r.source, r.id))
    split = {r.id: {0: "val", n // 2: "test"}.get(i % n, "train") for i, r in enumerate(order)}
    return [replace(r, split=split[r.id]) for r in recordings]


def _from_lists(recordings: list[Recording], folder: Path) -> list[Recording]:
    split_of: dict[str, str] = {}
    for name in ("train", "val", "test"):
        path = folder / f"{name}.txt"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for entry in filter(None, (line.strip() for line in lines)):
            if split_of.setdefault(entry, name) != name:
                raise DataError(f"{entry!r} is listed in {split_of[entry]}.txt and {name}.txt of {folder}")
    if not split_of:
        raise DataError(f"no split lists in {folder}; expected train.txt, val.txt or test.txt with ids")
    chosen = []
    for r in recordings:
        splits = {split_of.pop(entry) for entry in {r.id, r.source} if entry in split_of}
        if len(splits) > 1:
            raise DataError(f"{r.id!r} is listed in {' and '.join(sorted(splits))} of {folder}")
        chosen += [replace(r, split=splits.pop())] if splits else []
    if split_of:
        raise DataError(
            f"{len(split_of)} entries of the lists in {folder} are no recordings "
            f"(first: {next(iter(split_of))!r}); list ids or relative paths"
        )
    return chosen
