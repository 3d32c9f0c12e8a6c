"""A batch spread over imaginary devices, one sample on each; this process is one of them.

PyTorch knows for nearly every operation whether it can run on a batch that is split along an axis without asking other
devices for data (`torch.distributed.tensor`). Here no other device exists: an operation that asks fails and is named.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pmlf.checks.draws import ConstantDraws, Unknown, plain_formulas
from pmlf.checks.rewrites import REWRITES
from pmlf.checks.taint import TaintUsed, is_tainted, shape_alone
from pmlf.engine.operations.layouts import Order

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
# Ways to read a sharded tensor's values in Python that run no visible operation.
_UNSEEN_READS: set[Any] = {
    Tensor.tolist,
    Tensor.apply_,
    Tensor.map_,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__repr__,
    Tensor.__format__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.__contains__,
    Tensor.__reduce_ex__,
}


class SamplesMeet(Exception):
    """An operation asks for the data of other samples."""


class Shards:
    """Where this process stands: rank `rank` of `samples`, each with one sample."""

    def __init__(self, device: torch.device, samples: int, rank: int) -> None:
        # without process groups: whatever asks for another rank's data has nobody to ask
        self._mesh = DeviceMesh(device.type, torch.arange(samples), _init_backend=False, _rank=rank)
        self.samples, self.rank = samples, rank

    def replicated(self, tensor: Tensor) -> Tensor:
        """A tensor that every rank has: a parameter, a buffer. It shares its memory."""
        return DTensor.from_local(tensor.detach(), self._mesh, [Replicate()], run_check=False)

    def own_row(self, rows: Tensor) -> Tensor:
        """(samples, ...), of which this rank has its own row."""
        local = rows.detach()[self.rank : self.rank + 1].clone()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=rows.shape, stride=_dense(rows))

    def rows_of_all(self, output: Tensor, axis: int = 0) -> Tensor | None:
        """An output that follows from no sample, cut along an axis into rows of which this rank has its own; None for
        any other.

        It is cut off from what made it, which every rank has and computes alike.
        """
        if not isinstance(output, DTensor) or output.placements != (Replicate(),) or output.ndim == 0:
            return None
        everything = output.to_local().detach()
        if everything.shape[axis] % self.samples and everything.shape[axis] != 1:
            return None
        each = max(1, everything.shape[axis] // self.samples)
        own = everything if everything.shape[axis] == 1 else everything.narrow(axis, self.rank * each, each)
        rows = DTensor.from_local(own.clone(), self._mesh, [Shard(axis)], run_check=False)
        return rows.requires_grad_(output.requires_grad)


def is_by_sample(tensor: Any, samples: int) -> bool:
    """Whether a tensor's axis 0 is cut into equal parts, one a sample, in the samples' order."""
    return (
        isinstance(tensor, DTensor)
        and tensor.placements == (Shard(0),)
        and tensor.shape[0] == samples * tensor._local_tensor.shape[0]
    )


def cut_axis(tensor: Any, samples: int) -> tuple[int, Order] | None:
    """The axis that is cut into equal parts, one a sample, and their order: one sample after the other, or the first
    row of each, then the second of each (tokens and samples joined in one axis); None where there is none."""
    if not isinstance(tensor, DTensor) or len(tensor.placements) != 1:
        return None
    (cut,) = tensor.placements
    if not isinstance(cut, (Shard, _StridedShard)):
        return None
    rows, own = tensor.shape[cut.dim], tensor._local_tensor.shape[cut.dim]
    if rows != samples * own:
        return None
    if type(cut) is Shard:
        return cut.dim, "major"
    return (cut.dim, "minor") if isinstance(cut, _StridedShard) and cut.split_factor == own else None


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Request(NamedTuple):
    """A request for the data of other samples: its error, operation and stack; whether that takes integers alone."""

    error: Exception
    operation: str
    of_numbers: bool
    frames: traceback.StackSummary


class Observer(ConstantDraws):
    """Sees every operation, and refuses those that read other samples' values into Python.

    The path of the program must not depend on random numbers, which are constants here: a scalar that is read after a
    draw is outside the proof.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operation = ""
        self.of_numbers = False  # whether it is given integers alone: places, not values
        self.request: Request | None = None  # for the data of other samples, the first one
        self.tainted: list[weakref.ref[Tensor]] = []  # results that need several samples
        self.refusal: Exception | None = None  # the last one; a model that catches it is refused all the same

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operation = str(func).removesuffix(".default")
        self.of_numbers = not any(
            value.is_floating_point() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        )
        if func in _READS:
            self._refuse_read(tree_leaves((args, kwargs)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def requested(self, error: Exception) -> None:
        """An operation has failed because it asks for the data of other samples."""
        if self.request is None:
            kept = error.with_traceback(None)  # which would keep all that the frames in it know
            self.request = Request(kept, self.operation, self.of_numbers, traceback.extract_stack())

    def refuse_kept(self) -> None:
        """Raise if the model, or something that it knows, keeps what needs several samples for a later pass."""
        if any(kept() is not None for kept in self.tainted):
            gc.collect()  # what is left of cycles is not kept
        if any(kept() is not None for kept in self.tainted):
            raise TaintUsed("what needs the data of several samples is kept for later")

    def _refuse_read(self, values: list[Any]) -> None:
        if any(isinstance(value, DTensor) and value.placements != (Replicate(),) for value in values):
            raise SamplesMeet("reads values of all samples into Python")
        if self._drew:
            raise Unknown("reads a number into Python after a random draw, so the path may depend on randomness")


class _Rewriter(TorchFunctionMode):
    """Writes operations without a sharding rule as others that have one. The result of an operation that asks for
    other samples' data is tainted."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._run(func, args, kwargs or {})
        except (SamplesMeet, TaintUsed, Unknown) as error:
            self._observer.refusal = error
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _UNSEEN_READS and any(isinstance(value, DTensor) for value in tree_leaves((args, kwargs))):
            raise SamplesMeet(f"{func.__name__} shows a sample's values to Python")
        if self._observer.request is not None and is_tainted((args, kwargs)):
            return self._tainted(func, args, kwargs)
        try:
            return (REWRITES.get(func) or func)(*args, **kwargs)
        except Exception as error:
            if not asks_for_others(error):
                raise
            self._observer.requested(error)
            return self._tainted(func, args, kwargs)

    def _tainted(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = shape_alone(func, args, kwargs)
        self._observer.tainted += [weakref.ref(value) for value in tree_leaves(found) if isinstance(value, Tensor)]
        return found


def asks_for_others(error: Exception) -> bool:
    """Whether an error comes from a request for another device's data."""
    files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    return not files.isdisjoint(("_functional_collectives.py", "_redistribute.py"))


@contextmanager
def sharded(samples: int, rank: int, device: torch.device) -> Iterator[tuple[Shards, Observer]]:
    """Run with one sample a rank."""
    with ExitStack() as stack:
        stack.enter_context(_pretended_group(samples, rank))
        stack.enter_context(_masks_built_without_looking())
        # which looks at all samples and computes nothing
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(implicit_replication())
        stack.enter_context(plain_formulas())
        observer = stack.enter_context(Observer())
        stack.enter_context(_Rewriter(observer))
        yield Shards(device, samples, rank), observer


@contextmanager
def _pretended_group(samples: int, rank: int) -> Iterator[None]:
    """Some of DTensor's rules ask for a rank before they know whether they need one; the user's groups are not used."""
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which a group puts its rank into
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=samples)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _masks_built_without_looking() -> Iterator[None]:
    """`transformers` leaves a mask out where it masks nothing, which is the same attention, and warns where padding has
    no mask. For either it looks at all samples; here it always builds the mask, as for an export, and is silent."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    with ExitStack() as stack:
        if masks is not None and getattr(masks, "is_tracing", None) is not None:
            stack.enter_context(mock.patch.object(masks, "is_tracing", lambda *tensors: True))
        warns = "warn_if_padding_and_no_attention_mask"
        if models is not None and getattr(models.PreTrainedModel, warns, None) is not None:
            stack.enter_context(mock.patch.object(models.PreTrainedModel, warns, lambda *given: None))
        yield


def _dense(rows: Tensor) -> tuple[int, ...]:
    return torch.empty(rows.shape, device="meta").stride()


def on_rows(batch: Any, shards: Shards) -> Any:
    """A batch whose tensors' rows are spread over the ranks."""
    return tree_map(lambda value: shards.own_row(value) if isinstance(value, Tensor) else value, batch)
