"""Adaptive input and softmax: frequent words get wide vectors, rare ones narrow vectors.

Ids are sorted by frequency and cut into clusters. The softmax first chooses among the words of cluster 0
and the other clusters, then among the words of the chosen cluster, which most targets do not need.
Sources: Grave et al. 2017 (arXiv 1609.04309), Baevski and Auli 2019 (arXiv 1809.10853), and the layout of
the Transformer-XL authors' PyTorch code, whose tables and ties these are.

Shapes: B lanes, T frames, N targets, V vocabulary, D model width, C clusters, n_i words and d_i width of
cluster i.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.contracts import Context, Embedding, Head, Waveform
from txl_audio.tokens import IGNORE, ConfigError, TokenSpec


class AdaptiveEmbeddingConfig(Config):
    """Clusters of words that begin at id 0 and at each of `cutoffs`.

    div_val: cluster i has vectors of width d_embed / div_val^i, each cluster with a table and a
    projection of its own. 1 is one table, projected only where `d_embed` is not the model's width.
    """

    kind: Literal["adaptive"]
    cutoffs: tuple[int, ...]
    div_val: int = Field(default=1, ge=1)
    d_embed: int | None = Field(default=None, ge=1)

    @field_validator("cutoffs")
    @classmethod
    def _rising(cls, cutoffs: tuple[int, ...]) -> tuple[int, ...]:
        if any(high <= low for low, high in pairwise((0, *cutoffs))):
            raise ValueError("expected rising ids above 0")
        return cutoffs

    def build(self, spec: TokenSpec, d_model: int, waveform: Waveform | None = None) -> AdaptiveEmbedding:
        if spec.symbols_per_frame != 1 or spec.scores_first:
            raise ConfigError(f"embedding adaptive is for text, got {spec.name} ({spec.modality})")
        if self.cutoffs and self.cutoffs[-1] >= spec.vocab_size:
            raise ConfigError(
                f"embedding.cutoffs end at {self.cutoffs[-1]}, expected ids below the vocabulary's size, "
                f"{spec.vocab_size}"
            )
        return AdaptiveEmbedding(self, vocab_size=spec.vocab_size, d_model=d_model)


class AdaptiveEmbedding(Embedding):
    """Word vectors of every cluster, projected to the model's width, times sqrt(D).

    tables: [n_i, d_i] of every cluster, or one [V, d] where div_val is 1; projections: [D, d_i] of every
    table, or none where the table already has the model's width.
    """

    history = 1

    def __init__(self, config: AdaptiveEmbeddingConfig, *, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.config, self.d_model = config, d_model
        self.bounds = (0, *config.cutoffs, vocab_size)
        self.d_embed = config.d_embed or d_model
        self.one_table = config.div_val == 1
        self.projected = not self.one_table or self.d_embed != d_model
        self.tables = nn.ParameterList(self.new_tables())
        self.projections = nn.ParameterList(
            new_projection(d_model, table.size(1)) for table in self.tables if self.projected
        )

    @property
    def clusters(self) -> int:
        return len(self.bounds) - 1

    def width(self, cluster: int) -> int:
        """d_i, which is 0 where div_val^i is more than d_embed."""
        return self.d_embed // self.config.div_val**cluster

    def new_tables(self) -> list[nn.Parameter]:
        """Fresh tables of these sizes, N(0, .02)."""
        sizes = [high - low for low, high in pairwise(self.bounds)]
        rows = [self.bounds[-1]] if self.one_table else sizes
        return [
            nn.Parameter(torch.empty(n, self.width(index)).normal_(std=0.02)) for index, n in enumerate(rows)
        ]

    def of_cluster(self, tables: nn.ParameterList, cluster: int) -> Tensor:
        """The rows of one cluster, whether it has a table of its own or not."""
        if self.one_table:
            return tables[0][self.bounds[cluster] : self.bounds[cluster + 1]]
        return tables[cluster]

    def table(self, cluster: int) -> Tensor:
        """Vectors of the words of one cluster, [n_i, d_i]."""
        return self.of_cluster(self.tables, cluster)

    def projection(self, cluster: int) -> Tensor | None:
        """[D, d_i], None where vectors have the model's width."""
        return self.projections[0 if self.one_table else cluster] if self.projected else None

    def forward(self, history: Tensor, side: Tensor | None = None) -> Tensor:
        ids = history.flatten()
        if self.one_table:
            x = F.embedding(ids, self.tables[0])
            x = F.linear(x, self.projections[0]) if self.projected else x
        else:
            x = self.tables[0].new_zeros(ids.numel(), self.d_model)
            # A cluster without words takes part with none: every parameter gets a gradient in every step.
            for index, (low, high) in enumerate(pairwise(self.bounds)):
                rows = ((ids >= low) & (ids < high)).nonzero()[:, 0]
                vectors = F.embedding(ids[rows] - low, self.tables[index])
                x = x.index_add(0, rows, F.linear(vectors, self.projections[index]).to(x.dtype))
        return x.view(*history.shape[:-1], self.d_model) * self.d_model**0.5


