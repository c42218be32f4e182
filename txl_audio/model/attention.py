"""Attention over memory and segment: one readable reference, three fast paths of the same signature.

With query i of T and key j of K (the last T keys are the segment itself), distance
d = i + (K - T) - j, and `seen` says which keys each query sees, never one with d < 0:

    score = [ (q_i + u)·k_j + (q_i + v)·r_d + b_d ] / sqrt(head width)

Shapes: H heads first, because position keys are shared by all lanes of a head:
q [H, B, T, d], k and v [H, B, K, d], seen [B, T, K] bool (B may be 1), result [H, B, T, d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_audio.model.positions import Terms
from txl_audio.model.shifted import shifted_attention, shifted_view

Backend = Literal["auto", "reference", "shifted", "biased", "shift_free"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None, seen: Tensor, *, dropout: float, backend: Backend
) -> Tensor:
    """Attention by the chosen path; all compute the same, `auto` picks by device and purpose."""
    if backend == "auto":
        # Without gradients the fused kernel is twice as fast on a CPU as products and a softmax. The
        # shift-free form makes heads wider by d_model, many times the arithmetic of large models.
        scoring = q.device.type == "cpu" and not torch.is_grad_enabled()
        backend = "biased" if scoring else "shifted"
    path: Callable[..., Tensor] = {
        "reference": reference_attention,
        "shifted": shifted_attention,
        "biased": biased_attention,
        "shift_free": shift_free_attention,
    }[backend]
    return path(q, k, v, terms, seen, dropout=dropout)


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """d [T, K]: how far key j lies behind query i; negative in the future."""
    i = torch.arange(keys - queries, keys, device=device)
    return i[:, None] - torch.arange(keys, device=device)[None, :]


def visible(limit: Tensor, keys: int) -> Tensor:
    """`seen` [B, T, K]: keys at distance 0 up to limit [B, T] int64 of each query."""
    d = distances(limit.size(1), keys, limit.device)
    return (d >= 0) & (d <= limit[:, :, None])


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None, seen: Tensor, *, dropout: float
) -> Tensor:
    """The definition, term by term. Softmax in float32."""
    queries, keys = q.size(2), k.size(2)
    content_query = q if terms is None else q + terms.u[:, None, None]
    score = torch.einsum("hbtd,hbkd->hbtk", content_query, k)
    if terms is not None:
        position_query = q if terms.v is None else q + terms.v[:, None, None]
        by_distance = torch.einsum("hbtd,hnd->hbtn", position_query, terms.r)
        if terms.b is not None:
            by_distance = by_distance + terms.b[:, None, None]
        d = distances(queries, keys, q.device).clamp(min=0)
        score = score + by_distance.gather(-1, d.expand(*score.shape[:2], -1, -1))
    score = score.float() / q.size(-1) ** 0.5
    score = score.masked_fill(~seen, float("-inf"))
    weight = F.dropout(score.softmax(-1), dropout).to(v.dtype)
    return torch.einsum("hbtk,hbkd->hbtd", weight, v)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None, seen: Tensor, *, dropout: float
) -> Tensor:
    """The position scores as the additive mask of `scaled_dot_product_attention`.

    The kernel reads them by key where they lie by distance, and no other T x K matrix is written. What a
    query does not see lies together at the beginning of its row: what is out of its window, and spare
    entries, of which there is at least one, so that they alone stand for the future of the row above.
    """
    kind, scale = q.device.type, q.size(-1) ** -0.5
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    heads, lanes, queries, keys = *q.shape[:3], k.size(2)
    mask, content_query = seen[:, None], q
    if terms is None:
        # Where all before is seen, as without memory, the kernel can leave out the other half.
        if queries == keys and int(seen.sum()) == len(seen) * queries * (queries + 1) // 2:
            mask = None
    else:
        content_query = q + terms.u[:, None, None]
        position_query = (q if terms.v is None else q + terms.v[:, None, None]) * scale
        r = terms.ordered().far_first if terms.far_first is None else terms.far_first
        assert r is not None
        by_distance = torch.bmm(position_query.to(dtype).flatten(1, 2), r.to(dtype).mT)
        by_distance = by_distance.view(heads, lanes, queries, -1)
        spare = by_distance.size(-1) - keys
        if terms.b is not None:
            by_distance[..., spare:] += (terms.b * scale).to(dtype).flip(1)[:, None, None]
        hidden = (~seen).sum(-1, dtype=torch.int32) + spare
        first = torch.arange(int(hidden.max()), device=q.device)
        by_distance[..., : len(first)].masked_fill_(first < hidden[..., None], float("-inf"))
        mask = shifted_view(by_distance, keys).transpose(0, 1)
    # scaled_dot_product_attention wants lanes first.
    content_query, k, v = (x.transpose(0, 1).to(dtype) for x in (content_query, k, v))
    out = F.scaled_dot_product_attention(content_query, k, v, mask, dropout_p=dropout, is_causal=mask is None)
    return out.transpose(0, 1)


def can_be_shift_free(terms: Terms | None) -> bool:
    """Whether the shift-free form is exact: the paper's encoding, not clamped, not dropped out."""
    return terms is None or terms.projection is not None


def shift_free_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None, seen: Tensor, *, dropout: float
) -> Tensor:
    """The same score as one dot product, for `scaled_dot_product_attention`.

    By angle addition, with a = W_kR^T (q_i + v) split into its sine part s and cosine part c,

        (q_i + v)·W_kR R_{i-j} = [s sin wi + c cos wi]·cos wj + [c sin wi - s cos wi]·sin wj

    so [q_i + u ; the brackets]·[k_j ; cos wj ; sin wj] is the score: no T x K matrix of positions.
    Falls back to the shifted form where `can_be_shift_free` is false.
    """
    if not can_be_shift_free(terms):
        return shifted_attention(q, k, v, terms, seen, dropout=dropout)
    queries, keys, width = q.size(2), k.size(2), q.size(-1)
    if terms is not None:
        assert terms.projection is not None and terms.frequencies is not None and terms.v is not None
        a = torch.einsum("hbtd,hdm->hbtm", q + terms.v[:, None, None], terms.projection)
        s, c = a.chunk(2, dim=-1)
        # Positions are counted from the segment's start: small angles keep float32 exact.
        angle = torch.arange(queries - keys, queries, device=q.device)[:, None] * terms.frequencies
        sine, cosine = angle.sin().to(a.dtype), angle.cos().to(a.dtype)
        sine_i, cosine_i = sine[-queries:], cosine[-queries:]
        position = torch.cat([s * sine_i + c * cosine_i, c * sine_i - s * cosine_i], dim=-1)
        turned = torch.cat([cosine, sine], dim=-1).expand(*k.shape[:2], -1, -1)
        q = torch.cat([q + terms.u[:, None, None], position], dim=-1)
        k = torch.cat([k, turned.to(k.dtype)], dim=-1)
    dtype = torch.promote_types(k.dtype, v.dtype)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    # scaled_dot_product_attention wants lanes first, and one width for all three on its fused path.
    q, k, v = (x.transpose(0, 1).to(dtype) for x in (q, k, F.pad(v, (0, q.size(-1) - width))))
    out = F.scaled_dot_product_attention(q, k, v, seen[:, None], dropout_p=dropout, scale=width**-0.5)
    return out[..., :width].transpose(0, 1)
