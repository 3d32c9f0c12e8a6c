"""One rule per layer type: from a layer's input and the gradient at its output to its parameters' gradients.

A rule returns, for each parameter wanted, `Factors` (matrices: held or ghost, decided by cost) or per-sample gradients
of shape (samples, *parameter.shape). A new layer is one function and one row of `_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf.engine.arithmetic import blocks, full_precision
from pmlf.engine.factors import Factors, Lookup, Outer
from pmlf.engine.patches import Patches

Contribution = Factors | Tensor
Statistics = tuple[Tensor, Tensor]  # mean and 1 / deviation of every group, (axis 0 of the output, groups)


class UnsupportedModel(ValueError):
    """Per-sample gradients cannot be computed by rules; each sample as a batch of one has them.

    Args:
        reason: What stands in the way, and what to change.
        way_out: What to give instead, if the model is to stay as it is.
    """

    def __init__(self, reason: str, way_out: str | None = None) -> None:
        self.reason = reason
        way_out = way_out or (
            'give gradients="vmap" (fast, where torch.func takes the model) or gradients="one-by-one" (any model, one '
            "sample at a time)"
        )
        super().__init__(f"{reason}; or {way_out}")


class VmapUnsupported(ValueError):
    """A model or a loss that torch.func.vmap does not take; plain autograd, one sample at a time, does."""

    def __init__(self, reason: str) -> None:
        super().__init__(f'{reason}; or give gradients="one-by-one" (any model, one sample at a time)')


class Call(NamedTuple):
    """One call of a layer in a forward pass, with the gradient that came back to its output."""

    name: str
    module: Any  # the layer; a rule knows its type
    args: tuple[Any, ...]
    named_args: Mapping[str, Any]
    grad: Tensor  # axis 0 is samples, or a sample-major multiple of it
    samples: int
    statistics: Statistics | None = None  # of a GroupNorm, where they could be had

    @property
    def input(self) -> Tensor:
        """The layer's input, repeated for every sample where it has no batch axis of its own."""
        tensor = self.args[0] if self.args else next(iter(self.named_args.values()))
        assert isinstance(tensor, Tensor)
        return tensor.expand(self.grad.shape[0], *tensor.shape[1:]) if tensor.shape[0] == 1 else tensor


Rule = Callable[[Call, Collection[str]], dict[str, Contribution]]


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a layer whose forward pass is exactly that of a known type; None for any other."""
    if "forward" in vars(module):  # patched on the instance: what it computes is not known
        return None
    forward = type(module).forward
    return _RULES.get(forward) or _RULES_BY_NAME.get(f"{forward.__module__}.{forward.__qualname__}")


def _linear(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    grad = full_precision(call.grad).reshape(call.samples, -1, call.grad.shape[-1])  # (n, tokens, out)
    found: dict[str, Contribution] = {}
    if "weight" in wanted:
        found["weight"] = _outer(grad, _tokens(call))
    if "bias" in wanted:
        found["bias"] = grad.squeeze(1) if grad.shape[1] == 1 else grad.sum(1)
    return found


def _transposed_linear(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    """Hugging Face's Conv1D: a linear layer whose weight is (in, out)."""
    found = _linear(call, wanted)
    weight = found.get("weight")
    if isinstance(weight, Outer):
        found["weight"] = _outer(weight.right, weight.left)
    return found


