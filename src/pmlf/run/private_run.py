"""`PrivateRun`: T private steps with what follows them, as `make_private` has put them together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pmlf.basics.arguments import steps_of_epochs
from pmlf.evidence.certificate import certificate
from pmlf.evidence.spending import Spending
from pmlf.mechanism.sampling import LogicalBatch, PoissonBatches
from pmlf.run.averaging import ParameterAverage
from pmlf.step import PrivateStep

_STATE = (  # what PrivateRun.state_dict() holds
    "mechanism",
    "max_physical_batch_size",
    "spending",
    "private_step",
    "model",
    "optimizer",
    "scheduler",
    "average",
)


class PrivateRun:
    """T private steps: `for batch in run.batches(): run.step(batch)`. Made by `make_private`."""

    def __init__(
        self,
        private_step: PrivateStep,
        sampler: PoissonBatches,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        steps: int,
        delta: float,
        average: ParameterAverage | None,
        spending: Spending,
    ) -> None:
        self.private_step = private_step
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._steps = steps
        self._delta = delta
        self._sampler = sampler
        self._average = average
        self.spending = spending
        self._due: LogicalBatch | None = None
        self._released = private_step.releases
        self._between_steps = True

    def __getstate__(self) -> None:
        raise TypeError(
            "a run spends one budget, so it cannot be copied or pickled: save run.state_dict(), and load it into a run "
            "that make_private builds anew"
        )

    @property
    def model(self) -> nn.Module:
        return self.private_step.model

    @property
    def steps(self) -> int:
        """How many steps are planned, T."""
        return self._steps

    @property
    def delta(self) -> float:
        return self._delta

    @property
    def steps_done(self) -> int:
        return self.private_step.releases

    @property
    def max_physical_batch_size(self) -> int:
        """How many records are in memory at once."""
        return self._sampler.max_physical_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every record is drawn once on average."""
        return steps_of_epochs(1, self._sampler.population, self.private_step.expected_batch_size)

    @property
    def between_steps(self) -> bool:
        """False after a step that was interrupted with its gradient released and the parameters not yet updated."""
        return self._between_steps

    def batches(self) -> Iterator[LogicalBatch]:
        """The logical batches of the steps that are left, each to be given to `step` once, in order, empty ones too.

        They end before the step that would pass the target epsilon. A draw that was not stepped, because the loop was
        left or the step failed, is issued again: drawing anew would let whoever decides to choose who is in it.
        """
        for batch in self._sampler.batches(self.steps_done, self.steps):
            if not self.spending.affords(batch.step):
                return
            self._due = batch
            yield batch
            if self.steps_done == batch.step:
                raise RuntimeError(
                    f"the batch of step {batch.step} was drawn but not stepped: every draw is a step, also an empty one"
                )

    def step(self, batch: LogicalBatch) -> None:
        """One private step on a batch that `batches` issued: all or nothing, and then it is spent."""
        if not isinstance(batch, LogicalBatch) or batch is not self._due or batch.used:
            raise ValueError(
                "this batch was not issued by run.batches(), or was used already: give each issued batch to run.step "
                "once"
            )
        if batch.step != self.steps_done:
            raise ValueError(
                f"this batch is of step {batch.step}, and step {self.steps_done} is next: go on with batches that "
                "run.batches() issues from now on"
            )
        self._refuse_foreign_releases()
        if self.private_step.pending:
            raise RuntimeError(
                "samples were accumulated outside run.step, and the sampler did not draw them: "
                "run.private_step.discard() forgets them"
            )
        if not self.spending.affords(batch.step):
            raise RuntimeError(
                "another run has spent from the same ledger since this batch was drawn, and the target epsilon has no "
                "room for its step: stop here"
            )
        self._due = None
        try:
            for indices, micro_batch in batch.numbered():
                self.private_step.accumulate(micro_batch, samples=indices)
            self.spending.spend(batch.step)  # on the disk before it is released
        except BaseException:
            self.private_step.discard()
            raise
        self._between_steps = False
        self._sampler.passed(batch.step)
        self._released += 1
        self.private_step.release()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self._average is not None:
            self._average.update(self.private_step.trained)
        self._between_steps = True

    def averaged_model(self) -> nn.Module | None:
        """A copy of the model at the average of the parameters released so far; None if none is kept, or none yet."""
        if self._average is None or self.steps_done == 0:
            return None
        averaged = copy.deepcopy(self.model)
        trained = [parameter for parameter in averaged.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter, value in zip(trained, self._average.values(), strict=True):
                parameter.copy_(value)
        return averaged

    def epsilon(self) -> float:
        """Spent so far, at the run's delta: by PLD, or by an RDP filter where its ledger holds other plans too.

        `certificate` says what holds whatever was seen on the way: no less than this.
        """
        self._refuse_foreign_releases()
        return self.spending.epsilon()

    def certificate(self) -> dict[str, Any]:
        """The mechanism, its public constants and the epsilon they give; JSON-ready."""
        self._refuse_foreign_releases()
        step = self.private_step
        return certificate(
            method=step.method,
            clipping=step.clipping,
            population=self._sampler.population,
            expected_batch_size=step.expected_batch_size,
            noise_multiplier=step.noise_multiplier,
            clip_norm=step.clip_norm,
            planned_steps=self.steps,
            steps_done=self.steps_done,
            delta=self.delta,
            spending=self.spending,
            randomness=step.noise_source,
            reproducible=step.randomness.reproducible,
            independence=str(step.independence or "not looked at: no sample was seen since the run was built"),
            watched=step.watched,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything released, at a step boundary: never a pending sum, a key or a sample."""
        if not self.between_steps:
            raise RuntimeError("a step was interrupted between its release and the optimizer: go back to a saved state")
        self._refuse_foreign_releases()
        return {
            "mechanism": self._mechanism(),
            "max_physical_batch_size": self.max_physical_batch_size,
            "spending": self.spending.state_dict(),
            "private_step": self.private_step.state_dict(),
            # copies: torch's own state dicts share their tensors with the running objects
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            "average": None if self._average is None else self._average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run of the same mechanism from its saved state.

        With a ledger and a target epsilon it may plan more steps than it did: the guard then composes by an RDP filter.
        """
        for name in _STATE:
            if name not in state:
                raise ValueError(f"the state has no {name!r}: give what state_dict() of this version has made")
        for name, value in self._mechanism().items():
            saved = state["mechanism"].get(name)
            if saved != value and not (name == "steps" and saved < value and self.spending.guards_longer_plans):
                raise ValueError(
                    f"the state has {name}={saved!r} and this run has {value!r}: a resumed run must keep its mechanism"
                )
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("the state and this run differ in having a scheduler: build the run as it was")
        if (state["average"] is None) != (self._average is None):
            raise ValueError("the state and this run differ in keeping an average (ema): build the run as it was")
        self.spending.load_state_dict(state["spending"])
        if self.private_step.randomness.reproducible:  # rounding and dropout follow how a draw is cut
            self._sampler.max_physical_batch_size = state["max_physical_batch_size"]
        self.private_step.load_state_dict(state["private_step"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self._average is not None:
            self._average.load_state_dict(state["average"], like=self.private_step.trained)
        self._due = None
        self._released = self.private_step.releases
        self._between_steps = True

    def _refuse_foreign_releases(self) -> None:
        torn = not self.between_steps and self.private_step.releases == self._released - 1
        if self.private_step.releases != self._released and not torn:
            raise RuntimeError(
                "run.private_step was released or loaded outside of the run, not by run.step or run.load_state_dict, "
                "and nothing accounts for it: go back to a saved state of the run"
            )

    def _mechanism(self) -> dict[str, Any]:
        step = self.private_step
        return {
            "method": repr(step.method),
            "clipping": step.clipping,
            "records": self._sampler.population,
            "expected_batch_size": step.expected_batch_size,
            "noise_multiplier": step.noise_multiplier,
            "clip_norm": step.clip_norm,
            "steps": self.steps,
            "delta": self.delta,
            "secure_noise": step.secure_noise,
            "target_epsilon": self.spending.target_epsilon,
            # a number that follows from the seed and tells nothing of it; fresh chance has none
            "chance": step.randomness.seed_for("identity") if step.randomness.reproducible else None,
        }
