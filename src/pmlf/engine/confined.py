"""What vmap alone does not see to: samples stay apart, and nothing that is made of them outlives its pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from pmlf.engine.layers import VmapUnsupported

_OF_TORCH = ("aten", "prim", "prims")
_REFUSED = {
    torch.Tensor.data.__set__: "sets a tensor's .data, which vmap does not see: make that tensor anew",  # type: ignore[attr-defined]
    torch.Tensor.register_hook: "registers a hook on a tensor, which runs outside vmap: leave it out",
    torch.Tensor.register_post_accumulate_grad_hook: "registers a hook on a tensor, which runs outside vmap: leave it "
    "out",
    torch.Tensor.__repr__: "writes a tensor's numbers out as text: leave it out",
    torch.Tensor.__format__: "writes a tensor's numbers out as text: leave it out",
}


class Confined(TorchFunctionMode):
    """While it lasts, code that vmap does not map is refused: operations of one's own, which see all samples or each as
    a plain tensor, hooks of the backward pass, numbers written out."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = _REFUSED.get(function) or _own_operation(function, args)
        if reason is not None:
            raise VmapUnsupported(f"the forward pass {reason}")
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Raise VmapUnsupported at the end if a tensor that was made under vmap in between is still held by anybody.

    It carries samples, and the next pass would take its rows for those of its own samples. The garbage collector knows
    all tensors; while it is off, those made in between are in its youngest generation.
    """
    enabled, before = gc.isenabled(), _collections()
    gc.disable()
    try:
        yield
        left = _mapped_tensors(young=_collections() == before)
        if left:
            gc.collect()  # garbage is in nobody's hands
        if any(reference() is not None for reference in left):
            raise VmapUnsupported(
                "a tensor made in the forward pass is kept after it, in an attribute of a module, a list or a cache, "
                "where it carries samples from one pass to the next: return it instead of keeping it, or, if it is a "
                "constant made once, call the model once on a synthetic input before"
            )
    finally:
        if enabled:
            gc.enable()


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def _mapped_tensors(*, young: bool) -> list[weakref.ref[Tensor]]:
    """The tensors of vmap and grad that there are."""
    # by its type: an object may lie about its class, or compute it
    tensors = (each for each in gc.get_objects(0 if young else None) if issubclass(type(each), Tensor))
    return [weakref.ref(each) for each in tensors if _functorch.is_functorch_wrapped_tensor(each)]


def _own_operation(function: Any, args: Sequence[Any]) -> str | None:
    """Why a function that torch does not define itself, or that calls functions it is given, cannot be mapped."""
    if isinstance(function, HigherOrderOperator):
        given = args[0].__name__ if args and isinstance(args[0], type) else function.name()
        return (
            f"uses {given}, an autograd.Function, a hook of the backward pass or a higher-order operation, whose own "
            "code vmap does not see: build it from torch's functions"
        )
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    name = function.name() if isinstance(function, OpOverload) else function._qualified_op_name
    if name.split("::")[0] in _OF_TORCH:
        return None
    return f"uses {name}, an operation of your own, whose code vmap does not see: build it from torch's functions"
