"""What the layers with rules took and gave in a forward pass, and whether it can stand for their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pmlf.engine.anatomy import Anatomy
from pmlf.engine.arithmetic import full_precision
from pmlf.engine.graph import nodes_of
from pmlf.engine.layers import Statistics, UnsupportedModel
from pmlf.engine.marks import alike
from pmlf.engine.plan import Plan, RuledLayer
from pmlf.engine.questions import Questions


class Seen(NamedTuple):
    """One call of a layer with a rule, in the forward pass."""

    layer: RuledLayer
    module: nn.Module
    args: tuple[Any, ...]
    named_args: dict[str, Any]
    shape: torch.Size  # of the output, with its batch axis
    statistics: Statistics | None  # of a GroupNorm

    @property
    def described(self) -> str:
        return f"layer {self.layer.name!r} ({type(self.module).__name__})"


@dataclass
class Recorder:
    """What the hooks of one forward pass saw."""

    samples: int
    recording: bool = True
    seen: list[Seen] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    versions: list[list[tuple[Tensor, int]]] = field(default_factory=list)
    without_grad: list[str] = field(default_factory=list)

    def hook(self, layer: RuledLayer) -> Callable[..., Any]:
        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Tensor | None:
            if not self.recording:
                return None
            if not torch.is_grad_enabled():
                self.without_grad.append(layer.name)
                return None
            result = self._with_batch_axis(layer, module, output)
            if not result.requires_grad:
                return None
            args, named = tuple(map(_detached, args)), {key: _detached(value) for key, value in named.items()}
            statistics = _statistics(result) if isinstance(module, nn.GroupNorm) else None
            self.seen.append(Seen(layer, module, args, named, result.shape, statistics))
            whole = _whole(result)
            self.edges.append(get_gradient_edge(whole))
            needs_input = set(layer.own) != {"bias"}
            fixed = [t for t in (*args, *named.values()) if isinstance(t, Tensor)] if needs_input else []
            if whole._is_view() and whole is output:  # an in-place change would go around the edge
                fixed.append(whole.detach())
            self.versions.append([(tensor, tensor._version) for tensor in fixed])
            return result if result is not output else None

        return record

    def _with_batch_axis(self, layer: RuledLayer, module: nn.Module, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise UnsupportedModel(
                f"layer {layer.name!r} ({type(module).__name__}) has parameters of its own, no rule, and returns a "
                f"{type(output).__name__} instead of a tensor: freeze it or build it from layers with rules"
            )
        leading = output.shape[0] if output.ndim else 0
        if leading == 1 and self.samples > 1:  # position embeddings: no batch axis of their own
            return output.expand(self.samples, *output.shape[1:])
        if leading == 0 or leading % self.samples:
            raise UnsupportedModel(
                f"axis 0 of what layer {layer.name!r} ({type(module).__name__}) returned, an output with "
                f"{output.ndim} axes, does not count the samples: put the batch first (batch_first=True where the "
                "module has it, a leading axis of 1 for positions)"
            )
        return output

    def refuse_changed_inputs(self) -> None:
        for seen, fixed in zip(self.seen, self.versions, strict=True):
            if any(tensor._version != version for tensor, version in fixed):
                raise UnsupportedModel(
                    f"the input of layer {seen.layer.name!r} ({type(seen.module).__name__}), or its output where "
                    "that is a view, was changed in place after the layer ran: make that operation out of place"
                )


@contextmanager
def hooked(anatomy: Anatomy, plan: Plan, recorder: Recorder) -> Iterator[None]:
    handles = []
    try:
        for layer in plan.layers:
            module = anatomy.modules[layer.name]
            # First in line: a user's own hook may change the output, and its factor belongs to the gradient.
            handles.append(module.register_forward_hook(recorder.hook(layer), with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_rows_of_others(
    name: str, grad: Tensor | None, marked: Tensor | None, marks: Tensor, questions: Questions
) -> None:
    """Rows are taken to be the samples' own, as many of each, one sample after the other: then each scales with the
    mark of the loss that it is taken for. Rows picked from all samples (`x[mask]`) do not, however many they are."""
    if grad is None or marked is None:
        return
    each = grad.shape[0] // len(marks) if grad.shape[0] % len(marks) == 0 else 1
    rows, scaled = (full_precision(tensor).reshape(each * len(marks), -1) for tensor in (grad, marked))
    wrong = ~alike(scaled, rows, marks.repeat_interleave(each), 1e-2).all()

    def refuse() -> None:
        raise UnsupportedModel(
            f"the rows of {name} are not the samples' own, as many of each, one sample after the other: put the batch "
            "first, keep its order, and mask rows instead of picking them"
        )

    questions.refuse(wrong, refuse)


def refuse_reentrant_checkpoint(loss: Tensor, what: str) -> None:
    for node in nodes_of(loss):
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedModel(
                f"{what} runs under reentrant checkpointing, which hides its gradient: checkpoint with "
                "use_reentrant=False"
            )


def _whole(output: Tensor) -> Tensor:
    """Where to take the gradient of an output: at its base where it is a reshape of that.

    `Linear` on more than two axes returns such a view, and an in-place activation on a view goes around the view's own
    node in the graph, but not around its base's.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base


def _statistics(output: Tensor) -> Statistics | None:
    """What a GroupNorm has just saved for its backward pass; None where somebody else, a checkpoint for one, looks
    after what is saved, where it is in half precision, or where another torch calls it by other names."""
    node: Any = output.grad_fn
    if node is None or node.name() != "NativeGroupNormBackward0":
        return None
    found: list[Tensor] = []

    def look(saved: Tensor) -> Tensor:
        found.append(saved)
        return saved

    try:
        for saved in (node._raw_saved_result1, node._raw_saved_result2):
            saved.register_hooks(look, lambda kept: kept)  # calls `look` at once
    except (AttributeError, RuntimeError):  # not there, or it has hooks
        return None
    mean, inverse = found
    return (mean, inverse) if full_precision(mean) is mean else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
