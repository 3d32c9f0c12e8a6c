"""Uses of weights while a batch is spread over imaginary devices: every use's rows must be the samples' own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pmlf.basics.batches import tensors_of
from pmlf.checks.draws import Unknown
from pmlf.checks.sharding import Shards, cut_axis
from pmlf.engine.operations.capture import HANDLERS
from pmlf.engine.operations.layouts import Key, Layout, Learned
from pmlf.engine.operations.uses import Uses, functions_entered
from pmlf.engine.operations.weights import Weights


class ShardedUses(Uses):
    """Finds the axis along which each use's output is cut, and cuts tables that have rows for every sample."""

    def __init__(self, leaves: Mapping[str, Tensor], batch: Any, shards: Shards, learned: Learned) -> None:
        super().__init__(Weights(leaves), tensors_of(batch), shards.samples, learned.shared, HANDLERS)
        self._shards, self._learned = shards, learned
        self._entered = ExitStack()
        self.layouts: dict[Key, Layout] = {}
        self.outputs: list[Tensor] = []

    def __enter__(self) -> ShardedUses:
        if self._depth == 0:
            self._entered.enter_context(functions_entered())
        self._depth += 1
        super().__enter__()
        return self

    _depth = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._depth -= 1
        if self._depth == 0:
            self._entered.close()

    def seen(self, key: Key, out: Tensor, *, presumed: bool) -> Tensor:
        known = self._learned.layouts.get(key)
        cut = cut_axis(out, self._shards.samples)
        axis, order = cut or (0 if known is None else known.axis, "major")
        if cut is None:
            rows = self._shards.rows_of_all(out, axis)
            if rows is None:
                raise Unknown(
                    f"the rows that {key.operation} makes of a trained parameter are not one part for each sample"
                )
            out = rows
        layout = Layout(axis=axis, samples=self._shards.samples, order=order)
        self.layouts[key] = layout
        if known is not None and (known.axis, known.order) != (layout.axis, layout.order):
            raise Unknown(
                f"the rows that {key.operation} makes of a trained parameter are in another order than was seen"
            )
        self.outputs.append(out)
        return out

    def gradients(self, loss: Tensor) -> None:
        """The backward pass, up to every use."""
        torch.autograd.grad(loss, self.outputs, torch.ones_like(loss), allow_unused=True)
