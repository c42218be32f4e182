"""Training: it learns, stops and continues as if it had not stopped, to the bit."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.e2e.harness import tree
from tests.tiny import codes_model, core_config, joint_model, text_model, wave_model
from txl_audio import runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.data.disturb import DisturbConfig
from txl_audio.data.stream import TokenStream, document_frames
from txl_audio.evaluate import EvaluateConfig, Totals, evaluate
from txl_audio.lanes import StreamData, StreamTrainConfig
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.report import Reporter, StreamFacts
from txl_audio.states import CHECKSUMS
from txl_audio.stops import DivergedError
from txl_audio.tokens import CheckpointError, ConfigError, DataError, SpecError
from txl_audio.train import PLAIN, Trainer
from txl_audio.train_config import TrainConfig


def documents(seed: int = 0) -> list[np.ndarray]:
    """Sines with noise as codes: something to learn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 200, 12)
    waves = [128 + 60 * np.sin(0.3 * np.arange(n) + rng.uniform(0, 6)) + rng.normal(0, 2, n) for n in lengths]
    return [wave.round().astype(np.uint8) for wave in waves]


def config(**changes: Any) -> TrainConfig:
    values = {"steps": 10, "lanes": 3, "warmup_steps": 4, "accumulate": 2, "ema": 0.9, "segment_len": 5}
    return TrainConfig(**{**values, "log_every": 1, "validate_symbols": 100, **changes})


def trainer(path: Path, settings: TrainConfig | None = None, *, seed: int = 0, **changes: Any) -> Trainer:
    """A trainer with everything that draws random numbers turned on."""
    stream = changes.pop("stream", "p4-logistic")
    model = wave_model(stream, **{"dropout": 0.2, "attention_dropout": 0.2, **changes.pop("core", {})})
    sample = changes.pop("sample", None)
    t = new_trainer(path, model, settings, seed=seed, **changes)
    if sample is not None:
        t.samplers[SINGLE] = sample
    return t


def new_trainer(
    path: Path,
    model: SequenceModel,
    settings: TrainConfig | None = None,
    *,
    seed: int = 0,
    scoring: EvaluateConfig = PLAIN,
    **data: Any,
) -> Trainer:
    values = {"train": documents(), "valid": documents(1)[:2], **data}
    return Trainer(
        model,
        settings or config(),
        {SINGLE: StreamData(**values)},
        folder=RunFolder(path),
        seed=seed,
        precision="float32",
        scoring=scoring,
    )


def reporter(path: Path, resumed_at: int = 0) -> Reporter:
    facts = {SINGLE: StreamFacts("bits_per_sample", 1.0)}
    return Reporter(path, streams=facts, machine_flops=1e9, resumed_at=resumed_at)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def everything(t: Trainer) -> dict[str, Tensor]:
    """All that training carries from step to step."""
    out = {f"model.{name}": value for name, value in t.model.state_dict().items()}
    if t.average is not None:
        out |= {f"average.{name}": value for name, value in t.average.state_dict().items()}
    out |= {f"optimiser.{name}": value for name, value in t.optimiser.state_tensors().items()}
    for name, stream in t.streams.items():
        out |= {f"{name}.{key}": value for key, value in stream.tensors().items()}
    out["random"] = torch.get_rng_state()
    return {name: value.clone() for name, value in out.items()}


def batches(t: Trainer) -> TokenStream:
    return t.streams[SINGLE].batches


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ema": None, "accumulate": 1},
        {"lanes": 1, "segment_len": 1},
        {"optimiser": "muon"},
        {"disturb": DisturbConfig(noise=0.7, bursts=0.7)},
        {"stream": "staged-p4"},
    ],
    ids=["all on", "plain", "smallest", "muon", "disturbed", "predictors"],
)
def test_m14_stopping_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """10 steps against 5, stop, resume, 5: weights, averages, optimiser, batches, memory, losses."""
    stream = settings.get("stream", "p4-logistic")
    chosen = config(**{k: v for k, v in settings.items() if k != "stream"})
    runtime.seed_everything(0)
    whole = trainer(tmp_path / "whole", chosen, stream=stream)
    expected = [whole.step() for _ in range(10)]

    runtime.seed_everything(0)
    first = trainer(tmp_path / "run", chosen, stream=stream)
    losses = [first.step() for _ in range(5)]
    first.folder.path.mkdir()
    first.save()
    runtime.seed_everything(1234)  # another process
    second = trainer(tmp_path / "run", chosen, stream=stream)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    second.resume()
    assert batches(second).state_dict() == batches(first).state_dict() and second.at == first.at
    losses += [second.step() for _ in range(5)]

    assert losses == expected
    assert second.at == whole.at and second.at.step == 10
    got = everything(second)
    for name, value in everything(whole).items():
        assert torch.equal(got[name], value), name
    a, b = next(batches(second)), next(batches(whole))
    assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("log_every", [1, 3])
