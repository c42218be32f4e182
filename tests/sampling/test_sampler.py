"""The sampler gives what the model says: streamed equals offline, for any length, prompt and chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tiny import CORES, STREAMS, TEXT, WINDOWS, lengths_of, run_nll, text_model, wave_model
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.evaluate import score_document
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Backend, Sampler
from txl_audio.tokens import ConfigError, SpecError

both_backends = pytest.mark.parametrize("backend", ["torch", "compiled"])


def sample(
    model: SequenceModel,
    frames: int,
    prompt: Tensor | None = None,
    seed: int = 0,
    lanes: int = 1,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Symbols and nats [B, N] of the next frames."""
    sampler = Sampler(model, prompt=prompt, seed=seed, lanes=lanes, backend=backend)
    symbols, nats = [], []
    for _ in range(frames):
        symbols.append(sampler.next_frame())
        nats.append(sampler.nats)
    return torch.cat(symbols, dim=1), torch.cat(nats, dim=1)


def assert_scores_equal(model: SequenceModel, line: Tensor, nats: Tensor) -> None:
    """The newest symbols of one document cost offline what they cost while sampling."""
    offline = score_document(model, line.numpy())[-len(nats) :]
    torch.testing.assert_close(nats, offline, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt_len", [0, 1, 3, 4, 16, 21, 37])
@pytest.mark.parametrize("stream", STREAMS)
@both_backends
def test_streamed_equals_offline(backend: Backend, stream: str, prompt_len: int) -> None:
    """From nothing, after whole segments, and after prompts that end inside a frame."""
    model = wave_model(stream)
    prompt = torch.randint(256, (1, prompt_len))
    symbols, nats = sample(model, 20, prompt, backend=backend)
    begun = prompt_len % model.spec.symbols_per_frame
    assert torch.equal(symbols[:, :begun], prompt[:, prompt_len - begun :])
    assert not nats[:, :begun].any() and (nats[:, begun:] > 0).all()
    line = torch.cat([prompt[0, : prompt_len - begun], symbols[0]])
    assert_scores_equal(model, line, nats[0, begun:])


@pytest.mark.parametrize("stream", ["p4-logistic", "p1-softmax"])
@pytest.mark.parametrize("name", CORES)
@both_backends
def test_streamed_equals_offline_for_every_core(backend: Backend, name: str, stream: str) -> None:
    model = wave_model(stream, **CORES[name])
    symbols, nats = sample(model, 25, backend=backend)
    assert_scores_equal(model, symbols[0], nats[0])


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 13])
@pytest.mark.parametrize("window", WINDOWS)
@both_backends
def test_text(backend: Backend, window: str, prompt_len: int) -> None:
    model = text_model(window=window)
    prompt = torch.randint(TEXT.vocab_size, (1, prompt_len))
    symbols, nats = sample(model, 24, prompt, backend=backend)
    assert_scores_equal(model, torch.cat([prompt[0], symbols[0]]), nats[0])


@both_backends
def test_m4_greedy_steps_equal_recomputing_from_scratch(backend: Backend) -> None:
    model = text_model(mem_len=40)
    prompt = torch.tensor([[3, 1, 4]])
    sampler = Sampler(model, prompt=prompt, filters=Filters(temperature=0.0), backend=backend)
    streamed = torch.cat([sampler.next_frame() for _ in range(20)], dim=1)
    line = prompt
    for _ in range(20):
        hidden, *_ = model.encode(line[..., None], line[..., None], model.initial_state(1))
        best = model.head.log_probs(hidden[:, -1], line[:, :0], 0).argmax(-1, keepdim=True)
        line = torch.cat([line, best], dim=1)
    assert torch.equal(streamed, line[:, 3:])


