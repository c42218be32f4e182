"""Heads give probabilities: they sum to 1, equal the nats they are trained with, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tiny import CODE_STREAMS, STREAMS, TEXT, stream_model, text_model, wave_model
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.model.contracts import Context, Waveform
from txl_audio.model.embeddings import SampleEmbeddingConfig, SampleFeatures, SymbolEmbeddingConfig
from txl_audio.model.heads import UNIFORM_SHARE, FrameHeadConfig, SoftmaxHeadConfig, mixture_log_mass
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import IGNORE, ConfigError

CODEC = MuLawCodec(4)
WAVEFORM = Waveform(CODEC.levels, CODEC.edges)
ALL = [*STREAMS, *CODE_STREAMS, "text"]
LOGISTIC = [name for name in STREAMS if name.endswith("logistic")] + ["staged-p4"]


def side_of(model: SequenceModel, *shape: int) -> Tensor | None:
    """What a stage might say, with a small and a large scale."""
    if model.stage is None:
        return None
    side = torch.randn(*shape, model.stage.width)
    side[..., :2] = torch.tensor([0.1, 0.02])
    side[1:, ..., 1] = 2e-5
    return side


def edges() -> Tensor:
    head = FrameHeadConfig(kind="frame").build(
        CODEC.spec, 8, SymbolEmbeddingConfig().build(CODEC.spec, 8), WAVEFORM
    )
    return head.edges


# How wild the core's output is: 1 is usual, 1e3 an unstable training.
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("stream", ALL)
def test_probabilities_sum_to_one(stream: str, size: float) -> None:
    model = stream_model(stream)
    hidden = size * torch.randn(6, 12)
    window = torch.randint(model.spec.vocab_size, (6, model.head.history))
    for place in range(model.spec.symbols_per_frame):
        log_probs = model.head.log_probs(hidden, window, place, side_of(model, 6))
        assert log_probs.shape == (6, model.spec.vocab_size) and log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(6), rtol=0, atol=2e-4)


@pytest.mark.parametrize("stream", ALL)
def test_nats_are_gathered_log_probs(stream: str) -> None:
    model = stream_model(stream)
    places, vocab_size = model.spec.symbols_per_frame, model.spec.vocab_size
    hidden = torch.randn(2, 3, 12)
    history = torch.randint(vocab_size, (2, 3, model.history))
    targets = torch.randint(vocab_size, (2, 3, places))
    side = side_of(model, 2, 3, places)
    nats = model.head.nll(hidden, Context(history, targets, side), targets)
    for place in range(places):
        line = torch.cat([history, targets[..., :place]], dim=-1).flatten(0, 1)
        window = line[:, line.size(1) - model.head.history :]
        at = None if side is None else side[:, :, place].flatten(0, 1)
        log_probs = model.head.log_probs(hidden.flatten(0, 1), window, place, at)
        expected = -log_probs.gather(1, targets[..., place].flatten()[:, None])
        torch.testing.assert_close(nats[..., place].flatten(), expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stream", ALL)
def test_what_is_ignored_has_no_nats_and_no_gradient(stream: str) -> None:
    model = stream_model(stream)
    hidden = torch.randn(1, 3, 12, requires_grad=True)
    history = torch.randint(model.spec.vocab_size, (1, 3, model.history))
    targets = torch.randint(model.spec.vocab_size, (1, 3, model.spec.symbols_per_frame))
    targets[:, 1] = IGNORE
    side = side_of(model, 1, 3, model.spec.symbols_per_frame)
    nats = model.head.nll(hidden, Context(history, targets, side), targets)
    nats.sum().backward()
    assert not nats[:, 1].any() and (nats[:, [0, 2]] > 0).all()
    assert hidden.grad is not None
    assert not hidden.grad[:, 1].any() and hidden.grad[:, [0, 2]].any()


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("code", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize("stream", LOGISTIC)
def test_gradients_are_finite_at_the_edges(stream: str, code: int, size: float) -> None:
    """Also after digital silence and after a document's begin, where the level is tiny."""
    model = wave_model(stream)
    for before in (128, 0, 255, 256):
        hidden = (size * torch.randn(2, 1, 12)).requires_grad_()
        history = torch.full((2, 1, model.history), before)
        targets = torch.full((2, 1, model.spec.symbols_per_frame), code)
        context = Context(history, targets, side_of(model, *targets.shape))
        nats = model.head.nll(hidden, context, targets)
        model.zero_grad()
        nats.sum().backward()
        assert torch.isfinite(nats).all()
        for gradient in (hidden.grad, *(p.grad for p in model.head.parameters())):
            assert gradient is not None and torch.isfinite(gradient).all()


