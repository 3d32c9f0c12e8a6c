"""Sees every torch function of a forward pass, and records those in which a weight meets the samples.

A tensor is a *weight* if it was computed from parameters and not from samples, a *sample value* if it was computed from
the batch, and a constant otherwise. Where a weight meets a sample value is a *use*. There the weight is replaced by a
detached stand-in, so that the loss's graph reaches no parameter, and the gradient is taken at the operation's output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pmlf.engine.layers import Contribution, UnsupportedModel
from pmlf.engine.operations.elementwise import reduced
from pmlf.engine.operations.layouts import Key, Layout
from pmlf.engine.operations.weights import Weights

# What a use says about its weight number i, given the gradient at its output and whose its rows are.
Take = Callable[[int, Tensor, Layout], Contribution]

# Tensors that are made like others and hold none of their values.
_MADE_LIKE = frozenset(
    [
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
    ]
)
_CONVERTED = frozenset(["to", "type_as"])  # to the precision and the device of another tensor
_UNKNOWN_FORM = (TypeError, IndexError, KeyError, AttributeError, AssertionError)  # of arguments, in a rule
_NAMES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Use(NamedTuple):
    """One operation in which weights meet samples."""

    key: Key
    weights: tuple[Tensor, ...]
    shape: torch.Size
    edge: GradientEdge
    take: Take
    kept: list[tuple[Tensor, int]]  # what `take` looks at, and the versions that it must still have
    presumed: bool  # whether the samples are presumed from a shape alone


@contextmanager
def functions_entered() -> Iterator[None]:
    """Functions of torch that are written in Python show a mode the operations that they are made of, not themselves:
    `multi_head_attention_forward` is four products, `layer_norm` one operation, whoever calls it."""
    with ExitStack() as stack:
        for module in (torch.nn.functional, torch.functional, torch._tensor, torch.autograd):
            for name in _NAMES:
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, _never))
        yield


def _never(*values: Any) -> bool:
    return False


class Uses(TorchFunctionMode):
    """The uses of a forward pass.

    Args:
        weights: The parameters of the pass.
        batch: The tensors that hold the samples.
        samples: How many there are.
        shared: Questions about presumed rows, by number, that are answered: they are not the samples'.
        handlers: What is done with an operation of this name that weights and samples meet in.
    """

    def __init__(
        self,
        weights: Weights,
        batch: Iterable[Tensor],
        samples: int,
        shared: set[int],
        handlers: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.weights, self.samples, self._shared, self._handlers = weights, samples, shared, handlers
        self.recording = True
        self.uses: list[Use] = []
        self._questions = 0
        self._of_samples: dict[int, weakref.ref[Tensor]] = {}
        for tensor in batch:
            self.mark(tensor)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
        weights = [tensor for tensor in tensors if tensor in self.weights]
        if not weights:
            out = func(*args, **kwargs)
            self._tag(func, out, tensors)
            return out
        operation = func.__name__
        if operation == "__get__" or operation in _MADE_LIKE:
            return self._of_weights(func, operation, args, kwargs)
        with_samples = any(tensor not in self.weights and self.is_sample(tensor) for tensor in tensors)
        if operation.endswith("_") and not operation.endswith("__"):
            written = args[0] not in self.weights and (
                with_samples or self.presumes(args[0].shape[0] if args[0].ndim else 0)
            )
            if written or with_samples:
                return self._handlers["in place"](self, func, args, kwargs)
            return self._of_weights(func, operation, args, kwargs)
        if with_samples or operation in self._handlers:
            handler = self._handlers.get(operation)
            if handler is not None:
                found = self._handled(handler, func, args, kwargs, with_samples)
                if found is not NotImplemented:
                    return found
            if with_samples:
                return self.use(func, args, kwargs)
        return self._of_weights(func, operation, args, kwargs)

    def _handled(self, handler: Callable[..., Any], func: Any, args: Any, kwargs: Any, with_samples: bool) -> Any:
        """The output of an operation by its rule; NotImplemented for a form of call that the rule does not know."""
        before = len(self.uses)
        try:
            return handler(self, func, args, kwargs, with_samples)
        except _UNKNOWN_FORM:
            if func.__name__ == "__setitem__":
                raise
            del self.uses[before:]
            with torch.no_grad():
                func(*args, **kwargs)  # an error of the user's own comes up as itself
            return NotImplemented

    # what tensors are

    def is_sample(self, tensor: Tensor) -> bool:
        """Whether a tensor that is no weight was computed from the samples."""
        if tensor.requires_grad:
            return True
        known = self._of_samples.get(id(tensor))
        return known is not None and known() is tensor

    def mark(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed from the samples."""
        self._of_samples[id(tensor)] = weakref.ref(tensor)

    def _tag(self, func: Any, out: Any, tensors: Sequence[Tensor]) -> None:
        if isinstance(out, Tensor):
            if out.requires_grad or not tensors:
                return
        elif not isinstance(out, (tuple, list)):
            return
        values = tensors[:1] if func.__name__ in _CONVERTED else tensors
        if func.__name__ in _MADE_LIKE or not any(self.is_sample(tensor) for tensor in values):
            return
        for found in tensors_in((out,)):
            if not found.requires_grad:
                self.mark(found)

    def presumes(self, rows: int) -> bool:
        """Whether so many rows are taken for the samples'. Where marks show that they are not, they are `shared`."""
        self._questions += 1
        return self.samples > 1 and rows % self.samples == 0 and rows > 0 and self._questions not in self._shared

    # what is done

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of several operations, each of which is seen."""
        with self:
            return function(*args, **kwargs)

    def _of_weights(self, func: Any, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on weights and constants makes a weight."""
        out = func(*args, **kwargs)
        copied = args[0] if operation in _COPIES and args and args[0] in self.weights else None
        for found in tensors_in((out,)):
            if found.requires_grad and found not in self.weights:
                self.weights.add(found, copied if copied is not None and copied.shape == found.shape else None)
        if operation.endswith("_") and args and isinstance(args[0], Tensor) and args[0]._base is not None:
            self.weights.add(args[0]._base)
        return out

    def use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        take: Take | None = None,
        needs: Sequence[Tensor] | None = None,
        *,
        presumed: bool = False,
    ) -> Any:
        """Run an operation with stand-ins for its weights, and record it.

        Args:
            func: The operation.
            args: Its arguments.
            kwargs: Its arguments by name.
            take: What it says about its weights; by default what autograd says, one sample after the other.
            needs: The tensors that `take` looks at; by default all.
            presumed: Whether its samples are presumed from a shape alone.
        """
        tensors = list(tensors_in((*args, *kwargs.values())))
        weights = tuple({id(tensor): tensor for tensor in tensors if tensor in self.weights}.values())
        others = [tensor for tensor in tensors if tensor not in self.weights]
        cut = not any(tensor.requires_grad for tensor in others)
        stand_ins = {id(weight): weight.detach().requires_grad_(cut) for weight in weights}
        given, named = _replaced((args, kwargs), stand_ins)
        out = func(*given, **named)
        if not torch.is_grad_enabled():
            for found in tensors_in((out,)):
                self.mark(found)
            return out
        if not isinstance(out, Tensor):
            raise UnsupportedModel(
                f"{func.__name__} uses {self.weights.name(weights[0])!r} and returns a {type(out).__name__}, not one "
                "tensor: build it from operations that return one"
            )
        operation = func.__name__ if take is not None else f"autograd of {func.__name__}"
        take = take or self._handlers["by autograd"](func, args, kwargs, weights)
        return self.record(operation, out, weights, take, others if needs is None else needs, presumed=presumed)

    def record(
        self,
        operation: str,
        out: Tensor,
        weights: tuple[Tensor, ...],
        take: Take,
        needs: Sequence[Tensor],
        *,
        presumed: bool = False,
    ) -> Tensor:
        """Record a use whose output is `out`, and give what stands for it from here on."""
        if not out.requires_grad or not self.recording:
            return out
        names = tuple(self.weights.name(weight) for weight in weights)
        key = Key(len(self.uses), operation, names, out.ndim, self._questions if presumed else 0)
        out = self.seen(key, out, presumed=presumed)
        base = out._base
        if base is not None and not (base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous()):
            out, base = out.clone(), None  # an in-place operation on another view would go around its edge
        edge = get_gradient_edge(out if base is None else base)
        kept = [(tensor.detach(), tensor._version) for tensor in needs]
        self.uses.append(Use(key, weights, out.shape, edge, take, kept, presumed))
        return out

    def seen(self, key: Key, out: Tensor, *, presumed: bool) -> Tensor:
        """What stands for the output of a use from here on."""
        return out


_COPIES = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "_to_copy"])


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among arguments, in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _replaced(values: Any, by_id: Mapping[int, Tensor]) -> Any:
    return tree_map(lambda value: by_id.get(id(value), value) if isinstance(value, Tensor) else value, values)


def rows_of(mode: Uses, weight: Tensor, sizes: list[int], *, presumed: bool) -> Tensor:
    """A weight expanded so that samples have rows of their own; from here on it is a sample value."""

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        return reduced([grad], grad.shape, weight.shape, layout)

    found: Tensor = mode.use(Tensor.expand, (weight, sizes), {}, take, [], presumed=presumed)
    return found
