"""Whether parameters are still the ones they were: `p.data` can be changed without a new version."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pmlf.engine.arithmetic import on_host
from pmlf.engine.questions import Questions

_ROW = 1024  # words: their weights stay in the cache
_WEIGHTS = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0)) | 1


class Fingerprint(NamedTuple):
    """The version of each of some parameters, and a digest of its bits on their device."""

    versions: tuple[int, ...]
    digests: Tensor  # (parameters,)

    def changed(self, now: Fingerprint) -> Tensor:
        """Which parameters have other bits now, as flags on their device."""
        return self.digests != now.digests


def fingerprint(parameters: Iterable[Tensor]) -> Fingerprint:
    """The fingerprint of some parameters, computed without reading anything from their device."""
    given = list(parameters)
    if not given:
        return Fingerprint((), torch.zeros(0, dtype=torch.int64))
    digests = [digest(parameter.detach()) for parameter in given]
    return Fingerprint(
        tuple(parameter._version for parameter in given),
        torch.stack([each.to(digests[0].device, non_blocking=True) for each in digests]),
    )


def refuse_other_iterate(before: Fingerprint, now: Fingerprint, questions: Questions) -> None:
    """Parameters must stay as they are between accumulate and release; their bits are asked about."""

    def refuse() -> None:
        raise RuntimeError(
            "parameters changed between accumulate and release, so the pending sum is of another iterate: call "
            "optimizer.step() only after release(), or discard() the sum"
        )

    if before.versions != now.versions:
        refuse()
    questions.refuse(before.changed(now).any(), refuse)


def refuse_written(parameters: Mapping[str, Tensor], before: Fingerprint) -> None:
    """Forward passes must leave every parameter unchanged, bit by bit.

    The first passes over a model are checks, which restore what was written. Keeping a copy at every later step would
    cost as much memory as the gradients do, so here a parameter that was written is filled with NaN.
    """
    flags = before.changed(fingerprint(parameters.values())).tolist()
    changed = [name for name, flag in zip(parameters, flags, strict=True) if flag]
    for name in changed:
        parameters[name].data.fill_(math.nan)
    if changed:
        raise RuntimeError(
            f"the forward pass wrote into the parameter {changed[0]!r}, which would carry the data without noise: it "
            "is filled with NaN now. Change the model so that it does not write its parameters, and load a checkpoint"
        )


def summary(tensors: Iterable[Tensor]) -> int:
    """A 63-bit number from the bits of all tensors: the same in every process that holds the same."""
    text = " ".join(map(str, fingerprint(tensors).digests.tolist()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def bit_digest(tensor: Tensor) -> int:
    """`digest`, read."""
    return int(digest(tensor))


def digest(tensor: Tensor) -> Tensor:
    """A number from a tensor's memory in 64-bit words and their places, modulo 2^64; no copy is made.

    It is cheap, not cryptographic: a sum of words with odd weights, so that one word that changes always changes it.
    Numbers that change places, or many that change, leave it as it was by rare chance only.
    """
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat, each = tensor.reshape(-1), 8 // tensor.element_size()
    if flat.storage_offset() % each:  # in the middle of a word
        flat = flat.clone()
    odd = flat.numel() % each
    words = (flat[:-odd] if odd else flat).view(torch.int64)
    if each == 1:  # modulo 2^64 the signs of two float64 would make up for each other: put them into lower bits too
        words = words ^ (words >> 32)
    found = _of_words(words)
    return found if not odd else found + 31 * flat[-odd:].view(torch.uint8).sum()


def _of_words(words: Tensor) -> Tensor:
    weights = _weights(words.device)
    if len(words) <= _ROW:
        return (words * weights[: len(words)]).sum()
    whole = len(words) // _ROW
    rows = words[: whole * _ROW].view(whole, _ROW)
    numbers = torch.arange(1, 2 * whole, 2, device=words.device)
    if on_host(words):
        found = ((rows @ weights) * numbers).sum()
    else:  # accelerators have no products of integers
        found = (rows.sum(1) * numbers).sum() + (rows.sum(0) * weights).sum()
    rest = words[whole * _ROW :]
    return found + 3 * _of_words(rest) if len(rest) else found


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Odd numbers, one for each word of a row; kept on every device where they are used."""
    return _WEIGHTS.to(device)
