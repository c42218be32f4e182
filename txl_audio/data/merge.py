"""Shards that several calls of `prepare` made of one set, joined to the folder that one call makes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from txl_audio.data.prepared import (
    MANIFEST_FILE,
    PrepareReport,
    Rejected,
    finished_report,
    how_it_was_made,
    none_usable,
    note,
    report_of,
    require_own,
    shard_folder,
)
from txl_audio.data.shard_writer import ShardWriter, finish_interrupted
from txl_audio.data.shards import Document, Shards
from txl_audio.tokens import DataError


def merge(out: str | Path, *, strict: bool = False, overwrite: bool = False) -> PrepareReport:
    """Joins the folders of `prepare(..., shard=(i, n))` beside `out` into it, with the bytes of one call.

    They are left where they are. A call that would make what is already there returns at once
    (`unchanged`); after an interruption `out` is as before.

    Raises DataError where shards are missing, damaged or of different sets, where none has a usable file
    or, with `strict`, one left out any; and where `out` is another set, without `overwrite`.
    """
    out = Path(out)
    folders = _folders(out)
    for folder in folders:
        finish_interrupted(folder)
    if missing := [folder.name for folder in folders if not folder.is_dir()]:
        raise DataError(
            f"{len(missing)} of {len(folders)} shards of {out} are missing: {', '.join(missing)}; prepare "
            "them, or copy them here"
        )
    notes = [how_it_was_made(folder) for folder in folders]
    whole = notes[0].get("whole")
    foreign = [f.name for f, made in zip(folders, notes, strict=True) if made.get("whole") != whole]
    if foreign or not whole:
        raise DataError(
            f"{', '.join(foreign) or folders[0].name} beside {out} were made of other files or in another "
            f"way than {folders[0].name}; prepare all shards with the same call"
        )
    made = {"source": notes[0]["source"], "set": whole[0], "request": whole[1]}
    rejected = tuple(Rejected(**item) for note in notes for item in note["rejected"])
    if strict and rejected:
        raise DataError(str(rejected[0]))
    finish_interrupted(out)
    earlier = how_it_was_made(out)
    if earlier.get("request") == made["request"] and (report := finished_report(out, earlier)):
        return report
    if not overwrite:
        require_own(out, earlier, made["set"], str(made["source"]))
    shards = [Shards.open(folder) for folder in folders]
    first = shards[0]
    with ShardWriter(out, spec=first.spec, preparation=first.preparation) as writer:
        with open(writer.folder / MANIFEST_FILE, "wb") as manifest:
            for shard in shards:
                manifest.write((shard.path / MANIFEST_FILE).read_bytes())
                for document in shard.documents:
                    writer.append(shard.symbols(document), **_about(document))
        if not writer.documents:
            raise none_usable(rejected, str(made["source"]))
        note(writer, made, rejected)
    return report_of(
        out, writer.documents, first.spec, rejected, str(first.preparation["split"]), unchanged=False
    )


def _folders(out: Path) -> list[Path]:
    """Where the shards of `out` lie, or should lie, in order."""
    pattern = re.compile(re.escape(out.name) + r"\.shard-\d+-of-(\d+)(\.partial)?")
    found = {path.name: int(m[1]) for path in out.parent.glob("*") if (m := pattern.fullmatch(path.name))}
    if not found:
        raise DataError(f"no shards of {out} beside it; make them with prepare --out {out} --shard 1/N")
    if len(set(found.values())) > 1:
        raise DataError(
            f"beside {out} lie shards of different numbers: {', '.join(sorted(found))}; delete those that do "
            "not belong together"
        )
    n = next(iter(found.values()))
    return [shard_folder(out, i, n) for i in range(1, n + 1)]


def _about(document: Document) -> dict[str, Any]:
    """What `ShardWriter.append` is told of a document besides its symbols."""
    own = ("offset", "frames")
    return {f.name: getattr(document, f.name) for f in fields(document) if f.name not in own}
