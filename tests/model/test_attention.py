"""The four attention paths compute one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import BACKENDS, core
from txl_audio.model import attention, shifted
from txl_audio.model.attention import Backend, attend, visible
from txl_audio.model.positions import Positions, RelativeConfig, Shape, ShawConfig, Terms

H, B, T, M, D = 2, 3, 5, 4, 6  # heads, lanes, queries, memory, head width
K = M + T
PATHS: tuple[Backend, ...] = ("shifted", "biased", "shift_free")

SCHEMES = ("none", "relative", "clamped", "shaw")


def make_scheme(name: str) -> Positions | None:
    """A scheme of one layer with random parameters."""
    shape = Shape(n_layer=1, d_model=8, n_head=H, d_head=D)
    if name == "none":
        return None
    if name == "shaw":
        scheme: Positions = ShawConfig(kind="shaw", max_distance=6).build(shape, dropout=0.0)
    else:
        scheme = RelativeConfig(clamp_len=3 if name == "clamped" else None).build(shape, dropout=0.0)
    for parameter in scheme.parameters():
        torch.nn.init.normal_(parameter)
    return scheme


def terms_of(scheme: Positions | None, keys: int = K) -> Terms | None:
    return None if scheme is None else scheme.terms(0, keys, scheme.table(keys, torch.device("cpu")))


def make_terms(name: str, keys: int = K) -> Terms | None:
    return terms_of(make_scheme(name), keys)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(H, B, T, D), torch.randn(H, B, K, D), torch.randn(H, B, K, D)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def view(kind: str) -> Tensor:
    """`seen` [1 or B, T, K]: everything before, only itself, or a random number of keys."""
    limit = {
        "all": (torch.arange(T) + M)[None],
        "self": torch.zeros(1, T, dtype=torch.int64),
        "ragged": torch.randint(0, K, (B, T)),
    }[kind]
    return visible(limit, K)


@pytest.mark.parametrize("kind", ["all", "self", "ragged"])
@pytest.mark.parametrize("scheme_name", SCHEMES)
@pytest.mark.parametrize("path", PATHS)
def test_paths_agree_with_their_gradients(path: Backend, scheme_name: str, kind: str) -> None:
    scheme, leaves, seen = make_scheme(scheme_name), inputs(), view(kind)
    wanted = [*leaves, *(scheme.parameters() if scheme else ())]
    weight = torch.randn(H, B, T, D)
    results = []
    for backend in ("reference", path):
        out = attend(*leaves, terms_of(scheme), seen, dropout=0.0, backend=backend)
        results.append((out, *torch.autograd.grad((out * weight).sum(), wanted)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shifted path takes a head and two queries at a time, of 5, and keeps no weights."""
    monkeypatch.setattr(shifted, "WHOLE", {"cpu": 0})
    monkeypatch.setattr(shifted, "PART", {"cpu": 1})
    monkeypatch.setattr(shifted, "FEWEST_QUERIES", 2)
    monkeypatch.setattr(shifted, "aligned", lambda queries: queries)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", ["all", "self", "ragged"])
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_blocks_of_queries_give_the_same(scheme_name: str, kind: str) -> None:
    test_paths_agree_with_their_gradients("shifted", scheme_name, kind)


@pytest.mark.usefixtures("blocks")
def test_blocks_of_queries_give_the_same_in_bfloat16() -> None:
    test_paths_agree_in_bfloat16("shifted")
    test_gradients_agree_in_bfloat16("shifted")