def test_m14_through_the_whole_loop(log_every: int, tmp_path: Path) -> None:
    """`run` with validation and saving on the way, interrupted by Ctrl-C, against one that is not.

    It stops between two records: the next one is of the steps before and after.
    """
    settings = config(validate_every=3, save_every=2, sample_every=4, log_every=log_every)

    def interrupt(_model: SequenceModel, *, step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def run(t: Trainer, resumed_at: int = 0) -> bool:
        t.folder.path.mkdir(exist_ok=True)
        with reporter(t.folder.path, resumed_at) as report:
            return t.run(report)

    runtime.seed_everything(0)
    whole = trainer(tmp_path / "whole", settings)
    assert run(whole)

    runtime.seed_everything(0)
    handler = signal.getsignal(signal.SIGINT)
    stopped = trainer(tmp_path / "run", settings, sample=interrupt)
    assert not run(stopped)
    assert stopped.at.step == 4 and signal.getsignal(signal.SIGINT) is handler

    runtime.seed_everything(77)
    resumed = trainer(tmp_path / "run", settings)
    resumed.resume()
    assert run(resumed, resumed.at.step)
    got = everything(resumed)
    for name, value in everything(whole).items():
        assert torch.equal(got[name], value), name

    def figures(path: Path) -> list[tuple[Any, ...]]:
        return [(r["kind"], r["step"], r["symbols"], r["bits_per_sample"]) for r in records(path)]

    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    steps = [r["step"] for r in records(tmp_path / "run") if r["kind"] == "train"]
    assert steps == list(range(log_every, 11, log_every))
    last = records(tmp_path / "run")[-1]
    assert last["kind"] == "validation" and last["whole_split"]
    assert last["count"] == sum(len(d) for d in documents(1)[:2])


def test_records_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "train", "step": step, "bits_per_sample": 1.0}) for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    with reporter(tmp_path, resumed_at=5):
        pass
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3, 4, 5]


def test_what_is_saved_is_what_is_validated(tmp_path: Path) -> None:
    """The averaged weights; the raw ones are in the state."""
    t = trainer(tmp_path)
    for _ in range(3):
        t.step()
    t.save()
    assert t.best_model is not t.model
    saved = wave_model()
    t.folder.load_model(saved)
    valid = documents(1)[:2]
    assert evaluate(saved, valid) == evaluate(t.best_model, valid) != evaluate(t.model, valid)
    tensors, values = t.folder.load_state()
    for name, value in t.model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)
    assert values["at"]["step"] == 3


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    t = trainer(tmp_path, config(ema=0.5))
    parameter = "core.layers.0.qkv.weight"
    t.step()
    average = t.model.state_dict()[parameter].clone()  # the first step is copied
    for _ in range(3):
        t.step()
        average = 0.5 * average + 0.5 * t.model.state_dict()[parameter]
    torch.testing.assert_close(t.best_model.state_dict()[parameter], average)


def test_tied_weights_of_the_average_are_its_own(tmp_path: Path) -> None:
    model = wave_model("p1-softmax")
    t = new_trainer(tmp_path, model)
    for _ in range(2):
        t.step()
    hidden = torch.randn(1, 12)
    best = t.best_model
    expected = hidden @ best.embedding.weight[:256].T + best.head.bias
    torch.testing.assert_close(best.head.logits(hidden), expected)
    assert not torch.allclose(best.head.logits(hidden), model.head.logits(hidden))


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    """The gradient of 2 batches is that of all their symbols, each with equal weight."""
    t = trainer(tmp_path, config(accumulate=2, clip=1e9), core={"dropout": 0.0, "attention_dropout": 0.0})
    reference = wave_model()
    stream = batches(trainer(tmp_path, config()))
    state, nats, count = reference.initial_state(3), torch.zeros(()), 0
    for batch in (next(stream), next(stream)):
        total, scored, state = reference.loss(batch.inputs, batch.targets, state, batch.reset)
        nats, count = nats + total, count + int(scored)
    (nats / count).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    _, totals, got = t.step()
    assert got == pytest.approx(norm.item(), rel=1e-4)
    assert totals.count == count == t.at.symbols and totals.nats == pytest.approx(nats.item(), rel=1e-5)


