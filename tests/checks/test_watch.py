"""The watch: samples of every step are run again alone, with the parameters and the random draws of their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep, methods
from pmlf.checks.replay import RecordedDraws, ReplayedDraws

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def stepped(model: nn.Module, loss: Any = None, *, samples: float = 8.0, **options: Any) -> PrivateStep:
    fixed = {"method": methods.dpsgd(), "noise_multiplier": 0.0, "expected_batch_size": samples}
    return PrivateStep(model, loss or squares, **{**fixed, **options})


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).flatten(1).square().sum(1)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Late(nn.Module):
    """Centres the batch from its n-th call on, when every check before training is over."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(4, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        found: Tensor = self.layer(x - 0.5 * x.mean(0) if self.left < 0 and len(x) > 1 else x)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
def test_samples_that_begin_to_mix_in_mid_training_are_found_within_a_few_steps(dropout: bool) -> None:
    model = nn.Sequential(Late(300), nn.Dropout(0.3) if dropout else nn.Tanh(), nn.Linear(3, 2))
    step = stepped(model, generator=torch.Generator().manual_seed(1))
    released = 0
    with pytest.raises(ValueError, match="depends on the other samples of its batch: alone, with"):
        for number in range(400):
            step.accumulate((rows(8, 4, seed=number),))
            step.release()
            released += model[0].left < 0
    assert released < 12  # two samples a step are watched, on average


class FromSize(nn.Module):
    """Mixes batches of one size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(4, 3), size

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.flip(0) + x if len(x) == self.size else x)
        return found


def test_a_size_of_batch_that_is_new_is_looked_at_before_anything_of_it_is_released() -> None:
    step = stepped(FromSize(6), samples=1000.0)  # of so many, hardly one of a few is watched
    for size in (3, 4, 5):
        step.accumulate((rows(size, 4),))
        step.release()
    before = step.releases
    with pytest.raises(ValueError, match="alone, with the same"):
        step.accumulate((rows(6, 4),))
    assert step.releases == before


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2)),
    "channels": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), nn.Dropout2d(0.4), nn.Flatten()),
    "paths": lambda: nn.Sequential(nn.Linear(4, 8), drop_path(), nn.Linear(8, 2)),
    "noise": lambda: nn.Sequential(nn.Linear(4, 8), Noisy(), nn.Linear(8, 2)),
    "leaky": lambda: nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 2)),
    "one for all": lambda: nn.Sequential(nn.Linear(4, 8), Jitter(), nn.Linear(8, 2)),
}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) + torch.rand(x.shape[0], 1) if self.training else x


class Jitter(nn.Module):
    """One draw for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.rand(())) if self.training else x


def drop_path() -> nn.Module:
    class DropPath(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty(len(x), 1).bernoulli_(0.6) / 0.6 if self.training else x

    return DropPath()


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_randomness_of_a_sample_is_the_same_alone_so_that_none_is_refused_for_it(name: str) -> None:
    step = stepped(RANDOM[name]().train(), method="dp-pmlf", samples=1.0)
    for number in range(6):
        step.accumulate((rows(7, 4, seed=number),))
        step.release()
    assert step.releases == 6 and step.watched


def test_draws_made_again_for_a_sample_are_its_part_of_the_batch_draws() -> None:
    def draws(samples: int) -> list[Tensor]:
        x = torch.full((samples, 3, 2), 0.5)
        return [
            torch.empty(samples, 3).bernoulli_(0.5),
            torch.rand(samples, 2),
            torch.randn_like(x.to(memory_format=torch.contiguous_format)),
            torch.bernoulli(x),
            F.dropout(x.movedim(0, 1), 0.5).movedim(1, 0),
            torch.randn(4),
        ]

    torch.manual_seed(3)
    with RecordedDraws() as recorded:
        together = draws(5)
    for sample in range(5):
        with ReplayedDraws(recorded.draws, sample, 5):
            alone = draws(1)
        for one, all_ in zip(alone[:-1], together[:-1], strict=True):
            assert torch.equal(one[0], all_[sample])
        assert torch.equal(alone[-1], together[-1])  # without an axis of samples: the same for each


class Routed(nn.Module):
    """Chooses an expert by a sign that rounding can turn."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x * 0.1).sum(1, keepdim=True) - 0.1 * x.sum(1, keepdim=True) > 0
        return torch.where(chosen, self.one(x), self.other(x))


def test_what_rounding_does_to_a_sample_is_not_taken_for_others_influence() -> None:
    step = stepped(Routed(), samples=1.0)
    for number in range(10):
        step.accumulate((rows(32, 64, seed=number),))
        step.release()
    assert step.releases == 10


def test_a_sample_that_is_not_finite_is_no_fault_and_adds_nothing() -> None:
    x = rows(6, 4)
    x[2] = float("inf")
    step = stepped(nn.Linear(4, 3), samples=1.0)
    for _ in range(4):
        step.accumulate((x,))
        step.release()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in step.trained)


@pytest.mark.slow
def test_who_assumes_independence_is_believed_and_named_in_the_certificate() -> None:
    def run(**options: Any) -> pmlf.PrivateRun:
        model = nn.Sequential(FromSize(0), nn.Linear(3, 1))
        return pmlf.make_private(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=torch.utils.data.TensorDataset(rows(40, 4)),
            loss_fn=squares,
            noise_multiplier=1.0,
            target_delta=1e-3,
            batch_size=10,
            steps=2,
            **options,
        )

    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "proven: no data flow", True),
        ({"gradients": "vmap"}, "by construction", False),
        ({"assume_independent_samples": True}, "assumed", False),
    ]
    for options, proven, watched in cases:
        private = run(**options)
        for batch in private.batches():
            private.step(batch)
        document = private.certificate()
        assert document["independence_of_samples"].startswith(proven)
        assert document["watched_at_every_step"] is watched
    with pytest.raises(ValueError, match="assume_independent_samples=1 is neither True nor False"):
        run(assume_independent_samples=1)


def test_the_watch_leaves_what_is_released_as_it_is() -> None:
    def released(**options: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2))
        step = stepped(model, samples=1.0, method="dp-pmlf", generator=torch.Generator().manual_seed(5), **options)
        for number in range(3):
            step.accumulate((rows(7, 4, seed=number),))
            step.release()
        return torch.cat([p.grad.flatten() for p in step.trained if p.grad is not None])

    assert torch.equal(released(), released(assume_independent_samples=True))


class Sampled(nn.Module):
    """Draws a class for every sample in a way that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found * torch.multinomial(found.detach().softmax(1), 1) if self.training else found


def test_randomness_that_cannot_be_drawn_again_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"cannot be drawn again for one sample.*one-by-one"):
        step = stepped(Sampled().train(), samples=1.0)
        for number in range(3):
            step.accumulate((rows(6, 4, seed=number),))
