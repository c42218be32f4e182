"""What there is to prepare: recordings of a folder, a manifest or a named data set, and their splits.

Nothing here decodes audio. A new data set is one line in `DATASETS`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from txl_audio.data.audio import find_audio
from txl_audio.data.transcripts import folder_name, librispeech_text, ljspeech_text, read_transcripts
from txl_audio.tokens import ConfigError, DataError

DEFAULT_SPLIT = "every-20th"


@dataclass(frozen=True)
class Recording:
    """One audio file to prepare.

    Attributes:
        id: unique among its recordings.
        path: where the file is.
        source: the same, relative to the folder or manifest it was found with (POSIX).
        split: official split, or the assigned one after `assign_splits`; None where there is none.
        claim: (samples, rate_hz) that a manifest claims, checked when the file is read.
        text: what is said in it; empty where that is not known.
    """

    id: str
    path: Path
    source: str
    split: str | None = None
    claim: tuple[int, int] | None = None
    text: str = ""


def find_recordings(source: str | Path, *, root: str | Path | None = None) -> list[Recording]:
    """Recordings of a folder, of a manifest (.jsonl, .jsonl.gz), or of a data set with its `root`.

    Raises DataError where there is no such source or it has no audio.
    """
    if root is not None:
        recordings = _list_dataset(str(source), Path(root))
    elif Path(source).is_dir():
        recordings = _list_folder(Path(source), lambda name: True)
    elif Path(source).is_file() and re.search(r"\.jsonl(\.gz)?$", str(source)):
        recordings = read_manifest(source)
    elif str(source) in DATASETS:
        raise DataError(f"data set {source!r} needs the folder of its local copy: give its root")
    else:
        raise DataError(
            f"nothing to prepare at {source}; expected a folder of audio files, a .jsonl or .jsonl.gz "
            f"manifest, or a data set with its root: {', '.join(DATASETS)}"
        )
    if not recordings:
        raise DataError(f"no audio in {root if root is not None else source}")
    return recordings


def _list_folder(folder: Path, keep: Callable[[PurePosixPath], bool]) -> list[Recording]:
    """Recordings below a folder. Ids are relative paths, without suffix where that names one file only."""
    paths = [path for path in find_audio(folder) if keep(PurePosixPath(path.relative_to(folder).as_posix()))]
    names = [PurePosixPath(path.relative_to(folder).as_posix()) for path in paths]
    stems = [str(name.with_suffix("")) for name in names]
    # A stem may also be another file's whole name: a.wav.wav beside a.wav and a.flac.
    count = Counter(stems) + Counter(map(str, names))
    return [
        Recording(id=stem if count[stem] == 1 else str(name), path=path, source=str(name))
        for path, name, stem in zip(paths, names, stems, strict=True)
    ]


def read_manifest(path: str | Path) -> list[Recording]:
    """Recordings of a Lhotse manifest: one JSON object a line, of one source of type `file` each.

    Relative sources are looked up beside the manifest, then in the working directory. An extra
    field `split` is the official split. Raises DataError naming the line for anything else,
    among it transforms that change what is heard (resampling is repeated from the file itself).
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable as a manifest: {error}") from error
    recordings: dict[str, Recording] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            recording = _from_manifest(json.loads(line), path.parent)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"{path}:{number}: no Lhotse recording ({type(error).__name__}: {error}); expected the "
                "fields id, sources, sampling_rate, num_samples and duration"
            ) from error
        if recording.id in recordings:
            raise DataError(f"{path}:{number}: a second recording is called {recording.id!r}")
        recordings[recording.id] = recording
    return list(recordings.values())


