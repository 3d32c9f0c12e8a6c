"""Run a loss at an evaluation point and bring back each layer's input and output gradient; no weight gradients.

What is silently wrong elsewhere and handled here: the gradient at an output *tensor* after an in-place activation (it
is taken at the gradient edge); checkpointed layers recomputed with other parameters (the backward pass runs inside the
parameter swap) or recorded twice (hooks record in the forward pass only); autocast's cache of another point's weights;
autocast around all of it, which would round norms and sums too (it serves the loss alone); buffers and frozen
parameters rewritten from the data; an input changed in place after a layer used it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pmlf.engine.half_precision import without_autocast
from pmlf.engine.layers import Call, Contribution
from pmlf.engine.losses import checked_losses, no_autocast_cache
from pmlf.engine.marks import all_marks
from pmlf.engine.passes import Pass
from pmlf.engine.plan import Plan
from pmlf.engine.questions import Questions
from pmlf.engine.recording import Recorder, Seen, hooked, refuse_reentrant_checkpoint, refuse_rows_of_others
from pmlf.engine.swap import stand_ins, swapped


def capture(one: Pass) -> Iterator[tuple[str, Contribution]]:
    """The per-sample gradients that a pass asks for, as (parameter, contribution) pairs.

    Of a single sample where the plan takes them one by one. Rows of layers that are proven to be the samples' own, in
    order, are taken as they are. Other rows are verified: further backward passes scale each sample's loss by marks of
    its own, and its rows must scale with them.
    """
    calls, of_bare = _calls_with_gradients(one)
    while calls:  # what a layer has served for is let go before the next one
        seen, grad = calls.popleft()
        if grad is None:
            continue
        own = seen.layer.own
        call = Call(
            name=seen.layer.name,
            module=seen.module,
            args=seen.args,
            named_args=seen.named_args,
            grad=grad.reshape(seen.shape),
            samples=one.samples,
            statistics=seen.statistics,
        )
        with without_autocast():
            found = seen.layer.rule(call, own)
        del seen, grad, call
        for local in list(found):
            yield own[local], found.pop(local)
    for name, grad in of_bare.items():
        if grad is not None:
            yield name, grad.unsqueeze(0)


def _calls_with_gradients(one: Pass) -> tuple[deque[tuple[Seen, Tensor | None]], dict[str, Tensor | None]]:
    """The calls of layers in a forward pass with the gradients at their outputs, and the gradients of
    parameters."""
    anatomy, plan, samples = one.anatomy, one.plan, one.samples
    assert samples == 1 or plan.gradients == "ghost"
    leaves = {name: _leaf(plan, name, value).requires_grad_() for name, value in one.values.items()}
    versions = [(name, parameter, parameter._version) for name, parameter in anatomy.parameters.items()]
    recorder, questions = Recorder(samples), one.questions or Questions()
    with hooked(anatomy, plan, recorder), no_autocast_cache(), swapped(anatomy, stand_ins(anatomy, leaves)) as swap:
        loss = checked_losses(one.loss_fn(anatomy.model, one.batch), samples)
        recorder.recording = False
        if recorder.without_grad:
            refuse_reentrant_checkpoint(loss, f"layer {recorder.without_grad[0]!r}")
        bare = sorted(leaves) if plan.gradients == "one-by-one" else []
        wanted: list[Any] = [*recorder.edges, *(leaves[name] for name in bare)]
        if not wanted:
            raise ValueError(
                f"no layer with trained parameters ran, and {plan.parameters[0]!r}, for example, was used in another "
                "way: keep parameters in the module whose forward uses them"
            )
        marking = one.rows == "marked" and samples > 1
        grads = torch.autograd.grad(
            loss, wanted, torch.full_like(loss, one.weight), allow_unused=True, retain_graph=marking
        )
        if marking:
            names = [seen.described for seen in recorder.seen]
            for marks in all_marks(loss):
                scaled = torch.autograd.grad(loss, wanted, one.weight * marks, allow_unused=True, retain_graph=True)
                for name, grad, marked in zip(names, grads, scaled, strict=True):
                    refuse_rows_of_others(name, grad, marked, marks, questions)
            del grad, marked, scaled
    del loss, wanted
    swap.written += [name for name, parameter, version in versions if parameter._version != version]
    swap.refuse_written(questions)
    recorder.refuse_changed_inputs()
    if one.questions is None:
        questions.answer()

    of_bare: dict[str, Tensor | None] = dict(zip(bare, grads[len(recorder.seen) :], strict=True))
    calls: deque[tuple[Seen, Tensor | None]] = deque(zip(recorder.seen, grads[: len(recorder.seen)], strict=True))
    return calls, of_bare


def _leaf(plan: Plan, name: str, value: Tensor) -> Tensor:
    """A point's parameter as a leaf of its own graph."""
    if name in plan.convolved and value.device.type != "mps":  # convolutions follow their weights' layout
        return value.detach().contiguous(memory_format=torch.channels_last)
    return value.detach()
