"""Batches: a tensor, or a tuple, list or mapping of tensors, whose axis 0 counts samples.

A list without tensors holds one value per sample: `["a", "b"]` in a batch of two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def copied(values: Any) -> Any:
    """A deep copy. Of a tensor that is a view only its own numbers are copied, not all that it is a view of.

    >>> record = torch.zeros(1000)[:1], {"label": 1}
    >>> copied(record)[0].untyped_storage().nbytes()
    4
    """
    memo: dict[int, Any] = {id(tensor): tensor.clone() for tensor in tensors_of(values)}
    return copy.deepcopy(values, memo)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor in a batch, in order.

    >>> [tuple(tensor.shape) for tensor in tensors_of((torch.zeros(2, 3), {"y": torch.zeros(2)}))]
    [(2, 3), (2,)]
    """
    if isinstance(batch, Tensor):
        return [batch]
    found: list[Tensor] = []
    if isinstance(batch, (tuple, list, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list, Mapping)):
                found += tensors_of(value)
    return found


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
    """The number of samples: the length of axis 0, which all tensors of the batch share.

    Args:
        batch: A tensor, or a tuple, list or mapping of tensors.

    Returns:
        The number of samples.

    Raises:
        ValueError: There is no tensor, lengths differ, a value belongs to no sample, or a tensor is sparse or meta.

    >>> batch_size((torch.zeros(3, 2), {"label": torch.zeros(3)}))
    3
    """
    tensors = tensors_of(batch)
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if not sizes:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor: give a tensor, or a tuple, list or dict of tensors, "
            "whose axis 0 counts samples"
        )
    if len(sizes) > 1 or None in sizes:
        axes = [tensor.ndim for tensor in tensors]
        raise ValueError(
            f"the batch's tensors, with {axes} axes, have different lengths: axis 0 of each must count samples; keep "
            "values that are not per sample out of the batch"
        )
    for value in whole_values(batch):
        raise ValueError(
            f"the batch holds a {type(value).__name__} that all samples share, and that may be computed from them: "
            "keep it out of the batch, or make it a tensor whose axis 0 counts samples"
        )
    if any(tensor.layout != torch.strided or tensor.device.type == "meta" for tensor in tensors):
        raise ValueError("the batch holds a sparse or a meta tensor: give dense tensors with values")
    size = sizes.pop()
    assert size is not None
    return size


def whole_values(batch: Any) -> Iterator[Any]:
    """Numbers, booleans and strings in a batch that all samples share.

    >>> list(whole_values({"x": torch.zeros(2), "names": ["a", "b"], "temperature": 0.5}))
    [0.5]
    """
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from whole_values(value)
    elif isinstance(batch, (tuple, list)) and tensors_of(batch):
        for value in batch:
            yield from whole_values(value)
    elif isinstance(batch, (bool, int, float, complex, str, bytes, np.generic)):
        yield batch


Signature = tuple[Any, ...]


def signature(batch: Any) -> Signature:
    """The structure of a batch: its containers and keys, and each tensor's shape and dtype without axis 0."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[1:]), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch).__name__, *((key, signature(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)) and tensors_of(batch):
        return type(batch).__name__, *map(signature, batch)
    return (type(batch).__name__,)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included.

    A tensor's version counter does not show a write through `.data`; its bits do.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    dense = (
        tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense() for tensor in (one, other)
    )
    first, second = (tensor.reshape(-1).view(torch.uint8) for tensor in dense)
    return torch.equal(first, second)


def same_batches(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors, bit by bit."""
    first, second = tensors_of(one), tensors_of(other)
    return len(first) == len(second) and all(map(same_bits, first, second))


