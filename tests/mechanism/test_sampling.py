"""Logical batches: what is drawn, loaded lazily, used once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.mechanism.sampling import PoissonBatches


class Numbers(Dataset[Any]):
    """Sample i is the number i; remembers what was loaded."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.loaded.append(index)
        return torch.tensor([float(index)]), index


def sampler(size: int = 200, batch: float = 20, physical: int = 7, **options: Any) -> PoissonBatches:
    options.setdefault("randomness", SeededRandomness(1))
    return PoissonBatches(Numbers(size), expected_batch_size=batch, max_physical_batch_size=physical, **options)


def drawn(batches: PoissonBatches, steps: int) -> list[list[int]]:
    return [[int(i) for micro in batch for i in micro[1]] for batch in batches.batches(0, steps)]


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_hold_exactly_the_draw_in_pieces(workers: int) -> None:
    batches = sampler(num_workers=workers)
    seen = []
    for batch in batches.batches(0, 30):
        indices = []
        for numbers, (values, labels) in batch.numbered():
            assert 1 <= len(labels) <= 7
            assert torch.equal(numbers, labels) and torch.equal(values[:, 0], labels.float())
            indices += labels.tolist()
        seen.append(indices)
    stream = SeededRandomness(1)
    assert seen == [stream.stream("sampling", t).chosen(200, 0.1).tolist() for t in range(30)]


def test_physical_size_and_start_change_nothing_about_what_is_drawn() -> None:
    assert drawn(sampler(physical=1), 10) == drawn(sampler(physical=200), 10)
    later = [[int(i) for micro in b for i in micro[1]] for b in sampler().batches(4, 10)]
    assert later == drawn(sampler(), 10)[4:]


def test_micro_batches_load_lazily() -> None:
    dataset = Numbers(100)
    batches = PoissonBatches(
        dataset, expected_batch_size=50, randomness=SeededRandomness(0), max_physical_batch_size=10
    ).batches(0, 2)
    batch = next(batches)
    assert dataset.loaded == []
    parts = iter(batch)
    next(parts)
    assert len(dataset.loaded) == 10


def test_empty_draws_are_batches_too_and_unread_ones_do_not_shift_the_next() -> None:
    batches = sampler(size=50, batch=0.5)
    sizes = [sum(len(micro[1]) for micro in batch) for batch in batches.batches(0, 60)]
    assert len(sizes) == 60 and sizes.count(0) > 10
    kept = [[int(i) for micro in batch for i in micro[1]] for t, batch in enumerate(sampler().batches(0, 8)) if t % 2]
    assert kept == drawn(sampler(), 8)[1::2]


def test_a_draw_serves_once() -> None:
    batch = next(sampler().batches(0, 1))
    list(batch)
    with pytest.raises(RuntimeError, match="step 0 was used already"):
        list(batch)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_draws_without_a_seed_differ_and_each_is_loaded_as_drawn(workers: int) -> None:
    """A draw made twice, once for the loader and once for the caller, would mix up what is stepped."""
    seen = []
    for _ in range(2):
        batches = sampler(size=60, batch=2, physical=2, randomness=SecureRandomness(), num_workers=workers)
        for batch in batches.batches(0, 40):  # some of them empty
            for numbers, (_, labels) in batch.numbered():
                assert torch.equal(numbers, labels)
                seen.append(tuple(labels.tolist()))
    assert len(set(seen)) > len(seen) // 2


@pytest.mark.slow
@pytest.mark.parametrize("randomness", [SecureRandomness(), SeededRandomness(1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_has_one_draw_however_often_it_is_asked_for(randomness: Randomness, workers: int) -> None:
    """Draws that the loader has made ahead are of later steps, and stay theirs."""
    batches = sampler(randomness=randomness, num_workers=workers)
    for step in range(3):
        found = []
        for until in (step + 1, 9, 9):
            issued = batches.batches(step, until)
            found.append([int(i) for micro in next(issued) for i in micro[1]])
        assert found[0] == found[1] == found[2]
        batches.passed(step)


def test_a_step_that_is_taken_again_draws_afresh() -> None:
    batches = sampler(randomness=SecureRandomness())
    first, second = drawn(batches, 5), drawn(batches, 5)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_a_draw_is_neither_copied_nor_pickled() -> None:
    batches = sampler()
    for one_use in (batches, next(batches.batches(0, 1))):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(one_use)


def test_loading_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn(sampler(), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_collate_function_that_drops_samples_is_refused() -> None:
    lossy = sampler(collate_fn=lambda items: torch.utils.data.default_collate(items[:-1] or items))
    with pytest.raises(ValueError, match="collate_fn drops or repeats samples"):
        drawn(lossy, 5)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers(0), "the dataset is empty"),
        (Endless(), r"dataset \(Endless\) is iterable only"),
        (iter([1, 2]), "dataset is a list_iterator without a length"),
    ],
)
def test_a_dataset_that_cannot_be_sampled_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoissonBatches(dataset, expected_batch_size=1, randomness=SeededRandomness(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 201}, r"batch_size=201 is not in \(0, 200\]"),
        ({"batch": 0}, "batch_size=0 is not in"),
        ({"batch": float("nan")}, "batch_size=nan is not in"),
        ({"physical": 0}, "max_physical_batch_size=0 is not a whole number"),
        ({"physical": 2.5}, "max_physical_batch_size=2.5 is not"),
    ],
)
def test_bad_sizes_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**options)


def test_draws_are_not_a_shuffled_pass_over_the_records() -> None:
    """What is accounted for is Poisson sampling: in the n/B steps of an epoch a record comes 0, 1, 2, ... times."""
    times = torch.zeros(2000)
    sizes = set()
    for batch in drawn(sampler(size=2000, batch=20, physical=2000), 100):
        assert len(set(batch)) == len(batch)
        sizes.add(len(batch))
        times[batch] += 1
    assert len(sizes) > 5
    expected = torch.tensor([0.366, 0.370, 0.185])  # binomial(100, 1/100); a shuffle would give 0, 1, 0
    found = torch.stack([(times == count).double().mean() for count in range(3)])
    assert (found - expected).abs().max() < 0.05
