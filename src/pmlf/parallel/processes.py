"""The processes of a run: one that is alone, or several that take every step together.

A private step asks its processes for five things: to agree that every rank has done its part, for rank 0's word, for
the sum over all ranks with noise, whether facts are the same on all ranks, and which rank this is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pmlf.parallel.failure import RankFailed
from pmlf.parallel.summing import AddNoise, add_noise_to, sum_with_noise

Answer = TypeVar("Answer")
Group: TypeAlias = "Literal['auto'] | dist.ProcessGroup | None"  # a text: some builds of torch have no process groups


class Processes(Protocol):
    """What a private step asks of the processes that share it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def agree(self, step: int, iterate: int, error: BaseException | None) -> None:
        """Return on every rank if all ranks are at this step and iterate without an error; else raise on every rank."""

    def by_first(self, decide: Callable[[], Answer]) -> Answer:
        """Rank 0's answer, on every rank. If rank 0 fails, every rank raises."""

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        """Replace the values on every rank by their sum over the ranks, plus noise that is added once."""

    def require_same(self, facts: Mapping[str, str]) -> None:
        """Raise ValueError on every rank if a fact differs between ranks."""


class OneProcess:
    """A process that is alone: nobody to ask.

    >>> OneProcess().by_first(lambda: 7)
    7
    """

    rank, size = 0, 1

    def agree(self, step: int, iterate: int, error: BaseException | None) -> None:
        pass

    def by_first(self, decide: Callable[[], Answer]) -> Answer:
        return decide()

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        add_noise_to(values, add_noise, hardened=hardened)

    def require_same(self, facts: Mapping[str, str]) -> None:
        pass


class ManyProcesses:
    """The ranks of a process group (`torch.distributed`), of which this process is one.

    Args:
        group: A process group of at least two ranks that this process belongs to.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> ManyProcesses:
        return self

    def __getstate__(self) -> None:
        raise TypeError("a process group belongs to this process: it cannot be pickled")

    def agree(self, step: int, iterate: int, error: BaseException | None) -> None:
        rows = torch.zeros(self.size, 3, dtype=torch.int64, device=self._device)
        rows[self.rank] = torch.tensor([step, iterate, int(error is not None)])
        with self._reaching(f"while the ranks agreed on step {step}; nothing was released in it"):
            dist.all_reduce(rows, group=self._group)
        found = rows.tolist()
        failed = [rank for rank, row in enumerate(found) if row[2]]
        if failed:
            raise RankFailed(
                f"rank {failed[0]} of {self.size} failed in step {min(row[0] for row in found)}, so no rank releases "
                f"anything: rank {failed[0]} reports why"
            ) from error
        for rank, (its_step, its_iterate, _) in enumerate(found):
            if its_step != found[0][0]:
                raise RankFailed(
                    f"rank {rank} is at step {its_step} and rank 0 at step {found[0][0]}, so no rank releases "
                    "anything: load the same saved state on every rank"
                )
            if its_iterate != found[0][1]:
                raise RankFailed(
                    f"the parameters of rank {rank} differ from those of rank 0 at step {its_step}, so no rank "
                    "releases anything: load the same saved state on every rank, and let only the optimizer change them"
                )

    def by_first(self, decide: Callable[[], Answer]) -> Answer:
        word: list[Any] = [None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                word = [(True, decide())]
            except BaseException as error:
                failure, word = error, [(False, str(error))]
        with self._reaching("while rank 0 gave its word; nothing was released since the last step"):
            dist.broadcast_object_list(word, src=self._first, group=self._group)
        fine, answer = word[0]
        if failure is not None:
            raise failure
        if not fine:
            raise RankFailed(f"rank 0 failed: {answer}")
        return answer

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        with self._reaching("while sums were added up; the step counts as spent, and nothing of it was released here"):
            sum_with_noise(values, add_noise, hardened=hardened, group=self._group)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the group in the default process group."""
        return dist.get_process_group_ranks(self._group)

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        found = torch.tensor([count], device=self._device)
        with self._reaching("while the ranks counted their micro-batches; nothing was released in this step"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def gather(self, out: Tensor, part: Tensor) -> None:
        """out = the parts of all ranks, one below the other. Each part has as many rows."""
        with self._reaching("while parameters were gathered; nothing was released in this step"):
            # the name before torch 2.13 is deprecated since
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(out, part.contiguous(), group=self._group)

    def reduce_to(self, rank: int, value: Tensor) -> None:
        """Replace a value on one rank by its sum over the ranks; on the others it has no meaning afterwards."""
        with self._reaching("while sums were added up; nothing was released in this step"):
            dist.reduce(value, dst=dist.get_global_rank(self._group, rank), group=self._group)

    def copy_first(self, values: Iterable[Tensor]) -> None:
        """Replace values by those of rank 0, in place."""
        for value in values:
            whole = value.detach().contiguous()
            with self._reaching("while parameters were sent; nothing was drawn"):
                dist.broadcast(whole, src=self._first, group=self._group)
            value.detach().copy_(whole)

    def require_same(self, facts: Mapping[str, str]) -> None:
        gathered: list[Any] = [None] * self.size
        with self._reaching("while the ranks were compared; nothing was drawn"):
            dist.all_gather_object(gathered, dict(facts), group=self._group)
        for rank, others in enumerate(gathered):
            for name in {**gathered[0], **others}:
                if others.get(name) != gathered[0].get(name):
                    raise ValueError(
                        f"rank {rank} has another {name} than rank 0: every rank must be given the same, and compute "
                        "the same function of a record"
                    )

    @property
    def _device(self) -> torch.device:
        """Where small messages are: NCCL sends from the accelerator only."""
        accelerated = dist.get_backend(self._group) not in ("gloo", "mpi")
        return torch.device(torch.accelerator.current_accelerator() or "cpu") if accelerated else torch.device("cpu")

    @contextmanager
    def _reaching(self, when: str) -> Iterator[None]:
        """A collective operation: it fails if another process has ended, or does not answer within the timeout."""
        try:
            yield
        except RuntimeError as error:  # of gloo, NCCL and the store, in their own words
            raise RankFailed(f"another of the {self.size} processes has stopped or does not answer, {when}") from error


def joined(group: Group | Processes, caller: str) -> Processes:
    """The processes that a `group` argument means: "auto" is the default process group, if there is one.

    Args:
        group: "auto", a process group, or None for a process that is alone.
        caller: The name of the function that was given the group, for the error.

    Returns:
        The processes.

    Raises:
        ValueError: This process is one of several, and no group says so.

    >>> joined("auto", "make_private").size
    1
    """
    if isinstance(group, (OneProcess, ManyProcesses)):
        return group
    if isinstance(group, str) and group != "auto":
        raise ValueError(f'group={group!r} is not known: give "auto", a torch.distributed process group, or None')
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return ManyProcesses(group) if dist.get_world_size(group) > 1 else OneProcess()
    initialised = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    if group == "auto" and initialised and dist.get_world_size() > 1:
        default = dist.group.WORLD
        assert default is not None
        return ManyProcesses(default)
    given = os.environ.get("WORLD_SIZE", "1")
    launched = int(given) if given.isdecimal() else 1
    found = max(dist.get_world_size() if initialised else 1, launched)
    if found > 1:
        way_out = (
            'group="auto" joins them'
            if initialised
            else "call torch.distributed.init_process_group() first, or start a single process"
        )
        raise ValueError(
            f"{caller} is called in one of {found} processes (torch.distributed or WORLD_SIZE={given}) without a "
            f"process group, and each would draw and spend by itself: {way_out}"
        )
    return OneProcess()
