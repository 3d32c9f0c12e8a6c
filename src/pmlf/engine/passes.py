"""One pass of some samples through a model at one evaluation point: what every way to per-sample gradients is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pmlf.engine.anatomy import Anatomy
from pmlf.engine.plan import Plan
from pmlf.engine.questions import Questions

LossFunction = Callable[[Any, Any], Any]
# How the rows of a layer are known to be the samples' own: by proof, or by marks in further backward passes.
Rows = Literal["their own", "marked"]


class Pass(NamedTuple):
    """weight * (gradients of the loss of every sample at the parameters `values`) is what is asked for.

    Whether it was all in order is asked by `questions`, to be answered later; at once where there are none.
    """

    anatomy: Anatomy
    plan: Plan
    loss_fn: LossFunction
    values: Mapping[str, Tensor]
    batch: Any
    samples: int
    weight: float = 1.0
    rows: Rows = "their own"
    questions: Questions | None = None
