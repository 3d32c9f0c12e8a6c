"""Run a loss at an evaluation point and bring back each layer's input and output gradient; no weight gradients.

What is silently wrong elsewhere and handled here: the gradient at an output *tensor* after an in-place activation (it
is taken at the gradient edge); checkpointed layers recomputed with other parameters (the backward pass runs inside the
parameter swap) or recorded twice (hooks record in the forward pass only); autocast's cache of another point's weights;
autocast around all of it, which would round norms and sums too (it serves the loss alone); buffers and frozen
parameters rewritten from the data; an input changed in place after a layer used it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pmlf.half_precision import without_autocast
from pmlf.layers import Call, Contribution, Rule, by_vmap, rule_for

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A module whose own parameters are trained: its local parameter names and their names in the model."""

    name: str
    own: Mapping[str, str]
    rule: Rule | None  # None: by vmap


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every trainable parameter of a model gets its per-sample gradient; made once, holds names only."""

    parameters: tuple[str, ...]
    watched: tuple[Watched, ...]
    expanded: frozenset[str]  # bare parameters of leading size 1, replaced by one copy a sample
    convolved: frozenset[str]  # weights of 2d convolutions, which are faster in channels-last order

    @classmethod
    def of(cls, model: nn.Module) -> Plan:
        """Decide for every trainable parameter; one that has no safe way is an error that names it."""
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if not names:
            raise ValueError("every parameter of the model is frozen: set requires_grad on those to train")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}, and noise is real: keep its real and imaginary parts as "
                    "a real parameter (torch.view_as_real) and join them in forward"
                )
        watched: list[Watched] = []
        expanded: set[str] = set()
        convolved: set[str] = set()
        for module_name, module in model.named_modules():
            own = {local: names[id(p)] for local, p in module._parameters.items() if p is not None and id(p) in names}
            if not own:
                continue
            rule = rule_for(module)
            if rule is not None and isinstance(module, nn.Conv2d):
                convolved.update(name for local, name in own.items() if local == "weight")
            if rule is None:
                bare = {local: name for local, name in own.items() if not _expands(module._parameters[local])}
                expanded.update(name for local, name in own.items() if local not in bare)
                if bare and module is model:
                    raise ValueError(
                        f"parameter {next(iter(bare.values()))!r} belongs to the model itself and has no batch axis of "
                        "size 1: give it one (shape (1, ...)), or move it with the code that uses it into a submodule"
                    )
                own = bare
            if own:
                watched.append(Watched(name=module_name, own=own, rule=rule))
        by_rule = {name for module in watched if module.rule is not None for name in module.own.values()}
        by_vmap = {name for module in watched if module.rule is None for name in module.own.values()}
        clash = (expanded & by_rule) | (expanded & by_vmap) | (by_rule & by_vmap)
        if clash:
            raise ValueError(
                f"parameter {min(clash)!r} is shared between layers with a rule and without: give each its own"
            )
        return cls(
            parameters=tuple(names.values()),
            watched=tuple(watched),
            expanded=frozenset(expanded),
            convolved=frozenset(convolved),
        )


def _expands(parameter: Tensor | None) -> bool:
    """Class tokens and position tables: shape (1, ...). A bare (1,) is a scalar in disguise, not a batch axis."""
    return parameter is not None and parameter.ndim >= 2 and parameter.shape[0] == 1


class _Seen(NamedTuple):
    """One call of a watched module, in the forward pass."""

    watched: Watched
    module: nn.Module
    args: tuple[Any, ...]
    named_args: dict[str, Any]
    shape: torch.Size  # of the output, with its batch axis
    output: Tensor | None  # where the layer has no rule


@dataclass
class _Recorder:
    """What the hooks of one forward pass saw."""

    samples: int
    recording: bool = True
    seen: list[_Seen] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    versions: list[list[tuple[Tensor, int]]] = field(default_factory=list)
    without_grad: list[str] = field(default_factory=list)

    def hook(self, watched: Watched) -> Callable[..., Any]:
        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Tensor | None:
            if not self.recording:
                return None
            if not torch.is_grad_enabled():
                self.without_grad.append(watched.name)
                return None
            result = self._with_batch_axis(watched, module, output)
            if not result.requires_grad:
                return None
            args, named = tuple(map(_detached, args)), {key: _detached(value) for key, value in named.items()}
            # a copy: what comes after the layer may change its output in place
            kept = result.detach().clone() if watched.rule is None and len(args) + len(named) > 1 else None
            self.seen.append(_Seen(watched, module, args, named, result.shape, kept))
            whole = _whole(result)
            self.edges.append(get_gradient_edge(whole))
            needs_input = watched.rule is None or set(watched.own) != {"bias"}
            fixed = [t for t in (*args, *named.values()) if isinstance(t, Tensor)] if needs_input else []
            if whole._is_view() and whole is output:  # an in-place change would go around the edge
                fixed.append(whole.detach())
            self.versions.append([(tensor, tensor._version) for tensor in fixed])
            return result if result is not output else None

        return record

    def _with_batch_axis(self, watched: Watched, module: nn.Module, output: Any) -> Tensor:
        what = f"layer {watched.name!r} ({type(module).__name__})"
        if not isinstance(output, Tensor):
            raise ValueError(
                f"{what} has parameters of its own, no rule, and returns a {type(output).__name__} instead of a "
                "tensor: freeze it or build it from layers with rules"
            )
        leading = output.shape[0] if output.ndim else 0
        if leading == 1 and self.samples > 1:  # position embeddings: no batch axis of their own
            return output.expand(self.samples, *output.shape[1:])
        if leading == 0 or leading % self.samples:
            raise ValueError(
                f"axis 0 of what {what} returned, an output with {output.ndim} axes, does not count the samples: put "
                "the batch first (batch_first=True where the module has it, a leading axis of 1 for positions)"
            )
        return output

    def forget(self) -> None:
        self.seen, self.edges, self.versions = [], [], []

    def refuse_changed_inputs(self) -> None:
        for seen, fixed in zip(self.seen, self.versions, strict=True):
            if any(tensor._version != version for tensor, version in fixed):
                raise ValueError(
                    f"the input of layer {seen.watched.name!r} ({type(seen.module).__name__}), or its output where "
                    "that is a view, was changed in place after the layer ran: make that operation out of place"
                )


@contextmanager
def _swapped(model: nn.Module, replacements: Mapping[int, Tensor]) -> Iterator[None]:
    """The model with other tensors in place of its parameters and buffers, by their ids, wherever each is used."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in owned:
                if tensors:
                    saved.append((tensors, dict(tensors)))
                    for name, tensor in tensors.items():
                        tensors[name] = replacements.get(id(tensor), tensor)
        yield
    finally:
        for tensors, before in saved:
            tensors.clear()
            tensors.update(before)


