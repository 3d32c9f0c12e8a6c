"""Per-sample gradients of a pass, taken at the operations in which weights meet samples."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pmlf.basics.batches import tensors_of
from pmlf.engine.half_precision import without_autocast
from pmlf.engine.layers import Contribution, UnsupportedModel
from pmlf.engine.losses import checked_losses, no_autocast_cache
from pmlf.engine.marks import all_marks
from pmlf.engine.operations.layouts import Layout, Learned, fits, laid_out, picked
from pmlf.engine.operations.rewritten import REWRITTEN, in_place
from pmlf.engine.operations.rules import RULES, by_autograd
from pmlf.engine.operations.uses import Use, Uses, functions_entered
from pmlf.engine.operations.weights import Weights, of_its_kind
from pmlf.engine.passes import Pass
from pmlf.engine.recording import refuse_reentrant_checkpoint
from pmlf.engine.swap import stand_ins, swapped

HANDLERS: dict[str, Any] = {**RULES, **REWRITTEN, "in place": in_place, "by autograd": by_autograd}
_ATTEMPTS = 64  # tables that look like samples by chance, each found by an attempt


def taken_at_operations(one: Pass) -> Iterator[tuple[str, Contribution]]:
    """The per-sample gradients that a pass asks for, as (parameter, contribution) pairs.

    Whose a row is follows from what was learned about its use, where the rows are proven to be "their own", and is
    found by marks otherwise. A row that is nobody's alone is an error.
    """
    for _ in range(_ATTEMPTS):
        weights, taken, chance = _uses_with_gradients(one)
        if chance is None:
            break
        one.plan.learned.shared.add(chance)
    else:
        raise UnsupportedModel(
            f"more than {_ATTEMPTS} tables made of parameters have as many rows as there are samples, {one.samples}, "
            "and are shared by them: use another micro-batch size"
        )
    while taken:
        use, grad, layout = taken.popleft()
        for number, weight in enumerate(use.weights):
            with without_autocast(), torch.no_grad(), _rules_explained(use):
                found = of_its_kind(use.take(number, grad, layout), weight)
            yield from weights.carried(weight, found)
            del found
        del use, grad
    with without_autocast():
        yield from weights.pulled_back()


@contextmanager
def _rules_explained(use: Use) -> Iterator[None]:
    """An error of a rule says which operation it is about; what torch said is quoted without numbers, which may count
    the samples."""
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = re.sub(r"[0-9]+", "n", str(error).split("\n")[0])
        raise UnsupportedModel(
            f"the rule of {use.key.operation} of {use.key.weights[0]!r} does not know this form "
            f"({type(error).__name__}: {said})"
        ) from error


def _uses_with_gradients(one: Pass) -> tuple[Weights, deque[tuple[Use, Tensor, Layout]], int | None]:
    """The uses of a forward pass, each with the gradient at its output and whose its rows are.

    The third is a table that is no sample value though it has as many rows: everything is to be done again.
    """
    anatomy, samples, learned = one.anatomy, one.samples, one.plan.learned
    leaves = {name: value.detach().requires_grad_() for name, value in one.values.items()}
    versions = [(name, parameter, parameter._version) for name, parameter in anatomy.parameters.items()]
    weights = Weights(leaves)
    mode = Uses(weights, tensors_of(one.batch), samples, learned.shared, HANDLERS)
    with no_autocast_cache(), swapped(anatomy, stand_ins(anatomy, leaves)) as swap, functions_entered(), mode:
        loss = checked_losses(one.loss_fn(anatomy.model, one.batch), samples)
        mode.recording = False  # a checkpoint runs its part once more, with the same stand-ins
        if not mode.uses:
            raise ValueError(
                f"no operation uses a trained parameter and the samples, {one.plan.parameters[0]!r}, for example: "
                "loss_fn must call the model that it is given; if the parameters go through torch.jit or your own "
                'autograd.Function, give gradients="one-by-one"'
            )
        known = [learned.layout(use.key, use.shape, samples) for use in mode.uses]
        marking = samples > 1 and (one.rows == "marked" or None in known)
        edges = [use.edge for use in mode.uses]
        wanted: list[Any] = [*edges, *leaves.values()]
        try:
            ones = torch.full_like(loss, one.weight)
            grads = torch.autograd.grad(loss, wanted, ones, allow_unused=True, retain_graph=marking)
        except RuntimeError:
            refuse_reentrant_checkpoint(loss, "a part of the model")
            raise
        _refuse_leaks(leaves, grads[len(edges) :])
        layouts, chance = (known, None) if not marking else _found(loss, one.weight, mode.uses, grads, known, learned)
    del loss
    swap.written += [name for name, parameter, version in versions if parameter._version != version]
    swap.refuse_written(one.questions)
    for use in mode.uses:
        if any(tensor._version != version for tensor, version in use.kept):
            raise UnsupportedModel(
                f"the input of {use.key.operation} of {use.key.weights[0]!r} was changed in place after it ran: make "
                "that operation out of place"
            )
    taken = deque[tuple[Use, Tensor, Layout]]()
    for use, grad, layout in zip(mode.uses, grads, layouts, strict=False):
        if grad is not None and layout is not None:
            taken.append((use, grad.reshape(use.shape if use.shape else (1,)), layout))
    return weights, taken, chance


def _found(
    loss: Tensor,
    weight: float,
    uses: list[Use],
    grads: tuple[Tensor | None, ...],
    known: list[Layout | None],
    learned: Learned,
) -> tuple[list[Layout | None], int | None]:
    """The layout of every use by marks; None where all gradients are zero. And a table that is shared, if there is."""
    marks, edges = all_marks(loss), [use.edge for use in uses]
    passes = [torch.autograd.grad(loss, edges, weight * own, allow_unused=True, retain_graph=True) for own in marks]
    layouts: list[Layout | None] = [None] * len(uses)
    open_questions: list[int] = []
    pairs: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for number, (use, grad, *scaled) in enumerate(zip(uses, grads, *passes, strict=False)):
        marked = [each.reshape(use.shape) for each in scaled if each is not None]
        if grad is not None and marked:
            pairs[number] = grad.reshape(use.shape), marked
    flags = [each for n, (grad, marked) in pairs.items() for each in (grad.any(), fits(grad, marked, marks, known[n]))]
    answers = iter(torch.stack(flags).tolist() if flags else [])  # one read, for all uses
    for number, (grad, marked) in pairs.items():
        there, fitting = next(answers), next(answers)
        if not there:
            continue
        layout = known[number] if fitting else laid_out(grad, marked, marks)
        layouts[number] = layout
        if layout is None:
            open_questions.append(number)
        else:
            learned.layouts[uses[number].key] = layout
    chance = next((uses[number].key.question for number in open_questions if uses[number].presumed), None)
    if chance is None:
        for number in open_questions:
            layouts[number] = _picked_layout(uses[number], *pairs[number], len(loss))
    return layouts, chance


def _picked_layout(use: Use, grad: Tensor, marked: list[Tensor], samples: int) -> Layout:
    """The layout of rows that were picked."""
    layout = picked(grad, marked, samples)
    if layout is None:
        raise UnsupportedModel(
            f"the rows of {use.key.operation} of {use.key.weights[0]!r} are not the samples' own: keep all of a "
            "sample along one axis, and compute nothing across samples"
        )
    return layout


def _refuse_leaks(leaves: Mapping[str, Tensor], grads: tuple[Tensor | None, ...]) -> None:
    for name, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            raise UnsupportedModel(
                f"parameter {name!r} reaches the loss by an operation that is not seen (torch.jit, an "
                "autograd.Function, a reentrant checkpoint, another library's kernel): build it from torch's functions"
            )
