"""`PrivateRun`: T private steps, each with its draw, its entry in the budget, and the optimizer step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pmlf.basics.arguments import steps_of_epochs
from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.certificate import CertifiedRun, certificate
from pmlf.mechanism.sampling import LogicalBatch, PoissonBatches
from pmlf.parallel.processes import Processes
from pmlf.run.averaging import ParameterAverage
from pmlf.run.callbacks import Callbacks, EndRecord, EvaluationRecord
from pmlf.run.description import as_html, as_text, refuse_other_mechanism, run_facts, saved_mechanism
from pmlf.run.iteration import Batches, Epoch, Epochs, remaining_epochs
from pmlf.run.scheduling import Interval
from pmlf.run.together import affords, spend
from pmlf.step import PrivateStep

_STATE = (  # the entries of PrivateRun.state_dict()
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
    """A private training run of T steps. Build it by `pmlf.make_private`.

    Guarantees: a step is recorded in the budget before it is released; a batch that `batches` did not issue, or that
    was used, is refused; no step takes the total above the target epsilon; the mechanism cannot change during the run.

    Attributes:
        private_step: The private step, for its settings and for advanced use.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler, or None.
        scheduler_interval: Whether the scheduler steps after every "step" or after every "epoch".
        budget: What the run plans to spend and has spent.
        callbacks: Receive the released numbers of every step; a list to append to.

    >>> import pmlf, torch
    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Linear(3, 1)
    >>> run = pmlf.make_private(
    ...     model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     dataset=TensorDataset(torch.randn(40, 3)), loss_fn=lambda model, batch: model(batch[0]).square().sum(1),
    ...     noise_multiplier=1.0, target_delta=1e-3, batch_size=10, steps=5,
    ... )
    >>> for batch in run.batches():
    ...     run.step(batch)
    >>> run.steps_done, run.certificate()["released_steps"]
    (5, 5)
    """

    def __init__(
        self,
        private_step: PrivateStep,
        sampler: PoissonBatches,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        average: ParameterAverage | None,
        budget: BudgetGuard,
        scheduler_interval: Interval = "step",
    ) -> None:
        self.private_step = private_step
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.budget = budget
        self._sampler = sampler
        self._average = average
        self._due: LogicalBatch | None = None
        self._released = private_step.releases
        self._between_steps = True
        self.callbacks = Callbacks()

    def __getstate__(self) -> None:
        raise TypeError(
            "a run spends one budget, so it cannot be copied or pickled: save run.state_dict(), and load it into a new "
            "run from make_private"
        )

    def __repr__(self) -> str:
        return as_text(run_facts(self))

    def _repr_html_(self) -> str:
        return as_html(run_facts(self))

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.private_step.model

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return "one record" if self._sampler.units is None else self._sampler.units.description

    @property
    def steps(self) -> int:
        """The number of steps planned, T."""
        return self.budget.plan.steps

    @property
    def steps_done(self) -> int:
        """The number of steps taken."""
        return self.private_step.releases

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every record is drawn once on average."""
        return steps_of_epochs(1, self._sampler.population, self.private_step.settings.expected_batch_size)

    @property
    def planned_epochs(self) -> Epochs:
        """Where the epochs of the planned steps end."""
        batch_size = self.private_step.settings.expected_batch_size
        return Epochs(records=self._sampler.population, batch_size=batch_size, steps=self.steps)

    @property
    def max_physical_batch_size(self) -> int:
        """The number of samples in memory at once."""
        return self._sampler.max_physical_batch_size

    @property
    def groups(self) -> str:
        """The name of the groups of records that shaped noise draws from in turn."""
        return self._sampler.groups

    @property
    def largest_batch(self) -> int | None:
        """The number of records to which a larger draw is cut; None if nothing is cut."""
        return self._sampler.largest_batch

    @property
    def between_steps(self) -> bool:
        """False after a step that was interrupted between its release and the update of the parameters."""
        return self._between_steps

    @property
    def processes(self) -> Processes:
        """The processes that take every step together: `run.processes.rank` of `run.processes.size`."""
        return self.private_step.processes

    def batches(self) -> Batches:
        """The logical batches of the remaining steps. Pass each one to `step` once, in order, also an empty one.

        They end before the step that would pass the target epsilon. A draw whose step was not taken, because the loop
        was left or the step failed, is issued again: with a fresh draw one could choose who is in it.

        Returns:
            An iterator over one logical batch per step. Its `len` is the number of steps left in the plan.

        Raises:
            RuntimeError: The batch before was not passed to `step`. Raised by the iterator.
        """
        return Batches(self._issued(), lambda: self.steps - self.steps_done)

    def _issued(self) -> Iterator[LogicalBatch]:
        for batch in self._sampler.batches(self.steps_done, self.steps):
            if not affords(self.budget, batch, self.processes):
                break
            self._due = batch
            yield batch
            self._refuse_lost_release()
            if self.steps_done == batch.step:
                raise RuntimeError(
                    f"the batch of step {batch.step} was drawn but not stepped: pass every batch to run.step, also an "
                    "empty one"
                )
        self.end()

    def epochs(self) -> Iterator[Epoch]:
        """The remaining epochs, each with its batches. Epoch e ends after ceil(e * n / B) steps, the last one after T.

        `for epoch in run.epochs():` with `for batch in epoch: run.step(batch)` takes every step of the run, and what
        follows the inner loop, such as an evaluation, is done after the last step too.

        Returns:
            An iterator over `Epoch`s with `number` and `len`. A resumed run begins with the rest of its epoch.

        Raises:
            RuntimeError: The batches of the epoch before were not all stepped. Raised by the iterator.
        """
        return remaining_epochs(self)

    def step(self, batch: LogicalBatch) -> None:
        """Take one private step: accumulate the batch, record the event, release, and update the parameters.

        If it fails before the event is recorded, nothing is spent and the parameters are unchanged. If one of several
        ranks fails, all of them raise, and none releases anything.

        Args:
            batch: The batch that `batches` issued last.

        Raises:
            ValueError: The batch was not issued by `batches`, was used, or belongs to another step.
            RuntimeError: The target epsilon leaves no room, `private_step` was used elsewhere, or another rank failed.
        """
        try:
            with self.private_step.agreement():  # every rank has done its part, or all of them raise
                self._refuse_other(batch)
                self._due = None
                for indices, micro_batch in self.private_step.in_rounds(batch):
                    known = None if indices is None else self._sampler.units
                    units = None if known is None or indices is None else known.of(indices.numpy())
                    self.private_step.accumulate(micro_batch, samples=indices, units=units)
            spend(self.budget, batch, self.processes)  # on the disk before the release
        except BaseException:
            if self._due is None:
                self.private_step.discard()
            raise
        self._between_steps = False
        self._sampler.passed(batch.step)
        self._released += 1
        self.private_step.release(batch)
        if self.callbacks:
            self.callbacks.released(self.steps_done, self._epoch, self.optimizer, self.private_step.trained)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and self._schedule_is_due():
            self.scheduler.step()
        if self._average is not None:
            self._average.update(self.private_step.trained)
        self._between_steps = True
        self.callbacks.stepped()

    def _refuse_other(self, batch: LogicalBatch) -> None:
        """Raise unless the batch is the one that is due, and nothing was done outside of the run."""
        self._refuse_lost_release()
        if not isinstance(batch, LogicalBatch) or batch is not self._due or batch.used:
            raise ValueError("this batch was not issued by run.batches(), or was used already: pass each one once")
        if batch.step != self.steps_done:
            raise ValueError(
                f"this batch belongs to step {batch.step}, and step {self.steps_done} is next: call run.batches() again"
            )
        self._refuse_foreign_releases()
        if self.private_step.pending:
            raise RuntimeError(
                "samples were accumulated outside run.step, and the sampler did not draw them: call "
                "run.private_step.discard() to forget them"
            )

    def log_evaluation(self, scores: Mapping[str, float]) -> None:
        """Pass scores on unprotected records to the callbacks, with the epsilon spent so far.

        Args:
            scores: Numbers by name, such as {"test/accuracy": 0.81}.
        """
        record = EvaluationRecord(step=self.steps_done, epoch=self._epoch, epsilon=self.epsilon(), scores=scores)
        self.callbacks.evaluated(record)

    def end(self) -> None:
        """Tell the callbacks, once, that the run has ended. The last of `batches` and `epochs` does this too."""
        if self.callbacks:
            self.callbacks.ended(EndRecord(steps=self.steps_done, certificate=self.certificate()))

    @property
    def _epoch(self) -> float:
        return self.steps_done * self.private_step.settings.expected_batch_size / self._sampler.population

    def averaged_model(self) -> nn.Module | None:
        """A copy of the model with the average of the released parameters.

        Returns:
            The copy; None if the run has no `ema`, or before the first step.
        """
        if self._average is None or self.steps_done == 0:
            return None
        return self._average.in_copy_of(self.model)

    def epsilon(self) -> float:
        """Epsilon spent so far by this run and all others in its ledger, at the run's delta.

        By PLD, or by an RDP filter if the ledger holds other plans. The certificate states the epsilon that holds
        whatever results were seen, which is not below this one.

        Raises:
            RuntimeError: `private_step` was released outside of the run.
        """
        self._refuse_foreign_releases()
        return self.budget.epsilon()

    def certificate(self) -> dict[str, Any]:
        """The mechanism, its public constants, and the epsilon they give.

        Returns:
            A JSON-ready document with a digest. `pmlf account --certificate` recomputes it.

        Raises:
            RuntimeError: `private_step` was released outside of the run.
        """
        self._refuse_foreign_releases()
        step = self.private_step
        run = CertifiedRun(
            method=step.settings.method,
            clipping=step.settings.clipping,
            clip_norm=step.settings.clip_norm,
            adaptive=step.settings.adaptive,
            sum_multiplier=step.settings.sum_multiplier,
            records=self._sampler.population,
            units=self._sampler.units,
            expected_batch_size=step.settings.expected_batch_size,
            steps_done=self.steps_done,
            randomness=step.settings.noise_source(step.randomness),
            reproducible=step.randomness.reproducible,
            independence=str(step.independence or "not looked at: no sample was seen since the run was built"),
            watched=step.watched,
            unreached=step.first_look.unreached,
            processes=self.processes.size,
            largest_batch=self._sampler.largest_batch,
        )
        return certificate(run, self.budget)

    def state_dict(self) -> dict[str, Any]:
        """The state of the run between two steps: released values, never a pending sum, noise, its key or a sample.

        Raises:
            RuntimeError: A step was interrupted halfway, or `private_step` was released outside of the run.
        """
        if not self.between_steps:
            raise RuntimeError("a step was interrupted between its release and the optimizer: load a saved state")
        self._refuse_foreign_releases()
        return {
            "mechanism": saved_mechanism(self),
            "max_physical_batch_size": self.max_physical_batch_size,
            "spending": self.budget.state_dict(),
            "private_step": self.private_step.state_dict(),
            # copies, because torch's state dicts share their tensors with the running objects
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            "average": None if self._average is None else self._average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume a run of the same mechanism from a saved state.

        With a ledger and a target epsilon the run may plan more steps than before; an RDP filter then composes them.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state is of another mechanism, or does not fit the model, optimizer or ledger.
        """
        for name in _STATE:
            if name not in state:
                raise ValueError(f"the state has no {name!r}: give what state_dict() of this version returned")
        refuse_other_mechanism(self, state["mechanism"])
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError(
                "the state and this run differ in having a scheduler: build the run with the same scheduler"
            )
        if (state["average"] is None) != (self._average is None):
            raise ValueError("the state and this run differ in keeping an average: build the run with the same ema")
        self.private_step.settings.refuse_other_state(state["private_step"])
        self.budget.load_state_dict(state["spending"])
        if self.private_step.randomness.reproducible:  # rounding and dropout depend on the micro-batches
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

    def _schedule_is_due(self) -> bool:
        return self.scheduler_interval == "step" or self.planned_epochs.complete(self.steps_done)

    @property
    def _lost_release(self) -> bool:
        return not self.between_steps and self.private_step.releases == self._released - 1

    def _refuse_lost_release(self) -> None:
        if self._lost_release:
            raise RuntimeError("a release was interrupted, and its event is spent: load a saved state of the run")

    def _refuse_foreign_releases(self) -> None:
        if self.private_step.releases != self._released and not self._lost_release:
            raise RuntimeError(
                "run.private_step was released or loaded outside of the run, and nothing accounts for it: load a saved "
                "state of the run, and use run.step and run.load_state_dict"
            )