class AdaptiveHeadConfig(Config):
    """Softmax over the clusters of embedding `adaptive`.

    tied: the tables are the embedding's; tie_projs: which clusters' projections are, too (the authors
    share all but the first for WikiText-103, none for lm1b). Without an entry a cluster has its own.
    """

    kind: Literal["adaptive"]
    tied: bool = True
    tie_projs: tuple[bool, ...] = ()

    def build(
        self, spec: TokenSpec, d_model: int, embedding: Embedding, waveform: Waveform | None = None
    ) -> AdaptiveHead:
        if not isinstance(embedding, AdaptiveEmbedding):
            raise ConfigError("head adaptive uses the clusters of embedding adaptive; set embedding.kind")
        if len(self.tie_projs) > embedding.clusters:
            raise ConfigError(
                f"head.tie_projs has {len(self.tie_projs)} entries, expected one for each of the "
                f"{embedding.clusters} clusters"
            )
        return AdaptiveHead(self, embedding=embedding)


class AdaptiveHead(Head):
    """log p(word) = log p(its cluster's entry in the first softmax) + log p(word in its cluster).

    The first softmax has n_0 + C - 1 entries: the words of cluster 0, then clusters 1, 2, ... in order
    (the authors' code has them in reverse, Hugging Face's as here). Clusters 1, 2, ... are computed only
    for the targets in them.
    """

    def __init__(self, config: AdaptiveHeadConfig, *, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        # In a tuple, which is no submodule: the embedding's parameters are its own.
        self._embedding = (embedding,)
        self.config, self.bounds = config, embedding.bounds
        self.tables = None if config.tied else nn.ParameterList(embedding.new_tables())
        self.biases = nn.ParameterList(torch.zeros(table.size(0)) for table in embedding.tables)
        shared = config.tie_projs + (False,) * embedding.clusters
        self.projections = nn.ParameterDict(
            {
                str(index): new_projection(embedding.d_model, embedding.width(index))
                for index in range(embedding.clusters)
                if embedding.projected and not shared[index]
            }
        )
        self.cluster_weight = nn.Parameter(
            torch.empty(embedding.clusters - 1, embedding.d_embed).normal_(std=0.02)
        )
        self.cluster_bias = nn.Parameter(torch.zeros(embedding.clusters - 1))
        self.cutoffs: Tensor
        self.register_buffer("cutoffs", torch.tensor(self.bounds[1:-1], dtype=torch.int64), persistent=False)

    def table(self, cluster: int) -> Tensor:
        """Vectors of the words of one cluster, [n_i, d_i]."""
        return self._embedding[0].of_cluster(self.tables or self._embedding[0].tables, cluster)

    def projection(self, cluster: int) -> Tensor | None:
        """[D, d_i], None where vectors have the model's width."""
        own = str(cluster) in self.projections
        return self.projections[str(cluster)] if own else self._embedding[0].projection(cluster)

    def logits(self, hidden: Tensor, cluster: int) -> Tensor:
        """hidden [N, D] -> scores of the words of one cluster, float32 [N, n_i]; for cluster 0 those of
        the clusters after it come last, [N, n_0 + C - 1]."""
        projection = self.projection(cluster)
        if projection is not None:
            hidden = hidden @ projection
        weight, bias = self.table(cluster), self._embedding[0].of_cluster(self.biases, cluster)
        if cluster == 0:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return F.linear(hidden, weight).float() + bias

    def nll(self, hidden: Tensor, context: Context, targets: Tensor) -> Tensor:
        flat, line = hidden.flatten(0, -2), targets.flatten()
        # IGNORE lies below every bound, so it falls into cluster 0 and stays what it is.
        cluster = torch.bucketize(line, self.cutoffs, right=True)
        entry = torch.where(cluster == 0, line, self.bounds[1] - 1 + cluster)
        nats = F.cross_entropy(self.logits(flat, 0), entry, ignore_index=IGNORE, reduction="none")
        for index in range(1, len(self.bounds) - 1):
            rows = (cluster == index).nonzero()[:, 0]
            words = line[rows] - self.bounds[index]
            inside = F.cross_entropy(self.logits(flat[rows], index), words, reduction="none")
            nats = nats.index_add(0, rows, inside)
        return nats.view_as(targets)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int, side: Tensor | None = None) -> Tensor:
        first = self.logits(hidden, 0).log_softmax(-1)
        words = self.bounds[1]
        parts = [first[:, :words]]
        for index in range(1, len(self.bounds) - 1):
            entry = words - 1 + index
            parts.append(first[:, entry, None] + self.logits(hidden, index).log_softmax(-1))
        return torch.cat(parts, dim=1)


def new_projection(d_model: int, d_embed: int) -> nn.Parameter:
    """[D, d], N(0, .01)."""
    return nn.Parameter(torch.empty(d_model, d_embed).normal_(std=0.01))