def test_it_learns(tmp_path: Path) -> None:
    t = trainer(
        tmp_path,
        config(steps=60, lr=0.01, accumulate=1, ema=None, segment_len=16),
        core={"dropout": 0.0, "attention_dropout": 0.0},
    )
    valid = documents(1)[:2]
    before = evaluate(t.model, valid).bits
    losses = [t.step()[1].bits for _ in range(60)]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 1
    assert evaluate(t.model, valid).bits < before - 1


def test_learning_rates_are_those_of_the_schedule(tmp_path: Path) -> None:
    settings = config(lr=0.5, warmup_steps=4, final_lr=0.0)
    t, rates = trainer(tmp_path, settings), []
    for _ in range(10):
        t.step()
        rates.append(t.optimiser.lr)
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert all(a > b for a, b in pairwise(rates[4:])) and rates[-1] > 0


def test_minutes_are_a_budget_too(tmp_path: Path) -> None:
    t = trainer(tmp_path, config(steps=None, minutes=2.0))
    assert t.progress() == 0.0
    t.at.seconds = 90.0
    assert t.progress() == 0.75
    both = trainer(tmp_path, config(steps=100, minutes=2.0))
    both.at.seconds, both.at.step = 30.0, 60
    assert both.progress() == 0.6


def test_samples_are_made_of_the_best_weights(tmp_path: Path) -> None:
    calls: list[tuple[SequenceModel, int]] = []

    def keep(model: SequenceModel, *, step: int) -> None:
        calls.append((model, step))

    t = trainer(tmp_path, config(steps=5, sample_every=2), sample=keep)
    with reporter(tmp_path) as report:
        assert t.run(report)
    assert calls == [(t.best_model, step) for step in (2, 4, 5)]


def test_a_finished_run_trains_no_further(tmp_path: Path) -> None:
    t = trainer(tmp_path, config(steps=2))
    with reporter(tmp_path) as report:
        assert t.run(report)
    weights = everything(t)
    again = trainer(tmp_path, config(steps=2))
    again.resume()
    with reporter(tmp_path, resumed_at=2) as report:
        assert again.run(report)
    assert again.at.step == 2
    got = everything(again)
    assert all(torch.equal(got[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("changes", "seed", "message"),
    [
        ({"lanes": 4}, 0, "was trained with train.lanes=3, got 4; resume with the same or start a new run"),
        ({"segment_len": 6}, 0, "train.segment_len=5, got 6"),
        ({"ema": None}, 0, "train.ema=0.9, got None"),
        ({"optimiser": "muon"}, 0, "train.optimiser=adamw, got muon"),
        ({"disturb": DisturbConfig(noise=0.3)}, 0, "train.disturb=None, got {'noise': 0.3"),
        ({}, 1, "was trained with seed=0, got 1"),
    ],
)
def test_resuming_with_other_batches_is_refused(
    changes: dict[str, Any], seed: int, message: str, tmp_path: Path
) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path, config(**changes), seed=seed).resume()


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path, data_id="these")
    t.step()
    t.save()
    with pytest.raises(CheckpointError, match=r"was trained with data=these, got those; resume with"):
        trainer(tmp_path, data_id="those").resume()
    trainer(tmp_path, data_id="these").resume()


def single_state(run: Path) -> Path:
    """Puts a run's only checkpoint where it was before there were several, without what was added since."""
    state = run / "state"
    for path in (state / "step_1").iterdir():
        path.rename(state / path.name)
    (state / "step_1").rmdir()
    (state / "last").unlink()
    (state / CHECKSUMS).unlink()
    values = json.loads((state / "state.json").read_text())
    del values["specs"]
    (state / "state.json").write_text(json.dumps(values))
    return state


def test_a_run_with_a_single_state_is_continued(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    single_state(tmp_path)
    expected = t.step()
    again = trainer(tmp_path)
    again.resume()
    assert again.at.step == 1 and again.step() == expected


def test_resuming_what_another_version_saved_is_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    state = single_state(tmp_path) / "state.json"
    record = tmp_path / "model.json"
    values = json.loads(state.read_text())
    del values["optimiser"]  # version 1 had none
    state.write_text(json.dumps(values))
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 1}))
    with pytest.raises(CheckpointError, match="model.json has version 1, expected 2"):
        trainer(tmp_path).resume()


