"""What is tuned, on which records, and what it costs them: decided before the first trial, and kept."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pmlf.basics.arguments import is_number
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.selection import Selection
from pmlf.tuning.grid import OF_THE_MECHANISM, Grid, with_candidate

HELD_OUT, ACCOUNTED, UNACCOUNTED = "held-out", "accounted", "unaccounted"
MODES = (HELD_OUT, ACCOUNTED, UNACCOUNTED)
SHARE, JUDGED = 0.2, 0.2  # of the records for trials; of a trial's records for its score


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """How to choose hyper-parameters.

    - "held-out": trials on public records, or on a share of the training records that the final run does not use. The
      other records pay nothing for the tuning.
    - "accounted": a random number of trials on the training records; the best one is the result, and its epsilon covers
      all of them (Papernot & Steinke 2021).
    - "unaccounted": every trial on the training records, for research. The final certificate says so.

    Attributes:
        base: The run, with what is not in the grid. Its epsilon is that of the final run, or, accounted, of everything.
        grid: The values to choose from.
        mode: One of `MODES`.
        public_dataset: Held-out: a dataset of public records for the trials; None for a share of the training records.
        share: Held-out: the share of the training records for the trials.
        selection: Accounted: the distribution of the number of trials.
        judged: The fraction of a trial's records on which it is scored. They are not protected.
        final_holdout: The fraction of the final run's records on which it is evaluated; None for the test split.

    Raises:
        ValueError: A setting does not fit the mode.
    """

    base: RunSpec
    grid: Grid
    mode: str = HELD_OUT
    public_dataset: str | None = None
    share: float = SHARE
    selection: Selection = field(default_factory=lambda: Selection(mean=10.0))
    judged: float = JUDGED
    final_holdout: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not known: give one of {', '.join(MODES)}")
        for name, value in (("share", self.share), ("judged", self.judged)):
            if not (is_number(value) and 0.0 < value < 1.0):
                raise ValueError(f"{name}={value} is not in (0, 1): it is a fraction of records")
        if self.base.model == "prior-linear" or self.base.pretrained.prior is not None:
            raise ValueError("private linear models on features have a recipe of their own: tune another `model`")
        if self.base.holdout is not None:
            raise ValueError(
                "`holdout` is set by the tuning: give `judged` for trials, `final_holdout` for the final run"
            )
        if self.mode != HELD_OUT and self.public_dataset is not None:
            raise ValueError(f"`public_dataset` is for mode={HELD_OUT!r}: leave it out")
        if self.mode == ACCOUNTED:
            self._check_accounted()

    def _check_accounted(self) -> None:
        for name in OF_THE_MECHANISM:
            if name in self.grid.values:
                raise ValueError(
                    f"mode='accounted' needs trials of one mechanism, and {name} changes it: tune it on other records, "
                    f"with mode={HELD_OUT!r}, or leave it out of the grid"
                )
        if self.base.noise_multiplier is not None:
            raise ValueError("mode='accounted' calibrates the noise to the total: give `epsilon`, not noise_multiplier")
        if self.final_holdout is not None:
            raise ValueError("mode='accounted' has no final run, the best trial is the result: leave final_holdout out")
        if self.base.largest_batch is not None:
            raise ValueError("mode='accounted' is for whole draws: leave `largest_batch` out")
        for candidate in self.grid.candidates:
            if with_candidate(self.base, candidate).build_method().noise.bands > 1:
                raise ValueError("mode='accounted' is for white noise: leave methods with shaped noise out")

    def trial(self, candidate: int, number: int, noise_multiplier: float | None = None) -> RunSpec:
        """The spec of a trial.

        Args:
            candidate: The number of its candidate.
            number: The number of the trial.
            noise_multiplier: Accounted: the noise of every trial.
        """
        spec = replace(with_candidate(self.base, self.grid.candidates[candidate]), holdout=self.judged)
        if self.mode == UNACCOUNTED:
            return spec
        if spec.seed is not None:  # noise that two runs share cancels in their difference
            spec = replace(spec, seed=SeededRandomness(spec.seed).seed_for("trial", number) % 2**31)
        if self.mode == ACCOUNTED:
            return replace(spec, epsilon=None, noise_multiplier=noise_multiplier)
        if self.public_dataset is not None:
            return replace(spec, dataset=self.public_dataset)
        return replace(spec, part=(0.0, self.share))

    def final(self, candidate: int) -> RunSpec:
        """The spec of the final run."""
        spec = replace(with_candidate(self.base, self.grid.candidates[candidate]), holdout=self.final_holdout)
        if self.mode == UNACCOUNTED:
            return replace(spec, chosen_by=len(self.grid.candidates))
        return replace(spec, part=(self.share, 1.0)) if self.public_dataset is None else spec

    def draws(self) -> list[int]:
        """The candidate of each trial: all of the grid, or, accounted, a random number of random ones. Drawn once."""
        count = len(self.grid.candidates)
        if self.mode != ACCOUNTED:
            return list(range(count))
        if self.base.seed is None:
            number = self.selection.number(secrets.randbits(53) / 2.0**53)
            return [secrets.randbelow(count) for _ in range(number)]
        words = SeededRandomness(self.base.seed).stream("tuning").words(1 + 4096)
        number = self.selection.number(int(words[0] >> 11) / 2.0**53)
        if number > len(words) - 1:
            raise ValueError(f"seed={self.base.seed} draws more than 4096 trials: give another seed")
        return [int(word % count) for word in words[1 : 1 + number]]

    def document(self) -> dict[str, Any]:
        """What a resumed tuning must have in common with the one that was started."""
        return {
            "base": json.loads(self.base.to_json()),
            "grid": {name: list(values) for name, values in self.grid.values.items()},
            "mode": self.mode,
            "public_dataset": self.public_dataset,
            "share": self.share,
            "selection": {"mean": self.selection.mean, "distribution": self.selection.distribution},
            "judged": self.judged,
            "final_holdout": self.final_holdout,
        }


def stored_plan(out: Path, document: dict[str, Any]) -> TuningPlan:
    """The plan that a folder was started with.

    Raises:
        ValueError: The document is not a plan.
    """
    try:
        grid = Grid(values={name: tuple(values) for name, values in document["grid"].items()})
        chosen = Selection(**document["selection"])
        names = ("mode", "public_dataset", "share", "judged", "final_holdout")
        rest = {name: document[name] for name in names}
        return TuningPlan(base=RunSpec.from_json(json.dumps(document["base"])), grid=grid, selection=chosen, **rest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(out)!r} is not the folder of a tuning: give the folder that `pmlf tune` made"
        ) from error
