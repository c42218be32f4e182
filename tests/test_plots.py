"""Pictures: their axes tell the truth, and what cannot be drawn is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from txl_audio import plots
from txl_audio.tokens import DataError

PNG = b"\x89PNG\r\n\x1a\n"


def spectrogram(figure: object) -> tuple[NDArray[np.float64], tuple[float, float, float, float]]:
    """The drawn values [F, T] in dB and their extent in (s, s, kHz, kHz)."""
    image = figure.axes[1].images[0]  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(image.get_array()), image.get_extent()


@pytest.mark.parametrize("sample_rate_hz", [8000, 16000, 44100])
def test_full_scale_sine_reads_0_db_at_its_frequency(sample_rate_hz: int) -> None:
    # The centre of a bin: elsewhere a window reads up to 1.4 dB less.
    n_fft = 2 ** round(np.log2(0.032 * sample_rate_hz))
    freq_hz = 20 * sample_rate_hz / n_fft
    t = np.arange(sample_rate_hz) / sample_rate_hz
    levels, (left, right, low, high) = spectrogram(
        plots.plot_audio(np.sin(2 * np.pi * freq_hz * t), sample_rate_hz)
    )
    middle = levels[:, levels.shape[1] // 2]
    assert middle.argmax() * high * 1000 / (levels.shape[0] - 1) == pytest.approx(freq_hz)
    assert middle.max() == pytest.approx(0.0, abs=0.05)
    assert (low, high) == (0.0, sample_rate_hz / 2000)
    assert left < 0 <= 1.0 < right


def test_a_click_is_drawn_where_it_is() -> None:
    pcm = np.zeros(160_000, np.float32)
    pcm[96_000] = 0.9
    figure = plots.plot_audio(pcm, 16_000)
    levels, (left, right, _, _) = spectrogram(figure)
    columns = np.flatnonzero(levels.max(0) > plots.FLOOR_DB)
    centre_s = left + (columns.mean() + 0.5) * (right - left) / levels.shape[1]
    assert centre_s == pytest.approx(6.0, abs=0.005)
    assert figure.axes[0].dataLim.y1 == pytest.approx(0.9)  # one sample in 160,000, not averaged away


def test_scales_do_not_follow_the_signal(speech_like: Callable[[float, int], NDArray[np.float32]]) -> None:
    quiet = plots.plot_audio(speech_like(0.5, 0) * 0.01, 16_000)
    loud = plots.plot_audio(torch.from_numpy(speech_like(0.5, 0) * 2), 16_000)
    for figure in (quiet, loud):
        assert figure.axes[0].get_ylim() == (-1.0, 1.0)
        assert figure.axes[1].images[0].get_clim() == (plots.FLOOR_DB, 0.0)
        assert figure.axes[1].get_xlim() == (0.0, 0.5)
    assert "peak -46.0 dBFS" in quiet.axes[0].get_title()


def test_several_spectrograms_share_their_axes(tmp_path: Path) -> None:
    t = np.arange(16_000) / 16_000
    sounds = {"real": np.sin(2 * np.pi * 1000 * t), "made": np.sin(2 * np.pi * 3000 * np.tile(t, 2))}
    figure = plots.plot_spectrograms(
        sounds, 16_000, tmp_path / "a.png", boundaries_s={"made": 0.5}, columns=3
    )
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in panels] == list(sounds)
    for axes, freq_khz in zip(panels, (1.0, 3.0), strict=True):
        assert axes.get_xlim() == (0.0, 2.0) and axes.get_ylim() == (0.0, 8.0)
        assert axes.images[0].get_clim() == (plots.FLOOR_DB, 0.0)
        levels = np.asarray(axes.images[0].get_array())
        assert levels[:, 20].argmax() * 8.0 / (levels.shape[0] - 1) == pytest.approx(freq_khz, abs=0.02)
    assert [[line.get_xdata()[0] for line in axes.lines] for axes in panels] == [[], [0.5]]
    with pytest.raises(DataError, match="at least one"):
        plots.plot_spectrograms({}, 16_000)


def test_a_long_run_is_drawn_from_zero(tmp_path: Path) -> None:
    curves = {"state (kB)": [50.0, 50.0, 51.0], "level (dBFS)": [-30.0, -29.0, -31.0]}
    figure = plots.plot_stream([1.0, 2.0, 2.5], curves, tmp_path / "a.png")
    assert [axes.get_ylabel() for axes in figure.axes] == list(curves)
    assert figure.axes[0].get_ylim()[0] == 0.0  # two percent do not look like a leak
    for axes, values in zip(figure.axes, curves.values(), strict=True):
        assert axes.lines[0].get_xydata().tolist() == [[1.0, values[0]], [2.0, values[1]], [2.5, values[2]]]


@pytest.mark.parametrize("samples", [1, 100])
def test_shorter_than_a_window(samples: int, tmp_path: Path) -> None:
    plots.plot_audio(np.full(samples, 0.5), 16_000, tmp_path / "new" / "a.png", title="short")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(PNG)


def test_boundary_is_marked_in_both_halves() -> None:
    figure = plots.plot_audio(np.zeros(16_000), 16_000, boundary_s=0.25)
    for axes in figure.axes[:2]:
        assert [np.asarray(line.get_xdata())[0] for line in axes.lines] == [0.25]


def test_backend_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\nfrom txl_audio import plots\n"
        "assert not {'matplotlib', 'librosa', 'soundfile'} & set(sys.modules)\n"
        "plots.plot_audio(np.zeros(800), 16000, sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)


@pytest.mark.parametrize(
    ("pcm", "message"),
    [
        (np.zeros(0), r"shape \[0\]"),
        (np.zeros((2, 8)), r"shape \[2, 8\]"),
        (np.zeros(8, np.int16), "type int16"),
        (np.array([0.0, np.nan, np.inf]), "2 samples that are not finite"),
    ],
)
def test_what_is_no_audio(pcm: NDArray[np.float32], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plots.plot_audio(pcm, 16_000)


def write_metrics(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_training_curve_shows_the_records(tmp_path: Path) -> None:
    metrics = write_metrics(
        tmp_path / "metrics.jsonl",
        [
            {"step": 10, "kind": "train", "bits_per_sample": 6.0, "seconds": 0.1},
            {"step": 20, "kind": "train", "bits_per_sample": 9.0, "seconds": 0.1},
            {"step": 20, "kind": "validation", "bits_per_sample": 5.5},
            {"kind": "note", "text": "resumed from step 10"},
            {"step": 20, "kind": "train", "bits_per_sample": 5.0, "seconds": 0.1},
        ],
    )
    with metrics.open("a") as file:
        file.write('{"step": 30, "ki')  # a run is writing
    figure = plots.plot_training(metrics, tmp_path / "curve.png")
    train, validation = figure.axes[0].lines
    assert np.asarray(train.get_xydata()).tolist() == [[10, 6.0], [20, 5.0]]
    assert np.asarray(validation.get_xydata()).tolist() == [[20, 5.5]]
    assert figure.axes[0].get_ylabel() == "bits per sample"
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_every_stream_has_a_panel(tmp_path: Path) -> None:
    metrics = write_metrics(
        tmp_path / "metrics.jsonl",
        [
            {"step": 10, "kind": "train", "stream": "speech", "bits_per_sample": 6.0},
            {"step": 10, "kind": "train", "stream": "text", "bits_per_character": 3.0},
            {"step": 20, "kind": "train", "stream": "text", "bits_per_character": 2.0},
        ],
    )
    panels = plots.plot_training(metrics).axes
    assert [axes.get_ylabel() for axes in panels] == ["speech bits per sample", "text bits per character"]
    assert [list(axes.lines[0].get_ydata()) for axes in panels] == [[6.0], [3.0, 2.0]]


def test_metrics_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics at"):
        plots.plot_training(tmp_path / "absent.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"step": 1}\nstep 2\n')
    with pytest.raises(DataError, match=r"broken.jsonl:2: got 'step 2', expected JSON"):
        plots.plot_training(broken)
    with pytest.raises(DataError, match="none of its 1 records has one of bits_per_sample"):
        plots.plot_training(write_metrics(tmp_path / "other.jsonl", [{"step": 1, "loss": 2.0}]))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((4000, 2)), 16_000)
    assert plots.main([str(tmp_path / "a.wav"), str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert plots.main([str(tmp_path / "b.wav"), str(tmp_path / "b.png")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: cannot read") and said.count("\n") == 1
