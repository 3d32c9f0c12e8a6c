"""`make_private`: build a private run from a model, an optimizer and a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pmlf.basics.arguments import (
    plain,
)
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.momentum import Clipping
from pmlf.engine.passes import LossFunction
from pmlf.engine.plan import Gradients
from pmlf.evidence.ledger import Ledger
from pmlf.evidence.tally import RECORD
from pmlf.mechanism.adaptive_clipping import AdaptiveClipping
from pmlf.mechanism.noise import randomness_from_seed
from pmlf.mechanism.sampling import PoissonBatches, population
from pmlf.mechanism.units import MOST_RECORDS, Units, require_unit_arguments
from pmlf.methods import Method, resolve
from pmlf.parallel.processes import Group, joined
from pmlf.run.averaging import ParameterAverage
from pmlf.run.iteration import Epochs
from pmlf.run.loaders import Loading, check_records, loading
from pmlf.run.names import OF_OPACUS, known_arguments_only, refuse_wrapped
from pmlf.run.optimizers import check_optimizer
from pmlf.run.planned import planned
from pmlf.run.private_run import PrivateRun
from pmlf.run.scheduling import Interval, checked_interval
from pmlf.run.sizing import measured_size
from pmlf.run.together import budget_of, facts_of_plan, facts_of_records, shared_draws
from pmlf.step import PrivateStep


@known_arguments_only(OF_OPACUS)
def make_private(
    *,
    # what is private
    dataset: Any,
    target_epsilon: float | None = None,
    target_delta: float,
    noise_multiplier: float | None = None,
    batch_size: float | None = None,
    largest_batch: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    clip_norm: float = 1.0,
    clipping: Clipping = "flat",
    adaptive_clipping: AdaptiveClipping | None = None,
    ledger: Ledger | None = None,
    units: Any = None,
    max_records_per_unit: int = MOST_RECORDS,
    unit_name: str = "unit",
    # what is trained
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFunction | nn.Module,
    method: Method | str = "dp-pmlf",
    scheduler: LRScheduler | None = None,
    scheduler_interval: Interval | None = None,
    augmentation: Augmentation | None = None,
    ema: float | None = None,
    # how it runs
    max_physical_batch_size: int | Literal["auto"] = 256,
    seed: int | None = None,
    secure_noise: bool = False,
    gradients: Gradients = "ghost",
    assume_independent_samples: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    lengths: NDArray[np.int64] | None = None,
    num_workers: int = 0,
    device: torch.device | str | None = None,
    group: Group = "auto",
) -> PrivateRun:
    """Build a `PrivateRun`: T private steps that together are (target_epsilon, target_delta)-DP.

    The unit of privacy is one record, added or removed, or, with `units`, one unit with all its records. Every step
    draws a Poisson batch, clips each sample's momentum, adds Gaussian noise to the sum, divides by B and filters the
    result (Algorithm 1); the privacy of T steps is Theorem 2. What would break the guarantee is refused before training
    starts.

    The arguments say, in this order, what is private, what is trained, and how it runs.

    Args:
        dataset: A map-style dataset with `__len__` and `__getitem__`. Its records are what is protected. Or a
            `DataLoader`: its dataset, batch size, collate function and workers are used, its order is not.
        target_epsilon: The epsilon that the run must not pass; the noise is calibrated to it. Give this or
            `noise_multiplier`.
        target_delta: The delta of the guarantee. It must be well below 1/n.
        noise_multiplier: The noise multiplier z: the noise on the sum has standard deviation z * clip_norm.
        batch_size: The expected batch size B of a Poisson draw, at most n. A `DataLoader` has one already.
        largest_batch: The largest number of records in a step: a larger draw is cut to it at random. The epsilon is
            then for one record zeroed out, and delta includes the chance of a cut. None cuts nothing.
        epochs: How often each record is drawn on average: T = ceil(epochs * n / B). Give this or `steps`.
        steps: The number of steps, T.
        clip_norm: The clip norm C, a bound on each sample's part in the sum.
        clipping: "flat" scales a sample down to C if its norm is larger; "automatic" scales by C / (norm + 0.01);
            "per-layer" scales the part of each of L layers down to C / sqrt(L).
        adaptive_clipping: Let the clip norm follow a private quantile of the norms, from `clip_norm` on
            (`pmlf.AdaptiveClipping`). What is released for it is part of the same epsilon.
        ledger: An open `pmlf.Ledger`. Every step is written to it before it is released, and the target then covers
            all that is in it.
        units: One id per record, in the order of the dataset, such as patient numbers: whole numbers or texts. Then
            batches are drawn from the units, the mean of a unit's momenta is clipped once, and n, batch_size, epochs
            and delta count units. Which records have one id is private; the numbers of units and records are public.
        max_records_per_unit: The largest number of records that a unit brings to a step; of more, some are chosen at
            random, at every step anew. At most max_physical_batch_size.
        unit_name: What a unit is called in the certificate, such as "patient".
        model: The model to train. Layers that mix samples, such as BatchNorm, are refused: see `pmlf.fix_model`.
        optimizer: A torch optimizer over the model's trainable parameters. LBFGS and SparseAdam are refused.
        loss_fn: A function of (model, batch) that returns one loss per sample (`reduction="none"`). Or a criterion of
            `torch.nn`, such as `nn.CrossEntropyLoss()`, for batches of (inputs, targets).
        method: A method from `pmlf.methods`, or the name of a preset. If its noise has b bands, batches are drawn
            from b groups of records in turn, which needs b * batch_size <= n.
        scheduler: A learning-rate scheduler. Its `step()` is called after every step, or after every epoch.
        scheduler_interval: "step" or "epoch": what the scheduler counts. None is "step", and warns if the learning rate
            would then fall below a hundredth in the first half of the run.
        augmentation: A random change of each sample, applied before its gradient is taken.
        ema: The decay of an average of the released parameters, 0.99 for example (`PrivateRun.averaged_model`). It
            costs no privacy.
        max_physical_batch_size: The number of samples in memory at once. "auto" measures time and memory on synthetic
            inputs and chooses.
        seed: None for cryptographic noise and sampling. A whole number makes the run reproducible, for experiments
            only: whoever knows the seed can subtract the noise.
        secure_noise: Mitigate floating-point attacks on the noise, at less than 1 % of the time of a step.
        gradients: How per-sample gradients are computed. "ghost" takes them at layers and operations and is the
            fastest. "vmap" uses `torch.func`, for models that "ghost" refuses. "one-by-one" supports every model and
            is slow.
        assume_independent_samples: Skip the proof that samples do not influence each other, and the check of a few
            samples in every step. The certificate says so.
        collate_fn: Makes a batch of a list of records; None for torch's default.
        lengths: One number per record. Records of similar length share a micro-batch, which saves padding and changes
            neither the draw nor the step.
        num_workers: The number of processes that load records.
        device: The device to train on; None leaves the model where it is.
        group: The processes that take every step together. "auto" joins the default process group of
            `torch.distributed` if there is one, as under `torchrun`; a process group joins that one. Every rank gives
            the same arguments, except that only rank 0 has the ledger.

    Returns:
        The run. Use it as `for batch in run.batches(): run.step(batch)`.

    Raises:
        ValueError: An argument is out of range or differs between ranks, or the model, loss, optimizer or dataset
            cannot be private.

    >>> from torch.nn.functional import cross_entropy
    >>> from torch.utils.data import TensorDataset
    >>> inputs, model = torch.randn(200, 4), nn.Linear(4, 2)
    >>> run = make_private(
    ...     model=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    ...     dataset=TensorDataset(inputs, (inputs[:, 0] > 0).long()),
    ...     loss_fn=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
    ...     target_epsilon=1.0, target_delta=1e-4, batch_size=50, epochs=2,
    ... )
    >>> for batch in run.batches():
    ...     run.step(batch)
    >>> run.steps_done, 0.99 < run.epsilon() <= 1.0
    (8, True)
    """
    processes = joined(group, "make_private")
    refuse_wrapped(model, optimizer)
    loads = loading(dataset, plain(batch_size), collate_fn, num_workers)
    batch_size = loads.batch_size
    protected_units, records = _protected(loads.dataset, units, max_records_per_unit, unit_name)
    method = resolve(method)
    bands = method.noise.bands
    plan = planned(
        records=records,
        batch_size=batch_size,
        largest_batch=largest_batch,
        epochs=plain(epochs),
        steps=plain(steps),
        target_epsilon=plain(target_epsilon),
        target_delta=plain(target_delta),
        noise_multiplier=plain(noise_multiplier),
        bands=bands,
        unit=RECORD if protected_units is None else protected_units.name,
        ledger=ledger,
        processes=processes,
    )
    randomness = randomness_from_seed(seed)
    check_optimizer(model, optimizer, method)
    epoch_count = Epochs(records=records, batch_size=batch_size, steps=plan.steps).count
    interval = checked_interval(scheduler, scheduler_interval, optimizer, steps=plan.steps, epochs=epoch_count)
    processes.require_same(facts_of_plan(plan, optimizer, scheduler, ema, max_physical_batch_size))
    if device is not None:
        model.to(device)
    private_step = PrivateStep(
        model,
        loss_fn,
        method=method,
        clip_norm=plain(clip_norm),
        noise_multiplier=plan.event.noise_multiplier,
        expected_batch_size=batch_size,
        generator=randomness,
        clipping=clipping,
        adaptive_clipping=adaptive_clipping,
        augmentation=augmentation,
        secure_noise=secure_noise,
        cycle=bands,
        gradients=gradients,
        assume_independent_samples=assume_independent_samples,
        units=protected_units is not None,
        group=processes,
    )
    # an overflow of 0 is accounted for as whole draws, whatever the number of records
    cut_to = largest_batch if plan.event.overflow else None
    sampler = _sampler(loads, private_step, protected_units, lengths, max_physical_batch_size, cut_to)
    average = _average(ema, private_step)
    budget = budget_of(plan, randomness.reproducible, ledger, processes)
    return PrivateRun(private_step, sampler, optimizer, scheduler, average, budget, interval)


def _protected(dataset: Any, units: Any, most: int, name: str) -> tuple[Units | None, int]:
    """The units that are protected, None for records, and their number, n."""
    records = population(dataset)
    if units is None:
        return None, records
    require_unit_arguments(most, name)
    found = Units(units, most=most, name=name)
    found.check(records, together=most)
    return found, found.count


def _sampler(
    loads: Loading,
    step: PrivateStep,
    units: Units | None,
    lengths: NDArray[np.int64] | None,
    size: int | Literal["auto"],
    largest_batch: int | None,
) -> PoissonBatches:
    """The draws of a run, after checks that records do not change each other when they are loaded and collated."""
    dataset, collate_fn, processes = loads.dataset, loads.collate_fn, step.processes
    processes.require_same(facts_of_records(dataset, collate_fn, lengths, units, processes))
    loaded_together = check_records(step, dataset, collate_fn, lengths)
    return PoissonBatches(
        dataset,
        expected_batch_size=loads.batch_size,
        randomness=shared_draws(step.randomness, processes),
        max_physical_batch_size=measured_size(size, step, dataset, collate_fn, units),
        collate_fn=collate_fn,
        num_workers=loads.num_workers,
        device=step.trained[0].device,
        lengths=lengths,
        together=loaded_together,
        rank=processes.rank,
        ranks=processes.size,
        cycle=step.settings.cycle,
        largest_batch=largest_batch,
        units=units,
    )


def _average(ema: float | None, step: PrivateStep) -> ParameterAverage | None:
    if ema is not None and step.sharded:
        raise ValueError(f"ema={ema} needs a copy of the model, and fully_shard has cut it: leave `ema` out")
    return None if ema is None else ParameterAverage(ema)