def _from_manifest(item: dict[str, Any], beside: Path) -> Recording:
    if len(item["sources"]) != 1 or item["sources"][0]["type"] != "file":
        kinds = [source["type"] for source in item["sources"]]
        raise DataError(f"recording {item['id']!r} has sources {kinds}, expected one of type 'file'")
    transforms = [transform["name"] for transform in item.get("transforms") or ()]
    if set(transforms) - {"Resample"}:
        raise DataError(f"recording {item['id']!r} has transforms {transforms}; store it as a file first")
    claim = (int(item["num_samples"]), int(item["sampling_rate"]))
    if abs(claim[0] / claim[1] - float(item["duration"])) > 1 / claim[1]:
        raise DataError(f"recording {item['id']!r}: duration and num_samples / sampling_rate differ")
    source = str(item["sources"][0]["source"])
    near = beside / source
    return Recording(
        id=str(item["id"]),
        path=near if near.is_file() else Path(source),
        source=source,
        split=item.get("split"),
        claim=claim,
    )


def with_transcripts(recordings: list[Recording], path: str | Path) -> list[Recording]:
    """Recordings with what `path` says of them, by id or base name; see `read_transcripts`.

    Raises DataError where one is not there.
    """
    texts = read_transcripts(path)
    found = [texts.get(r.id) or texts.get(PurePosixPath(r.source).stem) for r in recordings]
    missing = [r.id for r, text in zip(recordings, found, strict=True) if text is None]
    if missing:
        raise DataError(
            f"{path} has no transcript of {len(missing)} of {len(recordings)} recordings (first: "
            f"{missing[0]}); add them, or take the files away"
        )
    return [replace(r, text=str(text)) for r, text in zip(recordings, found, strict=True)]


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


@dataclass(frozen=True)
class DataSet:
    """How a data set lies on disk.

    Attributes:
        folders: where the files are, below the root; the first that exists.
        keep: which files belong to it, by path relative to that folder.
        splits: official split of a file, given that folder; None where the authors made none.
        torchaudio: class that downloads it, None where there is none.
        subsets: what is downloaded of a set in parts: a default, and what is always needed besides.
        text: what is said in a file, given that folder; None where that is not read.
    """

    folders: tuple[str, ...]
    keep: Callable[[PurePosixPath], bool] = lambda name: True
    splits: Callable[[Path], Callable[[PurePosixPath], str]] | None = None
    torchaudio: str | None = None
    subsets: tuple[str, ...] = ()
    text: Callable[[Path], Callable[[PurePosixPath], str]] | None = None


def _list_dataset(name: str, root: Path) -> list[Recording]:
    dataset = _dataset(name)
    if not root.is_dir():
        raise DataError(f"no folder at {root}; expected a local copy of {name}")
    base = next((root / f for f in dataset.folders if (root / f).is_dir()), root)
    recordings = _list_folder(base, dataset.keep)
    if not recordings:
        raise DataError(f"no files of {name} in {base}; expected the layout of its archive")
    if dataset.text is not None:
        text = dataset.text(base)
        recordings = [replace(r, text=text(PurePosixPath(r.source))) for r in recordings]
    if dataset.splits is None:
        return recordings
    split = dataset.splits(base)
    return [replace(r, split=split(PurePosixPath(r.source))) for r in recordings]


