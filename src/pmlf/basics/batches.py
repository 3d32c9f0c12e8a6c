"""What a batch is: tensors whose axis 0 counts samples, in tuples, lists, mappings or alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def untensored(batch: Any) -> Iterator[Any]:
    """Every value in a batch that is neither a tensor nor None.

    >>> list(untensored({"x": torch.zeros(2), "names": ["a", "b"], "weight": None}))
    ['a', 'b']
    """
    if isinstance(batch, (tuple, list)):
        for value in batch:
            yield from untensored(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from untensored(value)
    elif batch is not None and not isinstance(batch, Tensor):
        yield batch


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
    for value in whole_values(batch):
        raise ValueError(
            f"the batch holds a {type(value).__name__} that is one for all samples, and may follow from them: keep it "
            "out of the batch, or make it a tensor whose axis 0 counts samples"
        )
    if any(tensor.layout != torch.strided or tensor.device.type == "meta" for tensor in tensors):
        raise ValueError("the batch holds a sparse tensor, or one without values (meta): give dense tensors")
    size = sizes.pop()
    assert size is not None
    return size


def whole_values(batch: Any) -> Iterator[Any]:
    """Numbers, truth values and texts in a batch that are one for all samples; lists hold one value a sample."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from whole_values(value)
    elif isinstance(batch, (tuple, list)) and next(tensors_of(batch), None) is not None:
        for value in batch:
            yield from whole_values(value)
    elif isinstance(batch, (bool, int, float, complex, str, bytes, np.generic)):
        yield batch


Signature = tuple[Any, ...]


def signature(batch: Any) -> Signature:
    """The form of a batch: containers and keys, and tensors' shapes and dtypes without the number of samples."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[1:]), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch).__name__, *((key, signature(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)) and next(tensors_of(batch), None) is not None:
        return type(batch).__name__, *map(signature, batch)
    return (type(batch).__name__,)


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


def picked(batch: Any, indices: Sequence[int]) -> Any:
    """The samples with these numbers, in this order, as a batch of the same form.

    >>> picked((torch.arange(3), ["a", "b", "c"]), [2, 2, 0])
    (tensor([2, 2, 0]), ['c', 'c', 'a'])
    """
    numbers = torch.tensor(indices)
    return _mapped(
        batch, lambda tensor: tensor[numbers.to(tensor.device)], lambda values: type(values)(values[i] for i in indices)
    )


def refilled(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """A batch of the same form with other tensors in place of its own, in their order.

    >>> refilled({"x": torch.zeros(2), "y": None}, [torch.ones(1)])
    {'x': tensor([1.]), 'y': None}
    """
    given = iter(tensors)
    return _mapped(batch, lambda _: next(given), lambda values: values)


def joined(parts: Sequence[Any]) -> Any:
    """One batch of several of the same form; its values that are no tensors are the first one's.

    >>> joined([(torch.zeros(1),), (torch.ones(2),)])
    (tensor([0., 1., 1.]),)
    """
    return refilled(parts[0], [torch.cat(each) for each in zip(*map(tensors_of, parts), strict=True)])


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


def synthetic(batch: Any, seed: int) -> Any:
    """A batch of the same form, shapes and dtypes without anything of its values.

    Numbers from 0 to 1, which targets may have to be; whole numbers 0 or 1, which are classes, tokens or a mask alike,
    1 first in every row so that no row is masked out; bytes 0 to 255.
    """
    generator = torch.Generator().manual_seed(seed)

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
