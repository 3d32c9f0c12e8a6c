"""An artifact is a table or a figure of the paper: panels of runs, as data. `paper.py` lists the paper's artifacts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pmlf.experiments.spec import MethodOptions, RunSpec, Setting

PROFILES = ("paper", "cpu", "smoke")
PROTOCOLS = ("shared", "tuned")
HELD_OUT = 0.1  # fraction of the training split for choosing learning rates
TUNING_SEED = 1000  # not a seed of a final run
_ALWAYS_IN_KEY = ("method", "dataset", "model", "lr", "optimizer", "batch_size", "clip_norm", "clipping", "seed")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of a table or a curve of a figure: a method with its parameters."""

    label: str
    method: str
    options: MethodOptions = field(default_factory=MethodOptions)
    value: float | None = None  # of the parameter on the figure's axis


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One model on one dataset. `setting` holds everything except method, epsilon and seed."""

    setting: Setting
    epsilons: tuple[float, ...]
    variants: tuple[Variant, ...]
    seeds: int
    trial_part: float | None  # fraction of a final run's steps in a tuning trial; None for all
    rates: tuple[float, ...]  # of the tuned protocol, the same for every variant: learning rate times filter's DC gain


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A variant of a panel at one epsilon. Its runs differ only in the seed."""

    variant: Variant
    epsilon: float
    panel: Panel

    def run(self, seed: int, rate: float | None = None) -> RunSpec:
        """The final run with a seed, which gives all variants the same initial weights and batches."""
        return self._spec(seed=seed, lr=self.panel.setting.lr if rate is None else rate)

    def trials(self) -> tuple[RunSpec, ...]:
        """One run per rate, trained without the held-out records and evaluated on them.

        A rate is divided by the DC gain of the variant's filter, so that all variants try steps of the same sizes.
        """
        spec = self._spec(seed=TUNING_SEED, holdout=HELD_OUT, first_part=self.panel.trial_part)
        gain = spec.build_method().low_pass.dc_gain
        return tuple(replace(spec, lr=rate / gain) for rate in self.panel.rates)

    def _spec(self, **changes: Any) -> RunSpec:
        chosen = {"method": self.variant.method, "options": self.variant.options, "epsilon": self.epsilon}
        return RunSpec(**{**vars(self.panel.setting), **chosen, **changes})


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A table or a figure. `axis` is "epsilon", "epoch" or the parameter that it varies."""

    name: str
    title: str
    axis: str
    panels: Mapping[str, tuple[Panel, ...]]  # by profile

    def cells(self, profile: str) -> tuple[Cell, ...]:
        """All cells of a profile, panel by panel. Raises ValueError for an unknown profile."""
        if profile not in self.panels:
            raise ValueError(f"profile={profile!r} is not known: give one of {', '.join(PROFILES)}")
        return tuple(
            Cell(variant=variant, epsilon=epsilon, panel=panel)
            for panel in self.panels[profile]
            for epsilon in panel.epsilons
            for variant in panel.variants
        )


def run_key(spec: RunSpec) -> str:
    """The name of a run's folder: a hash of its spec. Options at their default do not change it.

    >>> run_key(RunSpec(seed=1)) == run_key(RunSpec(seed=1)) != run_key(RunSpec(seed=2))
    True
    """
    defaults = asdict(RunSpec())
    hashed = {name: value for name, value in asdict(spec).items() if name in _ALWAYS_IN_KEY or value != defaults[name]}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]
