"""Arithmetic on rows, one a sample: in which precision, how many at a time, how long they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 21  # work memory of a block of samples, for each thread: near its cache, and reused by malloc
_DEVICE_BYTES = 1 << 28  # the same on an accelerator, which wants few large operations
_LARGEST_BLOCK = 1 << 25  # bytes of work memory up to which a block has a sample for every thread, however large
_NORM_BLOCK = 1024  # float32 sums of squares run over this many numbers, float64 over the blocks
_SHORT_ROW = 128  # numbers, up to which float64 costs no more
_NARROW = 16  # rows or columns up to which a product of many tokens is shared out among threads by its tokens
_MANY = 1 << 17  # numbers of its wider side, below which that costs more than it saves
_TINY = 1e-25  # a norm^2 below which squares that float32 cannot hold may matter


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def blocks(chosen: slice, bytes_each: int, *, like: Tensor, together: int = 0) -> list[slice]:
    """Slices of the samples chosen whose work memory stays near the cache, or takes `together` bytes if that is more:
    as many samples for every thread, so that none is idle at a slice's end. `like` is on the device that works."""
    threads, needed = torch.get_num_threads(), max(1, bytes_each)
    if not on_host(like):
        threads, together = 1, max(_DEVICE_BYTES, together)
    step = threads * (max(CHUNK_BYTES, together // threads) // needed)
    step = step or max(1, min(threads, _LARGEST_BLOCK // needed))
    return [slice(start, min(start + step, chosen.stop)) for start in range(chosen.start, chosen.stop, step)]


def blank(tensor: Tensor, refused: Tensor) -> Tensor:
    """The tensor with zeros in the rows marked in `refused`."""
    marked = refused.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(marked, torch.zeros_like(tensor[:1]), tensor)


def same_memory(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride()


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: norms and sums are never taken in half precision."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def wide_dtype(tensor: Any) -> torch.dtype:
    """float64 where the device has it, else float32."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def wide_numbers(tensor: Tensor) -> Tensor:
    """The numbers in float64, on their device or, if that has no float64, on the CPU."""
    return tensor.to("cpu", torch.float64) if wide_dtype(tensor) != torch.float64 else tensor.to(torch.float64)


def add_product(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
    """out = left^T right, or out += it, of (tokens, rows) and (tokens, cols).

    Where one side has but a few numbers a token (a classifier's head), it is faster to give every thread some of the
    tokens, with the narrow side first, than to leave it to BLAS how a product is shared out.
    """
    rows, cols = out.shape
    tokens, threads = len(left), torch.get_num_threads()
    share = tokens // threads
    if threads == 1 or left.device.type != "cpu" or min(rows, cols) > _NARROW or tokens * max(rows, cols) < _MANY:
        torch.addmm(out, left.mT, right, beta=1 if add else 0, out=out)
        return
    if cols < rows:
        left, right, out = right, left, out.mT
    first, second = (side[: share * threads].unflatten(0, (threads, share)) for side in (left, right))
    parts = torch.bmm(first.mT, second)  # (threads, rows, cols)
    if tokens > share * threads:
        parts[0].addmm_(left[share * threads :].mT, right[share * threads :])
    if add:
        out.add_(parts.sum(0))
    else:
        torch.sum(parts, 0, out=out)


def squared_norms(gradients: Tensor) -> Tensor:
    """|row|^2 of every row in float64, of float32 sums over short blocks: exact to about 2^-18 relative.

    All of it in float64 on an accelerator: to ask whether float32 is enough would make the host wait.
    """
    size, wide = gradients.shape[1], wide_dtype(gradients)
    if size <= _SHORT_ROW or not on_host(gradients):
        return torch.linalg.vector_norm(gradients, dim=1, dtype=wide).square_()
    rest, parts = size % _NORM_BLOCK, []
    if rest:
        last = gradients[:, size - rest :] if rest < size else gradients
        parts.append(torch.linalg.vector_norm(last, dim=1).to(wide).square_())
    if rest < size:
        lengths = torch.linalg.vector_norm(gradients[:, : size - rest].unflatten(1, (-1, _NORM_BLOCK)), dim=2)
        parts.append(torch.linalg.vector_norm(lengths, dim=1, dtype=wide).square_())
    squared = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if not float(squared.min()) >= _TINY:  # nor is NaN
        tiny = squared < _TINY
        squared[tiny] = gradients[tiny].to(wide).square().sum(1)
    return squared
