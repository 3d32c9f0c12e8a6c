"""Proof that no operation of a loss carries data from one sample to another, on the path that it takes.

The batch is spread over imaginary devices, one sample on each (`sharding`), and the loss and its gradients are computed
on one of them. If no operation asks for another device's data, this sample's loss and gradients depend on this sample
and the parameters alone. What sharding rules do not cover is compared: with random draws made constant, the sample has
the same loss in the plain batch and alone. This runs for two numbers of samples that are no other size in the model, so
that a sample axis is not mistaken for another axis or for a number. It runs once more for the batch at its own size,
because a program may take another path for more samples.

The same run verifies that the rows of every layer whose gradients are taken are the samples' own, in order.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from pmlf.basics.batches import batch_size, picked, select, tensors_of
from pmlf.basics.generators import other_libraries_watched
from pmlf.checks.draws import Unknown, constant_draws
from pmlf.checks.finding import PROVEN, Finding
from pmlf.checks.sharded_uses import ShardedUses
from pmlf.checks.sharding import (
    Observer,
    SamplesMeet,
    Shards,
    asks_for_others,
    is_by_sample,
    local,
    on_rows,
    sharded,
)
from pmlf.checks.taint import is_tainted
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.graph import nodes_of
from pmlf.engine.losses import checked_losses
from pmlf.engine.passes import LossFunction
from pmlf.engine.plan import Plan
from pmlf.engine.swap import ModelWritten, swapped

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2  # relative, of a loss alone and in a batch: rounding
_LIBRARIES = (str(Path(torch.__file__ or "").parent), str(Path(__file__).parents[1]))
# Operations that only change a tensor's shape: their rules are cautious, and a sample's rows may still be its own.
_LAYOUTS = (
    "copy_",
    "view",
    "reshape",
    "_unsafe_view",
    "permute",
    "transpose",
    "unflatten",
    "flatten",
    "expand",
    "repeat",
    "split",
    "cat",
    "stack",
)
_ROWS_BY_NUMBER = (
    ", because its numbers count the rows of all samples: count them within each sample, as "
    "x[torch.arange(len(x))[:, None], numbers] does, and gather and scatter_add along axis 1"
)


def prove(model: nn.Module, plan: Plan, loss_fn: LossFunction, batch: Any) -> Finding:
    """Look for data flow between samples in the computation of a batch's loss and its gradients.

    The model runs in its training mode and is left as it was. The finding holds for the path that the program takes
    with this batch.
    """
    hooked = _backward_hooks(model)
    if hooked is not None:
        return Finding(reason=f"{hooked} has a hook on its gradient, which may change it")
    if not all(isinstance(value, Tensor) for value in tree_leaves(batch) if value is not None):
        return Finding(reason="the batch holds lists of values that are not tensors, which cannot be followed")
    observers: list[Observer] = []
    try:
        with _generators_watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of this trial are not about training
            first, second = _numbers_of_samples(model, batch)
            for samples, backward in ((first, True), (second, False)):
                run = _Run(model, plan, loss_fn, _some(batch, samples), samples)
                plain, spread = run.in_plain_batch(), run.on_device(observers, backward=backward)
                run.require_equal(spread, plain, run.alone())
            if (size := batch_size(batch)) > second:  # a path may follow from the number of samples
                run = _Run(model, plan, loss_fn, batch, size)
                run.require_equal(run.on_device(observers, backward=False), run.alone())
    except Exception as error:  # whatever a rule, a model or a loss raises during a proof
        return _explained(error, observers[-1] if observers else None)
    return PROVEN


class _Run:
    """The loss of one sample of several, computed in three ways that must agree.

    Args:
        model: The model.
        plan: How per-sample gradients are taken.
        loss_fn: The loss.
        rows: The samples.
        samples: Their number.
    """

    def __init__(self, model: nn.Module, plan: Plan, loss_fn: LossFunction, rows: Any, samples: int) -> None:
        self._model, self._plan, self._loss_fn, self._rows, self._samples = model, plan, loss_fn, rows, samples
        self._anatomy = Anatomy(model)
        self._sample = samples // 2

    def in_plain_batch(self) -> float:
        """The sample's loss in the batch as it is; raises if the forward pass writes the model."""
        with constant_draws(), torch.no_grad(), swapped(self._anatomy, _copies(self._anatomy)) as swap:
            losses = checked_losses(self._loss_fn(self._model, self._rows), self._samples, differentiable=False)
            found = float(losses[self._sample])
        try:
            swap.refuse_written()
        except ModelWritten as error:
            raise Unknown(f"the forward pass writes {error.name!r}") from error
        return found

    def alone(self) -> float:
        """The sample's loss by itself."""
        with constant_draws(), torch.no_grad():
            single = select(self._rows, slice(self._sample, self._sample + 1))
            return float(checked_losses(self._loss_fn(self._model, single), 1, differentiable=False)[0])

    def on_device(self, observers: list[Observer], *, backward: bool) -> Tensor:
        """The sample's loss on its imaginary device; raises if an operation asks for another device's data.

        Args:
            observers: Where the observer of this run is added, which knows the operation that asked.
            backward: Whether gradients are computed too.
        """
        anatomy, plan = self._anatomy, self._plan
        device = next(iter(anatomy.parameters.values())).device
        with sharded(self._samples, self._sample, device) as (shards, observer):
            observers.append(observer)
            replacements = _replicated(anatomy, shards)
            leaves = {name: replacements[id(p)] for name, p in anatomy.parameters.items() if p.requires_grad}
            spread = on_rows(self._rows, shards)
            uses = ShardedUses(leaves, spread, shards, plan.learned) if plan.learned.by_operations else None
            seen = _layers_seen(anatomy, plan, shards) if uses is None else uses
            with torch.enable_grad(), swapped(anatomy, replacements), seen:
                loss = self._observed_loss(spread, observer)
                found = local(loss).detach()[0]
                if backward and uses is None:
                    torch.autograd.grad(loss, list(leaves.values()), torch.ones_like(loss), allow_unused=True)
                elif backward and uses is not None:
                    uses.gradients(loss)
            if uses is not None:
                plan.learned.layouts.update(uses.layouts)
        return found

    def _observed_loss(self, spread: Any, observer: Observer) -> Tensor:
        """The losses of samples that are spread over devices: one number on each, from what is on it."""
        found = self._loss_fn(self._model, spread)
        if observer.refusal is not None:
            raise observer.refusal
        if is_tainted(found) and observer.request is not None:
            raise observer.request.error
        observer.refuse_kept()
        loss = checked_losses(found, self._samples)
        observer.operation = "the loss"
        if not is_by_sample(loss, self._samples):
            raise SamplesMeet("is not one number of each sample")
        _refuse_own_functions(loss)
        return loss

    def require_equal(self, spread: Tensor, *others: float) -> None:
        """Raise if the sample's losses, on its device and otherwise, differ by more than rounding or are not finite."""
        half = any(t.dtype in (torch.bfloat16, torch.float16) for t in (spread, *self._anatomy.parameters.values()))
        values = [float(spread), *others]
        allowed = (_HALF_TOLERANCE if half else _TOLERANCE) * max(map(abs, values)) + 1e-6
        if max(values) - min(values) > allowed:
            raise Unknown("the loss of a sample differs between alone, in a batch and at another place in it")
        if not all(map(np.isfinite, values)):
            raise Unknown("the loss is not finite")


