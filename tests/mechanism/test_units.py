"""Units are drawn by Poisson sampling, bring at most so many records, and stay whole in a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pmlf.mechanism.noise import SeededRandomness, Stream
from pmlf.mechanism.sampling import PoissonBatches
from pmlf.mechanism.units import Units

SIZES = (1, 2, 3, 50, 7, 1, 9, 20, 4, 4)
IDS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(SIZES)), SIZES))


def sampler(expected: float = 5.0, size: int = 64, most: int = 8, **more: Any) -> PoissonBatches:
    return PoissonBatches(
        torch.arange(len(IDS)),
        expected_batch_size=expected,
        randomness=SeededRandomness(1),
        max_physical_batch_size=size,
        units=Units(IDS, most=most),
        **more,
    )


def test_units_are_counted_not_records() -> None:
    units = Units(["b", "a", "b"], name="patient")
    assert (units.count, units.records, units.description) == (2, 3, "one patient; 2 units, 3 records")
    assert sampler().population == len(SIZES) and sampler().rate == 0.5


@pytest.mark.slow
def test_every_unit_joins_with_the_same_probability_however_many_records_it_has() -> None:
    draws = sampler()
    joined = np.zeros(len(SIZES))
    for step in range(2000):
        joined[np.unique(IDS[np.concatenate([*draws.draw(step), np.zeros(0, int)])])] += 1
    # five deviations of a binomial of 2000 draws at 1/2, for each of ten units
    assert np.abs(joined - 1000).max() < 5 * np.sqrt(2000) / 2


@pytest.mark.parametrize("size", [8, 20, 1000])
def test_micro_batches_have_whole_units_of_at_most_so_many_records(size: int) -> None:
    draws = sampler(expected=10.0, size=size)
    chunks = draws.draw(0)
    owners = [set(IDS[chunk].tolist()) for chunk in chunks]
    assert sum(map(len, owners)) == len(set().union(*owners)) == len(SIZES)
    assert max(map(len, chunks)) <= size
    brought = np.bincount(IDS[np.concatenate(chunks)])
    assert brought.tolist() == [min(8, size) for size in SIZES]


def test_lengths_keep_units_whole() -> None:
    lengths = np.random.default_rng(1).integers(1, 99, len(IDS))
    chunks = sampler(expected=10.0, size=20, lengths=lengths).draw(0)
    assert sum(len(set(IDS[chunk].tolist())) for chunk in chunks) == len(SIZES)


def test_ranks_share_units_not_their_records() -> None:
    parts = [sampler(expected=10.0, size=20, rank=rank, ranks=2).draw(0) for rank in range(2)]
    owners = [set(IDS[np.concatenate(part)].tolist()) for part in parts]
    assert not owners[0] & owners[1] and len(owners[0] | owners[1]) == len(SIZES)


def test_what_a_unit_brings_depends_on_no_other_unit() -> None:
    units = Units(IDS, most=5)

    def brought(*chosen: int) -> set[int]:
        found = units.brought(np.array(chosen), Stream(bytes(32)))
        return set(found[units.of(found) == 3].tolist())

    assert len(brought(3)) == 5
    assert brought(3) == brought(0, 3, 7) == brought(3, 9)


def test_a_large_unit_brings_other_records_at_every_step_each_equally_often() -> None:
    draws, often = sampler(expected=10.0), np.zeros(len(IDS))
    for step in range(500):
        often[np.concatenate(draws.draw(step))] += 1
    own = often[IDS == 3]  # 50 records, of which 8 are brought: 80 times on average, with a deviation of 8.2
    assert own.sum() == 500 * 8 and own.min() > 80 - 5 * 8.2 and own.max() < 80 + 5 * 8.2


def test_a_draw_is_issued_again_with_the_same_records() -> None:
    draws = sampler(expected=10.0)
    first = [chunk.tolist() for chunk in draws.draw(4)]
    assert [chunk.tolist() for chunk in draws.draw(4)] == first


@pytest.mark.parametrize(
    ("ids", "most", "size", "said"),
    [
        (IDS[1:], 8, 64, "100 ids for 101 records"),
        (IDS, 65, 64, "up to 65 records, which is more than max_physical_batch_size=64"),
        (IDS, 0, 64, "^most=0 is not"),
        ([None] * len(IDS), 8, 64, "missing"),
    ],
)
def test_units_that_cannot_be_sampled_are_refused(ids: Any, most: int, size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PoissonBatches(
            torch.arange(len(IDS)),
            expected_batch_size=2,
            randomness=SeededRandomness(0),
            max_physical_batch_size=size,
            units=Units(ids, most=most),
        )
