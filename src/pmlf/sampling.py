"""Poisson sampling: logical batches at rate q, cut into physical micro-batches that load when they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from pmlf.arguments import is_number, require_count
from pmlf.batches import batch_size as size_of
from pmlf.batches import same_batches, to_device
from pmlf.noise import Randomness


class LogicalBatch:
    """The samples of one Poisson draw, possibly none. Iterating, once, loads its micro-batches one after another."""

    def __init__(self, step: int, chunks: list[NDArray[np.int64]], loaded: Iterator[Any]) -> None:
        self.step = step
        self._chunks = chunks
        self._loaded = loaded
        self._used = False

    @property
    def used(self) -> bool:
        return self._used

    def __iter__(self) -> Iterator[Any]:
        return (micro_batch for _, micro_batch in self.numbered())

    def numbered(self) -> Iterator[tuple[Tensor, Any]]:
        """(indices in the dataset, micro-batch) pairs."""
        if self._used:
            raise RuntimeError(f"the batch of step {self.step} was used already: a Poisson draw serves one step")
        self._used = True
        return self._load()

    def _load(self) -> Iterator[tuple[Tensor, Any]]:
        while self._chunks:
            indices = self._chunks.pop(0)
            micro_batch = next(self._loaded)
            if size_of(micro_batch) != len(indices):
                raise ValueError(
                    "collate_fn returned another number of samples than were drawn: it must keep every sample, once"
                )
            yield torch.from_numpy(indices), micro_batch


class PoissonBatches:
    """Logical batches drawn from a map-style dataset: every index joins independently with probability q = B/n."""

    def __init__(
        self,
        dataset: Any,
        *,
        expected_batch_size: float,
        randomness: Randomness,
        max_physical_batch_size: int = 256,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.population = population(dataset)
        if not (is_number(expected_batch_size) and 0.0 < expected_batch_size <= self.population):
            raise ValueError(
                f"expected_batch_size={expected_batch_size} is not in (0, {self.population}]: it is the expected "
                "number of samples a step, at most the size of the dataset"
            )
        require_count(
            "max_physical_batch_size",
            max_physical_batch_size,
            "it limits how many samples are in memory at once and changes nothing else",
        )
        require_count("num_workers", num_workers, "it counts processes that load records", least=0, most=1000)
        self.rate = expected_batch_size / self.population
        self._dataset = dataset
        self._randomness = randomness
        self.max_physical_batch_size = max_physical_batch_size
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._device = torch.device(device)
        if lengths is not None and len(lengths) != self.population:
            raise ValueError(f"lengths has {len(lengths)} numbers for {self.population} records: give one a record")
        self._lengths = lengths

    def batches(self, first: int, steps: int) -> Iterator[LogicalBatch]:
        """The logical batches of steps first, ..., steps - 1, each drawn afresh."""
        draws = _Draws(self, first, steps)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=draws,
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # of its own: torch's global generator stays untouched
        )
        loaded = (to_device(micro_batch, self._device) for micro_batch in loader)
        for step in range(first, steps):
            batch = LogicalBatch(step, draws.chunks_of(step), loaded)
            yield batch
            for _ in batch._load():  # left unread: move on to the next draw's first micro-batch
                pass

    def draw(self, step: int) -> list[NDArray[np.int64]]:
        """A fresh Poisson draw, cut into physical pieces: of records in order, or of records of like length."""
        chosen = self._randomness.stream("sampling", step).chosen(self.population, self.rate)
        if self._lengths is not None:
            chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        size = self.max_physical_batch_size
        return [chosen[i : i + size] for i in range(0, len(chosen), size)]


class _Draws:
    """Draws every step once, whoever asks first: the caller, or a loader that works ahead."""

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


def collation(
    dataset: Any, looked_at: Sequence[int], collate_fn: Callable[[list[Any]], Any] | None
) -> Callable[[list[int]], Any]:
    """Batches of the records looked at, put together as a DataLoader does; each record is the same each time."""
    collate = collate_fn or default_collate
    alone = {index: fetched(dataset, [index])[0] for index in looked_at}
    again = ((alone[index], fetched(dataset, [index])[0]) for index in looked_at)  # a coin may fall alike once
    steady = takes_together(dataset) and all(same_batches(*(collate([record]) for record in both)) for both in again)

    def batch_of(indices: list[int]) -> Any:
        together = steady and len(indices) > 1  # a dataset that draws chance cannot be asked twice
        return collate(fetched(dataset, indices) if together else [alone[index] for index in indices])

    return batch_of


def fetched(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Records as a DataLoader takes them: together where the dataset has a way of its own."""
    if takes_together(dataset):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def takes_together(dataset: Any) -> bool:
    return callable(getattr(dataset, "__getitems__", None))


def population(dataset: Any) -> int:
    """The number of records that can be drawn; refuses a dataset that cannot be sampled by index."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"dataset ({type(dataset).__name__}) is iterable only: Poisson sampling draws by index, give a map-style "
            "dataset with __len__ and __getitem__"
        )
    if not isinstance(dataset, Sized) or not callable(getattr(dataset, "__getitem__", None)):
        raise ValueError(
            f"dataset is a {type(dataset).__name__} without a length or an index: give a map-style dataset with "
            "__len__ and __getitem__"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: give one with at least one record")
    return len(dataset)
