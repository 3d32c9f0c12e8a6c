"""Whether parameters are still the ones they were: `p.data` can be changed without a new version."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Fingerprint = tuple[tuple[int, int], ...]

_ROW = 4096  # words: their weights stay in the cache
_WEIGHTS = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0)) | 1


def fingerprint(parameters: Iterable[Tensor]) -> Fingerprint:
    """Version and a digest of the bits of each parameter."""
    return tuple((p._version, bit_digest(p.detach())) for p in parameters)


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
