"""The settings to choose from: every combination of the values given for some names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from pmlf.experiments.spec import MethodOptions, RunSpec

Candidate = Mapping[str, Any]
_EXAMPLE = "'lr=0.5,1,2' 'clip-norm=0.5,1'"


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


_KINDS: dict[str, Callable[[str], Any]] = {
    "lr": float,
    "clip_norm": float,
    "clipping": str,
    "optimizer": str,
    "ema": float,
    "method": str,
    "model": str,
    "augment": _flag,
    "batch_size": int,
    "epochs": float,
    "steps": int,
    "k": int,
    "beta": float,
    "gamma": float,
    "outer_momentum": float,
    "kappa": float,
    "bands": int,
}
OF_THE_MECHANISM = ("batch_size", "epochs", "steps", "bands")  # they change what a run costs
_OPTIONS = frozenset(option.name for option in fields(MethodOptions))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values by name. A candidate has one value for each name.

    >>> grid = Grid.parsed(["lr=0.5,1", "k=1,2"])
    >>> len(grid.candidates), grid.candidates[3]
    (4, {'lr': 1.0, 'k': 2})
    """

    values: Mapping[str, tuple[Any, ...]]

    @staticmethod
    def parsed(texts: Sequence[str]) -> Grid:
        """The grid of texts such as "lr=0.5,1,2".

        Raises:
            ValueError: A name cannot be tuned or comes twice, or a value is of another type.
        """
        found: dict[str, tuple[Any, ...]] = {}
        for text in texts:
            given, equals, values = text.partition("=")
            name = given.replace("-", "_")
            if name not in _KINDS or not (equals and values):
                names = ", ".join(_KINDS).replace("_", "-")
                raise ValueError(f"grid={text!r} is not NAME=VALUE,...: names are {names}; as in {_EXAMPLE}")
            if name in found:
                raise ValueError(f"grid={name!r} is given twice: list all its values once")
            try:
                found[name] = tuple(_KINDS[name](value) for value in values.split(","))
            except ValueError as error:
                raise ValueError(
                    f"grid={text!r} has a value that {name} cannot have: write it as {_EXAMPLE}"
                ) from error
            if len(set(found[name])) < len(found[name]):
                raise ValueError(f"grid={text!r} has a value twice: list each once")
        if not found:
            raise ValueError(f"the grid is empty: give the values to choose from, as in {_EXAMPLE}")
        return Grid(values=found)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every combination of the values."""
        return tuple(dict(zip(self.values, chosen, strict=True)) for chosen in product(*self.values.values()))


def with_candidate(spec: RunSpec, candidate: Candidate) -> RunSpec:
    """The spec with the values of a candidate."""
    options = {name: value for name, value in candidate.items() if name in _OPTIONS}
    others = {name: value for name, value in candidate.items() if name not in _OPTIONS}
    if "epochs" in others:
        others["steps"] = None
    if "steps" in others:
        others["epochs"] = None
    return replace(spec, options=replace(spec.options, **options), **others)


def in_words(candidate: Candidate) -> str:
    """A candidate in one line.

    >>> in_words({"lr": 0.5, "k": 2})
    'lr 0.5, k 2'
    """
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in candidate.items()
    )
