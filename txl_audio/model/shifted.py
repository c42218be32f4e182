"""Attention with the paper's shift (appendix B) as a zero-copy view and a hand-written gradient.

Shapes as in `attention`: H heads, B lanes, T queries, K keys, d head width; of a part of them h heads, t
queries and the n keys up to the last of these queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_audio.model.positions import Terms, aligned

WHOLE = {"cpu": 2**24, "cuda": 2**28}
"""Entries of the T x K matrices of all heads and lanes from which they are made in parts, and ..."""
PART = {"cpu": 2**22, "cuda": 2**26}
"""... about the entries of a part's: what a core's cache holds, and what keeps a GPU busy."""
FEWEST_QUERIES = 64


def shifted_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None, seen: Tensor, *, dropout: float
) -> Tensor:
    """Attention, see `attention.attend`.

    Position scores are computed once per distance; reading the buffer with a row stride one shorter
    than its rows lines them up with the keys. Under autocast everything runs in its dtype, with the sums
    inside softmax in float32. Where T x K matrices would be large, they are made in parts, a head and some
    queries at a time, and made again for the gradient: none is kept, except for what dropout drops.
    """
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    # Scaling the queries is cheaper than scaling the scores.
    q, scale = q.to(dtype), q.size(-1) ** -0.5
    content_query, position_query, r, bias = q * scale, None, None, None
    if terms is not None:
        content_query = (q + terms.u[:, None, None].to(dtype)) * scale
        position_query = (q if terms.v is None else q + terms.v[:, None, None].to(dtype)) * scale
        # Ordered from the farthest to distance 0, so that the shifted rows run along the keys.
        r = terms.r.to(dtype).flip(1)
        bias = None if terms.b is None else (terms.b * scale).to(dtype).flip(1)
    with torch.autocast(kind, enabled=False):
        return _Shifted.apply(  # pyright: ignore[reportUnknownMemberType, reportReturnType]
            content_query, position_query, k.to(dtype), v.to(dtype), r, bias, seen, dropout
        )


class _Shifted(torch.autograd.Function):
    """softmax(content_query k^T + shift(position_query r^T + bias), where seen) v, the queries scaled."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        tensors, ctx.dropout = given[:-1], given[-1]
        weights: list[Tensor] = []
        dropped: list[Tensor] = []
        out = torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
        ctx.parts = list(_parts(*tensors[:3]))
        mask = None
        for heads, queries in ctx.parts:
            part = _part(heads, queries, mask, *tensors)
            mask, weight = part.mask, _weights(part)
            kept = weight
            if ctx.dropout > 0:
                kept, stays = torch.native_dropout(weight, ctx.dropout, True)
                dropped.append(stays)
            if len(ctx.parts) == 1:
                weights.append(weight)
            place = out[heads, :, queries]
            place.copy_(torch.bmm(kept, part.v).view_as(place))
            del weight, kept
        ctx.kept = len(weights)
        ctx.save_for_backward(*tensors, *weights, *dropped)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # once: activation checkpointing computes them for this
        tensors, rest = saved[:7], saved[7:]
        weights, dropped = rest[: ctx.kept], rest[ctx.kept :]
        content_query, position_query, k, _, r, bias, _ = tensors
        sums: list[Tensor] = []
        mask = None
        for number, (heads, queries) in enumerate(ctx.parts):
            part = _part(heads, queries, mask, *tensors)
            mask = part.mask
            grad = grads[0][heads, :, queries].reshape(part.content.shape)
            stays = dropped[number] if dropped else None
            # Without a name here the weights are gone when they are used up.
            of_part = _gradients(part, weights[0] if weights else _weights(part), stays, ctx.dropout, grad)
            if len(ctx.parts) == 1:
                sums = of_part
                break
            if not sums:  # the keys' in float32, to which several parts add
                own = [content_query, position_query, k, k, r, bias]
                sums = [
                    torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in own if t is not None
                ]
            by_key, by_distance = slice(part.k.size(1)), slice(-part.k.size(1), None)
            of_queries = (heads, slice(None), queries)
            places = [of_queries] * (1 if r is None else 2) + [(heads, slice(None), by_key)] * 2
            places += [(heads, by_distance)] * 2
            for total, value, place in zip(sums, of_part, places, strict=False):
                total[place] += value.float().view_as(total[place])
        content, *rest = (t.to(k.dtype) for t in sums)
        position = None if r is None else rest.pop(0).view_as(content_query)
        grad_k, grad_v, *rest = rest
        grad_r, grad_bias = [*rest, None, None][:2]
        return (
            content.view_as(content_query),
            position,
            grad_k.view_as(k),
            grad_v.view_as(k),
            grad_r,
            grad_bias,
            None,
            None,
        )


class _Part(NamedTuple):
    """Some heads and queries as products take them.

    content [h B, t, d], position [h, B t, d], k, v [h B, n, d], r [h, n, d], bias [h, n],
    mask [B or 1, t, n].
    """

    content: Tensor
    position: Tensor | None
    k: Tensor
    v: Tensor
    r: Tensor | None
    bias: Tensor | None
    mask: Tensor


