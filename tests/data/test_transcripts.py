"""Text beside codes: documents of two kinds of frames, and where the text comes from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.data.datasets import find_recordings
from txl_audio.data.recordings import with_transcripts
from txl_audio.data.text import CharacterVocabulary
from txl_audio.data.transcripts import Order, Transcripts, read_transcripts
from txl_audio.tokens import DataError, TokenSpec

SOUND = TokenSpec("codes", 5, 2, 50.0, 16_000, "test", "0")
TRANSCRIPTS = Transcripts(CharacterVocabulary("abc"), SOUND)
END, SPEAK, WRITE, NOTHING = 5, 9, 10, 11
CODES = np.array([[0, 1], [2, 3]])


def test_both_orders_by_hand() -> None:
    assert (TRANSCRIPTS.spec.vocab_size, TRANSCRIPTS.spec.codes) == (11, 5)
    a, b = 6, 7
    first, second = ([[s, NOTHING] for s in symbols] for symbols in ([WRITE, b, a, SPEAK], [END]))
    assert TRANSCRIPTS.document("speak", CODES, "ba").tolist() == [*first, *CODES.tolist(), *second]
    last = [[s, NOTHING] for s in (WRITE, b, a, END)]
    assert TRANSCRIPTS.document("transcribe", CODES, "ba").tolist() == [
        [SPEAK, NOTHING],
        *CODES.tolist(),
        *last,
    ]


@given(
    text=st.text("abc", max_size=9),
    frames=st.integers(0, 5),
    order=st.sampled_from(["speak", "transcribe"]),
)
def test_documents_begin_with_their_prompts(text: str, frames: int, order: Order) -> None:
    codes = np.random.default_rng(0).integers(0, 5, (frames, 2))
    document = TRANSCRIPTS.document(order, codes, text)
    prompt = TRANSCRIPTS.speak_prompt(text) if order == "speak" else TRANSCRIPTS.transcribe_prompt(codes)
    np.testing.assert_array_equal(document[: len(prompt)], prompt)
    rest = document[len(prompt) :]
    if order == "speak":
        np.testing.assert_array_equal(rest[:-1], codes)
    else:
        assert TRANSCRIPTS.text_of(rest[:, 0]) == text
    allowed = TRANSCRIPTS.spec.spoken if order == "speak" else TRANSCRIPTS.spec.written
    assert rest[-1, 0] == END and all(symbol in allowed for symbol in rest[:, 0])


def test_a_text_ends_at_its_mark() -> None:
    assert TRANSCRIPTS.text_of(np.array([6, 7, END, 8])) == "ab"
    assert TRANSCRIPTS.text_of(np.array([6, 8])) == "ac"
    with pytest.raises(DataError, match="'x'"):
        TRANSCRIPTS.speak_prompt("ax")


def test_files_of_transcripts(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("a\t1.5\tHello, you.\n\nb\t2\tYes | no\n")
    assert read_transcripts(path) == {"a": "Hello, you.", "b": "Yes | no"}
    path.write_text("LJ001-0001|raw 1|written out\n")
    assert read_transcripts(path) == {"LJ001-0001": "written out"}
    # As a spreadsheet on Windows writes it; a separator of lines inside a text is a character of it.
    path.write_bytes("\ufeffa\tone\r\nb\ttwo\u2028three\r\n".encode())
    assert read_transcripts(path) == {"a": "one", "b": "two\u2028three"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [("a\n", "t.tsv:1: 'a' is no id, tab and text"), ("a\tx\na\ty\n", "t.tsv:2: a second transcript of 'a'")],
)
def test_damaged_transcripts(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "t.tsv").write_text(content)
    with pytest.raises(DataError, match=expected):
        read_transcripts(tmp_path / "t.tsv")
    with pytest.raises(DataError, match="nowhere is not readable as transcripts"):
        read_transcripts(tmp_path / "nowhere")


WORDLESS = {"c": " ", "d": None}


def test_supervisions_of_lhotse(tmp_path: Path) -> None:
    """As `SupervisionSet.to_file` writes them: the segments of a recording make its text."""
    items = [
        {"id": "s2", "recording_id": "a", "start": 10.5, "duration": 2.0, "channel": 0, "text": "world"},
        {"id": "s1", "recording_id": "a", "start": 9.0, "duration": 1.0, "channel": 0, "text": " Hello "},
        {
            "id": "s3",
            "recording_id": "b",
            "start": 0,
            "duration": 1,
            "channel": 0,
            "text": "yes",
            "language": "en",
        },
    ]
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (tmp_path / "s.jsonl").write_text(lines)
    (tmp_path / "s.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("s.jsonl", "s.jsonl.gz"):
        assert read_transcripts(tmp_path / name) == {"a": "Hello world", "b": "yes"}
    # A recording without words has no transcript.
    nothing = [
        {"id": f"s{id}", "recording_id": id, "start": 0, "text": said} for id, said in WORDLESS.items()
    ]
    (tmp_path / "s.jsonl").write_text(lines + "".join(json.dumps(item) + "\n" for item in nothing))
    assert read_transcripts(tmp_path / "s.jsonl") == {"a": "Hello world", "b": "yes"}
    (tmp_path / "s.jsonl").write_text(lines + '{"id": "s4", "recording_id": "c", "start": 0}')
    with pytest.raises(DataError, match=r"s.jsonl:4: no Lhotse supervision .*'text'"):
        read_transcripts(tmp_path / "s.jsonl")
    (tmp_path / "s.jsonl.gz").write_text(lines)
    with pytest.raises(DataError, match="not readable as supervisions"):
        read_transcripts(tmp_path / "s.jsonl.gz")


def test_every_recording_needs_one(tmp_path: Path) -> None:
    (tmp_path / "sound" / "deep").mkdir(parents=True)
    for name in ("sound/deep/a.wav", "sound/b.wav"):
        (tmp_path / name).write_bytes(b"")
    recordings = find_recordings(tmp_path / "sound")
    path = tmp_path / "t.tsv"
    path.write_text("a\tone\nb\ttwo\n")
    assert {r.id: r.text for r in with_transcripts(recordings, path)} == {"deep/a": "one", "b": "two"}
    path.write_text("a\tone\n")
    with pytest.raises(DataError, match="no transcript of 1 of 2 recordings .first: b.; add them"):
        with_transcripts(recordings, path)


def test_data_sets_say_what_is_said(tmp_path: Path) -> None:
    for name in (
        "fsdd/recordings/7_theo_12.wav",
        "sc/speech_commands_v0.02/yes/0a_nohash_0.wav",
        "libri/LibriSpeech/dev-clean/1/2/1-2-0000.flac",
        "lj/wavs/LJ001-0001.wav",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("validation_list.txt", "testing_list.txt"):
        (tmp_path / "sc/speech_commands_v0.02" / name).write_text("")
    (tmp_path / "libri/LibriSpeech/dev-clean/1/2/1-2.trans.txt").write_text("1-2-0001\n1-2-0000 HE BEGAN\n")
    sets = {"fsdd": "fsdd", "speechcommands": "sc", "librispeech": "libri", "ljspeech": "lj"}
    said = {name: find_recordings(name, root=tmp_path / root)[0].text for name, root in sets.items()}
    assert said == {"fsdd": "seven", "speechcommands": "yes", "librispeech": "HE BEGAN", "ljspeech": ""}
    (tmp_path / "lj/metadata.csv").write_text("LJ001-0001|Dr. A|Doctor A\n")
    assert find_recordings("ljspeech", root=tmp_path / "lj")[0].text == "Doctor A"
