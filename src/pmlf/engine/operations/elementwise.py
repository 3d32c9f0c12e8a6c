"""Rules of element-wise operations with broadcasting, and of the affine part of normalisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pmlf.engine.arithmetic import blocks, full_precision
from pmlf.engine.layers import Contribution
from pmlf.engine.operations.layouts import Layout
from pmlf.engine.operations.products import LETTERS


def reduced(terms: list[Tensor], shape: torch.Size, weight: torch.Size, layout: Layout) -> Contribution:
    """sum over a sample's own elements of the product of terms, which broadcast to `shape` as the weight did.

    Returns:
        (samples, *weight).
    """
    letters = LETTERS[: len(shape)]
    axis = letters[layout.axis]
    lead = len(shape) - len(weight)
    kept = [letters[lead + place] for place, size in enumerate(weight) if size == shape[lead + place]]
    parts, spelled = [], []
    wide = reduce(torch.promote_types, [full_precision(term).dtype for term in terms])
    for term in terms:
        term = term.to(wide)
        term = term.reshape(*[1] * (len(shape) - term.ndim), *term.shape)
        if term.shape[layout.axis] != shape[layout.axis]:
            term = term.expand(*term.shape[: layout.axis], shape[layout.axis], *term.shape[layout.axis + 1 :])
        by_sample = layout.by_sample(term)  # (samples, rows, *others)
        others = letters.replace(axis, "")
        wanted = [
            place
            for place, letter in enumerate(others)
            if term.movedim(layout.axis, 0).shape[1 + place] == shape[letters.index(letter)]
        ]
        parts.append(by_sample.reshape(*by_sample.shape[:2], *[by_sample.shape[2 + place] for place in wanted]))
        spelled.append("Z" + axis + "".join(others[place] for place in wanted))
    # axes along which every term is the same count as often as they are long
    there = set("".join(spelled))
    times = 1
    for place, letter in enumerate(letters):
        if letter not in there and letter not in kept:
            times *= shape[place]
    missing = [letter for letter in kept if letter not in there]
    owned = axis in kept
    out = "".join(letter for letter in kept if letter in there and letter != axis)
    result = _summed(parts, spelled, f"Z{axis if owned else ''}{out}")
    result = result * times if times != 1 else result
    samples = layout.samples
    if missing:
        sizes = {letter: shape[letters.index(letter)] for letter in kept}
        places = [letter for letter in kept if letter != axis]
        lead_axes = result.shape[: 2 if owned else 1]
        result = result.reshape(*lead_axes, *[sizes[letter] if letter in there else 1 for letter in places])
        result = result.expand(*lead_axes, *[sizes[letter] for letter in places])
    if owned:
        result = _on_diagonal(result, kept.index(axis), layout)
    return result.reshape(samples, *weight)


def _summed(parts: list[Tensor], spelled: list[str], wanted: str) -> Tensor:
    """The product of terms with these axes, summed to the axes wanted.

    Two terms with the same axes are multiplied element by element, a few samples at a time, so that their product stays
    in the cache: as a matrix product (einsum) they would be very many very small ones.
    """
    if len(parts) != 2 or spelled[0] != spelled[1] or wanted == "Z":
        return torch.einsum(f"{','.join(spelled)}->{wanted}", *parts)
    first, second = parts
    axes = [place for place, letter in enumerate(spelled[0]) if letter not in wanted]
    if not axes:
        return torch.einsum(f"{','.join(spelled)}->{wanted}", *parts)
    each = 12 * first[0].numel()
    found = [(first[some] * second[some]).sum(axes) for some in blocks(slice(0, len(first)), each, like=first)]
    kept = [letter for letter in spelled[0] if letter in wanted]
    result = found[0] if len(found) == 1 else torch.cat(found)
    return result.permute([kept.index(letter) for letter in wanted])


def _on_diagonal(rows: Tensor, place: int, layout: Layout) -> Tensor:
    """(samples, rows of each, *others) as gradients of a weight with rows for all samples, zero but for its own."""
    if layout.order == "picked":
        raise ValueError("a weight has a row for every one that was picked")
    samples, each, *others = rows.shape
    numbers = torch.arange(samples, device=rows.device)
    if layout.order == "major":
        out = rows.new_zeros(samples, samples, each, *others)
        out[numbers, numbers] = rows
    else:
        out = rows.new_zeros(samples, each, samples, *others)
        out[numbers, :, numbers] = rows
    return out.flatten(1, 2).movedim(1, 1 + place)


def derivative(
    operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> list[Tensor] | float | None:
    """What the gradient at the output is multiplied with to get that at argument `place`, where it is simple. Of
    complex numbers it is the conjugate."""
    if set(kwargs) - {"alpha"} or len(args) != 2:
        return None
    alpha = kwargs.get("alpha", 1)
    other = args[1 - place]
    if operation in ("add", "__radd__"):
        return float(alpha) if place == 1 else 1.0
    if operation in ("sub", "subtract"):
        return -float(alpha) if place == 1 else 1.0
    if operation == "rsub":
        return -float(alpha) if place == 0 else 1.0
    if operation in ("mul", "multiply", "__rmul__") and isinstance(other, Tensor):
        return [other.detach().conj()]
    if operation in ("div", "true_divide") and place == 1 and isinstance(other, Tensor):
        weight = args[1].detach().conj()
        return [other.detach().conj(), -1.0 / (weight * weight)]
    return None


def affine(
    grad: Tensor, normal: Callable[[], Tensor] | None, channels: bool, weight: torch.Size, layout: Layout
) -> Contribution:
    """The contribution to a normalisation's weight (`normal` is its input, normalised) or bias (`normal` is None).

    The parameter lies along axis 1 (`channels`) or along the last axes.
    """
    terms = [grad] if normal is None else [grad, normal()]
    if not channels:
        return reduced(terms, grad.shape, weight, layout)
    spread = torch.Size((weight[0], *[1] * (grad.ndim - 2)))
    found = reduced(terms, grad.shape, spread, layout)
    assert isinstance(found, Tensor)
    return found.reshape(layout.samples, *weight)
