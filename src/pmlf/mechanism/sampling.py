"""Poisson sampling: logical batches at rate q, cut into physical micro-batches that load when they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pmlf.basics.arguments import is_number, require_count
from pmlf.basics.batches import to_device
from pmlf.mechanism.noise import Randomness
from pmlf.mechanism.records import Records


class LogicalBatch:
    """The samples of one Poisson draw, possibly none. Iterating, once, loads its micro-batches one after another."""

    def __init__(self, step: int, chunks: list[NDArray[np.int64]], loaded: Iterator[Any]) -> None:
        self.step = step
        self._chunks = chunks
        self._loaded = loaded
        self._used = False

    def __getstate__(self) -> None:
        raise TypeError("a logical batch serves one step: it cannot be copied or pickled")

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
            yield torch.from_numpy(indices), micro_batch


class PoissonBatches:
    """Logical batches drawn from a map-style dataset: every index joins independently with probability q = B/n.

    A step has one draw. Until the step is passed it is given again to whoever asks, also after an error in mid-step:
    who draws until a wanted record is in does not sample at rate q. Draws are held in memory alone.

    Records are taken one by one, unless `together` says that the dataset's own way to take several at once was seen to
    give the same records.
    """

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
        together: bool = False,
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
        self._records = Records(dataset, collate_fn, together=together)
        self._randomness = randomness
        self.max_physical_batch_size = max_physical_batch_size
        self._num_workers = num_workers
        self._device = torch.device(device)
        if lengths is not None and len(lengths) != self.population:
            raise ValueError(f"lengths has {len(lengths)} numbers for {self.population} records: give one a record")
        self._lengths = lengths
        self._drawn: dict[int, NDArray[np.int64]] = {}  # of the steps that are not passed

    def __getstate__(self) -> None:
        raise TypeError(
            "a sampler holds draws that serve one step: it cannot be copied or pickled, build another one by "
            "PoissonBatches(...)"
        )

    def batches(self, first: int, steps: int) -> Iterator[LogicalBatch]:
        """The logical batches of steps first, ..., steps - 1. Asking for the next passes the step of the one before."""
        draws = _Draws(self, first, steps)
        loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], self._records),
            batch_sampler=draws,
            collate_fn=self._records.collate,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # of its own: torch's global generator stays untouched
        )
        loaded = (to_device(micro_batch, self._device) for micro_batch in loader)
        for step in range(first, steps):
            batch = LogicalBatch(step, draws.chunks_of(step), loaded)
            yield batch
            for _ in batch._load():  # left unread: move on to the next draw's first micro-batch
                pass
            self.passed(step)

    def passed(self, step: int) -> None:
        """Forget a step's draw. A step that is taken again from a saved state is another event, and draws afresh."""
        self._drawn.pop(step, None)

    def draw(self, step: int) -> list[NDArray[np.int64]]:
        """A step's Poisson draw, cut into physical pieces: of records in order, or of records of like length."""
        if step not in self._drawn:
            self._drawn[step] = self._randomness.stream("sampling", step).chosen(self.population, self.rate)
        chosen = self._drawn[step]
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
