"""`make_private`: a model, an optimizer and a dataset made into a private run of T steps."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import default_collate

from pmlf.basics.arguments import is_number, plain, require_count, require_positive, steps_of_epochs
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.capture import LossFunction
from pmlf.engine.momentum import Clipping
from pmlf.engine.plan import Gradients
from pmlf.evidence.ledger import Ledger
from pmlf.evidence.spending import Spending, continued_noise
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.mechanism.records import alone, collation, steady, takes_together
from pmlf.mechanism.sampling import PoissonBatches, population
from pmlf.methods import Method
from pmlf.run.averaging import ParameterAverage
from pmlf.run.evaluation import confusion_matrix
from pmlf.run.private_run import PrivateRun
from pmlf.run.sizing import EXAMPLES, physical_batch_size
from pmlf.step import PrivateStep

_COLLATED = 256  # records among which the shortest and the longest are looked for, where no lengths are given


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
    gradients: Gradients = "ghost",
    assume_independent_samples: bool = False,
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
    `secure_noise` hardens the noise against floating-point attacks (a mitigation, at well below a per cent of a step).
    `gradients="vmap"` takes models that the layers' rules refuse, as far as `torch.func` takes them; `"one-by-one"`
    takes any, one sample at a time, which is slow.
    Samples are proven not to influence each other, and a few of every step are run again alone;
    `assume_independent_samples=True` gives up both, and the certificate says so.
    `max_physical_batch_size="auto"` takes a size that fits memory and is fast, measured once on synthetic inputs.
    `scheduler.step()` is called once after every step. `ema` is the decay of an average of the released parameters,
    at no privacy cost (`PrivateRun.averaged_model`). `lengths`, a number a record, has records of like length share a
    micro-batch, for less padding; the draw and the step stay what they are. Every step is written to the `ledger`
    before it is released, and the target covers all that is in it. What would break the guarantee is refused before
    any training.
    """
    _refuse_many_processes()
    records = population(dataset)
    batch_size, epochs, steps, clip_norm = plain(batch_size), plain(epochs), plain(steps), plain(clip_norm)
    target_epsilon, noise_multiplier = plain(target_epsilon), plain(noise_multiplier)
    delta = _checked_delta(plain(target_delta), records)
    planned = _planned_steps(epochs, steps, records, batch_size)
    if not (is_number(batch_size) and 0.0 < batch_size <= records):
        raise ValueError(
            f"batch_size={batch_size} is not in (0, {records}]: it is the expected number of samples a step, at most "
            "the size of the dataset"
        )
    if batch_size / records < accounting.LEAST_RATE:
        raise ValueError(f"batch_size={batch_size} of {records} records is too small a rate to account for: give more")
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
        accounting.check_mechanism(noise_multiplier, batch_size / records, planned)
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
        gradients=gradients,
        assume_independent_samples=assume_independent_samples,
    )
    together = False
    if collate_fn is not None or takes_together(dataset):  # else records come one by one, and are not padded
        extremes = () if lengths is None else (int(lengths.argmin()), int(lengths.argmax()))
        looked_at = sorted({*range(min(_COLLATED, records)), *extremes})
        # random ones cannot be compared, and come one by one
        together = takes_together(dataset) and steady(dataset, looked_at, collate_fn)
        private_step.check_collation(looked_at, collation(dataset, looked_at, collate_fn, together=together))
    if isinstance(max_physical_batch_size, str) and max_physical_batch_size == "auto":
        example = (collate_fn or default_collate)([alone(dataset, index) for index in range(min(EXAMPLES, records))])
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
        together=together,
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
    require_count("batch_size", batch_size, "it counts the records looked at together")
    confusion = confusion_matrix(
        model, dataset, logits=logits, labels=labels, batch_size=batch_size, collate_fn=collate_fn
    )
    return int(confusion.trace()) / int(confusion.sum())


def _refuse_many_processes() -> None:
    """One process accounts for a run: each of several would draw, release and spend by itself."""
    group = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    given = os.environ.get("WORLD_SIZE", "1")
    launched = int(given) if given.isdecimal() else 1
    processes = max(dist.get_world_size() if group else 1, launched)
    if processes > 1:
        raise ValueError(
            f"make_private is called in one of {processes} processes (torch.distributed or WORLD_SIZE={given}), and "
            "each would draw and spend by itself: start a single process, with python and not with torchrun"
        )


def _checked_delta(delta: float, records: int) -> float:
    if not (is_number(delta) and 0.0 < delta < 1.0):
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