def test_resuming_with_other_symbols_is_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    texts = [np.random.default_rng(0).integers(0, 11, 90)]
    with pytest.raises(SpecError, match="the data and the run .* hold different symbols"):
        new_trainer(tmp_path, text_model(), train=texts, valid=texts).resume()


def test_resuming_another_model_is_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    with pytest.raises(CheckpointError, match="do not fit its config"):
        trainer(tmp_path, core={"n_layer": 1}).resume()
    with pytest.raises(CheckpointError, match="no saved training state to resume"):
        trainer(tmp_path / "new").resume()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_before_the_weights(value: str, tmp_path: Path) -> None:
    names = [f"recording {i}" for i in range(12)]
    t = trainer(tmp_path, name_of=names.__getitem__)
    t.step()
    t.save()
    before, position = everything(t), batches(t).state_dict()
    t.model.head.read.bias.data.fill_(float(value))
    with pytest.raises(
        DivergedError,
        match=r"^the loss is not finite at step 1 of stream main, whose first lane was at document recording "
        r"\d+, frame \d+; its batches are in .*diverged_step_1.safetensors; look at them, .*--resume",
    ):
        t.step()
    after = everything(t)
    unchanged = [
        n for n in before if n.startswith(("model.", "average.", "optimiser.")) and "read.bias" not in n
    ]
    assert all(torch.equal(after[name], before[name]) for name in unchanged)
    assert t.folder.load_state()[1]["at"]["step"] == 1
    # The file has the step's batches, and says of every symbol where it is from.
    stream = batches(trainer(tmp_path))
    stream.load_state_dict(position)
    with safe_open(tmp_path / "diverged_step_1.safetensors", framework="pt") as file:
        facts = file.metadata()
        assert (facts["stream"], facts["step"]) == (SINGLE, "1")
        for i, spans in enumerate(json.loads(facts["read"])):
            expected = next(stream)
            for part, tensor in vars(expected).items():
                assert torch.equal(file.get_tensor(f"{i}.{part}"), tensor)
            for lane, targets in enumerate(expected.targets):
                read = [
                    document_frames(documents()[names.index(span["document"])], stream.spec)[1][
                        span["begin_frame"] : span["end_frame"]
                    ]
                    for span in spans
                    if span["lane"] == lane
                ]
                assert (np.concatenate(read) == targets.numpy()).all()


def test_a_gradient_that_is_not_finite_stops_too(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.model.head.read.bias.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError, match="^the gradient is not finite at step 0 of stream main"):
        t.step()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.step()
    t.save()
    before = tree(tmp_path)
    t.step()
    t.model.head.read.bias.data[0] = float("inf")
    with pytest.raises(DivergedError, match="weights are not finite after step 2 and are not saved; lower"):
        t.save()
    assert tree(tmp_path) == before


