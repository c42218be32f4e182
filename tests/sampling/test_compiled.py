"""The compiled step is the model: the same symbols for the same seed, the same log-probabilities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import (
    CODE_STREAMS,
    CORES,
    STREAMS,
    TEXT,
    codes_model,
    core_config,
    randomised,
    stream_model,
    text_model,
    wave_model,
)
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.evaluate import score_document
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig, AdaptiveHeadConfig
from txl_audio.model.contracts import Head
from txl_audio.model.embeddings import NgramConfig, SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling import compiled
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Sampler
from txl_audio.tokens import ConfigError

FILTERS = (Filters(), Filters(temperature=0.0), Filters(temperature=1.3, top_k=40), Filters(top_p=0.8))


def samplers(model: SequenceModel, prompt_len: int, **options: Any) -> tuple[Sampler, Sampler]:
    prompt = torch.randint(model.spec.vocab_size, (2, prompt_len))
    reference, fast = (
        Sampler(model, prompt=prompt, seed=3, backend=backend, **options) for backend in ("torch", "compiled")
    )
    assert (reference.backend, fast.backend) == ("torch cpu", "compiled cpu")
    return reference, fast


def assert_same(model: SequenceModel, prompt_len: int, frames: int = 24, **options: Any) -> None:
    """Symbols exactly, nats within 1e-4, for every kind of filters in turn."""
    expected, fast = samplers(model, prompt_len, **options)
    for index in range(frames):
        expected.filters = fast.filters = FILTERS[index % len(FILTERS)]
        assert torch.equal(fast.next_frame(), expected.next_frame())
        torch.testing.assert_close(fast.nats, expected.nats, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", CORES)
def test_every_core_and_stream(name: str, stream: str) -> None:
    # 18 symbols are whole segments, further frames and, with 4 a frame, half a frame.
    assert_same(wave_model(stream, **CORES[name]), prompt_len=18)


@pytest.mark.parametrize("text_size", [0, 5])
@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_codes_walked_or_delayed(stream: str, text_size: int) -> None:
    # 8 symbols are two frames of 3, and two codes of one that the model completes.
    assert_same(codes_model(stream, text_size=text_size), prompt_len=8)
    if text_size:
        assert_same(codes_model(stream, text_size=text_size), prompt_len=9, writes=True)


LAYERS: dict[str, dict[str, Any]] = {
    "pre": {"norm": "pre", "final_norm": True, "activation": "gelu"},
    "zeros": {"first_memory": "zeros"},
    "odd sizes": {"d_model": 10, "n_head": 3, "d_head": 17, "d_ff": 70},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer(name: str) -> None:
    assert_same(text_model(**LAYERS[name]), prompt_len=7)


def symbols_model(embedding_config: Any, head_config: Any) -> SequenceModel:
    def build() -> SequenceModel:
        config = core_config()
        embedding = embedding_config.build(TEXT, config.d_model)
        head = head_config.build(TEXT, config.d_model, embedding)
        return SequenceModel(TEXT, embedding=embedding, core=config.build(), head=head)

    return randomised(build)


ADAPTIVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no clusters": ({"cutoffs": ()}, {}),
    "one table": ({"cutoffs": (4, 9)}, {}),
    "one table, projected": ({"cutoffs": (4, 9), "d_embed": 9}, {"tie_projs": (False, True)}),
    "tables": ({"cutoffs": (4, 9), "div_val": 2}, {"tie_projs": (False, True, True)}),
    "untied, no width left": ({"cutoffs": (4, 9), "div_val": 4, "d_embed": 8}, {"tied": False}),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_kind_of_adaptive_clusters(name: str) -> None:
    embedding, head = ADAPTIVE[name]
    model = symbols_model(
        AdaptiveEmbeddingConfig(kind="adaptive", **embedding), AdaptiveHeadConfig(kind="adaptive", **head)
    )
    assert_same(model, prompt_len=5, frames=40)


def test_every_kind_of_softmax_and_embedding() -> None:
    ngrams = NgramConfig(lengths=(2, 4), rows=13, width=5)
    for embedding in (SymbolEmbeddingConfig(d_embed=7), SymbolEmbeddingConfig(d_embed=7, ngrams=ngrams)):
        for tied in (True, False):
            assert_same(symbols_model(embedding, SoftmaxHeadConfig(tied=tied)), prompt_len=5)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a9_pieces_of_any_length(count: int) -> None:
    expected, fast = samplers(wave_model("staged-p4", window="segment"), prompt_len=9)
    pieces = [fast.next_frames(min(count, 40 - at)) for at in range(0, 40, count)]
    assert torch.equal(torch.cat(pieces, dim=1), expected.next_frames(40))
    torch.testing.assert_close(fast.nats, expected.nats, rtol=1e-4, atol=1e-4)


def test_a_start_symbol_begins_the_predictors_anew() -> None:
    expected, fast = samplers(wave_model("staged-p4"), prompt_len=8)
    for sampler in (expected, fast):
        sampler.next_frames(5)
        sampler._frame = torch.full_like(sampler._frame, sampler.model.spec.start_symbol)
    assert torch.equal(fast.next_frames(6), expected.next_frames(6))
    torch.testing.assert_close(fast.nats, expected.nats, rtol=1e-4, atol=1e-4)


def test_a8_twenty_times_the_training_length() -> None:
    """Finite, bounded, the same size, and still exactly the model after many turns of the ring."""
    model = wave_model("staged-p4", segment_len=16, mem_len=16)
    sampler = Sampler(model)
    size, costs, symbols = sampler.state.nbytes(), [], []
    for _ in range(20 * 16):
        symbols.append(sampler.next_frame())
        costs.append(sampler.nats)
        assert sampler.state.nbytes() == size
    line, nats = torch.cat(symbols, dim=1), torch.cat(costs, dim=1)
    offline = score_document(model, line[0].numpy())
    torch.testing.assert_close(nats[0], offline, rtol=1e-4, atol=1e-4)
    pcm = MuLawCodec(1).decode(line[..., None])
    clipped = ((line == 0) | (line == 255)).float().mean()
    assert 0 < pcm.square().mean().sqrt() <= 1 and clipped < 1 and nats.mean() < 2 * math.log(256)


@pytest.mark.parametrize("stream", ["p1-softmax", "staged-p4", "codes-depth"])
def test_int8_weights_are_close(stream: str) -> None:
    model = stream_model(stream, d_head=6)
    prompt = torch.randint(model.spec.vocab_size, (2, 42))
    exact, rounded = (Sampler(model, prompt=prompt, weights=weights) for weights in ("float32", "int8"))
    assert rounded.backend == "compiled cpu int8"
    assert rounded.state.nbytes() < exact.state.nbytes()
    errors = []
    for _ in range(20):
        exact.next_frame()
        rounded.next_frame()
        errors.append(rounded.nats - exact.nats)
        rounded._frame = exact._frame  # both go on with the same symbols
    assert 0 < torch.cat(errors).abs().mean() < 0.05


def test_all_models_share_one_compilation() -> None:
    """A compilation takes half a minute: nothing of a model but the kind of its weights may ask for one."""
    clusters = AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=(4, 9), div_val=2)
    adaptive = symbols_model(clusters, AdaptiveHeadConfig(kind="adaptive"))
    waves = (wave_model("p1-softmax"), wave_model("staged-p4", norm="pre"))
    for model in (text_model(), adaptive, *waves, *map(codes_model, CODE_STREAMS)):
        Sampler(model, lanes=2, prompt=torch.zeros(2, 4, dtype=torch.int64))
    assert len(compiled._run.signatures) <= len(("float32", "int8"))


def test_the_compilation_is_kept_on_disk() -> None:
    """Else every process would compile for half a minute before its first sample."""
    Sampler(text_model(), prompt=torch.zeros(1, 1, dtype=torch.int64))
    folder, name = Path(compiled._run.stats.cache_path), compiled._run.__qualname__
    assert any(name.rpartition(".")[2] in file.name and file.suffix == ".nbi" for file in folder.iterdir())


def test_what_is_not_compiled_is_sampled_by_torch() -> None:
    model = text_model()
    model.head = Head()
    prompt = torch.tensor([[1, 2]])
    assert Sampler(model, prompt=prompt).backend == "torch cpu"
    with pytest.raises(ConfigError, match="cannot be compiled: its head, Head, is not compiled; use backend"):
        Sampler(model, prompt=prompt, backend="compiled")
    with pytest.raises(ConfigError, match="int8 weights need an even d_head, got 5; use backend torch"):
        Sampler(text_model(), prompt=prompt, backend="compiled", weights="int8")
    with pytest.raises(ConfigError, match="backend torch samples with the model's own weights, got int8"):
        Sampler(model, prompt=prompt, weights="int8")
