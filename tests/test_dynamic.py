"""Dynamic evaluation: scored first, then learned from, and nothing of it stays."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.tiny import TEXT, text_model, wave_model
from txl_audio.data.stream import TokenStream
from txl_audio.dynamic import DynamicConfig, dynamic_scores, gradient_sizes
from txl_audio.evaluate import EvaluateConfig, evaluate
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import ConfigError

SGD = DynamicConfig(method="sgd", lr=0.1, decay=0.02)
RMS = DynamicConfig(method="rms", lr=2e-3, decay=0.02, collect=100)
METHODS = pytest.mark.parametrize("config", [SGD, RMS], ids=["sgd", "rms"])

REPEATED = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.uint8), 24)
OTHER = np.random.default_rng(0).integers(0, TEXT.vocab_size, 300).astype(np.uint8)


def segments(model: SequenceModel, document: np.ndarray, config: DynamicConfig) -> list[float]:
    """Nats of every segment of 4."""

    def stream(of: np.ndarray) -> TokenStream:
        return TokenStream([of], model.spec, lanes=1, segment_len=4)

    scores = dynamic_scores(
        model, stream(document), config, lanes=1, precision="float32", train=stream(OTHER)
    )
    return [nats for nats, _ in scores]


@METHODS
def test_a_segment_is_scored_before_it_is_learned_from(config: DynamicConfig) -> None:
    model = text_model()
    still = segments(model, REPEATED, config.model_copy(update={"lr": 0.0}))
    moved = segments(model, REPEATED, config)
    assert moved[0] == still[0] and moved[1] != still[1]
    # What stands in a segment, or after it, changes no score up to its own.
    changed = REPEATED.copy()
    changed[9:] = 0
    assert segments(model, changed, config)[:2] == moved[:2]


@METHODS
def test_without_a_step_it_is_the_usual_evaluation(config: DynamicConfig) -> None:
    model = text_model()
    documents = [REPEATED[:50], OTHER[:33]]
    usual = evaluate(model, documents, EvaluateConfig(lanes=2))
    still = EvaluateConfig(lanes=2, dynamic=config.model_copy(update={"lr": 0.0}))
    totals = evaluate(model, documents, still, train=[OTHER])
    assert totals.count == usual.count and totals.nats == pytest.approx(usual.nats, rel=1e-6)


@METHODS
def test_what_repeats_is_learned(config: DynamicConfig) -> None:
    model = text_model()
    scores = segments(model, REPEATED, config)
    static = segments(model, REPEATED, config.model_copy(update={"lr": 0.0}))
    assert sum(scores) < 0.97 * sum(static)
    assert sum(scores[-12:]) < sum(scores[:12])


@METHODS
def test_the_model_is_not_changed(config: DynamicConfig) -> None:
    model = wave_model(dropout=0.5).train()
    before = copy.deepcopy(model.state_dict())
    documents = [np.random.default_rng(1).integers(0, 256, 90).astype(np.uint8)]
    settings = EvaluateConfig(mem_len=8, segment_len=4, dynamic=config)
    totals = evaluate(model, documents, settings, train=documents)
    assert model.training and totals.count == 90
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert evaluate(model, documents, settings, train=documents) == totals  # no dropout either


def test_sgd_is_the_rule_of_the_paper() -> None:
    """Three segments by hand: step along the gradient, pull towards the trained weights."""
    model = text_model()
    expected, state = [], model.initial_state(1)
    learner = copy.deepcopy(model)
    line = torch.from_numpy(REPEATED).long()[None, :, None]
    for at in (0, 4, 8):
        nats, state = learner.nll(line[:, at : at + 4], line[:, at + 1 : at + 5], state)
        expected.append(nats.sum().item())
        nats.mean().backward()
        with torch.no_grad():
            for p, home in zip(learner.parameters(), model.parameters(), strict=True):
                if p.grad is not None:
                    p.copy_(p - SGD.lr * p.grad + SGD.decay * (home - p))
                p.grad = None
    assert segments(model, REPEATED, SGD)[:3] == pytest.approx(expected, rel=1e-6)


def test_rms_is_the_rule_of_the_paper() -> None:
    """Three segments by hand, with a decay so large that the pull of some weights is cut at 1."""
    config = DynamicConfig(method="rms", lr=2e-3, decay=0.5, collect=100)
    model = text_model()
    weights = list(model.parameters())
    line, state = torch.from_numpy(OTHER).long()[None, :, None], model.initial_state(1)
    squares = [torch.zeros_like(w) for w in weights]
    for at in range(0, 100, 4):
        nats, state = model.nll(line[:, at : at + 4], line[:, at + 1 : at + 5], state)
        gradients = torch.autograd.grad(nats.mean(), weights, allow_unused=True, materialize_grads=True)
        squares = [square + gradient**2 for square, gradient in zip(squares, gradients, strict=True)]
    sizes = [(square / 25).sqrt() for square in squares]
    mean = torch.cat([size.flatten() for size in sizes]).mean()
    pulls = [(config.decay * size / mean).clamp(max=1) for size in sizes]
    cut = torch.cat([(pull == 1).flatten() for pull in pulls])
    assert 0 < cut.sum() < len(cut)

    expected, state = [], model.initial_state(1)
    learner = copy.deepcopy(model)
    line = torch.from_numpy(REPEATED).long()[None, :, None]
    for at in (0, 4, 8):
        nats, state = learner.nll(line[:, at : at + 4], line[:, at + 1 : at + 5], state)
        expected.append(nats.sum().item())
        own = list(learner.parameters())
        gradients = torch.autograd.grad(nats.mean(), own, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for p, home, g, size, pull in zip(own, weights, gradients, sizes, pulls, strict=True):
                p.copy_(p - config.rate * g / (size + config.epsilon) + pull * (home - p))
    assert segments(model, REPEATED, config)[:3] == pytest.approx(expected, rel=1e-6)
    assert segments(model, REPEATED, config.model_copy(update={"decay": 0.0}))[2] != pytest.approx(
        expected[2], rel=1e-4
    )


@METHODS
def test_what_runs_away_is_an_error(config: DynamicConfig) -> None:
    message = r"diverged after 4 symbols; lower evaluate.dynamic.lr, which is 1e\+30"
    with pytest.raises(ConfigError, match=message):
        segments(text_model(), REPEATED, config.model_copy(update={"lr": 1e30}))


def test_sizes_are_root_mean_squares_over_segments() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    # Mean nats of 2 and 4 symbols with gradients (3, 0) and (4, 1); the third segment is not needed.
    losses = [(3 * weight[0] * 2, 2), ((4 * weight[0] + weight[1]) * 4, 4), (weight.sum(), 1)]
    (sizes,) = gradient_sizes(losses, [weight], symbols=6)
    torch.testing.assert_close(sizes, torch.tensor([12.5**0.5, 0.5**0.5]))


def test_rms_needs_the_training_split() -> None:
    with pytest.raises(ConfigError, match="measures gradients on the training split and got none"):
        evaluate(text_model(), [REPEATED], EvaluateConfig(dynamic=RMS))
