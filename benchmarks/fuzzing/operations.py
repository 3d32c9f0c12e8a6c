"""Layers that use their weights by operations, as people write them: by einsum, in expressions, by index, in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing.layers import Layer

_EXPERTS = 3
_POSITIONS = 64  # more than a sample has tokens


def _matrix(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes) / sizes[-1] ** 0.5)


class Einsum(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _matrix(width, width)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        return torch.einsum("...d,de->...e" if rows.ndim == 2 else "ntd,de->nte", rows, self.weight).tanh()


class Heads(Layer):
    """Every head has a matrix of its own, by one product of a stack of matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _matrix(2, width // 2, width // 2)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        heads = rows.reshape(-1, 2, rows.shape[-1] // 2).transpose(0, 1)
        return torch.bmm(heads, self.weight).transpose(0, 1).reshape(rows.shape) + rows


class Standardised(Layer):
    """A weight that is computed from its parameters in every pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.gain = _matrix(width, width), nn.Parameter(torch.zeros(width, 1))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(rows, centred * self.gain.exp()).tanh()


class Experts(Layer):
    """Every row chooses a matrix by its own numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, _EXPERTS), _matrix(_EXPERTS, width, width)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.gate(rows).softmax(-1)
        best = scores.argmax(-1)
        found = (rows.unsqueeze(-2) @ self.experts[best]).squeeze(-2)
        return rows + found * scores.gather(-1, best.unsqueeze(-1))


class Recurrent(Layer):
    def __init__(self, width: int, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.inner = kind(width, width, batch_first=True)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        found: Tensor = self.inner(rows if rows.ndim == 3 else rows.unsqueeze(1))[0]
        # in the samples' order in memory: dropout draws in that order, and a sample more at the end must leave the
        # others' draws as they are, or the oracle would compare different draws
        return found.reshape(rows.shape).contiguous()


class PositionTable(Layer):
    """A row for every position, without a batch axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = _matrix(_POSITIONS, width)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        return rows + self.table[: rows.shape[1]]


class RelativePositions(Layer):
    """Tokens are averaged by weights that follow from their distance alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(2 * _POSITIONS))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        places = torch.arange(rows.shape[1])
        scores = self.biases[places[:, None] - places + _POSITIONS]  # (tokens, tokens)
        if mask is not None:
            scores = scores.masked_fill(~mask.bool()[:, None], -30.0)  # (samples, tokens, tokens)
        return rows + scores.softmax(-1) @ rows


class InPlace(Layer):
    """A bias that is added to half of a tensor's columns, in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(width, width), nn.Parameter(torch.randn(width // 2))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        found: Tensor = self.inner(rows).clone()
        found[..., : len(self.bias)].add_(self.bias)
        return found.tanh()


class Checkpointed(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        found: Tensor = checkpoint(self._part, rows, use_reentrant=False)
        return found

    def _part(self, rows: Tensor) -> Tensor:
        return (self.inner(rows) * self.scale).tanh()


MAKERS: dict[str, Callable[[int], Layer]] = {
    "einsum": Einsum,
    "heads": Heads,
    "standardised": Standardised,
    "experts": Experts,
    "lstm": lambda width: Recurrent(width, nn.LSTM),
    "gru": lambda width: Recurrent(width, nn.GRU),
    "position table": PositionTable,
    "relative positions": RelativePositions,
    "in place": InPlace,
    "checkpointed": Checkpointed,
}
