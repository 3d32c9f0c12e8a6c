"""How every trainable parameter of a model gets its per-sample gradient: by a layer's rule, by vmap, or by copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from pmlf.layers import NotTakenApart, Rule, rule_for

Gradients = Literal["ghost", "one-by-one"]
GRADIENTS: tuple[Gradients, ...] = ("ghost", "one-by-one")
_MOST_IN_A_PASS = 1024  # samples: their clipped sum is a float32 product, and rounds like what it sums to


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
    one_by_one: bool = False  # whether every sample has a pass of its own, by plain autograd

    @classmethod
    def of(cls, model: nn.Module, gradients: Gradients = "ghost") -> Plan:
        """Decide for every trainable parameter; one that has no safe way is an error that names it."""
        names = _trainable(model)
        if gradients == "one-by-one":
            return cls(parameters=tuple(names.values()), one_by_one=True)
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
                    raise NotTakenApart(
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
            raise NotTakenApart(
                f"parameter {min(clash)!r} is shared between layers with a rule and without: give each its own"
            )
        return cls(
            parameters=tuple(names.values()),
            watched=tuple(watched),
            expanded=frozenset(expanded),
            convolved=frozenset(convolved),
        )

    def passes(self, samples: int) -> Iterator[slice]:
        """Which samples of a micro-batch share a pass: about a thousand, or none."""
        step = 1 if self.one_by_one else _MOST_IN_A_PASS
        return (slice(start, min(start + step, samples)) for start in range(0, samples, step))


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


def _expands(parameter: Tensor | None) -> bool:
    """Class tokens and position tables: shape (1, ...). A bare (1,) is a scalar in disguise, not a batch axis."""
    return parameter is not None and parameter.ndim >= 2 and parameter.shape[0] == 1
