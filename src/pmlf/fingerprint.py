"""Whether parameters are still the ones they were: `p.data` can be changed without a new version."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Fingerprint = tuple[tuple[int, int], ...]


def fingerprint(parameters: Iterable[Tensor]) -> Fingerprint:
    """Version and a sum of the bits of each parameter."""
    return tuple((p._version, bit_sum(p.detach())) for p in parameters)


def bit_sum(tensor: Tensor) -> int:
    """Sum of a tensor's memory in 64-bit words, modulo 2^64: no conversion, so no copy."""
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat, each = tensor.reshape(-1), 8 // tensor.element_size()
    if flat.storage_offset() % each:  # in the middle of a word
        flat = flat.clone()
    odd = flat.numel() % each
    if not odd:
        return int(flat.view(torch.int64).sum())
    return int(flat[:-odd].view(torch.int64).sum()) + int(flat[-odd:].view(torch.uint8).sum())
