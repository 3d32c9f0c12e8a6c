"""Results of runs, and the observer interface. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pmlf.experiments.spec import RunSpec

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pmlf.run.evaluation import AnyScore

SENSITIVE_NOTE = "sensitive: computed from private data before noise, not covered by epsilon"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of a run after one of its steps.

    Splits are "test", GLUE's "validation" and so on, or "holdout" for a part of the training split. The training loss
    of the step is sensitive; it is None unless requested.
    """

    step: int
    epoch: float
    epsilon: float
    scores: Mapping[str, AnyScore]  # by split, the main split first
    ema_scores: Mapping[str, AnyScore] | None = None  # of the averaged parameters, if there is an average
    training_loss: float | None = None

    @property
    def split(self) -> str:
        """The main split."""
        return next(iter(self.scores))

    @property
    def metric(self) -> str:
        """What the scores are: accuracy, that of several labels, R2 of predicted numbers, or perplexity of texts."""
        return self.scores[self.split].metric

    @property
    def test_accuracy(self) -> float:
        return self.scores[self.split].accuracy

    @property
    def ema_accuracy(self) -> float | None:
        return None if self.ema_scores is None else self.ema_scores[self.split].accuracy

    @property
    def brief(self) -> str:
        """The main score of the last iterate, and of the parameter average (EMA) if there is one."""
        averaged = "" if self.ema_scores is None else f", EMA {self.ema_scores[self.split].brief()}"
        return self.scores[self.split].brief() + averaged

    def numbers(self) -> dict[str, float]:
        """The scores by name, such as "test/accuracy", for callbacks. The training loss is not among them."""
        found: dict[str, float] = {}
        for suffix, scores in (("", self.scores), ("-ema", self.ema_scores or {})):
            for split, score in scores.items():
                found |= {f"{split}{suffix}/{name}": value for name, value in score.numbers().items()}
        return found

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "epsilon": self.epsilon,
            "split": self.split,
            "test_accuracy": self.test_accuracy,
            "scores": {split: score.to_json() for split, score in self.scores.items()},
        }
        if self.ema_scores is not None:
            document["ema_accuracy"] = self.ema_accuracy
            document["ema_scores"] = {split: score.to_json() for split, score in self.ema_scores.items()}
        if self.training_loss is not None:
            document |= {"training_loss": self.training_loss, "training_loss_is": SENSITIVE_NOTE}
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `to_json` wrote."""
        from pmlf.run.evaluation import score_from_json

        def scores(name: str) -> dict[str, AnyScore]:
            return {split: score_from_json(each) for split, each in document[name].items()}

        return Evaluation(
            step=document["step"],
            epoch=document["epoch"],
            epsilon=document["epsilon"],
            scores=scores("scores"),
            ema_scores=scores("ema_scores") if "ema_scores" in document else None,
            training_loss=document.get("training_loss"),
        )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run that is complete or interrupted. After an interruption, `evaluations` may be empty.

    `epsilon` covers all events in the ledger: also steps that were lost in a crash and repeated, and other runs that
    share the ledger. `certified_epsilon` is the claim of the certificate, which also holds if decisions were made
    during the run; None if there is no claim. A run with fewer steps than planned that was not interrupted has used up
    its budget.

    `interrupted_by` is the signal that stopped the run before its end, so that it can be resumed. `signalled_by` is the
    signal that came at any time: after it no other run starts, also where this one was complete. It is not stored.
    """

    spec: RunSpec
    out: Path
    epsilon: float
    certified_epsilon: float | None
    noise_multiplier: float
    steps: int
    planned_steps: int
    seconds: float
    interrupted_by: str | None
    evaluations: tuple[Evaluation, ...]
    signalled_by: str | None = None

    @property
    def interrupted(self) -> bool:
        return self.interrupted_by is not None

    @property
    def budget_spent(self) -> bool:
        """Whether the run stopped early because the next step would exceed its target epsilon."""
        return self.steps < self.planned_steps and not self.interrupted

    @property
    def test_accuracy(self) -> float | None:
        return self.evaluations[-1].test_accuracy if self.evaluations else None

    @property
    def ema_accuracy(self) -> float | None:
        return self.evaluations[-1].ema_accuracy if self.evaluations else None

    @property
    def metric(self) -> str:
        """What the accuracies are."""
        return self.evaluations[-1].metric if self.evaluations else "accuracy"

    @property
    def split(self) -> str:
        """The split of the accuracies."""
        return self.evaluations[-1].split if self.evaluations else "test"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.spec.method,
            "dataset": self.spec.dataset,
            "model": self.spec.model,
            "epsilon": self.epsilon,
            "certified_epsilon": self.certified_epsilon,
            "delta": self.spec.delta,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "planned_steps": self.planned_steps,
            "split": self.split,
            "test_accuracy": self.test_accuracy,
            "ema_accuracy": self.ema_accuracy,
            "scores": self.evaluations[-1].to_json()["scores"] if self.evaluations else None,
            "seconds": round(self.seconds, 1),
            "seed": self.spec.seed,
            "interrupted": self.interrupted,
            "interrupted_by": self.interrupted_by,
            "budget_spent": self.budget_spent,
            "out": str(self.out),
        }

    def to_full_json(self) -> dict[str, Any]:
        """The content of result.json: `to_json` and all evaluations."""
        return {**self.to_json(), "evaluations": [evaluation.to_json() for evaluation in self.evaluations]}

    @staticmethod
    def from_full_json(document: Mapping[str, Any], spec: RunSpec, out: Path) -> RunResult:
        """The result that `to_full_json` wrote, with the current path of its folder."""
        stored = ("epsilon", "noise_multiplier", "steps", "planned_steps", "seconds", "interrupted_by")
        evaluations = tuple(Evaluation.from_json(evaluation) for evaluation in document["evaluations"])
        return RunResult(
            spec=spec,
            out=out,
            evaluations=evaluations,
            certified_epsilon=document.get("certified_epsilon"),  # missing in old files
            **{name: document[name] for name in stored},
        )


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def started(self, spec: RunSpec, steps: int) -> None: ...

    def stepped(self, step: int, training_loss: float | None) -> None: ...

    def evaluated(self, evaluation: Evaluation) -> None: ...


class SilentObserver:
    """A `RunObserver` that does nothing. Subclass it and override what you need."""

    def started(self, spec: RunSpec, steps: int) -> None:
        pass

    def stepped(self, step: int, training_loss: float | None) -> None:
        pass

    def evaluated(self, evaluation: Evaluation) -> None:
        pass
