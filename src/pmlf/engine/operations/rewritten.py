"""Operations that are run as others, which have rules: tables for every sample, writes in place, recurrent layers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmlf.engine.layers import UnsupportedModel
from pmlf.engine.operations.products import LETTERS
from pmlf.engine.operations.recurrence import run_cell, run_layers
from pmlf.engine.operations.rules import Args, Named, Rule
from pmlf.engine.operations.uses import Uses, rows_of


def _expand(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    weight = args[0]
    if weight not in mode.weights:
        return NotImplemented
    if func.__name__ == "expand_as":
        sizes = list(args[1].shape)
    elif func.__name__ == "broadcast_to":
        sizes = list(args[1])
    else:
        sizes = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    lead = len(sizes) - weight.ndim
    sizes = [weight.shape[place - lead] if size == -1 else int(size) for place, size in enumerate(sizes)]
    new = [size for place, size in enumerate(sizes) if place < lead or weight.shape[place - lead] != size]
    if new and mode.presumes(new[0]):
        return rows_of(mode, weight, sizes, presumed=True)
    return mode.run(Tensor.expand, weight, sizes) if with_samples else NotImplemented


def _broadcast(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """Weights beside samples get rows for every sample."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if not with_samples:
        return NotImplemented
    sizes = list(torch.broadcast_shapes(*[each.shape for each in tensors]))
    return tuple(
        rows_of(mode, each, sizes, presumed=False) if each in mode.weights else each.expand(sizes) for each in tensors
    )