def test_a_signal_does_not_wait_for_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation on the way is cut short; who sends SIGTERM does not wait for long."""
    scored: list[int] = []

    def slow(*_: object, progress: Callable[[int], None], **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for count in range(1000):
            scored.append(count)
            progress(count)

    monkeypatch.setattr("txl_audio.train.evaluate", slow)
    t = trainer(tmp_path, config(validate_every=2))
    with reporter(tmp_path) as report:
        assert not t.run(report)
    assert scored == [0] and t.folder.load_state()[1]["at"]["step"] == 2


def test_a_full_disk_ends_a_training_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path, config(save_every=1))

    def full(_: int) -> None:
        if t.at.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with (
        reporter(tmp_path) as report,
        pytest.raises(CheckpointError, match=r"checkpoint of step 3 cannot .*No space left.*step_2 is as it"),
    ):
        t.run(report)
    monkeypatch.undo()
    again = trainer(tmp_path, config())
    again.resume()
    assert again.at.step == 2


def test_settings_that_contradict_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.segment_len 5 differs from core.segment_len 4"):
        trainer(tmp_path, core={"window": "segment"})
    assert (
        trainer(tmp_path, config(segment_len=None), core={"window": "segment"})
        .streams[SINGLE]
        .config.segment_len
        == 4
    )
    assert trainer(tmp_path, config(segment_len=None)).streams[SINGLE].config.segment_len == 4
    with pytest.raises(ConfigError, match="a training needs a budget; set train.steps, train.minutes"):
        trainer(tmp_path, config(steps=None))
    with pytest.raises(DataError, match="at least one document"):
        new_trainer(tmp_path, wave_model(), train=[])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_between_steps_and_save(number: int, tmp_path: Path) -> None:
    def stop(_model: SequenceModel, *, step: int) -> None:
        os.kill(os.getpid(), number)

    t = trainer(tmp_path, config(sample_every=3), sample=stop)
    with reporter(tmp_path) as report:
        assert not t.run(report)
    assert t.at.step == 3
    assert t.folder.load_state()[1]["at"]["step"] == 3
    assert not any(record["kind"] == "validation" for record in records(tmp_path))


def test_ctrl_c_ends_the_last_validation_and_a_resume_makes_up_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("it went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        t = trainer(tmp_path, config(steps=2))
        with monkeypatch.context() as patch, reporter(tmp_path) as report:
            patch.setattr("txl_audio.train.evaluate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                t.run(report)
    finally:
        signal.signal(signal.SIGINT, before)
    again = trainer(tmp_path, config(steps=2))
    again.resume()
    assert again.at.step == 2
    with reporter(tmp_path, resumed_at=2) as report:
        assert again.run(report)
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "validation"] == [2]


def test_a_signal_in_the_last_step_leaves_the_last_validation_to_a_resume(tmp_path: Path) -> None:
    t = trainer(tmp_path, config(steps=2))
    save = t.save

    def stopped() -> None:
        save()
        os.kill(os.getpid(), signal.SIGTERM)

    t.save = stopped
    with reporter(tmp_path) as report:
        assert not t.run(report)
    assert t.at.step == 2 and not any(r["kind"] == "validation" for r in records(tmp_path))


# How the end is scored.


def test_the_end_is_scored_as_the_config_says(tmp_path: Path) -> None:
    scoring = EvaluateConfig(mem_len=9, segment_len=3, window="same_length", lanes=2)
    t = trainer(tmp_path, config(steps=4, validate_every=2), scoring=scoring)
    with reporter(tmp_path) as report:
        assert t.run(report)
    on_the_way, last = (r for r in records(tmp_path) if r["kind"] == "validation")
    valid = t.streams[SINGLE].data.valid
    assert last["bits_per_sample"] == evaluate(t.best_model, valid, scoring).bits
    assert last["bits_per_sample"] != evaluate(t.best_model, valid).bits
    assert last["whole_split"] and not on_the_way["whole_split"]


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        (EvaluateConfig(stride=1), "stride is for models without memory"),
        (EvaluateConfig(window="same_length", mem_len=0), "would show none"),
    ],
)
def test_what_the_end_could_not_score_is_refused_at_once(
    scoring: EvaluateConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, scoring=scoring)


def test_bfloat16_trains(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.precision = "bfloat16"
    _, totals, norm = t.step()
    assert np.isfinite(totals.nats) and np.isfinite(norm)
    assert all(p.dtype == torch.float32 for p in t.model.parameters())


# Several streams over one core.


def joint_trainer(path: Path, settings: TrainConfig) -> Trainer:
    texts = [np.random.default_rng(seed).integers(0, 11, 90) for seed in range(3)]
    data = {
        "speech": StreamData(documents(), documents(1)[:2], data_id="s"),
        "text": StreamData(texts, texts[:1], data_id="t"),
    }
    model = joint_model(dropout=0.2)
    return Trainer(model, settings, data, folder=RunFolder(path), seed=0, precision="float32")


JOINT = {"speech": StreamTrainConfig(weight=2.0, lanes=3), "text": StreamTrainConfig(lanes=2, segment_len=5)}


def test_streams_take_turns_by_weight(tmp_path: Path) -> None:
    t = joint_trainer(tmp_path, config(steps=12, streams=JOINT, segment_len=None))
    names = [t.step()[0] for _ in range(12)]
    assert names.count("speech") == 8 and names.count("text") == 4
    assert all(set(names[i : i + 3]) == {"speech", "text"} for i in range(10))
    batch = next(t.streams["text"].batches)
    assert batch.inputs.shape == (2, 5, 1)
    assert t.streams["speech"].config.segment_len == 4


def test_errors_name_the_setting_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = config(segment_len=None, lanes=4, streams={"text": StreamTrainConfig(lanes=3, segment_len=5)})
    with pytest.raises(
        ConfigError, match=r"^train.streams.text.segment_len 5 differs from core.segment_len 4"
    ):
        own.of_stream("text", core_config(window="segment"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^train.streams.text.lanes is 3, which 2 processes"):
        joint_trainer(tmp_path, own)
    shared = config(segment_len=None, lanes=3, streams={"text": StreamTrainConfig(weight=2.0)})
    with pytest.raises(ConfigError, match=r"^train.lanes is 3, which 2 processes"):
        joint_trainer(tmp_path, shared)


def test_m14_of_several_streams(tmp_path: Path) -> None:
    settings = config(streams=JOINT, segment_len=None)
    runtime.seed_everything(0)
    whole = joint_trainer(tmp_path / "whole", settings)
    expected = [whole.step() for _ in range(10)]

    runtime.seed_everything(0)
    first = joint_trainer(tmp_path / "run", settings)
    losses = [first.step() for _ in range(4)]
    first.folder.path.mkdir()
    first.save()
    runtime.seed_everything(99)
    second = joint_trainer(tmp_path / "run", settings)
    second.resume()
    losses += [second.step() for _ in range(6)]
    assert losses == expected
    got = everything(second)
    assert {"speech.memory.0", "text.memory.0"} <= set(got)
    for name, value in everything(whole).items():
        assert torch.equal(got[name], value), name


def test_reports_and_validation_of_several_streams(tmp_path: Path) -> None:
    t = joint_trainer(tmp_path, config(steps=6, streams=JOINT, segment_len=None, log_every=6))
    facts = {name: StreamFacts(f"bits_of_{name}", 1.0) for name in t.streams}
    with Reporter(tmp_path, streams=facts, machine_flops=1e9) as report:
        assert t.run(report)
    got = [(r["kind"], r["stream"], r["step"]) for r in records(tmp_path)]
    assert got == [(kind, name, 6) for kind in ("train", "validation") for name in ("speech", "text")]
    by_name = {r["stream"]: r for r in records(tmp_path) if r["kind"] == "validation"}
    for name, model in t.best_model.streams.items():
        totals = evaluate(model, t.streams[name].data.valid, precision="float32")
        assert by_name[name][f"bits_of_{name}"] == pytest.approx(totals.bits)
        assert by_name[name]["count"] == totals.count


# Auxiliary losses.


def test_lower_layers_predict_until_their_time_is_up(tmp_path: Path) -> None:
    """Layer l of n until l / 2n of the budget (Al-Rfou et al. 2018)."""
    t = trainer(tmp_path, config(steps=80, auxiliary=True), core={"n_layer": 4})
    layers = []
    for step in range(80):
        t.at.step = step
        layers.append(list(t.auxiliary_layers(t.model)))
    changes = [step for step in range(80) if step == 0 or layers[step] != layers[step - 1]]
    assert [(step, layers[step]) for step in changes] == [(0, [0, 1, 2]), (10, [1, 2]), (20, [2]), (30, [])]
    assert not list(trainer(tmp_path, core={"n_layer": 4}).auxiliary_layers(t.model))


def test_figures_are_of_the_last_layer_and_gradients_of_all(tmp_path: Path) -> None:
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    plain = trainer(tmp_path, config(clip=1e9), core=still)
    extra = trainer(tmp_path, config(clip=1e9, auxiliary=True), core=still)
    (_, totals, norm), (_, with_extra, other) = plain.step(), extra.step()
    assert totals == with_extra and norm != other
    model = wave_model(**still)
    batch = next(batches(trainer(tmp_path, config())))
    state = model.initial_state(3)
    nats, objective, _, _ = model.losses(batch.inputs, batch.targets, state, batch.reset, layers=[1])
    # The last layer's output once more: the same sum again.
    assert objective.item() == pytest.approx(2 * nats.item())


def test_codebook_weights_change_gradients_and_no_figure(tmp_path: Path) -> None:
    codes = [np.random.default_rng(n).integers(7, size=3 * 20).astype(np.uint8) for n in range(4)]

    def stepped(weights: tuple[float, ...] | None) -> tuple[Totals, float]:
        settings = config(clip=1e9, codebook_weights=weights)
        t = new_trainer(tmp_path, codes_model("codes-delay"), settings, train=codes, valid=codes)
        return t.step()[1:]

    totals, norm = stepped(None)
    assert stepped((5, 5, 5)) == (totals, norm), "weights are relative"
    weighted, other = stepped((1, 2, 3))
    assert weighted == totals and other != pytest.approx(norm, rel=1e-3)
    assert stepped((10, 20, 30))[1] == pytest.approx(other)
    with pytest.raises(
        ConfigError, match="codebook_weights has 2 weights, expected 3, one for each codebook"
    ):
        stepped((1, 2))
    with pytest.raises(ConfigError, match="train.codebook_weights is of neural codecs' codes; leave it out"):
        trainer(tmp_path, config(codebook_weights=(1, 2)))