def test_m5_past_the_memory_equals_segments_run_again() -> None:
    model = text_model(window="segment", segment_len=8, mem_len=8)
    prompt = torch.randint(TEXT.vocab_size, (1, 5))
    symbols, nats = sample(model, 24, prompt)
    line = torch.cat([prompt, symbols], dim=1)[..., None]
    again, _ = run_nll(model, line[:, :-1], line[:, 1:], lengths_of(28, 8))
    torch.testing.assert_close(nats, again[:, -24:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_samples", [1, 4, 7, 10_000])
@both_backends
def test_a9_a10_chunks_are_pieces_of_one_sound(backend: Backend, chunk_samples: int) -> None:
    model, codec = wave_model(), MuLawCodec(4)
    whole = torch.cat(list(Sampler(model, seed=3).pcm(codec, samples=50)), dim=1)
    sampler = Sampler(model, seed=3, backend=backend)
    chunks = list(sampler.pcm(codec, samples=50, chunk_samples=chunk_samples))
    assert torch.equal(torch.cat(chunks, dim=1), whole) and whole.shape == (1, 50)
    assert all(chunk.size(1) >= min(chunk_samples, 50) for chunk in chunks[:-1])
    assert len(chunks) == {1: 13, 4: 13, 7: 7, 10_000: 1}[chunk_samples]


def test_sound_begins_with_a_short_chunk() -> None:
    chunks = Sampler(wave_model()).pcm(MuLawCodec(4), samples=3000, chunk_samples=1000)
    assert [chunk.size(1) for chunk in chunks] == [320, 1000, 1000, 680]


@pytest.mark.parametrize("prompt_len", [8, 9, 11])
@both_backends
def test_sound_continues_the_prompt_to_the_sample(backend: Backend, prompt_len: int) -> None:
    model, codec = wave_model(), MuLawCodec(4)
    prompt = torch.randint(256, (1, prompt_len))
    sampler = Sampler(model, prompt=prompt, backend=backend)
    pcm = torch.cat(list(sampler.pcm(codec, samples=10)), dim=1)
    symbols, _ = sample(model, 4, prompt)
    new = symbols[:, prompt_len % 4 :][:, :10]
    assert torch.equal(pcm, MuLawCodec(1).decode(new[..., None]))


def test_a_chunk_comes_before_the_next_is_made() -> None:
    sampler = Sampler(wave_model())
    chunks = sampler.pcm(MuLawCodec(4), samples=10**9, chunk_samples=8)
    for frames in (2, 4, 6):
        assert next(chunks).shape == (1, 8)
        assert sampler.state.core.time == 6 + frames  # the ring begins behind a memory of 6 frames


def test_a8_twenty_times_the_training_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite, bounded, the same size, and still exactly the model after many turns of the ring."""
    model = wave_model(segment_len=16, mem_len=16)
    sampler = Sampler(model, backend="torch")
    size, symbols, nats, entropy = sampler.state.nbytes(), [], [], []
    draw = Filters.draw

    def watched(self: Filters, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        entropy.append(-(log_probs.exp() * log_probs).sum(-1))
        return draw(self, log_probs, uniforms)

    monkeypatch.setattr(Filters, "draw", watched)
    for _ in range(20 * 16):
        symbols.append(sampler.next_frame())
        nats.append(sampler.nats)
        assert sampler.state.nbytes() == size
    line, cost = torch.cat(symbols, dim=1), torch.cat(nats, dim=1)
    entropies = torch.stack(entropy)
    assert torch.isfinite(cost).all() and torch.isfinite(entropies).all()
    assert entropies.min() >= 0 and entropies.max() <= math.log(256) + 1e-3
    pcm = MuLawCodec(1).decode(line[..., None])
    level, clipped = pcm.square().mean().sqrt().item(), ((line == 0) | (line == 255)).float().mean().item()
    assert 0 < level <= 1 and 0 <= clipped < 1
    # Nats drawn from a distribution average to its entropy: it samples what it scores.
    error = (cost.flatten() - entropies.flatten()).mean().abs()
    assert error < 5 * cost.std() / cost.numel() ** 0.5
    assert_scores_equal(model, line[0], cost[0])


def test_seeds_decide() -> None:
    model = wave_model()
    first, _ = sample(model, 12, seed=1)
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(sample(model, 12, seed=1)[0], first)
    assert not torch.equal(sample(model, 12, seed=2)[0], first)


@both_backends
def test_no_sample_comes_from_the_tails(backend: Backend) -> None:
    """With all but the middle cut, a sample is the median of its distribution: the one that u = 0.5 draws."""
    model = wave_model("staged-p4")
    filters = Filters(tails=0.5 - 1e-9)
    first, second = (
        Sampler(model, filters=filters, seed=seed, backend=backend).next_frames(8) for seed in (1, 2)
    )
    assert torch.equal(first, second)
    assert torch.equal(first, Sampler(model, filters=filters, backend="torch").next_frames(8))
    text = Sampler(text_model(), prompt=torch.tensor([[1]]), filters=Filters(tails=0.1), backend=backend)
    with pytest.raises(ConfigError, match="symbols of test are in no order of amplitude"):
        text.next_frame()


def test_sampling_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    sample(wave_model(), 4)
    assert torch.equal(torch.get_rng_state(), before)


@both_backends
def test_lanes_differ_and_are_alone(backend: Backend) -> None:
    model = wave_model()
    symbols, nats = sample(model, 12, lanes=3, backend=backend)
    assert torch.equal(symbols[:2], sample(model, 12, lanes=2, backend=backend)[0])
    assert len({tuple(lane) for lane in symbols.tolist()}) == 3
    for lane in range(3):
        assert_scores_equal(model, symbols[lane], nats[lane])
    prompts = torch.randint(256, (2, 8))
    symbols, nats = sample(model, 6, prompts, backend=backend)
    for lane in range(2):
        assert_scores_equal(model, torch.cat([prompts[lane], symbols[lane]]), nats[lane])


@both_backends
def test_a_forked_stream_can_be_continued_twice(backend: Backend) -> None:
    model = wave_model("staged-p4")
    sampler = Sampler(model, filters=Filters(temperature=0.0), backend=backend)
    for _ in range(9):
        sampler.next_frame()
    saved, frame = sampler.state.fork(), sampler._frame.clone()
    first = [sampler.next_frame() for _ in range(6)]
    sampler.state, sampler._frame = saved, frame
    assert torch.equal(torch.cat([sampler.next_frame() for _ in range(6)]), torch.cat(first))


@both_backends
def test_filters_may_be_exchanged_and_do_not_change_the_nats(backend: Backend) -> None:
    """Nats are those of the unfiltered model, so that they compare."""
    model = wave_model()
    sampler = Sampler(model, filters=Filters(temperature=0.0), backend=backend)
    symbols, nats = [], []
    for filters in (Filters(temperature=0.0), Filters(top_k=3), Filters(temperature=2.0, top_p=0.5)):
        sampler.filters = filters
        for _ in range(5):
            symbols.append(sampler.next_frame())
            nats.append(sampler.nats)
    assert_scores_equal(model, torch.cat(symbols, dim=1)[0], torch.cat(nats, dim=1)[0])


@both_backends
def test_a12_a_stream_from_nothing_does_not_begin_in_silence(backend: Backend) -> None:
    model, greedy = wave_model(), Filters(temperature=0.0)
    begin = Sampler(model, filters=greedy, backend=backend)
    assert (begin._frame == 256).all()
    after_silence = Sampler(model, prompt=torch.full((1, 40), 128), filters=greedy, backend=backend)
    for sampler in (begin, after_silence):
        sampler.next_frame()
    assert (begin.nats - after_silence.nats).abs().max() > 1e-3


def test_dropout_is_off() -> None:
    model = wave_model(dropout=0.5).train()
    symbols, nats = sample(model, 10)
    assert not model.training
    assert_scores_equal(model, symbols[0], nats[0])


def test_errors() -> None:
    model = wave_model()
    with pytest.raises(SpecError, match="the prompt has symbols 0 to 256, expected 0 to 255"):
        Sampler(model, prompt=torch.tensor([[0, 256]]))
    with pytest.raises(SpecError, match="the prompt has symbols -1 to 3"):
        Sampler(model, prompt=torch.tensor([[-1, 3]]))
    with pytest.raises(SpecError, match=r"expected integers of shape \[lanes, symbols\]"):
        Sampler(model, prompt=torch.tensor([1, 2]))
    with pytest.raises(SpecError, match=r"the prompt is torch.float32"):
        Sampler(model, prompt=torch.zeros(1, 2))
    for prompt in (None, torch.zeros(1, 0, dtype=torch.int64)):
        with pytest.raises(SpecError, match="a text model needs a prompt of at least one symbol"):
            Sampler(text_model(), prompt=prompt)
    with pytest.raises(SpecError, match="the model and the codec hold different symbols .*symbols_per_frame"):
        next(Sampler(model).pcm(MuLawCodec(2), samples=4))
