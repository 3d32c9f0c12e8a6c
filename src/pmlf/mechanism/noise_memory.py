"""The noise of each release: white, or shaped by the noise of the releases before it."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, final

import torch
from torch import Tensor

from pmlf.mechanism.noise import Randomness
from pmlf.mechanism.shapes import NoiseShape


@final
class NoiseMemory:
    """x_t = (w_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0 with w_t ~ N(0, I): x = shape^-1 w, step by step.

    It holds the last b - 1 noise vectors. They are secret: whoever has them can subtract part of the next noise. So no
    state dict contains them, and a copy starts without them.

    A memory that starts empty, after a restart, in a copy or in a forked process, keeps the guarantee. The matrix of
    all releases is then block-diagonal, with the first rows and columns of `shape` in each block. Its columns are
    columns of `shape`, some of them cut off at the end of a block, so their norms are at most 1; and two columns with
    the same row are in one block and less than b steps apart, as in `shape`. That is all that the guarantee needs. Two
    copies that went on with the same memory would break it: a record's earlier part would then be in the next releases
    of both.

    Seeded noise can be computed again, so a seeded step that is restored computes its memory from the first release on
    and goes on with the same numbers.

    Args:
        shape: The noise shape.
        randomness: The source of w.

    >>> from pmlf.mechanism.noise import SeededRandomness
    >>> memory = NoiseMemory(NoiseShape((0.8, 0.6)), SeededRandomness(0))
    >>> first, second = torch.zeros(1000), torch.zeros(1000)
    >>> memory.add_([first], 1.0, release=0)
    >>> memory.add_([second], 1.0, release=1)
    >>> white = 0.8 * second + 0.6 * first
    >>> bool(0.9 < white.std() < 1.1), bool((first * second).mean() < -1)
    (True, True)
    """

    def __init__(self, shape: NoiseShape, randomness: Randomness) -> None:
        self._shape = shape
        self._randomness = randomness
        self._past: deque[list[Tensor]] = deque()  # unit noise, newest first, one tensor per parameter
        self._next = 0  # the release that the memory is for
        self._process = os.getpid()  # a fork copies the memory, and only one of the two may go on with it

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_past": deque(), "_next": 0}

    @property
    def vectors(self) -> int:
        """The number of noise vectors in memory."""
        return len(self._past)

    @torch.no_grad()
    def add_(
        self, values: list[Tensor], std: float, *, release: int, hardened: bool = False, wide: bool = False
    ) -> None:
        """values += std * x_t, in place.

        Args:
            values: One contiguous tensor per parameter.
            std: The standard deviation of the noise before shaping: noise multiplier times sensitivity.
            release: The number of the release, t. Releases follow each other.
            hardened: Mitigate floating-point attacks, as in `Stream.add_gaussian_`.
            wide: Keep the noise in float64, for values that are released in float64: noise with the digits of float32
                would leave the last digits of a sum as they are. Hardened noise is in float64 anyway.
        """
        if std == 0.0:
            return
        if self._shape.bands == 1:
            stream = self._randomness.stream("noise", release)
            for value in values:
                stream.add_gaussian_(value, std, hardened=hardened)
            return
        if self._next != release or self._process != os.getpid():
            self._begin_again(values, release, hardened, wide)
        for value, noise in zip(values, self._advance(values, release, hardened, wide), strict=True):
            value.add_(noise, alpha=std)

    def _begin_again(self, like: list[Tensor], release: int, hardened: bool, wide: bool) -> None:
        """Start empty, or with what the seed gives."""
        self._past.clear()
        self._process = os.getpid()
        for earlier in range(release) if self._randomness.reproducible else ():
            self._advance(like, earlier, hardened, wide)

    def _advance(self, like: list[Tensor], release: int, hardened: bool, wide: bool) -> list[Tensor]:
        """The next noise vector, which is also the newest in memory."""
        first, *others = self._shape.coefficients
        stream = self._randomness.stream("noise", release)
        oldest = self._past.pop() if len(self._past) == len(others) else None
        newest = []
        for place, value in enumerate(like):
            if oldest is None:
                double = (hardened or wide) and value.device.type != "mps"  # which has no float64
                noise = torch.zeros(value.shape, dtype=torch.float64 if double else torch.float32, device=value.device)
            else:
                noise = oldest[place].mul_(-others[-1] / first)
            for coefficient, past in zip(others, self._past, strict=False):
                noise.add_(past[place], alpha=-coefficient / first)
            stream.add_gaussian_(noise, 1.0 / first, hardened=hardened)
            newest.append(noise)
        self._past.appendleft(newest)
        self._next = release + 1
        return newest
