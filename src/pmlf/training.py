"""`make_private`: a model, an optimizer and a dataset made into a private run of T steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import default_collate

from pmlf import accounting
from pmlf.accounting import Event
from pmlf.arguments import require_count, require_positive, steps_of_epochs
from pmlf.averaging import ParameterAverage
from pmlf.capture import LossFunction
from pmlf.certificate import certificate
from pmlf.evaluation import confusion_matrix
from pmlf.ledger import Ledger
from pmlf.methods import Method
from pmlf.momentum import Clipping
from pmlf.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.sampling import LogicalBatch, PoissonBatches, population
from pmlf.sizing import EXAMPLES, physical_batch_size
from pmlf.spending import Spending, continued_noise
from pmlf.step import Augmentation, PrivateStep


def make_private(
    *,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    loss_fn: LossFunction,
    method: Method | str = "dp-pmlf",
    target_epsilon: float | None = None,
    target_delta: float,
    noise_multiplier: float | None = None,
    batch_size: float,
    epochs: float | None = None,
    steps: int | None = None,
    clip_norm: float = 1.0,
    clipping: Clipping = "flat",
    max_physical_batch_size: int | Literal["auto"] = 256,
    seed: int | None = None,
    scheduler: LRScheduler | None = None,
    ema: float | None = None,
    augmentation: Augmentation | None = None,
    secure_noise: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    lengths: NDArray[np.int64] | None = None,
    num_workers: int = 0,
    device: torch.device | str | None = None,
    ledger: Ledger | None = None,
) -> PrivateRun:
    """A `PrivateRun` whose T steps together are (target_epsilon, target_delta)-DP for adding or removing one record.

    `batch_size` is the expected size B of a Poisson draw; T = ceil(epochs * n / B) unless `steps` gives it. `loss_fn`
    takes (model, batch) and returns one loss a sample. The noise is calibrated to `target_epsilon`, or given.
    `seed=None` means cryptographic noise and sampling; a seed makes the run reproducible, and so not fit for release.
    `secure_noise` hardens the noise against floating-point attacks (a mitigation, at a few per cent of a step).
    `max_physical_batch_size="auto"` takes a size that fits memory and is fast, measured once on synthetic inputs.
    `scheduler.step()` is called once after every step. `ema` is the decay of an average of the released parameters,
    at no privacy cost (`PrivateRun.averaged_model`). `lengths`, a number a record, has records of like length share a
    micro-batch, for less padding; the draw and the step stay what they are. Every step is written to the `ledger`
    before it is released, and the target covers all that is in it. What would break the guarantee is refused before
    any training.
    """
    records = population(dataset)
    delta = _checked_delta(target_delta, records)
    planned = _planned_steps(epochs, steps, records, batch_size)
    if not 0.0 < batch_size <= records:
        raise ValueError(
            f"batch_size={batch_size} is not in (0, {records}]: it is the expected number of samples a step, at most "
            "the size of the dataset"
        )
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError("give target_epsilon or noise_multiplier, one of the two")
    if noise_multiplier is None and ledger is not None:
        noise_multiplier = continued_noise(ledger)
    if noise_multiplier is None:
        assert target_epsilon is not None
        noise_multiplier = accounting.noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=delta,
            sample_rate=batch_size / records,
            steps=planned,
            spent=None if ledger is None else ledger.tally.events,
        )
    else:
        require_positive("noise_multiplier", noise_multiplier, "without noise nothing is private")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed={seed!r} is not a whole number or None")
    _check_optimizer(model, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau follows a loss, which is sensitive: use a scheduler of the step count alone"
        )
    randomness: Randomness = SecureRandomness() if seed is None else SeededRandomness(seed)
    if device is not None:
        model.to(device)
    private_step = PrivateStep(
        model,
        loss_fn,
        method=method,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=batch_size,
        generator=randomness,
        clipping=clipping,
        augmentation=augmentation,
        secure_noise=secure_noise,
    )
    if max_physical_batch_size == "auto":
        first = [dataset[index] for index in range(min(EXAMPLES, records))]
        example = (collate_fn or default_collate)(first)
        most = math.ceil(batch_size + 4 * math.sqrt(batch_size))  # hardly any draw is larger
        max_physical_batch_size = physical_batch_size(private_step, example, most=min(most, records))
    sampler = PoissonBatches(
        dataset,
        expected_batch_size=batch_size,
        randomness=randomness,
        max_physical_batch_size=max_physical_batch_size,
        collate_fn=collate_fn,
        num_workers=num_workers,
        device=private_step.trained[0].device,
        lengths=lengths,
    )
    average = None if ema is None else ParameterAverage(ema)
    spending = Spending(
        event=Event(noise_multiplier=noise_multiplier, sample_rate=sampler.rate),
        planned_steps=planned,
        replayable=randomness.reproducible,
        delta=delta,
        target_epsilon=target_epsilon,
        ledger=ledger,
    )
    return PrivateRun(private_step, sampler, optimizer, scheduler, planned, delta, average, spending)


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
        self._between_steps = True

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

        They end before the step that would pass the target epsilon.
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
        if self.private_step.pending:
            raise RuntimeError(
                "samples were accumulated outside run.step, and the sampler did not draw them: "
                "run.private_step.discard() forgets them"
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
        """Spent so far, at the run's delta: by PLD, or by an RDP filter where its ledger holds other plans too."""
        return self.spending.epsilon()

    def certificate(self) -> dict[str, Any]:
        """The mechanism, its public constants and the epsilon they give; JSON-ready."""
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
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything released, at a step boundary: never a pending sum, a key or a sample."""
        if not self.between_steps:
            raise RuntimeError("a step was interrupted between its release and the optimizer: go back to a saved state")
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
        self._between_steps = True

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
            "chance": step.randomness.stream("identity").seed() if step.randomness.reproducible else None,
        }


def evaluate(
    model: nn.Module,
    dataset: Any,
    *,
    logits: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0]),
    labels: Callable[[Any], Tensor] = lambda batch: batch[1],
    batch_size: int = 500,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> float:
    """Accuracy on held-out records, which are not protected: a fraction. Eval mode, no gradients, mode restored."""
    confusion = confusion_matrix(
        model, dataset, logits=logits, labels=labels, batch_size=batch_size, collate_fn=collate_fn
    )
    return int(confusion.trace()) / int(confusion.sum())


def _checked_delta(delta: float, records: int) -> float:
    if not 0.0 < delta < 1.0:
        raise ValueError(
            f"target_delta={delta} is not in (0, 1): choose well below 1/n, here below {1.0 / records:.2g}"
        )
    if delta >= 1.0 / records:
        warnings.warn(
            f"target_delta={delta} is not below 1/n = {1.0 / records:.3g}: such a delta allows publishing a record "
            "outright; choose a smaller one",
            stacklevel=3,
        )
    return delta


def _planned_steps(epochs: float | None, steps: int | None, records: int, batch_size: float) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError("give epochs or steps, one of the two")
    if steps is not None:
        require_count("steps", steps, "it counts the noisy gradients that are released")
        return steps
    assert epochs is not None
    return steps_of_epochs(epochs, records, batch_size)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates a closure several times a step, which is not accounted for: use SGD or Adam")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, and noise is dense: use Adam")
    names = {id(p): name for name, p in model.named_parameters()}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if any(key not in names for key in given):
        raise ValueError(
            "the optimizer holds parameters that are not the model's: build it on the model that is trained, after "
            "pmlf.fix_model and any replacement"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(given)]
    if missing:
        raise ValueError(
            f"parameter {missing[0]!r} is trainable but not in the optimizer: give it to the optimizer, or freeze it "
            "(requires_grad_(False))"
        )
