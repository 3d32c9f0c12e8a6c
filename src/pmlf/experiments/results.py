"""What runs tell while they last and leave when they end: data, without the torch that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pmlf.experiments.spec import RunSpec

SENSITIVE_NOTE = "sensitive: computed from private data before noise, not covered by epsilon"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A run after some step. The training loss is that step's; it is sensitive, and there only on demand.

    `split` says on which records the accuracies are: "test", or "holdout" for a part of the training split.
    """

    step: int
    epoch: float
    epsilon: float
    split: str
    test_accuracy: float
    ema_accuracy: float | None = None  # of the averaged parameters, where an average is kept
    training_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        there = {name: value for name, value in asdict(self).items() if value is not None}
        return there if self.training_loss is None else {**there, "training_loss_is": SENSITIVE_NOTE}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Evaluation:
        return Evaluation(**{name: value for name, value in document.items() if name != "training_loss_is"})


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run that ended, or was interrupted; `evaluations` may then be empty.

    `epsilon` is of all that its ledger holds: more than its `steps` make, where steps were lost in a crash and done
    again, or where other runs share the ledger. Fewer steps than planned, uninterrupted: the budget was spent.
    """

    spec: RunSpec
    out: Path
    epsilon: float
    noise_multiplier: float
    steps: int
    planned_steps: int
    seconds: float
    interrupted_by: str | None  # a signal's name
    evaluations: tuple[Evaluation, ...]

    @property
    def interrupted(self) -> bool:
        return self.interrupted_by is not None

    @property
    def budget_spent(self) -> bool:
        """Whether the run stopped before the step that would have passed its target epsilon."""
        return self.steps < self.planned_steps and not self.interrupted

    @property
    def test_accuracy(self) -> float | None:
        return self.evaluations[-1].test_accuracy if self.evaluations else None

    @property
    def ema_accuracy(self) -> float | None:
        return self.evaluations[-1].ema_accuracy if self.evaluations else None

    @property
    def split(self) -> str:
        """What the accuracies are on."""
        return self.evaluations[-1].split if self.evaluations else "test"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.spec.method,
            "dataset": self.spec.dataset,
            "model": self.spec.model,
            "epsilon": self.epsilon,
            "delta": self.spec.delta,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "planned_steps": self.planned_steps,
            "split": self.split,
            "test_accuracy": self.test_accuracy,
            "ema_accuracy": self.ema_accuracy,
            "seconds": round(self.seconds, 1),
            "seed": self.spec.seed,
            "interrupted": self.interrupted,
            "interrupted_by": self.interrupted_by,
            "budget_spent": self.budget_spent,
            "out": str(self.out),
        }

    def to_full_json(self) -> dict[str, Any]:
        """With its evaluations: what result.json holds."""
        return {**self.to_json(), "evaluations": [evaluation.to_json() for evaluation in self.evaluations]}

    @staticmethod
    def from_full_json(document: Mapping[str, Any], spec: RunSpec, out: Path) -> RunResult:
        """The result that `to_full_json` wrote, from the folder where it is now."""
        stored = ("epsilon", "noise_multiplier", "steps", "planned_steps", "seconds", "interrupted_by")
        evaluations = tuple(Evaluation.from_json(evaluation) for evaluation in document["evaluations"])
        return RunResult(spec=spec, out=out, evaluations=evaluations, **{name: document[name] for name in stored})


class Observer(Protocol):
    """Is told what a run may tell."""

    def started(self, spec: RunSpec, steps: int) -> None: ...

    def stepped(self, step: int, training_loss: float | None) -> None: ...

    def evaluated(self, evaluation: Evaluation) -> None: ...


class Unobserved:
    """An `Observer` that does nothing."""

    def started(self, spec: RunSpec, steps: int) -> None:
        pass

    def stepped(self, step: int, training_loss: float | None) -> None:
        pass

    def evaluated(self, evaluation: Evaluation) -> None:
        pass


def comparison_json(results: Sequence[RunResult], out: Path) -> dict[str, Any]:
    """Every run's result with its evaluations."""
    return {"runs": [result.to_full_json() for result in results], "note": rate_note(results), "out": str(out)}


def rate_note(results: Sequence[RunResult]) -> str:
    """What a comparison at one learning rate does not make equal."""
    note = f"All methods share the learning rate {results[0].spec.lr:g}."
    for result in results:
        momentum = result.spec.options.outer_momentum
        if momentum is not None:
            gain = 1 / (1 - momentum)
            note += f" The filter of {result.spec.method} has a steady gain of {gain:.3g}, so its steps are larger."
    return note
