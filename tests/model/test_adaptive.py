"""Adaptive input and softmax: every word in its place, one distribution, nothing computed in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import TEXT, core_config, randomised, run_nll
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.model.adaptive import (
    AdaptiveEmbedding,
    AdaptiveEmbeddingConfig,
    AdaptiveHead,
    AdaptiveHeadConfig,
)
from txl_audio.model.contracts import Context
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import IGNORE, ConfigError, TokenSpec

D = 12
WORDS = TokenSpec("text", 20, 1, 0.0, 0, "words", "0")

# Changes to the embedding and to the head: one table, narrower than the model, shared projections, widths
# 12, 3, 0, and tables of the head's own.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "div1": ({}, {}),
    "div1-narrow": ({"d_embed": 8}, {"tie_projs": (False, True, True)}),
    "div2": ({"div_val": 2}, {"tie_projs": (False, True, True)}),
    "div4": ({"div_val": 4}, {}),
    "untied": ({"div_val": 2}, {"tied": False}),
    "one cluster": ({"div_val": 2, "cutoffs": ()}, {}),
}


def parts(layout: str, spec: TokenSpec = WORDS) -> tuple[AdaptiveEmbedding, AdaptiveHead]:
    of_embedding, of_head = LAYOUTS[layout]
    config = AdaptiveEmbeddingConfig(**{"kind": "adaptive", "cutoffs": (5, 12), **of_embedding})

    def build() -> nn.ModuleList:
        embedding = config.build(spec, D)
        head = AdaptiveHeadConfig(kind="adaptive", **of_head).build(spec, D, embedding)
        return nn.ModuleList([embedding, head])

    embedding, head = randomised(build, std=0.5)
    assert isinstance(embedding, AdaptiveEmbedding) and isinstance(head, AdaptiveHead)
    return embedding, head


def nll(head: AdaptiveHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, D], targets [N] -> [N]."""
    line = targets[None, :, None]
    return head.nll(hidden[None], Context(targets.new_zeros(1, len(targets), 0), line), line)[0, :, 0]


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
def test_each_loss_stands_in_its_own_place(layout: str) -> None:  # M8
    _, head = parts(layout)
    hidden, targets = torch.randn(4, D), torch.tensor([19, 1, 12, 7])
    together = nll(head, hidden, targets)
    assert together.dtype == torch.float32
    alone = torch.cat([nll(head, hidden[i : i + 1], targets[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone)
    assert together.unique().numel() == 4


@every_layout
def test_log_probabilities_sum_to_one_and_give_the_loss(layout: str) -> None:  # M9
    _, head = parts(layout)
    hidden, targets = torch.randn(1, D), torch.arange(20)
    log_probs = head.log_probs(hidden, targets[None, :0], 0)
    assert log_probs.shape == (1, 20) and log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(1))
    torch.testing.assert_close(-log_probs[0], nll(head, hidden.expand(20, D), targets))


def test_it_is_the_adaptive_softmax_of_pytorch() -> None:
    embedding, head = parts("div2")
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, 20, [5, 12], div_value=2.0, head_bias=True)
    with torch.no_grad():
        first = torch.cat([embedding.tables[0], head.cluster_weight])
        theirs.head.weight.copy_(first @ head.projections["0"].T)
        theirs.head.bias.copy_(torch.cat([head.biases[0], head.cluster_bias]))
        for index, tail in enumerate(theirs.tail, start=1):
            head.biases[index].zero_()  # theirs has none in the tails
            tail[0].weight.copy_(embedding.projections[index].T)
            tail[1].weight.copy_(embedding.tables[index])
    hidden, targets = torch.randn(50, D), torch.randint(20, (50,))
    torch.testing.assert_close(-nll(head, hidden, targets), theirs(hidden, targets).output)


@every_layout
def test_words_become_their_projected_vectors(layout: str) -> None:
    embedding, _ = parts(layout)
    ids = torch.randint(20, (2, 7, 1))
    x = embedding(ids)
    assert x.shape == (2, 7, D)
    for place in ((0, 0), (1, 3), (1, 6)):
        word = int(ids[place])
        cluster = sum(word >= cutoff for cutoff in embedding.config.cutoffs)
        table = 0 if embedding.one_table else cluster
        vector = embedding.tables[table][word - (0 if embedding.one_table else embedding.bounds[cluster])]
        if embedding.projected:
            vector = embedding.projections[table] @ vector
        torch.testing.assert_close(x[place], vector * D**0.5)


@every_layout
def test_ignored_targets_cost_nothing_and_move_nothing(layout: str) -> None:
    _, head = parts(layout)
    hidden = torch.randn(3, D, requires_grad=True)
    nats = nll(head, hidden, torch.tensor([IGNORE, 13, IGNORE]))
    assert nats[0] == nats[2] == 0 and nats[1] > 0
    nats.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[[0, 2]].any() and hidden.grad[1].any()


def test_rare_clusters_are_computed_only_for_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    _, head = parts("div4")
    rows: dict[int, int] = {}
    logits = head.logits

    def counted(hidden: Tensor, cluster: int) -> Tensor:
        rows[cluster] = len(hidden)
        return logits(hidden, cluster)

    monkeypatch.setattr(head, "logits", counted)
    nll(head, torch.randn(6, D), torch.tensor([0, 13, 4, IGNORE, 19, 11]))
    assert rows == {0: 6, 1: 1, 2: 2}


@every_layout
def test_every_parameter_gets_a_gradient_whatever_words_come(layout: str) -> None:
    embedding, head = parts(layout)
    ids = torch.tensor([[1], [2]])
    nll(head, embedding(ids), ids[:, 0]).sum().backward()
    for module in (embedding, head):
        assert all(parameter.grad is not None for parameter in module.parameters())


@every_layout
def test_bfloat16_products_leave_the_loss_in_float32(layout: str) -> None:
    embedding, head = parts(layout)
    ids, targets = torch.randint(20, (6, 1)), torch.tensor([19, 1, IGNORE, 7, 12, 4])
    exact = nll(head, embedding(ids), targets)
    with torch.autocast("cpu", torch.bfloat16):
        near = nll(head, embedding(ids), targets)
    assert near.dtype == torch.float32
    torch.testing.assert_close(near, exact, rtol=0.05, atol=0.1)


@every_layout
def test_sampling_sees_what_training_sees(layout: str) -> None:
    def build() -> SequenceModel:
        embedding, head = parts(layout)
        return SequenceModel(WORDS, embedding=embedding, core=core_config().build(), head=head)

    model = randomised(build)
    line = torch.randint(20, (2, 9, 1))
    expected, _ = run_nll(model, line[:, :-1], line[:, 1:], [4, 4])
    state = model.decode_state(model.initial_state(2))
    for at in range(8):
        hidden = model.step_(line[:, at], state)
        log_probs = model.log_probs(hidden, state, line[:, at, :0])
        torch.testing.assert_close(-log_probs.gather(1, line[:, at + 1]), expected[:, at])


@pytest.mark.parametrize("cutoffs", [(0, 5), (5, 5), (12, 5)])
def test_cutoffs_rise(cutoffs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected rising ids above 0"):
        AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=cutoffs)


def test_parts_that_do_not_fit() -> None:
    config = AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=(5, 20))
    with pytest.raises(ConfigError, match="cutoffs end at 20, expected ids below the vocabulary's size, 20"):
        config.build(WORDS, D)
    with pytest.raises(ConfigError, match="embedding adaptive is for text, got mulaw"):
        config.build(MuLawCodec().spec, D)
    plain = SymbolEmbeddingConfig().build(TEXT, D)
    with pytest.raises(ConfigError, match="head adaptive uses the clusters of embedding adaptive"):
        AdaptiveHeadConfig(kind="adaptive").build(TEXT, D, plain)
    embedding, _ = parts("div2")
    with pytest.raises(ConfigError, match="tie_projs has 4 entries, expected one for each of the 3 clusters"):
        AdaptiveHeadConfig(kind="adaptive", tie_projs=(True,) * 4).build(WORDS, D, embedding)
