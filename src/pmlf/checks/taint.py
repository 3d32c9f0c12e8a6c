"""Results that need several samples, which a model may compute and its loss not use: similarities of all images with
all texts, for one.

Such a result has a shape and no numbers. So has everything that is computed from it. Whatever would read numbers of it,
or write them elsewhere, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Tainted(Tensor):
    """A tensor without numbers that stands for one of several samples."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class TaintUsed(Exception):
    """Something would read or keep numbers that need several samples."""


def is_tainted(values: Any) -> bool:
    """Whether there is a tainted tensor among values, in containers too."""
    return any(isinstance(value, Tainted) for value in tree_leaves(values))


def shape_alone(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function returns, without numbers.

    Raises:
        TaintUsed: The function writes in place, or needs numbers.
    """
    name = getattr(func, "__name__", "it")
    given, named = tree_map(_without_numbers, (args, kwargs))
    try:
        with torch._C.DisableTorchFunction():
            found = func(*given, **named)
    except Exception as error:
        raise TaintUsed(f"{name} reads what needs the data of several samples") from error
    if name == "__set__" or any(value._version for value in tree_leaves((given, named)) if isinstance(value, Tensor)):
        raise TaintUsed(f"{name} writes what needs the data of several samples")
    return tree_map(lambda value: value.as_subclass(Tainted) if isinstance(value, Tensor) else value, found)


def _without_numbers(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
