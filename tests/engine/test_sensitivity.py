"""Removing one sample moves the sum before noise by at most C(1 + 1e-4): every method, clipping, k and scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.basics.batches import select, without
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.clipper import Clipper
from pmlf.engine.passes import Pass
from pmlf.engine.plan import Plan
from pmlf.engine.strategy import Cheapest, Fixed, Strategy, Way
from zoo import CASES, make

pytestmark = pytest.mark.filterwarnings("ignore:(noise_multiplier=0|no loss depends on .unused)")
TOLERANCE = 1e-4


def release(step: PrivateStep, batch: Any) -> Tensor:
    """The sum before noise, filter and mean, as one vector (noise 0, B = 1)."""
    if batch is not None:
        step.accumulate(batch)
    summed = step.sensitive_sum()
    assert summed is not None
    total = torch.cat([value.flatten().double() for value in summed.values.values()])
    step.discard()
    return total


def moved_steps(
    model: nn.Module,
    loss_fn: Any,
    batch: Any,
    method: methods.Method,
    clipping: str,
    strategy: Strategy | None = None,
) -> PrivateStep:
    """A step with a full history of iterates that differ."""
    step = PrivateStep(
        model, loss_fn, method=method, clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=1.0,
        clipping=clipping, strategy=strategy,  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in range(method.points.depth):
        step.release()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return step


def largest_move(step: PrivateStep, batch: Any, size: int) -> float:
    """max_i |sum - sum without sample i|, taken at once and with each sample in a micro-batch of its own."""
    whole = release(step, batch)
    moves = []
    for i in range(size):
        others = [select(batch, slice(0, i)), select(batch, slice(i + 1, size))]
        for part in others:
            if len(part[0]) if isinstance(part, tuple) else len(next(iter(part.values()))):
                step.accumulate(part)
        moves.append(float((whole - release(step, None)).norm()))
    return max(moves)


WIDE = {
    "dpsgd": methods.dpsgd(),
    "lp-dpsgd": methods.lp_dpsgd(),
    "inner-outer-k8": methods.inner_outer(k=8, gamma=0.9),
    "dp-pmlf-k1": methods.dp_pmlf(k=1),
    "dp-pmlf-k2": methods.dp_pmlf(k=2),
    "dp-pmlf-k8": methods.dp_pmlf(k=8, beta=1.0),
    "without-lf": methods.dp_pmlf_without_lf(k=3, beta=0.9),
    "disk": methods.disk(kappa=0.2, gamma=0.3),
}


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("method", WIDE)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_one_sample_moves_the_sum_by_at_most_the_clip_norm(method: str, clipping: str, scale: float) -> None:
    torch.manual_seed(0)
    case, model, size = CASES["tied"], make("tied"), 3
    batch = case.batch(size)
    step = moved_steps(model, lambda m, b: scale * case.loss(m, b), batch, WIDE[method], clipping)
    assert largest_move(step, batch, size) <= 1.0 + TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_one_sample_moves_the_sum_by_at_most_the_clip_norm_in_every_model(model: str) -> None:
    torch.manual_seed(0)
    case, size = CASES[model], 4
    batch = case.batch(size)
    step = moved_steps(make(model), lambda m, b: 1e3 * case.loss(m, b), batch, methods.dp_pmlf(k=3, beta=0.9), "flat")
    assert largest_move(step, batch, size) <= 1.0 + TOLERANCE


class Tokens(nn.Module):
    """sum over tokens of <output gradient given by the sample, layer(token)>: any factors an adversary likes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor, grads: Tensor) -> Tensor:
        return (self.layer(inputs) * grads).flatten(1).sum(1)


