"""Where recordings come from, and the data sets that are known by name.

A new data set is one line in `DATASETS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from txl_audio.data.hub import HUB, is_saved, read_hub
from txl_audio.data.manifests import is_shar, read_manifest, read_shar
from txl_audio.data.recordings import Recording, list_folder
from txl_audio.data.transcripts import (
    arctic_text,
    folder_name,
    librispeech_text,
    libritts_text,
    ljspeech_text,
)
from txl_audio.tokens import ConfigError, DataError


def find_recordings(source: str | Path, *, root: str | Path | None = None) -> list[Recording]:
    """Recordings of a folder, of a manifest, of a data set with its `root`, or of Hugging Face's `datasets`.

    A folder holds audio files, Lhotse's Shar, or what `Dataset.save_to_disk` wrote; manifests are .jsonl or
    .jsonl.gz of Lhotse; `hf:NAME` is what `datasets.load_dataset` loads by a folder or name of the hub, with
    `hf:NAME:CONFIG` one of several configurations.

    Raises DataError where there is no such source or it has no audio.
    """
    folder = Path(source)
    if root is not None:
        recordings = _list_dataset(str(source), Path(root))
    elif str(source).startswith(HUB):
        recordings = read_hub(str(source).removeprefix(HUB))
    elif folder.is_dir() and is_shar(folder):
        recordings = read_shar(folder)
    elif folder.is_dir() and is_saved(folder):
        recordings = read_hub(str(folder))
    elif folder.is_dir():
        recordings = list_folder(folder, lambda name: True)
    elif folder.is_file() and re.search(r"\.jsonl(\.gz)?$", str(source)):
        recordings = read_manifest(source)
    elif str(source) in DATASETS:
        raise DataError(f"data set {source!r} needs the folder of its local copy: give its root")
    else:
        raise DataError(
            f"nothing to prepare at {source}; expected a folder of audio files, a .jsonl or .jsonl.gz "
            f"manifest, {HUB}NAME of Hugging Face's datasets, or a data set with its root: "
            f"{', '.join(DATASETS)}"
        )
    if not recordings:
        raise DataError(f"no audio in {root if root is not None else source}")
    return recordings


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
    recordings = list_folder(base, dataset.keep)
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
        raise DataError(
            f"{path} lies in no train-*, dev-* or test-* folder, which LibriSpeech and LibriTTS have"
        )

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
    "libritts": DataSet(
        ("LibriTTS",),
        lambda p: True,
        _librispeech_splits,
        "LIBRITTS",
        subsets=("train-clean-100", "dev-clean"),
        text=libritts_text,
    ),
    # The 10 hours with texts of Libri-Light.
    "librilight": DataSet(("librispeech_finetuning",), torchaudio="LibriLightLimited", text=librispeech_text),
    "cmuarctic": DataSet(
        ("ARCTIC",),
        lambda p: p.parent.name == "wav",
        torchaudio="CMUARCTIC",
        subsets=("aew",),
        text=arctic_text,
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

    `subset` is the part to fetch of LibriSpeech or LibriTTS instead of `train-clean-100`, where `dev-clean`,
    the `val`, always comes along; of CMU ARCTIC, the speaker instead of `aew`. Raises ConfigError for a
    subset of another set, DataError where there is no downloader, torchaudio is missing or the download
    fails.
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