def _replicated(anatomy: Anatomy, shards: Shards) -> dict[int, Tensor]:
    """The parameters and copies of the buffers, the same on every device."""
    found: dict[int, Tensor] = {}
    for parameter in anatomy.parameters.values():
        found[id(parameter)] = shards.replicated(parameter).requires_grad_(parameter.requires_grad)
    return found | {id(buffer): shards.replicated(buffer.clone()) for buffer in anatomy.buffers.values()}


@contextmanager
def _layers_seen(anatomy: Anatomy, plan: Plan, shards: Shards) -> Iterator[None]:
    """Every layer whose gradients are taken must return the samples' own rows, one sample after the other. What is the
    same for all samples, with or without a batch axis, is handed out row by row, as in a step."""

    def look(name: str) -> Callable[..., Any]:
        def seen(module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor):
                raise Unknown(f"the layer {name!r} returns no tensor")
            if is_by_sample(output, shards.samples):
                return None
            rows = shards.rows_of_all(output)
            if rows is None:
                raise Unknown(f"the rows that the layer {name!r} returns are not one part for each sample")
            return rows

        return seen

    handles = [
        anatomy.modules[layer.name].register_forward_hook(look(layer.name), prepend=True) for layer in plan.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copies(anatomy: Anatomy) -> dict[int, Tensor]:
    """Buffers to write to: what is done to them is looked at and dropped."""
    return {id(buffer): buffer.detach().clone() for buffer in anatomy.buffers.values()}


def _numbers_of_samples(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Two primes that are no size, nor a divisor of a size, of a parameter, a buffer or the batch."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    sizes = {size for tensor in tensors for size in tensor.shape if size > 1}
    free = [prime for prime in _PRIMES if all(size % prime for size in sizes)]
    no_size = [prime for prime in _PRIMES if prime not in sizes and prime not in free]
    first, second = [*free, *no_size, 53, 59][:2]
    return first, second


def _some(batch: Any, samples: int) -> Any:
    """So many of a batch's samples, some twice where it has fewer; the last is the first again."""
    size = batch_size(batch)
    return picked(batch, [index % max(1, min(size, samples - 1)) for index in range(samples)])


def _backward_hooks(model: nn.Module) -> str | None:
    """The name of a parameter or module with a hook in the backward pass: a copy would not have it."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the parameter {name!r}"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"the module {name!r}"
    return None


def _refuse_own_functions(loss: Tensor) -> None:
    """A custom `autograd.Function` may do in its backward pass what it likes."""
    for node in nodes_of(loss):
        if isinstance(node, BackwardCFunction) and not type(node).__module__.startswith("torch."):
            raise Unknown(f"{node.name()} is an autograd.Function with a backward pass of its own")


@contextmanager
def _generators_watched() -> Iterator[None]:
    """Draws from Python's and NumPy's generators cannot be made constant."""
    with other_libraries_watched() as drawn_from:
        yield
    if drawn_from:
        raise Unknown(f"draws from {drawn_from[0]} generator")


def _explained(error: Exception, observer: Observer | None) -> Finding:
    """What fails after a request for other samples' data fails because of it."""
    operation, of_numbers = ("", False) if observer is None else (observer.operation, observer.of_numbers)
    frames, asks = traceback.extract_tb(error.__traceback__), asks_for_others(error)
    if observer is not None and observer.request is not None:
        asks = True
        error, operation, of_numbers, frames = observer.request
    users = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, contextlib.__file__))]
    where = f" ({Path(users[-1].filename).name}, line {users[-1].lineno}: {users[-1].line})" if users else ""
    if isinstance(error, SamplesMeet):
        return Finding(samples_meet=True, reason=f"{operation} {error}{where}")
    if isinstance(error, Unknown):
        return Finding(reason=f"{error}{where}")
    if asks:
        name = operation.removeprefix("aten.").split(".")[0]
        # tokens sorted by their experts' numbers may all come back to their samples: marks and the watch look at it
        layout = name in _LAYOUTS or (name in ("sort", "argsort") and of_numbers)
        hint = _ROWS_BY_NUMBER if name.startswith(("index", "gather", "scatter")) else ""
        return Finding(samples_meet=not layout, reason=f"{operation} needs the data of several samples{where}{hint}")
    return Finding(reason=f"{operation} has no rule ({type(error).__name__}){where}")