def _parts(content_query: Tensor, _: Tensor | None, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Which heads and which queries are taken together."""
    heads, lanes, queries, keys = *content_query.shape[:3], k.size(2)
    kind = k.device.type
    if heads * lanes * queries * keys <= WHOLE.get(kind, WHOLE["cpu"]):
        yield slice(heads), slice(0, queries)
        return
    count = -(-lanes * queries * keys // PART.get(kind, PART["cpu"]))
    length = min(queries, max(FEWEST_QUERIES, aligned(-(-queries // count))))
    for begin in range(0, queries, length):
        for head in range(heads):
            yield slice(head, head + 1), slice(begin, min(queries, begin + length))


def _part(
    heads: slice,
    block: slice,
    mask: Tensor | None,
    content_query: Tensor,
    position_query: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor | None,
    bias: Tensor | None,
    seen: Tensor,
) -> _Part:
    """The part, with the keys up to its last query: it is to them as all queries are to all keys.

    mask: of the part before, which serves all heads of the same queries.
    """
    queries, width = content_query.shape[2:]
    keys = k.size(2) - queries + block.stop
    content = content_query[heads, :, block].reshape(-1, block.stop - block.start, width)
    own_k, own_v = (x[heads, :, :keys].reshape(-1, keys, width) for x in (k, v))
    position = own_r = own_bias = None
    if position_query is not None and r is not None:
        own_r = r[heads, -keys:]
        position = position_query[heads, :, block].reshape(own_r.size(0), -1, width)
        own_bias = None if bias is None else bias[heads, -keys:]
    own = seen[:, block, :keys]
    if mask is None or heads.start == 0:
        mask = torch.zeros(own.shape, dtype=k.dtype, device=k.device).masked_fill_(~own, float("-inf"))
    return _Part(content, position, own_k, own_v, own_r, own_bias, mask)


def _weights(part: _Part) -> Tensor:
    """[h B, t, n]."""
    mask, queries, keys = part.mask, *part.mask.shape[1:]
    score = torch.empty(len(part.content), queries, keys, dtype=part.k.dtype, device=part.k.device)
    if part.position is None or part.r is None:
        score.view(-1, *mask.shape).copy_(mask.expand(len(score) // len(mask), -1, -1, -1))
    else:
        by_head = score.view(len(part.r), -1, queries, keys)
        by_distance = torch.bmm(part.position, part.r.mT)
        if part.bias is not None:
            by_distance += part.bias[:, None]
        torch.add(mask, shifted_view(by_distance.view_as(by_head), keys), out=by_head)
        del by_distance
    score.baddbmm_(part.content, part.k.mT)
    return torch.softmax(score, -1)


def _gradients(
    part: _Part, weight: Tensor, stays: Tensor | None, dropout: float, grad: Tensor
) -> list[Tensor]:
    """Of content, position, k, v, r and bias, those that there are, from grad [h B, t, d]."""

    def dropped(x: Tensor) -> Tensor:
        return x if stays is None else x * stays / (1 - dropout)

    grad_v = torch.bmm(dropped(weight).mT, grad)
    grad_weight = dropped(torch.bmm(grad, part.v.mT))
    grad_score = grad_weight  # in whose place it is written
    torch.ops.aten._softmax_backward_data.out(grad_weight, weight, -1, weight.dtype, grad_input=grad_score)
    del weight, grad_weight
    grad_content = torch.bmm(grad_score, part.k)
    grad_k = torch.bmm(grad_score.mT, part.content)
    if part.position is None or part.r is None:
        return [grad_content, grad_k, grad_v]
    heads, keys = part.r.shape[:2]
    by_distance = unshift(grad_score.view(heads, -1, *grad_score.shape[1:])).view(heads, -1, keys)
    del grad_score
    grad_position = torch.bmm(by_distance, part.r)
    grad_r = torch.bmm(by_distance.mT, part.position)
    of_bias = [] if part.bias is None else [by_distance.sum(1)]
    return [grad_content, grad_position, grad_k, grad_v, grad_r, *of_bias]


def shifted_view(by_distance: Tensor, keys: int) -> Tensor:
    """[H, B, T, W] by distance W-1..0, W >= K -> [H, B, T, K], the same memory by key; the future is garbage.

    Entry (i, j) of the view is element j + W-K + T-1-i of row i: the score of distance i + K-T - j.
    Entries of the future (d < 0) run into the next row and must be masked.
    """
    heads, lanes, queries, row = by_distance.shape
    size = queries * row
    return by_distance.as_strided(
        (heads, lanes, queries, keys),
        (lanes * size, size, row - 1, 1),
        by_distance.storage_offset() + row - keys + queries - 1,
    )


def unshift(by_key: Tensor) -> Tensor:
    """The transpose of `shifted_view` for gradients, which are zero in the future."""
    heads, lanes, queries, keys = by_key.shape
    out = by_key.new_empty(heads, lanes, queries * keys)
    out[..., : queries - 1] = 0
    # All keys but the last lie one behind another; of the last only the final query sees it.
    out[..., queries - 1 : -1].view(heads, lanes, queries, keys - 1).copy_(by_key[..., :-1])
    out[..., -1] = by_key[..., -1, -1]
    return out.view_as(by_key)
