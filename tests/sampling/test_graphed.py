"""The recorded step is the plain one: the same symbols for the same seed, the same log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import CODE_STREAMS, CORES, STREAMS, TEXT, core_config, randomised, stream_model, wave_model
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig, AdaptiveHeadConfig
from txl_audio.model.embeddings import NgramConfig, SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.graphed import Graphed
from txl_audio.sampling.sampler import Sampler
from txl_audio.sampling.stepwise import FREE
from txl_audio.tokens import ConfigError

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is recorded on a GPU; there is none")
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])

RECORDABLE = ["text", *(name for name in STREAMS if not name.startswith("staged")), *CODE_STREAMS]
FILTERS = (Filters(), Filters(temperature=0.0), Filters(temperature=1.3, top_k=5), Filters(top_p=0.8))


def assert_same(model: SequenceModel, device: str, frames_each: int = 6) -> None:
    """Symbols exactly, nats within 1e-5: over turns of the ring, with lanes that begin at different frames,
    all kinds of filters, and copies of the state."""
    model, prompt = model.to(device), torch.randint(model.spec.vocab_size, (3, 19))
    expected, recorded = (
        Sampler(model, prompt=prompt, seed=3, backend=backend) for backend in ("torch", "graph")
    )
    assert expected.backend.startswith(f"torch {device}") and recorded.backend.startswith(f"graph {device}")
    for turn, filters in enumerate(FILTERS):
        for sampler in (expected, recorded):
            sampler.filters = filters
            lanes = torch.arange(3, device=device)
            sampler.state.core.reset_(lanes == turn)
        for _ in range(2):
            frames = expected.next_frames(frames_each // 2)
            assert torch.equal(recorded.next_frames(frames_each // 2), frames)
            torch.testing.assert_close(recorded.nats, expected.nats, rtol=1e-5, atol=1e-5)
        recorded.state = recorded.state.fork()


@pytest.mark.parametrize("name", CORES)
@on_every_device
def test_every_core(device: str, name: str) -> None:
    assert_same(wave_model("p4-codes", **CORES[name]), device)


@pytest.mark.parametrize("stream", RECORDABLE)
@on_every_device
def test_every_stream(device: str, stream: str) -> None:
    assert_same(stream_model(stream, norm="pre", final_norm=True, window="segment"), device)


def symbols_model(embedding_config: Any, head_config: Any) -> SequenceModel:
    def build() -> SequenceModel:
        config = core_config()
        embedding = embedding_config.build(TEXT, config.d_model)
        head = head_config.build(TEXT, config.d_model, embedding)
        return SequenceModel(TEXT, embedding=embedding, core=config.build(), head=head)

    return randomised(build)


ADAPTIVE_HEAD = AdaptiveHeadConfig(kind="adaptive")


@on_every_device
def test_ngrams_and_adaptive_softmax(device: str) -> None:
    ngrams = NgramConfig(lengths=(2, 4), rows=13, width=5)
    assert_same(symbols_model(SymbolEmbeddingConfig(ngrams=ngrams), SoftmaxHeadConfig()), device)
    adaptive = AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=(4, 9), d_embed=9)
    assert_same(symbols_model(adaptive, ADAPTIVE_HEAD), device)


class Trace(TorchDispatchMode):
    """What is run: every operation with the shapes of its tensors and all else that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        shown = [tuple(x.shape) if isinstance(x, Tensor) else x for x in given]
        self.operations.append((str(func), *shown))
        return func(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh")
"""Operations in which the host reads what a GPU computed, or a GPU what the host has just written."""


@pytest.mark.parametrize(
    ("name", "stream"),
    [("relative-segment", stream) for stream in RECORDABLE]
    + [(name, "p1-logistic") for name in ("shaw-same_length", "clamped-sliding", "absolute", "alrfou")],
)
def test_all_frames_are_the_same_work_at_the_same_addresses(name: str, stream: str) -> None:
    """What a recording needs, and shows only on a GPU. 14 frames are segments and turns of the ring."""
    model = stream_model(stream, **CORES[name])
    state = model.decode_state(model.initial_state(2))
    stepper, places = Graphed(model, lanes=2), model.spec.symbols_per_frame
    frame = torch.zeros(2, places, dtype=torch.int64)
    free, uniforms = torch.full_like(frame[:, None], FREE), torch.rand(2, 14, places, dtype=torch.float64)

    def addresses() -> list[int]:
        core = state.core
        kept = (core.keys, core.values, core.start, core.time, core.segment_phase, state.recent)
        return [tensor.data_ptr() for tensor in kept]

    before, traces = addresses(), []
    for number in uniforms.split(1, dim=1):
        with Trace() as trace:
            frames, _ = stepper.run(state, frame, free, number, Filters(top_p=0.9))
        frame = frames[:, -1]
        traces.append(trace.operations)
    assert addresses() == before and int(state.core.time) == model.core.config.mem_len + 14
    assert all(trace == traces[0] for trace in traces) and len(traces[0]) > 50
    assert not [name for name, *_ in traces[0] if any(wait in name for wait in WAITS)]


def test_what_cannot_be_recorded_is_said() -> None:
    with pytest.raises(ConfigError, match="recorded as a graph: its codec has a stage .*; use backend torch"):
        Sampler(wave_model("staged-p4"), backend="graph")
    tables = AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=(4,), div_val=2)
    prompt = torch.tensor([[1]])
    with pytest.raises(ConfigError, match="its adaptive embedding reads other tables for other words"):
        Sampler(symbols_model(tables, ADAPTIVE_HEAD), prompt=prompt, backend="graph")
    with pytest.raises(ConfigError, match="backend graph samples with the model's own weights, got int8"):
        Sampler(stream_model("text"), prompt=prompt, backend="graph", weights="int8")


@gpu
def test_a_gpu_records_on_its_own() -> None:
    assert Sampler(wave_model().to("cuda")).backend.startswith("graph cuda")
    assert Sampler(wave_model("staged-p4").to("cuda")).backend.startswith("torch cuda")
