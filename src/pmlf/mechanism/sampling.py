"""Poisson sampling, plain or cyclic: logical batches at rate q, cut into micro-batches that are loaded lazily."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pmlf.basics.arguments import is_number, require_count
from pmlf.basics.batches import to_device
from pmlf.mechanism.cycles import EVERYBODY, Groups
from pmlf.mechanism.events import cyclic
from pmlf.mechanism.noise import Randomness, SharedRandomness
from pmlf.mechanism.records import Records
from pmlf.mechanism.units import Units


class LogicalBatch:
    """The samples of one Poisson draw, possibly none. It can be iterated once, which loads the micro-batches lazily.

    Made by `PoissonBatches.batches`.

    Attributes:
        step: The step that it was drawn for.
        cycle: The number of groups that steps draw from in turn; 1 is plain Poisson sampling.
        groups: The name of these groups, which tells one sampler's from another's.
        samples: The number of records that this process loads for it. It is sensitive, unless all are drawn.
    """

    def __init__(
        self,
        step: int,
        chunks: list[NDArray[np.int64]],
        loaded: Iterator[Any],
        *,
        cycle: int = 1,
        groups: str = EVERYBODY,
        passed: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.step = step
        self.cycle = cycle
        self.groups = groups
        self.samples = sum(map(len, chunks))
        self._chunks = chunks
        self._loaded = loaded
        self._passed = passed
        self._used = self._released = False

    @classmethod
    def whole(cls, step: int, *, samples: int, cycle: int = 1) -> LogicalBatch:
        """A batch of all samples that there are, for measurements and audits that draw none."""
        return cls(step, [np.arange(samples)], iter(()), cycle=cycle, groups="whole" if cycle > 1 else EVERYBODY)

    def __getstate__(self) -> None:
        raise TypeError("a logical batch is for one step: it cannot be copied or pickled")

    @property
    def used(self) -> bool:
        """Whether it was iterated."""
        return self._used

    @property
    def released(self) -> bool:
        """Whether its sum was released."""
        return self._released

    def release(self) -> None:
        """Mark it as released: its sampler forgets the draw, so that the same step is drawn anew."""
        self._released = True
        self._passed(self.step)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that are still to be loaded."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[Any]:
        return (micro_batch for _, micro_batch in self.numbered())

    def numbered(self) -> Iterator[tuple[Tensor, Any]]:
        """Iterate over pairs (indices in the dataset, micro-batch).

        Raises:
            RuntimeError: The batch was iterated before.
        """
        if self._used:
            raise RuntimeError(f"the batch of step {self.step} was used already: a Poisson draw is for one step")
        self._used = True
        return self._load()

    def _load(self) -> Iterator[tuple[Tensor, Any]]:
        while self._chunks:
            indices = self._chunks.pop(0)
            micro_batch = next(self._loaded)
            yield torch.from_numpy(indices), micro_batch


class PoissonBatches:
    """Poisson draws from a map-style dataset: every record joins independently with probability q = B/n.

    With cycle=b every record is in one of b groups, and step t draws from group t mod b alone, with probability b q. So
    a record takes part at most once in b steps in a row, as noise of b bands needs (`pmlf.shapes`). A record's group is
    drawn once, uniformly, and independently of the other records.

    A step has one draw. Until the step is done, the same draw is issued again, also after an error: drawing anew until
    a wanted record is in the batch is not sampling at rate q. Draws are kept in memory only.

    Args:
        dataset: A map-style dataset with `__len__` and `__getitem__`.
        expected_batch_size: The expected batch size B, at most n. It need not be a whole number.
        randomness: The source of the draws: `SecureRandomness()`, or `SeededRandomness(seed)` for experiments.
        max_physical_batch_size: The largest micro-batch. It changes memory and speed, not what is drawn.
        collate_fn: Makes a batch of a list of records; None for torch's default.
        num_workers: The number of processes that load records.
        device: The device that micro-batches are moved to.
        lengths: One number per record. Records of similar length share a micro-batch, which saves padding.
        together: Load records through the dataset's `__getitems__`, if they are known to be the same that way.
        rank: Which of `ranks` processes this is. All draw the same batch and cut it into the same micro-batches; this
            one loads the micro-batches rank, rank + ranks, ...
        ranks: The number of processes that share every batch.
        cycle: The number of groups, at most n/B; 1 is plain Poisson sampling.
        largest_batch: M: a draw of more records is cut to M of them, uniformly at random, which the accountant must
            be told (`pmlf.accounting.overflow`). None cuts nothing.
        units: The units that records belong to. Then units are drawn, n, B and M count units, and all records that a
            unit brings are in one micro-batch.

    Raises:
        ValueError: An argument is out of range, or the dataset cannot be sampled by index.

    >>> from pmlf.mechanism.noise import SeededRandomness
    >>> sampler = PoissonBatches(torch.arange(6), expected_batch_size=3, randomness=SeededRandomness(0))
    >>> [[batch.tolist() for batch in logical] for logical in sampler.batches(0, 2)]
    [[[1, 4, 5]], [[0, 1, 3, 5]]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        expected_batch_size: float,
        randomness: Randomness | SharedRandomness,
        max_physical_batch_size: int = 256,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        lengths: NDArray[np.int64] | None = None,
        together: bool = False,
        rank: int = 0,
        ranks: int = 1,
        cycle: int = 1,
        largest_batch: int | None = None,
        units: Units | None = None,
    ) -> None:
        records = population(dataset)
        self.population, self.units = records if units is None else units.count, units
        if not (is_number(expected_batch_size) and 0.0 < expected_batch_size <= self.population):
            raise ValueError(
                f"expected_batch_size={expected_batch_size} is not in (0, {self.population}]: it is the expected "
                "number of samples in a step, at most the size of the dataset"
            )
        require_count(
            "max_physical_batch_size",
            max_physical_batch_size,
            "it is the number of samples in memory at once",
        )
        require_count("num_workers", num_workers, "it is the number of processes that load records", least=0, most=1000)
        if largest_batch is not None:
            require_count("largest_batch", largest_batch, "it is the largest number of records in a batch")
            if cycle > 1:
                raise ValueError(f"largest_batch={largest_batch} with cycle={cycle}: give one of the two")
        if units is not None:
            units.check(records, max_physical_batch_size)
        self.largest_batch = largest_batch
        self.rate = expected_batch_size / self.population
        self._group_rate, _ = cyclic(self.rate, 0, cycle)
        self._groups = Groups(self.population, cycle, randomness)
        self._records = Records(dataset, collate_fn, together=together)
        self._randomness = randomness
        self.max_physical_batch_size = max_physical_batch_size
        self._num_workers = num_workers
        self._device = torch.device(device)
        if lengths is not None and len(lengths) != records:
            raise ValueError(f"lengths has {len(lengths)} numbers for {records} records: give one per record")
        self._lengths = lengths
        self._rank, self._ranks = rank, ranks
        self._drawn: dict[int, NDArray[np.int64]] = {}  # by step, for the steps not done yet
        self._taken: Counter[int] = Counter()  # how often a step was taken

    def __getstate__(self) -> None:
        raise TypeError(
            "a sampler holds draws that are for one step each: it cannot be copied or pickled, build another by "
            "PoissonBatches(...)"
        )

    def batches(self, first: int, steps: int) -> Iterator[LogicalBatch]:
        """The logical batches of steps `first` to `steps` - 1. Asking for the next one marks the last as passed.

        Args:
            first: The first step, counted from 0 through the whole run: with a cycle the step says whose turn it is.
            steps: The step to stop before.

        Yields:
            One logical batch per step, also for an empty draw.
        """
        draws = _StepDraws(self, first, steps)
        loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], self._records),
            batch_sampler=draws,
            collate_fn=self._records.collate,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # so torch's global generator is not used
        )
        loaded = (to_device(micro_batch, self._device) for micro_batch in loader)
        for step in range(first, steps):
            batch = LogicalBatch(
                step,
                draws.chunks_of(step),
                loaded,
                cycle=self._groups.cycle,
                groups=self._groups.name,
                passed=self.passed,
            )
            yield batch
            for _ in batch._load():  # skip micro-batches that the caller did not read
                pass
            self.passed(step)

    def passed(self, step: int) -> None:
        """Forget a step's draw. If the step is taken again from a saved state, it is a new event and a new draw."""
        if self._drawn.pop(step, None) is not None:
            self._taken[step] += 1

    def draw(self, step: int) -> list[NDArray[np.int64]]:
        """A step's draw as the indices of each micro-batch, in order of index, or of length if lengths are given.

        With several ranks: of the micro-batches of this rank.
        """
        if step not in self._drawn:
            again = (self._taken[step],) if isinstance(self._randomness, SharedRandomness) else ()
            members = self._groups.at(step)
            stream = self._randomness.stream("sampling", step, *again)
            drawn = members[stream.chosen(len(members), self._group_rate)]
            if self.largest_batch is not None and len(drawn) > self.largest_batch:
                order = np.argsort(self._randomness.stream("truncation", step, *again).words(len(drawn)), kind="stable")
                drawn = drawn[np.sort(order[: self.largest_batch])]
            if self.units is not None:
                drawn = self.units.brought(drawn, self._randomness.stream("records", step, *again))
            self._drawn[step] = drawn
        chosen, size = self._drawn[step], self.max_physical_batch_size
        if self.units is not None:
            return self.units.micro_batches(chosen, size, self._lengths)[self._rank :: self._ranks]
        if self._lengths is not None:
            chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        return [chosen[i : i + size] for i in range(0, len(chosen), size)][self._rank :: self._ranks]

    @property
    def groups(self) -> str:
        """The name of the groups that a cycle draws from in turn."""
        return self._groups.name

    def eligible(self, step: int) -> NDArray[np.int64]:
        """The indices that a step may draw: those of its group. For audits; it says nothing about what is drawn."""
        return self._groups.at(step)