def capture(
    model: nn.Module,
    plan: Plan,
    values: Mapping[str, Tensor],
    loss_fn: LossFunction,
    batch: Any,
    samples: int,
    weight: float,
) -> Iterator[tuple[str, Contribution]]:
    """weight * (per-sample gradients of the loss at the parameters `values`), as (parameter, contribution) pairs."""
    leaves = {name: _leaf(plan, name, value, samples).requires_grad_() for name, value in values.items()}
    buffers = dict(model.named_buffers())
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    parameters = dict(model.named_parameters())
    frozen = {name: (p, p._version) for name, p in parameters.items() if not p.requires_grad}
    originals = {**parameters, **buffers}
    replacements = {id(originals[name]): tensor for name, tensor in {**leaves, **copies}.items()}
    recorder = _Recorder(samples)
    with _hooked(model, plan, recorder), _no_autocast_cache(), _swapped(model, replacements):
        loss = per_sample_loss(_called(loss_fn, model, batch, plan), samples)
        recorder.recording = False
        if recorder.without_grad:
            _refuse_reentrant_checkpoint(loss, recorder.without_grad)
        wanted: list[Any] = [*recorder.edges, *(leaves[name] for name in sorted(plan.expanded))]
        if not wanted:
            raise ValueError(
                f"no layer with trained parameters ran, and {plan.parameters[0]!r}, for example, was used in another "
                "way: keep parameters in the module whose forward uses them"
            )
        grads = torch.autograd.grad(loss, wanted, grad_outputs=torch.full_like(loss, weight), allow_unused=True)
        now = dict(model.named_buffers())
        rewritten = [n for n, copy in copies.items() if now.get(n) is not copy or not same_bits(copy, buffers[n])]
    del loss, wanted
    rewritten += [name for name, (parameter, version) in frozen.items() if parameter._version != version]
    if rewritten:
        raise rewritten_by_forward(rewritten[0])
    recorder.refuse_changed_inputs()

    bare = grads[len(recorder.seen) :]
    calls = deque(zip(recorder.seen, grads[: len(recorder.seen)], strict=True))
    del grads
    recorder.forget()
    while calls:  # what a layer has served for is let go before the next one
        seen, grad = calls.popleft()
        if grad is None:
            continue
        own = seen.watched.own
        call = Call(
            name=seen.watched.name,
            module=seen.module,
            args=seen.args,
            named_args=seen.named_args,
            grad=grad.detach().reshape(seen.shape),
            samples=samples,
            output=seen.output,
        )
        with without_autocast():
            if seen.watched.rule is not None:
                found = seen.watched.rule(call, own)
            else:
                found = by_vmap(call, own, _module_values(model, seen.module, values))
        del seen, grad, call
        for local in list(found):
            yield own[local], found.pop(local)
    for name, grad in zip(sorted(plan.expanded), bare, strict=True):
        if grad is not None:
            yield name, grad.detach().clone()  # autograd may give two parameters views of one tensor


