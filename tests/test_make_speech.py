"""The quickstart's speech: the same arguments give the same files, and they hold what was said."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import soundfile

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_speech.py"


def make_speech(out: Path, *, utterances: int, seed: int) -> dict[str, bytes]:
    arguments = [str(out), "--utterances", str(utterances), "--seed", str(seed)]
    subprocess.run([sys.executable, str(SCRIPT), *arguments], check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_speech_repeats_and_matches_its_transcripts(tmp_path: Path) -> None:
    # Eight, so that the voices with breath noise are among them; the second folder held another set.
    first = make_speech(tmp_path / "a", utterances=8, seed=0)
    other = make_speech(tmp_path / "b", utterances=9, seed=1)
    assert make_speech(tmp_path / "b", utterances=8, seed=0) == first
    assert first["utterance_0000.wav"] != other["utterance_0000.wav"]

    with (tmp_path / "a" / "transcripts.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert {row["path"] for row in rows} | {"transcripts.tsv"} == set(first)
    for row in rows:
        pcm, sample_rate_hz = soundfile.read(tmp_path / "a" / row["path"])
        seconds_a_word = len(pcm) / sample_rate_hz / len(row["text"].split())
        assert (pcm.ndim, sample_rate_hz) == (1, 22050)
        assert 0.15 < seconds_a_word < 0.9
        assert 0.2 < abs(pcm).max() <= 1.0