class _StepDraws:
    """Draws every step once, whether the caller or a loader that works ahead asks first."""

    def __init__(self, sampler: PoissonBatches, first: int, steps: int) -> None:
        self._sampler = sampler
        self._next, self._steps = first, steps
        self._for_caller: dict[int, list[NDArray[np.int64]]] = {}
        self._for_loader: deque[NDArray[np.int64]] = deque()

    def chunks_of(self, step: int) -> list[NDArray[np.int64]]:
        while step not in self._for_caller:
            self._draw()
        return self._for_caller.pop(step)

    def __iter__(self) -> Iterator[list[int]]:
        while self._for_loader or self._next < self._steps:
            if self._for_loader:
                yield self._for_loader.popleft().tolist()
            else:
                self._draw()

    def _draw(self) -> None:
        chunks = self._sampler.draw(self._next)
        self._for_caller[self._next] = list(chunks)
        self._for_loader.extend(chunks)
        self._next += 1


def population(dataset: Any) -> int:
    """The number of records in a dataset, n.

    Args:
        dataset: A map-style dataset.

    Returns:
        Its length, at least 1.

    Raises:
        ValueError: It cannot be sampled by index, or is empty.

    >>> population([1, 2, 3])
    3
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"dataset ({type(dataset).__name__}) is iterable only, and Poisson sampling draws by index: give a "
            "map-style dataset with __len__ and __getitem__"
        )
    if not isinstance(dataset, Sized) or not callable(getattr(dataset, "__getitem__", None)):
        raise ValueError(
            f"dataset is a {type(dataset).__name__} without a length or an index: give a map-style dataset with "
            "__len__ and __getitem__"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: give one with at least one record")
    return len(dataset)
