"""Cyclic Poisson sampling: one group a record, drawn once, independent of the other records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from pmlf.mechanism.cycles import Groups
from pmlf.mechanism.noise import SecureRandomness, SeededRandomness
from pmlf.sampling import PoissonBatches


def sampler(records: int = 60, size: float = 10.0, cycle: int = 3, **more: object) -> PoissonBatches:
    arguments = {"randomness": SecureRandomness(), **more}
    return PoissonBatches(torch.arange(records), expected_batch_size=size, cycle=cycle, **arguments)  # type: ignore[arg-type]


def drawn(batches: PoissonBatches, step: int) -> list[int]:
    found = [int(i) for chunk in batches.draw(step) for i in chunk]
    batches.passed(step)
    return found


def test_a_record_takes_part_only_in_the_steps_of_its_group() -> None:
    batches = sampler()
    steps: dict[int, set[int]] = {}
    for step in range(60):
        for record in drawn(batches, step):
            steps.setdefault(record, set()).add(step % 3)
    assert len(steps) == 60 and all(len(groups) == 1 for groups in steps.values())


def test_a_record_is_drawn_with_the_rate_of_a_group() -> None:
    """Each of 60 records has 400 chances at p = 3 * 10 / 60."""
    batches = sampler()
    times = np.bincount([record for step in range(1200) for record in drawn(batches, step)], minlength=60)
    assert stats.chisquare([times.sum(), 60 * 400 - times.sum()]).pvalue > 1e-6
    assert stats.binomtest(int(times.max()), 400, 0.5).pvalue > 1e-7


def test_the_steps_of_a_record_are_independent_of_each_other() -> None:
    batches = sampler(records=2000, size=400.0, cycle=2)
    first, second = (set(drawn(batches, step)) for step in (0, 2))
    table = [[len(first & second), len(first - second)], [len(second - first), 1000 - len(first | second)]]
    assert stats.chi2_contingency(table).pvalue > 1e-7


@pytest.mark.slow
def test_groups_are_uniform_and_pairwise_independent() -> None:
    groups = np.stack([[len(Groups(1, 4, SecureRandomness()).at(g)) for g in range(4)] for _ in range(4000)])
    assert stats.chisquare(groups.sum(0)).pvalue > 1e-7
    whole = Groups(100_000, 4, SecureRandomness())
    label = np.zeros(100_000, dtype=int)
    for group in range(4):
        label[whole.at(group)] = group
    table = np.histogram2d(label[:-1], label[1:], bins=4)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-7


def test_the_group_of_a_record_does_not_depend_on_how_many_others_there_are() -> None:
    few, many = (Groups(records, 5, SeededRandomness(1)) for records in (50, 500))
    for group in range(5):
        assert few.at(group).tolist() == [record for record in many.at(group).tolist() if record < 50]


def test_every_unseeded_sampler_has_groups_of_its_own_with_a_name() -> None:
    first, second = sampler(), sampler()
    assert first._groups.name != second._groups.name
    assert [first.eligible(step).tolist() for step in range(3)] != [second.eligible(step).tolist() for step in range(3)]
    names = {batch.groups for batch in first.batches(0, 4)}
    assert names == {first._groups.name}


def test_seeded_groups_follow_from_the_seed() -> None:
    first, second = (sampler(randomness=SeededRandomness(5)) for _ in range(2))
    assert first._groups.name == second._groups.name
    assert [drawn(first, step) for step in range(4)] == [drawn(second, step) for step in range(4)]


def test_plain_sampling_has_no_groups_and_the_draws_of_its_seed() -> None:
    batches = sampler(cycle=1, randomness=SeededRandomness(5))
    expected = SeededRandomness(5).stream("sampling", 0).chosen(60, 1 / 6)
    assert drawn(batches, 0) == expected.tolist()
    assert next(sampler(cycle=1).batches(0, 1)).groups == ""


def test_groups_that_cannot_fill_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="bands=7"):
        sampler(cycle=7)
    assert len(sampler(records=60, size=10.0, cycle=6).draw(0)) > 0  # p = 1: the whole group
