"""Audio files to shards: every file is encoded (see `encode`) and appended.

Files are worked on by several processes and written by one, in the order they were listed, so
that the result has the same bytes for any number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.data import audio
from txl_audio.data.datasets import find_recordings
from txl_audio.data.encode import Prepared, Settings, encoded
from txl_audio.data.encode_on_ray import encoded_on_ray
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
from txl_audio.data.recordings import Recording, with_transcripts
from txl_audio.data.shard_writer import ShardWriter, finish_interrupted
from txl_audio.data.shards import Document
from txl_audio.data.splits import assign_splits
from txl_audio.data.variants import VARIATION, with_variants
from txl_audio.tokens import Codec, ConfigError, DataError, TokenSpec, settings_hash

Progress = Callable[[int, int, float], None]
"""Called after every recording and variant with (done, in all, seconds of audio so far)."""


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    codec: Codec | None = None,
    root: str | Path | None = None,
    transcripts: str | Path | None = None,
    split: str | None = None,
    trim_db: float | None = None,
    gain: str = "none",
    variants: int = 1,
    workers: int | None = None,
    ray: bool = False,
    shard: tuple[int, int] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Encodes recordings into the shard folder `out`.

    An interrupted run leaves `OUT.partial`, which the same call continues. A call that would make
    what is already there returns at once (`unchanged`); where the same files have new content, they
    are prepared again. The folder also gets `vocabulary.json`
    where anything is known of what is said, `manifest.jsonl` (accepted files that are recordings as a
    whole; Lhotse's fields and no others, so without splits; lengths at the codec's rate) and `rejected.json`.

    Args:
        source: folder of audio, manifest or another source, see `datasets.find_recordings`; with `root`
            the name of a data set.
        out: shard folder to write.
        codec: mu-law where None.
        root: folder of the data set's local copy.
        transcripts: file of what is said in the recordings, see `transcripts.read_transcripts`; None takes
            what the data set says of itself.
        split: see `datasets.assign_splits`.
        trim_db: cut silence this far below the loudest part of each clip; None keeps everything.
        gain: see `audio.gain_factor`; `none` leaves levels as they are.
        variants: how often each recording of `train` is prepared: as it is, then a little different, see
            `variants.vary`; always in the same ways, and with the same text.
        workers: processes; None chooses by the number of files and processors. With more than one,
            scripts need the usual `if __name__ == "__main__":`.
        ray: work on a Ray cluster, see `encode_on_ray`; the shards have the same bytes.
        shard: (i, n) prepares the i-th of n parts of the same set, from 1, into
            `shard_folder(out, i, n)`, here or on another machine; `merge.merge` joins them. Splits are those
            of the whole.
        strict: raise at the first file that cannot be used instead of listing it.
        overwrite: replace shards that were made of other files or with other settings.
        progress: called after every file.

    Raises ConfigError for a wrong rule; DataError where there is no audio, no usable file, `out`
    is something else or, without `overwrite`, another set of shards, or with `strict`.
    """
    codec = MuLawCodec() if codec is None else codec
    spec = codec.spec.framed(1) if codec.spec.modality == "waveform" else codec.spec
    audio.parse_gain(gain)
    if trim_db is not None:
        audio.trim(np.zeros(1, np.float32), trim_db)
    recordings = find_recordings(source, root=root)
    if transcripts is not None:
        recordings = with_transcripts(recordings, transcripts)
    recordings, split = assign_splits(recordings, split)
    preparation = {
        "sample_rate_hz": spec.sample_rate_hz,
        "channels": "mean",
        "resampler": audio.RESAMPLER,
        "trim_db": trim_db,
        "gain": gain,
        "quantiser": getattr(codec, "description", spec.name),
        "split": split,
    }
    groups = with_variants(recordings, variants)
    if variants > 1:
        preparation |= {"variants": variants, "variation": VARIATION}
    identity, request = whole = _identity_and_request(recordings, spec, preparation)
    origin = str(source) if root is None else f"{source} in {root}"
    out = Path(out)
    if shard is not None:
        out = shard_folder(out, *shard)
        groups = _share(groups, *shard)
        identity, request = (settings_hash({"whole": name, "shard": shard}) for name in whole)
    finish_interrupted(out)
    made = how_it_was_made(out)
    finished = finished_report(out, made) if made.get("request") == request else None
    if finished is not None:
        if strict and finished.rejected:
            raise DataError(str(finished.rejected[0]))
        return finished
    if not overwrite:
        require_own(out, made, identity, origin)

    settings = Settings(codec=codec, trim_db=trim_db, gain=gain)
    recordings = [recording for group in groups for recording in group]
    rejected: list[Rejected] = []
    empty = shard is not None  # all that is good may lie in the others
    with ShardWriter(
        out, spec=spec, preparation=preparation, resume_key=request, may_be_empty=empty
    ) as writer:
        manifest_path = writer.folder / MANIFEST_FILE
        if writer.documents:
            _cut_manifest(manifest_path, writer.documents, {r.id for r in recordings if _is_file(r)})
        done = {document.id for document in writer.documents}
        todo = [r for r in recordings if r.id not in done]
        seconds = sum(d.frames for d in writer.documents) / spec.frame_rate_hz
        with (
            open(manifest_path, "a", encoding="utf-8") as manifest,
            closing((encoded_on_ray if ray else encoded)(todo, settings, workers)) as results,
        ):
            for count, (recording, result) in enumerate(zip(todo, results, strict=True), len(done) + 1):
                if isinstance(result, str):
                    item = Rejected(recording.source, result)
                    if item not in rejected[-1:]:  # a file says so once, its variants not again
                        rejected.append(item)
                    if strict:
                        raise DataError(str(item))
                else:
                    if _is_file(recording):
                        # First the manifest, then the journal: a recording on disk always has its line.
                        manifest.write(json.dumps(_manifest_item(recording, result, spec)) + "\n")
                        manifest.flush()
                    document = writer.append(
                        result.symbols,
                        id=recording.id,
                        split=str(recording.split),
                        source=recording.source,
                        text=recording.text,
                        speaker=recording.speaker,
                        **result.fields,
                    )
                    seconds += document.frames / spec.frame_rate_hz
                if progress is not None:
                    progress(count, len(recordings), seconds)
        if not writer.documents and shard is None:
            raise none_usable(rejected, origin)
        made = {"source": origin, "set": identity, "request": request}
        if shard is not None:
            made |= {"whole": whole}
        note(writer, made, rejected)
    return report_of(out, writer.documents, spec, tuple(rejected), split, unchanged=False)


