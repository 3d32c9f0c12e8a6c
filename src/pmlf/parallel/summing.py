"""The sum over ranks, with noise added once, after the sum.

Sums are cut into buckets. Each bucket has one rank: the others send theirs there, that rank adds the noise, and
everybody receives the result. So a sum without noise is known to the rank of its bucket alone, and so is the key of
that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pmlf.mechanism.noise import CHUNK, gaussian_words

_MOST_IN_A_BUCKET = 16 * CHUNK  # numbers: 16 MB in float64


class Part(NamedTuple):
    """Numbers `start` to `stop` of tensor `tensor`; in a step's noise stream, theirs begins at word `word`."""

    tensor: int
    start: int
    stop: int
    word: int


AddNoise = Callable[[Tensor, Part], None]


def parts(sizes: Sequence[int], *, hardened: bool) -> list[Part]:
    """Tensors cut into parts of as many numbers as the noise makes at a time.

    >>> [part.word for part in parts([3, CHUNK + 5], hardened=False)]
    [0, 4, 131076]
    """
    found, word = [], 0
    for tensor, size in enumerate(sizes):
        for start in range(0, size, CHUNK):
            part = Part(tensor, start, min(start + CHUNK, size), word)
            found.append(part)
            word += gaussian_words(part.stop - part.start, hardened=hardened)
    return found


def add_noise_to(values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
    """Add noise to whole tensors, in place."""
    word = 0
    for tensor, value in enumerate(values):
        add_noise(value.view(-1), Part(tensor, 0, value.numel(), word))
        word += gaussian_words(value.numel(), hardened=hardened)


def sum_with_noise(values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool, group: dist.ProcessGroup) -> None:
    """Replace values by their sum over the ranks, plus noise that the rank of each bucket adds.

    Args:
        values: Contiguous tensors of one dtype and device, of the same shapes on every rank.
        add_noise: Adds noise to a part, in place.
        hardened: Whether that noise is hardened, which takes more words of its stream.
        group: The ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = [value.view(-1) for value in values]
    for turn in _turns(buckets([each.numel() for each in flat], ranks, hardened=hardened), ranks):
        buffers = [torch.cat([flat[part.tensor][part.start : part.stop] for part in bucket]) for bucket in turn]
        bucket_ranks = [dist.get_global_rank(group, place) for place in range(len(turn))]
        for bucket_rank, buffer in zip(bucket_ranks, buffers, strict=True):
            dist.reduce(buffer, dst=bucket_rank, group=group)
        if rank < len(turn):  # the ranks of the buckets add their noise at the same time
            for part, share in zip(turn[rank], _shares(buffers[rank], turn[rank]), strict=True):
                add_noise(share, part)
        for bucket_rank, buffer, bucket in zip(bucket_ranks, buffers, turn, strict=True):
            dist.broadcast(buffer, src=bucket_rank, group=group)
            for part, share in zip(bucket, _shares(buffer, bucket), strict=True):
                flat[part.tensor][part.start : part.stop] = share


def buckets(sizes: Sequence[int], ranks: int, *, hardened: bool) -> list[list[Part]]:
    """Parts in buckets of at most 16 MB in float64, at least one for every rank if there are as many parts."""
    most = max(CHUNK, min(_MOST_IN_A_BUCKET, sum(sizes) // ranks))
    found: list[list[Part]] = [[]]
    held = 0
    for part in parts(sizes, hardened=hardened):
        if found[-1] and held + part.stop - part.start > most:
            found.append([])
            held = 0
        found[-1].append(part)
        held += part.stop - part.start
    return found


def _turns(found: list[list[Part]], ranks: int) -> list[list[list[Part]]]:
    """One bucket for every rank at a time."""
    return [found[first : first + ranks] for first in range(0, len(found), ranks)]


def _shares(buffer: Tensor, bucket: Sequence[Part]) -> tuple[Tensor, ...]:
    return buffer.split([part.stop - part.start for part in bucket])
