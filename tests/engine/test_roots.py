"""Norms by a triangular root are those of float64, one sample at a time, and never below them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pmlf.engine import strategy
from pmlf.engine.factors import Outer
from pmlf.engine.norms import factored_norms
from pmlf.engine.roots import Roots, rooted_norms


def outer(left: Tensor, right: Tensor) -> Outer:
    samples, tokens, rows = left.shape
    return Outer(samples=samples, tokens=tokens, rows=rows, cols=right.shape[2], left=left, right=right)


def exact_norms(uses: Sequence[Outer]) -> list[float]:
    return [
        float(sum(use.left[i].double().mT @ use.right[i].double() for use in uses).square().sum())  # type: ignore[union-attr]
        for i in range(uses[0].samples)
    ]


def random_uses(rows: int, cols: int, tokens: Sequence[int], samples: int = 5) -> list[Outer]:
    return [outer(torch.randn(samples, t, rows), torch.randn(samples, t, cols)) for t in tokens]


@pytest.mark.parametrize(("rows", "cols"), [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("tokens", [(7,), (7, 7), (3, 9, 5)])
def test_norms_are_those_of_float64_and_never_below(rows: int, cols: int, tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    uses = random_uses(rows, cols, tokens)
    found, spread = rooted_norms(uses, Roots())
    for value, exact in zip(found.tolist(), exact_norms(uses), strict=True):
        assert exact <= value <= exact * (1 + 1e-4)
    for i, value in enumerate(spread.tolist()):
        lengths = sum(float((u.left[i].norm(dim=1) * u.right[i].norm(dim=1)).sum()) for u in uses)
        assert value == pytest.approx(lengths, rel=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_norms_of_cancelling_tokens_are_not_understated(size: float) -> None:
    """Two tokens with the same input and opposite gradients leave `rest`, far below either."""
    torch.manual_seed(0)
    for rest in (0.0, 1e-6, 1e-4, 1e-2):
        left, right = size * torch.randn(4, 6, 40), torch.randn(4, 6, 24)
        left[:, 3:], right[:, 3:] = -left[:, :3] + rest, right[:, :3]
        uses = [outer(left, right)]
        found, spread = rooted_norms(uses, Roots())
        for value, exact, whole in zip(found.tolist(), exact_norms(uses), spread.tolist(), strict=True):
            assert exact <= value
            assert math.sqrt(value) <= math.sqrt(exact) + 1e-6 * whole


@pytest.mark.parametrize("tokens", [2, 30])
def test_tokens_that_depend_on_each_other_or_are_nothing_have_a_root(tokens: int) -> None:
    """More tokens than features, equal ones, padding of zeros, a sample of zeros."""
    torch.manual_seed(0)
    left, right = torch.randn(4, tokens, 12), torch.randn(4, tokens, 3)
    right[0] = right[0, :1]
    right[1, tokens // 2 :] = 0.0
    right[2] = 0.0
    found = rooted_norms([outer(left, right)], Roots())[0].tolist()
    exact = exact_norms([outer(left, right)])
    assert found == pytest.approx(exact, rel=1e-4, abs=1e-30)
    assert all(a >= b for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sample_that_is_not_finite_is_alone_in_it(bad: float, side: str) -> None:
    torch.manual_seed(0)
    uses = random_uses(12, 8, (5, 5))
    expected = rooted_norms(uses, Roots())[0]
    getattr(uses[1], side)[0, 2, 3] = bad
    found, _ = rooted_norms(uses, Roots())
    assert not math.isfinite(float(found[0]))
    assert torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize(("narrow", "wide"), [(1e-42, 1e38), (1e-30, 1e-30), (1e18, 1e18), (1e-20, 1e30)])
def test_norms_hold_at_the_ends_of_float32(narrow: float, wide: float) -> None:
    torch.manual_seed(0)
    uses = [outer(wide * torch.rand(3, 4, 9), narrow * torch.rand(3, 4, 5))]
    uses[0].right[1, 0] = 1.0  # a long token without a gradient must not hide the others
    uses[0].left[1, 0] = 0.0
    for value, exact in zip(rooted_norms(uses, Roots())[0].tolist(), exact_norms(uses), strict=True):
        assert exact <= value
        assert math.sqrt(value) <= math.sqrt(exact) * (1 + 1e-4) + 1e-30 + 1e-36 * wide


def test_layers_with_the_same_input_share_its_root_and_others_do_not() -> None:
    torch.manual_seed(0)
    query, key = random_uses(24, 24, (6, 6))
    key = outer(key.left, query.right)
    roots = Roots()
    rooted_norms([query], roots)
    kept = roots.of([query.right])
    assert roots.of([key.right]) is kept
    assert torch.equal(rooted_norms([key], roots)[0], rooted_norms([key], Roots())[0])
    query.right.add_(1.0)  # the same memory, another input
    assert roots.of([query.right]) is not kept
    assert rooted_norms([key], roots)[0].tolist() == pytest.approx(exact_norms([key]), rel=1e-4)


def test_a_root_is_the_way_for_long_layers_and_not_for_small_ones() -> None:
    def way(rows: int, cols: int, tokens: int, points: int) -> str:
        meta = [torch.empty(2, tokens, size) for size in (rows, cols)]
        return strategy.way_to_norms([outer(*meta)] * points)

    assert way(3072, 768, 64, 1) == way(768, 3072, 64, 2) == "root"
    assert way(256, 256, 1, 2) == "gram"  # a multilayer perceptron at two points
    assert way(24, 24, 512, 1) == "dropped"


def test_a_root_needs_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = random_uses(24, 24, (6,))
    monkeypatch.setattr(strategy, "wide_dtype", lambda tensor: torch.float32)  # as on MPS
    assert strategy.root_cost(uses) == math.inf


def test_the_way_by_a_root_has_the_slack_of_the_others() -> None:
    torch.manual_seed(0)
    uses = random_uses(24, 40, (6, 6))
    found = {way: factored_norms(uses, Roots(), way) for way in ("gram", "root", "dropped")}
    for way in ("root", "dropped"):
        for ours, reference in zip(found[way], found["gram"], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=0.0)


def test_a_sample_without_a_root_counts_with_its_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should LAPACK ever give up on one, what it left there is no root: the norm is at most the spread."""
    torch.manual_seed(0)
    uses, found = random_uses(24, 40, (6,)), torch.linalg.cholesky_ex

    def given_up(matrices: Tensor) -> tuple[Tensor, Tensor]:
        root, missing = found(matrices)
        missing[1] = 3
        root[1] = 0.0
        return root, missing

    monkeypatch.setattr(torch.linalg, "cholesky_ex", given_up)
    squared, spread = rooted_norms(uses, Roots())
    assert float(squared[1]) == float(spread[1]) ** 2 >= exact_norms(uses)[1]
    assert float(squared[0]) == pytest.approx(exact_norms(uses)[0], rel=1e-4)
