"""Statistics of sound on signals whose figures are known, and limits that trigger where they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from tests.helpers import speech_like
from txl_audio.codecs.mulaw import mulaw_decode
from txl_audio.listening import (
    BAND_EDGES_HZ,
    FLOOR_DBFS,
    Sound,
    Verdict,
    compare,
    describe,
    pooled,
    verdict_table,
    voiced_frames,
)
from txl_audio.tokens import DataError

RATE_HZ = 16_000
BURST, COLLAPSE, STEADY, TONE, LEVEL, SPECTRUM, PAUSES = range(7)


def sine(freq_hz: float, seconds: float, amplitude: float = 0.1) -> NDArray[np.float64]:
    return amplitude * np.sin(2 * np.pi * freq_hz * np.arange(round(seconds * RATE_HZ)) / RATE_HZ)


def noise(seconds: float, rms: float, seed: int = 0) -> NDArray[np.float64]:
    return rms * np.random.default_rng(seed).standard_normal(round(seconds * RATE_HZ))


def buzz(pitch_hz: float, seconds: float, rms: float) -> NDArray[np.float64]:
    """All harmonics of a pitch below 4 kHz, with phases that do not make one pulse of them."""
    phases = np.random.default_rng(1).uniform(0, 2 * np.pi, int(4000 / pitch_hz))
    time_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    harmonics = np.arange(1, len(phases) + 1)[:, None] * pitch_hz
    pcm = np.sin(2 * np.pi * harmonics * time_s + phases[:, None]).sum(0)
    return rms * pcm / np.sqrt(np.mean(pcm**2))


def broken(generated: list[Sound], real: Sound) -> list[int]:
    """Which limits do not hold, by place."""
    return [place for place, verdict in enumerate(compare(generated, real)) if not verdict.holds]


def test_a_sine_has_its_level_in_its_band() -> None:
    sound = describe(sine(750.0, 6.5))
    expected_db = 20 * np.log10(0.1 / np.sqrt(2))
    assert sound.seconds == 6.0  # whole seconds
    for level in (sound.level_dbfs, sound.level_p10_dbfs, sound.level_p90_dbfs, sound.lowest_window_dbfs):
        assert level == pytest.approx(expected_db, abs=0.05)
    assert sound.band_dbfs[3] == pytest.approx(expected_db, abs=0.05)  # 500 to 1000 Hz
    assert all(level < expected_db - 50 for band, level in enumerate(sound.band_dbfs) if band != 3)
    # A Hann window puts 2/3 of a sine at the centre of a bin into that bin.
    assert sound.purest_window == pytest.approx(2 / 3, abs=0.01)
    assert sound.steadiest_window_db < 0.1
    assert (sound.loud, sound.clipped, sound.silent, sound.longest_run_s) == (0.0, 0.0, 0.0, 6.0)


def test_white_noise_fills_each_band_by_its_width() -> None:
    sound = describe(noise(20.0, 0.05).astype(np.float32))
    assert sound.level_dbfs == pytest.approx(20 * np.log10(0.05), abs=0.1)
    for band, low in enumerate(BAND_EDGES_HZ[:-1]):
        assert sound.band_dbfs[band] == pytest.approx(sound.level_dbfs + 10 * np.log10(low / 8000), abs=0.4)
    assert sound.voiced < 0.01
    assert sound.steadiest_window_db < 1.0 and sound.purest_window < 0.01


def test_digital_silence() -> None:
    sound = describe(np.zeros(RATE_HZ))
    assert {sound.level_dbfs, sound.level_p10_dbfs, *sound.band_dbfs} == {FLOOR_DBFS}
    assert (sound.silent, sound.voiced, sound.longest_run_s, sound.purest_window) == (1.0, 0.0, 0.0, 0.0)


def test_bursts_and_clipping_are_counted_exactly() -> None:
    pcm = np.full(10 * RATE_HZ, 0.01)
    for frame, level_dbfs in ((3, -11.9), (90, -11.9), (91, -6.0), (200, -12.1)):
        pcm[frame * 320 : (frame + 1) * 320] = 10 ** (level_dbfs / 20)
    assert describe(pcm).loud == 3 / 500
    # Row A8: only the outermost of the 256 codes counts as clipped, on either side.
    codes = np.full(2 * RATE_HZ, 128)
    codes[:40] = np.repeat([0, 255, 1, 254], 10)
    assert describe(mulaw_decode(codes)).clipped == 20 / len(codes)


@pytest.mark.parametrize("pitch_hz", [85.0, 150.0, 220.0, 450.0])
def test_voiced_where_there_is_a_pitch(pitch_hz: float) -> None:
    voice = buzz(pitch_hz, 2.0, 0.1)
    voiced = voiced_frames(np.concatenate([voice + noise(2.0, 0.03), noise(2.0, 0.1, seed=1)]))
    assert voiced.shape == (200,)
    assert voiced[1:99].all() and not voiced[102:].any()
    # Far below the level of the excerpt it is taken for what the silence is made of.
    quiet = describe(np.concatenate([0.01 * voice, noise(2.0, 0.1)]))
    assert quiet.voiced < 0.02 and quiet.silent == pytest.approx(0.5, abs=0.01)


def test_noise_without_its_high_end_is_not_voiced() -> None:
    low = np.convolve(noise(10.0, 0.1), np.ones(20) / 20, mode="same")
    assert voiced_frames(low).mean() < 0.2


def test_longest_run_goes_through_gaps_shorter_than_a_pause() -> None:
    def gap(seconds: float) -> NDArray[np.float64]:
        return noise(seconds, 1e-4)

    pcm = [noise(1.0, 0.1), gap(0.2), noise(0.5, 0.1), gap(0.08), noise(0.7, 0.1), gap(0.1), noise(0.42, 0.1)]
    sound = describe(np.concatenate(pcm))
    assert sound.longest_run_s == pytest.approx(0.5 + 0.08 + 0.7)
    assert sound.silent == pytest.approx(0.38 / 3)


def test_the_worst_window_counts_wherever_it_lies() -> None:
    speech = speech_like(30.0, 0).astype(np.float64)
    speech[13 * RATE_HZ : 19 * RATE_HZ] = 0.003 * speech[13 * RATE_HZ : 19 * RATE_HZ]
    whole = describe(speech)
    assert whole.lowest_window_dbfs < whole.level_dbfs - 45
    speech[13 * RATE_HZ : 19 * RATE_HZ] = sine(120.0, 6.0)
    hum = describe(speech)
    assert hum.steadiest_window_db < 0.2 and hum.purest_window > 0.5


def test_pooled_means_powers_and_keeps_extremes() -> None:
    loud, quiet = describe(sine(750.0, 2.0, 0.1)), describe(0.1 * speech_like(2.0, 0))
    both = pooled([loud, quiet])
    power = np.mean(10 ** (np.array([loud.level_dbfs, quiet.level_dbfs]) / 10))
    assert both.level_dbfs == pytest.approx(10 * np.log10(power))
    assert both.band_dbfs[3] == pytest.approx(loud.band_dbfs[3] - 3, abs=0.1)
    assert both.level_p10_dbfs == pytest.approx((loud.level_p10_dbfs + quiet.level_p10_dbfs) / 2)
    assert both.voiced == pytest.approx((loud.voiced + quiet.voiced) / 2)
    assert both.seconds == 4.0
    assert both.lowest_window_dbfs == quiet.lowest_window_dbfs
    assert both.steadiest_window_db == loud.steadiest_window_db and both.purest_window == loud.purest_window
    assert both.to_json()["band_dbfs"] == both.band_dbfs


REAL = Sound(
    seconds=60.0,
    level_dbfs=-29.0,
    level_p10_dbfs=-56.0,
    level_p50_dbfs=-33.0,
    level_p90_dbfs=-25.0,
    loud=0.0,
    clipped=0.0,
    silent=0.12,
    voiced=0.65,
    longest_run_s=4.0,
    band_dbfs=(-57.0, -34.0, -33.0, -38.0, -43.0, -48.0, -47.0),
    lowest_window_dbfs=-33.0,
    steadiest_window_db=8.0,
    purest_window=0.16,
)


def bands(offset_db: float) -> tuple[float, ...]:
    return (*REAL.band_dbfs[:4], REAL.band_dbfs[4] + offset_db, *REAL.band_dbfs[5:])


@pytest.mark.parametrize(
    ("place", "inside", "outside"),
    [
        (BURST, {"loud": 14 / 3000}, {"loud": 15 / 3000}),
        (COLLAPSE, {"lowest_window_dbfs": -53.9}, {"lowest_window_dbfs": -54.1}),
        (STEADY, {"steadiest_window_db": 4.1}, {"steadiest_window_db": 3.9}),
        (TONE, {"purest_window": 0.33}, {"purest_window": 0.34}),
        (LEVEL, {"level_dbfs": -23.1}, {"level_dbfs": -22.9}),
        (LEVEL, {"level_dbfs": -34.9}, {"level_dbfs": -35.1}),
        (SPECTRUM, {"band_dbfs": bands(5.9)}, {"band_dbfs": bands(6.1)}),
        (SPECTRUM, {"band_dbfs": bands(-5.9)}, {"band_dbfs": bands(-6.1)}),
        (PAUSES, {"level_p10_dbfs": -48.1}, {"level_p10_dbfs": -47.9}),
        (PAUSES, {"level_p10_dbfs": -63.9}, {"level_p10_dbfs": -64.1}),
    ],
)
def test_each_limit_triggers_alone(place: int, inside: dict[str, Any], outside: dict[str, Any]) -> None:
    assert broken([replace(REAL, **inside)], REAL) == []
    bad = replace(REAL, **outside)
    assert broken([bad], REAL) == [place]
    # One of twenty: a burst, a collapse or a hum in any is one too many, the others are judged together.
    verdict = compare([REAL] * 19 + [bad], REAL)[place]
    assert (verdict.kept_by, verdict.excerpts) == (19, 20)
    assert verdict.holds == (place in (LEVEL, SPECTRUM, PAUSES))
    assert verdict.to_json()["holds"] == verdict.holds


def test_what_goes_wrong_with_free_running_models_is_found() -> None:
    speech = speech_like(10.0, 0)
    real = describe(speech)
    assert broken([describe(speech_like(10.0, 1))], real) == []
    collapsed = np.concatenate([speech[: 4 * RATE_HZ], 1e-4 * speech[: 6 * RATE_HZ]])
    burst = speech.copy()
    burst[RATE_HZ : RATE_HZ + 3200] = noise(0.2, 0.4)
    assert COLLAPSE in broken([describe(collapsed)], real)
    assert BURST in broken([describe(burst)], real)
    assert {STEADY, SPECTRUM, PAUSES} <= set(broken([describe(noise(10.0, 0.07))], real))
    assert {STEADY, TONE} <= set(broken([describe(sine(120.0, 10.0))], real))


def test_real_speech_keeps_the_limits(shared: Path) -> None:
    files = sorted((shared / "data" / "kathleen_arctic_16k" / "flac").glob("*.flac"))[:40]
    pcm = np.concatenate([soundfile.read(path, dtype="float32")[0] for path in files])
    half = len(pcm) // 2
    real, other = describe(pcm[:half]), describe(pcm[half:])
    assert broken([other], real) == []
    assert real.level_dbfs == pytest.approx(-29, abs=2) and real.voiced == pytest.approx(0.65, abs=0.07)
    assert 0.05 < real.silent < 0.25 and 1 < real.longest_run_s < 15


@pytest.mark.parametrize(
    ("pcm", "match"),
    [
        (np.zeros(15_999), "at least 16000 samples"),
        (np.zeros((2, 16_000)), r"shape \[2, 16000\]"),
        (np.zeros(16_000, np.int16), "int16"),
        (np.full(16_000, np.nan), "16000 samples that are not finite"),
    ],
)
def test_what_is_no_sound(pcm: NDArray[Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        describe(pcm)


def test_nothing_to_compare() -> None:
    with pytest.raises(DataError, match="at least one"):
        compare([], REAL)


def test_verdicts_as_a_table() -> None:
    level = Verdict("level", 1.5, 7.0, bound=6.0, below=True, in_every=False, kept_by=3, excerpts=4)
    hum = Verdict("hum", 4.5, 3.0, bound=4.0, below=False, in_every=True, kept_by=3, excerpts=4)
    _, _, *rows = verdict_table([level.to_json(), hum.to_json()])
    assert rows == [
        "| level | 1.5 | 7 | under 6 | 3 of 4 | yes |",
        "| hum | 4.5 | 3 | over 4 in every one | 3 of 4 | no |",
    ]
