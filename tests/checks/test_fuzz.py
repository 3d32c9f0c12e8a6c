"""Forty random models of benchmarks/fuzz.py, which has the long form, and the fuzzer itself."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmlf
from fuzzing import data, models, oracle
from fuzzing.losses import Loss
from fuzzing.recipes import Recipe, drawn, drawn_with_operations
from fuzzing.summary import Tally

MODELS, TOGETHER = 40, 10


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MODELS, TOGETHER))
def test_no_random_model_breaks_a_promise_and_no_honest_one_is_refused(first: int) -> None:
    tally, wrong = Tally(), []
    for index in range(first, first + TOGETHER):
        recipe = drawn(0, index)
        verdict = oracle.judged(recipe)
        tally.add(recipe, verdict)
        if verdict.holes or verdict.outcome == "bug" or (recipe.honest and verdict.outcome == "refused"):
            wrong.append((index, recipe.family, verdict))
    found = tally.as_dict()
    assert tally.models == TOGETHER
    assert not wrong, f"python benchmarks/fuzz.py --only INDEX shows one: {wrong}"
    assert found["false_refusals"] == {}


@pytest.mark.slow
def test_no_random_model_with_weights_in_operations_breaks_a_promise() -> None:
    wrong = []
    for index in range(8):
        recipe = drawn_with_operations(0, index)
        verdict = oracle.judged(recipe)
        if verdict.holes or verdict.outcome == "bug" or (recipe.honest and verdict.outcome == "refused"):
            wrong.append((index, recipe.family, verdict))
    assert not wrong, f"python benchmarks/fuzz.py --operations --only INDEX shows one: {wrong}"


@pytest.mark.slow
def test_every_recipe_is_a_model_that_runs_without_the_library() -> None:
    for index in range(MODELS):
        recipe = drawn(0, index)
        model, loss = models.build(recipe), Loss(recipe)
        for batches in data.releases(recipe):
            for batch in batches:
                assert loss(model, batch).shape == batch["y"].shape


def test_a_recipe_is_the_same_each_time_and_so_is_what_is_made_of_it() -> None:
    def made(recipe: Recipe) -> list[Tensor]:
        batches = [batch for release in data.releases(recipe) for batch in release]
        return [*models.build(recipe).state_dict().values(), *(t for batch in batches for t in batch.values())]

    for index in range(20):
        one, other = drawn(3, index), drawn(3, index)
        assert one == other and asdict(one) == asdict(copy.deepcopy(other))
        assert all(map(torch.equal, made(one), made(other)))
    assert drawn(3, 0) != drawn(4, 0)


def test_half_or_more_of_the_recipes_are_honest_and_every_family_is_among_them() -> None:
    recipes = [drawn(0, index) for index in range(1000)]
    families = Counter(recipe.family for recipe in recipes)
    assert sum(recipe.honest for recipe in recipes) >= 500
    assert min(families.values()) >= 10 and len(families) == 11


class Unclipped:
    """A step that takes a batch's gradient as it is and looks at nothing."""

    def __init__(self, model: nn.Module, loss_fn: Any, **options: Any) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.summed = [torch.zeros_like(p) for p in self.trained]

    def accumulate(self, batch: Any) -> None:
        grads = torch.autograd.grad(self.loss_fn(self.model, batch).sum(), self.trained, allow_unused=True)
        self.summed = [s if g is None else s + g for s, g in zip(self.summed, grads, strict=True)]

    def release(self) -> None:
        for parameter, total in zip(self.trained, self.summed, strict=True):
            parameter.grad = total
        self.summed = [torch.zeros_like(p) for p in self.trained]


@pytest.mark.slow
def test_the_oracle_sees_every_kind_of_hole_in_a_step_that_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmlf, "PrivateStep", Unclipped)
    kinds = Counter(hole.kind for index in range(30) for hole in oracle.judged(drawn(0, index)).holes)
    assert {"moved", "wrong", "kept"} <= set(kinds)