@pytest.mark.usefixtures("blocks")
def test_blocks_of_queries_drop_the_same_weights_in_the_gradient() -> None:
    test_gradients_of_dropout_match_its_mask("shifted")
    test_dropout_keeps_the_mean_and_follows_the_seed("shifted")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_finite_differences(backend: Backend) -> None:
    terms = make_terms("shaw")
    assert terms is not None
    doubles = [t.detach().double().requires_grad_() for t in (*inputs(), terms.u, terms.r, terms.b)]
    seen = view("ragged")

    def score(q: Tensor, k: Tensor, v: Tensor, u: Tensor, r: Tensor, b: Tensor) -> Tensor:
        return attend(q, k, v, Terms(u, None, r, b), seen, dropout=0.0, backend=backend)

    # The definition takes its softmax in float32, which finite differences of 1e-6 cannot see.
    eps, atol = (1e-3, 1e-2) if backend == "reference" else (1e-6, 1e-5)
    assert torch.autograd.gradcheck(score, doubles, eps=eps, atol=atol, fast_mode=True)


@pytest.mark.parametrize("path", PATHS)
def test_paths_agree_in_bfloat16(path: Backend) -> None:
    terms, (q, k, v), seen = make_terms("relative"), inputs(), view("ragged")
    expected = attend(q, k, v, terms, seen, dropout=0.0, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v, terms, seen, dropout=0.0, backend=path)
    assert got.dtype == torch.bfloat16
    error = (got.float() - expected).abs()
    assert error.mean() < 0.02 and error.max() < 0.3


