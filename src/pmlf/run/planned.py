"""What a run is going to spend, from the arguments of `make_private`."""

from __future__ import annotations

from pmlf.basics.arguments import is_number, require_count, require_positive, steps_of_epochs, warn_of_large_delta
from pmlf.evidence.budget import continued_noise
from pmlf.evidence.ledger import Ledger
from pmlf.evidence.tally import PrivacyPlan
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.truncation import chance_of_a_cut
from pmlf.parallel.processes import Processes


def planned(
    *,
    records: int,
    batch_size: float,
    largest_batch: int | None,
    epochs: float | None,
    steps: int | None,
    target_epsilon: float | None,
    target_delta: float,
    noise_multiplier: float | None,
    bands: int,
    unit: str,
    ledger: Ledger | None,
    processes: Processes,
) -> PrivacyPlan:
    """The plan of a run. Rank 0 calibrates the noise."""
    delta = _checked_delta(target_delta, records)
    number = planned_steps(epochs, steps, records, batch_size)
    rate = _sample_rate(batch_size, records)
    overflow = chance_of_a_cut(
        largest_batch=largest_batch,
        records=records,
        batch_size=batch_size,
        steps=number,
        epsilon=target_epsilon,
        delta=delta,
        bands=bands,
        processes=processes.size,
    )
    noise = processes.by_first(
        lambda: _noise_multiplier(
            noise_multiplier,
            target_epsilon,
            delta,
            rate=rate,
            steps=number,
            ledger=ledger,
            bands=bands,
            overflow=overflow,
        )
    )
    return PrivacyPlan(
        event=Event(noise_multiplier=noise, sample_rate=accounting.cyclic(rate, number, bands)[0], overflow=overflow),
        steps=number,
        delta=delta,
        target_epsilon=target_epsilon,
        bands=bands,
        unit=unit,
    )


def planned_steps(epochs: float | None, steps: int | None, records: int, batch_size: float) -> int:
    """The number of steps T that a run plans, from `epochs` or from `steps`.

    Args:
        epochs: How often each record is drawn on average, or None.
        steps: The number of steps, or None.
        records: The number of records, n.
        batch_size: The expected batch size, B.

    Returns:
        T, which is ceil(epochs * n / B) if epochs are given.

    Raises:
        ValueError: Both or neither are given, or one is out of range.

    >>> planned_steps(2, None, 120, 50)
    5
    """
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs} and steps={steps} were given: give epochs or steps, one of the two")
    if steps is not None:
        require_count("steps", steps, "it is the number of noisy gradients to release")
        return steps
    assert epochs is not None
    return steps_of_epochs(epochs, records, batch_size)


def _checked_delta(delta: float, records: int) -> float:
    if not (is_number(delta) and 0.0 < delta < 1.0):
        raise ValueError(
            f"target_delta={delta} is not in (0, 1): give a number well below 1/n, here below {1.0 / records:.2g}"
        )
    warn_of_large_delta("target_delta", delta, records, stacklevel=5)
    return delta


def _sample_rate(batch_size: float, records: int) -> float:
    if not (is_number(batch_size) and 0.0 < batch_size <= records):
        raise ValueError(
            f"batch_size={batch_size} is not in (0, {records}]: it is the expected number of samples in a step, at "
            "most the size of the dataset"
        )
    if batch_size / records < accounting.LEAST_RATE:
        raise ValueError(
            f"batch_size={batch_size} of {records} records is a sampling rate below {accounting.LEAST_RATE:g}, too "
            "small to account for: give a larger batch_size"
        )
    return batch_size / records


def _noise_multiplier(
    given: float | None,
    target_epsilon: float | None,
    delta: float,
    *,
    rate: float,
    steps: int,
    ledger: Ledger | None,
    bands: int,
    overflow: float,
) -> float:
    """The noise multiplier as given, or that of the run that the ledger continues, or calibrated to the target."""
    if not (ledger is None or isinstance(ledger, Ledger)):
        raise ValueError(f"ledger={ledger!r} is not a ledger: give pmlf.Ledger(path, dataset='...')")
    if (target_epsilon is None) == (given is None):
        raise ValueError(
            f"target_epsilon={target_epsilon} and noise_multiplier={given} were given: give target_epsilon or "
            "noise_multiplier, one of the two"
        )
    if given is None and ledger is not None:
        given = continued_noise(ledger)
    if given is not None:
        require_positive("noise_multiplier", given, "without noise nothing is private")
        accounting.check_mechanism(given, accounting.cyclic(rate, steps, bands)[0], steps)
        return given
    assert target_epsilon is not None
    return accounting.noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=delta,
        sample_rate=rate,
        steps=steps,
        spent=None if ledger is None else ledger.tally.events,
        bands=bands,
        overflow=overflow,
    )
