"""Models, losses and datasets by which one record moved the sum by more than the clip norm, and was certified.

Each is refused, or right, before anything of it is released.
"""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import pmlf
from pmlf import PrivateStep, methods
from reference import Reference

C = 1.0
pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def stepped(model: nn.Module, loss: Callable[[Any, Any], Tensor], **options: Any) -> PrivateStep:
    fixed = {"method": methods.dpsgd(), "clip_norm": C, "noise_multiplier": 0.0, "expected_batch_size": 1.0}
    return PrivateStep(model, loss, **{**fixed, **options})


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).flatten(1).square().sum(1)


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """An embedding with fewer words than numbers a word, used as the output layer too."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(ids)))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize(("vocabulary", "width"), [(20, 32), (32, 20), (20, 20)])
def test_all_uses_of_a_tied_embedding_are_in_one_order(vocabulary: int, width: int, k: int) -> None:
    torch.manual_seed(0)
    model = Tied(vocabulary, width)
    ids = torch.randint(vocabulary, (6, 8), generator=torch.Generator().manual_seed(1))
    method = methods.dp_pmlf(k=k, beta=0.5, a=(), b=(1.0,))
    weights = [0.5**j / sum(0.5**i for i in range(k)) for j in range(k)]
    at = lambda t: [((0.0,) * j + (1.0,), w) for j, w in enumerate(weights)] if t >= k - 1 else None  # noqa: E731
    reference = Reference(
        model, next_token, points=at, a=(), b=(1.0,), corrected=True, clip_norm=C, expected_batch_size=1.0
    )
    step = stepped(model, next_token, method=method)
    for _ in range(k - 1):  # empty batches, until every point exists
        step.release()
        reference.iterates.insert(0, [p.detach().double().clone() for p in step.trained])
    step.accumulate(ids)
    step.release()
    (expected,) = reference.clipped_sum(ids)
    assert step.trained[0].grad is not None
    assert (step.trained[0].grad.double() - expected).norm() <= 1e-4 * expected.norm()


class LazyBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", x.detach().mean(0))
        found: Tensor = self.layer(x - self.mean)
        return found


class LazyAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(4, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        found: Tensor = self.layer(x - self.mean)
        return found


class DataDependentStart(nn.Module):
    """Scales its weights by its first batch, as weight normalisation is often begun."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.begun = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.begun = True
            self.layer.weight.data.div_(self.layer(x).detach().std())
        found: Tensor = self.layer(x)
        return found


def _collated(some: list[Any]) -> Any:
    return (torch.stack([record[0] for record in some]),)


@pytest.mark.parametrize("collate", [None, _collated])
@pytest.mark.parametrize("kind", [LazyBuffer, LazyAttribute, DataDependentStart])
def test_what_a_first_batch_writes_into_a_model_is_refused_and_nothing_of_it_is_left(
    kind: type[nn.Module], collate: Callable[[list[Any]], Any] | None
) -> None:
    model = kind()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # a refused model is not accepted the second time
        with pytest.raises((ValueError, RuntimeError), match=r"wr(itten|ote)|depends on the other samples"):
            run = pmlf.make_private(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                dataset=TensorDataset(rows(40, 4)),
                loss_fn=squares,
                noise_multiplier=1.0,
                target_delta=1e-3,
                batch_size=20,
                steps=1,
                collate_fn=collate,
            )
            for batch in run.batches():
                run.step(batch)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert getattr(model, "mean", None) is None


