"""Random draws made constant, so that a program computes the same for a sample alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class Unknown(Exception):
    """An operation that a check cannot follow."""


@contextmanager
def constant_draws() -> Iterator[None]:
    """Random draws are constants; attention is computed by its plain formula."""
    with plain_formulas(), ConstantDraws():
        yield


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Attention without fused kernels, whose draws and data flow cannot be seen."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def refuse_unseeded(drawn_from: Sequence[str]) -> None:
    """Raise ValueError for random numbers that no seed of torch makes again, and whose generator they are from."""
    if not drawn_from:
        raise ValueError(
            "the loss draws random numbers from a source other than torch's global generator, in training mode, so it "
            "cannot be checked: draw by torch's own functions, without a generator"
        )
    masks = "set model.config.apply_spec_augment = False if these are the masks of SpecAugment (wav2vec 2.0, Whisper)"
    raise ValueError(
        f"the loss draws random numbers from {drawn_from[0]} generator in training mode, which cannot be drawn again "
        "for one sample, so nothing shows whether samples influence each other: draw by torch's own functions, draw "
        f'with the records and put the numbers into the batch, or give gradients="one-by-one"; {masks}'
    )


class ConstantDraws(TorchDispatchMode):
    """Random numbers are constants, the same for a sample alone and among others."""

    def __init__(self) -> None:
        super().__init__()
        self._drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
            self._drew = True
            return _constant_draw(func, args, kwargs)
        return func(*args, **kwargs)


def _constant_draw(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of a random operation without its randomness, in the shapes that it has on this rank."""
    name = func._schema.name.removeprefix("aten::")
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if name == "native_dropout":
        assert first is not None
        return first.clone(), torch.ones_like(first) > 0
    if name == "randperm":  # not the identity, which would hide a permutation
        return torch.arange(args[0], device=kwargs.get("device")).roll(1)
    if name.startswith("rrelu_with_noise"):
        assert first is not None
        args[1].fill_((args[2] + args[3]) / 2)
        return torch.where(first > 0, first, first * args[1])
    if name not in _CONSTANTS:
        raise Unknown("draws randomness in a way that has no rule")
    if first is not None and name.endswith("_"):
        return first.fill_(_CONSTANTS[name])
    if first is not None:
        return torch.full_like(first, _CONSTANTS[name])
    options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "pin_memory", "layout")}
    size = next(value for value in args if isinstance(value, (list, tuple)))
    value = args[0] if name == "randint" and isinstance(args[1], int) else _CONSTANTS[name]
    return torch.full(size, value, **({"dtype": torch.int64} if name == "randint" else {}) | options)


_CONSTANTS: dict[str, float] = {
    "bernoulli": 1.0,
    "bernoulli_": 1.0,
    "rand": 0.5,
    "rand_like": 0.5,
    "uniform_": 0.5,
    "randn": 0.25,
    "randn_like": 0.25,
    "normal_": 0.25,
    "exponential_": 1.0,
    "randint": 0,
    "randint_like": 0,
    "random_": 0,
}
