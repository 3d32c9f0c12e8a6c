"""Randomness: AES-CTR key streams, keyed by the operating system for privacy or by a seed for experiments.

Every random number comes from a stream with one purpose, `randomness.stream("noise", step)`. `SecureRandomness` gives
each stream a fresh key of the operating system and keeps none, so no stream can be replayed, copied, forked or saved.
`SeededRandomness` derives the key from (seed, purpose, numbers).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from pmlf.basics.arguments import is_number, require_count
from pmlf.basics.generators import generator_states

CHUNK = 1 << 17  # Gaussians computed at a time: the work arrays stay in cache
LARGEST_STD = 1e30  # float32 holds any noise of this standard deviation
SUMMANDS = 4  # Gaussians in a hardened Gaussian
_MOST_WORDS = 1 << 33  # 64 GiB
_ZEROS = bytes(8 * CHUNK)
_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52  # the exponent bits of a float64 in [1, 2)


class Stream:
    """The key stream of AES-256 in counter mode: uniform bits that never repeat within a stream.

    Args:
        key: The 32-byte key.

    >>> Stream(bytes(32)).words(1) == Stream(bytes(32)).words(1)
    array([ True])
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` uniform 64-bit words."""
        require_count("count", count, "it counts 64-bit words", least=0, most=_MOST_WORDS)
        return self._fill(np.empty(count, dtype=np.uint64))

    def seek(self, word: int) -> None:
        """Continue at a word of the stream, counted from its start. `word` is even: a block holds two words.

        >>> one, other = Stream(bytes(32)), Stream(bytes(32))
        >>> other.seek(4)
        >>> one.words(6)[4:] == other.words(2)
        array([ True,  True])
        """
        assert word % 2 == 0
        self._cipher.reset_nonce((word // 2).to_bytes(16))

    def _fill(self, found: NDArray[np.uint64]) -> NDArray[np.uint64]:
        room = memoryview(found.data).cast("B")
        for start in range(0, len(room), 8 * CHUNK):
            part = room[start : start + 8 * CHUNK]
            self._cipher.update_into(_ZEROS[: len(part)], part)
        return found

    def seed(self) -> int:
        """A random 63-bit number, for generators that take a seed."""
        return int(self.words(1)[0] >> np.uint64(1))

    def chosen(self, population: int, rate: float) -> NDArray[np.int64]:
        """A Poisson draw: each of n records joins independently with probability q, exact to 2^-64.

        Args:
            population: The number of records, n.
            rate: The sampling rate q, in [0, 1].

        Returns:
            The indices drawn, in increasing order.

        Raises:
            ValueError: An argument is out of range.

        >>> Stream(bytes(32)).chosen(5, 1.0).tolist()
        [0, 1, 2, 3, 4]
        """
        require_count("population", population, "it counts the records to draw from", least=0, most=_MOST_WORDS)
        if not (is_number(rate) and 0.0 <= rate <= 1.0):
            raise ValueError(f"rate={rate} is not in [0, 1]: it is the probability with which a record is drawn")
        threshold = int(rate * 2.0**64)
        if threshold >= 2**64:
            return np.arange(population)
        return np.flatnonzero(self.words(population) < np.uint64(threshold))

    def add_gaussian_(self, tensor: Tensor, std: float, *, hardened: bool = False) -> None:
        """tensor += std * N(0, I), in place: Box-Muller in float64 on 52-bit uniforms.

        Args:
            tensor: A contiguous floating-point tensor.
            std: The standard deviation, from 0 to 1e30.
            hardened: Mitigate floating-point attacks. Each Gaussian is half the sum of four (Holohan & Braghin 2021,
                n=2), so a released value does not reveal which uniforms produced it. It is added in float64 and
                rounded once. The values are still floating-point numbers, so this is not a proof.

        Raises:
            ValueError: std is out of range, or the tensor is not contiguous or not floating-point.
        """
        if not (is_number(std) and 0.0 <= std <= LARGEST_STD):
            raise ValueError(f"std={std} is not a standard deviation of noise: give a number from 0 to {LARGEST_STD:g}")
        if not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ValueError(
                f"a tensor of dtype {tensor.dtype} and strides {tensor.stride()} was given: noise is added to "
                "contiguous real floating-point tensors only"
            )
        std = float(std)
        flat = tensor.detach().view(-1)
        work = _Work(min(CHUNK, flat.numel()), SUMMANDS if hardened else 1)
        for start in range(0, flat.numel(), CHUNK):
            target = flat[start : start + CHUNK]
            noise = self._gaussians(target.numel(), work, 0)
            if hardened:
                for summand in range(1, SUMMANDS):
                    noise += self._gaussians(target.numel(), work, summand)
                noise *= std / math.sqrt(SUMMANDS)
            noise = _sent(noise if hardened else noise.to(target.dtype), target.device)
            if hardened and noise.device != target.device:  # which has no float64
                target.copy_(noise.add_(target.cpu()))
            elif hardened:
                target.copy_(noise.add_(target))
            else:
                target.add_(noise.to(target), alpha=std)

    def _gaussians(self, count: int, work: _Work, summand: int) -> Tensor:
        """Standard normal numbers, in one of the work arrays; the first summand has an array of its own."""
        pairs = (count + 1) // 2
        bits = torch.from_numpy(self._fill(work.words[: 2 * pairs]).view(np.int64))
        uniforms = bits.bitwise_and_(_MANTISSA).bitwise_or_(_ONE).view(torch.float64)  # in [1, 2)
        # 2 - u is in (0, 1], so its logarithm is finite.
        radius = uniforms[:pairs].neg_().add_(2.0).log_().mul_(-2.0).sqrt_()
        angle = uniforms[pairs:].mul_(2.0 * math.pi)
        found = work.gaussians[min(summand, 1)]
        torch.cos(angle, out=found[:pairs]).mul_(radius)
        torch.sin(angle, out=found[pairs : 2 * pairs]).mul_(radius)
        return found[:count]


def _sent(noise: Tensor, device: torch.device) -> Tensor:
    """A chunk of noise on the device that it is added on; on the CPU, if the device has no float64.

    To CUDA it goes from page-locked memory, which torch keeps until the copy is done: while the device copies and adds
    one chunk, the host computes the next, and waits for nothing.
    """
    if device.type in ("cpu", "mps"):
        return noise
    locked = noise.pin_memory() if device.type == "cuda" else noise
    return locked.to(device, non_blocking=device.type == "cuda")


class _Work:
    """Arrays that all chunks share: allocating fresh memory costs more than the arithmetic."""

    def __init__(self, count: int, summands: int) -> None:
        even = count + count % 2
        self.words = np.empty(even, dtype=np.uint64)
        self.gaussians = torch.empty(min(summands, 2), even, dtype=torch.float64)  # the sum so far, and the next


def gaussian_words(count: int, *, hardened: bool) -> int:
    """The number of words of a stream that `add_gaussian_` takes for a tensor of `count` numbers."""
    return (count + count % 2) * (SUMMANDS if hardened else 1)


@dataclass(frozen=True)
class SecureRandomness:
    """Streams with a fresh 32-byte key of the operating system each. It holds no key that could leak or be reused.

    >>> SecureRandomness().stream("noise", 0).seed() == SecureRandomness().stream("noise", 0).seed()
    False
    """

    reproducible = False  # whether the noise can be computed again, and subtracted, from a seed
    description = "AES-256-CTR, a fresh operating-system key for every draw"
    identity = None  # what tells one seed from another without revealing it

    def stream(self, purpose: str, *numbers: int) -> Stream:
        """A new stream; the purpose and numbers do not matter."""
        return Stream(os.urandom(32))

    def seed_for(self, purpose: str, *numbers: int) -> int:
        """A random 63-bit number, for generators that take a seed."""
        return int.from_bytes(os.urandom(8)) >> 1


@dataclass(frozen=True)
class SeededRandomness:
    """Streams that are functions of (seed, purpose, numbers). For experiments only: do not release such a model.

    Attributes:
        seed: Any whole number.

    >>> SeededRandomness(7).seed_for("dropout", 0) == SeededRandomness(7).seed_for("dropout", 0)
    True
    >>> SeededRandomness(7).seed_for("dropout", 0) == SeededRandomness(7).seed_for("dropout", 1)
    False
    """

    seed: int

    reproducible = True
    description = "AES-256-CTR keyed by a seed: reproducible, so not for release"

    def stream(self, purpose: str, *numbers: int) -> Stream:
        """The stream of this purpose and these numbers, from its start."""
        text = "/".join(["pmlf", str(self.seed), purpose, *map(str, numbers)])
        return Stream(hashlib.blake2b(text.encode(), digest_size=32).digest())

    @property
    def identity(self) -> int:
        """A number that follows from the seed and does not reveal it."""
        return self.seed_for("identity")

    def seed_for(self, purpose: str, *numbers: int) -> int:
        """A 63-bit number that depends on the seed, purpose and numbers, for generators that take a seed."""
        return self.stream(purpose, *numbers).seed()


class SharedRandomness:
    """Streams that every process with the same secret key has in common; the key stays in memory.

    Args:
        key: 32 bytes of the operating system.

    >>> one, other = SharedRandomness(bytes(32)), SharedRandomness(bytes(32))
    >>> one.stream("sampling", 3).seed() == other.stream("sampling", 3).seed()
    True
    """

    reproducible = False

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __getstate__(self) -> None:
        raise TypeError("a key is secret: it cannot be copied or pickled")

    def stream(self, purpose: str, *numbers: int) -> Stream:
        """The stream of this purpose and these numbers, from its start."""
        text = "/".join(["pmlf", purpose, *map(str, numbers)])
        return Stream(hashlib.blake2b(text.encode(), key=self._key, digest_size=32).digest())


Randomness = SecureRandomness | SeededRandomness


def randomness_from_seed(seed: Any, *, name: str = "seed") -> Randomness:
    """The source of randomness for an argument `seed`.

    Args:
        seed: None for the operating system's randomness; a whole number for experiments.
        name: What the caller's users know the argument as.

    Returns:
        The source.

    Raises:
        ValueError: It is neither.

    >>> randomness_from_seed(None).reproducible, randomness_from_seed(7).reproducible
    (False, True)
    """
    if seed is None:
        return SecureRandomness()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"{name}={seed!r} is not a whole number or None: None gives cryptographic noise")
    return SeededRandomness(seed)


def randomness_from(generator: torch.Generator | Randomness | None) -> Randomness:
    """The source of randomness for a `generator` argument.

    Args:
        generator: None for the operating system's randomness; a seeded generator for experiments, from which 256 bits
            are drawn as a seed; or a source of randomness, which is returned unchanged.

    Returns:
        The source.

    Raises:
        ValueError: It is none of these.

    >>> randomness_from(None).reproducible, randomness_from(torch.Generator().manual_seed(1)).reproducible
    (False, True)
    """
    if generator is None:
        return SecureRandomness()
    if isinstance(generator, (SecureRandomness, SeededRandomness)):
        return generator
    if not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator is a {type(generator).__name__}: give a seeded torch.Generator (for experiments) or None "
            "(cryptographic noise keyed by the operating system)"
        )
    words = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator, device=generator.device).tolist()
    return SeededRandomness(int.from_bytes(b"".join(w.to_bytes(8, "little", signed=True) for w in words)))


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, which dropout uses, inside a `with` block; restore them at its end.

    Args:
        seed: The seed.
        device: The device whose generator is seeded beside the CPU's.
    """
    generator, states = torch.default_generator, generator_states(device)
    accelerator = None if len(states) == 1 else torch.get_device_module(device)
    generator.manual_seed(seed)  # torch.manual_seed takes a millisecond and reseeds every device
    if accelerator is not None:
        accelerator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(states[0])
        if accelerator is not None:
            accelerator.set_rng_state(states[1])


def keyed_uniforms(stream: Stream, samples: Tensor, draws: int) -> Tensor:
    """Uniforms in [0, 1), one row per sample. Row i depends on the stream's key and samples[i] alone.

    So the augmentation of a sample does not depend on how a logical batch is cut into micro-batches.

    Args:
        stream: The stream of a step's augmentation.
        samples: The samples' indices.
        draws: The number of uniforms per sample.

    Returns:
        A float64 tensor of shape (samples, draws).
    """
    key = np.uint64(stream.words(1)[0])
    columns = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    rows = _mixed(_mixed(samples.cpu().numpy().astype(np.uint64)) ^ key)
    return torch.from_numpy((_mixed(rows[:, None] + columns) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection that separates neighbouring integers. Not cryptographic."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
