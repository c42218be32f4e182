"""Pictures of sound and of training. `python -m txl_audio.plots IN OUT.png` draws either.

IN is an audio file or a run's metrics.jsonl. Shape letters: N samples, F frequency bins, T frames.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from txl_audio.tokens import DataError, TxlError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FLOOR_DB = -90.0
"""Darkest colour of every spectrogram, so that two pictures can be compared."""

_WINDOW_S = 0.032
_MAX_COLUMNS = 2000
_UNITS = (
    "bits_per_sample",
    "bits_per_code",
    "bits_per_symbol",
    "bits_per_byte",
    "bits_per_character",
    "bits_per_word",
)


def plot_audio(
    pcm: NDArray[np.floating[Any]] | torch.Tensor,
    sample_rate_hz: int,
    path: str | Path | None = None,
    *,
    title: str = "",
    boundary_s: float | None = None,
) -> Figure:
    """Waveform over spectrogram, on one time axis and on fixed scales.

    Args:
        pcm: [N] float, full scale 1.
        sample_rate_hz: samples per second.
        path: file to write (the suffix gives the format), None for none.
        title: stands above, followed by peak and RMS level.
        boundary_s: where a prompt ends and generated sound begins, marked by a line.

    Raises DataError unless pcm is a non-empty [N] of finite floats.
    """
    samples = _mono(pcm)
    duration_s = samples.size / sample_rate_hz
    figure = _figure(height_inches=5.0)
    wave, spectrum = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))

    low, high, step = _envelope(samples)
    times_s = np.arange(low.size) * step / sample_rate_hz
    wave.fill_between(times_s, low, high, linewidth=0.6, edgecolor="C0")
    limit = max(1.0, float(np.abs(samples).max()))
    wave.set(ylabel="amplitude\n(full scale = 1)", ylim=(-limit, limit))
    wave.grid(alpha=0.3)
    peak_db, rms_db = _db(np.abs(samples).max()), _db(np.sqrt(np.mean(samples**2)))
    level = f"peak {peak_db:.1f} dBFS, RMS {rms_db:.1f} dBFS"
    wave.set_title(f"{title}  ({level})" if title else level, fontsize="medium")

    image = _draw_spectrogram(spectrum, samples, sample_rate_hz)
    spectrum.set(xlabel="time (s)", ylabel="frequency (kHz)", xlim=(0.0, duration_s))
    figure.colorbar(image, ax=[wave, spectrum], label="level (dB, 0 = full-scale sine)", pad=0.01)
    if boundary_s is not None:
        for axes, colour in ((wave, "C3"), (spectrum, "white")):
            axes.axvline(boundary_s, color=colour, linestyle="--", linewidth=1.2, label="end of the prompt")
        wave.legend(loc="upper right", fontsize="small")
    return _saved(figure, path)


def plot_spectrograms(
    sounds: Mapping[str, NDArray[np.floating[Any]] | torch.Tensor],
    sample_rate_hz: int,
    path: str | Path | None = None,
    *,
    boundaries_s: Mapping[str, float] = MappingProxyType({}),
    columns: int = 3,
) -> Figure:
    """Spectrograms of several sounds by title, row by row, on one time axis and one scale of levels.

    `boundaries_s` marks by title where prompts end. Shapes and faults as `plot_audio`; DataError for none.
    """
    if not sounds:
        raise DataError("no sounds were given, expected at least one to draw")
    rows = -(-len(sounds) // columns)
    figure = _figure(height_inches=0.6 + 1.3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes, (title, pcm) in zip(panels, sounds.items(), strict=False):
        _draw_spectrogram(axes, _mono(pcm), sample_rate_hz)
        axes.set_title(title, fontsize="x-small")
        if title in boundaries_s:
            axes.axvline(boundaries_s[title], color="white", linestyle="--", linewidth=0.8)
    for axes in panels[len(sounds) :]:
        axes.set_axis_off()
    duration_s = max(len(pcm) for pcm in sounds.values()) / sample_rate_hz
    panels[0].set(xlim=(0.0, duration_s), ylim=(0.0, sample_rate_hz / 2000))
    figure.supxlabel("time (s)", fontsize="small")
    figure.supylabel("frequency (kHz)", fontsize="small")
    return _saved(figure, path)


def plot_stream(
    minutes: Sequence[float], curves: Mapping[str, Sequence[float]], path: str | Path | None = None
) -> Figure:
    """What a long run costs and gives: one panel for every curve by name, against minutes of sound."""
    figure = _figure(height_inches=1.8 * len(curves))
    panels = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(panels, curves.items(), strict=True):
        axes.plot(minutes, values, marker=".")
        if min(values) >= 0:  # from zero, so that a change of a few percent looks like one
            axes.set_ylim(0.0, 1.2 * max(values) or 1.0)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    panels[-1].set(xlabel="minutes of sound")
    return _saved(figure, path)


def plot_training(metrics_jsonl: str | Path, path: str | Path | None = None) -> Figure:
    """Score while training against steps, from a run's metrics.jsonl; one panel for every stream.

    Reads records with `step`, `kind` (train or validation) and one of bits_per_sample, bits_per_byte,
    bits_per_character, bits_per_word, bits_per_symbol; other records are passed over. A step that was run
    twice (resumed) counts as run last. Raises DataError where nothing can be drawn.
    """
    streams = _read_metrics(Path(metrics_jsonl))
    figure = _figure(height_inches=4.0 * len(streams))
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 0.8, "alpha": 0.7},
        "validation": {"marker": "o", "markersize": 4},
    }
    panels = figure.subplots(len(streams), squeeze=False)[:, 0]
    for axes, (stream, (curves, unit)) in zip(panels, streams.items(), strict=True):
        for kind, style in styles.items():
            points = sorted(curves.get(kind, {}).items())
            if points:
                steps, values = zip(*points, strict=True)
                label = f"{kind} (last {values[-1]:.3f} at step {steps[-1]})"
                axes.plot(steps, values, label=label, **style)
        axes.set(xlabel="step", ylabel=f"{stream} {unit.replace('_', ' ')}".strip())
        axes.grid(alpha=0.3)
        axes.legend()
    return _saved(figure, path)


def plot_context(
    contexts: Sequence[int], gains: Mapping[str, Sequence[float]], path: str | Path | None, *, title: str
) -> Figure:
    """Relative gain of every model, by label, from each context (frames) to the next; see context.py."""
    figure = _figure(height_inches=4.0)
    axes = figure.subplots()
    for label, values in gains.items():
        axes.plot(contexts[: len(values)], [100 * value for value in values], marker="o", label=label)
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=0.8)
    axes.set(xlabel="context (frames)", ylabel="gain from the next step (%)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, path)


def _mono(pcm: NDArray[np.floating[Any]] | torch.Tensor) -> NDArray[np.float64]:
    array = pcm.detach().float().cpu().numpy() if isinstance(pcm, torch.Tensor) else np.asarray(pcm)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"got audio of shape {list(array.shape)} and type {array.dtype}, expected one channel [N] of "
            "floats, N >= 1; pick a channel and divide integers by their full scale"
        )
    if not np.isfinite(array).all():
        raise DataError(f"audio has {int((~np.isfinite(array)).sum())} samples that are not finite numbers")
    return array.astype(np.float64)


def _envelope(samples: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Lowest and highest value of each run of `step` samples: a peak of one sample stays visible."""
    step = max(1, samples.size // (2 * _MAX_COLUMNS))
    starts = np.arange(0, samples.size, step)
    low, high = np.minimum.reduceat(samples, starts), np.maximum.reduceat(samples, starts)
    return low, high, step


def _draw_spectrogram(axes: Axes, samples: NDArray[np.float64], sample_rate_hz: int) -> AxesImage:
    levels_db, hop_samples = _spectrogram_db(samples, sample_rate_hz)
    half_s = hop_samples / sample_rate_hz / 2  # a column is drawn around its window's centre
    return axes.imshow(
        levels_db,
        origin="lower",
        aspect="auto",
        interpolation="auto",  # where columns outnumber pixels none is left out
        cmap="magma",
        vmin=FLOOR_DB,
        vmax=0.0,
        extent=(-half_s, (2 * levels_db.shape[1] - 1) * half_s, 0.0, sample_rate_hz / 2000),
    )


def _spectrogram_db(samples: NDArray[np.float64], sample_rate_hz: int) -> tuple[NDArray[np.float64], int]:
    """Short-time spectrum [F, T] in dB, where a sine of full scale reads 0, and its hop in samples."""
    import librosa

    n_fft = 2 ** round(np.log2(_WINDOW_S * sample_rate_hz))
    hop = max(n_fft // 4, -(-samples.size // _MAX_COLUMNS))
    padded = np.pad(samples, (0, max(0, n_fft - samples.size)))
    spectrum = librosa.stft(padded, n_fft=n_fft, hop_length=hop, window="hann", pad_mode="constant")
    window_gain = n_fft / 4  # sum of a Hann window is n/2, and a sine has half its height at +f
    return _db(np.abs(spectrum) / window_gain), hop


def _db(amplitude: Any) -> Any:
    return np.round(20 * np.log10(np.maximum(amplitude, 1e-6)), 2) + 0.0  # no minus before zero


def _read_metrics(path: Path) -> dict[str, tuple[dict[str, dict[int, float]], str]]:
    """Of every stream: values by kind and step, and the name of their unit. A single stream is called ''."""
    if not path.is_file():
        raise DataError(f"no metrics at {path}; expected the metrics.jsonl of a run folder")
    streams: dict[str, tuple[dict[str, dict[int, float]], str]] = {}
    count = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        try:
            record: dict[str, Any] = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            if line.endswith("\n"):  # else a run is writing it right now
                raise DataError(f"{path}:{number}: got {line.strip()[:40]!r}, expected JSON") from error
            continue
        count += 1
        unit = next((u for u in _UNITS if u in record), None)
        if unit is not None and "step" in record:
            curves, _ = streams.setdefault(str(record.get("stream", "")), ({}, unit))
            curves.setdefault(str(record.get("kind")), {})[int(record["step"])] = float(record[unit])
    if not streams:
        raise DataError(f"{path}: none of its {count} records has one of {', '.join(_UNITS)}")
    return streams


def _figure(*, height_inches: float) -> Figure:
    # A Figure of its own draws with Agg, and leaves the backend of the caller's notebook alone.
    from matplotlib.figure import Figure

    return Figure(figsize=(10.0, height_inches), dpi=110, layout="constrained")


def _saved(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws an audio file or a metrics.jsonl; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m txl_audio.plots", description=__doc__)
    parser.add_argument("input", type=Path, help="audio file, or the metrics.jsonl of a run")
    parser.add_argument("output", type=Path, help="picture to write, such as OUT.png")
    given = parser.parse_args(arguments)
    try:
        if given.input.suffix == ".jsonl":
            plot_training(given.input, given.output)
        else:
            pcm, sample_rate_hz = _read_audio(given.input)
            plot_audio(pcm, sample_rate_hz, given.output, title=given.input.name)
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _read_audio(path: Path) -> tuple[NDArray[np.float32], int]:
    """The mean of a file's channels, [N]."""
    import soundfile

    try:
        pcm, sample_rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        raise DataError(f"cannot read {path} as audio: {error}") from error
    return pcm.mean(axis=1), sample_rate_hz


if __name__ == "__main__":
    sys.exit(main())
