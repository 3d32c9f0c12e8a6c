"""Rules by the name of an operation: what a use says about each of its weights. A new one is a function and a row.

A rule is given the mode, the operation and its arguments. It runs the operation by `mode.use` with a function that
takes contributions, or returns NotImplemented where its form is not covered: then autograd takes them, one sample
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pmlf.basics.generators import generator_states, same_states
from pmlf.engine.arithmetic import full_precision
from pmlf.engine.layers import Contribution, UnsupportedModel
from pmlf.engine.operations.convolutions import Convolution
from pmlf.engine.operations.elementwise import affine, derivative, reduced
from pmlf.engine.operations.layouts import Layout
from pmlf.engine.operations.products import (
    contracted,
    linear_letters,
    looked_up,
    matmul_letters,
    spelled_out,
    squeezed,
)
from pmlf.engine.operations.uses import Take, Uses
from pmlf.engine.operations.weights import vector_products

Args = tuple[Any, ...]
Named = dict[str, Any]
Rule = Callable[[Uses, Any, Args, Named, bool], Any]
_MASKED_BYTES = 1 << 26  # of gradients with all rows but one sample's left out


def by_autograd(func: Any, args: Args, kwargs: Named, weights: tuple[Tensor, ...]) -> Take:
    """Runs the operation again, and its backward pass for each sample with only that sample's rows of the gradient.

    Right for any operation, whichever its arguments' rows are: a sample's loss depends on a weight through its own
    elements of the output alone.
    """

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        weight = full_precision(weights[number].detach()).clone().requires_grad_()
        given, named = tree_map(
            lambda value: (
                (weight if value is weights[number] else full_precision(value.detach()))
                if isinstance(value, Tensor)
                else value
            ),
            (args, kwargs),
        )
        before = generator_states(weight.device)
        with torch.enable_grad():
            out = func(*given, **named)
        if not same_states(before, generator_states(weight.device)):
            raise UnsupportedModel(f"{func.__name__} uses a weight and draws random numbers: draw them outside of it")
        if not out.requires_grad:
            return grad.new_zeros(layout.samples, *weight.shape)
        grad, parts = grad.to(out.dtype), []
        step = max(1, _MASKED_BYTES // (4 * max(1, grad.numel())))
        for start in range(0, layout.samples, step):
            chosen = range(start, min(start + step, layout.samples))
            masked = torch.stack([grad * layout.mask(grad, each) for each in chosen])
            masked = masked.reshape(len(chosen), *out.shape)
            (found,) = vector_products(out, [weight], masked)
            parts.append(grad.new_zeros(len(chosen), *weight.shape) if found is None else found)
        return torch.cat(parts)

    return take


def _linear(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    input, weight, bias = _named(("input", "weight", "bias"), args, kwargs)
    if not with_samples or input in mode.weights:
        return NotImplemented
    of_input, of_weight, of_output = linear_letters(input.ndim)
    weights = _weights(mode, (weight, bias))

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        own = weights[number]
        if own is not weight:
            return reduced([grad], grad.shape, own.shape, layout)
        found = contracted(grad, of_output, input.detach(), of_input, of_weight, layout)
        return by_autograd(func, args, kwargs, weights)(number, grad, layout) if found is None else found

    return mode.use(func, args, kwargs, take, [input] if weight in mode.weights else [])


def _matmul(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    first, second = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
    if not with_samples or (first in mode.weights) == (second in mode.weights):
        return NotImplemented
    if min(first.ndim, second.ndim) < 2:
        return _by_vector(mode, first, second)
    weight, other = (first, second) if first in mode.weights else (second, first)

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        letters = matmul_letters(first, second, grad)
        assert letters is not None
        of_weight, of_other = (letters[0], letters[1]) if weight is first else (letters[1], letters[0])
        found = _product(grad, letters[2], (other, of_other), (weight, of_weight), layout)
        return by_autograd(func, args, kwargs, (weight,))(0, grad, layout) if found is None else found

    return mode.use(func, args, kwargs, take, [other])


def _by_vector(mode: Uses, first: Tensor, second: Tensor) -> Any:
    """A weight that is a vector is a matrix of one column or one row."""
    if second in mode.weights and second.ndim == 1 and first.ndim > 1:
        return mode.run(lambda: (first @ second.unsqueeze(1)).squeeze(-1))
    if first in mode.weights and first.ndim == 1 and second.ndim > 1:
        return mode.run(lambda: (first.unsqueeze(0) @ second).squeeze(-2))
    return NotImplemented


def _einsum(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    equation, operands = args[0], args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not with_samples or not isinstance(equation, str):
        return NotImplemented
    letters, output = spelled_out(equation, [operand.ndim for operand in operands])
    if len(operands) > 2:  # from left to right, as torch does
        return mode.run(_pairwise, letters, output, operands)
    if (
        len(operands) < 2
        or sum(operand in mode.weights for operand in operands) != 1
        or any(len(set(own)) < len(own) for own in letters)
    ):
        return NotImplemented
    place = 0 if operands[0] in mode.weights else 1
    weight, other = (operands[place], letters[place]), (operands[1 - place], letters[1 - place])
    if not set(weight[1]) <= set(output) | set(other[1]) or not set(other[1]) <= set(output) | set(weight[1]):
        return NotImplemented

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        found = _product(grad, output, other, weight, layout)
        return by_autograd(func, args, kwargs, (weight[0],))(0, grad, layout) if found is None else found

    return mode.use(func, args, kwargs, take, [other[0]])


def _pairwise(letters: list[str], output: str, operands: Sequence[Tensor]) -> Tensor:
    """An einsum of several operands, two at a time."""
    found, of_found = operands[0], letters[0]
    for place in range(1, len(operands)):
        later = set(output).union(*letters[place + 1 :])
        kept = "".join(dict.fromkeys(each for each in of_found + letters[place] if each in later))
        kept = output if place == len(operands) - 1 else kept
        found = torch.einsum(f"{of_found},{letters[place]}->{kept}", found, operands[place])
        of_found = kept
    return found


def _product(
    grad: Tensor, output: str, other: tuple[Tensor, str], weight: tuple[Tensor, str], layout: Layout
) -> Contribution | None:
    """The contribution to one side of a product that is given by letters; axes of size 1 may have been broadcast."""
    sizes: dict[str, int] = dict(zip(output, grad.shape, strict=True))
    for tensor, letters in (other, weight):
        for letter, size in zip(letters, tensor.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    side, of_side = squeezed(other[0].detach(), other[1], sizes)
    _, of_weight = squeezed(weight[0].detach(), weight[1], sizes)
    if output[layout.axis] not in of_side:
        return None
    found = contracted(grad, output, side, of_side, of_weight, layout)
    return found.reshape(layout.samples, *weight[0].shape) if isinstance(found, Tensor) else found


def _addmm(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    bias, first, second = args[:3] if len(args) >= 3 else (None, None, None)
    if not with_samples or bias is None or kwargs or first in mode.weights or len(args) > 3:
        return NotImplemented
    weights = _weights(mode, (bias, second))

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        own = weights[number]
        if own is not second:
            return reduced([grad], grad.shape, own.shape, layout)
        found = _product(grad, "ab", (first, "ac"), (second, "cb"), layout)
        return by_autograd(func, args, kwargs, weights)(number, grad, layout) if found is None else found

    return mode.use(func, args, kwargs, take, [first])


def _embedding(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    weight, index, padding, by_frequency = _named(
        ("weight", "indices", "padding_idx", "scale_grad_by_freq"), args, kwargs
    )
    presumed = not with_samples and index.ndim >= 2 and mode.presumes(index.shape[0])
    if weight not in mode.weights or not (with_samples or presumed):
        return NotImplemented
    if by_frequency:
        raise UnsupportedModel("embedding scales a sample's gradient by the other samples (scale_grad_by_freq)")
    padding = None if padding is None or padding < 0 else padding

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        if layout.axis >= index.ndim:
            return by_autograd(func, args, kwargs, (weight,))(0, grad, layout)
        return looked_up(grad, index, weight, padding, layout)

    return mode.use(func, args, kwargs, take, [index], presumed=presumed)


def _elementwise(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    if not with_samples or "out" in kwargs:
        return NotImplemented
    weights = _weights(mode, (*args, *kwargs.values()))
    places = [next((place for place, each in enumerate(args) if each is own), None) for own in weights]
    simple = [None if place is None else derivative(func.__name__, args, kwargs, place) for place in places]
    others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each not in mode.weights]
    needs = [] if all(isinstance(each, float) for each in simple) else others

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        own, factor = weights[number], simple[number]
        if isinstance(factor, float):
            found = reduced([grad], grad.shape, own.shape, layout)
            return found if factor == 1.0 or not isinstance(found, Tensor) else found * factor
        terms = [grad, *factor] if factor is not None else [_at_elements(func, args, kwargs, own, grad)]
        return reduced(terms, grad.shape, own.shape, layout)

    return mode.use(func, args, kwargs, take, needs)


def _at_elements(func: Any, args: Args, kwargs: Named, weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient at a weight that is written out for every element of the output."""
    spread = weight.detach().expand(grad.shape).clone().requires_grad_()
    given, named = tree_map(
        lambda value: (spread if value is weight else value.detach()) if isinstance(value, Tensor) else value,
        (args, kwargs),
    )
    with torch.enable_grad():
        out = func(*given, **named)
    found: Tensor = torch.autograd.grad(out, spread, grad.to(out.dtype))[0]
    return found