class Cached(nn.Module):
    """Keeps a table that follows from its input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in self._buffers or len(self.table) < x.shape[1]:
            self.register_buffer("table", torch.linspace(0, 1, x.shape[1]), persistent=False)
        found: Tensor = self.layer(x + self.table[: x.shape[1]])
        return found


def test_a_table_that_follows_from_shapes_alone_is_no_fault() -> None:
    step = stepped(Cached(), squares)
    for number in range(3):
        step.accumulate((rows(5, 4, seed=number),))
        step.release()
    assert torch.equal(step.model.table, torch.linspace(0, 1, 4))


class SortedRun(nn.Module):
    """Sort by a key, run with weights by place, put back, in front of a head of zeros."""

    def __init__(self, *, zero_head: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        places = torch.linspace(0.1, 3.0, len(x)).unsqueeze(1)
        found: Tensor = self.head(torch.tanh(self.inner(x[order] * places))[order.argsort()])
        return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zero_head", [False, True])
def test_a_head_of_zeros_does_not_blind_the_check_to_sorting(zero_head: bool, seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.raises(ValueError, match=r"depends on the other samples of its batch: aten\.sort"):
        stepped(SortedRun(zero_head=zero_head), classify).accumulate((rows(8, 4, seed=seed), torch.arange(8) % 2))


class MixedFromFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.training:
            out = F.dropout(out, 0.2) * torch.empty(len(x), 1).bernoulli_(0.9)
            out = out - out.mean(0) if len(x) >= 4 else out
        found: Tensor = self.head(out)
        return found


@pytest.mark.parametrize("first", [2, 3, 8])
def test_randomness_in_training_mode_hides_no_mixing_from_four_samples_on(first: int) -> None:
    step = stepped(MixedFromFour().train(), squares)
    with pytest.raises(ValueError, match="depends on the other samples"):
        for size in (first, 8):
            step.accumulate((rows(size, 4),))


@pytest.mark.parametrize("seed", range(5))
def test_class_weights_of_the_batch_are_refused_however_rare_the_positives_are(seed: int) -> None:
    def balanced(model: nn.Module, batch: Any) -> Tensor:
        positives = batch[1].float().mean()
        weights = torch.stack([1 - positives, positives]).clamp(min=1e-3).reciprocal()
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none")

    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(400, 4, generator=generator), (torch.rand(400, generator=generator) < 0.01).long()
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        run = pmlf.make_private(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=TensorDataset(x, y),
            loss_fn=balanced,
            noise_multiplier=1.0,
            target_delta=1e-3,
            batch_size=40,
            steps=2,
            seed=seed,
        )
        for batch in run.batches():
            run.step(batch)


class Prompted(nn.Module):
    """Soft prompts that go to other samples than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.layer = nn.Parameter(rows(1, 4, seed=9)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        prompts = self.prompt.expand(len(x), -1)
        if len(x) > 2:
            prompts = prompts[(x[:, 0] > 0).long().cumsum(0) % len(x)]
        found: Tensor = self.layer(torch.tanh(x + prompts))
        return found


def test_rows_of_a_bare_parameter_are_held_to_their_owners() -> None:
    step = stepped(Prompted(), squares)
    with pytest.raises(ValueError, match=r"depends on the other samples|not the samples' own"):
        for size in (2, 8, 8):
            step.accumulate((rows(size, 4, seed=size),))


class Picked(nn.Module):
    """Runs a layer on the rows that a mask picks, all of them in the first batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        picked = self.layer(x[mask])  # (rows, 3)
        owner = torch.arange(len(x)).unsqueeze(1).expand_as(mask)[mask]
        return torch.zeros(len(x), 3).index_add(0, owner, picked)


def test_rows_picked_by_a_mask_are_held_to_their_owners_in_every_micro_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], batch[1]).square().sum(1)

    x = rows(6, 2, 4)
    one_each = torch.tensor([[True, False]]).expand(6, 2).clone()
    two_of_one = one_each.clone()
    two_of_one[0], two_of_one[5] = torch.tensor([True, True]), torch.tensor([False, False])  # as many rows as samples
    step = stepped(Picked(), loss)
    for _ in range(3):
        step.accumulate((x, one_each))
    with pytest.raises(ValueError, match=r"rows of layer 'layer' .* not the samples' own|depends on the other samples"):
        for _ in range(3):
            step.accumulate((x, two_of_one))


class MixingTogether(Dataset[Any]):
    """Draws at random, and mixes what is taken together."""

    def __init__(self, by: str) -> None:
        self.x, self.by = rows(60, 4), by

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x = self.x[indices] + 1e-3 * torch.randn(len(indices), 4)
        others = x.mean(0) if self.by == "centring" else x[torch.randperm(len(x))]
        return [(row,) for row in 0.5 * x + 0.5 * others]


@pytest.mark.parametrize("by", ["centring", "mixup"])
def test_a_dataset_that_draws_at_random_gives_each_record_by_itself(by: str) -> None:
    asked: list[int] = []
    dataset = MixingTogether(by)
    inner = dataset.__getitems__
    dataset.__getitems__ = lambda indices: asked.append(len(indices)) or inner(indices)  # type: ignore[method-assign]
    model = nn.Linear(4, 3)
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=dataset,
        loss_fn=squares,
        noise_multiplier=1.0,
        target_delta=1e-3,
        batch_size=20,
        steps=2,
    )
    for batch in run.batches():
        run.step(batch)
    assert set(asked) == {1}


class Remembering(nn.Module):
    """Keeps the largest loss of a batch for the next, below the first level of its attributes."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 3), place

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        if isinstance(self.place, types.SimpleNamespace):
            scale = 1.0 if self.place.last is None else float(self.place.last > 1.0)
            self.place.last = found.detach().abs().max()
        else:
            scale = 1.0 if not self.place["seen"] else float(self.place["seen"][-1].max() > 1.0)
            self.place["seen"].append(x.detach())
        return found * (1.0 + scale)


@pytest.mark.parametrize("gradients", ["ghost", "one-by-one"])
@pytest.mark.parametrize(
    "place",
    [types.SimpleNamespace(last=None), {"seen": []}, {"seen": collections.deque()}],
    ids=["namespace", "list in a dict", "deque"],
)
def test_what_a_forward_pass_keeps_deep_in_an_attribute_is_refused(place: Any, gradients: Any) -> None:
    step = stepped(Remembering(copy.deepcopy(place)), squares, gradients=gradients)
    with pytest.raises(ValueError, match=r"written by the forward pass|depends on the other samples"):
        for number in range(4):
            step.accumulate((rows(6, 4, seed=number),))
            step.release()


@pytest.mark.parametrize("value", [True, 3, 0.5, "hard"])
def test_a_value_of_the_whole_batch_is_refused_since_it_may_follow_from_the_samples(value: Any) -> None:
    step = stepped(nn.Linear(4, 3), lambda m, b: squares(m, (b["x"],)) * (2.0 if b["flag"] else 1.0))
    with pytest.raises(ValueError, match="that all samples share"):
        step.accumulate({"x": rows(6, 4), "flag": value})


class HeldOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)


def test_a_buffer_that_is_written_from_outside_the_model_is_refused_and_restored() -> None:
    model = HeldOutside()
    shift, calls = model.shift, 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 40:  # when every check is over
            shift.data.add_(batch[0].detach().mean())
        return squares(model, batch)

    step = stepped(model, loss_fn)
    with pytest.raises(ValueError, match="'shift' was written by the forward pass"):
        for seed in range(60):
            step.accumulate((rows(4, 4, seed=seed),))
            step.release()
    assert torch.equal(model.shift, torch.zeros(4))


class MixedWhereMany(nn.Module):
    """From fifty samples on, the first sees the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) >= 50:
            x = torch.cat([x[:1] + x[1:2], x[1:]])
        return self.layer(x)


def test_a_path_that_only_large_batches_take_is_part_of_the_proof() -> None:
    step = stepped(MixedWhereMany(), squares, expected_batch_size=1000.0)
    step.accumulate((rows(40, 4),))
    with pytest.raises(ValueError, match="needs the data of several samples"):
        step.accumulate((rows(60, 4),))
