"""Random splits, resets and lanes: the result is that of one pass over each document alone."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import CODE_STREAMS, STREAMS, core, run_core, stream_model
from txl_audio.data.stream import Batch, TokenStream
from txl_audio.evaluate import score_document
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import IGNORE

MODELS: dict[str, SequenceModel] = {name: stream_model(name) for name in [*STREAMS, *CODE_STREAMS, "text"]}
CORES = {
    (window, mem_len): core(window=window, mem_len=mem_len)
    for window in ("sliding", "same_length")
    for mem_len in (1, 5, 24)
}


@st.composite
def splits(draw: st.DrawFn, total: int) -> list[int]:
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=8))
    bounds = [0, *sorted(cuts), total]
    return [b - a for a, b in itertools.pairwise(bounds)]


@given(lengths=splits(24), which=st.sampled_from(sorted(CORES)), seed=st.integers(0, 99), resets=st.data())
def test_any_split_of_a_core(
    lengths: list[int], which: tuple[str, int], seed: int, resets: st.DataObject
) -> None:
    x = torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(seed))
    reset = torch.zeros(2, 24, dtype=torch.bool)
    for lane, frame in resets.draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 23)), max_size=4)):
        reset[lane, frame] = True
    expected = run_core(CORES[which], x, [24], reset)
    torch.testing.assert_close(run_core(CORES[which], x, lengths, reset), expected, rtol=0, atol=1e-5)


def text_pieces(batches: list[Batch], lane: int) -> list[np.ndarray]:
    """What one lane of a text read, cut at its resets: the context and the targets of each piece."""
    inputs, targets = (torch.cat([getattr(b, n)[lane, :, 0] for b in batches]) for n in ("inputs", "targets"))
    begins = torch.cat([b.reset[lane] for b in batches]).nonzero().flatten().tolist()
    pieces = []
    for begin, end in itertools.pairwise([*begins, len(targets)]):
        scored = targets[begin:end][targets[begin:end] != IGNORE]
        pieces.append(torch.cat([inputs[begin : begin + 1], scored]).numpy())
    return pieces


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(MODELS)),
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=6),
    lanes=st.integers(1, 4),
    segment_len=st.integers(1, 13),
    seed=st.integers(0, 99),
)
def test_any_way_of_dealing_documents(
    name: str, lengths: list[int], lanes: int, segment_len: int, seed: int
) -> None:
    """The sum of nats over lanes equals that of every document, or piece of a text, scored alone."""
    model, rng = MODELS[name], np.random.default_rng(seed)
    documents = [rng.integers(0, model.spec.vocab_size, n) for n in lengths]
    state, nats, count = model.initial_state(lanes), 0.0, 0
    batches = list(TokenStream(documents, model.spec, lanes=lanes, segment_len=segment_len, seed=seed))
    for batch in batches:
        with torch.no_grad():
            out, state = model.nll(batch.inputs, batch.targets, state, batch.reset)
        assert not out[batch.targets == IGNORE].any()
        nats, count = nats + out.double().sum().item(), count + int((batch.targets >= 0).sum())
    if name == "text" and lanes > 1:
        documents = [piece for lane in range(lanes) for piece in text_pieces(batches, lane)]
    alone = torch.cat([score_document(model, document) for document in documents])
    assert count == len(alone) == sum(lengths) - (len(lengths) if name == "text" else 0)
    assert abs(nats - alone.double().sum().item()) < 1e-4 * max(1.0, nats)