def _convolution(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    if not with_samples:
        return NotImplemented
    given = Convolution(func.__name__, args, kwargs)
    if given.input in mode.weights:
        return NotImplemented
    weights = _weights(mode, (given.weight, given.bias))

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        of = given.of_weight if weights[number] is given.weight else given.of_bias
        found = of(grad, layout)
        return by_autograd(func, args, kwargs, weights)(number, grad, layout) if found is None else found

    return mode.use(func, args, kwargs, take, [given.input])


_NORMS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "instance_norm": ("input", "weight", "bias", "mean", "var", "use_input_stats", "momentum", "eps"),
    "batch_norm": ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps"),
}


def _normalised(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    names = _NORMS[func.__name__]
    given = dict(zip(names, _named(names, args, kwargs), strict=True))
    input = given["input"]
    if not with_samples or input in mode.weights:
        return NotImplemented
    weights = _weights(mode, (given["weight"], given.get("bias")))
    channels = names[1] in ("num_groups", "weight")

    def normal() -> Tensor:
        x, eps = full_precision(input.detach()), given["eps"]
        if func.__name__ == "layer_norm":
            return F.layer_norm(x, given["normalized_shape"], eps=eps)
        if func.__name__ == "rms_norm":
            return F.rms_norm(x, given["normalized_shape"], eps=eps)
        if func.__name__ == "group_norm":
            return F.group_norm(x, given["num_groups"], eps=eps)
        if func.__name__ == "instance_norm":
            return F.instance_norm(x, given["mean"], given["var"], use_input_stats=given["use_input_stats"], eps=eps)
        return F.batch_norm(x, given["mean"], given["var"], training=given["training"], eps=eps)

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        own = weights[number]
        return affine(grad, normal if own is given["weight"] else None, channels, own.shape, layout)

    return mode.use(func, args, kwargs, take, [input])


def _named(names: tuple[str, ...], args: Args, kwargs: Named) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def _weights(mode: Uses, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Weights among arguments, each once, in the order in which a use has them."""
    found: dict[int, Tensor] = {id(each): each for each in tensors if isinstance(each, Tensor) and each in mode.weights}
    return tuple(found.values())


RULES: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__"), _matmul),
    "einsum": _einsum,
    "addmm": _addmm,
    "embedding": _embedding,
    **dict.fromkeys(
        [
            "add",
            "sub",
            "subtract",
            "rsub",
            "mul",
            "multiply",
            "div",
            "true_divide",
            "pow",
            "where",
            "maximum",
            "minimum",
            "max",
            "min",
            "clamp",
            "clip",
            "logaddexp",
            "xlogy",
            "lerp",
            "addcmul",
            "addcdiv",
            "masked_fill",
            "fmod",
            "atan2",
            "hypot",
        ],
        _elementwise,
    ),
    **dict.fromkeys(
        ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], _convolution
    ),
    **dict.fromkeys(_NORMS, _normalised),
}
