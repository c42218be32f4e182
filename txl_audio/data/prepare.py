"""Audio files to shards: every file is read, resampled, trimmed, scaled, encoded and appended.

Files are worked on by several processes and written by one, in the order they were listed, so
that the result has the same bytes for any number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from txl_audio.codecs.mulaw import MuLawCodec, clipped_count
from txl_audio.data import audio
from txl_audio.data.datasets import Recording, assign_splits, find_recordings, with_transcripts
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
from txl_audio.data.shards import Document, symbol_dtype
from txl_audio.tokens import Codec, ConfigError, DataError, TokenSpec, settings_hash

# Starting a process costs seconds, for which one process prepares hundreds of short files.
_FILES_PER_WORKER = 1024

Progress = Callable[[int, int, float], None]
"""Called after every file with (files done, files in all, seconds of audio so far)."""


@dataclass(frozen=True)
class _Settings:
    """What a worker needs besides the file."""

    codec: Codec
    trim_db: float | None
    gain: str


@dataclass(frozen=True)
class _Prepared:
    """One file's result, on its way from a worker to the writer."""

    symbols: np.ndarray
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `Document` that depend on the file's content."""
    samples: int = 0
    """Length at the codec's rate, before trimming."""
    channels: int = 1


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
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Encodes recordings into the shard folder `out`.

    An interrupted run leaves `OUT.partial`, which the same call continues. A call that would make
    what is already there returns at once (`unchanged`); where the same files have new content, they
    are prepared again. The folder also gets `vocabulary.json`
    where anything is known of what is said, `manifest.jsonl` (accepted files, Lhotse's fields and
    no others, so without splits; lengths at the codec's rate) and `rejected.json`.

    Args:
        source: folder of audio, Lhotse recording manifest, or with `root` the name of a data set.
        out: shard folder to write.
        codec: mu-law where None.
        root: folder of the data set's local copy.
        transcripts: file of what is said in the recordings, see `transcripts.read_transcripts`; None takes
            what the data set says of itself.
        split: see `datasets.assign_splits`.
        trim_db: cut silence this far below the loudest part of each clip; None keeps everything.
        gain: see `audio.gain_factor`; `none` leaves levels as they are.
        workers: processes; None chooses by the number of files and processors. With more than one,
            scripts need the usual `if __name__ == "__main__":`.
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
    identity, request = whole = _identity_and_request(recordings, spec, preparation)
    origin = str(source) if root is None else f"{source} in {root}"
    out = Path(out)
    if shard is not None:
        out = shard_folder(out, *shard)
        recordings = _share(recordings, *shard)
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

    settings = _Settings(codec=codec, trim_db=trim_db, gain=gain)
    rejected: list[Rejected] = []
    empty = shard is not None  # all that is good may lie in the others
    with ShardWriter(
        out, spec=spec, preparation=preparation, resume_key=request, may_be_empty=empty
    ) as writer:
        manifest_path = writer.folder / MANIFEST_FILE
        if writer.documents:
            _cut_manifest(manifest_path, writer.documents)
        done = {document.id for document in writer.documents}
        todo = [r for r in recordings if r.id not in done]
        seconds = sum(d.frames for d in writer.documents) / spec.frame_rate_hz
        with (
            open(manifest_path, "a", encoding="utf-8") as manifest,
            closing(_work(todo, settings, workers)) as results,
        ):
            for count, (recording, result) in enumerate(zip(todo, results, strict=True), len(done) + 1):
                if isinstance(result, str):
                    rejected.append(Rejected(recording.source, result))
                    if strict:
                        raise DataError(str(rejected[-1]))
                else:
                    # First the manifest, then the journal: a document on disk always has its line.
                    manifest.write(json.dumps(_manifest_item(recording, result, spec)) + "\n")
                    manifest.flush()
                    document = writer.append(
                        result.symbols,
                        id=recording.id,
                        split=str(recording.split),
                        source=recording.source,
                        text=recording.text,
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
        said = [r.text] if r.text else []
        facts = [r.id, str(r.path.absolute()), r.source, r.split, r.claim, *said]
        identity.update(json.dumps(facts).encode())
        stat = r.path.stat() if r.path.is_file() else None
        states.append(None if stat is None else (stat.st_size, stat.st_mtime_ns))
    request = hashlib.sha256(json.dumps([identity.hexdigest(), states]).encode())
    return identity.hexdigest(), request.hexdigest()


def _share(recordings: list[Recording], number: int, of: int) -> list[Recording]:
    """The number-th of so many parts, one after another, so that joining them is writing one after another.

    Raises ConfigError where there is no such part.
    """
    if not 1 <= number <= of <= len(recordings):
        raise ConfigError(
            f"shard {number}/{of} of {len(recordings)} recordings; expected i/n with i from 1 to n, and at "
            "least one recording for each"
        )
    begin, end = (len(recordings) * i // of for i in (number - 1, number))
    return recordings[begin:end]


def _cut_manifest(path: Path, documents: Sequence[Document]) -> None:
    """Leaves the lines of the documents an interrupted run had written; one more may stand last."""
    try:
        with open(path, "rb") as file:
            lines = [file.readline() for _ in documents]
        ids = [json.loads(line)["id"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        ids = []
    if ids != [document.id for document in documents]:
        raise DataError(f"{path.parent} is damaged; delete it and prepare again")
    os.truncate(path, sum(map(len, lines)))


def _manifest_item(recording: Recording, result: _Prepared, spec: TokenSpec) -> dict[str, Any]:
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


def _prepare_one(recording: Recording, settings: _Settings) -> _Prepared | str:
    """One file's symbols, or the reason why it cannot be used."""
    try:
        return _encode(recording, settings)
    except DataError as error:
        return str(error).removeprefix(f"{recording.path}: ")
    except (OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def _encode(recording: Recording, settings: _Settings) -> _Prepared:
    spec = settings.codec.spec
    pcm, rate_hz = audio.read_audio(recording.path)
    if recording.claim is not None:
        _check_claim(len(pcm), rate_hz, *recording.claim)
    pcm = audio.resample(pcm, from_hz=rate_hz, to_hz=spec.sample_rate_hz)
    samples, kept = len(pcm), None
    if settings.trim_db is not None:
        kept = audio.trim(pcm, settings.trim_db, sample_rate_hz=spec.sample_rate_hz)
        if kept == (0, 0):
            raise DataError("only silence, nothing is left after trimming")
        pcm = pcm[kept[0] : kept[1]]
    gain = audio.gain_factor(pcm, settings.gain)
    if gain != 1.0:
        pcm = pcm * np.float32(gain)
    clipped = clipped_count(pcm)
    codes = settings.codec.encode(torch.from_numpy(pcm.clip(-1, 1))[None])[0].numpy()
    if spec.modality == "waveform":
        # The flat stream: what fills the last frame is no part of the recording.
        codes = codes.reshape(-1, 1)[: len(pcm)]
    fields = {
        "sha256": audio.file_sha256(recording.path),
        "sample_rate_hz": rate_hz,
        "gain": gain,
        "trim": kept,
        "clipped": clipped,
    }
    return _Prepared(
        symbols=codes.astype(symbol_dtype(spec.vocab_size)),
        fields=fields,
        samples=samples,
        channels=soundfile.info(recording.path).channels,
    )


def _check_claim(samples: int, rate_hz: int, claimed: int, claimed_hz: int) -> None:
    expected = audio.resampled_length(samples, from_hz=rate_hz, to_hz=claimed_hz)
    # Other tools round lengths after resampling to the nearest; the file itself leaves no doubt.
    if abs(expected - claimed) > (0 if rate_hz == claimed_hz else 1):
        raise DataError(
            f"the manifest says {claimed} samples at {claimed_hz} Hz, the file has {samples} at {rate_hz} Hz"
        )


def _work(
    recordings: Sequence[Recording], settings: _Settings, workers: int | None
) -> Generator[_Prepared | str, None, None]:
    """Results in the order of the recordings; a bounded number is held at a time."""
    if workers is None:
        workers = min(os.cpu_count() or 1, len(recordings) // _FILES_PER_WORKER)
    if workers <= 1:
        yield from (_prepare_one(recording, settings) for recording in recordings)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    pending: deque[Future[_Prepared | str]] = deque()
    try:
        for recording in recordings:
            pending.append(pool.submit(_run_in_worker, recording))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended unexpectedly; with little memory use fewer workers, in a script call "
            "prepare below `if __name__ == '__main__':`, then run again to continue"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_settings: _Settings | None = None


def _start_worker(settings: _Settings) -> None:
    global _worker_settings
    _worker_settings = settings
    torch.set_num_threads(1)  # the processes are the parallelism


def _run_in_worker(recording: Recording) -> _Prepared | str:
    assert _worker_settings is not None
    return _prepare_one(recording, _worker_settings)
