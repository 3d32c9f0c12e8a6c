"""What the ranks of a run have in common: draws, budget, plan and records."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.ledger import Ledger, Position
from pmlf.evidence.tally import PrivacyPlan
from pmlf.mechanism.digests import spread_digest
from pmlf.mechanism.noise import Randomness, SharedRandomness
from pmlf.mechanism.records import Collate
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.mechanism.units import Units
from pmlf.parallel.processes import Processes


def shared_draws(randomness: Randomness, processes: Processes) -> Randomness | SharedRandomness:
    """Where draws come from: the same on every rank, from the seed or from a key that rank 0 draws for this run."""
    if processes.size == 1 or randomness.reproducible:
        return randomness
    return SharedRandomness(processes.by_first(lambda: os.urandom(32)))


def budget_of(plan: PrivacyPlan, replayable: bool, ledger: Ledger | None, processes: Processes) -> BudgetGuard:
    """Rank 0's budget writes the ledger; those of other ranks mirror it."""
    if processes.rank > 0 and ledger is not None:
        raise ValueError(f"rank {processes.rank} was given a ledger, which rank 0 alone writes: give it None")
    budget = BudgetGuard(plan, replayable=replayable, ledger=ledger)
    account = processes.by_first(lambda: budget.account)
    return budget if processes.rank == 0 else BudgetGuard(plan, replayable=replayable, mirrored=account)


def affords(budget: BudgetGuard, batch: LogicalBatch, processes: Processes) -> bool:
    """Rank 0's word on whether the budget has room for a step."""
    return processes.by_first(lambda: budget.affords(batch.step, groups=batch.groups))


def spend(budget: BudgetGuard, batch: LogicalBatch, processes: Processes) -> None:
    """Rank 0 records the event of a step; the other ranks wait for its word and count the same.

    Raises:
        RuntimeError: The target epsilon leaves no room.
    """

    def record() -> Position | None:
        if not budget.affords(batch.step, groups=batch.groups):
            raise RuntimeError(
                "another run has spent from the same ledger since this batch was drawn, and the target epsilon leaves "
                "no room for this step: stop here"
            )
        budget.spend(batch.step, groups=batch.groups)
        return budget.position

    position = processes.by_first(record)
    if processes.rank > 0:
        budget.mirror(batch.step, position)


def facts_of_plan(
    plan: PrivacyPlan,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    ema: float | None,
    max_physical_batch_size: int | str,
) -> dict[str, str]:
    """What all ranks must have in common, besides model, step and records."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    sizes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    return {
        "plan of the run": str(plan),
        "optimizer": f"{type(optimizer).__name__} {groups} {sizes}",
        "scheduler": type(scheduler).__name__,
        "ema": str(ema),
        "max_physical_batch_size": str(max_physical_batch_size),
    }


def facts_of_records(
    dataset: Any,
    collate_fn: Collate | None,
    lengths: NDArray[np.int64] | None,
    units: Units | None,
    processes: Processes,
) -> dict[str, str]:
    """The number of records and a digest of some, spread over the dataset, unless they are random. In memory only."""
    if processes.size == 1:
        return {}
    records, key = len(dataset), processes.by_first(lambda: os.urandom(32))
    return {
        "dataset (its number of records)": str(records),
        "dataset (the content of a record)": str(spread_digest(dataset, collate_fn, key)),
        "lengths of records": "" if lengths is None else blake2b(lengths.tobytes()).hexdigest(),
        "units of records": "" if units is None else units.digest(key),
    }
