"""What a batch is: tensors whose axis 0 counts samples, in tuples, lists, mappings or alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from pmlf.noise import Stream


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)


def batch_size(batch: Any) -> int:
    """The number of samples: the length of axis 0, which every tensor of the batch must share.

    >>> batch_size((torch.zeros(3, 2), {"label": torch.zeros(3)}))
    3
    """
    tensors = list(tensors_of(batch))
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if not sizes:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor: give a tensor, or a tuple, list or dict of tensors "
            "whose axis 0 counts samples"
        )
    if len(sizes) > 1 or None in sizes:
        axes = [tensor.ndim for tensor in tensors]
        raise ValueError(
            f"the batch's tensors, with {axes} axes, have different lengths: axis 0 of every one must count samples; "
            "keep what is not per sample out of the batch"
        )
    if any(tensor.layout != torch.strided or tensor.device.type == "meta" for tensor in tensors):
        raise ValueError("the batch holds a sparse tensor, or one without values (meta): give dense tensors")
    size = sizes.pop()
    assert size is not None
    return size


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one kind hold the same, NaN counted: `.data` changes a tensor without a new version."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    dense = (
        tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense() for tensor in (one, other)
    )
    first, second = (tensor.reshape(-1).view(torch.uint8) for tensor in dense)
    return torch.equal(first, second)


def same_batches(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors, bit by bit."""
    first, second = list(tensors_of(one)), list(tensors_of(other))
    return len(first) == len(second) and all(map(same_bits, first, second))


def select(batch: Any, chosen: slice) -> Any:
    """Some of a batch's samples, as a batch of the same form; lists without tensors count as one value a sample."""
    return _mapped(batch, lambda tensor: tensor[chosen], lambda values: values[chosen])


def without(batch: Any, index: int) -> Any:
    """The batch less one of its samples.

    >>> without((torch.arange(3), ["a", "b", "c"]), 1)
    (tensor([0, 2]), ['a', 'c'])
    """
    return _mapped(
        batch,
        lambda tensor: torch.cat([tensor[:index], tensor[index + 1 :]]),
        lambda values: values[:index] + values[index + 1 :],
    )


def first_repeated(batch: Any) -> Any:
    """A batch of the same size whose samples are all its first one.

    >>> first_repeated((torch.arange(3), ["a", "b", "c"]))
    (tensor([0, 0, 0]), ['a', 'a', 'a'])
    """
    return _mapped(
        batch,
        lambda tensor: tensor[:1].expand_as(tensor).clone(),
        lambda values: values[:1] * len(values),
    )


def synthetic(batch: Any, stream: Stream) -> Any:
    """A batch of the same form, shapes and dtypes without anything of its values.

    Numbers from 0 to 1, which targets may have to be; whole numbers 0 or 1, which are classes, tokens or a mask alike,
    1 first in every row so that no row is masked out; bytes 0 to 255.
    """
    generator = torch.Generator().manual_seed(stream.seed())

    def made(like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.rand(like.shape, generator=generator).to(like)
        if like.dtype == torch.uint8:
            return torch.randint(256, like.shape, generator=generator).to(like)
        values = torch.randint(2, like.shape, generator=generator)
        if values.ndim > 1:
            values[:, 0] = 1
        return values.to(like)

    return _mapped(batch, made, lambda values: values)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; the batch itself where they are there."""
    if all(tensor.device == device for tensor in tensors_of(batch)):
        return batch
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda values: values)


def to_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in another precision."""
    return _mapped(
        batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, lambda values: values
    )


def _mapped(batch: Any, on_tensor: Callable[[Tensor], Tensor], on_values: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor):
        return on_tensor(batch)
    if isinstance(batch, Mapping):
        mapped = {key: _mapped(value, on_tensor, on_values) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return mapped
        made = copy.copy(batch)  # keeps the type, whatever its constructor takes
        made.update(mapped)
        return made
    if isinstance(batch, (tuple, list)):
        if next(tensors_of(batch), None) is None:
            return on_values(batch)
        parts = [_mapped(value, on_tensor, on_values) for value in batch]
        return type(batch)(*parts) if isinstance(batch, tuple) and type(batch) is not tuple else type(batch)(parts)
    return batch
