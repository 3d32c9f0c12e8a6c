"""Whether parameters are still the ones they were: `p.data` can be changed without a new version."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Fingerprint = tuple[tuple[int, int], ...]

_ROW = 4096  # words: their weights stay in the cache
_WEIGHTS = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0)) | 1


def fingerprint(parameters: Iterable[Tensor]) -> Fingerprint:
    """Version and a digest of the bits of each parameter."""
    return tuple((p._version, bit_digest(p.detach())) for p in parameters)


def refuse_written(parameters: Mapping[str, Tensor], before: Fingerprint) -> None:
    """Forward passes must leave every parameter unchanged, bit by bit.

    The first passes over a model are checks, which restore what was written. Keeping a copy at every later step would
    cost as much memory as the gradients do, so here a parameter that was written is filled with NaN.
    """
    bits = zip(parameters, fingerprint(parameters.values()), before, strict=True)
    changed = [name for name, (_, now), (_, earlier) in bits if now != earlier]
    for name in changed:
        parameters[name].data.fill_(math.nan)
    if changed:
        raise RuntimeError(
            f"the forward pass wrote into the parameter {changed[0]!r}, which would carry the data without noise: it "
            "is filled with NaN now. Change the model so that it does not write its parameters, and load a checkpoint"
        )


def summary(tensors: Iterable[Tensor]) -> int:
    """A 63-bit number from the bits of all tensors: the same in every process that holds the same."""
    text = " ".join(str(bit_digest(tensor.detach())) for tensor in tensors)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def bit_digest(tensor: Tensor) -> int:
    """A number from a tensor's memory in 64-bit words and their places, modulo 2^64; no copy is made.

    It is cheap, not cryptographic: weighted sums over rows and over columns of the words. Numbers that change places
    change it too, unless every row and every column keeps its sum.
    """
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat, each = tensor.reshape(-1), 8 // tensor.element_size()
    if flat.storage_offset() % each:  # in the middle of a word
        flat = flat.clone()
    odd = flat.numel() % each
    words = (flat[:-odd] if odd else flat).view(torch.int64)
    digest = _of_words(words)
    return digest if not odd else digest + 31 * int(flat[-odd:].view(torch.uint8).sum())


def _of_words(words: Tensor) -> int:
    weights = _WEIGHTS.to(words.device)
    if len(words) <= _ROW:
        return int((words * weights[: len(words)]).sum())
    whole = len(words) // _ROW
    rows = words[: whole * _ROW].view(whole, _ROW)
    of_rows = rows.sum(1) * torch.arange(1, 2 * whole, 2, device=words.device)
    return int(of_rows.sum() + (rows.sum(0) * weights).sum()) + 3 * _of_words(words[whole * _ROW :])