def _identity_and_request(
    recordings: Sequence[Recording], spec: TokenSpec, preparation: dict[str, Any]
) -> tuple[str, str]:
    """Names a call twice: by its settings and files, and by those and the files' content.

    Size and time stand for the content: hashing would read it.
    """
    identity = hashlib.sha256(json.dumps([spec.to_json(), preparation], sort_keys=True).encode())
    states = []
    for r in recordings:
        said: list[Any] = [r.text] if r.text else []
        if r.speaker or r.part is not None:
            said = [r.text, r.speaker, repr(r.part)]
        facts = [r.id, str(r.path.absolute()), r.source, r.split, r.claim, *said]
        identity.update(json.dumps(facts).encode())
        stat = r.path.stat() if r.path.is_file() else None
        states.append(None if stat is None else (stat.st_size, stat.st_mtime_ns))
    request = hashlib.sha256(json.dumps([identity.hexdigest(), states]).encode())
    return identity.hexdigest(), request.hexdigest()


def _share(groups: list[list[Recording]], number: int, of: int) -> list[list[Recording]]:
    """The number-th of so many parts, one after another, so that joining them is writing one after another.

    Raises ConfigError where there is no such part.
    """
    if not 1 <= number <= of <= len(groups):
        raise ConfigError(
            f"shard {number}/{of} of {len(groups)} recordings; expected i/n with i from 1 to n, and at "
            "least one recording for each"
        )
    begin, end = (len(groups) * i // of for i in (number - 1, number))
    return groups[begin:end]


def _cut_manifest(path: Path, documents: Sequence[Document], files: set[str]) -> None:
    """Leaves the lines of the `files` an interrupted run had written; one more may stand last."""
    written = [document.id for document in documents if document.id in files]
    try:
        with open(path, "rb") as file:
            lines = [file.readline() for _ in written]
        ids = [json.loads(line)["id"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        ids = []
    if ids != written:
        raise DataError(f"{path.parent} is damaged; delete it and prepare again")
    os.truncate(path, sum(map(len, lines)))


def _is_file(recording: Recording) -> bool:
    """Whether it stands in the manifest, which describes files as they are."""
    return recording.part is None and not recording.variant


def _manifest_item(recording: Recording, result: Prepared, spec: TokenSpec) -> dict[str, Any]:
    rate_hz = spec.sample_rate_hz
    item: dict[str, Any] = {
        "id": recording.id,
        "sources": [
            {
                "type": "file",
                "channels": list(range(result.channels)),
                "source": str(recording.path.absolute()),
            }
        ],
        "sampling_rate": rate_hz,
        "num_samples": result.samples,
        "duration": result.samples / rate_hz,
    }
    source_hz = result.fields["sample_rate_hz"]
    if source_hz != rate_hz:
        kwargs = {"source_sampling_rate": source_hz, "target_sampling_rate": rate_hz}
        item["transforms"] = [{"name": "Resample", "kwargs": kwargs}]
    return item