@pytest.mark.parametrize("path", PATHS)
def test_gradients_agree_in_bfloat16(path: Backend) -> None:
    """What the fast path is for: its gradients are the reference's to bfloat16's precision."""
    scheme, leaves, seen = make_scheme("relative"), inputs(), view("ragged")
    assert scheme is not None
    wanted, weight, results = [*leaves, *scheme.parameters()], torch.randn(H, B, T, D), []
    for backend, on in (("reference", False), (path, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out = attend(*leaves, terms_of(scheme), seen, dropout=0.0, backend=backend)
        results.append(torch.autograd.grad((out.float() * weight).sum(), wanted))
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("queries", "memory"), [(1, 0), (1, 3), (4, 0), (2, 1)])
def test_small_sizes(backend: Backend, queries: int, memory: int) -> None:
    """One query, no memory: where a view over rows has its edges."""
    keys = memory + queries
    q, k, v = torch.randn(H, B, queries, D), torch.randn(H, B, keys, D), torch.randn(H, B, keys, D)
    terms, seen = make_terms("relative", keys), visible((torch.arange(queries) + memory)[None], keys)
    expected = attend(q, k, v, terms, seen, dropout=0.0, backend="reference")
    out = attend(q, k, v, terms, seen, dropout=0.0, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_definition_by_hand() -> None:
    """Equation of appendix B, number by number."""
    terms, (q, k, v), seen = make_terms("relative"), inputs(), view("ragged")
    assert terms is not None and terms.v is not None
    out = attend(q, k, v, terms, seen, dropout=0.0, backend="reference")
    for h, b, i in [(0, 0, 0), (1, 2, 3), (0, 1, T - 1)]:
        position = M + i
        keys = seen[b, i].nonzero().flatten().tolist()
        score = torch.stack(
            [
                (
                    (q[h, b, i] + terms.u[h]) @ k[h, b, j]
                    + (q[h, b, i] + terms.v[h]) @ terms.r[h, position - j]
                )
                / D**0.5
                for j in keys
            ]
        )
        expected = score.softmax(0) @ v[h, b, keys]
        torch.testing.assert_close(out[h, b, i], expected, rtol=1e-5, atol=1e-5)


def test_m3_garbage_above_the_diagonal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terms, (q, k, v), seen = make_terms("relative"), inputs(), view("all")
    expected = attend(q, k, v, terms, seen, dropout=0.0, backend="shifted")
    future = attention.distances(T, K, torch.device("cpu")) < 0
    honest = shifted.shifted_view
    called = []

    def with_garbage(by_distance: Tensor, keys: int) -> Tensor:
        called.append(True)
        return honest(by_distance, keys).masked_fill(future, 1e4)

    monkeypatch.setattr(shifted, "shifted_view", with_garbage)
    assert torch.equal(attend(q, k, v, terms, seen, dropout=0.0, backend="shifted"), expected)
    assert called


def test_the_shifted_view_reads_the_score_of_each_distance() -> None:
    by_distance = torch.arange(K - 1, -1, -1.0).expand(H, B, T, K).contiguous()
    by_key = shifted.shifted_view(by_distance, K)
    d = attention.distances(T, K, torch.device("cpu"))
    assert by_key.data_ptr() == by_distance.data_ptr() + (T - 1) * by_distance.element_size()
    for h in range(H):
        for b in range(B):
            assert torch.equal(by_key[h, b][d >= 0], d[d >= 0].float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_m10_clamped_distances_share_an_encoding_but_are_attended_to(backend: Backend) -> None:
    shape = Shape(n_layer=1, d_model=8, n_head=1, d_head=D)
    scheme = RelativeConfig(clamp_len=4).build(shape, dropout=0.0)
    torch.nn.init.normal_(scheme.keys[0].weight)
    terms = terms_of(scheme, 10)
    q, k = torch.randn(1, 1, 1, D), torch.randn(1, 1, 10, D)
    k[:, :, 9 - 5] = k[:, :, 9 - 9]
    # One-hot values make the output the attention weights themselves.
    v = torch.eye(10)[None, None, :, :]
    seen = torch.ones(1, 1, 10, dtype=torch.bool)
    weights = []
    for columns in v.split(D, dim=-1):
        padded = torch.nn.functional.pad(columns, (0, D - columns.size(-1)))
        weights.append(attend(q, k, padded, terms, seen, dropout=0.0, backend=backend))
    weight = torch.cat(weights, dim=-1)[0, 0, 0, :10]
    torch.testing.assert_close(weight.sum(), torch.tensor(1.0))
    torch.testing.assert_close(weight[9 - 5], weight[9 - 9])
    value = torch.randn(1, 1, 10, D)
    before = attend(q, k, value, terms, seen, dropout=0.0, backend=backend)
    k[:, :, 9 - 9] += 1.0
    assert not torch.allclose(attend(q, k, value, terms, seen, dropout=0.0, backend=backend), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_mean_and_follows_the_seed(backend: Backend) -> None:
    terms, (q, k, v), seen = make_terms("relative"), inputs(), view("all")

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attend(q, k, v, terms, seen, dropout=0.25, backend=backend).detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    runs = torch.stack([run(seed) for seed in range(400)])
    expected = attend(q, k, v, terms, seen, dropout=0.0, backend=backend)
    z = (runs.mean(0) - expected) / (runs.std(0) / 400**0.5)
    # The standardised error of every output is about N(0, 1).
    assert z.abs().max() < 5 and 0.8 < z.std() < 1.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_dropout_match_its_mask(backend: Backend) -> None:
    """With the same seed the output is a fixed function; its slope along a direction is its gradient."""
    terms, (q, k, v), seen = make_terms("shaw"), inputs(), view("all")
    step = torch.randn_like(q)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(x, k, v, terms, seen, dropout=0.4, backend=backend).square().sum()

    (gradient,) = torch.autograd.grad(run(q), q)
    eps = 1e-2
    slope = (run(q + eps * step) - run(q - eps * step)) / (2 * eps)
    torch.testing.assert_close((gradient * step).sum(), slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["auto", "reference", "shifted"])
def test_a_key_out_of_sight_may_hold_anything_finite(backend: Backend) -> None:
    terms, (q, k, v), seen = make_terms("relative"), inputs(), view("self")
    out = attend(q, k, v, terms, seen, dropout=0.0, backend=backend)
    k, v = k.detach().clone(), v.detach().clone()
    k[:, :, :M], v[:, :, :M] = 1e4, 1e4
    assert torch.equal(attend(q, k, v, terms, seen, dropout=0.0, backend=backend), out)


def test_auto_takes_the_fused_kernel_for_scoring_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def watched(*given: Any, **named: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return fused(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model, x = core(n_layer=2), torch.randn(1, 4, 12)
    model(x, model.first_memory(1))[0].sum().backward()
    with torch.no_grad():
        model(x, model.first_memory(1))
    assert calls == [False, False]