def _dataset(name: str) -> DataSet:
    if name not in DATASETS:
        raise DataError(f"no data set is called {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def _speechcommands_splits(base: Path) -> Callable[[PurePosixPath], str]:
    """The archive's lists; whatever they do not name is training data."""
    split: dict[str, str] = {}
    for file, name in (("validation_list.txt", "val"), ("testing_list.txt", "test")):
        if not (base / file).is_file():
            raise DataError(f"{base / file} is missing; Speech Commands needs it for its official split")
        split |= dict.fromkeys((base / file).read_text(encoding="utf-8").split(), name)
    return lambda path: split.get(str(path), "train")


def _librispeech_splits(base: Path) -> Callable[[PurePosixPath], str]:
    """By subset folder: train-*, dev-* and test-*, which may also be the root itself."""

    def split(path: PurePosixPath) -> str:
        for part in (*path.parts, base.resolve().name):
            for prefix, name in (("train-", "train"), ("dev-", "val"), ("test-", "test")):
                if part.startswith(prefix):
                    return name
        raise DataError(f"{path} lies in no train-*, dev-* or test-* folder of LibriSpeech")

    return split


def _fsdd_splits(base: Path) -> Callable[[PurePosixPath], str]:
    """By take of every speaker and digit: the authors test on 0 to 4 and train on the others.

    They validate on nothing. Here takes 5 to 9 of their training data are `val`, a tenth of the set.
    """
    return lambda path: ("test", "val", "train")[min(int(path.stem.split("_")[2]) // 5, 2)]


def _is_command(path: PurePosixPath) -> bool:
    return "_nohash_" in path.name and len(path.parts) == 2


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_COMMANDS = tuple(
    above + version
    for version in ("speech_commands_v0.02", "speech_commands_v0.01")
    for above in ("", "SpeechCommands/")
)

DATASETS: dict[str, DataSet] = {
    "speechcommands": DataSet(
        _COMMANDS, _is_command, _speechcommands_splits, "SPEECHCOMMANDS", text=folder_name
    ),
    # The digits of Speech Commands: the benchmark of WaveNet-style models.
    "sc09": DataSet(
        _COMMANDS,
        lambda p: _is_command(p) and p.parts[0] in _DIGITS,
        _speechcommands_splits,
        "SPEECHCOMMANDS",
        text=folder_name,
    ),
    "librispeech": DataSet(
        ("LibriSpeech",),
        lambda p: True,
        _librispeech_splits,
        "LIBRISPEECH",
        subsets=("train-clean-100", "dev-clean"),
        text=librispeech_text,
    ),
    "ljspeech": DataSet(("LJSpeech-1.1/wavs", "wavs"), torchaudio="LJSPEECH", text=ljspeech_text),
    # Two microphones heard every sentence; both would put the same words into two splits.
    "vctk": DataSet(
        (
            "VCTK-Corpus-0.92/wav48_silence_trimmed",
            "wav48_silence_trimmed",
            "VCTK-Corpus/wav48",
            "wav48",
        ),
        lambda p: not p.stem.endswith("_mic2"),
        torchaudio="VCTK_092",
    ),
    "yesno": DataSet(("waves_yesno",), torchaudio="YESNO"),
    "fsdd": DataSet(
        ("recordings", "flac"),
        lambda p: re.fullmatch(r"\d_[^_]+_\d+", p.stem) is not None,
        _fsdd_splits,
        text=lambda base: lambda path: _DIGITS[int(path.stem[0])],
    ),
}


def download(name: str, root: str | Path, *, subset: str | None = None) -> Path:
    """Downloads a data set with torchaudio and returns the root for `find_recordings`.

    `subset` is the part of LibriSpeech to fetch instead of `train-clean-100`; `dev-clean`, its
    `val`, always comes along. Raises ConfigError for a subset of another set, DataError where there
    is no downloader, torchaudio is missing or the download fails.
    """
    dataset, root = _dataset(name), Path(root)
    if dataset.torchaudio is None:
        raise DataError(f"{name} has no downloader; get a copy from its authors and give its root")
    subsets = dataset.subsets
    if subset is not None:
        if not subsets:
            raise ConfigError(f"{name} is downloaded whole, got the subset {subset!r}; leave it out")
        subsets = tuple(dict.fromkeys((subset, *subsets[1:])))
    try:
        import torchaudio.datasets
    except (ImportError, OSError) as error:
        raise DataError(f"downloading {name} needs torchaudio ({error}); pip install torchaudio") from error
    root.mkdir(parents=True, exist_ok=True)
    try:
        for part in [{"url": subset} for subset in subsets] or [{}]:
            getattr(torchaudio.datasets, dataset.torchaudio)(root, download=True, **part)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{name} could not be downloaded to {root}: {error}") from error
    return root
