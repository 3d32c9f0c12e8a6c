"""Cyclic Poisson sampling: one group a record, drawn once, independent of the other records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from pmlf.mechanism.cycles import Groups
from pmlf.mechanism.noise import SecureRandomness, SeededRandomness
from pmlf.sampling import PoissonBatches, Units


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


def test_unseeded_groups_survive_a_restart_and_differ_between_runs() -> None:
    first, second = sampler(), sampler()
    assert first.state_dict() != second.state_dict()
    second.draw(0)
    second.load_state_dict(first.state_dict())
    for step in range(3):
        assert set(drawn(second, step)) <= set(first._groups.at(step).tolist())


def test_a_draw_of_the_same_groups_is_kept_when_a_state_is_loaded() -> None:
    batches = sampler()
    before = [chunk.tolist() for chunk in batches.draw(4)]
    batches.load_state_dict(batches.state_dict())
    assert [chunk.tolist() for chunk in batches.draw(4)] == before


def test_batches_drawn_ahead_from_other_groups_are_not_issued() -> None:
    first, second = sampler(), sampler()
    batches = second.batches(0, 4)
    next(batches)
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="call batches again"):
        next(batches)


def test_seeded_groups_follow_from_the_seed_and_store_no_key() -> None:
    first, second = (sampler(randomness=SeededRandomness(5)) for _ in range(2))
    assert first.state_dict()["groups"]["key"] is None
    assert [drawn(first, step) for step in range(4)] == [drawn(second, step) for step in range(4)]


def test_plain_sampling_has_no_groups_and_the_draws_of_its_seed() -> None:
    batches = sampler(cycle=1, randomness=SeededRandomness(5))
    expected = SeededRandomness(5).stream("sampling", 0).chosen(60, 1 / 6)
    assert drawn(batches, 0) == expected.tolist()
    assert sampler(cycle=1).state_dict() == {"groups": None}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"cycle": 1}, "differ in cycle"),
        ({"cycle": 2}, "the state has cycle=3 and this sampler has 2"),
        ({"records": 90}, "the state has population=60 and this sampler has 90"),
        ({"randomness": SeededRandomness(1)}, "differ in having a seed"),
    ],
    ids=str,
)
def test_a_state_of_another_kind_of_sampling_is_refused(other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**other).load_state_dict(sampler().state_dict())
    with pytest.raises(ValueError, match="the state has no 'groups'"):
        sampler().load_state_dict({})


@pytest.mark.parametrize("randomness", [SecureRandomness(), SeededRandomness(4)], ids=["secure", "seeded"])
def test_groups_are_continued_with_the_same_records_in_the_same_order_only(randomness: Any) -> None:
    def of(dataset: Any, **more: Any) -> PoissonBatches:
        return PoissonBatches(dataset, expected_batch_size=10.0, cycle=3, randomness=randomness, **more)

    state = of(torch.arange(60)).state_dict()
    of(torch.arange(60)).load_state_dict(state)
    swapped = torch.arange(60)
    swapped[[41, 7]] = swapped[[7, 41]]
    with pytest.raises(ValueError, match="their order have changed"):
        of(swapped).load_state_dict(state)


def test_a_unit_with_another_name_does_not_move_the_others_unseen() -> None:
    def of(names: list[str]) -> PoissonBatches:
        units = Units(names, most=4)
        return PoissonBatches(
            torch.arange(60), expected_batch_size=5.0, cycle=3, randomness=SecureRandomness(), units=units
        )

    names = [f"patient {number % 20:02}" for number in range(60)]
    state = of(names).state_dict()
    of(names).load_state_dict(state)
    with pytest.raises(ValueError, match="their units or their order have changed"):
        of(["patient 99" if name == "patient 03" else name for name in names]).load_state_dict(state)


def test_records_that_are_random_cannot_be_compared_and_that_is_said() -> None:
    class Random:
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, np.random.default_rng().integers(2**60)])

    def of() -> PoissonBatches:
        return PoissonBatches(Random(), expected_batch_size=10.0, cycle=3, randomness=SecureRandomness())

    with pytest.warns(UserWarning, match="epsilon holds only if it is the same"):
        of().load_state_dict(of().state_dict())


def test_groups_that_cannot_fill_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="bands=7"):
        sampler(cycle=7)
    assert len(sampler(records=60, size=10.0, cycle=6).draw(0)) > 0  # p = 1: the whole group
