"""Rules of convolutions, transposed ones too: patches of the input, and the gradient at each output pixel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision
from pmlf.engine.layers import Contribution
from pmlf.engine.operations.layouts import Layout
from pmlf.engine.patches import Patches

_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


class Convolution:
    """The arguments of one convolution."""

    def __init__(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.transposed = "transpose" in operation
        given = dict(zip(_TRANSPOSED if self.transposed else _FORWARD, args, strict=False)) | kwargs
        self.input: Tensor = given["input"]
        self.weight: Tensor = given["weight"]
        self.bias: Tensor | None = given.get("bias")
        self.space = self.weight.ndim - 2
        self.stride = self._each(given.get("stride", 1))
        self.dilation = self._each(given.get("dilation", 1))
        self.groups = int(given.get("groups", 1))
        self.padding = self._padding(given.get("padding", 0))

    def _each(self, value: Any) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * self.space if len(values) == 1 else values

    def _padding(self, value: Any) -> tuple[int, ...]:
        """The padding as `F.pad` takes it: last axis first, before and after."""
        if value == "valid":
            value = 0
        if value == "same":
            total = [gap * (size - 1) for gap, size in zip(self.dilation, self.weight.shape[2:], strict=True)]
            return tuple(part for each in reversed(total) for part in (each // 2, each - each // 2))
        return tuple(part for each in reversed(self._each(value)) for part in (each, each))

    @property
    def batched(self) -> bool:
        return self.input.ndim == self.space + 2

    def of_weight(self, grad: Tensor, layout: Layout) -> Contribution | None:
        """None where a batch is not along axis 0."""
        if not self.batched or layout.axis != 0:
            return None
        input, grad = (_rows(full_precision(each), layout) for each in (self.input.detach(), grad))
        if self.transposed:  # its weight's gradient is that of the convolution that it is the transpose of
            input, grad = grad, input
            if self._one_window_more(input, grad):
                return None
        rows = grad.shape[1] // self.groups
        return Patches(
            samples=layout.samples,
            groups=self.groups,
            tokens=grad[0, 0].numel() * (grad.shape[0] // layout.samples),
            rows=rows,
            cols=self.weight[0].numel(),
            input=input,
            grad=grad,
            kernel=tuple(self.weight.shape[2:]),
            stride=self.stride,
            dilation=self.dilation,
            padding=self.padding,
            padding_mode="constant",
        )

    def _one_window_more(self, input: Tensor, grad: Tensor) -> bool:
        """Whether output padding, which may be as long as the dilation, makes room for another window."""
        sizes = zip(
            input.shape[2:],
            grad.shape[2:],
            self.stride,
            self.dilation,
            self.weight.shape[2:],
            self.padding[::-2],
            strict=True,
        )
        return any(
            (have + 2 * pad - gap * (size - 1) - 1) // step + 1 != out for have, out, step, gap, size, pad in sizes
        )

    def of_bias(self, grad: Tensor, layout: Layout) -> Contribution | None:
        if not self.batched or layout.axis != 0:
            return None
        by_sample = layout.by_sample(full_precision(grad))  # (samples, rows, channels, *space)
        return by_sample.flatten(3).sum((1, 3)) if by_sample.ndim > 3 else by_sample.sum(1)


def _rows(tensor: Tensor, layout: Layout) -> Tensor:
    """(samples * rows of each, ...), one sample after the other."""
    return tensor if layout.order == "major" else torch.flatten(layout.by_sample(tensor), 0, 1)