def _repeat(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """Repetitions are an expanded axis before each, joined with it."""
    weight = args[0]
    if with_samples or weight not in mode.weights or kwargs:
        return NotImplemented
    times = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    times = [1] * (weight.ndim - len(times)) + times
    first = next((place for place, each in enumerate(times) if each != 1), None)
    if first is None or not mode.presumes(times[first]):
        return NotImplemented
    shape = [1] * (len(times) - weight.ndim) + list(weight.shape)
    apart = mode.run(weight.reshape, [size for each in shape for size in (1, each)])
    spread = rows_of(mode, apart, [size for pair in zip(times, shape, strict=True) for size in pair], presumed=True)
    return spread.reshape([each * size for each, size in zip(times, shape, strict=True)])


def _like_other(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """`weight.to(x)`: only the precision and the device of samples."""
    other = next((value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)), None)
    if args[0] not in mode.weights:
        return func(*(value.detach() if isinstance(value, Tensor) else value for value in args), **kwargs)
    if other is None:
        return NotImplemented
    return mode.run(args[0].to, device=other.device, dtype=other.dtype)


def _getitem(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """Rows of a weight by their numbers, along one axis or several, are a lookup; a single number from the samples (an
    expert's) is a view."""
    weight, index = args
    places = index if isinstance(index, tuple) else (index,)
    lead = next((place for place, each in enumerate(places) if not _is_whole(each)), 0)
    numbers = [each for each in places if isinstance(each, Tensor) and each.dtype in (torch.int64, torch.int32)]
    others = [*places[:lead], *places[lead + len(numbers) :]]
    if weight not in mode.weights or not numbers or not all(map(_is_whole, others)):
        return NotImplemented
    if with_samples and all(each.ndim == 0 for each in numbers):
        return mode.run(weight.__getitem__, tuple(int(each) if isinstance(each, Tensor) else each for each in places))
    if not with_samples and max(each.ndim for each in numbers) < 2:
        return NotImplemented
    return mode.run(_looked_up, weight, lead, numbers)


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _looked_up(weight: Tensor, lead: int, numbers: list[Tensor]) -> Tensor:
    """weight[:, ..., :, *numbers] with `lead` whole axes in front."""
    axes = len(numbers)
    front = weight.movedim(tuple(range(lead, lead + axes)), tuple(range(axes)))
    flat = numbers[0].long() % front.shape[0]
    for size, number in zip(front.shape[1:axes], numbers[1:], strict=True):
        flat = flat * size + number.long() % size
    rows = F.embedding(flat, front.reshape(math.prod(front.shape[:axes]), -1))
    found = rows.reshape(*flat.shape, *front.shape[axes:])
    return found.movedim(tuple(range(flat.ndim, flat.ndim + lead)), tuple(range(lead)))


def _index_select(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    weight, axis = given["input"], given["dim"]
    if not with_samples or weight not in mode.weights or given["index"].ndim != 1:
        return NotImplemented
    return mode.run(_looked_up, weight, axis % weight.ndim, [given["index"]])


def _tensordot(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    first, second, of_first, of_second = args
    if not with_samples:
        return NotImplemented
    letters = LETTERS[: first.ndim]
    others = list(LETTERS[first.ndim : first.ndim + second.ndim])
    for one, other in zip(of_first, of_second, strict=True):
        others[other % second.ndim] = letters[one % first.ndim]
    kept = [letter for letter in letters if letter not in others] + [each for each in others if each not in letters]
    return mode.run(torch.einsum, f"{letters},{''.join(others)}->{''.join(kept)}", first, second)


def _inner(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    first, second = args
    if min(first.ndim, second.ndim) == 0:
        return NotImplemented
    return _tensordot(mode, func, (first, second, [-1], [-1]), kwargs, with_samples)


def _outer(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    first, second = args
    return mode.run(lambda: first.unsqueeze(1) * second) if with_samples else NotImplemented


def _cosine_similarity(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    given = dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)) | kwargs
    first, second, eps = given["x1"], given["x2"], given.get("eps", 1e-8)
    axes = max(first.ndim, second.ndim)
    axis = given.get("dim", 1) % axes - axes  # counted from the end, where both have it

    def run() -> Tensor:
        units = [each / each.norm(dim=axis, keepdim=True).clamp(min=eps) for each in (first, second)]
        return (units[0] * units[1]).sum(axis)

    return mode.run(run) if with_samples and min(first.ndim, second.ndim) >= -axis else NotImplemented


def in_place(mode: Uses, func: Any, args: Args, kwargs: Named) -> Any:
    """The same out of place, copied to where it is written. A weight that samples are written into is none any more."""
    target, name = args[0], func.__name__
    outside = getattr(Tensor, name[:-1], None)
    if name in ("copy_", "fill_"):
        new = mode.run(torch.add, _zeros(mode, target), args[1])
    elif outside is None:
        raise UnsupportedModel(f"{name} writes a weight and samples into one tensor: make it out of place")
    else:  # a rule may look at what was there later
        before = target if name in ("add_", "sub_") else mode.run(target.clone)
        new = mode.run(outside, before, *args[1:], **kwargs)
    _opened(mode, target)
    return target.copy_(new)


def _zeros(mode: Uses, like: Tensor) -> Tensor:
    """Zeros that are the samples', because they are written to."""
    zeros = torch.zeros_like(like.detach())
    mode.mark(zeros)
    return zeros


def _setitem(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    target, index, value = args
    by_sample = with_samples or (target not in mode.weights and target.ndim and mode.presumes(target.shape[0]))
    if not by_sample:
        func(*args)
        mode.weights.add(target if target._base is None else target._base)
        return None
    if isinstance(value, Tensor) and value in mode.weights:
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim < target.ndim:
            shape = [*index.shape, *[1] * (target.ndim - index.ndim)]
            new = mode.run(lambda: torch.where(index.reshape(shape), value, target.clone()))
            _opened(mode, target)
            target.copy_(new)
            return None
        value = mode.run(torch.add, _zeros(mode, target.detach()[index]), value)
    _opened(mode, target)
    target[index] = value
    return None


def _opened(mode: Uses, target: Tensor) -> None:
    """What was a weight may hold samples now: what it was made of is a use of its own."""
    if target not in mode.weights:
        return
    if target.is_leaf or target._base is not None:
        raise UnsupportedModel(f"samples are written into {mode.weights.name(target)!r}: write them into a copy of it")
    before = target.clone()
    mode.weights.add(before)
    mode.weights.forget(target)
    if mode.samples > 1:
        raise UnsupportedModel("samples are written into a tensor made of parameters: write both into one of zeros")
    target.detach_().copy_(rows_of(mode, before, list(before.shape), presumed=False))


def _attention(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """A mask that is a weight (a bias of positions) gets rows for every sample."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not with_samples:
        return NotImplemented
    rows = next(given[name].shape[0] for name in names[:3] if given[name] not in mode.weights)
    for name in names[:4]:
        weight = given.get(name)
        if isinstance(weight, Tensor) and weight in mode.weights:
            lead = [1] * (given["query"].ndim - weight.ndim) + list(weight.shape)
            given[name] = rows_of(mode, weight, [rows, *lead[1:]], presumed=False)
    return func(**given)


def _prelu(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    input, weight = args
    if not with_samples or input in mode.weights:
        return NotImplemented
    channels = [-1, *[1] * max(0, input.ndim - 2)] if weight.numel() > 1 else [1]
    return mode.run(lambda: torch.where(input >= 0, input, input * weight.reshape(channels)))


def _bilinear(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    first, second, weight, *bias = args

    def run() -> Tensor:
        pairs = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
        return F.linear(pairs, weight.reshape(len(weight), -1), bias[0] if bias else None)

    return mode.run(run) if with_samples else NotImplemented


def _embedding_bag(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    names = "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    weight, index, offsets = given["weight"], given["indices"], given["offsets"]
    if not with_samples:
        return NotImplemented
    if given.get("mode", 0) == 2 or given.get("padding_idx", -1) not in (None, -1):
        raise UnsupportedModel("embedding_bag with mode='max' or padding_idx has no rule: look rows up by embedding")
    offsets = offsets[:-1] if given.get("include_last_offset") else offsets
    each, rest = divmod(len(index), max(1, len(offsets)))
    even = (
        not rest and not mode.is_sample(offsets) and torch.equal(offsets, each * torch.arange(len(offsets)).to(offsets))
    )
    bags = torch.bucketize(torch.arange(len(index), device=index.device), offsets, right=True) - 1

    def run() -> tuple[Tensor, None, None, None]:
        rows = F.embedding(index, weight)
        scale = given.get("per_sample_weights")
        rows = rows if scale is None else rows * scale.unsqueeze(-1)
        if even:  # bags are the rows of a matrix
            total = rows.reshape(len(offsets), each, -1).sum(1)
        else:
            total = rows.new_zeros(len(offsets), rows.shape[1]).index_add(0, bags, rows)
        if given.get("mode", 0) == 1:
            total = total / torch.bincount(bags, minlength=len(offsets)).clamp(min=1).unsqueeze(1).to(total)
        return total, None, None, None

    return mode.run(run)


def _baddbmm(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)

    def run() -> Tensor:
        found: Tensor = torch.matmul(args[1], args[2]) * alpha
        return found if beta == 0 else found + args[0] * beta

    return mode.run(run) if with_samples else NotImplemented


def _grouped_mm(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    """Rows in groups, each with a matrix of its own."""
    given = dict(zip(("first", "second", "offs", "bias"), args, strict=False)) | kwargs
    first, second, ends = given["first"], given["second"], given.get("offs")
    if not with_samples or ends is None or first.ndim != 2 or second.ndim != 3:
        return NotImplemented

    def run() -> Tensor:
        parts, start = [], 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                parts.append(first[start:end] @ second[number])
            start = end
        return torch.cat(parts)

    return mode.run(run)


def _recurrent(mode: Uses, func: Any, args: Args, kwargs: Named, with_samples: bool) -> Any:
    if not with_samples:
        return NotImplemented
    return (run_cell if func.__name__.endswith("_cell") else run_layers)(mode, func.__name__, args)


REWRITTEN: dict[str, Rule] = {
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "broadcast_tensors": _broadcast,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("to", "type_as"), _like_other),
    "__getitem__": _getitem,
    "index_select": _index_select,
    "tensordot": _tensordot,
    "inner": _inner,
    **dict.fromkeys(("outer", "ger"), _outer),
    "cosine_similarity": _cosine_similarity,
    "__setitem__": _setitem,
    "scaled_dot_product_attention": _attention,
    "prelu": _prelu,
    "bilinear": _bilinear,
    "embedding_bag": _embedding_bag,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped_mm,
    **dict.fromkeys(
        ["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"], _recurrent
    ),
}
