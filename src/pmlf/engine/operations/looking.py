"""A look at a model's forward pass: which operations use each parameter, and whether layers alone do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pmlf.basics.batches import tensors_of
from pmlf.engine.layers import UnsupportedModel
from pmlf.engine.losses import no_autocast_cache
from pmlf.engine.operations.capture import HANDLERS
from pmlf.engine.operations.uses import Uses, functions_entered, tensors_in
from pmlf.engine.operations.weights import Weights
from pmlf.engine.passes import Pass
from pmlf.engine.swap import stand_ins, swapped


def operations_of(one: Pass) -> dict[str, set[str]]:
    """The names of the operations in which each parameter, or a weight made of it, meets the samples.

    "autograd of x" is an operation without a rule, which is run backwards for every sample.
    """
    mode = _looked_at(one)
    found: dict[str, set[str]] = {}
    for use in mode.uses:
        for weight in use.weights:
            for name in mode.weights.parameters_of(weight):
                found.setdefault(name, set()).add(use.key.operation)
    return found


def layers_suffice(one: Pass) -> bool:
    """Whether every use of a parameter, in a forward pass, is by the layer that it belongs to."""
    layers = [one.anatomy.modules[layer.name] for layer in one.plan.layers]
    try:
        return not _looked_at(one, layers).elsewhere
    except UnsupportedModel:
        return True  # then layers are all there is


class _Looked(Uses):
    """Sees whether a parameter is given to an operation outside of the layer that it belongs to."""

    def __init__(self, leaves: Mapping[str, Tensor], one: Pass) -> None:
        super().__init__(Weights(leaves), tensors_of(one.batch), one.samples, one.plan.learned.shared, HANDLERS)
        self._leaves = {id(leaf) for leaf in leaves.values()}
        self.running: list[nn.Module] = []
        self.elsewhere = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        given = {id(tensor) for tensor in tensors_in((*args, *(kwargs or {}).values()))} & self._leaves
        if given and any(tensor.requires_grad for tensor in tensors_in((out,))):
            own = self.running[-1]._parameters.values() if self.running else ()
            self.elsewhere |= not given <= {id(parameter) for parameter in own}
        return out


def _looked_at(one: Pass, layers: list[nn.Module] | None = None) -> _Looked:
    """A forward pass as the operations in it see it; with `layers`, also which of these runs."""
    anatomy = one.anatomy
    leaves = {name: value.detach().requires_grad_() for name, value in one.values.items()}
    mode = _Looked(leaves, one)

    def leave(layer: nn.Module, *given: Any) -> None:
        if mode.running and mode.running[-1] is layer:  # it is not if another hook has stopped it from running
            mode.running.pop()

    handles = [
        layer.register_forward_pre_hook(lambda layer, given: mode.running.append(layer)) for layer in layers or ()
    ]
    handles += [layer.register_forward_hook(leave, always_call=True) for layer in layers or ()]
    try:
        with no_autocast_cache(), swapped(anatomy, stand_ins(anatomy, leaves)), functions_entered(), mode:
            one.loss_fn(anatomy.model, one.batch)
    finally:
        for handle in handles:
            handle.remove()
    return mode
