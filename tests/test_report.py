"""metrics.jsonl, TensorBoard and what is said while a model trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from txl_audio.evaluate import Totals
from txl_audio.model.sequence import SINGLE
from txl_audio.report import Reporter, StreamFacts

LN2 = 0.6931471805599453


def reporter(folder: Path, **options: Any) -> Reporter:
    facts = {SINGLE: StreamFacts("bits_per_sample", 50.0)}
    return Reporter(folder, streams=facts, machine_flops=1e4, **options)


def at(step: int) -> dict[str, Any]:
    return {"step": step, "symbols": 100 * step, "seconds": 2.0 * step}


def train_steps(folder: Path, steps: range, *, bits: float, **options: Any) -> None:
    with reporter(folder, **options) as report:
        for step in steps:
            report.step(SINGLE, step, 100 * step, 2.0 * step, step / 10, Totals(bits * LN2 * 100, 100))
            facts = {"gradient_norm": 0.5, "lr": 1e-3}
            report.train(SINGLE, at(step), Totals(bits * LN2 * 100, 100), facts)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_record_of_training(tmp_path: Path) -> None:
    train_steps(tmp_path, range(1, 2), bits=3.0)
    assert records(tmp_path) == [
        {
            "kind": "train",
            **at(1),
            "bits_per_sample": pytest.approx(3.0),
            "lr": 1e-3,
            "gradient_norm": 0.5,
            "symbols_per_s": 50.0,
            "share_of_matmul_rate": 50.0 * 50.0 / 1e4,
        }
    ]


def test_a_record_of_validation_says_whether_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporter(tmp_path) as report:
        with report.validating(40) as progress:
            progress(40)
        report.validation(SINGLE, at(3), Totals(2.5 * LN2 * 40, 40), whole=False)
        report.validation(SINGLE, at(3), Totals(2.5 * LN2 * 90, 90), whole=True)
    got = records(tmp_path)
    assert [(r["kind"], r["count"], r["whole_split"]) for r in got] == [
        ("validation", 40, False),
        ("validation", 90, True),
    ]
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.splitlines() == [
        "step      3       6 s  validation 2.5000 bits per sample (first 40 symbols)",
        "step      3       6 s  validation 2.5000 bits per sample",
    ]


def test_a_validation_names_the_form_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {SINGLE: StreamFacts("bits_per_byte", 1.0, "newlines drop")}
    with Reporter(tmp_path, streams=facts, machine_flops=1.0) as report:
        report.train(SINGLE, at(1), Totals(LN2, 1), {})
        report.validation(SINGLE, at(1), Totals(LN2, 1), whole=True)
        report.validation(SINGLE, at(2), Totals(LN2, 1), whole=False)
    assert [r.get("form") for r in records(tmp_path)] == [None, "newlines drop", "newlines drop"]
    said = capsys.readouterr().err.splitlines()
    assert said[1].endswith("validation 1.0000 bits per byte (newlines drop)")
    assert said[2].endswith("bits per byte (newlines drop, first 1 symbols)")


def test_a_validation_of_codes_is_recorded_per_second_frame_and_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {SINGLE: StreamFacts("bits_per_code", 1.0, frame_rate_hz=50.0)}
    totals = Totals(9 * LN2, 6, {0: (6 * LN2, 3), 1: (3 * LN2, 3)})
    with Reporter(tmp_path, streams=facts, machine_flops=1.0) as report:
        report.validation(SINGLE, at(1), totals, whole=True)
    assert records(tmp_path) == [
        {
            "kind": "validation",
            **at(1),
            "bits_per_code": pytest.approx(1.5),
            "bits_per_second": pytest.approx(150.0),
            "bits_per_frame": pytest.approx(3.0),
            "bits_per_frame_stage_1": pytest.approx(2.0),
            "bits_per_frame_stage_2": pytest.approx(1.0),
            "count": 6,
            "whole_split": True,
        }
    ]
    assert capsys.readouterr().err.strip().endswith("1.5000 bits per code (150 bits per second)")


def test_a_log_file_gets_lines_instead_of_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_steps(tmp_path, range(1, 3), bits=3.0)
    printed, said = capsys.readouterr()
    assert printed == "" and "\x1b" not in said
    assert [line.split()[:2] for line in said.splitlines()] == [["step", "1"], ["step", "2"]]
    assert said.splitlines()[0].endswith("training 3.0000 bits per sample  50 symbols/s")


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    train_steps(tmp_path, range(1, 6), bits=4.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 2, "cut o')  # the machine went down here
    train_steps(tmp_path, range(4, 7), bits=3.0, resumed_at=3)
    bits = [(r["step"], round(r["bits_per_sample"], 6)) for r in records(tmp_path)]
    assert bits == [(1, 4.0), (2, 4.0), (3, 4.0), (4, 3.0), (5, 3.0), (6, 3.0)]
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("train/bits_per_sample")
    assert [(s.step, round(s.value, 5)) for s in shown] == bits
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("events")} == {
        "metrics.jsonl"
    }


def test_a_run_that_starts_anew_keeps_nothing_back(tmp_path: Path) -> None:
    train_steps(tmp_path, range(1, 3), bits=4.0)
    assert [r["step"] for r in records(tmp_path)] == [1, 2]


def test_several_streams_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"speech": StreamFacts("bits_per_sample", 50.0), "text": StreamFacts("bits_per_byte", 20.0)}
    with Reporter(tmp_path, streams=facts, machine_flops=1e4) as report:
        report.begin(100, 2.0)
        report.step("speech", 2, 200, 4.0, 0.2, Totals(1.0, 100))
        report.step("text", 3, 210, 6.0, 0.3, Totals(1.0, 10))
        report.train("text", {**at(3), "symbols": 210}, Totals(2.0 * LN2 * 10, 10), {})
        report.validation("speech", at(3), Totals(2.5 * LN2 * 90, 90), whole=True)
    train, validation = records(tmp_path)
    assert (train["stream"], train["bits_per_byte"]) == ("text", pytest.approx(2.0))
    # 100 symbols of speech and 10 of text in the 4 s since it began.
    assert train["share_of_matmul_rate"] == pytest.approx((100 * 50 + 10 * 20) / 4 / 1e4)
    assert (validation["stream"], validation["bits_per_sample"]) == ("speech", pytest.approx(2.5))
    assert "training text 2.0000 bits per byte" in capsys.readouterr().err
    shown = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"train/text/bits_per_byte", "validation/speech/bits_per_sample"} <= set(shown)
