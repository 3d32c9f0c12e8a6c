"""How every trainable parameter of a model gets its per-sample gradient: by a layer's rule, by vmap, or by copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from pmlf.engine import strategy
from pmlf.engine.layers import Rule, UnsupportedModel, rule_for

# By layers' rules; the whole model by torch.func.vmap; the whole model by plain autograd, one sample at a time.
Gradients = Literal["ghost", "vmap", "one-by-one"]
GRADIENTS: tuple[Gradients, ...] = ("ghost", "vmap", "one-by-one")
_MOST_IN_A_PASS = 1024  # samples: their clipped sum is a float32 product, and rounds like what it sums to


def require_known(gradients: object) -> None:
    """Raise ValueError for a way to per-sample gradients that there is not."""
    if not isinstance(gradients, str) or gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is not known: give one of {', '.join(GRADIENTS)}")


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
    watched: tuple[Watched, ...] = ()
    expanded: frozenset[str] = frozenset()  # bare parameters of leading size 1, replaced by one copy a sample
    convolved: frozenset[str] = frozenset()  # weights of 2d convolutions, which are faster in channels-last order
    gradients: Gradients = "ghost"
    in_a_pass: int = _MOST_IN_A_PASS  # samples

    @classmethod
    def of(cls, model: nn.Module, gradients: Gradients = "ghost") -> Plan:
        """Decide for every trainable parameter; one that has no safe way is an error that names it."""
        names = _trainable(model)
        if gradients != "ghost":
            most = _fitting(model) if gradients == "vmap" else 1
            return cls(parameters=tuple(names.values()), gradients=gradients, in_a_pass=most)
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
                    raise UnsupportedModel(
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
            raise UnsupportedModel(
                f"parameter {min(clash)!r} is shared between layers with a rule and without: give each its own"
            )
        return cls(
            parameters=tuple(names.values()),
            watched=tuple(watched),
            expanded=frozenset(expanded),
            convolved=frozenset(convolved),
        )

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


def _expands(parameter: Tensor | None) -> bool:
    """Class tokens and position tables: shape (1, ...). A bare (1,) is a scalar in disguise, not a batch axis."""
    return parameter is not None and parameter.ndim >= 2 and parameter.shape[0] == 1