def _convolution(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    grad, module = full_precision(call.grad), call.module
    space = len(module.kernel_size)
    if grad.ndim != space + 2:
        raise ValueError(f"layer {call.name!r} got an input without a batch axis: give convolutions batched inputs")
    found: dict[str, Contribution] = {}
    if "weight" in wanted:
        found["weight"] = Patches(
            samples=call.samples,
            groups=module.groups,
            tokens=grad[0, 0].numel() * (grad.shape[0] // call.samples),
            rows=module.out_channels // module.groups,
            cols=module.weight[0].numel(),
            input=full_precision(call.input),
            grad=grad,
            kernel=module.kernel_size,
            stride=module.stride,
            dilation=module.dilation,
            padding=tuple(module._reversed_padding_repeated_twice),
            padding_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
        )
    if "bias" in wanted:
        found["bias"] = _channel_sum(call, grad)
    return found


def _embedding(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    module = call.module
    index = call.input.reshape(call.samples, -1)
    grad = full_precision(call.grad).reshape(*index.shape, module.embedding_dim)
    if module.padding_idx is not None:  # that row is never trained
        grad = grad * (index != module.padding_idx).unsqueeze(-1)
    tokens, rows, cols = index.shape[1], module.num_embeddings, module.embedding_dim
    return {"weight": Lookup(samples=call.samples, tokens=tokens, rows=rows, cols=cols, index=index, right=grad)}


def _layer_norm(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    shape, eps = call.module.normalized_shape, call.module.eps
    return _affine(call, wanted, lambda x: F.layer_norm(x, shape, eps=eps), _trailing_sum)


def _rms_norm(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    shape, eps = call.module.normalized_shape, call.module.eps
    return _affine(call, wanted, lambda x: F.rms_norm(x, shape, eps=eps), _trailing_sum)


def _group_norm(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    """Uses the forward pass's own statistics: sum grad * (x - mean) / deviation = (sum grad * x - mean * sum grad) /
    deviation, which is how torch's backward pass computes the batch's gradient too."""
    groups, eps = call.module.num_groups, call.module.eps
    if call.statistics is None:
        return _affine(call, wanted, lambda x: F.group_norm(x, groups, eps=eps), _channel_sum)

    def by_group(tensor: Tensor) -> Tensor:  # (rows, channels, *space) summed over space
        return tensor.reshape(len(tensor), groups, tensor.shape[1] // groups, -1).sum(3)

    grad = full_precision(call.grad)
    total = by_group(grad)
    found = {"bias": total}
    if "weight" in wanted:
        parts = blocks(slice(0, len(grad)), 8 * grad[0].numel(), like=grad)
        products = torch.cat([by_group(full_precision(call.input[part]) * grad[part]) for part in parts])
        mean, inverse = (tensor.unsqueeze(2) for tensor in call.statistics)
        found["weight"] = products.addcmul_(mean, total, value=-1).mul_(inverse)
    return {local: found[local].reshape(call.samples, -1, grad.shape[1]).sum(1) for local in wanted}


def _instance_norm(call: Call, wanted: Collection[str]) -> dict[str, Contribution]:
    eps = call.module.eps
    return _affine(call, wanted, lambda x: F.instance_norm(x, eps=eps), _channel_sum)


def _affine(
    call: Call, wanted: Collection[str], normal: Callable[[Tensor], Tensor], summed: Callable[[Call, Tensor], Tensor]
) -> dict[str, Contribution]:
    """Weights and biases of a normalisation, whose input is normalised once more, a few samples at a time: what comes
    of it is used up in the cache."""
    found: dict[str, Contribution] = {}
    if "weight" in wanted:
        rows, parts = call.grad.shape[0] // call.samples, []
        for chosen in blocks(slice(0, call.samples), 12 * rows * call.grad[0].numel(), like=call.grad):
            part = slice(chosen.start * rows, chosen.stop * rows)
            product = normal(full_precision(call.input[part])).mul_(full_precision(call.grad[part]))
            parts.append(summed(call, product))
        found["weight"] = torch.cat(parts)
    if "bias" in wanted:
        found["bias"] = summed(call, full_precision(call.grad))
    return found


def _outer(left: Tensor, right: Tensor) -> Outer:
    samples, tokens, rows = left.shape
    return Outer(samples=samples, tokens=tokens, rows=rows, cols=right.shape[-1], left=left, right=right)


def _tokens(call: Call) -> Tensor:
    """The input as (samples, tokens, features)."""
    return full_precision(call.input).reshape(call.samples, -1, call.input.shape[-1])


def _channel_sum(call: Call, tensor: Tensor) -> Tensor:
    """(n * windows, channels, *space) summed to (n, channels)."""
    windows = call.grad.shape[0] // call.samples
    return tensor.reshape(-1, windows, tensor.shape[1], tensor[0, 0].numel()).sum((1, 3))


def _trailing_sum(call: Call, tensor: Tensor) -> Tensor:
    """(n * windows, ..., *shape) summed to (n, *shape)."""
    shape, windows = call.module.normalized_shape, call.grad.shape[0] // call.samples
    tokens = windows * (tensor[0].numel() // math.prod(shape))
    return tensor.reshape(-1, tokens, *shape).sum(1)


_RULES: dict[Callable[..., Any], Rule] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
    nn.Embedding.forward: _embedding,
    nn.LayerNorm.forward: _layer_norm,
    nn.RMSNorm.forward: _rms_norm,
    nn.GroupNorm.forward: _group_norm,
    nn.InstanceNorm1d.forward: _instance_norm,  # one function for 1, 2 and 3 dimensions
}
# Layers of libraries that are not imported before their user does.
_RULES_BY_NAME: dict[str, Rule] = {"transformers.pytorch_utils.Conv1D.forward": _transposed_linear}