def cancelling(seed: int, tokens: int, cols: int, rows: int, size: float, left_over: float, constant: bool) -> Any:
    """Two samples whose tokens come in pairs that cancel but for a small part."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, tokens // 2, cols, generator=generator)
    grads = torch.randn(2, tokens // 2, rows, generator=generator)
    if constant:  # equal entries make rounding errors of one sign add up
        inputs = inputs[..., :1].expand_as(inputs) * 1.3 + 0.7
        grads = grads[..., :1].expand_as(grads) * 0.9 + 1.1
    rest = torch.randn(2, tokens // 2, rows, generator=generator)
    scale = size**0.5
    return (
        torch.cat([inputs, inputs], 1) * scale,
        torch.cat([grads, -grads + left_over * rest], 1) * scale,
    )


def linear_loss(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(*batch)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("way", ["held late", "gram", "root"])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("left_over", [0.0, 1e-6, 1e-3, 1e-1])
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("method", ["dpsgd", "inner-outer-k8"])
def test_cancelling_tokens_move_the_sum_by_at_most_the_clip_norm(
    method: str, size: float, left_over: float, constant: bool, way: Way
) -> None:
    torch.manual_seed(1)
    model = Tokens(nn.Linear(96, 64, bias=False))
    batch = cancelling(3, 8, 96, 64, size, left_over, constant)
    step = moved_steps(model, linear_loss, batch, WIDE[method], "flat", Fixed(way, slice_size=3))
    assert largest_move(step, batch, 2) <= 1.0 + TOLERANCE


@pytest.mark.parametrize("left_over", [0.0, 1e-6, 1e-3])
def test_cancelling_tokens_of_embedding_and_convolution_stay_within_the_clip_norm(left_over: float) -> None:
    inputs, grads = cancelling(4, 8, 4, 64, 1e5, left_over, False)
    embedding = Tokens(nn.Embedding(5000, 64))
    index = torch.arange(4).repeat(2, 2)
    step = moved_steps(embedding, linear_loss, (index, grads), methods.dp_pmlf(), "flat")
    assert largest_move(step, (index, grads), 2) <= 1.0 + TOLERANCE
    convolution = Tokens(nn.Conv1d(4, 64, 1, bias=False))
    batch = (inputs.mT.contiguous(), grads.mT.contiguous())
    step = moved_steps(convolution, linear_loss, batch, methods.dp_pmlf(), "flat")
    assert largest_move(step, batch, 2) <= 1.0 + TOLERANCE


# Deliberately broken variants: the tests above must be able to fail.


@pytest.mark.slow
def test_clipping_each_point_with_unit_weights_breaks_the_bound() -> None:
    """The public reference code's way: clip at every point, then add. A sample moves the sum by up to k*C."""
    torch.manual_seed(0)
    case, model = CASES["vit"], make("vit")
    batch, plan, iterates = case.batch(4), Plan.of(model), []
    for _ in range(2):
        iterates.append({name: p.detach().clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))

    def summed(some: Any, groups: list[list[tuple[int, float]]]) -> Tensor:
        """Every group of (iterate, weight) is clipped by itself."""
        clipper, total = Clipper(plan.parameters, clip_norm=1.0), None
        for group in groups:
            momentum = clipper.momentum(len(some[0]), len(group))
            for iterate, weight in group:
                loss = lambda m, b: 1e3 * case.loss(m, b)  # noqa: E731
                momentum.add_pass(Pass(Anatomy(model), plan, loss, iterates[iterate], some, len(some[0]), weight))
            total, _ = clipper.add([momentum], total, iterates[0])
        assert total is not None
        return torch.cat([value.double().flatten() for value in total.values.values()])

    def moved(groups: list[list[tuple[int, float]]]) -> float:
        whole = summed(batch, groups)
        return max(float((whole - summed(without(batch, i), groups)).norm()) for i in range(4))

    assert moved([[(0, 1 / 1.1), (1, 0.1 / 1.1)]]) <= 1.0 + TOLERANCE
    assert moved([[(0, 1.0)], [(1, 1.0)]]) > 1.5


class PlainGram(Cheapest):
    """Norms by a float32 Gram matrix, without a bound on its rounding."""

    def norms(self, uses: Any, roots: Any) -> tuple[Tensor, Tensor]:
        left = torch.cat([use.left for use in uses], 1)
        right = torch.cat([use.right for use in uses], 1)
        squared = ((left @ left.mT) * (right @ right.mT)).sum((1, 2)).clamp(min=0.0)
        return squared, torch.zeros_like(squared)


class NoSlack(Cheapest):
    """Norms of samples whose tokens cancel to nothing, exact, without slack for the rounding of their sum."""

    def norms(self, uses: Any, roots: Any) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(uses[0].samples, dtype=torch.float64)
        return zero, zero


@pytest.mark.parametrize(
    ("broken", "method", "size", "left_over"),
    [(PlainGram, methods.dpsgd(), 1e6, 1e-4), (NoSlack, methods.dp_pmlf(k=2), 1e9, 0.0)],
)
def test_norms_that_understate_break_the_bound(broken: Any, method: Any, size: float, left_over: float) -> None:
    torch.manual_seed(1)
    model = Tokens(nn.Linear(96, 64, bias=False))
    batch = cancelling(3, 8, 96, 64, size, left_over, False)
    step = moved_steps(model, linear_loss, batch, method, "flat")
    assert largest_move(step, batch, 2) <= 1.0 + TOLERANCE
    step = moved_steps(model, linear_loss, batch, method, "flat", broken())
    assert largest_move(step, batch, 2) > 1.0 + 10 * TOLERANCE


class EveryOther(Cheapest):
    """Every other parameter formed late, two samples at a time, the rest as factors."""

    def held_late(self, kept: Any, samples: int) -> tuple[list[str], int]:
        return list(kept)[::2], 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cnn5", "tied", "convolutions", "unusual", "vit", "bag"])
@pytest.mark.parametrize("sliced", [False, True])
def test_a_sample_that_is_not_finite_adds_exactly_zero(name: str, bad: float, sliced: bool) -> None:
    strategy = EveryOther() if sliced else None  # the sample is neither first nor last in its slice
    case, size = CASES[name], 5
    batch = case.batch(size)
    poison = torch.zeros(size)
    poison[2] = bad

    def poisoned(model: Any, pair: Any) -> Tensor:
        inner, extra = pair
        return case.loss(model, inner) * (1.0 + extra)

    torch.manual_seed(0)
    step = moved_steps(make(name), poisoned, batch, methods.dp_pmlf(k=2), "flat", strategy)
    kept = torch.tensor([0, 1, 3, 4])
    inner = {k: v[kept] for k, v in batch.items()} if isinstance(batch, dict) else tuple(v[kept] for v in batch)
    expected = release(step, (inner, torch.zeros(4)))
    found = release(step, (batch, poison))
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
