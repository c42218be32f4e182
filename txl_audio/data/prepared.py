"""What a folder of prepared recordings says of how it was made, and the report that follows from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from txl_audio.data.shard_writer import ShardWriter
from txl_audio.data.shards import INDEX_FILE, Document, Shards
from txl_audio.data.text import VOCABULARY_FILE, CharacterVocabulary
from txl_audio.tokens import DataError, TokenSpec, TxlError

MANIFEST_FILE = "manifest.jsonl"
REJECTED_FILE = "rejected.json"


@dataclass(frozen=True)
class Rejected:
    """A file that was left out, and why."""

    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did.

    Attributes:
        out: the shard folder.
        documents: accepted files, and variants of them.
        samples: samples of audio in them.
        seconds: audio per split.
        clipped: samples that were clipped to [-1, 1].
        rejected: files that could not be used.
        split: the rule that was used.
        unchanged: the folder was already there, made from the same files in the same way.
    """

    out: Path
    documents: int
    samples: int
    seconds: dict[str, float]
    clipped: int
    rejected: tuple[Rejected, ...]
    split: str
    unchanged: bool = False

    @property
    def warnings(self) -> list[str]:
        """What would stop a training on this folder: no documents of `train` or of `val`."""
        missing = " and no ".join(f"`{name}`" for name in ("train", "val") if name not in self.seconds)
        every = self.split.startswith("every-")
        remedy = f"{self.split} needs more recordings" if every else "--split every-20th would make both"
        return [f"no {missing} documents, which training needs; {remedy}"] if missing else []


def report_of(
    out: Path,
    documents: Sequence[Document],
    spec: TokenSpec,
    rejected: tuple[Rejected, ...],
    split: str,
    *,
    unchanged: bool,
) -> PrepareReport:
    seconds: dict[str, float] = {}
    for document in documents:
        length = document.frames / spec.frame_rate_hz
        seconds[document.split] = seconds.get(document.split, 0.0) + length
    frames = sum(document.frames for document in documents)
    return PrepareReport(
        out=out,
        documents=len(documents),
        samples=round(frames * spec.sample_rate_hz / spec.frame_rate_hz),
        seconds=seconds,
        clipped=sum(document.clipped for document in documents),
        rejected=rejected,
        split=split,
        unchanged=unchanged,
    )


def how_it_was_made(out: Path) -> dict[str, Any]:
    """What an earlier call noted about `out`; empty where none did."""
    try:
        return dict(json.loads((out / REJECTED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def finished_report(out: Path, made: dict[str, Any]) -> PrepareReport | None:
    """The report of the call that made `out`; None where it is damaged."""
    try:
        shards = Shards.open(out)
        rejected = tuple(Rejected(**item) for item in made["rejected"])
        split = str(shards.preparation["split"])
    except (TxlError, KeyError, TypeError):
        return None
    return report_of(out, shards.documents, shards.spec, rejected, split, unchanged=True)


def none_usable(rejected: Sequence[Rejected], origin: str) -> DataError:
    return DataError(f"none of the {len(rejected)} files of {origin} can be used; the first: {rejected[0]}")


def shard_folder(out: Path, number: int, of: int) -> Path:
    """Where one of several calls that prepare `out` together writes."""
    return out.parent / f"{out.name}.shard-{number}-of-{of}"


def require_own(out: Path, made: dict[str, Any], identity: str, origin: str) -> None:
    """Raises DataError where `out` holds another set of shards than `identity`."""
    if (out / INDEX_FILE).is_file() and made.get("set") != identity:
        raise DataError(
            f"{out} holds shards of {made.get('source', 'unknown origin')}, made of other files or in "
            f"another way than {origin} now; choose another --out, or replace them with --overwrite"
        )


def note(writer: ShardWriter, made: dict[str, Any], rejected: Sequence[Rejected]) -> None:
    """Writes what is known of what was said, and how the shards were made, beside them."""
    if characters := set().union(*(document.text for document in writer.documents)):
        CharacterVocabulary(sorted(characters)).save(writer.folder / VOCABULARY_FILE)
    made = {**made, "rejected": [asdict(item) for item in rejected]}
    (writer.folder / REJECTED_FILE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