@pytest.mark.parametrize("mean", [-50.0, -1.0, 0.0, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.01, 1.0, 7.0])
def test_mass_of_a_logistic(mean: float, scale: float) -> None:
    """Against float64, from spikes inside one bin to means far outside [-1, 1]."""
    bounds = edges()
    lower, upper = bounds[:-1, None], bounds[1:, None]
    one = torch.zeros(1)
    got = mixture_log_mass(one, torch.tensor([mean]), torch.tensor([scale]), lower, upper)
    a, b = ((edge.double() - mean) / torch.tensor(scale).double() for edge in (lower, upper))
    width = (lower.double() - upper.double()) / torch.tensor(scale).double()
    log_sigmoid = torch.nn.functional.logsigmoid
    expected = (log_sigmoid(b) + log_sigmoid(-a) + torch.log(-torch.expm1(width)))[:, 0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-3)
    assert got.exp().sum().item() == pytest.approx(1.0, abs=1e-3)
    if scale >= 0.01 and abs(mean) <= 1:  # Where the plain difference does not cancel.
        plain = (torch.sigmoid(b) - torch.sigmoid(a))[:, 0]
        torch.testing.assert_close(got.double().exp(), plain, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("stream", LOGISTIC)
def test_no_sample_costs_more_than_its_floor(stream: str) -> None:
    """Loud speech after digital silence: the level of the window says nothing about what comes."""
    model = stream_model(stream)
    hidden = torch.zeros(1, 1, 12, requires_grad=True)
    history = torch.full((1, 1, model.history), 128)
    targets = torch.full((1, 1, model.spec.symbols_per_frame), 255)
    context = Context(history, targets, side_of(model, *targets.shape))
    nats = model.head.nll(hidden, context, targets)
    assert nats.max() <= -math.log(UNIFORM_SHARE / 256) + 1e-4
    nats.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_the_bins_are_the_codecs() -> None:
    bounds = edges()
    assert bounds.shape == (257,) and (bounds.diff() > 0).all()
    inside = torch.linspace(-0.999, 0.999, 501)
    code = CODEC.encode(torch.nn.functional.pad(inside, (0, 3))[None]).flatten()[:501]
    assert ((bounds[code] <= inside) & (inside < bounds[code + 1])).all()


def test_tied_weights_are_one_tensor() -> None:
    tied = text_model()
    names = [name for name, _ in tied.named_parameters() if name.endswith("weight") and "core" not in name]
    assert names == ["embedding.weight"]
    assert set(tied.state_dict()) == {name for name, _ in tied.named_parameters()}
    hidden = torch.randn(2, 12)
    expected = hidden @ tied.embedding.weight.T + tied.head.bias
    torch.testing.assert_close(tied.head.logits(hidden), expected)
    # With a start symbol the table has one row more, the last, which is never predicted.
    wave = wave_model("p1-softmax")
    expected = hidden @ wave.embedding.weight[:256].T + wave.head.bias
    torch.testing.assert_close(wave.head.logits(hidden), expected)


def test_untied_weights_are_the_heads_own() -> None:
    embedding = SymbolEmbeddingConfig().build(TEXT, 12)
    head = SoftmaxHeadConfig(tied=False).build(TEXT, 12, embedding)
    before = head.logits(torch.ones(1, 12))
    with torch.no_grad():
        embedding.weight.zero_()
    assert torch.equal(head.logits(torch.ones(1, 12)), before)


def test_an_embedding_narrower_than_the_core() -> None:
    embedding = SymbolEmbeddingConfig(d_embed=6).build(TEXT, 12)
    head = SoftmaxHeadConfig().build(TEXT, 12, embedding)
    assert embedding(torch.zeros(1, 2, 1, dtype=torch.int64)).shape == (1, 2, 12)
    assert head.logits(torch.ones(1, 12)).shape == (1, TEXT.vocab_size)


def test_parts_that_do_not_fit_are_named() -> None:
    symbols = SymbolEmbeddingConfig().build(CODEC.spec, 8)
    with pytest.raises(ConfigError, match="head softmax predicts 1 symbol per frame, got 4; use head frame"):
        SoftmaxHeadConfig().build(CODEC.spec, 8, symbols)
    one = MuLawCodec(1)
    samples = SampleEmbeddingConfig(kind="samples").build(one.spec, 8, Waveform(one.levels, one.edges))
    with pytest.raises(ConfigError, match="tied=true needs embedding symbols; set head.tied=false"):
        SoftmaxHeadConfig().build(one.spec, 8, samples)
    with pytest.raises(ConfigError, match="head frame needs a waveform codec, got test"):
        FrameHeadConfig(kind="frame").build(TEXT, 8, symbols)
    with pytest.raises(ConfigError, match="embedding samples needs a waveform codec, got test"):
        SampleEmbeddingConfig(kind="samples").build(TEXT, 8)


def test_features_of_samples() -> None:
    features = SampleFeatures(3, CODEC.levels)
    values, normal, _, level = features(torch.tensor([[256, 255, 0], [256, 256, 256]]), None)
    assert values.shape == (2, 10) and torch.isfinite(values).all()
    assert values[0, :3].tolist() == [0.0, 1.0, -1.0]  # companded; the start symbol has none
    assert values[0, 6:9].tolist() == [1.0, 0.0, 0.0]  # which samples are missing
    assert level[0].item() == pytest.approx((2 / 3) ** 0.5, rel=1e-4)
    assert normal.square().mean(-1)[0].item() == pytest.approx(1.0, rel=1e-4)
    # Amplitudes, not codes, are divided by the level: half as loud looks the same.
    soft = CODEC.encode(torch.tensor([[0.1, 0.05, -0.1, 0.0]]))[0, :, :3]
    loud = CODEC.encode(torch.tensor([[0.8, 0.4, -0.8, 0.0]]))[0, :, :3]
    torch.testing.assert_close(features(soft, None).basis, features(loud, None).basis, rtol=0, atol=0.03)


def test_symbols_at_different_places_have_different_vectors() -> None:
    embedding = SymbolEmbeddingConfig().build(CODEC.spec, 8)
    there = embedding(torch.tensor([[[5, 9, 5, 5]]]))
    back = embedding(torch.tensor([[[9, 5, 5, 5]]]))
    assert not torch.allclose(there, back)
    by_hand = sum(embedding.weight[place * 257 + symbol] for place, symbol in enumerate([5, 9, 5, 5]))
    torch.testing.assert_close(there[0, 0], by_hand * 8**0.5)