def identical(one: Any, other: Any) -> bool:
    """Whether two batches are built-in containers of the same tensors, bit by bit, and of nothing else.

    Other types may carry what cannot be compared.

    >>> identical({"x": torch.ones(2)}, {"x": torch.ones(2)}), identical((torch.ones(1), "a"), (torch.ones(1), "a"))
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if type(one) is Tensor:
        return same_bits(one, other)
    if type(one) is dict:
        return list(one) == list(other) and all(map(identical, one.values(), other.values()))
    if type(one) is tuple or type(one) is list:
        return len(one) == len(other) and all(map(identical, one, other))
    return one is None


def select(batch: Any, chosen: slice) -> Any:
    """The samples in a slice, as a batch of the same structure.

    >>> select({"x": torch.arange(4), "names": ["a", "b", "c", "d"]}, slice(1, 3))
    {'x': tensor([1, 2]), 'names': ['b', 'c']}
    """
    return _mapped(batch, lambda tensor: tensor[chosen], lambda values: values[chosen])


def picked(batch: Any, indices: Sequence[int]) -> Any:
    """The samples with these indices, in this order, as a batch of the same structure.

    >>> picked((torch.arange(3), ["a", "b", "c"]), [2, 2, 0])
    (tensor([2, 2, 0]), ['c', 'c', 'a'])
    """
    numbers = torch.tensor(indices)
    return _mapped(
        batch, lambda tensor: tensor[numbers.to(tensor.device)], lambda values: type(values)(values[i] for i in indices)
    )


def refilled(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The batch with its tensors replaced, in order.

    >>> refilled({"x": torch.zeros(2), "y": None}, [torch.ones(1)])
    {'x': tensor([1.]), 'y': None}
    """
    given = iter(tensors)
    return _mapped(batch, lambda _: next(given), lambda values: values)


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate batches of one structure. Values that are not tensors are taken from the first.

    >>> joined([(torch.zeros(1),), (torch.ones(2),)])
    (tensor([0., 1., 1.]),)
    """
    return refilled(parts[0], [torch.cat(each) for each in zip(*map(tensors_of, parts), strict=True)])


def without(batch: Any, index: int) -> Any:
    """The batch without one sample.

    >>> without((torch.arange(3), ["a", "b", "c"]), 1)
    (tensor([0, 2]), ['a', 'c'])
    """
    return _mapped(
        batch,
        lambda tensor: torch.cat([tensor[:index], tensor[index + 1 :]]),
        lambda values: values[:index] + values[index + 1 :],
    )


def first_repeated(batch: Any) -> Any:
    """A batch of the same size in which every sample is the first one.

    >>> first_repeated((torch.arange(3), ["a", "b", "c"]))
    (tensor([0, 0, 0]), ['a', 'a', 'a'])
    """
    return _mapped(
        batch,
        lambda tensor: tensor[:1].expand_as(tensor).clone(),
        lambda values: values[:1] * len(values),
    )


def synthetic(batch: Any, seed: int) -> Any:
    """A random batch of the same structure, shapes and dtypes, which holds nothing of the given values.

    Floating-point values lie in [0, 1), bytes in 0 to 255. Integers are 0 or 1, so that they are valid as classes,
    tokens and masks; each row starts with 1, so that no row is masked out.

    >>> batch = synthetic((torch.full((2, 3), 9.0), torch.tensor([7, 8])), seed=0)
    >>> bool(batch[0].max() < 1), bool(batch[1].max() <= 1)
    (True, True)
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
    """Move a batch's tensors to a device; the batch itself is returned if all are there."""
    if all(tensor.device == device for tensor in tensors_of(batch)):
        return batch
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda values: values)


def to_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Convert a batch's floating-point tensors to another dtype."""
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
        made = copy.copy(batch)  # keeps the type, whatever arguments its constructor takes
        made.update(mapped)
        return made
    if isinstance(batch, (tuple, list)):
        if not tensors_of(batch):
            return on_values(batch)
        parts = [_mapped(value, on_tensor, on_values) for value in batch]
        return type(batch)(*parts) if isinstance(batch, tuple) and type(batch) is not tuple else type(batch)(parts)
    return batch
