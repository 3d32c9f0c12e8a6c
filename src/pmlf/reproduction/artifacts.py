"""What an artifact of a paper is: panels of runs, as data. `paper.py` has the paper's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pmlf.experiments.spec import MethodOptions, RunSpec, Setting

PROFILES = ("paper", "cpu", "smoke")
PROTOCOLS = ("shared", "tuned")
HELD_OUT = 0.1  # of the training split, for choosing learning rates
TUNING_SEED = 1000  # none of the seeds of the final runs
_ALWAYS_SAID = ("method", "dataset", "model", "lr", "optimizer", "batch_size", "clip_norm", "clipping", "seed")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of a table, a curve of a figure: a method with its parameters."""

    label: str
    method: str
    options: MethodOptions = field(default_factory=MethodOptions)
    value: float | None = None  # of the parameter that the figure varies


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One model on one dataset. `setting` has all but method, epsilon and seed."""

    setting: Setting
    epsilons: tuple[float, ...]
    variants: tuple[Variant, ...]
    seeds: int
    trial_part: float | None  # of a final run's steps, with its noise, to choose a learning rate by; None for all
    rates: tuple[float, ...]  # the grid of the tuned protocol, the same for every variant


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A variant in a panel at one epsilon: its runs differ in the seed alone."""

    variant: Variant
    epsilon: float
    panel: Panel

    def run(self, seed: int, rate: float | None = None) -> RunSpec:
        """The final run of a seed: the same initial weights and the same draws for every variant."""
        return self._spec(seed=seed, lr=self.panel.setting.lr if rate is None else rate)

    def trials(self) -> tuple[RunSpec, ...]:
        """A run for every rate of the grid, trained without the held-out records and judged on them."""
        spec = self._spec(seed=TUNING_SEED, holdout=HELD_OUT, first_part=self.panel.trial_part)
        return tuple(replace(spec, lr=rate) for rate in self.panel.rates)

    def _spec(self, **changes: Any) -> RunSpec:
        chosen = {"method": self.variant.method, "options": self.variant.options, "epsilon": self.epsilon}
        return RunSpec(**{**vars(self.panel.setting), **chosen, **changes})


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A table or a figure. `axis` is what runs along it: "epsilon", "epoch" or the parameter that is varied."""

    name: str
    title: str
    axis: str
    panels: Mapping[str, tuple[Panel, ...]]  # by profile

    def cells(self, profile: str) -> tuple[Cell, ...]:
        """All cells of a profile, panel by panel."""
        if profile not in self.panels:
            raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
        return tuple(
            Cell(variant=variant, epsilon=epsilon, panel=panel)
            for panel in self.panels[profile]
            for epsilon in panel.epsilons
            for variant in panel.variants
        )


def run_key(spec: RunSpec) -> str:
    """The name of a run's folder: a hash of its spec, in which options that came later and are not used do not show.

    >>> run_key(RunSpec(seed=1)) == run_key(RunSpec(seed=1)) != run_key(RunSpec(seed=2))
    True
    """
    usual = asdict(RunSpec())
    said = {name: value for name, value in asdict(spec).items() if name in _ALWAYS_SAID or value != usual[name]}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
