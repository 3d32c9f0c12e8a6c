"""Rules of products: linear, matmul, addmm, bmm, einsum and lookups, as factors wherever a weight is one matrix.

A product is written with a letter for each axis, as by einsum: x "nti", weight "oi", output "nto".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision
from pmlf.engine.factors import Lookup, Outer
from pmlf.engine.layers import Contribution
from pmlf.engine.operations.layouts import Layout

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SAMPLE = "Z"  # the axis of samples, beside that of a sample's own rows


def contracted(
    grad: Tensor, output: str, other: Tensor, of_other: str, of_weight: str, layout: Layout
) -> Contribution | None:
    """Per-sample gradients of a weight in output = other x weight; None where the weight has rows of the samples.

    Axes of size 1 that were broadcast have no letter. (samples, *weight) where it is not one matrix.
    """
    axis = output[layout.axis]
    if axis in of_weight or axis not in of_other:
        return None
    grad, other = full_precision(grad), full_precision(other).conj()
    wide = torch.promote_types(grad.dtype, other.dtype)  # a model may compute a part in another precision
    grad, other = grad.to(wide), other.to(wide)
    left = layout.by_sample(grad)
    right = layout.by_sample(other, of_other.index(axis))
    of_left = _SAMPLE + axis + output.replace(axis, "")
    of_right = _SAMPLE + axis + of_other.replace(axis, "")
    if len(of_weight) == 2 and not set(of_weight) & set(output) & set(of_other):
        tokens = [letter for letter in of_left if letter in of_right and letter != _SAMPLE]
        rows, cols = of_weight[0], of_weight[1]
        if set(of_left) - set(of_right) <= set(of_weight) and set(of_right) - set(of_left) <= set(of_weight):
            sides = {}
            for letters, side in ((of_left, left), (of_right, right)):
                own = next((letter for letter in of_weight if letter in letters), None)
                if own is not None:
                    sides[own] = _matrix(side, letters, tokens, own)
            if rows in sides and cols in sides:
                return _outer(sides[rows], sides[cols])
    return torch.einsum(f"{of_left},{of_right}->{_SAMPLE}{of_weight}", left, right)


def _matrix(side: Tensor, letters: str, tokens: Sequence[str], own: str) -> Tensor:
    """(samples, tokens, features)."""
    order = [letters.index(letter) for letter in (_SAMPLE, *tokens, own)]
    return side.permute(order).reshape(side.shape[0], -1, side.shape[order[-1]])


def _outer(left: Tensor, right: Tensor) -> Outer:
    samples, tokens, rows = left.shape
    return Outer(samples=samples, tokens=tokens, rows=rows, cols=right.shape[-1], left=left, right=right)


def linear_letters(axes: int) -> tuple[str, str, str]:
    """The letters of the input, the weight and the output of `linear`."""
    lead = LETTERS[: axes - 1]
    return lead + "y", "xy", lead + "x"


def matmul_letters(first: Tensor, second: Tensor, output: Tensor) -> tuple[str, str, str] | None:
    """The letters of both sides and the output of `matmul`; None where a side is a vector, or an axis of size 1 is
    broadcast that the letters cannot leave out."""
    if first.ndim < 2 or second.ndim < 2:
        return None
    lead = LETTERS[: output.ndim - 2]
    sides = []
    for side, last in ((first, "wy"), (second, "yx")):
        own = lead[len(lead) - (side.ndim - 2) :]
        sides.append(own + last)
    return sides[0], sides[1], lead + "wx"


def spelled_out(equation: str, axes: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand of an einsum and of its output, which may be left out, with letters for "...".

    >>> spelled_out("...i,oi->...o", [3, 2])
    (['abi', 'oi'], 'abo')
    >>> spelled_out("bi,io", [2, 2])
    (['bi', 'io'], 'bo')
    """
    sides, arrow, output = equation.replace(" ", "").partition("->")
    operands = sides.split(",")
    free = [letter for letter in LETTERS if letter not in equation]
    others = [
        own - len(side.replace("...", "")) if "..." in side else 0 for side, own in zip(operands, axes, strict=True)
    ]
    shared = "".join(free[: max(others)])
    letters = [side.replace("...", shared[len(shared) - count :]) for side, count in zip(operands, others, strict=True)]
    if not arrow:
        written = sides.replace(",", "").replace(".", "")
        output = "..." + "".join(sorted(letter for letter in set(written) if written.count(letter) == 1))
    return letters, output.replace("...", shared)


def squeezed(tensor: Tensor, letters: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    """The tensor and its letters, without the axes of size 1 that were broadcast to others."""
    kept = [axis for axis, letter in enumerate(letters) if tensor.shape[axis] == sizes[letter]]
    shape = [tensor.shape[axis] for axis in kept]
    return tensor.reshape(shape), "".join(letters[axis] for axis in kept)


def looked_up(grad: Tensor, index: Tensor, weight: Tensor, padding: int | None, layout: Layout) -> Contribution:
    """The contribution of rows that were looked up in a table, by their numbers."""
    columns = math.prod(weight.shape[1:])
    samples = layout.samples
    if layout.axis >= index.ndim:  # an axis of the table's own
        raise ValueError("the rows of a table are not the samples'")
    rows = layout.by_sample(full_precision(grad)).reshape(samples, -1, columns)
    numbers = layout.by_sample(index).reshape(samples, -1)
    if padding is not None:
        rows = rows * (numbers != padding).unsqueeze(-1)
    return Lookup(samples=samples, tokens=numbers.shape[1], rows=len(weight), cols=columns, index=numbers, right=rows)
