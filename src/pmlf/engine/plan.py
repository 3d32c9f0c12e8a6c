"""How the trainable parameters of a model get their per-sample gradients: at layers, at operations, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from pmlf.engine import strategy
from pmlf.engine.layers import Rule, rule_for
from pmlf.engine.operations.layouts import Learned

# By rules of layers or of operations; the whole model by torch.func.vmap; or by plain autograd, one sample at a time.
Gradients = Literal["ghost", "vmap", "one-by-one"]
GRADIENTS: tuple[Gradients, ...] = ("ghost", "vmap", "one-by-one")
_MOST_IN_A_PASS = 1024  # samples: their clipped sum is a float32 product, and rounds like what it sums to


def require_known(gradients: object) -> None:
    """Raise ValueError for a way to per-sample gradients that there is not."""
    if not isinstance(gradients, str) or gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is not known: give one of {', '.join(GRADIENTS)}")


@dataclass(frozen=True, kw_only=True)
class RuledLayer:
    """A module with a rule for its own trained parameters: their local names, and their names in the model."""

    name: str
    own: Mapping[str, str]
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every trainable parameter of a model gets its per-sample gradient; made once, holds names only.

    At layers where each parameter belongs to a layer with a rule: `learned` says whether the first samples have shown
    that a weight is used elsewhere too. At operations otherwise.
    """

    parameters: tuple[str, ...]
    layers: tuple[RuledLayer, ...] = ()
    convolved: frozenset[str] = frozenset()  # weights of 2d convolutions, which are faster in channels-last order
    gradients: Gradients = "ghost"
    in_a_pass: int = _MOST_IN_A_PASS  # samples
    learned: Learned = field(default_factory=Learned, compare=False)

    @classmethod
    def of(cls, model: nn.Module, gradients: Gradients = "ghost") -> Plan:
        """Decide for all trainable parameters together."""
        names = _trainable(model)
        if gradients != "ghost":
            most = _fitting(model) if gradients == "vmap" else 1
            return cls(parameters=tuple(names.values()), gradients=gradients, in_a_pass=most)
        layers: list[RuledLayer] = []
        convolved: set[str] = set()
        # torch 2.13 computes the gradient of one sample's InstanceNorm wrongly if it comes in channels-last order
        instances = any(isinstance(module, _InstanceNorm) for module in model.modules())
        for module_name, module in model.named_modules():
            own = {local: names[id(p)] for local, p in module._parameters.items() if p is not None and id(p) in names}
            rule = rule_for(module) if own else None
            if own and rule is None:
                return cls(parameters=tuple(names.values()), learned=Learned(by_operations=True))
            if rule is not None:
                layers.append(RuledLayer(name=module_name, own=own, rule=rule))
            if isinstance(module, nn.Conv2d) and not instances:
                convolved.update(name for local, name in own.items() if local == "weight")
        return cls(parameters=tuple(names.values()), layers=tuple(layers), convolved=frozenset(convolved))

    def unchanged(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The trainable ones of a model's parameters; RuntimeError if they are others than planned."""
        named = {name: p for name, p in parameters.items() if p.requires_grad}
        if tuple(named) != self.parameters:
            changed = sorted(set(named) ^ set(self.parameters))
            raise RuntimeError(
                f"the set of trainable parameters changed since the step was built ({', '.join(changed)}): "
                "build a new PrivateStep"
            )
        return named

    def passes(self, samples: int) -> Iterator[slice]:
        """Which samples of a micro-batch share a pass, in their order."""
        return (slice(start, min(start + self.in_a_pass, samples)) for start in range(0, samples, self.in_a_pass))


def _trainable(model: nn.Module) -> dict[int, str]:
    """The names of trainable parameters, by id."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not names:
        raise ValueError("every parameter of the model is frozen: set requires_grad on those to train")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, and noise is real: keep its real and imaginary parts as "
                "a real parameter (torch.view_as_real) and join them in forward"
            )
    return names


def _fitting(model: nn.Module) -> int:
    """How many samples' gradients fit into the memory for formed ones, at least one."""
    bytes_each = sum(max(4, p.element_size()) * p.numel() for p in model.parameters() if p.requires_grad)
    return max(1, min(_MOST_IN_A_PASS, strategy.LATE_BYTES // max(1, bytes_each)))