def _called(loss_fn: LossFunction, model: nn.Module, batch: Any, plan: Plan) -> Any:
    try:
        return loss_fn(model, batch)
    except (RuntimeError, ValueError) as error:
        if not plan.expanded:
            raise
        raise ValueError(
            f"loss_fn failed where parameters of leading size 1 ({', '.join(sorted(plan.expanded))}) have a copy for "
            "every sample: let them broadcast, or use .expand(samples, ...) in place of repeat, tile and cat"
        ) from error


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one kind hold the same, NaN counted: `.data` changes a tensor without a new version."""
    dense = (
        tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense() for tensor in (one, other)
    )
    first, second = (tensor.reshape(-1).view(torch.uint8) for tensor in dense)
    return torch.equal(first, second)


def rewritten_by_forward(name: str) -> ValueError:
    return ValueError(
        f"{name!r}, a buffer or a frozen parameter, was rewritten by the forward pass: it would carry the data without "
        "noise; remove what rewrites it (running statistics, counters) or put that module in eval mode"
    )


def _leaf(plan: Plan, name: str, value: Tensor, samples: int) -> Tensor:
    """A point's parameter as a leaf of its own graph."""
    if name in plan.expanded:
        return value.detach().expand(samples, *value.shape[1:])
    if name in plan.convolved and value.device.type != "mps":  # convolutions follow their weights' layout
        return value.detach().contiguous(memory_format=torch.channels_last)
    return value.detach()


def per_sample_loss(result: Any, samples: int) -> Tensor:
    """The loss as one number a sample; several losses are added sample by sample."""
    parts = list(result.values()) if isinstance(result, Mapping) else result
    parts = list(parts) if isinstance(parts, (tuple, list)) else [parts]
    for part in parts:
        if not isinstance(part, Tensor):
            raise ValueError(
                f"loss_fn returned a {type(part).__name__}: return a tensor with one loss a sample, for example "
                "F.cross_entropy(model(x), y, reduction='none')"
            )
        if part.ndim == 0:
            raise ValueError(
                "loss_fn returned a scalar, the mean or sum over the batch: return one loss a sample, for example "
                "F.cross_entropy(logits, labels, reduction='none'); a Hugging Face model's own .loss is such a mean, "
                "take its .logits instead"
            )
        if part.shape != (samples,):
            raise ValueError(
                f"loss_fn returned a tensor with {part.ndim} axes that is not one loss a sample: return shape "
                "(samples,), summing or averaging over every axis but the first"
            )
    if not parts:
        raise ValueError("loss_fn returned no loss: return a tensor with one loss a sample")
    loss: Tensor = sum(parts[1:], start=parts[0])
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: loss_fn must call the model it is given, with "
            "gradients on (no torch.no_grad)"
        )
    return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss


def _module_values(model: nn.Module, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All parameters of one module, by their names in it, at the evaluation point."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        local: values.get(names[id(p)], p.detach()).detach()
        for local, p in module.named_parameters(remove_duplicate=False)
    }


@contextmanager
def _hooked(model: nn.Module, plan: Plan, recorder: _Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        for watched in plan.watched:
            module = model.get_submodule(watched.name)
            # First in line: a user's own hook may change the output, and its factor belongs to the gradient.
            handle = module.register_forward_hook(recorder.hook(watched), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(enabled)


def _refuse_reentrant_checkpoint(loss: Tensor, layers: Sequence[str]) -> None:
    waiting: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                f"layer {layers[0]!r} runs under reentrant checkpointing, which hides its gradient: checkpoint with "
                "use_reentrant=False"
            )
        waiting.extend(next_node for next_node, _ in node.next_functions)


def _whole(output: Tensor) -> Tensor:
    """Where to take the gradient of an output: at its base where it is a reshape of that.

    `Linear` on more than two axes returns such a view, and an in-place activation on a view goes around the view's own
    node in the graph, but not around its base's.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
