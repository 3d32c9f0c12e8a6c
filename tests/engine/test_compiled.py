"""Compiled models and autocast: a step sees what they are written as, and computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf import PrivateStep


class Body(nn.Module):
    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.ones(8)) if bare else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        return hidden if self.scale is None else hidden * self.scale


class Model(nn.Module):
    """`bare` has a parameter that no layer has a rule for: gradients are taken at operations."""

    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        self.body, self.head = Body(bare=bare), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _sums(model: nn.Module, loss: Any, seen: list[int] | None = None) -> list[dict[str, Tensor]]:
    """Of three micro-batches of different sizes; `seen` has the number of graphs compiled after each."""
    step = PrivateStep(model, loss, method="dpsgd", clip_norm=0.05, noise_multiplier=1.0, expected_batch_size=8)
    generator, found = torch.Generator().manual_seed(0), []
    for samples in (8, 6, 7):
        step.accumulate((torch.randn(samples, 5, generator=generator), torch.arange(samples) % 3))
        total = step.sensitive_sum()
        assert total is not None
        found.append({name: value.double().clone() for name, value in total.values.items()})
        if seen is not None:
            seen.append(len(_GRAPHS))
    return found


_GRAPHS: list[int] = []


def _counting(graph: Any, example: Any) -> Any:
    _GRAPHS.append(1)
    return graph.forward


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True], ids=["layers", "operations"])
def test_a_compiled_part_of_a_model_runs_eagerly_in_a_step_and_is_not_compiled_at_every_micro_batch(
    bare: bool,
) -> None:
    torch.manual_seed(0)
    model = Model(bare=bare)
    expected = _sums(model, _loss)
    _GRAPHS.clear()
    model.body.forward = torch.compile(model.body.forward, backend=_counting)  # type: ignore[method-assign]
    after: list[int] = []
    for one, other in zip(_sums(model, _loss, after), expected, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-7)
    assert after[-1] == after[0]


_AUTOCAST = """
import torch
from test_compiled import Model, _loss, _sums

def halved(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _loss(model, batch)

torch.manual_seed(0)
model = Model(bare=True)
for one, other in zip(_sums(model, halved), _sums(model, _loss), strict=True):
    for name, value in one.items():
        assert value.dtype == torch.float64
        distance = float((value - other[name]).norm() / other[name].norm())
        assert 0 < distance < 0.05, (name, distance)
"""


@pytest.mark.slow
def test_gradients_at_operations_under_autocast_agree_with_float32() -> None:
    """In a process of its own: some CPUs need ONEDNN_MAX_CPU_ISA set before torch starts."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", _AUTOCAST], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
