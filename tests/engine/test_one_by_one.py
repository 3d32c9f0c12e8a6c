"""Samples in passes of their own, or batches of one: exact for models whose layers do not tell their samples apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateStep, methods
from pmlf.engine.plan import GRADIENTS
from reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")

SAMPLES, TOKENS, WIDTH = 5, 6, 8


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.inner, self.head = kind(WIDTH, WIDTH, batch_first=True, num_layers=2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(x)[0][:, -1])
        return found


class BarePositions(nn.Module):
    """Positions, and a bias of every pair of them, without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.pairs = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2 * TOKENS, 1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(TOKENS)
        bias = self.pairs(place[:, None] - place[None, :] + TOKENS).squeeze(-1)  # (tokens, tokens)
        x = x + self.positions(place)
        found: Tensor = self.head((torch.softmax(x @ x.mT + bias, -1) @ x).mean(1))
        return found


class TiedOutside(nn.Module):
    """A decoder that takes the weight of the layer before it as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(F.linear(self.layer(x.mean(1)), self.layer.weight.mT)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(x, x, x, need_weights=False)[0].mean(1))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "bare positions": BarePositions,
    "tied outside": TiedOutside,
    "attention": Attention,
}


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(samples, TOKENS, WIDTH, generator=chance), torch.randint(3, (samples,), generator=chance)


def stepped(model: nn.Module, loss: Any = classify, **options: Any) -> PrivateStep:
    fixed = {"clip_norm": 0.5, "noise_multiplier": 0.0, "expected_batch_size": 4.0, "gradients": "one-by-one"}
    return PrivateStep(model, loss, **{**fixed, **options})


def pmlf_points(t: int) -> list[tuple[list[float], float]]:
    return [([1.0], 1.0)] if t == 0 else [([1.0], 1 / 1.1), ([0.0, 1.0], 0.1 / 1.1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODELS for way in GRADIENTS if (name, way) != ("GRU", "vmap")],
)
def test_what_layers_alone_do_not_tell_is_exact_in_every_way(name: str, way: str) -> None:
    """Three steps of DP-PMLF (k = 2) against float64, one sample and one point at a time."""
    torch.manual_seed(1)
    model = MODELS[name]()
    method = methods.dp_pmlf(k=2, beta=0.1, a=(-0.9,), b=(0.1,))
    step = stepped(model, method=method, gradients=way)
    reference = Reference(
        model, classify, points=pmlf_points, a=(-0.9,), b=(0.1,), corrected=True, clip_norm=0.5, expected_batch_size=4.0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for t in range(3):
        step.accumulate(batch(3, seed=t))
        step.accumulate(batch(2, seed=10 + t))
        step.release()
        both = tuple(torch.cat(parts) for parts in zip(batch(3, seed=t), batch(2, seed=10 + t), strict=True))
        for parameter, wanted in zip(step.trained, reference.step(both), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-6)
        optimizer.step()
        with torch.no_grad():
            for parameter, ours in zip(reference.trained, step.trained, strict=True):
                parameter.copy_(ours)


def test_a_gru_without_a_state_is_refused_under_vmap() -> None:
    """torch writes into a state of zeros in place; one made from the input (x.new_zeros) is taken."""
    with pytest.raises(ValueError, match=r'found: Tensor = self.head.*gradients="one-by-one"'):
        stepped(Recurrent(nn.GRU), gradients="vmap").accumulate(batch())

    def with_state(model: Any, given: Any) -> Tensor:
        x = given[0]
        hidden = model.inner(x, x.new_zeros(2, len(x), WIDTH))[0]
        return F.cross_entropy(model.head(hidden[:, -1]), given[1], reduction="none")

    stepped(Recurrent(nn.GRU), with_state, gradients="vmap").accumulate(batch())


def test_all_ways_agree_on_an_ordinary_model() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(TOKENS * WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))
    found = []
    for gradients in GRADIENTS:
        step = stepped(copy.deepcopy(model), gradients=gradients)
        step.accumulate(batch())
        step.release()
        found.append([parameter.grad for parameter in step.trained])
    for one, other, third in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
        assert torch.allclose(one, third, rtol=1e-4, atol=1e-7)


def test_every_sample_has_a_dropout_of_its_own_and_a_seed_gives_it_again() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(WIDTH, 64), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.dropout(self.layer(x.mean(1)))
            seen.append((hidden != 0).flatten().tolist())
            return hidden

    masks = []
    for _ in range(2):
        torch.manual_seed(0)
        seen: list[list[bool]] = []
        step = stepped(Dropped(), lambda m, b: m(b[0]).square().sum(1), generator=torch.Generator().manual_seed(3))
        step.accumulate(batch(1))
        seen.clear()
        step.accumulate(batch(4))
        masks.append([tuple(mask) for mask in seen])
    assert len(set(masks[0])) == 4 and masks[0] == masks[1]


def test_a_pass_that_fails_leaves_the_pending_sum_as_it_was() -> None:
    def failing(model: nn.Module, given: Any) -> Tensor:
        if float(given[0].sum()) > 1e6:
            raise RuntimeError("no loss")
        return classify(model, given)

    sums = []
    for fails in (False, True):
        torch.manual_seed(1)
        step = stepped(Recurrent(nn.LSTM), failing)
        step.accumulate(batch())
        if fails:
            x, y = batch(4, seed=5)
            x[2] = 1e9
            with pytest.raises(RuntimeError, match="no loss"):
                step.accumulate((x, y))
        step.release()
        sums.append(torch.cat([p.grad.flatten() for p in step.trained if p.grad is not None]))
    assert torch.equal(*sums)


def test_what_keeps_statistics_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="BatchNorm1d"):
        stepped(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(TOKENS * WIDTH)))
    with pytest.raises(ValueError, match="gradients='fast' is not known: give one of ghost, vmap, one-by-one"):
        stepped(nn.Linear(2, 2), gradients="fast")


@pytest.mark.slow
def test_an_lstm_learns_and_is_left_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM)
    y = torch.randint(2, (200,))
    x = torch.randn(200, TOKENS, WIDTH) + 2.0 * y[:, None, None] - 1.0
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        dataset=TensorDataset(x, y),
        loss_fn=classify,
        target_epsilon=50.0,
        target_delta=1e-3,
        method="dpsgd",
        batch_size=30,
        steps=15,
        seed=0,
        gradients="one-by-one",
    )
    for drawn in run.batches():
        run.step(drawn)
    assert all(one is other for one, other in zip(model.inner._flat_weights, model.inner.parameters(), strict=True))
    assert pmlf.evaluate(model, TensorDataset(x, y)) > 0.8
