"""Which optimizers may follow the private gradients, and which are warned of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from pmlf import methods
from pmlf.experiments import runner
from pmlf.experiments.spec import RunSpec
from pmlf.methods import Method
from small_runs import finish, private, small

Make = Callable[[Any], Optimizer]


def test_optimizers_that_cannot_be_accounted_for_are_refused() -> None:
    model = small()
    for optimizer, message in [
        (torch.optim.LBFGS(model.parameters()), "LBFGS evaluates a closure"),
        (torch.optim.SparseAdam(list(model.parameters())), "SparseAdam needs sparse gradients"),
        (SGD(list(model.parameters())[:2], lr=0.1), "parameter '2.weight' is trainable but not in"),
    ]:
        with pytest.raises(ValueError, match=message):
            private(model, optimizer=optimizer)


@pytest.mark.parametrize(
    "method", [methods.lp_dpsgd(), methods.inner_outer(), methods.dp_pmlf(bands=2)], ids=lambda method: method.name
)
@pytest.mark.parametrize(
    "make",
    [lambda of: Adam(of, lr=0.01), lambda of: AdamW(of), lambda of: SGD([{"params": of, "momentum": 0.9}])],
    ids=["Adam", "AdamW", "SGD with momentum in a group"],
)
def test_a_second_momentum_is_allowed_and_warned_of(make: Make, method: Method) -> None:
    model = small()
    with pytest.warns(UserWarning, match=f"has a momentum of 0.9 and the filter of {method.name}"):
        run = private(model, optimizer=make(model.parameters()), method=method, steps=1)
    assert finish(run).steps_done == 1


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda of: Adam(of, lr=0.01), "dpsgd"),
        (lambda of: SGD(of, lr=0.01, momentum=0.9), "dp-pmlf-without-lf"),
        (lambda of: Adam(of, lr=0.01, betas=(0.0, 0.999)), "dp-pmlf"),
        (lambda of: RMSprop(of, lr=0.01), "dp-pmlf"),
    ],
)
def test_one_momentum_is_not_warned_of(make: Make, method: str) -> None:
    model = small()
    private(model, optimizer=make(model.parameters()), method=method)  # a warning is an error


def test_adam_of_a_run_has_no_second_momentum(tmp_path: Path) -> None:
    spec = RunSpec(records=40, batch_size=8, steps=1, method="dp-pmlf", optimizer="adam")
    assert runner.run(spec, tmp_path / "run").steps == 1  # a warning is an error
