"""An artifact is a table or a figure of the paper: panels of runs, as data. `paper.py` lists the paper's artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pmlf.experiments.spec import MethodOptions, RunSpec, Setting
from pmlf.tuning import Grid, TuningPlan
from pmlf.tuning.plan import UNACCOUNTED

PROFILES = ("paper", "cpu", "smoke")
PROTOCOLS = ("shared", "tuned")
HELD_OUT_FRACTION = 0.1  # fraction of the training split for choosing learning rates
TUNING_SEED = 1000  # not a seed of a final run


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

    @property
    def tuning(self) -> TuningPlan:
        """How the tuned protocol chooses the learning rate: by trials as long as final runs, on held-out records.

        A rate is divided by the DC gain of the variant's filter, so that all variants try steps of the same sizes.
        """
        base = self._spec(seed=TUNING_SEED)
        gain = base.build_method().low_pass.dc_gain
        grid = Grid(values={"lr": tuple(rate / gain for rate in sorted(self.panel.rates))})
        return TuningPlan(base=base, grid=grid, mode=UNACCOUNTED, judged=HELD_OUT_FRACTION)

    def trials(self) -> tuple[RunSpec, ...]:
        """One run per rate, smallest first, trained without the held-out records and evaluated on them."""
        return tuple(self.tuning.trial(number, number) for number in self.tuning.draws())

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
